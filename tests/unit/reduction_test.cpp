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

namespace lamina_test::reduction_test {

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

// Two runs of blocks and a block, taken at once, with gradients added and without, and as a difference.
TEMPLATE_TEST_CASE("reduction: one order wherever the totals come from", "", float, double) {
  std::mt19937 random(42);
  const lamina::layout model = model_of({3, 128 * 4096 + 70, 5});
  std::vector<std::vector<TestType>> gradient;
  std::vector<std::vector<TestType>> zeros;
  for (const std::size_t size : model.sizes()) {
    gradient.push_back(random_fractions<TestType>(random, size));
    zeros.emplace_back(size);
  }
  const auto in_reverse = [](std::size_t tasks, auto&& work) {
    for (std::size_t i = tasks; i-- > 0;) work(i);
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

}  // namespace lamina_test::reduction_test
