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

/// A server, and frames that make it take some layers for updated.
struct updated_server {
  explicit updated_server(std::size_t workers, lamina::server_options options = {})
      : server(model(), with(std::move(options), workers)) {
    for (const std::size_t size : model().sizes()) values.emplace_back(size, 1.0F);
  }

  template <class Write>
  void update(const lamina::selection& layers, const Write& write) {
    lamina::frame_encoder<float> encoder(model());
    const auto error =
        server.add(encoder
                       .encode(lamina::frame_kind::gradients, ++step_, 0, layers,
                               [&](std::size_t l) { return std::span<const float>(values[l]); })
                       .to_bytes());
    REQUIRE_FALSE(error);
    server.update([](std::size_t, std::size_t, std::span<const float>) {});
    write();
  }
  void update_all() {
    lamina::selection all(model());
    all.send_all();
    update(all, [] {});
  }
  /// A reply of which one chunk of layer 0 is lost.
  void lose_one(std::size_t worker) {
    update_all();
    const auto reply = server.reply(worker, values);
    lamina::delivery arrived(reply.sent(), chunk_elements);
    arrived.lose(0, 12);
    server.commit(worker, reply.clock(), arrived);
  }

  static lamina::server_options with(lamina::server_options options, std::size_t workers) {
    options.workers = workers;
    options.asynchronous = true;
    return options;
  }

  lamina::server<float> server;
  parameters values;

 private:
  std::uint64_t step_ = 0;
};

const std::vector<element_range> the_lost_one = {{0, 96, 100}};

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

TEST_CASE("repair: a value that was lost is wrong for one transfer, and is repaired once") {
  std::mt19937 random(2400);
  constexpr std::size_t workers = 3;
  updated_server of(workers, {.frame_checksum = lamina::frame_checksum::none});
  std::vector<replica> replicas(workers);
  std::vector<std::vector<element_range>> lost(workers);  // in the last transfer that was committed
  for (int step = 1; step <= 1000; ++step) {
    lamina::selection updated(model());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      if (below(random, 3) == 0) updated.send(l);
    }
    of.update(updated, [&] { write(of.values, updated, static_cast<float>(step)); });

    const bool is_reliable = step % 10 == 0;
    const std::size_t lost_of_10 = is_reliable ? 0 : 1 + below(random, 4);
    for (std::size_t w = 0; w < workers; ++w) {
      if (!is_reliable && below(random, 3) == 0) continue;  // this worker is slower
      const auto reply = of.server.reply(w, of.values);
      if (!is_reliable && below(random, 8) == 0) continue;  // the whole transfer failed
      const auto pending = of.server.pending(w);
      REQUIRE(std::ranges::equal(pending, lost[w]));
      const lamina::delivery arrived =
          replicas[w].take(reply.to_bytes(), reply.sent(), pending, of.values, random, lost_of_10);
      of.server.commit(w, reply.clock(), arrived);
      lost[w] = lost_of(arrived);
      REQUIRE(replicas[w].heals(of.values));
      if (is_reliable) REQUIRE(replicas[w].equals(of.values));
    }
  }
  for (std::size_t w = 0; w < workers; ++w) CHECK(replicas[w].repairs() > 50);
}

TEST_CASE("repair: a reply that arrived whole leaves nothing pending, one that failed all that was") {
  updated_server of(2);
  const auto early = of.server.reply(1, of.values).clock();
  of.lose_one(1);
  CHECK(of.server.pending(0).empty());
  CHECK(std::ranges::equal(of.server.pending(1), the_lost_one));
  (void)of.server.reply(1, of.values);  // and it is not committed
  CHECK(std::ranges::equal(of.server.pending(1), the_lost_one));
  of.server.commit(1, early);  // late, of a transfer that did not bring the repairs
  CHECK(std::ranges::equal(of.server.pending(1), the_lost_one));
  // The reply holds no layer, but the repairs that are sent with it have arrived.
  const auto reply = of.server.reply(1, of.values);
  CHECK(reply.sent().sent_layers() == 0);
  of.server.commit(1, reply.clock());
  CHECK(of.server.pending(1).empty());
}

TEST_CASE("repair: of replies from before a worker was forgotten nothing is committed any more") {
  updated_server of(1);
  of.lose_one(0);
  const auto reply = of.server.reply(0, of.values);
  const std::uint64_t clock = reply.clock();
  const lamina::delivery arrived(reply.sent(), chunk_elements);
  of.server.forget(0);
  CHECK(of.server.pending(0).empty());
  of.server.commit(0, clock);
  CHECK(throws<std::invalid_argument>([&] { of.server.commit(0, clock, arrived); }));
  const auto next = of.server.reply(0, of.values);
  CHECK(next.sent().sent_elements() == model().elements());
  of.server.commit(0, clock);
  CHECK(of.server.reply(0, of.values).sent().sent_elements() == model().elements());
  of.server.commit(0, next.clock());
  CHECK(of.server.reply(0, of.values).sent().sent_elements() == 0);
}

TEST_CASE("repair: the delivery of another reply is refused by name and changes nothing") {
  updated_server of(2, {.payload = lamina::payload_type::int8});
  lamina::selection all(model());
  all.send_all();
  const lamina::delivery right(all, 64);
  CHECK(throws<std::out_of_range>([&] { of.server.commit(2, 1, right); }));
  CHECK(throws<std::out_of_range>([&] { (void)of.server.pending(2); }));
  CHECK(throws<std::invalid_argument>([&] { of.server.commit(1, 1, right); }));  // there was no reply
  const std::uint64_t clock = of.server.reply(1, of.values).clock();
  const auto refused = [&](std::size_t worker, std::uint64_t at, const lamina::delivery& arrived) {
    return message_of<std::invalid_argument>([&] { of.server.commit(worker, at, arrived); });
  };
  lamina::selection some(model());
  some.send(0);
  CHECK(contains(refused(0, clock, right), "another clock"));
  CHECK(contains(refused(1, clock + 1, right), "another clock"));
  CHECK(contains(refused(1, clock, lamina::delivery(some, 64)), "the delivery is of another frame"));
  CHECK(contains(refused(1, clock, lamina::delivery(all, 32)), "a multiple of 64 elements, these have 32"));
  CHECK(of.server.reply(1, of.values).sent().sent_elements() == model().elements());  // nothing was committed
  of.server.commit(1, clock, right);
  CHECK(of.server.reply(1, of.values).sent().sent_elements() == 0);
}

TEST_CASE("repair: a reply that throws cannot be committed, and what is pending stays") {
  updated_server of(1);
  of.lose_one(0);
  of.update_all();
  const std::uint64_t clock = of.server.reply(0, of.values).clock();
  of.update_all();
  parameters too_short = of.values;
  too_short[0].pop_back();
  CHECK(throws<std::invalid_argument>([&] { (void)of.server.reply(0, too_short); }));
  const lamina::delivery nothing(lamina::selection(model()), chunk_elements);
  CHECK(throws<std::invalid_argument>([&] { of.server.commit(0, clock, nothing); }));
  CHECK(std::ranges::equal(of.server.pending(0), the_lost_one));
  CHECK(of.server.reply(0, of.values).sent().is_sent(0));
}
