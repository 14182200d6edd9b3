// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/detail/simd.hpp"
#include "lamina/detail/widen.hpp"
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

/// The sum of two rows.
template <class A, class B>
struct row_of_sums {
  A a;
  B b;
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    return a.template at<V>(k) + b.template at<V>(k);
  }
};

/// The difference of two rows.
template <class A, class B>
struct row_of_differences {
  A a;
  B b;
  template <class V>
  LAMINA_ALWAYS_INLINE V at(std::size_t k) const {
    return a.template at<V>(k) - b.template at<V>(k);
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

/// a + g, of which nothing is written.
template <class T>
struct sum_of {
  static constexpr bool writes = false;
  static constexpr bool refuses = false;
  const T* residual;
  const T* gradient;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    prefetch_ahead(gradient + i, count);
  }
  T at(std::size_t i) const { return residual[i] + gradient[i]; }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    return row_of_sums<row_in_memory<T>, row_in_memory<T>>{{residual + i}, {gradient + i}};
  }
};

/// x - y, of which nothing is written. `Refuses`: a block ends before a difference that is not finite.
template <class T, bool Refuses>
struct difference_of {
  static constexpr bool writes = false;
  static constexpr bool refuses = Refuses;
  const T* minuend;
  const T* subtrahend;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(minuend + i, count);
    prefetch_ahead(subtrahend + i, count);
  }
  T at(std::size_t i) const { return minuend[i] - subtrahend[i]; }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    return row_of_differences<row_in_memory<T>, row_in_memory<T>>{{minuend + i}, {subtrahend + i}};
  }
};

/// a <- a + g, or a + scale·g. `Refuses`: sums that are not finite are not written.
template <class T, class G, bool Refuses, bool Scaled = false>
struct add_to {
  static constexpr bool writes = true;
  static constexpr bool refuses = Refuses;
  T* residual;
  const G* gradient;
  T scale = 1;

  LAMINA_ALWAYS_INLINE void prefetch(std::size_t i, std::size_t count) const {
    prefetch_ahead(residual + i, count);
    prefetch_ahead(gradient + i, count);
  }
  /// What is added at i.
  T addend(std::size_t i) const { return addends().at(i); }
  T at(std::size_t i) const { return residual[i] + addend(i); }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    using row_of_addends = decltype(addends().template row<V>(i));
    return row_of_sums<row_in_memory<T>, row_of_addends>{{residual + i}, addends().template row<V>(i)};
  }
  template <class V>
  LAMINA_ALWAYS_INLINE void put(std::size_t i, const V& value) const {
    detail::store(residual + i, value);
  }

 protected:
  LAMINA_ALWAYS_INLINE read_only<T, G, Scaled> addends() const {
    return read_only<T, G, Scaled>(gradient, scale);
  }
};

/// For a residual that is clear: what add_to would give, without reading the residual.
template <class T, class G, bool Refuses, bool Scaled = false>
struct assign_to : add_to<T, G, Refuses, Scaled> {
  T at(std::size_t i) const { return T(0) + this->addend(i); }
  template <class V>
  LAMINA_ALWAYS_INLINE auto row(std::size_t i) const {
    using row_of_addends = decltype(this->addends().template row<V>(i));
    return row_of_sums<row_of_zeros<T>, row_of_addends>{{}, this->addends().template row<V>(i)};
  }
};

}  // namespace lamina::inline LAMINA_ABI::detail
