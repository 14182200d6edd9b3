// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace lamina {

/// One trainable tensor: its name, unique within the model, and its shape. A shape of {} is a scalar (one
/// element); a zero in the shape makes an empty layer.
struct layer {
  std::string name;
  std::vector<std::size_t> shape;

  /// Product of the shape. Throws std::invalid_argument, naming the layer, if it does not fit in std::size_t.
  std::size_t elements() const {
    // An empty layer may have any other dimensions: look for the zero first, so that they cannot overflow.
    for (const std::size_t dimension : shape) {
      if (dimension == 0) return 0;
    }
    std::size_t product = 1;
    for (const std::size_t dimension : shape) {
      if (product > std::numeric_limits<std::size_t>::max() / dimension) {
        throw std::invalid_argument("layer '" + name + "': the number of elements overflows");
      }
      product *= dimension;
    }
    return product;
  }
};

/// The model as the library sees it: L named layers with N elements in all, in a fixed order. Every worker and
/// the server build the same layout from the same model; its fingerprint travels in each frame.
///
/// Immutable after construction, so it may be read from many threads; copies share one table.
class layout {
 public:
  /// Throws std::invalid_argument for an empty or a duplicate name, or if N overflows. No layers at all is
  /// allowed.
  explicit layout(std::vector<layer> layers) : table_(std::make_shared<const table>(std::move(layers))) {}

  // Copies alone, and no moves: a moved-from layout would have no table.
  layout(const layout&) = default;
  layout& operator=(const layout&) = default;
  ~layout() = default;

  /// L, the number of layers.
  std::size_t layers() const noexcept { return table_->layers.size(); }
  /// N, the number of elements of all layers together.
  std::size_t elements() const noexcept { return table_->elements; }
  /// Layer `index`; throws std::out_of_range.
  const layer& operator[](std::size_t index) const {
    check_layer(index);
    return table_->layers[index];
  }
  /// n_l for each layer: L entries.
  std::span<const std::size_t> sizes() const noexcept { return table_->sizes; }
  /// Where layer `index` begins when all layers lie one behind the other, in elements; throws
  /// std::out_of_range.
  std::size_t offset(std::size_t index) const {
    check_layer(index);
    return table_->offsets[index];
  }
  /// 64 bits over the names and shapes in order (FNV-1a; docs/wire-format.md gives the bytes), the same on
  /// every machine. It tells models apart by accident, not by design: it is no cryptographic hash.
  std::uint64_t fingerprint() const noexcept { return table_->fingerprint; }

  /// Throws std::out_of_range, with the number of layers, unless index < layers().
  void check_layer(std::size_t index) const {
    if (index >= layers()) {
      throw std::out_of_range("layer index " + std::to_string(index) + " is out of range: the layout has " +
                              std::to_string(layers()) + " layers");
    }
  }

  /// Throws std::invalid_argument, naming the layer with its shape, unless it has `count` elements;
  /// std::out_of_range for the index.
  void check_size(std::size_t index, std::size_t count) const {
    check_layer(index);
    if (count == sizes()[index]) return;
    const layer& each = table_->layers[index];
    throw std::invalid_argument("layer '" + each.name + "' has shape " + shape_string(each) + " (" +
                                std::to_string(sizes()[index]) + " elements), the tensor given has " +
                                std::to_string(count) + " elements");
  }

 private:
  struct table {
    explicit table(std::vector<layer> given) : layers(std::move(given)) {
      std::unordered_set<std::string> names;
      sizes.reserve(layers.size());
      offsets.reserve(layers.size());
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const layer& each = layers[l];
        if (each.name.empty())
          throw std::invalid_argument("layer " + std::to_string(l) + " has an empty name");
        if (!names.insert(each.name).second) {
          throw std::invalid_argument("layer name '" + each.name + "' stands twice in the layout");
        }
        const std::size_t count = each.elements();
        if (count > std::numeric_limits<std::size_t>::max() - elements) {
          throw std::invalid_argument("layer '" + each.name + "': the elements of the whole layout overflow");
        }
        offsets.push_back(elements);
        sizes.push_back(count);
        elements += count;
      }
      fingerprint = fingerprint_of(layers);
    }

    std::vector<layer> layers;
    std::vector<std::size_t> sizes;
    std::vector<std::size_t> offsets;
    std::size_t elements = 0;
    std::uint64_t fingerprint = 0;
  };

  static std::string shape_string(const layer& each) {
    std::string text = "[";
    for (const std::size_t dimension : each.shape) {
      if (text.size() > 1) text += ", ";
      text += std::to_string(dimension);
    }
    return text + "]";
  }

  static std::uint64_t fingerprint_of(const std::vector<layer>& layers) noexcept {
    std::uint64_t hash = 0xcbf29ce484222325;
    const auto add_byte = [&hash](std::uint8_t byte) { hash = (hash ^ byte) * 0x100000001b3; };
    const auto add_number = [&](std::uint64_t number) {
      for (int shift = 0; shift < 64; shift += 8) add_byte(static_cast<std::uint8_t>(number >> shift));
    };
    add_number(layers.size());
    for (const layer& each : layers) {
      add_number(each.name.size());
      for (const char character : each.name) add_byte(static_cast<std::uint8_t>(character));
      add_number(each.shape.size());
      for (const std::size_t dimension : each.shape) add_number(dimension);
    }
    return hash;
  }

  std::shared_ptr<const table> table_;
};

}  // namespace lamina
