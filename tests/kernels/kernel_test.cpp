// SPDX-License-Identifier: MIT
// Built once for each instruction set, with registers and without (CMakeLists.txt, aarch64/): all agree with the literal
// summation order of support.hpp, hence with each other, in every bit.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>
#include <sstream>
#include <utility>

#include "accumulate.hpp"
#include "catch.hpp"
#include "kernel_cases.hpp"
#include "lamina/detail/loops.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

// An emulated machine, or a sanitizer, tries one offset in so many, and one in so many of the long lengths.
#ifndef LAMINA_KERNEL_TEST_SHARE
#define LAMINA_KERNEL_TEST_SHARE 1
#endif

// 0 to 300, around one block and around sixteen; some with a last block of their own, and one of more blocks than a run has.
std::vector<std::size_t> all_lengths() {
  std::vector<std::size_t> lengths;
  const auto add = [&](std::size_t first, std::size_t last, std::size_t step = LAMINA_KERNEL_TEST_SHARE) {
    for (std::size_t length = first; length <= last; length += step) lengths.push_back(length);
  };
  add(0, 300, 1);
  add(4090, 4102);
  add(65530, 65542);
  lengths.insert(lengths.end(), {8191, 8192, 8193, 8255, 12289, 64 * 4096 + 8200});
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

// Each product rounded by itself: memory that the compiler must write.
template <class T>
std::vector<T> scaled(const std::vector<T>& values, T scale) {
  std::vector<T> products;
  for (const T each : values) {
    const volatile T product = each * scale;
    products.push_back(static_cast<T>(product));
  }
  return products;
}

// The value of a tensor whose blocks are those of the source that `source_at` gives for the element at which they begin.
template <class T>
double value_by_blocks(const auto& functor, std::size_t length, const auto& source_at) {
  std::vector<double> totals;
  for (std::size_t begin = 0; begin < length; begin += 4096) {
    const std::size_t count = std::min<std::size_t>(4096, length - begin);
    const auto block = lamina::detail::reduce_block<T>(functor, count, source_at(begin));
    if (block.taken != count) FAIL("a block was refused");
    totals.push_back(block.total);
  }
  return lamina::detail::finished_value(functor, totals, length);
}

// Lengths for what has no order of its own: around a cache line, a row of lanes, and some rows.
constexpr std::array<std::size_t, 18> some_lengths = {0,  1,  2,   7,   15,  16,  31,  33,  63,
                                                      64, 65, 127, 128, 200, 256, 257, 300, 4099};

}  // namespace

