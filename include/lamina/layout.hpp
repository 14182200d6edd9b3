// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lamina/detail/raise.hpp"

/// The layers of a model, and the fragments into which they are cut. Read tensor.hpp before.
namespace lamina::inline LAMINA_ABI {

namespace detail {

/// FNV-1a of 64 bits (Fowler, Noll and Vo): the hash so far, and one byte more.
inline constexpr std::uint64_t fnv_basis = 0xcbf29ce484222325;
constexpr std::uint64_t fnv(std::uint64_t hash, std::uint8_t byte) noexcept {
  return (hash ^ byte) * 0x100000001b3;
}
/// Eight bytes more, the lowest first.
constexpr std::uint64_t fnv_number(std::uint64_t hash, std::uint64_t number) noexcept {
  for (unsigned shift = 0; shift < 64; shift += 8)
    hash = fnv(hash, static_cast<std::uint8_t>(number >> shift));
  return hash;
}

// Product of a shape; `of` begins the sentence of an error. A zero counts before an overflow: what is empty may have any other dimensions.
template <class Shape>
constexpr std::size_t product_of(const Shape& shape, std::string_view of = {}) {
  std::size_t product = 1;
  bool overflows = false;
  bool is_empty = false;
  for (const auto dimension : shape) {
    if (std::cmp_less(dimension, 0)) refuse(of, "the shape has the negative dimension ", dimension);
    const auto factor = static_cast<std::size_t>(dimension);
    is_empty |= factor == 0;
    overflows |= factor != 0 && product > (std::numeric_limits<std::size_t>::max)() / factor;
    product *= factor;
  }
  if (overflows && !is_empty) refuse(of, "the number of elements of the shape overflows");
  return is_empty ? 0 : product;
}

}  // namespace detail

/// One trainable tensor: its name, unique within the model, and its shape. A shape of {} is one element, one with a zero none.
struct layer {
  std::string name;
  std::vector<std::size_t> shape;

  /// Product of the shape. Throws std::invalid_argument, naming the layer, if it does not fit in std::size_t.
  [[nodiscard]] std::size_t elements() const {
    return detail::product_of(shape, name.empty() ? "" : detail::sentence("layer '", name, "': "));
  }
};

/// The model: L named layers with N elements in all, in a fixed order. Every worker and the server build the same layout from the same
/// model; its fingerprint travels in each frame. Immutable, so many threads may read it; copies share one table. What takes the index of a
/// layer throws std::out_of_range from L on.
class layout {
 public:
  /// Throws std::invalid_argument for an empty or a duplicate name, or if N overflows. There may be no layers at all.
  explicit layout(std::vector<layer> layers) : table_(std::make_shared<const table>(std::move(layers))) {}

  // Copies and no moves: a moved-from layout would have no table.
  layout(const layout& other) = default;
  layout& operator=(const layout& other) = default;

  /// L, the number of layers.
  [[nodiscard]] std::size_t layers() const noexcept { return table_->layers.size(); }
  /// N, the number of elements of all layers together.
  [[nodiscard]] std::size_t elements() const noexcept { return table_->elements; }
  [[nodiscard]] const layer& operator[](std::size_t index) const {
    check_layer(index);
    return table_->layers[index];
  }
  /// n_l for each layer: L entries.
  [[nodiscard]] std::span<const std::size_t> sizes() const noexcept { return table_->sizes; }
  /// Where layer `index` begins when all layers lie one behind the other, in elements.
  [[nodiscard]] std::size_t offset(std::size_t index) const {
    check_layer(index);
    return table_->offsets[index];
  }
  /// The layer of that name, if there is one. Cost: one hash of the name, O(1) on average.
  [[nodiscard]] std::optional<std::size_t> index_of(std::string_view name) const noexcept {
    const auto found = table_->places.find(name);
    return found == table_->places.end() ? std::nullopt : std::optional(found->second);
  }
  /// 64 bits over the names and shapes in order (FNV-1a; docs/wire-format.md gives the bytes), the same on
  /// every machine. It tells models apart by accident, not by design: it is no cryptographic hash.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return table_->fingerprint; }

  /// Throws std::out_of_range unless index < layers().
  void check_layer(std::size_t index) const {
    if (index >= layers()) {
      detail::refuse<std::out_of_range>("layer index ", index, " is out of range: the layout has ", layers(),
                                        " layers");
    }
  }
  /// Throws std::invalid_argument, naming the layer with its shape, unless it has `count` elements.
  void check_size(std::size_t index, std::size_t count) const {
    const layer& each = (*this)[index];
    if (count == sizes()[index]) return;
    std::string shape;
    for (const std::size_t dimension : each.shape)
      shape += detail::sentence(shape.empty() ? "" : ", ", dimension);
    detail::refuse("layer '", each.name, "' has shape [", shape, "] (", sizes()[index],
                   " elements), the tensor given has ", count, " elements");
  }
  /// Throws std::invalid_argument unless there is one for each layer; `what` names them in the plural.
  void check_count(std::size_t count, const char* what) const {
    if (count == layers()) return;
    detail::refuse("the model has ", layers(), " layers, got ", count, " ", what);
  }

 private:
  struct table {
    explicit table(std::vector<layer> given) : layers(std::move(given)) {
      hash(layers.size());
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const layer& each = layers[l];
        if (each.name.empty()) detail::refuse("layer ", l, " has an empty name");
        if (!places.emplace(each.name, l).second)
          detail::refuse("layer name '", each.name, "' stands twice in the layout");
        hash(each.name.size());
        for (const char character : each.name)
          fingerprint = detail::fnv(fingerprint, static_cast<std::uint8_t>(character));
        hash(each.shape.size());
        for (const std::size_t dimension : each.shape) hash(dimension);
        const std::size_t count = each.elements();
        if (count > (std::numeric_limits<std::size_t>::max)() - elements)
          detail::refuse("layer '", each.name, "': the elements of the whole layout overflow");
        offsets.push_back(elements);
        sizes.push_back(count);
        elements += count;
      }
    }

    void hash(std::uint64_t number) noexcept { fingerprint = detail::fnv_number(fingerprint, number); }

    std::vector<layer> layers;
    std::vector<std::size_t> sizes;
    std::vector<std::size_t> offsets;
    std::size_t elements = 0;
    std::uint64_t fingerprint = detail::fnv_basis;
    std::unordered_map<std::string_view, std::size_t> places;  // of the names, which lie in `layers`
  };

  std::shared_ptr<const table> table_;
};

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
  /// Those of layer 0, of layer 1, ... A layer that is not cut keeps its name; fragments of one that is are named "name[0]", "name[1]",
  /// ...; in a model that has a layer of such a name, with more brackets: "name[[0]]".
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
      detail::refuse("fragment_elements must be a multiple of ", detail::block_elements, ", got ",
                     fragment_elements);
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
