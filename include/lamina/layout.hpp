// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/fnv.hpp"
#include "lamina/detail/raise.hpp"

namespace lamina::inline LAMINA_ABI {

/// One trainable tensor: its name, unique within the model, and its shape. A shape of {} is a scalar (one
/// element); a zero in the shape makes an empty layer.
struct layer {
  std::string name;
  std::vector<std::size_t> shape;

  /// Product of the shape. Throws std::invalid_argument, naming the layer, if it does not fit in std::size_t.
  [[nodiscard]] std::size_t elements() const {
    // An empty layer may have any other dimensions: look for the zero first, so that they cannot overflow.
    for (const std::size_t dimension : shape) {
      if (dimension == 0) return 0;
    }
    std::size_t product = 1;
    for (const std::size_t dimension : shape) {
      if (product > (std::numeric_limits<std::size_t>::max)() / dimension) {
        detail::raise(std::invalid_argument("layer '" + name + "': the number of elements overflows"));
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
  explicit layout(std::vector<layer> layers) : table_(new table(std::move(layers))) {}

  // Copies alone, and no moves: a moved-from layout would have no table.
  layout(const layout& other) noexcept : table_(other.table_) {
    table_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  layout& operator=(const layout& other) noexcept {
    layout copy(other);
    std::swap(table_, copy.table_);
    return *this;
  }
  ~layout() {
    // Whoever deletes sees what the others did before they let go.
    if (table_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete table_;
  }

  /// L, the number of layers.
  [[nodiscard]] std::size_t layers() const noexcept { return table_->layers.size(); }
  /// N, the number of elements of all layers together.
  [[nodiscard]] std::size_t elements() const noexcept { return table_->elements; }
  /// Layer `index`; throws std::out_of_range.
  [[nodiscard]] const layer& operator[](std::size_t index) const {
    check_layer(index);
    return table_->layers[index];
  }
  /// n_l for each layer: L entries.
  [[nodiscard]] std::span<const std::size_t> sizes() const noexcept { return table_->sizes; }
  /// Where layer `index` begins when all layers lie one behind the other, in elements; throws
  /// std::out_of_range.
  [[nodiscard]] std::size_t offset(std::size_t index) const {
    check_layer(index);
    return table_->offsets[index];
  }
  /// The layer of that name, if there is one. Cost: one hash of the name, O(1) on average.
  [[nodiscard]] std::optional<std::size_t> index_of(std::string_view name) const noexcept {
    const std::size_t place = table_->places[table_->place_of(name)];
    return place == 0 ? std::nullopt : std::optional<std::size_t>(place - 1);
  }
  /// 64 bits over the names and shapes in order (FNV-1a; docs/wire-format/index.md gives the bytes), the same on
  /// every machine. It tells models apart by accident, not by design: it is no cryptographic hash.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return table_->fingerprint; }

  /// Throws std::out_of_range, with the number of layers, unless index < layers().
  void check_layer(std::size_t index) const {
    if (index >= layers()) detail::raise(layer_error(index));
  }

  /// Throws std::invalid_argument, naming the layer with its shape, unless it has `count` elements;
  /// std::out_of_range for the index.
  void check_size(std::size_t index, std::size_t count) const {
    check_layer(index);
    if (count != sizes()[index]) detail::raise(size_error(index, count));
  }

  /// Throws std::invalid_argument unless there is one for each layer; `what` names them in the plural.
  void check_count(std::size_t count, const char* what) const {
    if (count == layers()) return;
    detail::raise(std::invalid_argument("the model has " + std::to_string(layers()) + " layers, got " +
                                        std::to_string(count) + " " + what));
  }

  /// What check_layer and check_size throw.
  std::out_of_range layer_error(std::size_t index) const {
    return std::out_of_range("layer index " + std::to_string(index) + " is out of range: the layout has " +
                             std::to_string(layers()) + " layers");
  }
  std::invalid_argument size_error(std::size_t index, std::size_t count) const {
    const layer& each = table_->layers[index];
    return std::invalid_argument("layer '" + each.name + "' has shape " + shape_string(each) + " (" +
                                 std::to_string(sizes()[index]) + " elements), the tensor given has " +
                                 std::to_string(count) + " elements");
  }

 private:
  struct table {
    explicit table(std::vector<layer> given) : layers(std::move(given)) {
      std::size_t room = 2;
      while (room < 2 * layers.size()) room *= 2;
      places.resize(room);
      sizes.reserve(layers.size());
      offsets.reserve(layers.size());
      for (std::size_t l = 0; l < layers.size(); ++l) {
        const layer& each = layers[l];
        if (each.name.empty())
          detail::raise(std::invalid_argument("layer " + std::to_string(l) + " has an empty name"));
        std::size_t& place = places[place_of(each.name)];
        if (place != 0) {
          detail::raise(std::invalid_argument("layer name '" + each.name + "' stands twice in the layout"));
        }
        place = l + 1;
        const std::size_t count = each.elements();
        if (count > (std::numeric_limits<std::size_t>::max)() - elements) {
          detail::raise(
              std::invalid_argument("layer '" + each.name + "': the elements of the whole layout overflow"));
        }
        offsets.push_back(elements);
        sizes.push_back(count);
        elements += count;
      }
      fingerprint = fingerprint_of(layers);
    }

    // Where the name stands in `places`, or would stand. At least half of them are free, so that it ends.
    std::size_t place_of(std::string_view name) const noexcept {
      std::uint64_t hash = detail::fnv_basis;
      for (const char each : name) hash = detail::fnv(hash, static_cast<std::uint8_t>(each));
      std::size_t index = static_cast<std::size_t>(hash) & (places.size() - 1);
      while (places[index] != 0 && layers[places[index] - 1].name != name) {
        index = (index + 1) & (places.size() - 1);
      }
      return index;
    }

    std::vector<layer> layers;
    std::vector<std::size_t> sizes;
    std::vector<std::size_t> offsets;
    std::size_t elements = 0;
    std::uint64_t fingerprint = 0;
    // Open addressing: for a name its layer + 1, 0 where there is none. A power of two of them.
    std::vector<std::size_t> places;
    std::atomic<std::size_t> owners = 1;
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
    std::uint64_t hash = detail::fnv_basis;
    const auto add_number = [&](std::uint64_t number) { hash = detail::fnv_number(hash, number); };
    add_number(layers.size());
    for (const layer& each : layers) {
      add_number(each.name.size());
      for (const char character : each.name) hash = detail::fnv(hash, static_cast<std::uint8_t>(character));
      add_number(each.shape.size());
      for (const std::size_t dimension : each.shape) add_number(dimension);
    }
    return hash;
  }

  table* table_;
};

/// The indices of the layers of which predicate(layer) says so, in order: for worker_options::always_sent, for
/// instance all biases. Cost: one call a layer.
template <class Predicate>
[[nodiscard]] std::vector<std::size_t> layers_where(const layout& model, const Predicate& predicate) {
  std::vector<std::size_t> found;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (predicate(model[l])) found.push_back(l);
  }
  return found;
}

}  // namespace lamina::inline LAMINA_ABI
