// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lamina/layout.hpp"
#include "lamina/threshold.hpp"

namespace lamina {

/// Which layers of a layout go out whole; the others go out as list [0]. One bit a layer, in the order of the
/// wire format: layer l is bit l mod 8 of byte l / 8.
class selection {
 public:
  /// Nothing selected.
  explicit selection(const layout& model) : sizes_(model.sizes().begin(), model.sizes().end()) {
    bits_.resize((sizes_.size() + 7) / 8);
  }

  bool is_sent(std::size_t layer) const { return ((bits_.at(layer / 8) >> (layer % 8)) & 1) != 0; }
  bool is_dropped(std::size_t layer) const { return !is_sent(layer); }
  std::size_t sent_layers() const noexcept { return sent_layers_; }
  std::size_t sent_elements() const noexcept { return sent_elements_; }
  /// The presence bitmap of the wire format: ceil(L / 8) bytes.
  std::span<const std::uint8_t> bitmap() const noexcept { return bits_; }

  void clear() noexcept {
    std::ranges::fill(bits_, std::uint8_t{0});
    sent_layers_ = sent_elements_ = 0;
  }
  /// Selects `layer`. An empty layer has nothing to send and stays list [0].
  void send(std::size_t layer) {
    if (is_sent(layer) || sizes_.at(layer) == 0) return;
    bits_[layer / 8] |= static_cast<std::uint8_t>(1U << (layer % 8));
    ++sent_layers_;
    sent_elements_ += sizes_[layer];
  }
  /// The rule of the paper: a layer is sent if its value is at or above the threshold; all are at
  /// invalid_threshold. Throws std::out_of_range if there are more values than layers.
  void apply_threshold(std::span<const double> representative_values, double threshold) {
    clear();
    for (std::size_t l = 0; l < representative_values.size(); ++l) {
      if (threshold == invalid_threshold || representative_values[l] >= threshold) send(l);
    }
  }

 private:
  std::vector<std::size_t> sizes_;
  std::vector<std::uint8_t> bits_;
  std::size_t sent_layers_ = 0;
  std::size_t sent_elements_ = 0;
};

}  // namespace lamina
