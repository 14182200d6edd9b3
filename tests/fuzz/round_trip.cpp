// SPDX-License-Identifier: MIT
// What is encoded decodes to what it was: any layout, selection, payload type and values, in one piece and in segments.

#include "fuzz.hpp"

namespace lamina_fuzz {
namespace {

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
    check(lamina_test::same_bits(decoded, given), "as_is gives the same bits");
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

// The same layers in parts: whatever is decided when, together they are the frame.
template <class T>
void check_parts(input& in, const lamina::frame_view<T>& whole, const lamina::layout& model,
                 const lamina::selection& chosen, const std::vector<std::vector<T>>& values) {
  lamina::part_encoder<T> encoder(model, whole.run());
  lamina::step_parts parts(model);
  lamina::selection decided(model);
  lamina::selection come(model);
  const auto elements = [&](std::size_t l) { return std::span<const T>(values[l]); };
  std::vector<bytes> frames;
  for (bool is_last = false; !is_last;) {
    is_last = frames.size() == 4 || in.flag();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (is_last || in.flag()) decided.send(l);
    }
    const auto& encoded = encoder.encode(whole.kind(), whole.step(), whole.sender(), chosen, decided, is_last,
                                         elements, whole.payload());
    frames.push_back(encoded.to_bytes());
  }
  for (std::size_t k = 0; k < frames.size(); ++k) {
    check(frames[k] == encoder.frame(k).to_bytes(), "a part stays while others are encoded");
    const auto view = lamina::decode<T>(frames[k], model);
    std::error_code error;
    if (k + 1 < frames.size()) {
      auto gap = parts;
      gap.add(lamina::decode<T>(frames[k + 1], model), error);
      check(error == lamina::errc::unexpected_part, "no part is left out");
    }
    parts.add(view);
    parts.add(view, error);
    check(error == lamina::errc::unexpected_part, "no part is taken twice");
    for (std::size_t l = 0; l < model.layers(); ++l) {
      check(view.is_decided(l) == parts.is_decided(l), "what is decided is what the last part says");
      if (view.is_dropped(l)) continue;
      check(!come.is_sent(l), "a layer is in one part");
      come.send(l);
      check(lamina_test::same_bits(view.bytes_of(l), whole.bytes_of(l)), "a layer is the same in a part");
    }
  }
  check(parts.is_complete() && std::ranges::equal(come.bitmap(), chosen.bitmap()), "the parts are the frame");
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
    const auto type = static_cast<payload_type>(in.below(5));
    const auto step = in.value<std::uint64_t>();
    const auto sender = in.value<std::uint32_t>();
    lamina::selection chosen(model);
    std::vector<std::vector<T>> values;
    for (const std::size_t size : model.sizes()) {
      if (in.flag()) chosen.send(values.size());
      values.push_back(any_values<T>(in, size, type != payload_type::as_is));
    }
    const lamina::encoded_frame& frame = encoder.encode(
        kind, step, sender, chosen, [&](std::size_t l) { return std::span<const T>(values[l]); }, type);
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
              view.payload() == type && view.sent_elements() == chosen.sent_elements(),
          "the header says what it was told");
    for (std::size_t l = 0; l < model.layers(); ++l) {
      check(view.is_dropped(l) == chosen.is_dropped(l), "a layer is there if it was selected");
      check_decoded(view, l, values[l]);
    }

    check_parts(in, view, model, chosen, values);

    bytes damaged = whole;
    const std::size_t place = in.value<std::uint16_t>() % damaged.size();
    damaged[place] ^= static_cast<std::byte>(1 + in.below(255));
    lamina::decode<T>(damaged, model, error);
    check(error.category() == lamina::frame_category() && error, "one damaged byte is seen");
    bytes cut = whole;
    cut.resize(in.value<std::uint16_t>() % cut.size());
    lamina::decode<T>(cut, model, error);
    check(error == lamina::errc::truncated, "a cut frame is truncated");
  } while (!in.is_empty());
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? round_trip<double>(in) : round_trip<float>(in);
}

}  // namespace lamina_fuzz
