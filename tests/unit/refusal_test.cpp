// SPDX-License-Identifier: MIT
// What is left of a gradient that was added, and subtracted again because it holds NaN or infinity.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "executions.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/worker.hpp"
#include "residual_cases.hpp"
#include "support.hpp"

#if defined(__linux__)
#include <pthread.h>
#endif

namespace lamina_test::refusal_test {

namespace {

constexpr std::size_t block = 4096;
constexpr std::size_t longest = 27 * block;  // with the others more than a task holds

// How many of the elements below a quarter there are: no functor of the library is like it, and it counts zeros.
struct share_of_small {
  static double map(double x) { return x > -0.25 && x < 0.25 ? 1 : 0; }
  static double combine(double a, double b) { return a + b; }
  static double finish(double total, std::size_t elements) { return total / static_cast<double>(elements); }
};

template <class T>
std::vector<T> times(std::vector<T> values, int power) {
  for (T& each : values) each = std::ldexp(each, power);
  return values;
}

const lamina::layout model = model_of({1, 3, 0, 64, 300, 2 * block + 70, longest});

template <class T>
std::vector<std::vector<T>> fractions(std::mt19937& random) {
  std::vector<std::vector<T>> all;
  for (const std::size_t size : model.sizes()) all.push_back(random_fractions<T>(random, size));
  return all;
}

template <class T, class Functor>
void add(lamina::residual_accumulator<T>& residual, const auto& gradients, const Functor& functor,
         const auto& execution, double scale = 1) {
  std::vector<double> values(model.layers());
  const auto refused = residual.accumulate(
      0, model.layers(),
      [&](std::size_t layer, const auto& visitor) {
        lamina::detail::visit_gradient<T>(gradients[layer], visitor);
      },
      values, functor, execution, scale);
  if (refused) throw lamina::non_finite_gradient(*refused, *refused, model[*refused].name, "");
}

// Steps, then gradients of 2^k times their size of which the last layer's last element is NaN: how many layers keep rounding of them. Where
// none does, nothing was added before the NaN, and nothing was tested.
template <class T, class Functor>
std::size_t layers_with_no_more_than_rounding(const Functor& functor, double momentum) {
  std::mt19937 random(901);
  lamina::residual_accumulator<T> residual(model, {.momentum = momentum});
  lamina::residual_accumulator<T> in_threads(model, {.momentum = momentum});
  lamina::residual_accumulator<T> clean(model, {.momentum = momentum});
  std::size_t changed = 0;
  for (const int power : {0, 8, 12, 24, 100}) {
    CAPTURE(power, momentum);
    for (int step = 0; step < 2; ++step) {
      const auto good = fractions<T>(random);
      for (auto* each : {&residual, &in_threads, &clean}) {
        each->begin_step();
        add(*each, good, functor, lamina::sequential());
      }
    }
    residual.clear(4);
    in_threads.clear(4);
    const auto before = copy_of(residual.elements());
    const auto velocity = copy_of(residual.velocity());
    const bool is_first_of_step = power % 8 == 0;
    if (is_first_of_step) {
      residual.begin_step();
      in_threads.begin_step();
    }
    auto bad = fractions<T>(random);
    for (auto& each : bad) each = times(each, power);
    bad.back().back() = nan_value<T>;
    try {
      add(residual, bad, functor, lamina::sequential());
      FAIL("nothing was refused");
    } catch (const lamina::non_finite_gradient& refused) {
      REQUIRE(refused.layer() == model.layers() - 1);
    }
    REQUIRE_THROWS_AS(add(in_threads, bad, functor, in_threads_of(3)), lamina::non_finite_gradient);
    REQUIRE(same_bits(in_threads.elements(), residual.elements()));
    REQUIRE(same_bits(in_threads.velocity(), residual.velocity()));
    REQUIRE(residual.is_clear(4));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (model.sizes()[l] == 0 || l == 4) continue;
      const auto was = std::span<const T>(before).subspan(model.offset(l), model.sizes()[l]);
      REQUIRE(worst_distance(residual[l], was) <= 1.001);
      changed += !same_bits(residual[l], was);
    }
    // Half of a velocity's error, as it decays by a half, goes into the residual.
    const double most = lamina::max_abs{}(before)*2048 * std::numeric_limits<T>::epsilon();
    bool is_near = true;  // in one assertion, since there are millions of elements
    for (std::size_t i = 0; i < velocity.size(); ++i) {
      const double near =
          4 * std::numeric_limits<T>::epsilon() * std::abs(static_cast<double>(velocity[i])) + 2 * most;
      is_near &= std::abs(static_cast<double>(residual.velocity()[i] - velocity[i])) <= near;
    }
    REQUIRE(is_near);
    if (power > 24) REQUIRE(same_bits(residual.elements(), before));
    // What was sent of one is sent of all.
    clean.clear(4);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (auto* each : {&residual, &in_threads, &clean}) {
        if (l % 2 == 1) each->clear(l);
      }
    }
  }
  return changed;
}

}  // namespace

