// SPDX-License-Identifier: MIT
#pragma once

// What is encoded decodes to what it was: any layout, selection, payload type and values, in one frame and in segments.

#include "fuzz.hpp"
#include "lamina/server.hpp"

namespace lamina_fuzz::of_round_trip {
namespace {

using lamina::errc;
using lamina::payload_type;

// What rounding takes away of gradients can be written down: x - y is exact. Of gradients and parameters it is nearer to zero
// than x is. Held against a wider type.
template <class T>
void check_rounded(std::span<const T> given, std::span<const T> decoded, bool is_kept) {
  using wide = std::conditional_t<sizeof(T) == 4, double, long double>;
  for (std::size_t i = 0; i < given.size(); ++i) {
    const T left = given[i] - decoded[i];
    check(!is_kept || static_cast<wide>(left) == static_cast<wide>(given[i]) - static_cast<wide>(decoded[i]),
          "what rounding takes away is exact");
    check(std::abs(left) <= std::abs(given[i]), "a payload leaves no more than there was");
  }
}

template <class T>
void check_decoded(const lamina::frame_view<T>& frame, std::size_t l, const std::vector<T>& given) {
  std::vector<T> decoded(given.size());
  if (!frame.apply_to(l, decoded)) return;
  if (frame.payload() == payload_type::as_is) {
    check(lamina_test::same_bits(decoded, given), "as_is is bitwise identical");
    return;
  }
  const bool is_kept = frame.kind() != lamina::frame_kind::parameters;
  check_rounded<T>(given, decoded, is_kept);
  bytes again(frame.bytes_of(l).size());
  if (is_kept) {
    lamina::detail::encode_payload<T>(frame.payload(), given, again.data());
  } else {
    lamina::detail::encode_payload<T, lamina::detail::rest::is_lost>(frame.payload(), given, again.data());
  }
  check(lamina_test::same_bits(again, frame.bytes_of(l)), "a payload depends on its layer alone");
}

// The same layers in several frames of a step: whatever is in which, together they are the one.
template <class T>
void check_several(input& in, const lamina::frame_view<T>& whole, const lamina::layout& model,
                   const lamina::selection& chosen, const std::vector<std::vector<T>>& values) {
  lamina::server<T> server(
      model,
      {.kind = whole.kind(), .first_step = std::max<std::uint64_t>(1, whole.step()), .run = whole.run()});
  lamina::frame_encoder<T> encoder(model, whole.run());
  lamina::frame_header header{.kind = whole.kind(), .step = server.step(), .payload = whole.payload()};
  const auto elements = [&](std::size_t l) { return std::span<const T>(values[l]); };
  lamina::selection gone(model);
  std::vector<bytes> frames;
  for (header.is_last = false; !header.is_last; ++header.sequence) {
    header.is_last = frames.size() == 4 || in.flag();
    lamina::selection some(model);
    for (const std::size_t l : chosen.sent()) {
      if (gone.is_dropped(l) && (header.is_last || in.flag())) some.send(l);
    }
    for (const std::size_t l : some.sent()) gone.send(l);
    frames.push_back(encoder.encode(header, some, elements).to_bytes());
    const auto view = lamina::decode<T>(frames.back(), model);
    check(view.sequence() == header.sequence && view.is_last() == header.is_last,
          "a frame tells which it is");
    for (std::size_t l = 0; l < model.layers(); ++l) {
      check(view.is_dropped(l) == some.is_dropped(l), "a layer is there if it was selected");
      if (some.is_sent(l))
        check(lamina_test::same_bits(view.bytes_of(l), whole.bytes_of(l)),
              "a layer is the same in any frame");
    }
  }
  for (std::size_t k = 0; k < frames.size(); ++k) {
    check(!server.complete(), "a step is complete with its last frame");
    if (k + 1 < frames.size())
      check(server.add(frames[k + 1]) == errc::unexpected_sequence, "no frame is left out");
    if (k > 0 && server.arrived().sent_layers() > 0) {
      header.sequence = static_cast<std::uint16_t>(k);
      bytes again = encoder.encode(header, server.arrived(), elements).to_bytes();
      check(server.add(std::move(again)) == errc::duplicate_layer, "a layer is in one frame");
    }
    check(!server.add(frames[k]), "frames are taken in order");
    check(server.add(frames[k]) == errc::duplicate_frame, "no frame is taken twice");
  }
  check(server.complete() && std::ranges::equal(server.arrived().bitmap(), chosen.bitmap()),
        "the frames are the one");
}

template <class T>
void round_trip(input& in) {
  const lamina::layout model = model_of(in);
  const auto run = in.flag() ? in.value<std::uint32_t>() : 0;
  lamina::frame_encoder<T> encoder(model, run);
  do {  // frames of one encoder, larger and smaller
    constexpr std::array kinds = {lamina::frame_kind::gradients, lamina::frame_kind::parameters,
                                  lamina::frame_kind::updates};
    const auto kind = kinds[in.below(kinds.size())];
    const auto any_type = static_cast<payload_type>(in.below(6));
    const bool is_refused = kind == lamina::frame_kind::parameters && any_type == payload_type::ternary;
    const auto type = is_refused ? payload_type::int4 : any_type;
    const auto step = in.value<std::uint64_t>();
    const auto sender = in.value<std::uint32_t>();
    const bytes user = in.take(in.below(9));
    lamina::selection chosen(model);
    std::vector<std::vector<T>> values;
    for (const std::size_t size : model.sizes()) {
      if (in.flag()) chosen.send(values.size());
      values.push_back(any_values<T>(in, size, type != payload_type::as_is));
    }
    const lamina::encoded_frame& frame =
        encoder.encode({.kind = kind, .step = step, .sender = sender, .payload = type, .user = user}, chosen,
                       [&](std::size_t l) { return std::span<const T>(values[l]); });
    const bytes whole = frame.to_bytes();
    bytes joined;
    for (const auto segment : frame.segments()) joined.insert(joined.end(), segment.begin(), segment.end());
    check(joined == whole && whole.size() == frame.size_bytes(), "the segments are the frame");
    check(throws<std::invalid_argument>([&] { frame.copy_to(std::span(joined).subspan(1)); }),
          "a frame fits into its own size alone");

    std::error_code error;
    const auto view = lamina::decode<T>(whole, model, error);
    check(!error, "what was encoded decodes");
    check(view.kind() == kind && view.step() == step && view.sender() == sender && view.run() == run &&
              view.payload() == type && view.sent_elements() == chosen.sent_elements() &&
              std::ranges::equal(view.user(), user) && view.sequence() == 0 && view.is_last(),
          "the header has what it was given");
    for (std::size_t l = 0; l < model.layers(); ++l) {
      check(view.is_dropped(l) == chosen.is_dropped(l), "a layer is there if it was selected");
      check_decoded(view, l, values[l]);
    }

    check_several(in, view, model, chosen, values);

    bytes damaged = whole;
    const std::size_t place = in.value<std::uint16_t>() % damaged.size();
    damaged[place] ^= static_cast<std::byte>(1 + in.below(255));
    lamina::decode<T>(damaged, model, error);
    check(error.category() == lamina::category() && error, "one damaged byte is seen");
    bytes cut = whole;
    cut.resize(in.value<std::uint16_t>() % cut.size());
    lamina::decode<T>(cut, model, error);
    check(error == errc::truncated, "a cut frame is truncated");
  } while (!in.is_empty());
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? round_trip<double>(in) : round_trip<float>(in);
}

}  // namespace lamina_fuzz::of_round_trip
