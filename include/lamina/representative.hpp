// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/loops.hpp"
#include "lamina/tensor.hpp"

/// The representative value q_l of a layer: the one number that is compared with the threshold. Read layout.hpp before. Each functor is
/// called with a tensor and gives a double; an empty tensor gives 0. The one summation order that every backend follows, so that all
/// machines decide alike:
///
///  - a tensor is cut into blocks of 4,096 elements (the last may be shorter);
///  - within a block, element i goes to lane i mod 64, in order, in the type that the functor's map gives;
///  - the lanes fold as lane[j] = combine(lane[j], lane[j + h]) for h = 32, 16, 8, 4, 2, 1;
///  - the block totals are combined in runs of 64, each from 0 and in order, in double; so are the totals of the runs, until one is left.
///
/// All instruction sets give bitwise the same since each lane is one sequence of operations that none of them may reorder.
namespace lamina::inline LAMINA_ABI {

/// A functor of your own gets the same fused pass. It is three functions, const or static, that depend on nothing but their operands:
///
///     float map(float x);                  // for elements of float or half width; may give double, or a class of your own
///     double map(double x);                // for elements of double
///     float combine(float a, float b);     // of two values of map; associative, commutative, and a zero is neutral
///     double combine(double a, double b);  // of the totals of blocks
///     double finish(double total, std::size_t elements);
///
/// One function that takes `double`, or `auto`, may stand for two of these, if the totals stay double. One that says `using is_simd =
/// void;` is also applied to whole SIMD registers: map(V) and combine(V, V) then give a V, bitwise as with single elements. Templates over
/// the operand, of + - * / and lamina::abs and max, are such functions:
///
///     struct largest {
///       using is_simd = void;
///       static auto map(const auto& x) { return lamina::abs(x); }
///       static auto combine(const auto& a, const auto& b) { return lamina::max(a, b); }
///       static double finish(double total, std::size_t) { return total; }
///     };
template <class F>
concept representative = requires(const F& functor, float x, double total, std::size_t elements) {
  { functor.combine(functor.map(x), functor.map(x)) } -> std::convertible_to<double>;
  { functor.combine(total, total) } -> std::same_as<double>;
  { functor.finish(total, elements) } -> std::convertible_to<double>;
};

/// A SIMD register of floats or doubles; none with LAMINA_NO_SIMD, and with a compiler that has no vectors of GNU.
template <class V>
concept simd_register = detail::is_register<V>;

/// For functors: of elements and of whole registers, bitwise identical. The larger of two is `a` where they are equal, or where one is NaN.
template <element T>
LAMINA_HOST_DEVICE T abs(T x) {
  return std::abs(x);
}
template <element T>
LAMINA_HOST_DEVICE constexpr auto(max)(T a, T b) -> T {
  return a < b ? b : a;
}
#if LAMINA_HAS_SIMD
template <class T>
detail::simd<T> abs(const detail::simd<T>& x) {
  return detail::magnitudes<T>(x);
}
template <class T>
detail::simd<T>(max)(const detail::simd<T>& a, const detail::simd<T>& b) {
  return detail::simd<T>(a.data < b.data ? b.data : a.data);
}
#endif

namespace detail {

/// The value of a layer from the totals of its blocks, which come one after the other, in constant memory: one run of each level.
template <representative F>
class totals_in_runs {
 public:
  explicit totals_in_runs(const F& functor) : functor_(functor) {}

  void add(double total) { add_at(0, total, count_++); }

  /// The value, of so many elements, once all totals are added; 0 of none.
  double value(std::size_t elements) {
    if (elements == 0) return 0;
    std::size_t level = 0;
    for (std::size_t count = count_; count > totals_per_run; ++level) {
      count = count / totals_per_run + (count % totals_per_run != 0);
      add_at(level + 1, runs_[level], count - 1);
    }
    return functor_.finish(runs_[level], elements);
  }

 private:
  // 64^9 totals are more than 2^64 elements have.
  static constexpr std::size_t levels = 9;

  // The next total of a level that has had `before` of them. A run that is complete goes up only when another one begins.
  void add_at(std::size_t level, double total, std::size_t before) {
    std::size_t top = level;
    for (; before != 0 && before % totals_per_run == 0; before = before / totals_per_run - 1) ++top;
    for (; top > level; --top) {
      runs_[top] = functor_.combine(runs_[top], runs_[top - 1]);
      runs_[top - 1] = 0;
    }
    runs_[level] = functor_.combine(runs_[level], total);
  }

