// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "lamina/detail/aligned_vector.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/representative.hpp"
#include "lamina/tensor.hpp"

namespace lamina {

/// The residual a_l of every layer on one worker (the paper's "local cache"): what was computed and not sent
/// yet.
///
/// Holds N elements of T in one flat buffer, zero at first. Different layers may be accumulated from
/// different threads; one layer, from one thread at a time.
template <element T>
class residual_accumulator {
 public:
  explicit residual_accumulator(const layout& model)
      : model_(model), values_(model.elements()), magnitude_bounds_(model.layers()) {}

  /// a_l <- a_l + g_l (eq. 1 of the paper), and the representative value of the sum, in one pass.
  ///
  /// \param layer     index in the layout
  /// \param gradient  a tensor of T with n_l elements
  /// \return q_l after adding; 0 for an empty layer
  /// \throws std::out_of_range      no such layer
  /// \throws std::invalid_argument  the gradient has another size or, at run time, another element type
  /// \throws non_finite_gradient    the gradient holds NaN or infinity, or a sum would overflow
  ///
  /// On any error the residual is as it was. Cost: one pass over the gradient that looks for NaN and
  /// infinity, then one that reads gradient and residual and writes the residual. Deterministic: the same
  /// bits on every machine.
  template <class Tensor, representative Representative = mean_abs>
  double accumulate(std::size_t layer, const Tensor& gradient, Representative representative = {}) {
    const std::span<const T> from = elements_of<T>(gradient);
    model_.check_size(layer, from.size());
    const std::span<T> to = mutable_layer(layer);
    magnitude_bounds_[layer] = checked_bound(layer, to, from);

    double total = 0;
    for (std::size_t begin = 0; begin < to.size(); begin += detail::block_elements) {
      const std::size_t count = std::min(detail::block_elements, to.size() - begin);
      const detail::add_and_write<T> sum{to.data() + begin, from.data() + begin};
      total = representative.combine(total, detail::block_total<T>(representative, count, sum));
    }
    return to.empty() ? 0.0 : representative.finish(total, to.size());
  }

  /// The residual of one layer: n_l elements, valid as long as this object. Throws std::out_of_range.
  std::span<const T> operator[](std::size_t layer) const {
    model_.check_layer(layer);
    return std::span(values_).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  /// a_l <- 0: what was in it has been sent. Throws std::out_of_range.
  void clear(std::size_t layer) {
    std::ranges::fill(mutable_layer(layer), T(0));
    magnitude_bounds_[layer] = 0;
  }

  const layout& model() const noexcept { return model_; }

 private:
  std::span<T> mutable_layer(std::size_t layer) {
    model_.check_layer(layer);
    return std::span(values_).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  // No |a_i| of a layer exceeds its bound, so as long as bound + max |g_i| is small no sum can overflow and
  // the sums need not be looked at. In the rare other case they are, before anything is written.
  T checked_bound(std::size_t layer, std::span<const T> to, std::span<const T> from) const {
    const T gradient_bound = largest_magnitude(from.size(), detail::read_only<T>{from.data()});
    if (!is_finite(gradient_bound)) refuse(layer, "the gradient holds NaN or infinity");
    constexpr T half_of_largest = std::numeric_limits<T>::max() / 2;
    if (gradient_bound < half_of_largest && magnitude_bounds_[layer] < half_of_largest - gradient_bound) {
      // Rounding of the sums and of this one is covered by the factor of two.
      return magnitude_bounds_[layer] + gradient_bound;
    }
    const T exact = largest_magnitude(from.size(), detail::sum_of<T>{to.data(), from.data()});
    if (!is_finite(exact)) refuse(layer, "adding the gradient would overflow the residual");
    return exact;
  }

  static bool is_finite(T magnitude) {
    return std::bit_cast<detail::bits_of<T>>(magnitude) < detail::infinity_bits<T>;
  }

  template <class Source>
  static T largest_magnitude(std::size_t count, const Source& source) {
    return std::bit_cast<T>(detail::largest_magnitude_bits<T>(count, source));
  }

  [[noreturn]] void refuse(std::size_t layer, const char* reason) const {
    throw non_finite_gradient(layer, model_[layer].name, reason);
  }

  layout model_;
  detail::aligned_vector<T> values_;
  std::vector<T> magnitude_bounds_;
};

}  // namespace lamina
