// SPDX-License-Identifier: MIT
// Parameters that are lost on their way down: each worker is brought what it lacks, once.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "catch.hpp"
#include "frames.hpp"
#include "lamina/server.hpp"

namespace lamina_test::repair_test {

using lamina::element_range;

namespace {

using ranges = std::vector<element_range>;
constexpr std::size_t chunk_elements = 8;

// An asynchronous server whose parameters say when they were written, and where.
struct serving {
  explicit serving(std::size_t workers, lamina::payload_type payload = lamina::payload_type::as_is)
      : server(model, {.workers = workers,
                       .asynchronous = true,
                       .payload = payload,
                       .frame_checksum = lamina::frame_checksum::none}) {}

  void update(const lamina::selection& layers) {
    const std::uint64_t step = server.step(0);
    REQUIRE_FALSE(server.add(frame_of(layers, parameters, {.step = step})));
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = begin; i < begin + mean.size(); ++i)
        parameters[l][i] = static_cast<float>(step) + static_cast<float>(i) / 128;
    });
  }
  lamina::selection all() const { return everything(model); }
  lamina::server_reply reply(std::size_t w) { return server.reply(w, parameters); }
  bool is_pending(std::size_t w, const ranges& expected) const {
    return std::ranges::equal(server.pending(w), expected);
  }
  // Worker w has lost these elements of layer 0, which is one chunk.
  std::uint64_t lose(std::size_t w, std::size_t chunk) {
    const auto lossy = reply(w);
    lamina::delivery arrived(lossy.sent(), chunk_elements);
    arrived.lose(0, chunk);
    server.commit(w, lossy.clock(), arrived);
    return lossy.clock();
  }

  lamina::layout model = model_of({100, 7, 0, 1, 64, 33});
  tensors<float> parameters = zeros_like<float>(model);
  lamina::server<float> server;
};

}  // namespace

TEST_CASE("repair: what is pending stays until a later reply has arrived") {
  serving at(2);
  const auto before = at.reply(1);
  at.update(at.all());
  at.lose(1, 12);
  const ranges one = {{0, 96, 100}};
  CHECK(at.is_pending(0, {}));
  CHECK(at.is_pending(1, one));
  at.server.commit(1, before.clock());  // late
  CHECK(at.is_pending(1, one));
  const auto empty = at.reply(1);
  CHECK(empty.sent().sent_layers() == 0);
  CHECK(at.is_pending(1, one));
  at.server.commit(1, empty.clock());  // with the repairs that were sent with it
  CHECK(at.is_pending(1, {}));

  at.update(at.all());
  const std::uint64_t clock = at.lose(1, 2);
  at.update(at.all());
  at.parameters[0].resize(3);
  CHECK_THROWS_AS(at.reply(1), std::invalid_argument);
  CHECK_THROWS_AS(at.server.commit(1, clock, lamina::delivery(at.all(), 8)), std::invalid_argument);
  at.parameters[0].resize(100);
  CHECK(at.is_pending(1, {{0, 16, 24}}));
  CHECK(at.reply(1).sent().is_sent(0));
}

TEST_CASE("repair: of a worker that was forgotten nothing is pending, nor of a reply from before") {
  serving at(1);
  at.lose(0, 0);
  at.update(at.all());
  const auto before = at.reply(0);
  const std::uint64_t clock = before.clock();
  const lamina::selection sent = before.sent();
  at.server.forget(0);
  CHECK(at.is_pending(0, {}));
  lamina::delivery arrived(sent, chunk_elements);
  arrived.lose(0, 0);
  at.server.commit(0, clock, arrived);
  CHECK(at.is_pending(0, {}));
  CHECK(at.reply(0).sent().sent_elements() == at.model.elements());
}

TEST_CASE("repair: the delivery of another reply is refused by name and changes nothing") {
  serving at(2, lamina::payload_type::int8);
  const lamina::delivery right(at.all(), 64);
  CHECK_THROWS_AS(at.server.commit(1, 1, right), std::invalid_argument);  // there was no reply
  const std::uint64_t clock = at.reply(1).clock();
  CHECK_THROWS_AS(at.server.commit(0, clock, right), std::invalid_argument);
  CHECK_THROWS_AS(at.server.commit(2, clock, right), std::out_of_range);
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(some_of(at.model, {0}), 64)),
                    Contains("the delivery is of another frame"));
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(at.all(), 32)),
                    Contains("a multiple of 64 elements, these have 32"));
  CHECK(at.reply(1).sent().sent_elements() == at.model.elements());  // nothing was committed
  at.server.commit(1, clock, right);
  CHECK(at.reply(1).sent().sent_elements() == 0);
}

}  // namespace lamina_test::repair_test
