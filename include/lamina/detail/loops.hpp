// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/half.hpp"

/// The loops over elements: where their operands come from, what reduces a block of them, and what writes element by element. Written once
/// over an operand V that is either one element or a SIMD register of them; both are bitwise identical (see representative.hpp).
namespace lamina::inline LAMINA_ABI::detail {

/// Whether asking ahead pays on the processor that runs this. On Intel's, what the machine prefetches by itself ends at every page
/// of 4 KiB and has to find its pace again behind it; on AMD's it does not, and asking takes a fifth longer than not asking. Others
/// were not measured. On an Intel Xeon the default step took about a fifth less with it.
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
/// multiplied by a scale, and each product is rounded by itself, so that it is bitwise identical on all machines.
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
  void undo(std::size_t i) const { residual[i] = residual[i] - gradient.at(i); }
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
  void undo(std::size_t i) const {
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

template <class F, class V>
concept maps_to_itself = requires(const F& functor, const V& x) {
  { functor.map(x) } -> std::same_as<V>;
  { functor.combine(x, x) } -> std::same_as<V>;
};

/// Whole registers where the functor says that it takes them, one element otherwise.
template <class F, class T>
concept takes_registers = requires {
  typename F::is_simd;
}
&&maps_to_itself<F, native_register<T>>;
template <class F, class T>
using operand = std::conditional_t<takes_registers<F, T>, native_register<T>, T>;

/// A map without a product, of which nothing can be fused with the sum.
template <class F>
concept maps_without_product = requires {
  typename F::is_without_product;
};

/// What is combined of an operand. It may come with a velocity, which must be below the limit, too.
template <class V>
LAMINA_ALWAYS_INLINE const V& sum_of(const V& operand) {
  return operand;
}
template <class V>
LAMINA_ALWAYS_INLINE const V& sum_of(const corrected<V>& operand) {
  return operand.sum;
}
template <class T, class Operand, std::size_t Count, class Source>
LAMINA_ALWAYS_INLINE bool may_take(const std::array<Operand, Count>& operands, const Source& source) {
  if constexpr (!Source::refuses) {
    return true;
  } else if constexpr (requires { operands[0].velocity; }) {
    using V = std::remove_cvref_t<decltype(operands[0].velocity)>;
    std::array<V, Count> sums;
    std::array<V, Count> velocities;
    repeat<V, Count>([&](std::size_t i) LAMINA_INLINED {
      sums[i] = operands[i].sum;
      velocities[i] = operands[i].velocity;
    });
    return all_below<T>(sums, source.carry) && all_below<T>(velocities, source.carry);
  } else {
    return all_below<T>(operands, source.carry);
  }
}

/// What became of a block: its total, and how many operands were taken. Fewer than asked for: the source refuses one of the
/// next few; from there on nothing was written, and the total is of no use.
struct block_result {
  double total;
  std::size_t taken;
};

/// Combines `count` <= block_elements operands in the shared order.
template <class T, class V, class F, class Source>
block_result reduce_block_over(const F& functor, std::size_t count, const Source source) {
  using Lane = std::remove_cvref_t<decltype(functor.map(T{}))>;
  using Sum = std::conditional_t<std::same_as<V, T>, Lane, V>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t registers = lanes / step;
  static_assert(lanes % step == 0, "lamina: a register has more elements than a block has lanes");
  constexpr std::size_t group = group_of<V, T>;
  static_assert(registers % group == 0);
  // So many groups are written out together; more than sixteen registers went slower.
  constexpr std::size_t groups = is_register<V> ? std::min<std::size_t>(4, registers / group) : 1;
  static_assert(registers % (group * groups) == 0);
  std::array<Sum, registers> sums;
  sums.fill(Sum(0));

  const std::size_t whole = count - count % lanes;
  for (std::size_t i = 0; i < whole; i += lanes) {
    source.prefetch(i, lanes);
    // Takes the group that begins with register k; false if the source refuses it. Each is written after all of it is
    // loaded, which lets the loads start early.
    const auto take = [&](std::size_t k) LAMINA_INLINED {
      std::array<decltype(source.template at<V>(0)), group> operands;
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED { operands[r] = source.template at<V>(i + (k + r) * step); });
      if (!may_take<T>(operands, source)) [[unlikely]]
        return false;
      if constexpr (Source::writes) {
        repeat<V, group>([&](std::size_t r) LAMINA_INLINED { source.put(i + (k + r) * step, operands[r]); });
      }
      std::array<Sum, group> mapped;
      repeat<V, group>([&](std::size_t r) LAMINA_INLINED { mapped[r] = functor.map(sum_of(operands[r])); });
      if constexpr (!maps_without_product<F>) round_by_itself(mapped);
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED { sums[k + r] = functor.combine(sums[k + r], mapped[r]); });
      return true;
    };
    for (std::size_t k = 0; k < registers; k += group * groups) {
      std::size_t taken = k;
      const bool all = all_of_written_out<groups>([&](std::size_t index) LAMINA_INLINED {
        taken = k + index * group;
        return take(taken);
      });
      if (!all) [[unlikely]]
        return {0, i + taken * step};
    }
  }

