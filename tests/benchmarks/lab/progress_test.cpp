// SPDX-License-Identifier: MIT
#include "records/progress.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "catch.hpp"

namespace {

using lab::progress;
using lab::progress_bar;
using lab::progress_text;

constexpr progress half_way{.step = 50, .steps = 100, .loss = 2.3456, .seconds_a_step = 1.25};

/// What is said to be left of a run whose last step takes so long.
std::string time_left(double seconds_a_step) {
  const std::string text =
      progress_text({.step = 9, .steps = 10, .loss = 1, .seconds_a_step = seconds_a_step}, 60);
  const std::size_t end = text.find(" left");
  const std::size_t begin = text.find("1.000") + 5;
  const std::string padded = text.substr(begin, end - begin);
  return padded.substr(padded.find_first_not_of(' '));
}

TEST_CASE("progress: a bar is filled as far as the run is") {
  CHECK(progress_bar(0, 3, 10) == "[..........]");
  CHECK(progress_bar(1, 3, 10) == "[###.......]");
  CHECK(progress_bar(2, 3, 10) == "[######....]");
  CHECK(progress_bar(3, 3, 10) == "[##########]");
  CHECK(progress_bar(999, 1000, 10) == "[#########.]");
}

TEST_CASE("progress: the line of a terminal of 80 columns") {
  CHECK(progress_text(half_way, 79) ==
        "[############.............]  50/100  loss  2.346     01:03 left  1.250 s a step");
}

TEST_CASE("progress: a wide terminal has a longer bar, up to 40 characters") {
  const std::string text = progress_text(half_way, 1000);
  CHECK(text == progress_bar(50, 100, 40) + "  50/100  loss  2.346     01:03 left  1.250 s a step");
}

TEST_CASE("progress: a narrow terminal has what matters most, and never more than fits") {
  CHECK(progress_text(half_way, 60) == " 50/100  loss  2.346     01:03 left  1.250 s a step");
  CHECK(progress_text(half_way, 50) == " 50/100  loss  2.346     01:03 left");
  CHECK(progress_text(half_way, 30) == " 50/100  loss  2.346");
  CHECK(progress_text(half_way, 10) == " 50/100");
  // Half a number would be another one.
  CHECK(progress_text(half_way, 6).empty());
  for (std::size_t columns = 0; columns < 200; ++columns) {
    CHECK(progress_text(half_way, columns).size() <= columns);
  }
}

TEST_CASE("progress: the line keeps its length while a run goes on") {
  progress now{.step = 1, .steps = 2000, .loss = 10, .seconds_a_step = 4};
  const std::size_t length = progress_text(now, 79).size();
  for (; now.step <= now.steps; ++now.step) CHECK(progress_text(now, 79).size() == length);
}

TEST_CASE("progress: time left in minutes, hours and days") {
  CHECK(time_left(0) == "00:00");
  CHECK(time_left(0.4) == "00:00");
  CHECK(time_left(59.6) == "01:00");
  CHECK(time_left(3599.4) == "59:59");
  CHECK(time_left(3599.6) == "1:00:00");
  CHECK(time_left(360'000 - 1) == "99:59:59");
  CHECK(time_left(10 * 86'400) == "10 days");
  CHECK(time_left(1e15).ends_with(" days"));
}

TEST_CASE("progress: a run that has gone wrong still has a line") {
  const progress wrong{.step = 1,
                       .steps = 10,
                       .loss = std::numeric_limits<double>::quiet_NaN(),
                       .seconds_a_step = std::numeric_limits<double>::infinity()};
  CHECK(progress_text(wrong, 79).find("loss    nan  inf days left") != std::string::npos);
}

}  // namespace
