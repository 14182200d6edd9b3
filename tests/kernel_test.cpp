// SPDX-License-Identifier: MIT
// Built once for each instruction set, with xsimd and without (CMakeLists.txt, aarch64/): all agree with the literal
// summation order of support.hpp, hence with each other, in every bit.
#include <array>
#include <deque>
#include <list>
#include <random>
#include <ranges>
#include <sstream>
#include <utility>

#include "catch.hpp"
#include "kernel_cases.hpp"
#include "lamina/residual.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

// An emulated machine, or a sanitizer, tries one offset in so many, and one in so many of the long lengths.
#ifndef LAMINA_KERNEL_TEST_SHARE
#define LAMINA_KERNEL_TEST_SHARE 1
#endif

// 0 to 300, around one block and around sixteen; and some with a last block of their own.
std::vector<std::size_t> all_lengths() {
  std::vector<std::size_t> lengths;
  const auto add = [&](std::size_t first, std::size_t last, std::size_t step = LAMINA_KERNEL_TEST_SHARE) {
    for (std::size_t length = first; length <= last; length += step) lengths.push_back(length);
  };
  add(0, 300, 1);
  add(4090, 4102);
  add(65530, 65542);
  lengths.insert(lengths.end(), {8191, 8192, 8193, 8255, 12289});
  return lengths;
}

// Elements from the start of a cache line. Up to 300 elements each kind is tried at 0 to 15, which is every misalignment
// in bytes, and near multiples of 32, half a row of lanes, at 0 to 63. Longer ones share these among the kinds, and the
// longest among themselves.
std::vector<std::size_t> offsets_for(std::size_t length, kind of) {
  const auto is_tried = [&](std::size_t offset) {
    if (length <= 300) {
      return (length + offset) % LAMINA_KERNEL_TEST_SHARE == 0 && (offset < 16 || (length + 1) % 32 < 3);
    }
    const std::size_t one_in = (length < 10'000 ? 1 : 4) * LAMINA_KERNEL_TEST_SHARE;
    return (length + offset) % (one_in * kinds.size()) == one_in * static_cast<std::size_t>(of);
  };
  std::vector<std::size_t> offsets;
  for (std::size_t offset = 0; offset < 64; ++offset) {
    if (is_tried(offset)) offsets.push_back(offset);
  }
  return offsets;
}

std::string described(const std::string& what, std::size_t length, kind of, std::size_t offset) {
  std::ostringstream text;
  text << what << " of " << length << " elements of kind " << static_cast<int>(of) << ", offset " << offset;
  return text.str();
}

template <class T>
std::vector<T> widened(const auto& values) {
  if constexpr (requires { lamina::to_float(values[0]); }) {
    std::vector<T> wide;
    for (const auto each : values) wide.push_back(lamina::to_float(each));
    return wide;
  } else {
    return values;
  }
}

template <class T>
std::vector<T> sum_of(std::vector<T> a, const std::vector<T>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

}  // namespace

TEMPLATE_TEST_CASE("kernels: each functor follows the literal order, every length and misalignment", "",
                   float, double, lamina::float16, lamina::bfloat16) {
  std::mt19937 random(3);
  for (const std::size_t length : all_lengths()) {
    for (const kind of : kinds) {
      const auto values = values_of<TestType>(of, random, length);
      const auto expected = literal_values(widened<computed_type<TestType>>(values));
      for (const std::size_t offset : offsets_for(length, of)) {
        const placed<TestType> there(values, offset);
        for_each_functor([&](std::size_t f, const auto& functor) {
          require_same_bits(functor(there.values()), expected[f],
                            [&] { return described(functor_names[f], length, of, offset); });
        });
      }
    }
  }
}

TEMPLATE_TEST_CASE("kernels: a list, a deque and a lazy view follow the literal order", "", float, double) {
  std::mt19937 random(5);
  for (const std::size_t length : all_lengths()) {
    // One kind for each of the long ones, which take long to put into a list.
    for (std::size_t k = length % kinds.size(); k<kinds.size(); k += length> 300 ? kinds.size() : 1) {
      const auto values = values_of<TestType>(kinds[k], random, length);
      const std::list<TestType> list(values.begin(), values.end());
      const std::deque<TestType> deque(values.begin(), values.end());
      const auto lazy = values | std::views::transform([](TestType x) { return x; });
      const auto expected = literal_values(values);
      for_each_functor([&](std::size_t f, const auto& functor) {
        const auto where = [&] { return described(functor_names[f], length, kinds[k], 0); };
        require_same_bits(functor(list), expected[f], where);
        require_same_bits(functor(deque), expected[f], where);
        require_same_bits(functor(lazy), expected[f], where);
      });
    }
  }
}

// The layer is misaligned in the residual as its gradients are in theirs, each by another offset.
TEMPLATE_TEST_CASE(
    "kernels: the fused pass adds, and follows the literal order, every length and misalignment", "", float,
    double, lamina::float16, lamina::bfloat16) {
  using T = computed_type<TestType>;
  std::mt19937 random(7);
  for (const std::size_t length : all_lengths()) {
    for (const kind of : kinds) {
      const auto first = values_of<TestType>(of, random, length);
      const auto second = values_of<TestType>(of, random, length);
      const auto first_sum = sum_of(std::vector<T>(length), widened<T>(first));
      const auto second_sum = sum_of(first_sum, widened<T>(second));
      const auto first_expected = literal_values(first_sum);
      const auto second_expected = literal_values(second_sum);
      for (const std::size_t offset : offsets_for(length, of)) {
        const placed<TestType> first_gradient(first, (7 * offset + length) % 64);
        const placed<TestType> second_gradient(second, (5 * offset + length) % 64);
        const lamina::layout model = model_of({offset, length, 7});
        std::array residuals{lamina::residual_accumulator<T>(model, {lamina::finite_check::whole_layer}),
                             lamina::residual_accumulator<T>(model, {lamina::finite_check::each_element})};
        for_each_functor([&](std::size_t f, const auto& functor) {
          const auto where = [&] { return described(functor_names[f], length, of, offset); };
          auto& residual = residuals[(f + offset + length / 16) % 2];
          residual.clear(1);
          const double once = residual.accumulate(1, first_gradient.values(), functor);
          require_same_bits(once, first_expected[f], where);
          require_same_bits(residual[1], first_sum, where);
          const double twice = residual.accumulate(1, second_gradient.values(), functor);
          require_same_bits(twice, second_expected[f], where);
          require_same_bits(residual[1], second_sum, where);
        });
        for (const auto& residual : residuals) {  // nothing written beyond the layer
          require_same_bits(residual[0], std::vector<T>(offset), [] { return "the layer before"; });
          require_same_bits(residual[2], std::vector<T>(7), [] { return "the layer after"; });
        }
      }
    }
  }
}
