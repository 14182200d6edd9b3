// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/half.hpp"

/// Where the operands of the kernels come from.
namespace lamina::inline LAMINA_ABI::detail {

/// Whether asking ahead pays on the processor that runs this. On Intel's, what the machine prefetches by itself ends at every page
/// of 4 KiB and has to find its pace again behind it; on AMD's it does not, and asking takes a fifth longer than not asking. Others
/// were not measured. docs/decisions/0010-prefetching.md has the numbers.
#if defined(__GNUC__) && (defined(__x86_64__) || defined(__i386__))
inline const bool asks_ahead = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel") != 0;
}();
#else
inline constexpr bool asks_ahead = false;
#endif

/// Asks for the cache lines of `count` elements that lie 2 KiB ahead, where that pays; where it is beyond the end nothing happens.
/// Inlined at any price: g++ takes a function that only prefetches for one without effect, and leaves out the calls.
template <class T>
LAMINA_ALWAYS_INLINE void prefetch_ahead([[maybe_unused]] const T* from, [[maybe_unused]] std::size_t count) {
#if defined(__GNUC__)
  if (!asks_ahead) return;
  constexpr std::uintptr_t line_bytes = 64;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(from) + 2048;
  for (std::uintptr_t offset = 0; offset < count * sizeof(T); offset += line_bytes) {
    // An address, since a pointer must not leave its array. NOLINTNEXTLINE(performance-no-int-to-ptr)
    __builtin_prefetch(reinterpret_cast<const void*>(begin + offset));
  }
#endif
}

/// What one gradient makes of an element, or of a register of them, where there is a velocity.
template <class V>
struct corrected {
  V sum;
  V velocity;
};

/// Sources: at<V>(i) gives the operand that begins at index i, one element or a register of them. `Scaled`: elements of memory of G are
/// multiplied by a scale, and each product is rounded by itself, so that all machines get the same bits.
template <class T, class G = T, bool Scaled = false>
struct read_only {
  static constexpr bool writes = false;
  static constexpr bool refuses = false;
  const G* from;
  T scale;
  explicit read_only(const G* begin, T factor = 1) : from(begin), scale(factor) {}

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(from + i, count);
  }
  template <class V = T>
  LAMINA_ALWAYS_INLINE V at(std::size_t i) const {
    std::array<V, 1> operand = {load_widened<V, T>(from + i)};
    if constexpr (Scaled) {
      operand[0] = operand[0] * V(scale);
      round_by_itself(operand);
    }
    return operand[0];
  }
};

/// Sources that refuse end a block before the first operands of which one is not below `carry`: see carry_from().

/// x - y, of which nothing is written.
template <class T>
struct difference_of {
  static constexpr bool writes = false;
  static constexpr bool refuses = true;
  const T* minuend;
  const T* subtrahend;
  pattern_of<T> carry = infinity_carry<T>;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(minuend + i, count);
    prefetch_ahead(subtrahend + i, count);
  }
  template <class V = T>
  LAMINA_ALWAYS_INLINE V at(std::size_t i) const {
    return load<V>(minuend + i) - load<V>(subtrahend + i);
  }
};

/// a <- a + g, or a + scale·g. `Clear`: the residual counts as zero, and is not read; the sum with it turns -0 into 0.
template <class T, class G, bool Scaled, bool Clear>
struct add_to {
  static constexpr bool writes = true;
  static constexpr bool refuses = true;
  T* residual;
  read_only<T, G, Scaled> gradient;
  pattern_of<T> carry;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    gradient.prefetch(i, count);
  }
  template <class V = T>
  LAMINA_ALWAYS_INLINE V at(std::size_t i) const {
    if constexpr (Clear) return V(T(0)) + gradient.template at<V>(i);
    return load<V>(residual + i) + gradient.template at<V>(i);
  }
  template <class V>
  LAMINA_ALWAYS_INLINE void put(std::size_t i, const V& sum) const {
    detail::store(residual + i, sum);
  }
  /// The element stays as it was.
  void leave(std::size_t i) const {
    if (Clear) residual[i] = T(0);
  }
  /// The element was put, and is to be as it was before, to within the rounding of both sums.
  void take_back(std::size_t i) const { residual[i] = residual[i] - gradient.at(i); }
};

/// u <- m·u + g, a <- a + u where the velocity decays; u <- u + g, a <- a + g otherwise.
template <class T, bool Decays>
struct add_with_velocity {
  static constexpr bool writes = true;
  static constexpr bool refuses = true;
  T* residual;
  T* velocity;
  read_only<T> gradient;
  T momentum;
  pattern_of<T> carry;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    prefetch_ahead(velocity + i, count);
    gradient.prefetch(i, count);
  }
  template <class V = T>
  LAMINA_ALWAYS_INLINE corrected<V> at(std::size_t i) const {
    const V addend = gradient.template at<V>(i);
    const V updated = read_only<T, T, Decays>(velocity, momentum).template at<V>(i) + addend;
    return {load<V>(residual + i) + (Decays ? updated : addend), updated};
  }
  template <class V>
  LAMINA_ALWAYS_INLINE void put(std::size_t i, const corrected<V>& both) const {
    detail::store(velocity + i, both.velocity);
    detail::store(residual + i, both.sum);
  }
  void leave(std::size_t) const {}
  void take_back(std::size_t i) const {
    const T before = velocity[i] - gradient.at(i);
    residual[i] = residual[i] - (Decays ? velocity[i] : gradient.at(i));
    velocity[i] = Decays ? without_decay(before) : before;
  }

 private:
  // Rounding may lead beyond the range where the velocity was at the end of it.
  T without_decay(T x) const {
    const T quotient = x / momentum;
    if (all_finite<T>(std::array{quotient})) return quotient;
    return x < T(0) ? std::numeric_limits<T>::lowest() : (std::numeric_limits<T>::max)();
  }
};

}  // namespace lamina::inline LAMINA_ABI::detail
