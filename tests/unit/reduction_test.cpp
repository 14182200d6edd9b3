// SPDX-License-Identifier: MIT
#include "lamina/representative.hpp"

#include <cmath>
#include <cstddef>
#include <random>
#include <span>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "kernel_cases.hpp"
#include "lamina/local/delta.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

// 2^53, to which a double cannot add 1, and ones, each in a block of its own.
std::vector<float> large_and_ones(std::size_t blocks) {
  std::vector<float> elements(4096 * blocks);
  for (std::size_t block = 0; block < blocks; ++block) elements[4096 * block] = block == 0 ? 0x1p53F : 1;
  return elements;
}

}  // namespace

TEST_CASE("reduction: runs of totals by hand") {
  CHECK(lamina::l1_norm{}(large_and_ones(64)) == 0x1p53);  // one after the other
  CHECK(lamina::l1_norm{}(large_and_ones(65)) == 0x1p53);
  CHECK(lamina::l1_norm{}(large_and_ones(66)) == 0x1p53 + 2);  // together in a run of their own
  CHECK(lamina::l1_norm{}(large_and_ones(128)) == 0x1p53 + 64);
  std::vector<double> totals(64 * 64 + 64, 1);  // the second level has a run of 64 and another of one
  totals[0] = 0x1p53;
  const auto value = [&](std::size_t count) {
    return lamina::detail::finished_value(lamina::l1_norm{}, std::span(totals).first(count), 1);
  };
  CHECK(value(64 * 64) == 0x1p53 + 63 * 64);
  CHECK(value(64 * 64 + 1) == 0x1p53 + 63 * 64);
  CHECK(value(64 * 64 + 64) == 0x1p53 + 64 * 64);
}

TEST_CASE("reduction: any number of totals is combined as the levels say") {
  std::mt19937 random(41);
  const auto fractions = random_fractions<double>(random, telling_counts_of_totals().back());
  const auto check = [&](const auto& functor) {
    for (const std::size_t count : telling_counts_of_totals()) {
      const auto totals = std::span(fractions).first(count);
      const double literal = literal_total_of_totals(
          {totals.begin(), totals.end()}, [&](double a, double b) { return functor.combine(a, b); });
      CAPTURE(count);
      REQUIRE(same_bits(lamina::detail::finished_value(functor, totals, 1), literal));
    }
  };
  check(tells_order{});
  check(lamina::l1_norm{});
  check(lamina::max_abs{});
}

TEST_CASE("reduction: no totals, and none of a layer without elements") {
  CHECK(same_bits(lamina::detail::finished_value(lamina::mean_abs{}, {}, 0), 0.0));
  CHECK(same_bits(lamina::detail::finished_value(tells_order{}, {}, 7), 0.0));
}

// Two runs of blocks and a block, taken at once, with gradients added and alone, and as a difference.
TEMPLATE_TEST_CASE("reduction: one order wherever the totals come from", "", float, double) {
  std::mt19937 random(42);
  const lamina::layout model = model_of({3, 128 * 4096 + 70, 5});
  std::vector<std::vector<TestType>> gradient;
  std::vector<std::vector<TestType>> zeros;
  for (const std::size_t size : model.sizes()) {
    gradient.push_back(random_fractions<TestType>(random, size));
    zeros.emplace_back(size);
  }
  const auto in_reverse = [](std::size_t pieces, auto&& work) {
    for (std::size_t i = pieces; i-- > 0;) work(i);
  };
  const auto check = [&]<class F>(F functor, double expected) {
    CHECK(same_bits(functor(gradient[1]), expected));
    lamina::residual_accumulator<TestType> residual(model);
    CHECK(same_bits(accumulate(residual, 1, gradient[1], functor), expected));
    residual.clear(1);
    CHECK(same_bits(accumulate(residual, 1, gradient[1], functor, in_reverse), expected));
    lamina::worker<TestType, F> worker(model, {}, functor);
    CHECK(same_bits(worker.add(gradient, 1, in_reverse).values()[1], expected));
    lamina::local_delta<TestType, F> delta(model, {}, functor);
    CHECK(same_bits(delta.observe_all(gradient, zeros, in_reverse)[1], expected));
  };
  const std::span<const TestType> elements(gradient[1]);
  check(lamina::l1_norm{}, literal_sum_abs(elements));
  check(lamina::l2_norm{}, std::sqrt(literal_sum_squares(elements)));
  check(signed_mean{}, literal_sum(elements) / static_cast<double>(elements.size()));
}
