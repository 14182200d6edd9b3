// SPDX-License-Identifier: MIT
#include "lamina/layout.hpp"

#include <optional>

#include "catch.hpp"
#include "support.hpp"

namespace lamina_test::layout_test {

namespace {

constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();

// FNV-1a over a string of bytes that is written out first.
std::uint64_t literal_fingerprint(const std::vector<lamina::layer>& layers) {
  std::string bytes;
  const auto put = [&bytes](std::uint64_t number) {
    for (int i = 0; i < 8; ++i, number /= 256) bytes.push_back(static_cast<char>(number % 256));
  };
  put(layers.size());
  for (const auto& each : layers) {
    put(each.name.size());
    bytes += each.name;
    put(each.shape.size());
    for (const std::size_t dimension : each.shape) put(dimension);
  }
  std::uint64_t hash = 14695981039346656037U;
  for (const char byte : bytes) {
    hash ^= static_cast<unsigned char>(byte);
    hash *= 1099511628211U;
  }
  return hash;
}

}  // namespace

TEST_CASE("layout: the elements of a layer are the product of its shape") {
  CHECK(lamina::layer{"scalar", {}}.elements() == 1);
  CHECK(lamina::layer{"one", {1}}.elements() == 1);
  CHECK(lamina::layer{"conv", {64, 3, 7, 7}}.elements() == 9408);
  CHECK(lamina::layer{"limit", {huge}}.elements() == huge);
  // A zero anywhere makes it empty, whatever else is in the shape.
  for (const auto& shape :
       std::vector<std::vector<std::size_t>>{{0}, {huge, huge, 0}, {0, huge, huge}, {huge, 0, 2}})
    CHECK(lamina::layer{"empty", shape}.elements() == 0);
}

TEST_CASE("layout: what overflows, and a name that is empty or stands twice, is refused by name") {
  const auto refusal = [](const std::vector<lamina::layer>& layers) {
    return message_of<std::invalid_argument>([&] { lamina::layout{layers}; });
  };
  const lamina::layer too_large{"monster", {huge / 2 + 1, 2}};
  CHECK(contains(message_of<std::invalid_argument>([&] { (void)too_large.elements(); }), "monster"));
  CHECK(contains(refusal({too_large}), "monster"));
  CHECK(lamina::layout({{"a", {huge - 1}}, {"b", {1}}}).elements() == huge);
  CHECK(contains(refusal({{"a", {huge - 1}}, {"culprit", {2}}, {"c", {1}}}), "culprit"));
  CHECK(contains(refusal({{"a", {1}}, {"", {1}}}), "layer 1"));
  CHECK(contains(refusal({{"same", {1}}, {"other", {1}}, {"same", {2}}}), "'same'"));
}

TEST_CASE("layout: an index beyond the last layer throws out_of_range with the number of layers") {
  const lamina::layout model = model_of({1, 2, 3});
  CHECK(model[2].name == "layer2");
  for (const std::size_t index : {std::size_t{3}, std::size_t{8}, huge}) {
    CHECK(contains(message_of<std::out_of_range>([&] { (void)model[index]; }), "3 layers"));
    CHECK(contains(message_of<std::out_of_range>([&] { (void)model.offset(index); }), "3 layers"));
    CHECK(contains(message_of<std::out_of_range>([&] { model.check_layer(index); }), std::to_string(index)));
    CHECK(contains(message_of<std::out_of_range>([&] { model.check_size(index, 1); }), "3 layers"));
  }
}

TEST_CASE("layout: a wrong size is refused with the name, the shape and both sizes") {
  const lamina::layout model({{"bias", {}}, {"conv1.weight", {4, 3, 5}}});
  CHECK_NOTHROW(model.check_size(1, 60));
  CHECK_NOTHROW(model.check_size(0, 1));
  CHECK_THROWS_AS(model.check_size(1, (std::size_t{1} << 32U) + 60), std::invalid_argument);  // 60 in 32 bits
  const std::string message = message_of<std::invalid_argument>([&] { model.check_size(1, 61); });
  CHECK(contains(message, "'conv1.weight'"));
  CHECK(contains(message, "[4, 3, 5]"));
  CHECK(contains(message, "60 elements"));
  CHECK(contains(message, "61 elements"));
}

TEST_CASE("layout: the fingerprint is FNV-1a over names and shapes") {
  for (const auto& layers : std::vector<std::vector<lamina::layer>>{
           {}, {{"conv", {64, 3, 7, 7}}, {"bias", {}}, {"\xc3\xa9", {0, 300, std::size_t{1} << 40}}}})
    CHECK(lamina::layout(layers).fingerprint() == literal_fingerprint(layers));
  CHECK(lamina::layout({{"weight", {3, 2}}, {"bias", {2}}}).fingerprint() == 0xefb0f10f83f3ad64);
}

TEST_CASE("layout: each of many names is found, and none that is not there") {
  std::vector<lamina::layer> layers;
  for (std::size_t l = 0; l < 10'000; ++l)
    layers.push_back({"block." + std::to_string(l) + ".weight", {l % 3}});
  const lamina::layout model(layers);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    REQUIRE(model.index_of(layers[l].name) == l);
    REQUIRE(model.index_of("block." + std::to_string(l) + ".bias") == std::nullopt);
  }
  CHECK(model.index_of("") == std::nullopt);
  CHECK(lamina::layout({}).index_of("weight") == std::nullopt);
}

TEST_CASE("layout: copies share one table, which lives as long as the last of them") {
  std::optional<lamina::layout> first(model_of({4, 5}));
  lamina::layout second(*first);
  CHECK(&second[0] == &(*first)[0]);
  lamina::layout third = model_of({1});
  third = second;
  third = *&third;  // itself
  first.reset();
  CHECK(&third[1] == &second[1]);
  second = model_of({9});
  CHECK(third[1].shape == std::vector<std::size_t>{5});
  CHECK(second.elements() == 9);
  lamina::layout from_temporary = std::move(third);  // a copy: a layout is never without its table
  CHECK(third.layers() == 2);                        // NOLINT(bugprone-use-after-move)
  CHECK(from_temporary.layers() == 2);
}

}  // namespace lamina_test::layout_test
