// SPDX-License-Identifier: MIT
#include <lamina/codec.hpp>

#include "catch.hpp"
#include "support.hpp"

namespace {

using tensors = std::vector<std::vector<float>>;

// Of a server, which sends fragments of so many elements; 0: whole layers.
struct parameters_of_a_server {
  explicit parameters_of_a_server(std::size_t fragment_elements)
      : cut(lamina_test::model_of({3, 10'000, 0, 5}), fragment_elements), sent(cut.fragments()) {
    for (std::size_t f = 0; f < cut.fragments().layers(); ++f) sent.send(f);
  }
  std::vector<std::byte> bytes(std::uint64_t step) const {
    const auto fragment = [&](std::size_t f) {
      return std::span(values[cut.layer_of(f)]).subspan(cut.begin(f), cut.fragments().sizes()[f]);
    };
    lamina::frame_encoder<float> encoder(cut.fragments());
    return encoder.encode({.kind = lamina::frame_kind::parameters, .step = step}, sent, fragment).to_bytes();
  }
  lamina::tiling cut;
  lamina::selection sent;  // all, at first
  tensors values{std::vector<float>(3, 1), std::vector<float>(10'000, 2), {}, std::vector<float>(5, 3)};
};

}  // namespace

TEST_CASE("apply: what was sent is written, what was not is kept") {
  parameters_of_a_server of(4096);
  tensors mine{std::vector<float>(3), std::vector<float>(10'000), {}, std::vector<float>(5)};
  REQUIRE(lamina::apply<float>(of.bytes(1), of.cut, 1, mine) == 10'008);  // the whole model at first
  REQUIRE(mine == of.values);

  for (auto& each : of.values) std::ranges::fill(each, 9.0F);
  of.sent.clear();
  of.sent.send(2);  // the second fragment of the second layer
  REQUIRE(lamina::apply<float>(of.bytes(2), of.cut, 2, mine) == 4096);
  REQUIRE(mine[0] == std::vector<float>(3, 1));
  for (std::size_t i = 0; i < 10'000; ++i) REQUIRE(mine[1][i] == (i >= 4096 && i < 8192 ? 9 : 2));
}

TEST_CASE("apply: what does not fit is refused before anything is written") {
  parameters_of_a_server of(0);
  const auto bytes = of.bytes(1);
  tensors mine{std::vector<float>(3), std::vector<float>(10'000), {}, std::vector<float>(4)};
  const auto refused = [&] { lamina::apply<float>(bytes, of.cut, 1, mine); };
  REQUIRE_THROWS_AS(refused(), std::invalid_argument);  // the last has 4 elements
  mine.pop_back();
  REQUIRE_THROWS_AS(refused(), std::invalid_argument);
  REQUIRE(mine[0] == std::vector<float>(3));
  mine.emplace_back(5);
  REQUIRE_THROWS_AS(lamina::apply<float>(bytes, of.cut, 2, mine), lamina::decode_error);
  REQUIRE_THROWS_AS(lamina::apply<float>(bytes, of.cut, 1, mine, 7), lamina::decode_error);
  const lamina::tiling other(of.cut.model(), 4096);
  REQUIRE_THROWS_AS(lamina::apply<float>(bytes, other, 1, mine), lamina::decode_error);
  REQUIRE(mine[0] == std::vector<float>(3));
}
