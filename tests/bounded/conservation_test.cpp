// SPDX-License-Identifier: MIT
// What is lost stays in the residual: over a lossy network, everything delivered plus the residual is the sum of the gradients.
#include <algorithm>
#include <array>

#include "bounded/ledger.hpp"
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"
#include "lamina/worker.hpp"

namespace lamina_test::conservation_test {

using bounded::chunk_grid;
using bounded::frame_chunks;

namespace {

// One worker, its way to the server, and what the server has had of it.
template <class T>
class lossy_worker {
 public:
  lossy_worker(const lamina::layout& model, const lamina::worker_options& options,
               const simulated_link::options& way, unsigned max_losses)
      : worker(model, options),
        fragments_(worker.fragments()),
        grid_(chunk_grid::of<T>(fragments_, options.payload, 64)),
        link(grid_, way),
        account_(fragments_, options.momentum),
        memory_(grid_),
        max_losses_(max_losses) {
    for (std::size_t fragment = 0; fragment < fragments_.layers(); ++fragment)
      waiting_.emplace_back(grid_.chunks(fragment));
  }

  // One step, with integers as gradients.
  void step(std::mt19937& random, std::uint32_t bound_ppm) {
    std::vector<std::vector<T>> gradients;
    for (const std::size_t size : worker.model().sizes())
      gradients.push_back(random_integers<T>(random, size));
    auto of_worker = worker.add(gradients);
    account_.compute(worker.tiles(), gradients);
    const auto& frame = of_worker.frame();
    const frame_chunks chunks(frame, of_worker.sent(), grid_, {.bound_ppm = bound_ppm});
    const auto required = memory_.required(of_worker.sent(), max_losses_);
    link.transfer(chunks, {.required = required});
    REQUIRE(link.sender.state() == sender_state::done);
    receive(link.receiver.arrived());
    memory_.note(link.sender.arrived());
    of_worker.commit(link.sender.arrived());
  }

  bool conserves() const { return account_.conserves(worker.residual()); }

  lamina::worker<T> worker;

 private:
  lamina::layout fragments_;
  chunk_grid grid_;

 public:
  simulated_link link;
  unsigned longest_wait = 0;  // transfers of its fragment that a chunk was lost in, in a row

 private:
  void receive(const lamina::delivery& arrived) {
    const auto frame = lamina::decode<T>(link.receiver.frame(), fragments_);
    for (const std::size_t fragment : arrived.sent().sent()) {
      std::vector<T> values(fragments_.sizes()[fragment]);
      frame.restore(fragment, values);  // holes are zeros
      account_.deliver(fragment, 0, values);
      arrived.for_each_delivered(
          fragment, [&](std::size_t begin, std::size_t end) { account_.rest(fragment, begin, end); });
      for (std::size_t c = 0; c < waiting_[fragment].size(); ++c) {
        waiting_[fragment][c] = arrived.is_lost(fragment, c) ? waiting_[fragment][c] + 1 : 0;
        longest_wait = std::max(longest_wait, waiting_[fragment][c]);
      }
    }
  }

  ledger<T> account_;
  std::vector<std::vector<unsigned>> waiting_;
  bounded::loss_memory memory_;
  unsigned max_losses_;
};

struct variant {
  payload_type payload = payload_type::as_is;
  double momentum = 0;
  stop_policy stop = stop_policy::eager;
  double loss = 0.3;
  std::optional<double> budget = std::nullopt;
  std::uint64_t at_least_every = 0;
  std::size_t fragment_elements = 0;
};

// T must hold the sums exactly: with momentum 0.5 each step wants one more bit.
template <class T>
void check_variant(const variant& of, int steps) {
  std::mt19937 random(111);
  const lamina::layout model = model_of({700, 0, 5, of.fragment_elements == 0 ? 1300U : 5000U, 64, 640});
  std::vector<std::unique_ptr<lossy_worker<T>>> workers;
  for (std::uint32_t w = 0; w < 4; ++w) {
    workers.push_back(std::make_unique<lossy_worker<T>>(
        model,
        lamina::worker_options{.drop_ratio = 0.6,
                               .send_budget = of.budget,
                               .at_least_every = of.at_least_every,
                               .fragment_elements = of.fragment_elements,
                               .momentum = of.momentum,
                               .payload = of.payload,
                               .sender = w,
                               .frame_checksum = lamina::frame_checksum::none},
        simulated_link::options{
            .data = {.seed = 1000 + w, .loss = of.loss, .duplicate = 0.1, .damage = 0.05, .jitter = 4ms},
            .stop = of.stop},
        3));
  }
  std::size_t lost = 0;
  for (int step = 0; step < steps; ++step) {
    for (auto& each : workers) {
      each->step(random, std::array{0U, 100'000U, 300'000U}[step % 3]);
      lost += each->link.sender.arrived().lost_elements();
      REQUIRE(each->conserves());
      REQUIRE(each->longest_wait <= 3);
    }
  }
  if (of.stop == stop_policy::eager || of.loss > 0) CHECK(lost > 0);
  std::uint64_t late = 0;
  for (const auto& each : workers) late += each->link.receiver.counters().of(packet_fate::late);
  if (of.stop == stop_policy::eager) CHECK(late > 0);
}

}  // namespace

TEST_CASE("conservation: delivered and residual are the sum of the gradients, at every step of 1,000") {
  check_variant<float>({}, 1000);
}

TEST_CASE("conservation: with every payload type, both stops, momentum, a budget, an age and fragments") {
  for (const payload_type payload : {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                     payload_type::int8, payload_type::int4, payload_type::ternary}) {
    for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
      CAPTURE(static_cast<int>(payload), static_cast<int>(stop));
      check_variant<double>(
          {.payload = payload, .momentum = 0.5, .stop = stop, .loss = 0.1, .at_least_every = 5}, 60);
      check_variant<float>({.payload = payload, .stop = stop, .loss = 0.2, .budget = 0.4}, 40);
    }
  }
  check_variant<float>({.loss = 0}, 60);
  check_variant<float>({.payload = payload_type::int8, .at_least_every = 4, .fragment_elements = 4096}, 60);
}

TEST_CASE("conservation: a chunk that an adversary always drops arrives in the fourth send") {
  std::mt19937 random(112);
  const lamina::layout model = model_of({1000});
  for (const unsigned max_losses : {3U, 0U}) {
    lossy_worker<float> worker(model, {.drop_ratio = 0, .frame_checksum = lamina::frame_checksum::none},
                               {.stop = stop_policy::on_probe}, max_losses);
    std::vector<bool> arrived;
    worker.link.is_dropped = [&](const bounded::outgoing_packet& packet) {
      std::error_code error;
      const auto header = bounded::read_packet_header(packet.header, error);
      return header.chunk == 5 && (header.flags & bounded::flag_sent_before) == 0;
    };
    for (int step = 0; step < 8; ++step) {
      worker.step(random, 100'000);
      arrived.push_back(!worker.link.sender.arrived().is_lost(0, 5));
      CHECK(worker.conserves());
    }
    const std::vector<bool> every_fourth = {false, false, false, true, false, false, false, true};
    CHECK(arrived == (max_losses == 0 ? std::vector<bool>(8) : every_fourth));
  }
}

}  // namespace lamina_test::conservation_test