TEMPLATE_TEST_CASE("refusal: what is left is rounding, however large the gradient, with any threads", "",
                   float, double) {
  for (const double momentum : {0.0, 0.5}) {
    CHECK(layers_with_no_more_than_rounding<TestType>(lamina::mean_abs(), momentum) > 0);
    CHECK(layers_with_no_more_than_rounding<TestType>(lamina::l2_norm(), momentum) > 0);
    CHECK(layers_with_no_more_than_rounding<TestType>(share_of_small(), momentum) > 0);
  }
}

TEST_CASE(
    "refusal: a micro-batch that would overflow by its sum, its velocity or its scale is refused, or left "
    "out") {
  const float half = largest<float> / 2;
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    const bool skips = check == lamina::non_finite::skip;
    lamina::worker<float> worker(model_of({2}), {.momentum = 0.5, .non_finite = check});
    auto step = worker.begin();
    // The velocity is at -1.5 halves and the residual at 0 when a micro-batch of -1 half comes.
    for (const float first : {1.5F * half, -1.5F * half, -1.5F * half})
      REQUIRE(step.add(0, std::vector<float>{first, 1}));
    const auto before = copy_of(worker.residual().elements());
    const auto velocity = copy_of(worker.residual().velocity());
    CHECK(step.add(0, std::vector<float>{-half, 1}) == skips);
    const float more = skips ? 1 : 0;
    CHECK(copy_of(worker.residual().elements()) == std::vector<float>{before[0], before[1] + more});
    CHECK(copy_of(worker.residual().velocity()) == std::vector<float>{velocity[0], velocity[1] + more});
    CHECK(worker.residual().left_out_elements() == (skips ? 1 : 0));

    const std::vector<float> gradient = {1, 0x1p120F};
    lamina::worker<float> scaling(model_of({2}), {.non_finite = check});
    auto scaled = scaling.begin();
    CHECK(scaled.add(0, gradient, 0x1p10) == skips);
    CHECK(copy_of(scaling.residual()[0]) == std::vector<float>{skips ? 0x1p10F : 0.0F, 0});
    CHECK(scaled.add(0, gradient, 0x1p-10));
    CHECK(scaling.residual()[0][1] == 0x1p110F);
  }
}

TEST_CASE("refusal: an execution that throws leaves all added, or nothing") {
  std::mt19937 random(906);
  const auto gives_up = [](std::size_t tasks, auto&& work) {
    for (std::size_t i = 0; i < tasks / 2; ++i) work(i);
    throw std::runtime_error("no more threads");
  };
  lamina::residual_accumulator<float> residual(model);
  auto gradients = fractions<float>(random);
  CHECK_THROWS_AS(add(residual, gradients, lamina::mean_abs(), gives_up), std::runtime_error);
  const auto before = copy_of(residual.elements());
  CHECK(before.back() == gradients.back().back());
  lamina::worker<float> worker(model);
  CHECK_THROWS_AS(worker.add(gradients, 1, gives_up), std::runtime_error);
  CHECK(same_bits(worker.residual().elements(), before));
  gradients = fractions<float>(random);
  gradients[1][0] = infinity<float>;
  CHECK_THROWS_AS(add(residual, gradients, lamina::mean_abs(), gives_up), lamina::non_finite_gradient);
  CHECK(worst_distance<float>(residual.elements().last(longest),
                              std::span<const float>(before).last(longest)) <= 1.001);
  // A refusal is the result of the call, whatever its execution throws.
  const auto step = worker.add(gradients, 1, gives_up);
  CHECK_FALSE(step);
  CHECK(step.refused_layer() == 1);
}

TEST_CASE(
    "residual: a layer that is skipped has the value of its zeros, whatever the functor says of these") {
  for (const std::size_t elements : {std::size_t{1}, block, 2 * block + 70}) {
    lamina::worker<float, share_of_small> worker(model_of({elements}));
    auto step = worker.begin();
    step.skip(0);
    CHECK(step.values()[0] == 1);
  }
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("residual: a gradient takes less than 80 KB of a thread's stack") {
  struct call {
    static void* run(void*) {
      lamina::residual_accumulator<double> residual(model_of({2 * block}), {.momentum = 0.9});
      const std::vector<lamina::bfloat16> gradient(2 * block, lamina::bfloat16{0x3f80});
      accumulate(residual, 0, gradient, lamina::l2_norm(), {}, 0.1);
      residual.subtract(0, lamina::payload_type::bfloat16);
      lamina::worker<double> worker(model_of({2 * block}), {.drop_ratio = 0});
      auto step = worker.begin();
      step.add(0, gradient, 0.1);
      step.frame();
      step.commit();
      return nullptr;
    }
  };
  constexpr std::size_t bytes = std::size_t{1} << 20;
  void* stack = nullptr;
  REQUIRE(posix_memalign(&stack, 4096, bytes) == 0);
  std::memset(stack, 0x2a, bytes);
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstack(&attributes, stack, bytes) == 0);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, &attributes, &call::run, nullptr) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  pthread_attr_destroy(&attributes);
  const auto* begin = static_cast<const unsigned char*>(stack);
  const auto* used = std::find_if(begin, begin + bytes, [](unsigned char each) { return each != 0x2a; });
  CHECK(begin + bytes - used < 80 * 1024);
  std::free(stack);
}
#endif

}  // namespace lamina_test::refusal_test
