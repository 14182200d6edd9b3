// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/layout.hpp"

namespace lamina::inline LAMINA_ABI {

/// A model cut into parts: each layer into pieces of at most m elements, so that one huge layer does not decide alone.
/// The parts are themselves a layout, and everything that works on layers works on it: residual, values, frames, server.
/// A part costs one value and one bit. Smaller parts make finer ratios and smaller bursts.
///
/// Both sides build the same tiling from the same model; a frame of another tiling is refused by its fingerprint.
class tiling {
 public:
  /// \param model          the layers to cut
  /// \param fragment_elements  m, a multiple of 4,096, so that the values come from the same blocks; 0: whole layers
  /// \throws std::invalid_argument  m is no multiple of 4,096
  explicit tiling(const layout& model, std::size_t fragment_elements = 0)
      : model_(model), fragment_elements_(fragment_elements), parts_(cut(model, fragment_elements, first_)) {}

  [[nodiscard]] const layout& model() const noexcept { return model_; }
  /// The parts in order: those of layer 0, of layer 1, ... A layer in one part keeps its name; parts of one that is cut
  /// are named "name[0]", "name[1]", ...; in a model that has a layer of such a name, with more brackets: "name[[0]]".
  [[nodiscard]] const layout& fragments() const noexcept { return parts_; }
  /// The parts of `layer` are [first(layer), first(layer + 1)); throws std::out_of_range beyond L.
  [[nodiscard]] std::size_t first(std::size_t layer) const { return first_.at(layer); }
  /// The layer that a part is of, and where in the layer it begins. Cost: O(log L). Throws std::out_of_range.
  [[nodiscard]] std::size_t layer_of(std::size_t part) const {
    parts_.check_layer(part);
    if (!is_cut()) return part;
    return static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), part) - first_.begin()) -
           1;
  }
  [[nodiscard]] std::size_t begin(std::size_t part) const {
    return (part - first_[layer_of(part)]) * fragment_elements_;
  }
  /// The part that holds an element of a layer. Throws std::out_of_range.
  [[nodiscard]] std::size_t fragment_at(std::size_t layer, std::size_t element) const {
    model_.check_layer(layer);
    if (element >= model_.sizes()[layer])
      detail::raise(
          std::out_of_range("layer '" + model_[layer].name + "' has no element " + std::to_string(element)));
    return fragment_elements_ == 0 ? first_[layer] : first_[layer] + element / fragment_elements_;
  }
  /// Flags of parts from flags of layers: those of a layer are all its own. For worker::step::select().
  /// Throws std::invalid_argument for a number of flags other than model().layers(). Cost: O(parts), one allocation.
  [[nodiscard]] std::vector<char> by_fragment(std::span<const char> flags_of_layers) const {
    if (flags_of_layers.size() != model_.layers()) {
      detail::raise(std::invalid_argument("there are " + std::to_string(flags_of_layers.size()) +
                                          " flags for the " + std::to_string(model_.layers()) +
                                          " layers of the model"));
    }
    std::vector<char> flags;
    flags.reserve(parts_.layers());
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const std::size_t end = l + 1 < model_.layers() ? first_[l + 1] : parts_.layers();
      flags.resize(end, flags_of_layers[l]);
    }
    return flags;
  }
  /// Whether a layer has more than one part.
  [[nodiscard]] bool is_cut() const noexcept { return parts_.layers() != model_.layers(); }
  /// Elements of all parts of a layer but its last; 0: layers are whole.
  [[nodiscard]] std::size_t fragment_elements() const noexcept { return fragment_elements_; }

 private:
  static layout cut(const layout& model, std::size_t fragment_elements, std::vector<std::size_t>& first) {
    if (fragment_elements % detail::block_elements != 0) {
      detail::raise(std::invalid_argument("fragment_elements must be a multiple of " +
                                          std::to_string(detail::block_elements) + ", got " +
                                          std::to_string(fragment_elements)));
    }
    std::string opening = "[";
    std::string closing = "]";
    while (has_layer_ending(model, fragment_elements, opening, closing)) {
      opening += '[';
      closing += ']';
    }
    std::vector<layer> parts;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      first.push_back(parts.size());
      const std::size_t elements = model.sizes()[l];
      if (fragment_elements == 0 || elements <= fragment_elements) {
        parts.push_back(model[l]);
        continue;
      }
      for (std::size_t begin = 0, k = 0; begin < elements; begin += fragment_elements, ++k) {
        std::string name = model[l].name;
        name.append(opening).append(std::to_string(k)).append(closing);
        parts.push_back({std::move(name), {(std::min)(fragment_elements, elements - begin)}});
      }
    }
    first.push_back(parts.size());
    return layout(std::move(parts));
  }

  // Whether the model has a layer whose name a part of another would get.
  static bool has_layer_ending(const layout& model, std::size_t fragment_elements, const std::string& opening,
                               const std::string& closing) {
    if (fragment_elements == 0) return false;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::string& name = model[l].name;
      const std::size_t bracket = name.rfind(opening);
      if (bracket == std::string::npos || !name.ends_with(closing)) continue;
      for (std::size_t whole = 0; whole < model.layers(); ++whole) {
        if (model.sizes()[whole] > fragment_elements && model[whole].name == name.substr(0, bracket))
          return true;
      }
    }
    return false;
  }

  layout model_;
  std::size_t fragment_elements_;
  std::vector<std::size_t> first_;  // before parts_, which fills it
  layout parts_;
};

}  // namespace lamina::inline LAMINA_ABI
