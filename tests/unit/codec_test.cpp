// SPDX-License-Identifier: MIT
// A selection and its layers to a frame, and what is read of it. decoder_test.cpp has what is refused.
#include "lamina/codec.hpp"

#include <stdexcept>

#include "frames.hpp"

namespace lamina_test::codec_test {

using lamina::errc;
using lamina::frame_kind;
using lamina::payload_type;

namespace {

// Whether decode, with an error code or without, takes what a caller gives as this type.
template <class Given, class... Error>
constexpr bool decodes = requires(Given&& given, const lamina::layout& model, Error&... error) {
  lamina::decode<float>(std::forward<Given>(given), model, error...);
};

}  // namespace

TEST_CASE("codec: the segments are the header and then the layers where they lie") {
  const lamina::layout model = model_of({3, 0, 4097, 1});
  const auto values = zeros_like<float>(model);
  const lamina::selection chosen = everything(model);
  lamina::frame_encoder<float> encoder(model);
  const auto& frame = encoder.encode(
      {}, chosen, [&](std::size_t l) -> const auto& { return values[l]; });
  const auto segments = frame.segments();
  REQUIRE(segments.size() == 1 + chosen.sent_layers());
  std::size_t s = 1;
  for (const std::size_t l : chosen.sent())
    CHECK(segments[s++].data() == reinterpret_cast<const std::byte*>(values[l].data()));
  for (const std::size_t size : {std::size_t{0}, frame.size_bytes() - 1, frame.size_bytes() + 1}) {
    bytes other(size, std::byte{0x55});
    const std::string message = message_of<std::invalid_argument>([&] { frame.copy_to(other); });
    CHECK(contains(message, std::to_string(frame.size_bytes()) + " bytes"));
    CHECK(contains(message, std::to_string(size)));
    CHECK(other == bytes(size, std::byte{0x55}));
  }
}

TEST_CASE("codec: a wrong size or layer is refused by restore and apply_to, and nothing is written") {
  const small_frame<float> small;
  const auto view = lamina::decode<float>(small.frame, small.model);
  for (const std::size_t l : {0, 1}) {
    std::vector<float> out(2, 5);
    for (const auto& message : {message_of<std::invalid_argument>([&] { view.restore(l, out); }),
                                message_of<std::invalid_argument>([&] { view.apply_to(l, out); })}) {
      CHECK(contains(message, "layer" + std::to_string(l)));
      CHECK(contains(message, "2 elements"));
      CHECK(contains(message, l == 0 ? "3 elements" : "4 elements"));
      CHECK(out == std::vector<float>(2, 5));
    }
  }
  const lamina::frame_view<float> none;
  std::vector<float> out(3, 5);
  const bytes parameters = frame_of(small.sent, small.values, {.kind = frame_kind::parameters});
  const auto of_parameters = lamina::decode<float>(parameters, small.model);
  CHECK(contains(message_of<std::logic_error>([&] { of_parameters.restore(0, out); }), "apply_to"));
  for (const auto& [of, beyond] : {std::pair(&view, 4), std::pair(&none, 0)}) {
    CHECK_THROWS_AS(of->restore(beyond, out), std::out_of_range);
    CHECK_THROWS_AS(of->apply_to(beyond, out), std::out_of_range);
    CHECK_THROWS_AS(of->is_dropped(beyond), std::out_of_range);
    CHECK_THROWS_AS(of->layer(beyond), std::out_of_range);
    CHECK_THROWS_AS(of->bytes_of(beyond), std::out_of_range);
  }
  CHECK(out == std::vector<float>(3, 5));
}

TEST_CASE("codec: a stretch of a layer is read where it lies, and one that is not there is refused") {
  const lamina::layout model = model_of({5, 200, 10});
  const tensors<float> layers = {std::vector<float>(5, 1), std::vector<float>(200, 2), {}};
  for (const payload_type type : payload_types) {
    CAPTURE(static_cast<int>(type));
    const bytes frame = frame_of(some_of(model, {0, 1}), layers, {.payload = type});
    const auto view = lamina::decode<float>(frame, model);
    std::vector<float> buffer(50);
    const std::span<const float> read = view.read(1, 128, buffer);
    CHECK(read.data() == (type == payload_type::as_is ? view.layer(1).data() + 128 : buffer.data()));
    // Beyond the end, from before the beginning, of a layer that was dropped, and of none.
    for (const auto& [layer, begin] :
         {std::pair<std::size_t, std::size_t>{1, 192}, {1, std::size_t{0} - 64}, {2, 0}, {3, 0}}) {
      std::vector<float> some(50, -1);
      CHECK_THROWS_AS(view.copy(layer, begin, some), std::out_of_range);
      CHECK_THROWS_AS(view.read(layer, begin, some), std::out_of_range);
      CHECK(some == std::vector<float>(50, -1));
    }
  }
}

TEST_CASE("codec: of a frame that arrived in part restore writes what did, and nothing else") {
  const lamina::layout model = model_of({200, 7, 130});
  const tensors<float> values = {std::vector<float>(200, 3), std::vector<float>(7, 4),
                                 std::vector<float>(130, 5)};
  const lamina::selection chosen = some_of(model, {0, 2});
  lamina::delivery arrived(chosen, 64);
  for (const auto& [layer, chunk] : {std::pair{0, 1}, {2, 0}, {2, 2}}) arrived.lose(layer, chunk);
  for (const auto kind : {frame_kind::gradients, frame_kind::parameters}) {
    for (const payload_type payload : payload_types) {
      const bytes frame = frame_of(chosen, values, {.kind = kind, .payload = payload});
      const auto view = lamina::decode<float>(frame, model);
      tensors<float> out;
      for (std::size_t l = 0; l < 3; ++l) {
        out.emplace_back(model.sizes()[l], 9.0F);
        view.restore(l, out[l], arrived);
      }
      for (std::size_t i = 0; i < 200; ++i) REQUIRE(out[0][i] == (i / 64 == 1 ? 9 : 3));
      for (std::size_t i = 0; i < 130; ++i) REQUIRE(out[2][i] == (i / 64 == 1 ? 5 : 9));
      CHECK(out[1] == std::vector<float>(7, 9));

      const auto refuses = [&](const lamina::delivery& other, std::size_t elements) {
        std::vector<float> to(elements, 9);
        const bool threw = throws<std::invalid_argument>([&] { view.restore(0, to, other); });
        return threw && to == std::vector<float>(elements, 9);
      };
      CHECK(refuses(lamina::delivery(lamina::selection(model), 64), 200));
      CHECK(refuses(lamina::delivery(everything(model_of({200, 7, 131})), 64), 200));
      CHECK(refuses(lamina::delivery(chosen, 48), 200) == lamina::has_blocks(payload));
      CHECK(refuses(arrived, 199));
      CHECK_THROWS_AS(view.restore(3, out[0], arrived), std::out_of_range);
    }
  }
}

TEST_CASE("codec: bytes that are gone when decode returns do not compile; none at all are truncated") {
  std::error_code error;
  CHECK(lamina::decode<float>({}, model_of({1}), error).layers() == 0);
  CHECK(error == errc::truncated);
  CHECK(decodes<bytes&>);
  CHECK(decodes<const bytes&, std::error_code>);
  CHECK(decodes<std::span<const std::byte>>);
  CHECK_FALSE(decodes<bytes>);
  CHECK_FALSE(decodes<bytes, std::error_code>);
}

TEST_CASE("codec: the largest frame of a layout, also where it cannot be counted") {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const payload_type type : payload_types) {
    const auto largest = [&](const lamina::layout& model) {
      return lamina::largest_frame_bytes<float>(model, type);
    };
    CHECK(largest(model_of({})) == 64);
    CHECK(largest(model_of({most})) == most);  // it cannot be counted
  }
  // Many small layers, whose bits take more than a constant.
  const lamina::layout many = model_of(std::vector<std::size_t>(40'000, 4));
  CHECK(lamina::largest_frame_bytes<float>(many) == 64 + 5056 + 640'000);
  CHECK(lamina::largest_frame_bytes<double>(model_of({most / 16, most / 16, most / 16})) == most);
}

TEST_CASE("codec: a view outlives the layout it was decoded for, and has no layers once it is moved from") {
  const bytes frame = frame_of<float>(everything(model_of({2})), {{1, 2}});
  auto view = lamina::decode<float>(frame, model_of({2}));
  CHECK(view.layer(0)[1] == 2);
  CHECK_FALSE(view.is_of(model_of({3})));
  auto taken = std::move(view);
  CHECK(taken.is_of(model_of({2})));
  CHECK(view.layers() == 0);  // NOLINT(bugprone-use-after-move): what is left is defined
  CHECK_FALSE(view.is_of(model_of({2})));
  view = std::move(taken);
  CHECK(taken.layers() == 0);  // NOLINT(bugprone-use-after-move)
  CHECK(view.layer(0)[1] == 2);
}

TEST_CASE("codec: every error has a name of its own") {
  std::vector<std::string> messages;
  for (int code = 1; code <= static_cast<int>(errc::impossible_age); ++code) {
    const std::error_code error = static_cast<errc>(code);
    CHECK(error);
    CHECK(std::string(error.category().name()) == "lamina");
    CHECK(error.message() != "unknown error");
    messages.push_back(error.message());
  }
  std::ranges::sort(messages);
  CHECK(std::ranges::adjacent_find(messages) == messages.end());
  CHECK(lamina::category().message(1000) == "unknown error");
}

TEST_CASE("codec: an encode that throws leaves no frame, whatever was encoded before") {
  struct source_is_gone {};
  const lamina::layout model = model_of({100, 1000, 2000});
  const auto type = GENERATE(lamina::payload_type::as_is, lamina::payload_type::bfloat16);
  const std::vector<float> elements(2000, 1);
  lamina::frame_encoder<float> encoder(model);
  const auto encode = [&](const lamina::selection& chosen, std::size_t fails_at) {
    return encoder
        .encode({.payload = type}, chosen,
                [&](std::size_t l) {
                  if (l == fails_at) throw source_is_gone();
                  return std::span(elements).first(model.sizes()[l]);
                })
        .to_bytes();
  };
  const bytes expected = encode(everything(model), 9);
  for (const std::size_t fails_at : {1, 2}) {
    encode(some_of(model, {0}), 9);
    CHECK_THROWS_AS(encode(everything(model), fails_at), source_is_gone);
    CHECK(encoder.frame().segments().empty());
    CHECK(encoder.frame().to_bytes().empty());
    CHECK(encode(everything(model), 9) == expected);
    const auto wrong_size = [&] {
      (void)encoder.encode({.payload = type}, everything(model),
                           [&](std::size_t) { return std::span(elements); });
    };
    CHECK_THROWS_AS(wrong_size(), std::invalid_argument);
    for (const auto& other : {model_of({100, 1000, 2001}), model_of(std::vector<std::size_t>(2000, 1))})
      CHECK_THROWS_AS(encode(everything(other), 9), std::invalid_argument);
    CHECK(encoder.frame().to_bytes().empty());
  }
}

}  // namespace lamina_test::codec_test
