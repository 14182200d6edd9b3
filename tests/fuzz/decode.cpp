// SPDX-License-Identifier: MIT
// Any bytes decode to a frame or a named error; of a frame everything can be read, and means the same whichever way.
#include <algorithm>
#include <numeric>

#include "fuzz.hpp"
#include "lamina/server.hpp"

namespace lamina_fuzz {
namespace {

using lamina::frame_errc;
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
  good.layers = model.layers();
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
  std::vector<T> all(elements, T(-777));
  frame.restore(l, all);
  check(throws<std::invalid_argument>([&] { frame.restore(l, std::vector<T>(elements + 1)); }),
        "restore refuses another size");
  std::size_t seen = 0;
  frame.for_each_block(l, [&](std::size_t begin, std::span<const T> block) {
    check(begin == seen && same_numbers(block, std::span<const T>(all).subspan(begin, block.size())),
          "blocks give what restore gives");
    seen += block.size();
  });
  if (frame.is_dropped(l)) {
    check(seen == 0 && frame.bytes_of(l).empty() && std::ranges::count(all, T(0)) == std::ssize(all),
          "list [0] is zeros");
    check(throws<std::out_of_range>([&] { frame.copy(l, 0, std::span<T>()); }), "list [0] has no elements");
    return;
  }
  check(seen == elements, "a layer that was sent is whole");
  const std::size_t begin = std::min<std::size_t>(in.below(80) * 64, elements / 64 * 64);
  std::vector<T> some(std::min<std::size_t>(in.below(256), elements - begin));
  frame.copy(l, begin, some);
  const auto expected = std::span<const T>(all).subspan(begin, some.size());
  check(same_numbers<T>(some, expected), "copy gives what restore gives");
  check(same_numbers(frame.read(l, begin, some), expected), "read gives what restore gives");
  std::vector<T> too_many(elements + 1);
  check(throws<std::out_of_range>([&] { frame.copy(l, 1, std::span<T>()); }) &&
            throws<std::out_of_range>([&] { frame.copy(l, 0, too_many); }),
        "copy refuses elements that are not there");
  const bool is_as_is = frame.payload() == payload_type::as_is;
  check(throws<std::logic_error>([&] { frame.layer(l); }) != is_as_is, "only as_is has elements in place");
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
  lamina::frame_encoder<T> encoder(model);
  bytes written = encoder
                      .encode(frame.kind(), frame.step(), frame.sender(), chosen,
                              [&](std::size_t l) { return frame.layer(l); })
                      .to_bytes();
  bytes read(given.begin(), given.end());
  check(read.size() == written.size(), "a frame has one size");
  for (bytes* each : {&read, &written}) {  // a frame may go without a checksum
    std::fill_n(each->begin() + 8, 4, std::byte{0});
    std::fill_n(each->begin() + lamina::detail::checksum_offset, 8, std::byte{0});
  }
  check(read == written, "a frame is written in one way");
}

template <class T>
void aggregate(const frame_view<T>& frame, const lamina::layout& model) {
  lamina::gradient_aggregator<T> aggregator(model, 3, frame.step());
  std::error_code code;
  const outcome added = outcome_of([&] { aggregator.add(frame); }, &code);
  if (frame.kind() != lamina::frame_kind::gradients) {
    check(added == outcome::refused && code == frame_errc::unexpected_kind, "parameters are no gradients");
  } else if (frame.sender() >= 3) {
    check(added == outcome::refused && code == frame_errc::unknown_sender, "a sender is known");
  } else {
    check(added == outcome::done, "a good frame is taken");
    check(outcome_of([&] { aggregator.add(frame); }, &code) == outcome::refused &&
              code == frame_errc::duplicate_sender,
          "a frame is taken once");
    aggregator.close();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      check(aggregator.arrived().is_dropped(l) == frame.is_dropped(l), "what was sent has arrived");
      std::vector<T> expected(model.sizes()[l]);
      frame.restore(l, expected);
      aggregator.mean(l, [&](std::size_t begin, std::span<const T> mean) {
        check(same_numbers(mean, std::span<const T>(expected).subspan(begin, mean.size())),
              "the mean of one frame is the frame");
      });
    }
    aggregator.next_step();
    check(outcome_of([&] { aggregator.add(frame); }, &code) == outcome::refused &&
              code == frame_errc::unexpected_step,
          "a frame of the step before is refused");
    return;
  }
  check(aggregator.arrived().sent_layers() == 0, "a refused frame changes nothing");
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
  outcome_of([&] { lamina::decode<T>(given, model); }, &thrown);
  check(thrown == error, "both decode give the same error");
  if (error) {
    check(error.category() == lamina::frame_category(), "a refusal has a name");
    check(view.layers() == 0 && !view.is_of(model), "a refused frame has no layers");
    return;
  }
  check(view.layers() == model.layers() && view.is_of(model), "a frame is of its model");
  input choices(given);
  for (std::size_t l = 0; l < model.layers(); ++l) read_layer(view, l, model.sizes()[l], choices);
  check(throws<std::out_of_range>([&] { view.is_dropped(model.layers()); }), "there are no more layers");
  if (view.payload() == payload_type::as_is) check_canonical(view, model, given);
  aggregate(view, model);
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? decode_and_use<double>(in) : decode_and_use<float>(in);
}

}  // namespace lamina_fuzz
