// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"

namespace lamina::inline LAMINA_ABI {

/// Which layers of a layout go out whole; the others are dropped. One bit a layer, in the order of the wire format: layer l
/// is bit l mod 8 of byte l / 8.
class selection {
 public:
  /// Nothing selected.
  explicit selection(const layout& model) : model_(model), bits_((model.layers() + 7) / 8) {}

  /// Throws std::out_of_range, as the other calls with an index.
  [[nodiscard]] bool is_sent(std::size_t layer) const {
    model_.check_layer(layer);
    return has_bit(layer);
  }
  [[nodiscard]] bool is_dropped(std::size_t layer) const { return !is_sent(layer); }
  [[nodiscard]] std::size_t sent_layers() const noexcept { return sent_layers_; }
  [[nodiscard]] std::size_t sent_elements() const noexcept { return sent_elements_; }

  class sent_range;
  /// The indices of the layers sent, ascending: `for (const std::size_t layer : chosen.sent())`. Valid until the selection
  /// changes. Cost of a walk: O(L / 8) and a step for each layer sent.
  [[nodiscard]] sent_range sent() const noexcept;

  /// The presence bitmap of the wire format: ceil(L / 8) bytes.
  [[nodiscard]] std::span<const std::uint8_t> bitmap() const noexcept { return bits_; }
  [[nodiscard]] const layout& model() const noexcept { return model_; }

  void clear() noexcept {
    std::fill(bits_.begin(), bits_.end(), std::uint8_t{0});
    sent_layers_ = sent_elements_ = 0;
  }
  /// Selects `layer`. An empty layer has nothing to send and stays as it is.
  void send(std::size_t layer) {
    if (is_sent(layer) || model_.sizes()[layer] == 0) return;
    bits_[layer / 8] |= static_cast<std::uint8_t>(1U << (layer % 8));
    ++sent_layers_;
    sent_elements_ += model_.sizes()[layer];
  }
  void send_all() {
    for (std::size_t l = 0; l < model_.layers(); ++l) send(l);
  }

 private:
  bool has_bit(std::size_t layer) const noexcept { return ((bits_[layer / 8] >> (layer % 8)) & 1) != 0; }

  layout model_;
  std::vector<std::uint8_t> bits_;
  std::size_t sent_layers_ = 0;
  std::size_t sent_elements_ = 0;
};

/// A range of indices, for range-for and the standard algorithms.
class selection::sent_range {
 public:
  class iterator {
   public:
    // A std::forward_iterator by what it can do.
    using value_type = std::size_t;
    using difference_type = std::ptrdiff_t;

    iterator() = default;
    std::size_t operator*() const noexcept { return layer_; }
    iterator& operator++() noexcept {
      ++layer_;
      skip();
      return *this;
    }
    iterator operator++(int) noexcept {
      iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const iterator& other) const noexcept { return layer_ == other.layer_; }

   private:
    friend class sent_range;
    iterator(const std::uint8_t* bits, std::size_t layer, std::size_t layers)
        : bits_(bits), layer_(layer), layers_(layers) {
      skip();
    }
    void skip() noexcept {
      while (layer_ < layers_) {
        const unsigned rest = static_cast<unsigned>(bits_[layer_ / 8]) >> (layer_ % 8);
        if (rest != 0) {
          layer_ += static_cast<std::size_t>(std::countr_zero(rest));
          return;
        }
        layer_ = (std::min)((layer_ / 8 + 1) * 8, layers_);
      }
    }

    const std::uint8_t* bits_ = nullptr;
    std::size_t layer_ = 0;
    std::size_t layers_ = 0;
  };

  [[nodiscard]] iterator begin() const noexcept { return {bits_, 0, layers_}; }
  [[nodiscard]] iterator end() const noexcept { return {bits_, layers_, layers_}; }

 private:
  friend class selection;
  sent_range(const std::uint8_t* bits, std::size_t layers) : bits_(bits), layers_(layers) {}

  const std::uint8_t* bits_;
  std::size_t layers_;
};

inline selection::sent_range selection::sent() const noexcept {
  return {bits_.data(), model_.layers()};
}

}  // namespace lamina::inline LAMINA_ABI
