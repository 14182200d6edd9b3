// SPDX-License-Identifier: MIT
// Built with -ffast-math, where a compiler takes NaN and infinity for impossible: what must not reach the residual is
// refused all the same. A program of its own, since a test framework does not expect that flag either.
#include <cstdio>
#include <cstdlib>
#include <lamina/lamina.hpp>
#include <lamina/local/local.hpp>

#include "accumulate.hpp"
#include "special_numbers.hpp"
#include "support.hpp"

#if !defined(__FAST_MATH__)
#error "this test is about -ffast-math"
#endif

namespace {

using namespace lamina_test;

int failures = 0;

void check(bool holds, const char* what, std::size_t place = 0) {
  if (holds) return;
  std::fprintf(stderr, "fast_math: %s (%zu)\n", what, place);
  ++failures;
}

template <class T>
bool holds(std::span<const T> elements, T value) {
  return std::ranges::all_of(elements, [&](T each) { return std::memcmp(&each, &value, sizeof each) == 0; });
}

template <class T, class G>
void test_gradients() {
  const std::size_t length = 4096 + 64 + 7;
  const lamina::layout model({{"layer", {length}}});
  std::vector<G> gradient(length, one<G>());
  for (const double momentum : {0.0, 0.5}) {
    lamina::residual_accumulator<T> whole(model, {.momentum = momentum});
    lamina::residual_accumulator<T> each(model,
                                         {.momentum = momentum, .non_finite = lamina::non_finite::skip});
    accumulate(whole, 0, gradient);
    std::size_t left_out = 0;
    for (const G bad : not_finite<G>()) {
      for (std::size_t place = 0; place < length; place += place == 64 ? 3968 : 1) {
        gradient[place] = bad;
        check(throws<lamina::non_finite_gradient>([&] { accumulate(whole, 0, gradient); }), "accepted",
              place);
        accumulate(each, 0, gradient);
        check(each.left_out_elements() == ++left_out, "not left out", place);
        check(each[0][place] == 0, "left out, but not as it was", place);
        each.clear(0);
        gradient[place] = one<G>();
      }
    }
    check(holds(whole[0], T(1)), "the residual was touched");
  }
}

template <class T>
void test_overflow() {
  const lamina::layout model({{"layer", {70}}});
  lamina::residual_accumulator<T> whole(model);
  lamina::residual_accumulator<T> each(model, {.non_finite = lamina::non_finite::skip});
  const T largest = std::numeric_limits<T>::max();
  const std::vector<T> gradient(70, largest);
  for (auto* residual : {&whole, &each}) accumulate(*residual, 0, gradient);
  check(throws<lamina::non_finite_gradient>([&] { accumulate(whole, 0, gradient); }), "overflow accepted");
  accumulate(each, 0, gradient);
  check(each.left_out_elements() == 70, "overflow not left out");
  check(holds(whole[0], largest) && holds(each[0], largest), "overflow touched the residual");
  for (const T bad : not_finite<T>()) {
    std::vector<T> saved(70);
    saved[69] = bad;
    check(throws<std::invalid_argument>([&] { whole.restore(saved, {}); }), "restored");
  }
}

// By a divisor that stays the same, a compiler would multiply by its reciprocal: other bits where it is no power of two.
template <class T>
void test_division() {
  for (const T divisor : {T(2), T(3), T(5), T(7), T(10)}) {
    std::vector<T> elements(4096 + 64 + 7);
    for (std::size_t i = 0; i < elements.size(); ++i) elements[i] = T(0.37) * static_cast<T>(i) + T(1);
    const std::vector<T> before = elements;
    lamina::detail::divide_elements(elements.data(), number<T>(divisor), elements.size());
    for (std::size_t i = 0; i < elements.size(); ++i) {
      volatile T by = divisor;  // read for each by itself
      volatile T quotient = before[i] / by;
      const T expected = quotient;
      check(std::memcmp(&elements[i], &expected, sizeof expected) == 0, "a division by itself", i);
    }
  }
}

void test_thresholds() {
  const std::vector<std::size_t> sizes = {1, 1, 1};
  const double nan_value = not_finite<double>()[0];
  for (std::size_t place = 0; place < 3; ++place) {
    std::vector<double> values = {1, 2, 3};
    values[place] = nan_value;
    check(throws<std::invalid_argument>([&] { (void)lamina::search_threshold(values, sizes, 0.5); }),
          "NaN searched", place);
  }
  check(throws<std::invalid_argument>([&] { lamina::check_drop_ratio(nan_value); }), "a drop ratio of NaN");
  const lamina::layout model({{"a", {1}}, {"b", {2}}});
  const auto build = [&](const lamina::worker_options& options) { lamina::worker<float>(model, options); };
  check(throws<std::invalid_argument>([&] { build({.threshold = nan_value}); }), "a threshold of NaN");
  check(throws<std::invalid_argument>([&] { build({.send_budget = nan_value}); }), "a budget of NaN");
  check(throws<std::invalid_argument>([&] { build({.momentum = nan_value}); }), "a momentum of NaN");
  for (const double bad : not_finite<double>()) {
    check(throws<std::invalid_argument>([&] { lamina::outer_optimizer<float>(model, {.momentum = bad}); }),
          "a bad outer momentum");
    check(throws<std::invalid_argument>([&] { lamina::outer_optimizer<float>(model, {.rate = bad}); }),
          "a bad outer rate");
  }
  lamina::worker<float> worker(model);
  auto step = worker.add(std::vector<std::vector<float>>{{1}, {1, 1}});
  step.values()[1] = nan_value;
  step.select();
  check(!step.is_sent(0) && step.is_sent(1), "a value of NaN is not sent first");
}

// Saved states without a checksum, with one number changed.
void test_states() {
  const lamina::layout model({{"a", {1}}, {"b", {2}}});
  lamina::worker<float> worker(model);
  (void)worker.add(std::vector<std::vector<float>>{{1}, {1, 1}});
  check(!worker.add(std::vector<std::vector<float>>{{1}, {1, not_finite<float>()[0]}}),
        "a batch is accepted");
  const std::vector<std::byte> saved = worker.save();
  constexpr std::size_t flags = 7, threshold = 40, allowance = 48, checksum = 56, first_element = 64 + 4 * 8;
  const auto with = [&](std::size_t at, auto value) {
    std::vector<std::byte> bytes = saved;
    bytes[flags] &= std::byte{0xfe};
    std::fill_n(bytes.begin() + checksum, 8, std::byte{0});
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return bytes;
  };
  check(!throws<std::exception>([&] { worker.load(with(threshold, 1.0)); }), "a good state is refused");
  const auto refused = [&](const std::vector<std::byte>& bytes) {
    const std::vector<std::vector<std::byte>> states = {saved, bytes};
    return throws<std::invalid_argument>([&] { worker.load(bytes); }) &&
           throws<std::invalid_argument>([&] { lamina::merge_states<float>(states, model); });
  };
  check(refused(with(threshold, not_finite<double>()[0])), "a state with a threshold of NaN");
  for (const double bad : not_finite<double>())
    check(refused(with(allowance, bad)), "a state with a bad allowance");
  for (const float bad : not_finite<float>())
    check(refused(with(first_element, bad)), "a state with a bad element");
  const double largest = std::numeric_limits<double>::max();
  const std::vector<std::vector<std::byte>> too_large = {with(allowance, largest),
                                                         with(allowance, largest / 2)};
  check(throws<std::invalid_argument>([&] { lamina::merge_states<float>(too_large, model); }),
        "allowances that overflow");
}

}  // namespace

int main() {
  test_gradients<float, float>();
  test_gradients<double, double>();
  test_gradients<float, lamina::float16>();
  test_gradients<float, lamina::bfloat16>();
  test_overflow<float>();
  test_overflow<double>();
  test_division<float>();
  test_division<double>();
  test_thresholds();
  test_states();
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