TEMPLATE_TEST_CASE("kernels: each kernel follows the literal order, every length and misalignment", "", float,
                   double, lamina::float16, lamina::bfloat16) {
  std::mt19937 random(3);
  for (const std::size_t length : all_lengths()) {
    for (const kind of : kinds) {
      const auto values = values_of<TestType>(of, random, length);
      const auto expected = literal_values(widened<computed_type<TestType>>(values));
      for (const std::size_t offset : offsets_for(length, of)) {
        const placed<TestType> there(values, offset);
        for_each_kernel([&](std::size_t f, const auto& functor) {
          require_same_bits(functor(there.values()), expected[f],
                            [&] { return described(functor_names[f], length, of, offset); });
        });
      }
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
        std::array residuals{
            lamina::residual_accumulator<T>(model, {.non_finite = lamina::non_finite::refuse}),
            lamina::residual_accumulator<T>(model, {.non_finite = lamina::non_finite::skip})};
        for_each_kernel([&](std::size_t f, const auto& functor) {
          const auto where = [&] { return described(functor_names[f], length, of, offset); };
          auto& residual = residuals[(f + offset + length / 16) % 2];
          residual.clear(1);
          const double once = accumulate(residual, 1, first_gradient.values(), functor);
          require_same_bits(once, first_expected[f], where);
          require_same_bits(residual[1], first_sum, where);
          const double twice = accumulate(residual, 1, second_gradient.values(), functor);
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

// No product is fused with the sum that follows, also where the machine could.
TEMPLATE_TEST_CASE("kernels: a scaled gradient is multiplied, rounded and then added, in the literal order",
                   "", float, double, lamina::float16, lamina::bfloat16) {
  using T = computed_type<TestType>;
  using lamina::detail::add_to;
  std::mt19937 random(11);
  for (const std::size_t length :
       std::initializer_list<std::size_t>{0, 1, 63, 64, 65, 130, 300, 4095, 4096, 4100, 8193}) {
    for (const T scale : {T(0.1), T(-1) / 3, T(0x1p-16), T(1), T(0)}) {
      const std::size_t offset = below(random, 16);
      const auto first = values_of<TestType>(kind::fractions, random, length);
      const auto second = values_of<TestType>(kind::fractions, random, length);
      const placed<TestType> first_gradient(first, (3 * offset) % 16);
      const placed<TestType> second_gradient(second, offset);
      const auto first_sum = sum_of(std::vector<T>(length), scaled(widened<T>(first), scale));
      const auto second_sum = sum_of(first_sum, scaled(widened<T>(second), scale));
      const auto first_expected = literal_values(first_sum);
      const auto second_expected = literal_values(second_sum);
      const auto check = [&](std::size_t f, const auto& functor, auto limited) {
        const auto where = [&] { return described(functor_names[f], length, kind::fractions, offset); };
        using source = lamina::detail::read_only<T, TestType, true>;
        const auto carry =
            limited ? lamina::detail::carry_from(std::bit_cast<lamina::detail::pattern_of<T>>(T(128)))
                    : lamina::detail::infinity_carry<T>;
        std::vector<T> residual(length, T(7));
        require_same_bits(value_by_blocks<T>(functor, length,
                                             [&](std::size_t i) {
                                               return add_to<T, TestType, true, true>{
                                                   residual.data() + i,
                                                   source(first_gradient.values().data() + i, scale), carry};
                                             }),
                          first_expected[f], where);
        require_same_bits(std::span<const T>(residual), first_sum, where);
        require_same_bits(value_by_blocks<T>(functor, length,
                                             [&](std::size_t i) {
                                               return add_to<T, TestType, true, false>{
                                                   residual.data() + i,
                                                   source(second_gradient.values().data() + i, scale), carry};
                                             }),
                          second_expected[f], where);
        require_same_bits(std::span<const T>(residual), second_sum, where);
      };
      check(0, lamina::mean_abs{}, false);
      check(0, lamina::mean_abs{}, true);
      check(2, lamina::l2_norm{}, false);
      check(7, own_scalar_mean_abs{}, true);
    }
  }
}

TEMPLATE_TEST_CASE("kernels: a refused scaled operand stops the block before it is written", "", float,
                   double, lamina::float16, lamina::bfloat16) {
  using T = computed_type<TestType>;
  using lamina::detail::add_to;
  const T scale = std::numeric_limits<T>::max() / 2;
  for (const std::size_t place : std::initializer_list<std::size_t>{0, 1, 63, 64, 70, 100}) {
    std::vector<T> wide(130, T(1));
    wide[place] = 4;
    std::vector<TestType> gradient;
    for (const T each : wide) {
      if constexpr (lamina::half_element<TestType>) {
        gradient.push_back(lamina::saturating_round<TestType>(each));
      } else {
        gradient.push_back(each);
      }
    }
    std::vector<T> residual(wide.size(), T(1));
    const auto block = lamina::detail::reduce_block<T>(
        lamina::max_abs{}, wide.size(),
        add_to<T, TestType, true, false>{residual.data(),
                                         lamina::detail::read_only<T, TestType, true>(gradient.data(), scale),
                                         lamina::detail::infinity_carry<T>});
    REQUIRE(block.taken <= place);
    REQUIRE(block.taken + 64 > place);
    for (std::size_t i = 0; i < residual.size(); ++i) {
      REQUIRE(residual[i] == (i < block.taken ? T(1) + scale : T(1)));
    }
  }
}

TEMPLATE_TEST_CASE("kernels: what is not finite, at every place", "", float, double) {
  using limits = std::numeric_limits<TestType>;
  std::mt19937 random(17);
  for (const std::size_t length : some_lengths) {
    auto values = random_fractions<TestType>(random, length + 1);
    const std::span<const TestType> elements(values.data() + 1, length);
    REQUIRE(lamina::detail::are_finite(elements));
    for (std::size_t i = 1; i <= length; i += length > 300 ? 61 : 1) {
      for (const TestType special :
           {limits::lowest(), limits::infinity(), -limits::infinity(), -limits::quiet_NaN()}) {
        const TestType before = std::exchange(values[i], special);
        REQUIRE(lamina::detail::are_finite(elements) == (special == limits::lowest()));
        values[i] = before;
      }
    }
  }
}

TEMPLATE_TEST_CASE("kernels: element by element, every misalignment, and nothing beyond", "", float, double) {
  namespace detail = lamina::detail;
  std::mt19937 random(19);
  for (const std::size_t length : some_lengths) {
    const std::size_t offset = below(random, 16);
    const auto from = random_fractions<TestType>(random, offset + length + 1);
    const auto before = random_fractions<TestType>(random, offset + length + 1);
    const auto check = [&](const auto& loop, const auto& one) {
      auto to = before;
      auto expected = before;
      loop(to.data() + offset, from.data() + offset);
      for (std::size_t i = offset; i < offset + length; ++i) expected[i] = one(before[i], from[i]);
      REQUIRE(same_bits(to, expected));
    };
    check([&](auto* a, const auto* b) { detail::add_elements(a, b, length); },
          [](auto a, auto b) { return a + b; });
    check([&](auto* a, const auto* b) { detail::subtract_elements(a, b, length); },
          [](auto a, auto b) { return a - b; });
    check([&](auto* a, const auto*) { detail::divide_elements(a, TestType(3), length); },
          [](auto a, auto) { return a / 3; });
    check([&](auto* a, const auto* b) { detail::copy_elements(a, length, detail::read_only<TestType>(b)); },
          [](auto, auto b) { return b; });
    // A velocity: the product, and then the sum, each rounded.
    check(
        [&](auto* a, const auto* b) {
          detail::copy_elements(a, length, detail::read_only<TestType, TestType, true>(a, TestType(0.9)));
          detail::add_elements(a, b, length);
        },
        [](auto a, auto b) {
          const volatile TestType product = TestType(0.9) * a;
          return product + b;
        });
  }
}

TEMPLATE_TEST_CASE("kernels: a register does what its elements do", "", float, double) {
  using limits = std::numeric_limits<TestType>;
  const std::array<TestType, 13> special = {0,
                                            -TestType(0),
                                            1,
                                            -1,
                                            3,
                                            TestType(0.1),
                                            TestType(-7e-5),
                                            limits::infinity(),
                                            -limits::infinity(),
                                            limits::quiet_NaN(),
                                            limits::max(),
                                            limits::min(),
                                            limits::denorm_min()};
  using V = lamina::detail::native_register<TestType>;
  for (const TestType a : special) {
    for (const TestType b : special) {
      std::array<TestType, sizeof(V) / sizeof(TestType)> lanes;
      const auto require_all = [&](const V& given, TestType expected) {
        lamina::detail::store(lanes.data(), given);
        for (const TestType lane : lanes) {
          // What sign the NaN of an operation has is the machine's choice.
          if (expected != expected) {
            REQUIRE(lane != lane);
          } else {
            REQUIRE(same_bits(std::array{lane}, std::array{expected}));
          }
        }
      };
      CAPTURE(a, b);
      const volatile TestType x = a;
      const volatile TestType y = b;
      require_all(V(a), x);
      require_all(V(a) + V(b), x + y);
      require_all(V(a) - V(b), x - y);
      require_all(V(a) * V(b), x * y);
      require_all(V(a) / V(b), x / y);
      require_all(-V(a), -x);
      require_all(lamina::abs(V(a)), lamina::abs(a));
      require_all(lamina::max(V(a), V(b)), lamina::max(a, b));
    }
  }
  CHECK(lamina::max(TestType(1), TestType(2)) == 2);
}

TEMPLATE_TEST_CASE("kernels: a sign is seen in every place of a register, and nothing else is", "",
                   std::uint16_t, std::uint32_t, std::uint64_t) {
  using V = lamina::detail::native_register<TestType>;
  std::array<TestType, lamina::detail::width<V, TestType>> lanes;
  const auto sign = lamina::detail::sign_bit<TestType>;
  lanes.fill(static_cast<TestType>(~sign));
  CHECK_FALSE(lamina::detail::any_sign(lamina::detail::load<V>(lanes.data())));
  for (TestType& lane : lanes) {
    const TestType before = std::exchange(lane, sign);
    CHECK(lamina::detail::any_sign(lamina::detail::load<V>(lanes.data())));
    lane = before;
  }
}
