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

using namespace lamina_test;
using lamina::element_range;

namespace {

const lamina::layout& model() {
  static const lamina::layout model = model_of({100, 7, 0, 1, 64, 33});
  return model;
}
constexpr std::size_t chunk_elements = 8;

using parameters = std::vector<std::vector<float>>;

/// Numbers that say when they were written, and where.
void write(parameters& to, const lamina::selection& layers, float time) {
  for (const std::size_t l : layers.sent()) {
    for (std::size_t i = 0; i < to[l].size(); ++i) to[l][i] = time + static_cast<float>(i) / 128;
  }
}

std::vector<element_range> lost_of(const lamina::delivery& arrived) {
  std::vector<element_range> lost;
  for (std::size_t l = 0; l < model().layers(); ++l) {
    arrived.for_each_lost(l, [&](std::size_t begin, std::size_t end) { lost.push_back({l, begin, end}); });
  }
  return lost;
}

/// A worker at the other end of a way that loses up to 40 % of the chunks that it may lose.
class replica {
 public:
  replica() {
    for (const std::size_t size : model().sizes()) {
      values_.emplace_back(size, -777.0F);
      is_wrong_.emplace_back(size, char{0});
    }
  }

  /// Takes a frame, of which chunks in `required` are not lost, and repairs out of `server`. Gives what arrived.
  lamina::delivery take(const std::vector<std::byte>& bytes, const lamina::selection& published,
                        std::span<const element_range> required, const parameters& server,
                        std::mt19937& random, std::size_t lost_of_10) {
    lamina::delivery arrived(published, chunk_elements);
    for (const std::size_t l : published.sent()) {
      for (std::size_t chunk = 0; chunk < arrived.chunks(l); ++chunk) {
        const std::size_t begin = chunk * chunk_elements;
        const bool is_required =
            std::any_of(required.begin(), required.end(), [&](const element_range& each) {
              return each.layer == l && each.begin <= begin && begin < each.end;
            });
        if (!is_required && below(random, 10) < lost_of_10) arrived.lose(l, chunk);
      }
    }
    const auto frame = lamina::decode<float>(bytes, model());
    for (std::size_t l = 0; l < model().layers(); ++l) frame.restore(l, values_[l], arrived);
    for (const element_range& each : required) {
      if (published.is_sent(each.layer)) continue;
      ++repairs_;
      std::copy_n(server[each.layer].begin() + static_cast<std::ptrdiff_t>(each.begin), each.end - each.begin,
                  values_[each.layer].begin() + static_cast<std::ptrdiff_t>(each.begin));
    }
    return arrived;
  }

  /// Whether no value differs from the server's after this transfer and the one before.
  bool heals(const parameters& server) {
    bool each_is_right_in_time = true;
    for (std::size_t l = 0; l < values_.size(); ++l) {
      for (std::size_t i = 0; i < values_[l].size(); ++i) {
        const bool is_wrong = values_[l][i] != server[l][i];
        if (is_wrong && is_wrong_[l][i] != 0) each_is_right_in_time = false;
        is_wrong_[l][i] = is_wrong ? 1 : 0;
      }
    }
    return each_is_right_in_time;
  }
  bool equals(const parameters& server) const { return values_ == server; }
  std::size_t repairs() const { return repairs_; }

 private:
  parameters values_;
  std::vector<std::vector<char>> is_wrong_;  // after the last transfer
  std::size_t repairs_ = 0;
};

}  // namespace

TEST_CASE("publisher: a value that was lost is wrong for one transfer, and is repaired once") {
  std::mt19937 random(2400);
  constexpr std::size_t workers = 3;
  lamina::parameter_publisher<float> publisher(model(), workers,
                                               {.frame_checksum = lamina::frame_checksum::none});
  parameters server;
  for (const std::size_t size : model().sizes()) server.emplace_back(size);
  const auto layer = [&](std::size_t l) -> const auto& {
    return server[l];
  };
  std::vector<replica> replicas(workers);
  std::vector<std::vector<element_range>> lost(workers);  // in the last transfer that was committed
  for (std::uint64_t step = 1; step <= 1000; ++step) {
    lamina::selection updated(model());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      if (below(random, 3) == 0) updated.send(l);
    }
    write(server, updated, static_cast<float>(step));
    publisher.update(updated);

    const bool is_reliable = step % 10 == 0;
    const std::size_t lost_of_10 = is_reliable ? 0 : 1 + below(random, 4);
    const bool for_all = step % 3 == 0;
    std::vector<std::byte> bytes;
    if (for_all) bytes = publisher.encode_for_all(step, layer).to_bytes();
    for (std::size_t w = 0; w < workers; ++w) {
      if (!is_reliable && !for_all && below(random, 2) == 0) continue;  // this worker is slower
      if (!for_all) bytes = publisher.encode(w, step, layer).to_bytes();
      if (!is_reliable && below(random, 8) == 0) continue;  // the whole transfer failed
      const lamina::selection& published = for_all ? publisher.published_to_all() : publisher.published(w);
      const auto pending = publisher.pending(w);
      REQUIRE(std::ranges::equal(pending, lost[w]));
      const lamina::delivery arrived =
          replicas[w].take(bytes, published, pending, server, random, lost_of_10);
      publisher.commit(w, arrived);
      lost[w] = lost_of(arrived);
      REQUIRE(replicas[w].heals(server));
      if (is_reliable) REQUIRE(replicas[w].equals(server));
    }
  }
  for (std::size_t w = 0; w < workers; ++w) CHECK(replicas[w].repairs() > 50);
}

