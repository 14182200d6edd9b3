// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/buffer.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// What residual_accumulator keeps between steps: residual a and, with momentum, velocity u of every layer in flat
/// buffers.
///
/// A layer that is cleared is not written, nor is one that is new: the next gradient goes over what is there, in the threads
/// that will use it, whose memory it then is. Zeros are written when a layer is read before, once, whichever thread reads first:
/// const members may be called from several threads at a time.
template <element T>
class residual_memory {
 public:
  /// Throws std::invalid_argument for a momentum outside [0, 1).
  residual_memory(const layout& model, const residual_options& options)
      : model_(model), momentum_(static_cast<T>(checked(options.momentum))), layers_(model.layers()) {
    if (model.elements() > static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(T))
      raise(std::length_error("the bytes of the residual cannot be counted"));
    elements_ = buffer<T>(model.elements(), options.memory);
    if (has_velocity()) velocity_ = buffer<T>(model.elements(), options.memory);
  }

  const layout& model() const noexcept { return model_; }
  bool has_velocity() const noexcept { return momentum_ > 0; }
  T momentum() const noexcept { return momentum_; }

  /// One layer, its zeros written. Throws std::out_of_range.
  std::span<T> layer(std::size_t layer) const {
    model_.check_layer(layer);
    return written(elements_, layer, layers_[layer].elements);
  }
  std::span<const T> elements() const {
    for (std::size_t l = 0; l < model_.layers(); ++l) layer(l);
    return {elements_.data(), elements_.size()};
  }
  std::span<const T> velocity() const {
    if (!has_velocity()) return {};
    for (std::size_t l = 0; l < model_.layers(); ++l) written(velocity_, l, layers_[l].velocity);
    return {velocity_.data(), velocity_.size()};
  }

  /// To write to: the elements from `offset` on, counted through all layers, those of a clear layer being anything.
  T* elements_at(std::size_t offset) noexcept { return elements_.data() + offset; }
  T* velocity_at(std::size_t offset) noexcept { return velocity_.data() + offset; }
  bool is_clear(std::size_t layer) const noexcept { return !layers_[layer].elements.has_numbers(); }
  /// All elements of a layer were written, and of its velocity where there is one.
  void set_written(std::size_t layer) noexcept {
    layers_[layer].elements = content::numbers;
    if (has_velocity()) layers_[layer].velocity = content::numbers;
  }

  /// Whether the next gradient of a layer is the first in this step, for which the velocity decays.
  bool decays_next(std::size_t layer) const noexcept { return !layers_[layer].has_decayed; }
  void set_decayed(std::size_t layer) noexcept { layers_[layer].has_decayed = true; }
  void begin_step() noexcept {
    for (layer_state& each : layers_) each.has_decayed = false;
  }

  void clear(std::size_t layer) {
    model_.check_layer(layer);
    layers_[layer].elements = content::anything;
    clear_velocity(layer);
  }

  /// Elements [begin, end) alone.
  void clear(std::size_t layer, std::size_t begin, std::size_t end) {
    check_elements(layer, begin, end);
    write_zeros(elements_, layer, begin, end, layers_[layer].elements);
    clear_velocity(layer, begin, end);
  }

