// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstddef>

#include "lamina/detail/abi.hpp"

/// What the library's templates ask of their types.
namespace lamina::inline LAMINA_ABI {

/// The element types that residuals, frames and representative values are computed in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, double>;

/// A representative functor is three functions:
///
///     float map(float x);                  // for elements of float or half width; may give double, or a class of your own
///     double map(double x);                // for elements of double
///     float combine(float a, float b);     // of two values of map; associative, commutative, and a zero is neutral
///     double combine(double a, double b);  // of the totals of blocks
///     double finish(double total, std::size_t elements);
///
/// One function that takes `double`, or `auto`, may stand for two of these, if the totals stay double. All are const or
/// static, do not throw, and depend on nothing but their operands.
///
/// One that says `using is_simd = void;` is also applied to whole SIMD registers of the elements' type: map(V) and
/// combine(V, V) then give a V and do the same as with single elements, to the last bit. Templates over the operand, of
/// + - * / and lamina::abs, max and min, are such functions:
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

}  // namespace lamina::inline LAMINA_ABI
