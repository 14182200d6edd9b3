// SPDX-License-Identifier: MIT
// Numbers that are hard on a residual, and what it does with them over a long time.
#include <cmath>

#include "accumulate.hpp"
#include "frames.hpp"
#include "lamina/lamina.hpp"
#include "special_numbers.hpp"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace lamina_test::numbers_test {

TEMPLATE_TEST_CASE("numbers: NaN and infinity are refused or left out in every lane, block and tail", "",
                   (std::pair<float, float>), (std::pair<double, double>),
                   (std::pair<float, lamina::float16>), (std::pair<float, lamina::bfloat16>)) {
  using T = typename TestType::first_type;
  using G = typename TestType::second_type;
  for (const std::size_t length : {1, 2, 63, 64, 65, 4095, 4096, 4097, 4096 + 64 + 7}) {
    const lamina::layout model({{"before", {3}}, {"middle", {length}}, {"after", {1}}});
    lamina::residual_accumulator<T> whole(model);
    lamina::residual_accumulator<T> each(model, {.non_finite = lamina::non_finite::skip});
    std::vector<G> gradient(length, one<G>());
    for (auto* residual : {&whole, &each}) accumulate(*residual, 1, gradient);
    std::vector<T> expected(model.elements(), T(0));
    std::fill_n(expected.begin() + 3, length, T(1));
    const std::vector<T> before = expected;
    std::size_t left_out = 0;
    for (const G bad : not_finite<G>()) {
      // Every lane of the first row, every lane and the seams around the end of the first block, every element of the tail.
      for (std::size_t place = 0; place < length; place += place == 63 ? 3969 : 1) {
        gradient[place] = bad;
        if (!throws<lamina::non_finite_gradient>([&] { accumulate(whole, 1, gradient); })) FAIL("accepted");
        const double value = accumulate(each, 1, gradient);
        gradient[place] = one<G>();
        for (std::size_t i = 0; i < length; ++i) expected[3 + i] += i == place ? T(0) : T(1);
        const bool is_untouched = same_bits(whole.elements(), before);
        const bool is_left_out =
            each.left_out_elements() == ++left_out && same_bits(each.elements(), expected);
        const double sum = literal_mean_abs(std::span<const T>(expected).subspan(3, length));
        if (!is_untouched || !is_left_out || !same_bits(value, sum)) {
          CAPTURE(length, place, is_untouched, is_left_out, value, sum);
          FAIL("another element than the bad one is concerned");
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("numbers: at the largest number the rounding of the sum decides", "", float, double) {
  using limits = std::numeric_limits<TestType>;
  const TestType half_unit = std::ldexp(TestType(1), limits::max_exponent - limits::digits - 1);
  const std::size_t elements = 4096 + 9;
  for (const TestType sign : {TestType(1), TestType(-1)}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{4095}, elements - 1}) {
      lamina::residual_accumulator<TestType> whole(model_of({elements}));
      lamina::residual_accumulator<TestType> each(model_of({elements}),
                                                  {.non_finite = lamina::non_finite::skip});
      std::vector<TestType> gradient(elements);
      const auto is_refused = [&](TestType value) {
        gradient[place] = sign * value;
        accumulate(each, 0, gradient);
        const bool threw = throws<lamina::non_finite_gradient>([&] { accumulate(whole, 0, gradient); });
        REQUIRE(whole[0][place] == sign * limits::max());
        REQUIRE(each[0][place] == sign * limits::max());
        return threw;
      };
      REQUIRE_FALSE(is_refused(limits::max()));
      REQUIRE_FALSE(is_refused(std::nextafter(half_unit, TestType(0))));  // rounds back
      REQUIRE(each.left_out_elements() == 0);
      REQUIRE(is_refused(half_unit));  // a tie, which would go to infinity
      REQUIRE(each.left_out_elements() == 1);
      REQUIRE_FALSE(is_refused(0));
    }
  }
}

#if defined(__SSE2__)
namespace {

// Denormals taken and given as zeros in this thread, while it lives.
class flushed_denormals {
 public:
  flushed_denormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040U); }  // FTZ and DAZ
  ~flushed_denormals() { _mm_setcsr(before_); }
  flushed_denormals(const flushed_denormals&) = delete;
  flushed_denormals& operator=(const flushed_denormals&) = delete;

 private:
  unsigned before_;
};

// Out of line, so that no arithmetic moves across the switch.
[[gnu::noinline]] void flushing(const auto& call) {
  const flushed_denormals guard;
  call();
}

template <class T>
T flush(T x) {
  return std::abs(x) < std::numeric_limits<T>::min() ? std::copysign(T(0), x) : x;
}

}  // namespace

TEMPLATE_TEST_CASE("numbers: denormals count as zeros where the thread flushes them", "", float, double) {
  std::mt19937 random(72);
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    for (const std::size_t length : {1, 63, 64, 300, 4097}) {
      lamina::residual_accumulator<TestType> residual(model_of({length}), {.non_finite = check});
      std::vector<TestType> expected(length);
      for (int step = 0; step < 20; ++step) {
        // Around the smallest normal number: of the sums some are denormal, and some come of denormals.
        auto gradient = random_fractions<TestType>(random, length);
        for (TestType& each : gradient) each *= std::numeric_limits<TestType>::min();
        double value = 0;
        flushing([&] { value = accumulate(residual, 0, gradient); });
        for (std::size_t i = 0; i < length; ++i) expected[i] = flush(flush(expected[i]) + flush(gradient[i]));
        REQUIRE(std::ranges::equal(residual[0], expected));
        double literal = 0;
        flushing([&] { literal = literal_mean_abs(std::span<const TestType>(expected)); });
        REQUIRE(same_bits(value, literal));
      }
      std::vector<TestType> bad(length);
      bad.back() = std::numeric_limits<TestType>::quiet_NaN();
      bool is_refused = false;
      flushing(
          [&] { is_refused = throws<lamina::non_finite_gradient>([&] { accumulate(residual, 0, bad); }); });
      REQUIRE(is_refused == (check == lamina::non_finite::refuse));
      REQUIRE(residual.left_out_elements() == (is_refused ? 0U : 1U));
    }
  }
}

TEST_CASE("numbers: frames of normal numbers are bitwise identical where denormals are flushed") {
  for (const auto payload : all_payload_types) {
    const lamina::layout model = model_of({300, 4097, 5});
    const auto run = [&] {
      std::mt19937 random(73);
      lamina::worker<float> worker(model, {.drop_ratio = 0.5, .payload = payload});
      bytes all;
      for (int step = 0; step < 10; ++step) {
        const bytes frame = send(worker, rounding_gradients<float>(random, model));
        all.insert(all.end(), frame.begin(), frame.end());
      }
      return all;
    };
    const bytes expected = run();
    bytes got;
    flushing([&] { got = run(); });
    REQUIRE(got == expected);
  }
}
#endif

}  // namespace lamina_test::numbers_test
