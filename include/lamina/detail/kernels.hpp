// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lamina/half.hpp"

#if !defined(LAMINA_NO_XSIMD) && __has_include(<xsimd/xsimd.hpp>)
#include <xsimd/xsimd.hpp>
#ifdef XSIMD_NO_SUPPORTED_ARCHITECTURE  // it knows no instruction set of this machine
#define LAMINA_HAS_XSIMD 0
#else
#define LAMINA_HAS_XSIMD 1
#endif
#else
#define LAMINA_HAS_XSIMD 0
#endif

/// The loops that touch every element, one block at a time. Each is written once, over an operand V that is
/// either one element or a SIMD register of them; both give the same bits (see reduction.hpp).
namespace lamina::detail {

inline constexpr std::size_t block_elements = 4096;
inline constexpr std::size_t lanes = 64;

template <class V, class T>
inline constexpr std::size_t width = sizeof(V) / sizeof(T);

template <class V, class T>
V load(const T* from) {
  if constexpr (std::same_as<V, T>) {
    return *from;
  } else {
    return V::load_unaligned(from);
  }
}

template <class V, class T>
void store(T* to, const V& value) {
  if constexpr (std::same_as<V, T>) {
    *to = value;
  } else {
    value.store_unaligned(to);
  }
}

template <class V>
inline constexpr bool is_register = false;
#if LAMINA_HAS_XSIMD
template <class T, class A>
inline constexpr bool is_register<xsimd::batch<T, A>> = true;
#endif

/// A compiler may fuse the product of a square with the sum into one rounding where the machine has FMA. The values must
/// not depend on that, so mapped values pass through memory, or registers through a statement that hides them.
template <class T, std::size_t Count>
void round_by_itself([[maybe_unused]] std::array<T, Count>& values) {
#if defined(__GNUC__)
  if constexpr (!is_register<T>) {
    asm volatile("" : "+m"(values));
  } else {
#if defined(__AVX512F__)
    for (T& each : values) asm volatile("" : "+v"(each.data));
#elif defined(__SSE2__)
    for (T& each : values) asm volatile("" : "+x"(each.data));
#elif defined(__ARM_NEON)
    for (T& each : values) asm volatile("" : "+w"(each.data));
#else
    asm volatile("" : "+m"(values));
#endif
  }
#endif
}

/// One operand of T from memory that holds G: T itself, or a half-width type, which goes element by element.
template <class V, class T, class G>
V load_as(const G* from) {
  if constexpr (std::same_as<G, T>) {
    return load<V>(from);
  } else {
    static_assert(std::same_as<V, T>);
    return static_cast<T>(to_float(*from));
  }
}

/// Asks for the cache lines of `count` elements that lie 2 KiB ahead; where that is beyond the end nothing happens. What the
/// machine prefetches by itself ends at every page of 4 KiB and has to find its pace again behind it.
/// docs/decisions/0010-prefetching.md has what that costs.
template <class T>
void prefetch_ahead([[maybe_unused]] const T* from, [[maybe_unused]] std::size_t count) {
#if defined(__GNUC__)
  constexpr std::uintptr_t line_bytes = 64;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(from) + 2048;
  for (std::uintptr_t offset = 0; offset < count * sizeof(T); offset += line_bytes) {
    // An address, since a pointer must not leave its array. NOLINTNEXTLINE(performance-no-int-to-ptr)
    __builtin_prefetch(reinterpret_cast<const void*>(begin + offset));
  }
#endif
}

/// Sources: where the operand at index i comes from, as a V of T. Those that write say so, and may refuse operands that
/// are not finite.
struct reads {
  static constexpr bool writes = false;
  static constexpr bool refuses = false;
};

template <class T, class G = T>
struct read_only : reads {
  const G* from;
  explicit read_only(const G* begin) : from(begin) {}
  void prefetch(std::size_t i, std::size_t count) const { prefetch_ahead(from + i, count); }
  template <class V>
  V at(std::size_t i) const {
    return load_as<V, T>(from + i);
  }
};

template <class T, class G = T>
struct sum_of : reads {
  const T* residual;
  const G* gradient;
  sum_of(const T* a, const G* g) : residual(a), gradient(g) {}
  void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    prefetch_ahead(gradient + i, count);
  }
  template <class V>
  V at(std::size_t i) const {
    return load<V>(residual + i) + load_as<V, T>(gradient + i);
  }
};