  std::array<Lane, lanes> lane;
  const auto to_lanes = [&](std::size_t first) {
    for (std::size_t r = 0; r < first; ++r) detail::store(lane.data() + r * step, sums[r]);
  };
  if (whole < count) {
    to_lanes(sums.size());
    for (std::size_t i = whole; i < count; ++i) {
      const std::array operand = {source.at(i)};
      if (!may_take<T>(operand, source)) [[unlikely]]
        return {0, i};
      if constexpr (Source::writes) source.put(i, operand[0]);
      std::array<Lane, 1> mapped = {functor.map(sum_of(operand[0]))};
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
  for (; half > 0; half /= 2)
    for (std::size_t j = 0; j < half; ++j) lane[j] = functor.combine(lane[j], lane[j + half]);
  return {static_cast<double>(lane[0]), count};
}

/// A functor that stands for one of several, which is chosen at run time: visit(visitor) calls the visitor with that one, and
/// is_common() tells whether it is the type `common`.
template <class F>
concept chosen_at_run_time = requires {
  typename F::is_chosen_at_run_time;
};

/// Over registers where the functor takes them, over elements otherwise. A choice made at run time is looked at once a block.
template <class T, class F, class Source>
block_result reduce_block(const F& functor, std::size_t count, const Source& source) {
  if constexpr (chosen_at_run_time<F>) {
    return functor.visit([&](const auto& chosen) { return reduce_block<T>(chosen, count, source); });
  } else {
    return reduce_block_over<T, operand<F, T>>(functor, count, source);
  }
}

/// to[i] <- operation(to[i], from[i]); the operation takes single elements and registers.
template <class T, class Operation>
LAMINA_ALWAYS_INLINE void combine_elements(T* to, const T* from, std::size_t count,
                                           const Operation& operation) {
  using V = native_register<T>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t group = group_of<V, T>;
  std::size_t i = 0;
  for (const std::size_t whole = count - count % (group * step); i < whole; i += group * step) {
    std::array<V, group> a;
    std::array<V, group> b;
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED {
      a[r] = load<V>(to + i + r * step);
      b[r] = load<V>(from + i + r * step);
    });
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED { a[r] = operation(a[r], b[r]); });
    repeat<V, group>([&](std::size_t r) LAMINA_INLINED { detail::store(to + i + r * step, a[r]); });
  }
  for (; i < count; ++i) to[i] = operation(to[i], from[i]);
}

/// to[i] += from[i].
template <class T>
void add_elements(T* to, const T* from, std::size_t count) {
  combine_elements(to, from, count, [](const auto& a, const auto& b) LAMINA_INLINED { return a + b; });
}

/// to[i] -= from[i].
template <class T>
void subtract_elements(T* to, const T* from, std::size_t count) {
  combine_elements(to, from, count, [](const auto& a, const auto& b) LAMINA_INLINED { return a - b; });
}

/// a / b, rounded once. With -ffast-math a compiler would multiply by the reciprocal of a divisor that stays the same, or by an estimate
/// of it, which has other bits: where it has that, it is given the instruction, and elsewhere the divisor is hidden from it.
template <class V>
LAMINA_ALWAYS_INLINE V divided_by_itself(const V& a, const V& b) {
#if LAMINA_HAS_SIMD && defined(__SSE2__)
  if constexpr (is_register<V>) {
    V quotient = a;
    if constexpr (sizeof(typename V::value_type) == sizeof(float)) {
#if defined(__AVX__)
      asm("vdivps {%2, %1, %0|%0, %1, %2}" : "=x"(quotient.data) : "x"(a.data), "x"(b.data));
#else
      asm("divps {%1, %0|%0, %1}" : "+x"(quotient.data) : "x"(b.data));
#endif
    } else {
#if defined(__AVX__)
      asm("vdivpd {%2, %1, %0|%0, %1, %2}" : "=x"(quotient.data) : "x"(a.data), "x"(b.data));
#else
      asm("divpd {%1, %0|%0, %1}" : "+x"(quotient.data) : "x"(b.data));
#endif
    }
    return quotient;
  }
#endif
  std::array<V, 1> by = {b};
  round_by_itself(by);
  return a / by[0];
}

/// to[i] /= divisor.
template <class T>
void divide_elements(T* to, T divisor, std::size_t count) {
  combine_elements(to, to, count, [divisor](const auto& a, const auto&) LAMINA_INLINED {
    return divided_by_itself(a, std::remove_cvref_t<decltype(a)>(divisor));
  });
}

/// to[i] <- what the source has at i, its products rounded by themselves: a half-width type widened, a gradient times its
/// scale, or a velocity times the momentum. `to` may be where the source reads, but not overlap it otherwise.
template <class T, class Source>
void copy_elements(T* to, std::size_t count, const Source source) {
  using V = native_register<T>;
  constexpr std::size_t step = width<V, T>;
  constexpr std::size_t group = group_of<V, T>;
  std::size_t i = 0;
  for (const std::size_t whole = count - count % lanes; i < whole; i += lanes) {
    source.prefetch(i, lanes);
    for (std::size_t k = i; k < i + lanes; k += group * step) {
      std::array<V, group> operands;
      repeat<V, group>([&](std::size_t r)
                           LAMINA_INLINED { operands[r] = source.template at<V>(k + r * step); });
      repeat<V, group>([&](std::size_t r) LAMINA_INLINED { detail::store(to + k + r * step, operands[r]); });
    }
  }
  for (; i < count; ++i) to[i] = source.at(i);
}

}  // namespace lamina::inline LAMINA_ABI::detail
