// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/layout.hpp"

namespace lamina::inline LAMINA_ABI {

/// A model whose layers are cut into fragments of at most m elements, so that one huge layer does not decide alone. The fragments are
/// themselves a layout, and everything that works on layers works on it: residual, values, frames, server. A fragment costs one value and
/// one bit; smaller ones make finer ratios and smaller bursts. Both sides build the same tiling from the same model; a frame of another
/// tiling is refused by its fingerprint. Calls with an index throw std::out_of_range.
class tiling {
 public:
  /// `fragment_elements` is m; 0: whole layers. Throws std::invalid_argument unless it is a multiple of 4,096, so that the values come from
  /// the same blocks.
  explicit tiling(const layout& model, std::size_t fragment_elements = 0)
      : model_(model),
        fragment_elements_(fragment_elements),
        fragments_(cut(model, fragment_elements, first_)) {}

  [[nodiscard]] const layout& model() const noexcept { return model_; }
  /// Those of layer 0, of layer 1, ... A layer that is not cut keeps its name; fragments of one that is are named "name[0]", "name[1]", ...;
  /// in a model that has a layer of such a name, with more brackets: "name[[0]]".
  [[nodiscard]] const layout& fragments() const noexcept { return fragments_; }
  /// The fragments of `layer` are [first(layer), first(layer + 1)).
  [[nodiscard]] std::size_t first(std::size_t layer) const { return first_.at(layer); }
  /// The layer that a fragment is of, and where in the layer it begins. Cost: O(log L).
  [[nodiscard]] std::size_t layer_of(std::size_t fragment) const {
    fragments_.check_layer(fragment);
    if (fragments_.layers() == model_.layers()) return fragment;
    return static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), fragment) -
                                    first_.begin()) -
           1;
  }
  [[nodiscard]] std::size_t begin(std::size_t fragment) const {
    return (fragment - first_[layer_of(fragment)]) * fragment_elements_;
  }
  /// m.
  [[nodiscard]] std::size_t fragment_elements() const noexcept { return fragment_elements_; }

 private:
  static layout cut(const layout& model, std::size_t fragment_elements, std::vector<std::size_t>& first) {
    if (fragment_elements % detail::block_elements != 0) {
      detail::refuse<std::invalid_argument>("fragment_elements must be a multiple of ",
                                            detail::block_elements, ", got ", fragment_elements);
    }
    std::string opening = "[";
    std::string closing = "]";
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::string& name = model[l].name;
      while (name.ends_with(closing) && name.find(opening) != std::string::npos) {
        opening += '[';
        closing += ']';
      }
    }
    std::vector<layer> fragments;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      first.push_back(fragments.size());
      const std::size_t elements = model.sizes()[l];
      if (fragment_elements == 0 || elements <= fragment_elements) {
        fragments.push_back(model[l]);
        continue;
      }
      for (std::size_t begin = 0, k = 0; begin < elements; begin += fragment_elements, ++k) {
        std::string name = model[l].name;
        name.append(opening).append(std::to_string(k)).append(closing);
        fragments.push_back({std::move(name), {(std::min)(fragment_elements, elements - begin)}});
      }
    }
    first.push_back(fragments.size());
    return layout(std::move(fragments));
  }

  layout model_;
  std::size_t fragment_elements_;
  std::vector<std::size_t> first_;  // before fragments_, which fills it
  layout fragments_;
};

}  // namespace lamina::inline LAMINA_ABI
