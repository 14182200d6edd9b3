// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/aligned_vector.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/layout.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

namespace lamina::detail {

/// What residual_accumulator keeps between steps: residual a and, with momentum, velocity u of every layer in flat
/// buffers, and what is known of their magnitudes.
///
/// A layer that is cleared is not written: the next gradient goes over what is there. Its zeros are written when it is
/// looked at before, so const members write.
template <element T>
class residual_memory {
 public:
  /// No |a_i| of the layer, and no |u_i|, is larger.
  struct magnitude_bounds {
    T elements = 0;
    T velocity = 0;

    /// Whether they leave room for one more small gradient: up to a quarter of the range, so that rounding of sums and
    /// bounds, and that gradient with its velocity, still fit.
    bool leave_room() const noexcept {
      constexpr T room = std::numeric_limits<T>::max() / 4;
      return elements < room && velocity < room;
    }
  };

  /// Throws std::invalid_argument for a momentum outside [0, 1).
  residual_memory(const layout& model, double momentum)
      : model_(model), elements_(model.elements()), layers_(model.layers()) {
    if (is_nan(momentum) || !(momentum >= 0 && momentum < 1)) {
      throw std::invalid_argument("momentum must lie in [0, 1), got " + std::to_string(momentum));
    }
    momentum_ = static_cast<T>(momentum);
    if (momentum > 0) velocity_.resize(model.elements());
  }

  const layout& model() const noexcept { return model_; }
  bool has_velocity() const noexcept { return !velocity_.empty(); }

  /// One layer, its zeros written. Throws std::out_of_range.
  std::span<T> layer(std::size_t layer) const {
    model_.check_layer(layer);
    layer_state& state = layers_[layer];
    const std::span<T> elements = layer_of(elements_, layer);
    if (state.is_clear && !state.holds_zeros) {
      std::ranges::fill(elements, T(0));
      state.holds_zeros = true;
    }
    return elements;
  }
  std::span<const T> elements() const {
    for (std::size_t l = 0; l < model_.layers(); ++l) layer(l);
    return elements_;
  }
  std::span<const T> velocity() const noexcept { return velocity_; }

  /// To write to: the elements from `offset` on, counted through all layers, those of a clear layer being anything.
  T* elements_at(std::size_t offset) noexcept { return elements_.data() + offset; }
  T* velocity_at(std::size_t offset) noexcept { return velocity_.data() + offset; }
  bool is_clear(std::size_t layer) const noexcept { return layers_[layer].is_clear; }
  /// All elements of a layer were written.
  void set_written(std::size_t layer) noexcept { layers_[layer].is_clear = false; }

  void clear(std::size_t layer) {
    model_.check_layer(layer);
    layers_[layer].bounds.elements = 0;
    layers_[layer].is_clear = true;
    layers_[layer].holds_zeros = false;
    clear_velocity(layer);
  }

  /// a_l <- a_l − what the payload says.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    const std::span<T> to = this->layer(layer);
    std::array<T, block_elements> sent;
    for (std::size_t begin = 0; begin < to.size(); begin += sent.size()) {
      const auto rest = to.subspan(begin, std::min(sent.size(), to.size() - begin));
      decode_payload<T>(type, payload, to.size(), begin, std::span(sent).first(rest.size()));
      for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= sent[i];
    }
    layers_[layer].bounds.elements = magnitude_of(to);
    clear_velocity(layer);
  }

  void restore(std::span<const T> elements, std::span<const T> velocity) {
    if (elements.size() != elements_.size() || velocity.size() != velocity_.size()) {
      throw std::invalid_argument("the saved residual has " + std::to_string(elements.size()) +
                                  " elements and " + std::to_string(velocity.size()) +
                                  " of velocity, where " + std::to_string(elements_.size()) + " and " +
                                  std::to_string(velocity_.size()) + " belong");
    }
    for (const auto saved : {elements, velocity}) {
      if (!is_finite_magnitude(magnitude_of(saved))) {
        throw std::invalid_argument("the saved residual holds NaN or infinity");
      }
    }
    std::ranges::copy(elements, elements_.begin());
    std::ranges::copy(velocity, velocity_.begin());
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      set_written(l);
      layers_[l].bounds = {magnitude_of(layer_of(elements_, l)),
                           has_velocity() ? magnitude_of(layer_of(velocity_, l)) : T(0)};
    }
  }

  /// The velocity that a block of the gradient leads to: m·u + g, the product rounded by itself on every machine.
  template <class G>
  void corrected(std::size_t offset, const G* from, std::size_t count,
                 std::array<T, block_elements>& updated) const {
    const T* u = velocity_.data() + offset;
    for (std::size_t i = 0; i < count; ++i) updated[i] = momentum_ * u[i];
    round_by_itself(updated);
    for (std::size_t i = 0; i < count; ++i) updated[i] += load_as<T, T>(from + i);
  }

  const magnitude_bounds& bounds(std::size_t layer) const noexcept { return layers_[layer].bounds; }
  void set_bounds(std::size_t layer, const magnitude_bounds& bounds) noexcept {
    layers_[layer].bounds = bounds;
  }
  /// The bounds after a gradient of small magnitudes: |u| <= m·|u| + small, |a| <= |a| + |u|.
  magnitude_bounds bounds_after_small(magnitude_bounds before) const noexcept {
    const T velocity = momentum_ * before.velocity + small_magnitude<T>;
    return {before.elements + velocity, velocity};
  }
  /// The bounds that adding this gradient would lead to, from the sums themselves.
  template <class G>
  magnitude_bounds bounds_after(std::size_t layer, std::span<const G> gradient) const {
    const std::span<const T> elements = this->layer(layer);
    magnitude_bounds exact;
    std::array<T, block_elements> updated;
    for (std::size_t begin = 0; begin < gradient.size(); begin += updated.size()) {
      const std::size_t count = std::min(updated.size(), gradient.size() - begin);
      const G* from = gradient.data() + begin;
      if (has_velocity()) {
        corrected(model_.offset(layer) + begin, from, count, updated);
        exact.velocity = larger_magnitude(exact.velocity, magnitude_of(std::span(updated).first(count)));
      } else {
        for (std::size_t i = 0; i < count; ++i) updated[i] = load_as<T, T>(from + i);
      }
      const T sum = largest_magnitude<T>(count, sum_of<T>{elements.data() + begin, updated.data()});
      exact.elements = larger_magnitude(exact.elements, sum);
    }
    return exact;
  }

 private:
  struct layer_state {
    magnitude_bounds bounds;
    bool is_clear = true;
    bool holds_zeros = true;  // of a clear layer: whether its zeros were written
  };

  std::span<T> layer_of(aligned_vector<T>& buffer, std::size_t layer) const {
    return std::span(buffer).subspan(model_.offset(layer), model_.sizes()[layer]);
  }

  void clear_velocity(std::size_t layer) {
    if (!has_velocity()) return;
    std::ranges::fill(layer_of(velocity_, layer), T(0));
    layers_[layer].bounds.velocity = 0;
  }

  static T magnitude_of(std::span<const T> elements) {
    return largest_magnitude<T>(elements.size(), read_only<T>{elements.data()});
  }

  layout model_;
  T momentum_ = 0;
  mutable aligned_vector<T> elements_;
  aligned_vector<T> velocity_;  // empty without momentum
  mutable std::vector<layer_state> layers_;
};

}  // namespace lamina::detail
