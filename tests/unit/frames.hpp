// SPDX-License-Identifier: MIT
#pragma once

#include <system_error>

#include "catch.hpp"
#include "lamina/frame.hpp"
#include "steps.hpp"

/// What the tests of frames share: frames of every payload type, the same with another header, and what decode() says of them.
namespace lamina_test {

inline constexpr std::array all_payload_types = {
    lamina::payload_type::as_is, lamina::payload_type::float16, lamina::payload_type::bfloat16,
    lamina::payload_type::int8,  lamina::payload_type::int4,    lamina::payload_type::ternary};
/// Without the last, which is of gradients and updates only.
inline constexpr auto payload_types = std::span(all_payload_types).first<5>();
/// Where the bits and the layers begin in a frame of at most 512 layers.
inline constexpr std::size_t bitmap_at = 64;
inline constexpr std::size_t payload_at = 128;

inline lamina::selection everything(const lamina::layout& model) {
  lamina::selection all(model);
  all.send_all();
  return all;
}
inline lamina::selection some_of(const lamina::layout& model, const std::vector<std::size_t>& layers) {
  lamina::selection some(model);
  for (const std::size_t l : layers) some.send(l);
  return some;
}

template <class T>
bytes frame_of(const lamina::selection& sent, const tensors<T>& layers,
               const lamina::frame_header& header = {}, std::uint32_t run = 0) {
  lamina::frame_encoder<T> encoder(sent.model(), run);
  return encoder.encode(header, sent, [&](std::size_t l) { return std::span<const T>(layers[l]); })
      .to_bytes();
}

/// Layers 0 and 2 of four are sent, of step 7 and sender 3; layer 3 is empty.
template <class T>
struct small_frame {
  explicit small_frame(lamina::payload_type type = lamina::payload_type::as_is)
      : frame(frame_of(sent, values, {.step = 7, .sender = 3, .payload = type})) {}
  lamina::layout model = model_of({3, 4, 66, 0});
  tensors<T> values = {{1, 2, 3}, {9, 9, 9, 9}, std::vector<T>(66, T(1.5)), {}};
  lamina::selection sent = some_of(model, {0, 2});
  bytes frame;
};

/// The header of a frame of gradients without a checksum, whose payload is empty.
template <class T>
lamina::detail::wire_header header_of(const lamina::layout& model, lamina::payload_type type) {
  lamina::detail::wire_header header;
  header.element_type = lamina::detail::element_code<T>;
  header.kind = static_cast<std::uint8_t>(lamina::frame_kind::gradients);
  header.flags = lamina::detail::flag_last;
  header.step = 1;
  header.fingerprint = model.fingerprint();
  header.layers = static_cast<std::uint32_t>(model.layers());
  header.payload_type = static_cast<std::uint8_t>(type);
  return header;
}

/// The checksum made good again, where the header says that there is one.
inline bytes sealed(bytes frame) {
  lamina::detail::wire_header header = lamina::detail::read_header(frame);
  header.checksum = 0;
  if ((header.flags & lamina::detail::flag_checksum) != 0) {
    bytes covered(frame.begin(), frame.begin() + lamina::detail::checksum_offset);
    covered.insert(covered.end(), frame.begin() + bitmap_at, frame.end());
    header.checksum = XXH3_64bits(covered.data(), covered.size());
  }
  std::memcpy(frame.data(), &header, sizeof header);
  return frame;
}
bytes with_header(bytes frame, const auto& change) {
  lamina::detail::wire_header header = lamina::detail::read_header(frame);
  change(header);
  std::memcpy(frame.data(), &header, sizeof header);
  return frame;
}
inline bytes without_checksum(const bytes& frame) {
  return sealed(with_header(frame, [](auto& header) { header.flags = lamina::detail::flag_last; }));
}

/// What both forms of decode() say, which agree, and give no layers on an error.
template <class T>
lamina::errc refusal(std::span<const std::byte> frame, const lamina::layout& model) {
  std::error_code quiet = make_error_code(lamina::errc::bad_magic);
  const auto view = lamina::decode<T>(frame, model, quiet);
  if (quiet) {
    REQUIRE(quiet.category() == lamina::category());
    REQUIRE(view.layers() == 0);
    REQUIRE(view.sent_elements() == 0);
  } else {
    REQUIRE(view.layers() == model.layers());
  }
  try {
    (void)lamina::decode<T>(frame, model);
    REQUIRE_FALSE(quiet);
  } catch (const lamina::decode_error& error) {
    REQUIRE(error.code() == quiet);
    REQUIRE(contains(error.what(), quiet.message()));
  }
  return static_cast<lamina::errc>(quiet.value());
}

}  // namespace lamina_test
