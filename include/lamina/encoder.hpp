// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/selection.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

namespace detail {

// What gives a layer is called for one after the other, and the frame points to all of them.
template <class LayerElements>
constexpr void require_lasting_elements() {
  using given = decltype(std::declval<LayerElements&>()(std::size_t{0}));
  static_assert(
      std::is_lvalue_reference_v<given> || std::ranges::enable_borrowed_range<std::remove_cvref_t<given>>,
      "lamina: the callable gives each layer as a container of its own, which is gone before the frame is "
      "sent. "
      "Give a reference or a std::span: [&](std::size_t l) -> const std::vector<float>& { ... }");
}

}  // namespace detail

/// Builds frames of one layout, in one run. Allocates when it is made; with a payload type other than as_is also for a
/// frame larger than all before it.
template <element T>
class frame_encoder {
 public:
  /// A copy has no frame yet: the original's points into the original.
  frame_encoder(const frame_encoder& other) : frame_encoder(other.model_, other.run_) {}
  frame_encoder& operator=(const frame_encoder& other) {
    *this = frame_encoder(other);
    return *this;
  }
  frame_encoder(frame_encoder&&) noexcept = default;
  frame_encoder& operator=(frame_encoder&&) noexcept = default;

  /// \param model  what the frames are of
  /// \param run    written into them, so that a receiver tells frames of this run from those of another; 0: none
  explicit frame_encoder(const layout& model, std::uint32_t run = 0)
      : model_(model),
        run_(run),
        prefix_(detail::wire_header_bytes + detail::padded_bitmap_bytes(model.layers())) {
    frame_.segments_.reserve(model.layers() + 1);
    segments_.reserve(model.layers() + 1);
  }

  /// A frame with the layers that `chosen` sends. On an error, also one that `layer_elements` throws, there is no frame any
  /// more.
  ///
  /// \param kind            what the layers are
  /// \param step            counted from 1
  /// \param sender          the worker's index in [0, W), or a leader's among the leaders; 0 in the server's frames
  /// \param chosen          which layers, of the encoder's layout
  /// \param layer_elements  `layer_elements(l)` gives layer l as a std::span<const T> of n_l elements, or as a reference to
  ///                        what one is made of; called for the layers sent, in order
  /// \param type            how the elements are written
  /// \param checksum        whether the frame has one, in which case what is sent is read once more
  /// \param part            where it stands in a step that is sent in parts; see part_encoder.hpp, which counts them
  /// \return the frame, valid until the next call
  /// \throws std::invalid_argument  the selection is of another layout, or a span has another size than its layer;
  ///                                parameters to be written as int8 or int4 that hold NaN or infinity; a part in which
  ///                                layers go out that are not decided, or that is the last and decides not all
  ///
  /// Cost: O(L) and, for a checksum, one read of what is sent. No copy as_is; other payload types are written to a
  /// buffer of the encoder.
  template <class LayerElements>
  const encoded_frame& encode(frame_kind kind, std::uint64_t step, std::uint32_t sender,
                              const selection& chosen, LayerElements&& layer_elements,
                              payload_type type = payload_type::as_is,
                              frame_checksum checksum = frame_checksum::xxh3,
                              const std::optional<frame_part>& part = {}) {
    detail::require_lasting_elements<LayerElements>();
    forget();
    if (chosen.model().fingerprint() != model_.fingerprint()) {
      detail::raise(std::invalid_argument("the selection is of another layout than the frame"));
    }
    if (part) check_decided(*part, chosen);
    prefix_.assign(detail::wire_header_bytes + detail::padded_bitmap_bytes(model_.layers(), part.has_value()),
                   std::byte{0});
    segments_.assign(1, prefix_);
    if (type != payload_type::as_is) converted_.resize((std::max)(converted_.size(), bytes_of(chosen, type)));
    std::size_t payload_bytes = 0;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (chosen.is_dropped(l)) continue;
      const std::span<const T> elements = layer_elements(l);
      model_.check_size(l, elements.size());
      if (type == payload_type::as_is) {
        segments_.push_back(std::as_bytes(elements));
      } else {
        std::byte* to = converted_.data() + payload_bytes;
        convert(kind, type, l, elements, to);
        segments_.emplace_back(to, lamina::payload_bytes<T>(type, elements.size()));
      }
      payload_bytes += segments_.back().size();
    }