  /// a_l <- a_l − what the payload says.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload) {
    model_.check_layer(layer);
    subtract_payload(layer, type, payload, 0, model_.sizes()[layer]);
    clear_velocity(layer);
  }
  /// Elements [begin, end) alone.
  void subtract(std::size_t layer, payload_type type, const std::byte* payload, std::size_t begin,
                std::size_t end) {
    check_elements(layer, begin, end);
    if (has_blocks(type) && begin % payload_block_elements != 0) {
      raise(std::invalid_argument("element " + std::to_string(begin) + " of layer '" + model_[layer].name +
                                  "' does not begin a block of the " + name_of(type) + " payload"));
    }
    subtract_payload(layer, type, payload, begin, end);
    clear_velocity(layer, begin, end);
  }

  void restore(std::span<const T> elements, std::span<const T> velocity) {
    if (elements.size() != elements_.size() || velocity.size() != velocity_.size()) {
      detail::raise(std::invalid_argument("the saved residual has " + std::to_string(elements.size()) +
                                          " elements and " + std::to_string(velocity.size()) +
                                          " of velocity, where " + std::to_string(elements_.size()) +
                                          " and " + std::to_string(velocity_.size()) + " belong"));
    }
    for (const auto saved : {elements, velocity}) {
      if (!is_finite_magnitude(magnitude_of(saved))) {
        detail::raise(std::invalid_argument("the saved residual holds NaN or infinity"));
      }
    }
    std::copy(elements.begin(), elements.end(), elements_.begin());
    std::copy(velocity.begin(), velocity.end(), velocity_.begin());
    for (std::size_t l = 0; l < model_.layers(); ++l) set_written(l);
  }

  /// With a velocity: writes zeros to a block where residual or velocity count as zero, in cache for the pass that follows.
  void write_zeros(std::size_t layer, std::size_t offset, std::size_t count) noexcept {
    if (is_clear(layer)) std::fill_n(elements_at(offset), count, T(0));
    if (!layers_[layer].velocity.has_numbers()) std::fill_n(velocity_at(offset), count, T(0));
  }

 private:
  /// What the memory of a layer holds.
  enum class content : std::uint8_t {
    anything,  // and counts as zero
    becomes_zeros,
    zeros,
    numbers,
  };
  /// Readers in several threads may want the zeros of a layer at a time: one of them writes these, and the others wait.
  class content_flag {
   public:
    content_flag() = default;
    content_flag(const content_flag& other) noexcept : holds_(other.holds_.load()) {}
    content_flag& operator=(const content_flag& other) noexcept {
      holds_ = other.holds_.load();
      return *this;
    }
    content_flag& operator=(content holds) noexcept {
      holds_.store(holds, std::memory_order_relaxed);
      return *this;
    }
    bool has_numbers() const noexcept { return holds_.load(std::memory_order_relaxed) == content::numbers; }
    void want_zeros(std::span<T> elements) noexcept {
      content holds = holds_.load(std::memory_order_acquire);
      if (holds == content::anything && holds_.compare_exchange_strong(holds, content::becomes_zeros)) {
        std::fill(elements.begin(), elements.end(), T(0));
        holds_.store(content::zeros, std::memory_order_release);
        holds_.notify_all();
      } else if (holds == content::becomes_zeros) {
        holds_.wait(content::becomes_zeros, std::memory_order_acquire);
      }
    }

   private:
    std::atomic<content> holds_ = content::anything;
  };

  struct layer_state {
    content_flag elements;
    content_flag velocity;
    bool has_decayed = false;  // in this step
  };

  static double checked(double momentum) {
    if (is_nan(momentum) || !(momentum >= 0 && momentum < 1) || !(static_cast<T>(momentum) < T(1))) {
      raise(std::invalid_argument("momentum must lie in [0, 1), got " + std::to_string(momentum)));
    }
    return momentum;
  }

  std::span<T> layer_of(buffer<T>& all, std::size_t layer) const {
    return {all.data() + model_.offset(layer), model_.sizes()[layer]};
  }

  std::span<T> written(buffer<T>& all, std::size_t layer, content_flag& holds) const {
    const std::span<T> elements = layer_of(all, layer);
    holds.want_zeros(elements);
    return elements;
  }

  // Zeros need not be written where the layer counts as zero.
  void write_zeros(buffer<T>& all, std::size_t layer, std::size_t begin, std::size_t end,
                   const content_flag& holds) {
    if (!holds.has_numbers()) return;
    const std::span<T> elements = layer_of(all, layer).subspan(begin, end - begin);
    std::fill(elements.begin(), elements.end(), T(0));
  }

  void clear_velocity(std::size_t layer) {
    if (!has_velocity()) return;
    layers_[layer].velocity = content::anything;
  }
  void clear_velocity(std::size_t layer, std::size_t begin, std::size_t end) {
    if (has_velocity()) write_zeros(velocity_, layer, begin, end, layers_[layer].velocity);
  }

  // Of elements [begin, end), of integers from a block on.
  void subtract_payload(std::size_t layer, payload_type type, const std::byte* payload, std::size_t begin,
                        std::size_t end) {
    const std::span<T> to = this->layer(layer);
    std::array<T, 1024> sent;
    for (; begin < end; begin += sent.size()) {
      const auto rest = to.subspan(begin, (std::min)(sent.size(), end - begin));
      decode_payload<T>(type, payload, to.size(), begin, std::span(sent).first(rest.size()));
      subtract_elements(rest.data(), sent.data(), rest.size());
    }
  }

  void check_elements(std::size_t layer, std::size_t begin, std::size_t end) const {
    model_.check_layer(layer);
    if (begin <= end && end <= model_.sizes()[layer]) return;
    raise(std::out_of_range("elements " + std::to_string(begin) + " to " + std::to_string(end) +
                            " of layer '" + model_[layer].name + "' are not among its " +
                            std::to_string(model_.sizes()[layer])));
  }

  static T magnitude_of(std::span<const T> elements) {
    return largest_magnitude<T>(elements.size(), read_only<T>{elements.data()});
  }

  layout model_;
  T momentum_;
  mutable buffer<T> elements_;
  mutable buffer<T> velocity_;  // empty without momentum
  mutable std::vector<layer_state> layers_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
