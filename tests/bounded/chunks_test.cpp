// SPDX-License-Identifier: MIT
#include "lamina/bounded/chunks.hpp"

#include <tuple>

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::chunks_test {

using bounded::chunk;
using bounded::chunk_grid;
using bounded::frame_chunks;

namespace {

std::vector<std::size_t> order_of(const frame_chunks& chunks) {  // 100 · fragment + index
  std::vector<std::size_t> order;
  for (const chunk& each : chunks.in_sending_order()) order.push_back(100 * each.fragment + each.index);
  return order;
}

// A fragment of so many chunks of 8 floats, whose magnitudes are these.
std::vector<float> with_magnitudes(const std::vector<float>& magnitudes) {
  std::vector<float> values;
  for (const float each : magnitudes) {
    for (int k = 0; k < 8; ++k) values.push_back(k % 2 == 0 ? each : -each);
  }
  return values;
}

struct shaped_frame {
  explicit shaped_frame(const std::vector<std::vector<float>>& magnitudes) {
    std::vector<std::size_t> sizes;
    for (const auto& fragment : magnitudes) {
      values.push_back(with_magnitudes(fragment));
      sizes.push_back(values.back().size());
    }
    model.emplace(model_of(sizes));
    encoder.emplace(*model);
    encoder->encode({.checksum = lamina::frame_checksum::none}, everything(*model),
                    [this](std::size_t l) { return std::span<const float>(values[l]); });
  }
  frame_chunks cut(const bounded::sending_options& options) const {
    return frame_chunks(encoder->frame(), everything(*model),
                        chunk_grid::of<float>(*model, payload_type::as_is, 8), options);
  }
  std::vector<std::vector<float>> values;
  std::optional<lamina::layout> model;
  std::optional<lamina::frame_encoder<float>> encoder;
};

}  // namespace

TEST_CASE("chunks: as many elements as fit, in whole blocks") {
  CHECK(bounded::chunk_elements<float>(payload_type::as_is, 1416) == 352);
  CHECK(bounded::chunk_elements<double>(payload_type::as_is, 1416) == 176);
  CHECK(bounded::chunk_elements<float>(payload_type::float16, 1416) == 704);
  CHECK(bounded::chunk_elements<double>(payload_type::bfloat16, 1416) == 704);
  CHECK(bounded::chunk_elements<float>(payload_type::int8, 1416) == 1344);
  CHECK(lamina::payload_bytes<float>(payload_type::int8, 1344) == 1365);
  CHECK(bounded::chunk_elements<float>(payload_type::int8, 65) == 64);
  CHECK_THROWS_AS(bounded::chunk_elements<float>(payload_type::int8, 64), std::invalid_argument);
  CHECK(bounded::chunk_elements<float>(payload_type::int4, 1416) == 2688);
  CHECK(lamina::payload_bytes<float>(payload_type::int4, 2688) == 1386);
  CHECK_THROWS_AS(bounded::chunk_elements<double>(payload_type::as_is, 63), std::invalid_argument);
}

TEST_CASE("chunks: what may be missing is rounded down, in integers") {
  CHECK(bounded::allowed_losses(100'000, 9) == 0);
  CHECK(bounded::allowed_losses(100'000, 10) == 1);
  CHECK(bounded::allowed_losses(290'000, 100) == 29);  // floor(0.29 * 100) is 28
  CHECK(bounded::allowed_losses(1, 999'999) == 0);
  CHECK(bounded::allowed_losses(1, 1'000'000) == 1);
  CHECK(bounded::allowed_losses(500'000, 0xffffffff) == 0x7fffffff);
}

TEST_CASE("chunks: a grid says where each chunk lies, and its pieces cover a fragment once") {
  for (const payload_type type : {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                  payload_type::int8, payload_type::int4}) {
    const lamina::layout model = model_of({0, 1, 63, 64, 65, 130, 1000});
    const auto grid = chunk_grid::of<double>(model, type, 128);
    std::size_t chunks = 0;
    for (std::uint32_t fragment = 0; fragment < model.layers(); ++fragment) {
      const std::size_t size = model.sizes()[fragment];
      CHECK(grid.chunks(fragment) == (size + 127) / 128);
      CHECK(grid.bitmap_bytes(fragment) == (grid.chunks(fragment) + 7) / 8);
      chunks += grid.chunks(fragment);
      CHECK(grid.fragment_bytes(fragment) == lamina::payload_bytes<double>(type, size));
      std::vector<int> covered(grid.fragment_bytes(fragment));
      for (std::uint32_t i = 0; i < grid.chunks(fragment); ++i) {
        std::size_t bytes = 0;
        for (const auto piece : grid.pieces(fragment, i)) {
          for (std::size_t k = 0; k < piece.bytes; ++k) ++covered.at(piece.begin + k);
          bytes += piece.bytes;
        }
        CHECK(bytes == grid.data_bytes(fragment, i));
      }
      CHECK(std::ranges::count(covered, 1) == std::ssize(covered));
      CHECK_FALSE(grid.has(fragment, grid.chunks(fragment)));
    }
    CHECK(grid.chunks() == chunks);
    CHECK_FALSE(grid.has(static_cast<std::uint32_t>(model.layers()), 0));
  }
}

TEST_CASE("chunks: a grid refuses what no packet could carry") {
  const lamina::layout model = model_of({100});
  const auto make = [&](std::size_t elements, payload_type type = payload_type::as_is) {
    return throws<std::invalid_argument>([&] { std::ignore = chunk_grid::of<float>(model, type, elements); });
  };
  CHECK(make(0));
  CHECK(make(12));
  CHECK(make(96, payload_type::int8));
  CHECK(make(96, payload_type::int4));
  CHECK(make(20'000));
  CHECK_FALSE(make(96));
  const lamina::layout huge = model_of({std::size_t{8} << 32U});
  CHECK(contains(message_of<std::invalid_argument>(
                     [&] { std::ignore = chunk_grid::of<float>(huge, payload_type::as_is, 8); }),
                 "layer 'layer0' has more than 2^32 - 1 chunks"));
}

TEST_CASE("chunks: the quantile within the fragment orders, not the magnitude") {
  // Fragment 1 has the smaller numbers, and is not sent last for it.
  const shaped_frame made({{400, 100, 300, 200}, {2, 1}, {10, 30, 20, 40}});
  const auto chunks = made.cut({.bound_ppm = 500'000});
  // Ranks over counts: 0/4, 1/4, 2/4, 3/4 and 0/2, 1/2; ties by fragment, then index.
  CHECK(order_of(chunks) == std::vector<std::size_t>{0, 100, 203, 2, 201, 3, 101, 202, 1, 200});
}

TEST_CASE("chunks: fragments that cannot be spared come first, as they lie") {
  const shaped_frame made({{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {1, 2}});
  CHECK(order_of(made.cut({.bound_ppm = 100'000})) ==
        std::vector<std::size_t>{100, 101, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0});
  CHECK(order_of(made.cut({.bound_ppm = 0})) ==
        std::vector<std::size_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 100, 101});
}

TEST_CASE("chunks: without tags they go as they lie, by quantile, and none is droppable; NaN goes first") {
  const shaped_frame made({{1, 2, 3, 4}, {1, 2}});
  const auto chunks = made.cut({.bound_ppm = 500'000, .tags = false});
  CHECK(order_of(chunks) == std::vector<std::size_t>{0, 100, 1, 2, 101, 3});
  for (const chunk& each : chunks.in_sending_order()) CHECK(each.tag == 0);
  const shaped_frame bad({{1, 2, std::numeric_limits<float>::quiet_NaN(), 4}});
  CHECK(order_of(bad.cut({.bound_ppm = 250'000})) == std::vector<std::size_t>{2, 3, 1, 0});
}

TEST_CASE("chunks: tags say the quarter of the layout and the share that may be dropped") {
  const std::vector<float> ten = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const shaped_frame made({ten, ten, ten, ten});
  std::map<std::uint32_t, std::vector<std::uint32_t>> droppable;
  const auto chunks = made.cut({.bound_ppm = 100'000});
  for (const chunk& each : chunks.in_sending_order()) {
    CHECK((each.tag & 3) == each.fragment);
    CHECK(chunks.protected_tag(each.fragment) == each.fragment);
    if ((each.tag & bounded::droppable_tag) != 0) droppable[each.fragment].push_back(each.index);
  }
  // 0.4, 0.3, 0.2 and 0.1 of ten, the smallest.
  CHECK(droppable == std::map<std::uint32_t, std::vector<std::uint32_t>>{
                         {0, {3, 2, 1, 0}}, {1, {2, 1, 0}}, {2, {1, 0}}, {3, {0}}});
  CHECK_THROWS_AS(made.cut({.bound_ppm = 500'001}), std::invalid_argument);
}

TEST_CASE("chunks: a frame of another selection, grid or with a checksum is refused") {
  std::mt19937 random(32);
  const lamina::layout model = model_of({100, 50});
  const made_frame<float> made(random, model, everything(model));
  const auto grid = chunk_grid::of<float>(model, payload_type::as_is, 8);
  const auto cut = [&](const lamina::selection& sent, const chunk_grid& by) {
    return message_of<std::invalid_argument>([&] { frame_chunks(made.frame(), sent, by); });
  };
  CHECK(cut(made.sent, grid) == "(no exception)");
  CHECK(contains(cut(lamina::selection(model), grid), "another layout, selection or type"));
  CHECK(contains(cut(made.sent, chunk_grid::of<double>(model, payload_type::as_is, 8)), "another layout"));
  CHECK(contains(cut(made.sent, chunk_grid::of<float>(model, payload_type::float16, 8)), "another layout"));
  const lamina::layout other = model_of({100, 51});
  CHECK(contains(cut(everything(other), chunk_grid::of<float>(other, payload_type::as_is, 8)),
                 "another layout"));
  lamina::frame_encoder<float> encoder(model);
  encoder.encode({}, made.sent, [&](std::size_t l) { return std::span<const float>(made.values[l]); });
  CHECK(contains(message_of<std::invalid_argument>([&] { frame_chunks(encoder.frame(), made.sent, grid); }),
                 "has a checksum"));
  encoder.forget();
  CHECK(contains(message_of<std::invalid_argument>([&] { frame_chunks(encoder.frame(), made.sent, grid); }),
                 "there is no frame"));
}

TEST_CASE("loss memory: what was lost so often in a row is required, until it has arrived") {
  const lamina::layout model = model_of({40, 16, 8});
  const auto grid = chunk_grid::of<float>(model, payload_type::as_is, 8);
  bounded::loss_memory memory(grid);
  const lamina::selection first = some_of(model, {0, 1});
  const auto lose = [&](const lamina::selection& sent, const std::vector<chunk>& lost) {
    lamina::delivery arrived(sent, 8);
    for (const chunk& each : lost) arrived.lose(each.fragment, each.index);
    memory.note(arrived);
  };
  lose(first, {{0, 1}, {0, 4}, {1, 0}});
  CHECK(memory.required(first, 1) == std::vector<chunk>{{0, 1}, {0, 4}, {1, 0}});
  CHECK(memory.required(first, 2).empty());
  lose(first, {{0, 1}, {1, 0}});
  CHECK(memory.required(first, 2) == std::vector<chunk>{{0, 1}, {1, 0}});
  // A transfer without fragment 0 leaves its counts alone.
  const lamina::selection second = some_of(model, {1});
  lose(second, {});
  CHECK(memory.required(first, 2) == std::vector<chunk>{{0, 1}});
  CHECK(memory.required(second, 2).empty());
  lose(first, {{0, 1}});
  CHECK(memory.required(first, 3) == std::vector<chunk>{{0, 1}});
  CHECK(memory.required(first, 0).empty());
  for (int k = 0; k < 300; ++k) lose(first, {{0, 1}});
  CHECK(memory.required(first, 255) == std::vector<chunk>{{0, 1}});  // it counts no further, and never to 0
  lose(first, {});
  CHECK(memory.required(first, 1).empty());
  CHECK_THROWS_AS(memory.note(lamina::delivery(first, 16)), std::invalid_argument);
  CHECK_THROWS_AS(memory.note(lamina::delivery(everything(model_of({40})), 8)), std::invalid_argument);
  CHECK_THROWS_AS(memory.required(some_of(model_of({100, 100'000}), {1}), 1), std::invalid_argument);
}

}  // namespace lamina_test::chunks_test
