// SPDX-License-Identifier: MIT
#include "lamina/threshold.hpp"

#include "lamina/decision.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"

#include <cmath>
#include <limits>
#include <random>

#include "catch.hpp"
#include "support.hpp"

namespace lamina_test::threshold_test {

namespace {
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
const std::vector<double> ratios = {0, 0.01, 0.07, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1};
}  // namespace

TEST_CASE("threshold: equals a literal stable sort, with ties and empty layers") {
  std::mt19937 random(11);
  lamina::threshold_search kept;
  for (int round = 0; round < 3000; ++round) {
    const std::size_t layers = below(random, round % 10 == 0 ? 200 : 9);
    std::vector<double> values(layers);
    std::vector<std::size_t> sizes(layers);
    const std::size_t distinct = 1 + below(random, 12);  // few distinct values: ties
    for (double& value : values) value = static_cast<double>(below(random, distinct)) * 0.25 - 0.5;
    for (std::size_t& size : sizes) size = below(random, 4) == 0 ? 0 : below(random, 50);
    for (const double ratio : ratios) {
      const double expected = literal_algorithm_1(values, sizes, ratio);
      REQUIRE(same_bits(lamina::search_threshold(values, sizes, ratio), expected));
      REQUIRE(same_bits(kept(values, sizes, ratio), expected));
    }
  }
}

TEST_CASE("threshold: many layers, sorted, reversed and all tied") {
  const std::size_t layers = 100000;
  std::vector<std::size_t> sizes(layers, 3);
  std::vector<double> values(layers);
  std::iota(values.begin(), values.end(), 0.0);
  CHECK(lamina::search_threshold(values, sizes, 0.95) == 95000);
  std::ranges::reverse(values);
  CHECK(lamina::search_threshold(values, sizes, 0.95) == 95000);
  CHECK(lamina::search_threshold(std::vector<double>(layers, 7), sizes, 0.95) == 7);
}

TEST_CASE("threshold: infinite values are values") {
  const std::vector<double> values = {infinity, -infinity, 0};
  const std::vector<std::size_t> sizes = {1, 1, 1};
  CHECK(lamina::search_threshold(values, sizes, 0) == -infinity);
  CHECK(lamina::search_threshold(values, sizes, 0.4) == 0);
  CHECK(lamina::search_threshold(values, sizes, 0.9) == infinity);
}

TEST_CASE("threshold: a search without sense is refused by name, and the next one is as good as new") {
  lamina::threshold_search kept;
  const auto refused = [&](const std::vector<double>& values, const std::vector<std::size_t>& sizes,
                           double ratio, const std::string& named) {
    const auto message =
        message_of<std::invalid_argument>([&] { (void)lamina::search_threshold(values, sizes, ratio); });
    CHECK(contains(message, named));
    CHECK_THROWS_AS(kept(values, sizes, ratio), std::invalid_argument);
    CHECK(kept(std::vector<double>{2, 1}, std::vector<std::size_t>{1, 1}, 0.0) == 1);
  };
  refused(std::vector<double>(7), std::vector<std::size_t>(5), 0.5, "7 values");
  refused(std::vector<double>(7), std::vector<std::size_t>(5), 0.5, "5 layer sizes");
  refused({1, 2}, {huge, 1}, 0.5, "");
  for (std::size_t place = 0; place < 5; ++place) {
    std::vector<double> values(5, 1.0);
    values[place] = nan_value;
    refused(values, {1, 1, 1, 1, 1}, 0.5, "layer " + std::to_string(place));
  }
  for (const double ratio : {-0.001, 1.001, -1.0, infinity, -infinity, nan_value}) {
    refused({1}, {1}, ratio, "");
    CHECK_THROWS_AS(lamina::check_drop_ratio(ratio), std::invalid_argument);
  }
  CHECK(contains(message_of<std::invalid_argument>([] { lamina::check_drop_ratio(1.5); }), "1.5"));
}

TEST_CASE("threshold: it is never -0, by R or within a budget") {
  lamina::threshold_search search;
  const std::vector<std::size_t> sizes = {10, 10, 10};
  for (const auto& values : {std::vector<double>{-0.0, -0.0, 1}, std::vector<double>{0.0, -0.0, 1},
                             std::vector<double>{-0.0, 0.0, -0.0}}) {
    for (const double elements : {0.0, 10.0, 15.0, 20.0, 25.0}) {
      CHECK(std::signbit(search(values, sizes, elements / 30)) == false);
      search.begin();
      for (std::size_t l = 0; l < sizes.size(); ++l) search.add(values[l], sizes[l]);
      CHECK(std::signbit(search.within(elements).threshold) == false);
    }
  }
  lamina::selector selector(lamina::tiling(model_of({10, 10, 10})), {.send_budget = 0.5});
  selector.decide(1, std::vector<double>{-0.0, 0.0, -0.0});
  CHECK(same_bits(selector.threshold(), 0.0));
}

}  // namespace lamina_test::threshold_test
