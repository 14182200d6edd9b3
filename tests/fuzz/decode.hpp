// SPDX-License-Identifier: MIT
#pragma once

// Any bytes decode to a frame or a named error; of a frame everything can be read, and means the same whichever way.
#include "fuzz.hpp"

namespace lamina_fuzz::of_decode {
namespace {

using lamina::errc;
using lamina::frame_view;
using lamina::payload_type;

template <class T>
bool same_numbers(std::span<const T> a, std::span<const T> b) {
  return std::ranges::equal(a, b, same_number<T>);
}

template <class T>
void mend_frame(bytes& frame, const lamina::layout& model, std::size_t how) {
  lamina::detail::wire_header good;
  good.element_type = lamina::detail::element_code<T>;
  good.fingerprint = model.fingerprint();
  good.layers = static_cast<std::uint32_t>(model.layers());
  mend(frame, good, how, [](const auto& header, std::span<const std::byte> body) {
    if ((header.flags & lamina::detail::flag_checksum) == 0) return std::uint64_t{0};
    lamina::detail::checksum sum;
    sum.add(std::as_bytes(std::span(&header, 1)).first(lamina::detail::checksum_offset));
    sum.add(body);
    return sum.value();
  });
}

// Every way of reading a layer gives the same numbers.
template <class T>
void read_layer(const frame_view<T>& frame, std::size_t l, std::size_t elements, input& in) {
  const std::vector<T> untouched(elements, T(-777));
  std::vector<T> all = untouched;
  check(frame.apply_to(l, all) != frame.is_dropped(l), "apply_to says what was sent");
  check(throws<std::invalid_argument>([&] { frame.apply_to(l, std::vector<T>(elements + 1)); }),
        "apply_to refuses another size");
  std::vector<T> restored = untouched;
  const bool is_restored = !throws<std::logic_error>([&] { frame.restore(l, restored); });
  check(is_restored == (frame.kind() != lamina::frame_kind::parameters), "parameters are not restored");
  check(throws<std::logic_error>([&] { frame.restore(l, std::vector<T>(elements + 1)); }),
        "restore refuses another size");
  std::size_t seen = 0;
  frame.for_each_block(l, [&](std::size_t begin, std::span<const T> block) {
    check(begin == seen && same_numbers(block, std::span<const T>(all).subspan(begin, block.size())),
          "blocks give what apply_to gives");
    seen += block.size();
  });
  if (frame.is_dropped(l)) {
    check(seen == 0 && frame.bytes_of(l).empty() && lamina_test::same_bits(all, untouched),
          "a dropped layer is left as it is");
    check(!is_restored || std::ranges::count(restored, T(0)) == std::ssize(restored),
          "a dropped gradient is zeros");
    check(throws<std::out_of_range>([&] { frame.copy(l, 0, std::span<T>()); }),
          "a dropped layer has no elements");
    return;
  }
  check(lamina_test::same_bits(restored, is_restored ? all : untouched), "restore gives what apply_to gives");
  check(seen == elements, "a layer that was sent is whole");
  const bool has_blocks = lamina::has_blocks(frame.payload());
  const std::size_t begin = std::min<std::size_t>(in.below(80) * 64 + (has_blocks ? 0 : in.below(64)),
                                                  has_blocks ? elements / 64 * 64 : elements);
  std::vector<T> some(std::min<std::size_t>(in.below(256), elements - begin));
  frame.copy(l, begin, some);
  const auto expected = std::span<const T>(all).subspan(begin, some.size());
  check(same_numbers<T>(some, expected), "copy gives what apply_to gives");
  check(same_numbers(frame.read(l, begin, some), expected), "read gives what apply_to gives");
  std::vector<T> too_many(elements + 1);
  check(throws<std::out_of_range>([&] { frame.copy(l, 1, std::span<T>()); }) == has_blocks &&
            throws<std::out_of_range>([&] { frame.copy(l, 0, too_many); }),
        "copy refuses elements that are not there");
  const bool is_as_is = frame.payload() == payload_type::as_is;
  check(throws<std::logic_error>([&] { std::ignore = frame.layer(l); }) != is_as_is,
        "only as_is has elements in place");
  if (is_as_is) check(lamina_test::same_bits(frame.layer(l), all), "elements lie where they are");
}

// What decodes is what the encoder writes for it, to the last byte: no field is left unchecked.
template <class T>
void check_canonical(const frame_view<T>& frame, const lamina::layout& model,
                     std::span<const std::byte> given) {
  lamina::selection chosen(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (!frame.is_dropped(l)) chosen.send(l);
  }
  check(chosen.sent_elements() == frame.sent_elements(), "the view counts what was sent");
  lamina::frame_encoder<T> encoder(model, frame.run());
  bytes written = encoder
                      .encode({.kind = frame.kind(),
                               .step = frame.step(),
                               .sender = frame.sender(),
                               .sequence = frame.sequence(),
                               .is_last = frame.is_last(),
                               .user = frame.user()},
                              chosen, [&](std::size_t l) { return frame.layer(l); })
                      .to_bytes();
  bytes read(given.begin(), given.end());
  check(read.size() == written.size(), "a frame has one size");
  for (bytes* each : {&read, &written}) {  // a frame may go without a checksum
    (*each)[8] &= ~std::byte{lamina::detail::flag_checksum};
    std::fill_n(each->begin() + lamina::detail::checksum_offset, 8, std::byte{0});
  }
  check(read == written, "a frame is written in one way");
}

// The first bytes of any frame, whatever follows them: what they say is what decode says.
template <class T>
void peek_at(std::span<const std::byte> given, const frame_view<T>& view, const std::error_code& decoded) {
  std::error_code error;
  const lamina::frame_info info =
      lamina::peek(given.first(std::min(given.size(), lamina::peek_bytes)), error);
  std::error_code error_of_all;
  check(lamina::peek(given, error_of_all) == info && error_of_all == error,
        "peek gives the same of any number of bytes");
  if (error) {
    check(error.category() == lamina::category() && decoded, "what peek refuses, decode refuses");
    check(info == lamina::frame_info{}, "a refused header says nothing");
    return;
  }
  check(info.size_bytes >= lamina::peek_bytes, "a frame has a header");
  check(decoded != errc::truncated || given.size() < info.size_bytes, "the size is no more than is needed");
  check(decoded != errc::trailing_bytes || given.size() > info.size_bytes, "the size is all that is needed");
  if (decoded) return;
  check(info.size_bytes == given.size() && info.element_bytes == sizeof(T) && info.kind == view.kind() &&
            info.payload == view.payload() && info.sender == view.sender() && info.run == view.run() &&
            info.step == view.step() && info.layers == view.layers() && info.sequence == view.sequence() &&
            info.is_last == view.is_last(),
        "peek says what decode says");
}

template <class T>
void decode_and_use(input& in) {
  const lamina::layout& model = some_model(in);
  const std::size_t how = in.below(3);
  const std::size_t shift = in.below(16) == 15 ? 1 : 0;
  bytes frame = in.take_rest();
  mend_frame<T>(frame, model, how);
  frame.insert(frame.begin(), shift, std::byte{0});
  frame.shrink_to_fit();  // so that a read beyond the frame is one beyond the allocation
  const auto given = std::span<const std::byte>(frame).subspan(shift);

  std::error_code error;
  const frame_view<T> view = lamina::decode<T>(given, model, error);
  std::error_code thrown;
  succeeds([&] { std::ignore = lamina::decode<T>(given, model); }, &thrown);
  check(thrown == error, "both decode give the same error");
  peek_at(given, view, error);
  if (error) {
    check(error.category() == lamina::category(), "a refusal has a name");
    check(view.layers() == 0 && !view.is_of(model), "a refused frame has no layers");
    return;
  }
  check(view.layers() == model.layers() && view.is_of(model), "a frame is of its model");
  check(
      given.size() <= lamina::largest_frame_bytes<T>(model, view.payload()) + lamina::detail::most_user_bytes,
      "no frame is larger than the largest");
  input choices(given);
  for (std::size_t l = 0; l < model.layers(); ++l) read_layer(view, l, model.sizes()[l], choices);
  check(throws<std::out_of_range>([&] { std::ignore = view.is_dropped(model.layers()); }),
        "there are no more layers");
  if (view.payload() == payload_type::as_is) check_canonical(view, model, given);
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? decode_and_use<double>(in) : decode_and_use<float>(in);
}

}  // namespace lamina_fuzz::of_decode