    detail::wire_header header;
    header.element_type = detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(kind);
    const bool has_checksum = checksum == frame_checksum::xxh3;
    header.flags = has_checksum ? detail::flag_checksum : 0;
    header.sender = sender;
    header.step = step;
    header.fingerprint = model_.fingerprint();
    header.layers = model_.layers();
    header.payload_type = static_cast<std::uint8_t>(type);
    header.payload_bytes = payload_bytes;
    header.run = run_;
    if (part) {
      header.flags |= detail::flag_part | (part->is_last ? detail::flag_last_part : 0);
      header.part = part->index;
    }
    detail::write_header(prefix_, header);
    const auto bitmap = std::as_bytes(chosen.bitmap());
    const auto behind = std::ranges::copy(bitmap, prefix_.begin() + detail::wire_header_bytes).out;
    if (part) std::ranges::copy(std::as_bytes(part->decided->bitmap()), behind);

    if (has_checksum) {
      header.checksum = checksum_of_frame();
      detail::write_header(prefix_, header);
    }
    // Nothing throws any more.
    frame_.segments_.swap(segments_);
    frame_.size_bytes_ = prefix_.size() + payload_bytes;
    return frame_;
  }

  /// There is no frame any more: frame() has no bytes until the next encode.
  void forget() noexcept {
    frame_.segments_.clear();
    frame_.size_bytes_ = 0;
  }

  /// The frame of the last encode, if that threw nothing.
  [[nodiscard]] const encoded_frame& frame() const noexcept { return frame_; }

 private:
  void check_decided(const frame_part& part, const selection& chosen) const {
    const selection& decided = *part.decided;
    if (decided.model().fingerprint() != model_.fingerprint()) {
      detail::raise(std::invalid_argument("what is decided is of another layout than the frame"));
    }
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (decided.is_sent(l) || model_.sizes()[l] == 0) continue;
      if (chosen.is_sent(l) || part.is_last) {
        detail::raise(std::invalid_argument("layer '" + model_[l].name + "' is not decided, and " +
                                            (part.is_last ? "the part is the last" : "the part holds it")));
      }
    }
  }

  // Nobody keeps what a payload does not say of parameters; of gradients the residual does, of updates the drift.
  void convert(frame_kind kind, payload_type type, std::size_t layer, std::span<const T> elements,
               std::byte* to) const {
    if (kind != frame_kind::parameters) return detail::encode_payload(type, elements, to);
    if (has_blocks(type) && !detail::is_finite_magnitude(detail::largest_magnitude<T>(
                                elements.size(), detail::read_only<T>{elements.data()}))) {
      detail::raise(std::invalid_argument("layer '" + model_[layer].name + "' holds NaN or infinity, which " +
                                          detail::name_of(type) + " cannot say"));
    }
    detail::encode_payload<T, detail::rest::is_lost>(type, elements, to);
  }

  std::size_t bytes_of(const selection& chosen, payload_type type) const {
    std::size_t bytes = 0;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (chosen.is_sent(l)) bytes += lamina::payload_bytes<T>(type, model_.sizes()[l]);
    }
    return bytes;
  }

  std::uint64_t checksum_of_frame() const noexcept {
    detail::checksum sum;
    sum.add(std::span(prefix_).first(detail::checksum_offset));
    sum.add(std::span(prefix_).subspan(detail::wire_header_bytes));
    for (const auto segment : std::span(segments_).subspan(1)) sum.add(segment);
    return sum.value();
  }

  layout model_;
  std::uint32_t run_;
  std::vector<std::byte> prefix_;
  std::vector<std::byte> converted_;                  // layers in a payload type other than as_is
  std::vector<std::span<const std::byte>> segments_;  // of the frame that is being built
  encoded_frame frame_;
};

}  // namespace lamina::inline LAMINA_ABI
