// SPDX-License-Identifier: MIT
#include <lamina/apply.hpp>
#include <lamina/publisher.hpp>

#include "catch.hpp"
#include "support.hpp"

namespace {

using tensors = std::vector<std::vector<float>>;

// Publishes parts of so many elements; 0: whole layers.
struct server {
  explicit server(std::size_t part_elements) : cut(lamina_test::model_of({3, 10'000, 0, 5}), part_elements) {}
  std::vector<std::byte> bytes(std::uint64_t step) {
    const auto part = [&](std::size_t p) {
      return std::span(parameters[cut.layer_of(p)]).subspan(cut.begin(p), cut.parts().sizes()[p]);
    };
    std::vector<std::byte> frame = publisher.encode_for_all(step, part).to_bytes();
    publisher.commit_all();
    return frame;
  }
  lamina::partition cut;
  tensors parameters{std::vector<float>(3, 1), std::vector<float>(10'000, 2), {}, std::vector<float>(5, 3)};
  lamina::parameter_publisher<float> publisher{cut.parts(), 1};
};

}  // namespace

TEST_CASE("apply: what was sent is written, what was not is kept") {
  server of(4096);
  tensors mine{std::vector<float>(3), std::vector<float>(10'000), {}, std::vector<float>(5)};
  REQUIRE(lamina::apply<float>(of.bytes(1), of.cut, 1, mine) == 10'008);  // the whole model at first
  REQUIRE(mine == of.parameters);

  for (auto& each : of.parameters) std::ranges::fill(each, 9.0F);
  lamina::selection changed(of.cut.parts());
  changed.send(2);  // the second part of the second layer
  of.publisher.update(changed);
  REQUIRE(lamina::apply<float>(of.bytes(2), of.cut, 2, mine) == 4096);
  REQUIRE(mine[0] == std::vector<float>(3, 1));
  for (std::size_t i = 0; i < 10'000; ++i) REQUIRE(mine[1][i] == (i >= 4096 && i < 8192 ? 9 : 2));
}

TEST_CASE("apply: whole layers need no partition") {
  server of(0);
  tensors mine{std::vector<float>(3), std::vector<float>(10'000), {}, std::vector<float>(5)};
  lamina::apply<float>(of.bytes(1), of.cut.model(), 1, mine);
  REQUIRE(mine == of.parameters);
}

TEST_CASE("apply: what does not fit is refused before anything is written") {
  server of(0);
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
  const lamina::partition other(of.cut.model(), 4096);
  REQUIRE_THROWS_AS(lamina::apply<float>(bytes, other, 1, mine), lamina::decode_error);
  REQUIRE(mine[0] == std::vector<float>(3));
}