/// a <- a + g.
template <class T, class G, bool Refuses>
struct add_to {
  static constexpr bool writes = true;
  static constexpr bool refuses = Refuses;
  T* residual;
  const G* gradient;
  void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    prefetch_ahead(gradient + i, count);
  }
  template <class V>
  V at(std::size_t i) const {
    return load<V>(residual + i) + load_as<V, T>(gradient + i);
  }
  template <class V>
  void put(std::size_t i, const V& value) const {
    detail::store(residual + i, value);  // qualified: xsimd::store would be found and wants alignment
  }
};

/// For a residual that is clear: what add_to would give, without reading the residual.
template <class T, class G, bool Refuses>
struct assign_to : add_to<T, G, Refuses> {
  template <class V>
  V at(std::size_t i) const {
    return V(T(0)) + load_as<V, T>(this->gradient + i);  // turns -0 into 0, as the sum does
  }
};

#if LAMINA_HAS_XSIMD
template <class T>
using native_register = xsimd::batch<T>;
#else
template <class T>
using native_register = T;
#endif

template <class F, class V>
concept maps_to_itself = requires(const F& functor, const V& x) {
  { functor.map(x) } -> std::same_as<V>;
  { functor.combine(x, x) } -> std::same_as<V>;
};

/// A whole register where the functor can map one and memory holds T itself, one element otherwise.
template <class F, class T, class G>
using operand =
    std::conditional_t<std::same_as<T, G> && maps_to_itself<F, native_register<T>>, native_register<T>, T>;

template <class T>
using bits_of = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;

/// Whether all of these elements or registers are finite. A test of bits, so that it also works under -ffast-math.
template <class T, class V, std::size_t Count>
bool all_finite(const std::array<V, Count>& operands) {
  using bits = std::make_unsigned_t<bits_of<T>>;
  constexpr bits sign = bits{1} << (8 * sizeof(bits) - 1);
  // Carries into the sign bit exactly for the magnitudes of infinity and NaN.
  constexpr bits carry = sign - std::bit_cast<bits>(std::numeric_limits<T>::infinity());
  if constexpr (std::same_as<V, T>) {
    bits seen = 0;
    for (const T each : operands) seen |= (std::bit_cast<bits>(each) & ~sign) + carry;
    return (seen & sign) == 0;
  } else {
#if LAMINA_HAS_XSIMD
    // The magnitude as the functors take it, so that both share one instruction.
    using Bits = xsimd::batch<bits_of<T>>;
    const Bits carries(static_cast<bits_of<T>>(carry));
    Bits seen(0);
    for (const V& each : operands) seen = seen | (std::bit_cast<Bits>(xsimd::abs(each)) + carries);
    // Sign bits are looked for in 32-bit words, since SSE2 compares no 64-bit integers.
    if constexpr (sizeof(T) == 8) seen = seen & Bits(std::numeric_limits<bits_of<T>>::min());
    using Words = xsimd::batch<std::int32_t>;
    return !xsimd::any(std::bit_cast<Words>(seen) < Words(0));
#endif
  }
}

/// What became of a block: its total, and how many operands were taken. Fewer than asked for: the source refuses, and
/// one of the next few is not finite; from there on nothing was written, and the total is of no use.
struct block_result {
  double total;
  std::size_t taken;
};

