// SPDX-License-Identifier: MIT
#include "records/progress.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace lab {
namespace {

std::string duration_text(double seconds) {
  constexpr double hour = 3600;
  if (seconds >= 100 * hour) return fmt::format("{:.0f} days", seconds / (24 * hour));
  const long whole = std::lround(seconds);
  const std::string minutes_and_seconds = fmt::format("{:02}:{:02}", whole / 60 % 60, whole % 60);
  return whole < 3600 ? minutes_and_seconds : fmt::format("{}:{}", whole / 3600, minutes_and_seconds);
}

}  // namespace

std::string progress_bar(std::uint64_t done, std::uint64_t all, std::size_t width) {
  const auto filled = static_cast<std::size_t>(done * width / all);
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", width - filled);
}

std::string progress_text(const progress& now, std::size_t columns) {
  constexpr std::size_t least_bar = 10;
  constexpr std::size_t most_bar = 40;
  constexpr std::size_t around_bar = 3;  // its brackets and a space
  const double seconds_left = static_cast<double>(now.steps - now.step) * now.seconds_a_step;
  const std::array<std::string, 3> details = {
      fmt::format("  loss {:>6.3f}", now.loss),
      fmt::format("  {:>8} left", duration_text(seconds_left)),
      fmt::format("  {:.3f} s a step", now.seconds_a_step),
  };

  std::string text = fmt::format("{:>{}}/{}", now.step, fmt::formatted_size("{}", now.steps), now.steps);
  if (text.size() > columns) return {};
  for (const std::string& detail : details) {
    if (text.size() + detail.size() > columns) return text;
    text += detail;
  }
  const std::size_t room = columns - text.size();
  if (room < least_bar + around_bar) return text;
  return progress_bar(now.step, now.steps, std::min(room - around_bar, most_bar)) + " " + text;
}

void progress_line::draw(const progress& now) {
  if (columns_ == 0) return;
  // Not in the last column, after which some terminals go on to the next line.
  const std::string text = progress_text(now, columns_ - 1);
  std::fputs(("\r" + text + "\x1b[K").c_str(), stdout);
  std::fflush(stdout);
  drawn_ = now;
}

void progress_line::print_above(const std::string& rows) {
  const std::optional<progress> below = drawn_;
  clear();
  fmt::print("{}", rows);
  std::fflush(stdout);
  if (below) draw(*below);
}

void progress_line::clear() {
  if (!drawn_) return;
  std::fputs("\r\x1b[K", stdout);
  std::fflush(stdout);
  drawn_.reset();
}

}  // namespace lab