TEST_CASE("publisher: a frame that arrived whole leaves nothing pending, one that failed all that was") {
  lamina::parameter_publisher<float> publisher(model(), 2);
  const std::vector<float> values(100, 1);
  const auto layer = [&](std::size_t l) { return std::span(values).first(model().sizes()[l]); };
  const auto lose_one = [&](std::size_t worker) {
    lamina::selection all(model());
    all.send_all();
    publisher.update(all);
    (void)publisher.encode(worker, 1, layer);
    lamina::delivery arrived(publisher.published(worker), chunk_elements);
    arrived.lose(0, 12);
    publisher.commit(worker, arrived);
  };
  const std::vector<element_range> one = {{0, 96, 100}};
  const std::vector<element_range> none;

  lose_one(1);
  CHECK(std::ranges::equal(publisher.pending(0), none));
  CHECK(std::ranges::equal(publisher.pending(1), one));
  // Without a frame, and with one that is not committed.
  publisher.commit(1);
  publisher.commit_all();
  CHECK(std::ranges::equal(publisher.pending(1), one));
  (void)publisher.encode(1, 2, layer);
  CHECK(std::ranges::equal(publisher.pending(1), one));
  // The frame holds no layer, but the repairs that went beside it have arrived.
  publisher.commit(1);
  CHECK(publisher.pending(1).empty());

  lose_one(1);
  (void)publisher.encode_for_all(3, layer);
  publisher.commit_all();
  CHECK(publisher.pending(1).empty());

  lose_one(1);
  publisher.forget(1);
  CHECK(publisher.pending(1).empty());
}

TEST_CASE("publisher: a frame of before a worker was forgotten commits nothing, and leaves nothing pending") {
  lamina::parameter_publisher<float> publisher(model(), 1);
  const std::vector<float> values(100, 1);
  const auto layer = [&](std::size_t l) { return std::span(values).first(model().sizes()[l]); };
  (void)publisher.encode(0, 1, layer);
  lamina::delivery arrived(publisher.published(0), chunk_elements);
  arrived.lose(0, 0);
  publisher.forget(0);
  publisher.commit(0, arrived);
  CHECK(publisher.pending(0).empty());
  (void)publisher.encode(0, 2, layer);
  CHECK(publisher.published(0).sent_elements() == model().elements());
}

TEST_CASE("publisher: the delivery of another frame is refused by name and changes nothing") {
  lamina::parameter_publisher<float> publisher(model(), 2, {.payload = lamina::payload_type::int8});
  const std::vector<float> values(100, 1);
  const auto layer = [&](std::size_t l) { return std::span(values).first(model().sizes()[l]); };
  lamina::selection all(model());
  all.send_all();
  const lamina::delivery right(all, 64);
  CHECK(message_of<std::logic_error>([&] { publisher.commit(1, right); }) ==
        "commit: no frame for worker 1 to commit; call encode() before, and commit() once for it");
  CHECK(throws<std::out_of_range>([&] { publisher.commit(2, right); }));
  CHECK(throws<std::out_of_range>([&] { (void)publisher.pending(2); }));

  (void)publisher.encode(1, 1, layer);
  CHECK(throws<std::logic_error>([&] { publisher.commit(0, right); }));
  lamina::selection some(model());
  some.send(0);
  CHECK(contains(message_of<std::invalid_argument>([&] { publisher.commit(1, lamina::delivery(some, 64)); }),
                 "the delivery is of another frame"));
  CHECK(contains(message_of<std::invalid_argument>([&] { publisher.commit(1, lamina::delivery(all, 32)); }),
                 "a multiple of 64 elements, these have 32"));
  (void)publisher.encode(1, 2, layer);
  CHECK(publisher.published(1).sent_elements() == model().elements());  // nothing was committed
  publisher.commit(1, right);
  CHECK(throws<std::logic_error>([&] { publisher.commit(1, right); }));
}

TEST_CASE("publisher: an encode that throws has nothing to commit, and what is pending stays") {
  lamina::parameter_publisher<float> publisher(model(), 1);
  const std::vector<float> values(100, 1);
  const auto layer = [&](std::size_t l) { return std::span(values).first(model().sizes()[l]); };
  const auto too_short = [&](std::size_t) { return std::span(values).first(0); };
  (void)publisher.encode(0, 1, layer);
  lamina::delivery arrived(publisher.published(0), chunk_elements);
  arrived.lose(0, 2);
  publisher.commit(0, arrived);
  lamina::selection first(model());
  first.send(0);
  for (const bool for_all : {false, true}) {
    publisher.update(first);
    (void)publisher.encode(0, 2, layer);
    CHECK(throws<std::invalid_argument>([&] {
      if (for_all) {
        (void)publisher.encode_for_all(3, too_short);
      } else {
        (void)publisher.encode(0, 3, too_short);
      }
    }));
    const lamina::delivery nothing(lamina::selection(model()), chunk_elements);
    CHECK(throws<std::logic_error>([&] { publisher.commit(0, nothing); }));
    publisher.commit(0);
    publisher.commit_all();
    REQUIRE(publisher.pending(0).size() == 1);
    CHECK(publisher.pending(0)[0] == element_range{0, 16, 24});
    (void)publisher.encode(0, 4, layer);
    CHECK(publisher.published(0).is_sent(0));
  }
}