/// Combines `count` <= block_elements operands in the shared order.
template <class T, class V, class F, class Source>
block_result reduce_block_over(const F& functor, std::size_t count, const Source& source) {
  using Lane = std::remove_cvref_t<decltype(functor.map(T{}))>;
  using Sum = std::conditional_t<std::same_as<V, T>, Lane, V>;
  // So many operands are loaded, looked at and written together: few enough registers for every machine, and a group to
  // vectorise for the compiler where V is one element. Writing after all loads also lets them start early.
  constexpr std::size_t group = std::same_as<V, T> ? lanes : 4;
  constexpr std::size_t step = width<V, T>;
  std::array<Sum, lanes / step> sums;
  sums.fill(Sum(0));

  const std::size_t whole = count - count % lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    source.prefetch(i, lanes);
    for (std::size_t k = 0; k < lanes / step; k += group) {
      std::array<V, group> operands;
      for (std::size_t r = 0; r < group; ++r) operands[r] = source.template at<V>(i + (k + r) * step);
      if constexpr (Source::refuses) {
        if (!all_finite<T>(operands)) [[unlikely]]
          return {0, i + k * step};
      }
      if constexpr (Source::writes) {
        for (std::size_t r = 0; r < group; ++r) source.put(i + (k + r) * step, operands[r]);
      }
      std::array<Sum, group> mapped;
      for (std::size_t r = 0; r < group; ++r) mapped[r] = functor.map(operands[r]);
      round_by_itself(mapped);
      for (std::size_t r = 0; r < group; ++r) sums[k + r] = functor.combine(sums[k + r], mapped[r]);
    }
  }

  std::array<Lane, lanes> lane;
  const auto to_lanes = [&](std::size_t registers) {
    for (std::size_t r = 0; r < registers; ++r) detail::store(lane.data() + r * step, sums[r]);
  };
  if (whole < count) {
    to_lanes(sums.size());
    for (std::size_t i = whole; i < count; ++i) {
      const std::array<T, 1> operand = {source.template at<T>(i)};
      if constexpr (Source::refuses) {
        if (!all_finite<T>(operand)) [[unlikely]]
          return {0, i};
      }
      if constexpr (Source::writes) source.put(i, operand[0]);
      std::array<Lane, 1> mapped = {functor.map(operand[0])};
      round_by_itself(mapped);
      lane[i - whole] = functor.combine(lane[i - whole], mapped[0]);
    }
    for (std::size_t r = 0; r < sums.size(); ++r) sums[r] = load<Sum>(lane.data() + r * step);
  }

  std::size_t half = lanes / 2;
  for (; half >= step; half /= 2) {
    for (std::size_t r = 0; r < half / step; ++r) sums[r] = functor.combine(sums[r], sums[r + half / step]);
  }
  to_lanes(1);
  for (; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lane[j] = functor.combine(lane[j], lane[j + half]);
  }
  return {static_cast<double>(lane[0]), count};
}

/// Over registers where functor and memory allow it, over elements otherwise. `G` is what memory holds.
template <class T, class G, class F, class Source>
block_result reduce_block(const F& functor, std::size_t count, const Source& source) {
  return reduce_block_over<T, operand<F, T, G>>(functor, count, source);
}

/// Magnitudes below this are called small: 2^26 of them can be added before a float may overflow.
template <class T>
inline constexpr T small_magnitude = sizeof(T) == 4 ? static_cast<T>(0x1p100) : static_cast<T>(0x1p990);

/// Whether all operands are small; NaN and infinity are not. A test of bits, so that it also works under -ffast-math.
template <class T, class Source>
bool all_small(std::size_t count, const Source& source) {
  using bits = std::make_unsigned_t<bits_of<T>>;
  constexpr bits sign = bits{1} << (8 * sizeof(bits) - 1);
  // Carries into the sign bit exactly for magnitudes that are not small.
  constexpr bits carry = sign - std::bit_cast<bits>(small_magnitude<T>);
  const auto probe = [&](std::size_t i) {
    return (std::bit_cast<bits>(source.template at<T>(i)) & ~sign) + carry;
  };
  constexpr std::size_t probes = 64 / sizeof(T);  // one cache line: few enough to stay in registers
  std::array<bits, probes> seen{};
  const std::size_t whole = count - count % probes;
  for (std::size_t i = 0; i < whole; i += probes) {
    source.prefetch(i, probes);
    for (std::size_t j = 0; j < probes; ++j) seen[j] |= probe(i + j);
  }
  for (std::size_t i = whole; i < count; ++i) seen[0] |= probe(i);
  bits any = 0;
  for (const bits each : seen) any |= each;
  return (any & sign) == 0;
}

/// The largest magnitude among `count` operands; NaN and infinity come out as such.
template <class T, class Source>
T largest_magnitude(std::size_t count, const Source& source) {
  bits_of<T> largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    constexpr bits_of<T> magnitude_mask = std::numeric_limits<bits_of<T>>::max();
    // The bits of magnitudes order like the magnitudes, with infinity and NaN at the top.
    largest = std::max(largest, std::bit_cast<bits_of<T>>(source.template at<T>(i)) & magnitude_mask);
  }
  return std::bit_cast<T>(largest);
}

/// The larger of two magnitudes, NaN being the largest.
template <class T>
T larger_magnitude(T a, T b) {
  return std::bit_cast<bits_of<T>>(a) < std::bit_cast<bits_of<T>>(b) ? b : a;
}

template <class T>
constexpr bool is_finite_magnitude(T magnitude) {
  return std::bit_cast<bits_of<T>>(magnitude) < std::bit_cast<bits_of<T>>(std::numeric_limits<T>::infinity());
}

}  // namespace lamina::detail
