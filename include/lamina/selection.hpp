// SPDX-License-Identifier: MIT
#pragma once

#include <bit>

#include "lamina/layout.hpp"

/// The set of fragments that a step sends, and what of them has arrived. Read layout.hpp before.
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
    return ((bits_[layer / 8] >> (layer % 8)) & 1) != 0;
  }
  [[nodiscard]] bool is_dropped(std::size_t layer) const { return !is_sent(layer); }
  [[nodiscard]] std::size_t sent_layers() const noexcept { return sent_layers_; }
  [[nodiscard]] std::size_t sent_elements() const noexcept { return sent_elements_; }

  /// A std::forward_iterator by what it can do, and the range from it on.
  class sent_iterator {
   public:
    using value_type = std::size_t;
    using difference_type = std::ptrdiff_t;

    sent_iterator() = default;
    sent_iterator(const std::uint8_t* bits, std::size_t layer, std::size_t layers)
        : bits_(bits), layer_(layer), layers_(layers) {
      skip();
    }
    std::size_t operator*() const noexcept { return layer_; }
    sent_iterator& operator++() noexcept {
      ++layer_;
      skip();
      return *this;
    }
    sent_iterator operator++(int) noexcept {
      sent_iterator before = *this;
      ++*this;
      return before;
    }
    bool operator==(const sent_iterator& other) const noexcept { return layer_ == other.layer_; }
    [[nodiscard]] sent_iterator begin() const noexcept { return *this; }
    [[nodiscard]] sent_iterator end() const noexcept { return {bits_, layers_, layers_}; }

   private:
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
  /// The indices of the layers sent, ascending, for range-for and the standard algorithms. Valid until the selection changes. Cost of a
  /// walk: O(L / 8) and a step for each layer sent.
  [[nodiscard]] sent_iterator sent() const noexcept { return {bits_.data(), 0, model_.layers()}; }

  /// The presence bitmap of the wire format: ceil(L / 8) bytes.
  [[nodiscard]] std::span<const std::uint8_t> bitmap() const noexcept { return bits_; }
  [[nodiscard]] const layout& model() const noexcept { return model_; }

  void clear() noexcept {
    std::fill(bits_.begin(), bits_.end(), std::uint8_t{0});
    sent_layers_ = sent_elements_ = 0;
  }
  /// Selects `layer`: nothing is sent yet. An empty layer has nothing to send and stays as it is.
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
  layout model_;
  std::vector<std::uint8_t> bits_;
  std::size_t sent_layers_ = 0;
  std::size_t sent_elements_ = 0;
};

/// Elements [begin, end) of one layer.
struct element_range {
  std::size_t layer = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  friend bool operator==(const element_range&, const element_range&) = default;
};

/// Which elements of the layers of a frame have reached its receiver. A layer that was sent is counted in chunks of `chunk_elements`, of
/// which its last may be shorter, and a chunk arrives whole or is lost. Memory: one bit a chunk, 8 bytes a layer. What takes a layer or a
/// chunk throws std::out_of_range for one that is not there.
class delivery {
 public:
  /// Everything that `sent` selects has arrived. Throws std::invalid_argument for a chunk size of 0.
  delivery(const selection& sent, std::size_t chunk_elements) : sent_(sent), chunk_elements_(chunk_elements) {
    if (chunk_elements == 0) detail::refuse("a chunk must have at least one element");
    const std::span<const std::size_t> sizes = sent.model().sizes();
    first_chunk_.reserve(sizes.size() + 1);
    std::size_t chunks = 0;
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      first_chunk_.push_back(chunks);
      if (sent.is_sent(l)) chunks += sizes[l] / chunk_elements + (sizes[l] % chunk_elements != 0);
    }
    first_chunk_.push_back(chunks);
    is_lost_.resize(chunks);
  }

  /// One chunk of a layer has not arrived; said twice, it is lost once. Throws std::invalid_argument for a layer that is not sent.
  void lose(std::size_t layer, std::size_t chunk) {
    const std::size_t place = place_of(layer, chunk);
    if (is_lost_[place]) return;
    is_lost_[place] = true;
    lost_elements_ += (std::min)(chunk_elements_, sent_.model().sizes()[layer] - chunk * chunk_elements_);
  }
  /// Throws as lose().
  [[nodiscard]] bool is_lost(std::size_t layer, std::size_t chunk) const {
    return is_lost_[place_of(layer, chunk)];
  }
  /// Whether nothing was lost.
  [[nodiscard]] bool is_complete() const noexcept { return lost_elements_ == 0; }

  [[nodiscard]] std::size_t chunk_elements() const noexcept { return chunk_elements_; }
  /// The chunks that a layer was sent in, 0 for one that was dropped; and of them those that are lost, which are counted when asked for.
  [[nodiscard]] std::size_t chunks(std::size_t layer) const {
    sent_.model().check_layer(layer);
    return first_chunk_[layer + 1] - first_chunk_[layer];
  }
  [[nodiscard]] std::size_t lost_chunks(std::size_t layer) const {
    const auto count = static_cast<std::ptrdiff_t>(chunks(layer));
    const auto first = is_lost_.begin() + static_cast<std::ptrdiff_t>(first_chunk_[layer]);
    return static_cast<std::size_t>(std::count(first, first + count, true));
  }
  /// Those of all layers together, and the elements in them.
  [[nodiscard]] std::size_t lost_chunks() const noexcept {
    return static_cast<std::size_t>(std::count(is_lost_.begin(), is_lost_.end(), true));
  }
  [[nodiscard]] std::size_t lost_elements() const noexcept { return lost_elements_; }

  /// Calls consume(begin, end) with the elements of a layer that have arrived, as ranges that are as long as can be, ascending; and with
  /// those that are lost. A layer that was dropped gives none of either. Cost: a step for each chunk.
  template <class Consume>
  void for_each_delivered(std::size_t layer, Consume&& consume) const {
    for_each_run(layer, false, consume);
  }
  template <class Consume>
  void for_each_lost(std::size_t layer, Consume&& consume) const {
    for_each_run(layer, true, consume);
  }

  /// What the frame held.
  [[nodiscard]] const selection& sent() const noexcept { return sent_; }

 private:
  std::size_t place_of(std::size_t layer, std::size_t chunk) const {
    const std::size_t in_layer = chunks(layer);
    if (sent_.is_dropped(layer)) detail::refuse("layer '", sent_.model()[layer].name, "' was not sent");
    if (chunk >= in_layer) {
      detail::refuse<std::out_of_range>("chunk ", chunk, " is out of range: layer '",
                                        sent_.model()[layer].name, "' was sent in ", in_layer);
    }
    return first_chunk_[layer] + chunk;
  }

  template <class Consume>
  void for_each_run(std::size_t layer, bool lost, Consume& consume) const {
    const std::size_t in_layer = chunks(layer);
    const auto first = is_lost_.begin() + static_cast<std::ptrdiff_t>(first_chunk_[layer]);
    const auto last = first + static_cast<std::ptrdiff_t>(in_layer);
    const auto element = [&](auto chunk) {
      return (std::min)(static_cast<std::size_t>(chunk - first) * chunk_elements_,
                        sent_.model().sizes()[layer]);
    };
    for (auto begin = std::find(first, last, lost); begin != last;) {
      const auto end = std::find(begin, last, !lost);
      consume(element(begin), element(end));
      begin = std::find(end, last, lost);
    }
  }

  selection sent_;
  std::size_t chunk_elements_;
  std::vector<std::size_t>
      first_chunk_;            // of each layer, counted through all that are sent, and behind the last
  std::vector<bool> is_lost_;  // of each chunk
  std::size_t lost_elements_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI
