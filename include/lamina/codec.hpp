// SPDX-License-Identifier: MIT
#pragma once

#include <iterator>
#include <new>

#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/representative.hpp"

/// The codec: a selection and its layers to a frame, where a bit stands for each layer that is dropped (the paper's "list [0]"), and any
/// bytes to a frame or a named error. Read frame.hpp before.
namespace lamina::inline LAMINA_ABI {

/// What a frame says of itself.
struct frame_header {
  frame_kind kind = frame_kind::gradients;
  std::uint64_t step = 1;    ///< counted from 1
  std::uint32_t sender = 0;  ///< the worker's index among the senders; 0 in a server's frames
  payload_type payload = payload_type::as_is;
  lamina::frame_checksum checksum = lamina::frame_checksum::xxh3;
  std::uint16_t sequence = 0;            ///< of several frames of a step: 0, 1, 2, ...
  bool is_last = true;                   ///< of them
  std::span<const std::byte> user = {};  ///< up to 64 bytes of the caller's
};

/// Builds frames of one layout. Allocates when it is made; with a payload type other than as_is also for a frame larger than all before it.
template <element T>
class frame_encoder {
 public:
  /// `run` is written into the frames, so that a receiver tells them from those of another run; 0: none.
  explicit frame_encoder(const layout& model, std::uint32_t run = 0)
      : model_(model),
        run_(run),
        prefix_(detail::wire_header_bytes +
                detail::padded_bitmap_bytes(model.layers(), detail::most_user_bytes)) {
    if (model.layers() > (std::numeric_limits<std::uint32_t>::max)())
      detail::refuse<std::length_error>("a frame has fewer than 2^32 layers");
    frame_.segments_.reserve(model.layers() + 1);
  }

  /// A frame with the layers that `sent` selects, valid until the next call; after an exception there is no frame.
  ///
  /// \param says            what the header says, and the payload type
  /// \param sent            a selection of the encoder's layout
  /// \param layer_elements  `layer_elements(l)` gives layer l as a std::span<const T> of n_l elements, or as a reference to what one is
  ///                        made of; called for the layers sent, in order
  /// \throws std::invalid_argument  a selection of another layout; a span of another size than its layer; parameters to be written as
  ///                                int8 or int4 that hold NaN or infinity; more than 64 user bytes
  ///
  /// Cost: O(L) and, for a checksum, one read of what is sent. No copy as_is; other payload types are written to a buffer of the encoder.
  template <class LayerElements>
  const encoded_frame& encode(const frame_header& says, const selection& sent,
                              LayerElements&& layer_elements) {
    // It is called for one layer after the other, and the frame points to all of them.
    using given = decltype(layer_elements(std::size_t{0}));
    static_assert(
        std::is_lvalue_reference_v<given> || std::ranges::enable_borrowed_range<std::remove_cvref_t<given>>,
        "lamina: the callable gives each layer as a container of its own, which is gone before the frame is "
        "sent. Give a reference or a std::span: [&](std::size_t l) -> const std::vector<float>& { ... }");
    std::vector<std::span<const std::byte>> segments = std::move(frame_.segments_);
    forget();
    if (sent.model().fingerprint() != model_.fingerprint())
      detail::refuse("the selection is of another layout than the frame");
    if (says.user.size() > detail::most_user_bytes)
      detail::refuse("a frame takes up to 64 user bytes, got ", says.user.size());
    const payload_type type = says.payload;
    prefix_.assign(detail::wire_header_bytes + detail::padded_bitmap_bytes(model_.layers(), says.user.size()),
                   std::byte{0});
    segments.assign(1, prefix_);
    if (type != payload_type::as_is) {
      std::size_t bytes = 0;
      for (const std::size_t l : sent.sent()) bytes += lamina::payload_bytes<T>(type, model_.sizes()[l]);
      converted_.resize((std::max)(converted_.size(), bytes));
    }
    std::size_t payload_bytes = 0;
    for (const std::size_t l : sent.sent()) {
      const std::span<const T> elements = layer_elements(l);
      model_.check_size(l, elements.size());
      if (type == payload_type::as_is) {
        segments.push_back(std::as_bytes(elements));
      } else {
        std::byte* to = converted_.data() + payload_bytes;
        convert(says.kind, type, l, elements, to);
        segments.emplace_back(to, lamina::payload_bytes<T>(type, elements.size()));
      }
      payload_bytes += segments.back().size();
    }

    detail::wire_header header;
    header.element_type = detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(says.kind);
    const bool has_checksum = says.checksum == frame_checksum::xxh3;
    header.flags = (has_checksum ? detail::flag_checksum : 0) | (says.is_last ? detail::flag_last : 0);
    header.sender = says.sender;
    header.step = says.step;
    header.fingerprint = model_.fingerprint();
    header.layers = static_cast<std::uint32_t>(model_.layers());
    header.sequence = says.sequence;
    header.payload_type = static_cast<std::uint8_t>(type);
    header.user_bytes = static_cast<std::uint8_t>(says.user.size());
    header.payload_bytes = payload_bytes;
    header.run = run_;
    const auto body = std::span(prefix_).subspan(detail::wire_header_bytes);
    std::ranges::copy(says.user, std::ranges::copy(std::as_bytes(sent.bitmap()), body.begin()).out);
    if (has_checksum) {
      detail::checksum sum;
      sum.add(std::as_bytes(std::span(&header, 1)).first(detail::checksum_offset));
      sum.add(body);
      for (const auto layer : std::span(segments).subspan(1)) sum.add(layer);
      header.checksum = sum.value();
    }
    std::memcpy(prefix_.data(), &header, sizeof header);
    frame_.segments_ = std::move(segments);
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
  // Nobody keeps what a payload does not say of parameters; of gradients the residual does, of updates the local delta.
  void convert(frame_kind kind, payload_type type, std::size_t layer, std::span<const T> elements,
               std::byte* to) const {
    if (kind != frame_kind::parameters) return detail::encode_payload(type, elements, to);
    detail::check_parameters_type(type);
    if (has_blocks(type) && !detail::are_finite<T>(elements)) {
      detail::refuse("layer '", model_[layer].name, "' holds NaN or infinity, which ", detail::name_of(type),
                     " cannot say");
    }
    detail::encode_payload<T, detail::rest::is_lost>(type, elements, to);
  }

  layout model_;
  std::uint32_t run_;
  std::vector<std::byte> prefix_;
  std::vector<std::byte> converted_;  // layers in a payload type other than as_is
  encoded_frame frame_;
};

/// An error unless the frame is of this kind, run and step, and the only one of its sender in the step: late, early and replayed frames
/// are refused by it. `run` is that of the sender's options; 0: the frame is of none.
template <element T>
[[nodiscard]] std::error_code expect(const frame_view<T>& frame, frame_kind kind, std::uint64_t step,
                                     std::uint32_t run = 0) noexcept {
  if (frame.kind() != kind) return errc::unexpected_kind;
  if (frame.run() != run) return errc::other_run;
  if (frame.step() != step) return errc::unexpected_step;
  if (frame.sequence() != 0 || !frame.is_last()) return errc::unexpected_sequence;
  return {};
}

namespace detail {

template <element T>
void require_expected(const frame_view<T>& frame, frame_kind kind, std::uint64_t step, std::uint32_t run) {
  const std::error_code error = expect(frame, kind, step, run);
  if (!error) return;
  raise(decode_error(
      error, sentence("frame of sender ", frame.sender(), ", step ", frame.step(), ", run ", frame.run(),
                      ", where one of step ", step, ", run ", run, " is expected")));
}

// What a model's layers take may not fit in std::size_t, even if their number of elements does. No frame is that long.
inline constexpr std::size_t largest_size = (std::numeric_limits<std::size_t>::max)();

inline std::error_code check_fields(const wire_header& header, bool is_of_own_type) noexcept {
  if (header.magic != wire_magic) return errc::bad_magic;
  if (header.version != wire_version) return errc::unsupported_version;
  if (!is_of_own_type) return errc::wrong_element_type;
  const auto kind = static_cast<frame_kind>(header.kind);
  if (kind != frame_kind::gradients && kind != frame_kind::parameters && kind != frame_kind::updates)
    return errc::unknown_kind;
  if (header.payload_type > static_cast<std::uint8_t>(payload_type::ternary))
    return errc::unknown_payload_type;
  if ((header.flags & ~known_flags) != 0 || header.user_bytes > most_user_bytes || header.reserved != 0)
    return errc::nonzero_reserved;
  return {};
}

inline frame_info info_of(const wire_header& header, std::size_t size_bytes) noexcept {
  return {.size_bytes = size_bytes,
          .kind = static_cast<frame_kind>(header.kind),
          .payload = static_cast<payload_type>(header.payload_type),
          .element_bytes = header.element_type == element_code<double> ? sizeof(double) : sizeof(float),
          .sender = header.sender,
          .run = header.run,
          .step = header.step,
          .fingerprint = header.fingerprint,
          .layers = header.layers,
          .sequence = header.sequence,
          .is_last = (header.flags & flag_last) != 0};
}

// Each check uses only what the checks before it have established; nothing is allocated by what the bytes claim.
struct frame_decoder {
  // Into a view that is used again, which keeps its memory. On an error the view is not to be read.
  template <element T>
  static std::error_code decode(std::span<const std::byte> bytes, const layout& model,
                                frame_view<T>& out) noexcept {
    if (bytes.size() < wire_header_bytes) return errc::truncated;
    const wire_header header = read_header(bytes);
    if (const auto bad = check_fields(header, header.element_type == element_code<T>)) return bad;
    if (header.fingerprint != model.fingerprint() || header.layers != model.layers())
      return errc::wrong_layout;

    const std::size_t prefix_bytes = padded_bitmap_bytes(model.layers(), std::size_t{header.user_bytes});
    if (bytes.size() - wire_header_bytes < prefix_bytes) return errc::truncated;
    const auto bitmap = bytes.subspan(wire_header_bytes, bitmap_bytes(model.layers()));
    const auto user = bytes.subspan(wire_header_bytes + bitmap.size(), header.user_bytes);
    const auto padding = bytes.subspan(wire_header_bytes, prefix_bytes).subspan(bitmap.size() + user.size());
    const auto is_present = [&](std::size_t layer) {
      return ((bitmap[layer / 8] >> (layer % 8)) & std::byte{1}) != std::byte{0};
    };
    for (std::size_t l = 0; l < bitmap.size() * 8; ++l)
      if (is_present(l) && (l >= model.layers() || model.sizes()[l] == 0)) return errc::bad_presence;
    if (std::ranges::any_of(padding, [](std::byte each) { return each != std::byte{0}; }))
      return errc::bad_presence;

    const auto type = static_cast<payload_type>(header.payload_type);
    std::vector<std::size_t> begins = std::move(out.is_.begins);  // for its memory
#if LAMINA_HAS_EXCEPTIONS
    try {
      begins.assign(model.layers() + 1, 0);
    } catch (const std::bad_alloc&) {
      return std::make_error_code(std::errc::not_enough_memory);
    }
#else
    begins.assign(model.layers() + 1, 0);  // without memory the program ends in `new`
#endif
    std::size_t sent_elements = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t elements = is_present(l) ? model.sizes()[l] : 0;
      if (elements > largest_size / sizeof(T)) return errc::bad_payload_size;
      const std::size_t layer_bytes = payload_bytes<T>(type, elements);
      if (layer_bytes > largest_size - begins[l]) return errc::bad_payload_size;
      begins[l + 1] = begins[l] + layer_bytes;
      sent_elements += elements;
    }
    if (header.payload_bytes != begins.back()) return errc::bad_payload_size;
    const auto payload = bytes.subspan(wire_header_bytes + prefix_bytes);
    if (payload.size() < header.payload_bytes) return errc::truncated;
    if (payload.size() > header.payload_bytes) return errc::trailing_bytes;
    std::uint64_t sum = 0;
    if ((header.flags & flag_checksum) != 0)
      sum = checksum().add(bytes.first(checksum_offset)).add(bytes.subspan(wire_header_bytes)).value();
    if (header.checksum != sum) return errc::checksum_mismatch;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto layer = payload.subspan(begins[l], begins[l + 1] - begins[l]);
      if (is_present(l) && !are_trits(type, layer, model.sizes()[l])) return errc::bad_trits;
    }
    if (type == payload_type::as_is && reinterpret_cast<std::uintptr_t>(payload.data()) % alignof(T) != 0)
      return errc::misaligned_buffer;

    out.is_ = {.info = info_of(header, bytes.size()),
               .user = user,
               .model = model,
               .sent_elements = sent_elements,
               .bytes = payload,
               .begins = std::move(begins)};
    return {};
  }
};

}  // namespace detail

/// Bytes to a frame of the model's layout. `error` is set to an errc, or to std::errc::not_enough_memory if the index of L + 1 positions
/// cannot be allocated, and the view returned then has no layers.
///
/// Of any bytes it reads nothing outside, and allocates only by the layout. The payload must be aligned for T, as it is when the bytes
/// begin at a multiple of alignof(T). Cost: O(L), and for the checksum one read of the bytes.
template <element T>
frame_view<T> decode(std::span<const std::byte> bytes, const layout& model, std::error_code& error) noexcept {
  frame_view<T> view;
  error = detail::frame_decoder::decode(bytes, model, view);
  return view;
}

/// The same; throws decode_error.
template <element T>
[[nodiscard]] frame_view<T> decode(std::span<const std::byte> bytes, const layout& model) {
  frame_view<T> view;
  if (const auto error = detail::frame_decoder::decode(bytes, model, view))
    detail::raise(decode_error(error));
  return view;
}

/// A frame that is gone when decode returns cannot be viewed: keep the bytes.
template <element T, std::same_as<std::vector<std::byte>> Gone, class... Rest>
frame_view<T> decode(Gone&&, const layout&, Rest&&...) = delete;

