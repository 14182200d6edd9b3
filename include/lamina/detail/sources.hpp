// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/detail/screen.hpp"
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

/// A row is `lanes` consecutive operands, of which at<V>(k) takes those from the k-th on. This one lies in memory;
template <class T>
struct row_in_memory {
  const T* from;
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    return load<V>(from + k);
  }
};

/// that one is multiplied on the way into a register;
template <class T>
struct scaled_row {
  const T* from;
  T scale;
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    std::array<V, 1> product = {load<V>(from + k) * V(scale)};
    round_by_itself(product);
    return product[0];
  }
};

/// and this one is widened, and multiplied, before, all of it at once.
template <class T>
class widened_row {
 public:
  template <class G>
  LAMINA_ALWAYS_INLINE explicit widened_row(const G* from) {
    widen_all<lanes>(from, operands_.data());
  }
  template <class G>
  LAMINA_ALWAYS_INLINE widened_row(const G* from, T scale) : widened_row(from) {
    for (T& each : operands_) each *= scale;
    round_by_itself(operands_);
  }
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    return load<V>(operands_.data() + k);
  }

 private:
  std::array<T, lanes> operands_;
};

/// The sum or the difference of two rows.
template <bool Subtracts, class A, class B>
struct row_of_two {
  A a;
  B b;
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    if constexpr (Subtracts) return a.template at<V>(k) - b.template at<V>(k);
    return a.template at<V>(k) + b.template at<V>(k);
  }
};

/// A row of zeros: added to another it turns -0 into 0, as the sum with a residual that is clear does.
template <class T>
struct row_of_zeros {
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t) const {
    return V(T(0));
  }
};

/// What one gradient makes of an element, or of a register of them, where there is a velocity.
template <class V>
struct corrected {
  V sum;
  V velocity;
};

/// The rows of a residual, of a velocity that has decayed already, and of a gradient. `Decays`: the velocity is added, not the
/// gradient.
template <class A, class U, class G, bool Decays>
struct corrected_row {
  A residual;
  U velocity;
  G gradient;
  template <class V>
  LAMINA_ALWAYS_INLINE corrected<V> at(std::size_t k) const {
    const V addend = gradient.template at<V>(k);
    const V updated = velocity.template at<V>(k) + addend;
    return {residual.template at<V>(k) + (Decays ? updated : addend), updated};
  }
};

/// Sources: where the operand at index i, and the row that begins there, come from. `Scaled`: elements of memory of G are
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
  T at(std::size_t i) const {
    if constexpr (Scaled) {
      return rounded(widened<T>(from[i]) * scale);
    } else {
      return widened<T>(from[i]);
    }
  }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    if constexpr (std::same_as<G, T> && !Scaled) {
      return row_in_memory<T>{from + i};
    } else if constexpr (std::same_as<G, T> && is_register<V>) {
      return scaled_row<T>{from + i, scale};
    } else if constexpr (Scaled) {
      return widened_row<T>(from + i, scale);
    } else {
      return widened_row<T>(from + i);
    }
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
  T at(std::size_t i) const { return minuend[i] - subtrahend[i]; }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    return row_of_two<true, row_in_memory<T>, row_in_memory<T>>{{minuend + i}, {subtrahend + i}};
  }
};

/// a <- a + g, or a + scale·g. `Clear`: the residual counts as zero, and is not read.
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
  T at(std::size_t i) const { return (Clear ? T(0) : residual[i]) + gradient.at(i); }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    using row_of_addends = decltype(gradient.template row<V>(i));
    if constexpr (Clear) {
      return row_of_two<false, row_of_zeros<T>, row_of_addends>{{}, gradient.template row<V>(i)};
    } else {
      return row_of_two<false, row_in_memory<T>, row_of_addends>{{residual + i}, gradient.template row<V>(i)};
    }
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
  corrected<T> at(std::size_t i) const {
    const T addend = gradient.at(i);
    const T updated = decayed().at(i) + addend;
    return {residual[i] + (Decays ? updated : addend), updated};
  }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    using row_of_velocities = decltype(decayed().template row<V>(i));
    return corrected_row<row_in_memory<T>, row_of_velocities, row_in_memory<T>, Decays>{
        {residual + i}, decayed().template row<V>(i), {gradient.from + i}};
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
  LAMINA_ALWAYS_INLINE read_only<T, T, Decays> decayed() const {
    return read_only<T, T, Decays>(velocity, momentum);
  }
  // Rounding may lead beyond the range where the velocity was at the end of it.
  T without_decay(T x) const {
    const T quotient = x / momentum;
    if (all_finite<T>(std::array{quotient})) return quotient;
    return x < T(0) ? std::numeric_limits<T>::lowest() : (std::numeric_limits<T>::max)();
  }
};

}  // namespace lamina::inline LAMINA_ABI::detail
