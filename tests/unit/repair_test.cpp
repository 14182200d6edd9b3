// SPDX-License-Identifier: MIT
// Parameters that are lost on their way down: each worker is brought what it lacks, once.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/server.hpp"
#include "support.hpp"

namespace lamina_test::repair_test {

using lamina::element_range;

namespace {

using tensors = std::vector<std::vector<float>>;
using ranges = std::vector<element_range>;
constexpr std::size_t chunk_elements = 8;

// An asynchronous server whose parameters say when they were written, and where.
struct serving {
  explicit serving(std::size_t workers, lamina::payload_type payload = lamina::payload_type::as_is)
      : server(model, {.workers = workers,
                       .asynchronous = true,
                       .payload = payload,
                       .frame_checksum = lamina::frame_checksum::none}) {
    for (const std::size_t size : model.sizes()) parameters.emplace_back(size);
  }

  void update(const lamina::selection& layers) {
    const std::uint64_t step = server.step(0);
    lamina::frame_encoder<float> encoder(model);
    const auto& frame = encoder.encode(
        {.step = step}, layers, [&](std::size_t l) -> const auto& { return parameters[l]; });
    REQUIRE_FALSE(server.add(frame.to_bytes()));
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = begin; i < begin + mean.size(); ++i)
        parameters[l][i] = static_cast<float>(step) + static_cast<float>(i) / 128;
    });
  }
  lamina::selection all() const {
    lamina::selection all(model);
    all.send_all();
    return all;
  }
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

  lamina::layout model = lamina_test::model_of({100, 7, 0, 1, 64, 33});
  tensors parameters;
  lamina::server<float> server;
};

// A worker at the other end of a way that loses chunks, but none that it must bring.
struct replica {
  explicit replica(const tensors& like) : values(like), is_wrong(like) {
    for (auto& layer : values) std::ranges::fill(layer, -777.0F);
    for (auto& layer : is_wrong) std::ranges::fill(layer, 0.0F);
  }

  lamina::delivery take(const lamina::server_reply& reply, const lamina::layout& model,
                        std::span<const element_range> required, const tensors& server, std::mt19937& random,
                        std::size_t lost_of_10) {
    lamina::delivery arrived(reply.sent(), chunk_elements);
    for (const std::size_t l : reply.sent().sent()) {
      for (std::size_t chunk = 0; chunk < arrived.chunks(l); ++chunk) {
        const std::size_t begin = chunk * chunk_elements;
        const bool is_required = std::ranges::any_of(required, [&](const element_range& each) {
          return each.layer == l && each.begin <= begin && begin < each.end;
        });
        if (!is_required && below(random, 10) < lost_of_10) arrived.lose(l, chunk);
      }
    }
    const auto bytes = reply.to_bytes();
    const auto frame = lamina::decode<float>(bytes, model);
    for (std::size_t l = 0; l < values.size(); ++l) frame.restore(l, values[l], arrived);
    for (const auto& [layer, begin, end] : required) {
      if (reply.sent().is_sent(layer)) continue;
      ++repairs;
      for (std::size_t i = begin; i < end; ++i) values[layer][i] = server[layer][i];
    }
    return arrived;
  }
  // Whether no value differs from the server's after this transfer and the one before.
  bool heals(const tensors& server) {
    bool is_right_in_time = true;
    for (std::size_t l = 0; l < values.size(); ++l) {
      for (std::size_t i = 0; i < values[l].size(); ++i) {
        const bool was_wrong = is_wrong[l][i] != 0;
        is_wrong[l][i] = values[l][i] != server[l][i] ? 1.0F : 0.0F;
        if (was_wrong && is_wrong[l][i] != 0) is_right_in_time = false;
      }
    }
    return is_right_in_time;
  }

  tensors values;
  tensors is_wrong;  // 1 after the last transfer
  std::size_t repairs = 0;
};

}  // namespace

TEST_CASE("repair: a value that was lost is wrong for one transfer, and is repaired once") {
  std::mt19937 random(2400);
  constexpr std::size_t workers = 3;
  serving at(workers);
  std::vector<replica> replicas(workers, replica(at.parameters));
  for (std::uint64_t t = 1; t <= 1000; ++t) {
    lamina::selection updated(at.model);
    for (std::size_t l = 0; l < at.model.layers(); ++l) {
      if (below(random, 3) == 0) updated.send(l);
    }
    at.update(updated);
    const bool is_reliable = t % 10 == 0;
    for (std::size_t w = 0; w < workers; ++w) {
      if (!is_reliable && below(random, 2) == 0) continue;  // this worker is slower
      const auto reply = at.reply(w);
      if (!is_reliable && below(random, 8) == 0) continue;  // the whole transfer failed
      const auto arrived = replicas[w].take(reply, at.model, at.server.pending(w), at.parameters, random,
                                            is_reliable ? 0 : 1 + below(random, 4));
      at.server.commit(w, reply.clock(), arrived);
      REQUIRE(replicas[w].heals(at.parameters));
      if (is_reliable) REQUIRE(replicas[w].values == at.parameters);
    }
  }
  for (const replica& each : replicas) CHECK(each.repairs > 50);
}

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
  lamina::selection some(at.model);
  some.send(0);
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(some, 64)),
                    Contains("the delivery is of another frame"));
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(at.all(), 32)),
                    Contains("a multiple of 64 elements, these have 32"));
  CHECK(at.reply(1).sent().sent_elements() == at.model.elements());  // nothing was committed
  at.server.commit(1, clock, right);
  CHECK(at.reply(1).sent().sent_elements() == 0);
}

}  // namespace lamina_test::repair_test