/// What a frame says of itself in its first peek_bytes, 64, before its layout is known: for who reads frames from a stream, serves several
/// models, or keeps strangers out. `error` is set to an errc, and the info returned then is empty: what decode() says of the same header,
/// or bad_payload_size, if the frame's size does not fit in std::size_t.
///
/// The bytes may come from anybody, and no checksum holds yet: take memory for `size_bytes` only up to largest_frame_bytes() of the layout
/// that has this fingerprint.
[[nodiscard]] inline frame_info peek(std::span<const std::byte> first_bytes,
                                     std::error_code& error) noexcept {
  error = errc::truncated;
  if (first_bytes.size() < peek_bytes) return {};
  const detail::wire_header header = detail::read_header(first_bytes);
  const bool is_double = header.element_type == detail::element_code<double>;
  error = detail::check_fields(header, is_double || header.element_type == detail::element_code<float>);
  if (error) return {};
  const std::uint64_t prefix_bytes =
      peek_bytes +
      detail::padded_bitmap_bytes(std::uint64_t{header.layers}, std::uint64_t{header.user_bytes});
  if (prefix_bytes > detail::largest_size || header.payload_bytes > detail::largest_size - prefix_bytes) {
    error = errc::bad_payload_size;
    return {};
  }
  return detail::info_of(header, static_cast<std::size_t>(prefix_bytes + header.payload_bytes));
}

/// Writes the server's frame of parameters into a worker's: what was sent is overwritten, what was not is kept.
///
/// \param bytes       of one frame, aligned as for decode()
/// \param cut         the model and what its layers are cut into, as in the server: worker::tiles()
/// \param step        of the reply: the step that the worker computes next, worker::steps() + 1 between steps
/// \param run         server_options::run; 0: of none
/// \param parameters  a tensor to write for each layer of the model
/// \return            the elements that were overwritten
/// \throws decode_error           the bytes are no such frame
/// \throws std::invalid_argument  another number of tensors, or one of another size or type; nothing is written then
template <element T, class Tensors>
std::size_t apply(std::span<const std::byte> bytes, const tiling& cut, std::uint64_t step,
                  Tensors&& parameters, std::uint32_t run = 0) {
  const layout& model = cut.model();
  const frame_view<T> frame = decode<T>(bytes, cut.fragments());
  detail::require_expected(frame, frame_kind::parameters, step, run);
  model.check_count(std::size(parameters), "parameters");
  const auto elements_of_layer = [&](std::size_t layer) {
    auto&& tensor = std::begin(parameters)[static_cast<std::ptrdiff_t>(layer)];
    const std::span<T> elements = writable_elements_of<T>(tensor);
    model.check_size(layer, elements.size());
    return elements;
  };
  for (std::size_t layer = 0; layer < model.layers(); ++layer) static_cast<void>(elements_of_layer(layer));
  for (std::size_t f = 0; f < cut.fragments().layers(); ++f)
    frame.apply_to(f, elements_of_layer(cut.layer_of(f)).subspan(cut.begin(f), cut.fragments().sizes()[f]));
  return frame.sent_elements();
}

}  // namespace lamina::inline LAMINA_ABI
