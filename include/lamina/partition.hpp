// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/kernels.hpp"
#include "lamina/layout.hpp"

namespace lamina {

/// A model cut into parts: each layer into pieces of at most m elements, so that one huge layer does not decide alone.
/// The parts are themselves a layout, and everything that works on layers works on it: residual, values, frames, server.
/// A part costs one value and one bit. Smaller parts make finer ratios and smaller bursts.
///
/// Both sides build the same partition from the same model; a frame of another partition is refused by its fingerprint.
class partition {
 public:
  /// \param model          the layers to cut
  /// \param part_elements  m, a multiple of 4,096, so that the values come from the same blocks; 0: whole layers
  /// \throws std::invalid_argument  m is no multiple of 4,096
  explicit partition(const layout& model, std::size_t part_elements = 0)
      : model_(model), part_elements_(part_elements), parts_(cut(model, part_elements, first_)) {}

  const layout& model() const noexcept { return model_; }
  /// The parts in order: those of layer 0, of layer 1, ... A layer in one part keeps its name; parts of one that is cut
  /// are named "name[0]", "name[1]", ...
  const layout& parts() const noexcept { return parts_; }
  /// The parts of `layer` are [first(layer), first(layer + 1)); throws std::out_of_range beyond L.
  std::size_t first(std::size_t layer) const { return first_.at(layer); }
  /// The layer that a part is of, and where in the layer it begins. Cost: O(log L). Throws std::out_of_range.
  std::size_t layer_of(std::size_t part) const {
    parts_.check_layer(part);
    return static_cast<std::size_t>(std::ranges::upper_bound(first_, part) - first_.begin()) - 1;
  }
  std::size_t begin(std::size_t part) const { return (part - first_[layer_of(part)]) * part_elements_; }
  /// Elements of all parts of a layer but its last; 0: layers are whole.
  std::size_t part_elements() const noexcept { return part_elements_; }

 private:
  static layout cut(const layout& model, std::size_t part_elements, std::vector<std::size_t>& first) {
    if (part_elements % detail::block_elements != 0) {
      throw std::invalid_argument("part_elements must be a multiple of " +
                                  std::to_string(detail::block_elements) + ", got " +
                                  std::to_string(part_elements));
    }
    std::vector<layer> parts;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      first.push_back(parts.size());
      const std::size_t elements = model.sizes()[l];
      if (part_elements == 0 || elements <= part_elements) {
        parts.push_back(model[l]);
        continue;
      }
      for (std::size_t begin = 0, k = 0; begin < elements; begin += part_elements, ++k) {
        parts.push_back(
            {model[l].name + "[" + std::to_string(k) + "]", {std::min(part_elements, elements - begin)}});
      }
    }
    first.push_back(parts.size());
    return layout(std::move(parts));
  }

  layout model_;
  std::size_t part_elements_;
  std::vector<std::size_t> first_;  // before parts_, which fills it
  layout parts_;
};

}  // namespace lamina