  const F& functor_;
  std::array<double, levels> runs_{};
  std::size_t count_ = 0;
};

/// The value of a layer from the totals of its blocks, where they lie in memory.
template <representative F>
double finished_value(const F& functor, std::span<const double> block_totals, std::size_t elements) {
  totals_in_runs totals(functor);
  for (const double each : block_totals) totals.add(each);
  return totals.value(elements);
}

/// The same, where total_of(begin, count) gives the totals.
template <representative F, class TotalOf>
double value_of_blocks(const F& functor, std::size_t elements, const TotalOf& total_of) {
  totals_in_runs totals(functor);
  for (std::size_t begin = 0; begin < elements; begin += block_elements)
    totals.add(total_of(begin, (std::min)(block_elements, elements - begin)));
  return totals.value(elements);
}

/// The value of so many zeros, which lie nowhere.
template <element T, representative F>
double value_of_zeros(const F& functor, std::size_t elements) {
  const std::array<T, block_elements> zeros{};
  const auto total_of = [&](std::size_t count) {
    return reduce_block<T>(functor, count, read_only<T>(zeros.data())).total;
  };
  const double of_whole_block = total_of((std::min)(block_elements, elements));
  return value_of_blocks(functor, elements, [&](std::size_t, std::size_t count) {
    return count < block_elements ? total_of(count) : of_whole_block;
  });
}

}  // namespace detail

/// The representative value of a tensor: 0 if it has no elements. NaN and infinity give an unspecified value. Cost: one pass.
template <representative F, class Tensor>
double representative_value(const F& functor, const Tensor& tensor) {
  if constexpr (lamina::tensor<const Tensor>) {
    const auto elements = tensor_traits<Tensor>::elements(tensor);
    if constexpr (detail::is_variant<std::remove_const_t<decltype(elements)>>) {
      return visit([&](auto span) { return representative_value(functor, span); }, elements);
    } else {
      using G = std::remove_const_t<typename decltype(elements)::element_type>;
      static_assert(element<G> || half_element<G>,
                    "lamina: the element type must be float, double, lamina::float16 or lamina::bfloat16");
      using T = std::conditional_t<element<G>, G, float>;
      return detail::value_of_blocks(functor, elements.size(), [&](std::size_t begin, std::size_t count) {
        return detail::reduce_block<T>(functor, count, detail::read_only<T, G>(elements.data() + begin))
            .total;
      });
    }
  } else {
    detail::require_tensor<const Tensor>();
    return 0;
  }
}

namespace detail {

template <class Self>
struct callable_representative {
  template <class Tensor>
  double operator()(const Tensor& tensor) const {
    return representative_value(static_cast<const Self&>(*this), tensor);
  }
};

// Functions of single elements also run on a device, which knows no SIMD registers.
struct sum {
  template <element T>
  LAMINA_HOST_DEVICE static T combine(T a, T b) {
#if defined(__CUDA_ARCH__)
    // Additions that are not fused with a product before them.
    if constexpr (sizeof(T) == 4) {
      return __fadd_rn(a, b);
    } else {
      return __dadd_rn(a, b);
    }
#else
    return a + b;
#endif
  }
  template <simd_register V>
  static V combine(const V& a, const V& b) {
    return a + b;
  }
};

struct magnitude {
  using is_simd = void;
  using is_without_product = void;
  LAMINA_HOST_DEVICE static float map(float x) { return lamina::abs(x); }
  LAMINA_HOST_DEVICE static double map(double x) { return lamina::abs(x); }
  template <simd_register V>
  static V map(const V& x) {
    return lamina::abs(x);
  }
};

// least_magnitudes() is what the magnitudes of the elements add up to at least, which one pass tells the next one.
struct sum_of_magnitudes : sum, magnitude {
  static double least_magnitudes(double total) { return total; }
};

struct sum_of_squares : sum {
  // In double, where the square of a float is exact; registers of floats are not mapped.
  using is_simd = void;
  LAMINA_HOST_DEVICE static double map(double x) { return x * x; }
  static double least_magnitudes(double total) { return std::sqrt(total); }
  template <simd_register V>
  requires std::same_as<typename V::value_type, double>
  static V map(const V& x) { return x * x; }
};

}  // namespace detail

/// Mean of the absolute values; the default. Source: Lee et al. 2020, eq. 2, with absolute values, since a layer that grows steadily
/// negative would never be sent otherwise.
struct mean_abs : detail::callable_representative<mean_abs>, detail::sum_of_magnitudes {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return total / static_cast<double>(elements);
  }
};

/// Sum of the absolute values, as Algorithm 1 of the paper has it: favours large layers.
struct l1_norm : detail::callable_representative<l1_norm>, detail::sum_of_magnitudes {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return total; }
};

/// Square root of the sum of squares.
struct l2_norm : detail::callable_representative<l2_norm>, detail::sum_of_squares {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return std::sqrt(total); }
};

/// Square root of the mean of squares.
struct root_mean_square : detail::callable_representative<root_mean_square>, detail::sum_of_squares {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return std::sqrt(total / static_cast<double>(elements));
  }
};

/// Largest absolute value; infinity if one of them is NaN.
struct max_abs : detail::callable_representative<max_abs>, detail::magnitude {
  // Of magnitudes, whose bits order as they do, with NaN beyond infinity.
  LAMINA_HOST_DEVICE static float combine(float a, float b) { return detail::larger_magnitude(a, b); }
  LAMINA_HOST_DEVICE static double combine(double a, double b) { return detail::larger_magnitude(a, b); }
  template <simd_register V>
  static V combine(const V& a, const V& b) {
    return detail::larger_magnitude(a, b);
  }
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t) { return detail::ordered_value(total); }
};

namespace detail {

/// Whether no element is NaN or infinite.
template <class G>
bool are_finite(std::span<const G> elements) {
  return is_finite(max_abs()(elements));
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
