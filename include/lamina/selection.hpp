// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/layout.hpp"

namespace lamina {

/// Which layers of a layout go out whole; the others go out as list [0]. One bit a layer, in the order of the
/// wire format: layer l is bit l mod 8 of byte l / 8.
class selection {
 public:
  /// Nothing selected.
  explicit selection(const layout& model) : model_(model), bits_((model.layers() + 7) / 8) {}

  /// Throws std::out_of_range, as the other calls with an index.
  bool is_sent(std::size_t layer) const {
    model_.check_layer(layer);
    return ((bits_[layer / 8] >> (layer % 8)) & 1) != 0;
  }
  bool is_dropped(std::size_t layer) const { return !is_sent(layer); }
  std::size_t sent_layers() const noexcept { return sent_layers_; }
  std::size_t sent_elements() const noexcept { return sent_elements_; }
  /// The presence bitmap of the wire format: ceil(L / 8) bytes.
  std::span<const std::uint8_t> bitmap() const noexcept { return bits_; }
  const layout& model() const noexcept { return model_; }

  void clear() noexcept {
    std::ranges::fill(bits_, std::uint8_t{0});
    sent_layers_ = sent_elements_ = 0;
  }
  /// Selects `layer`. An empty layer has nothing to send and stays list [0].
  void send(std::size_t layer) {
    if (is_sent(layer) || model_.sizes()[layer] == 0) return;
    bits_[layer / 8] |= static_cast<std::uint8_t>(1U << (layer % 8));
    ++sent_layers_;
    sent_elements_ += model_.sizes()[layer];
  }
  void send_all() {
    for (std::size_t l = 0; l < model_.layers(); ++l) send(l);
  }
  /// The rule of the paper: exactly the layers whose value is at or above the threshold. Throws
  /// std::invalid_argument, and changes nothing, unless there are L values.
  void apply_threshold(std::span<const double> representative_values, double threshold) {
    if (representative_values.size() != model_.layers()) {
      throw std::invalid_argument(std::to_string(representative_values.size()) + " values for " +
                                  std::to_string(model_.layers()) + " layers");
    }
    clear();
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (representative_values[l] >= threshold) send(l);
    }
  }

 private:
  layout model_;
  std::vector<std::uint8_t> bits_;
  std::size_t sent_layers_ = 0;
  std::size_t sent_elements_ = 0;
};

}  // namespace lamina
