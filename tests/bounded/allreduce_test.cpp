// SPDX-License-Identifier: MIT
// An all-reduce that may lose a bounded share: each worker owns every fourth fragment, and the others send it what they have of these.
// What is lost on the way stays in the residual of its sender; the sums go to all, whole.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "bounded/ledger.hpp"
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"

namespace lamina_test::allreduce_test {

using bounded::chunk_grid;
using lamina::delivery;
using lamina::selection;

namespace {

constexpr std::size_t workers = 4;
constexpr std::size_t chunk_elements = 64;

/// What goes wrong on purpose.
enum class fault {
  none,
  commits_what_was_lost,     ///< commit() in place of commit(arrived)
  adds_what_did_not_arrive,  ///< an owner adds the whole shard, be it that some of it was lost
  of_another_shard,          ///< what one owner lacks is taken for what the next one lacks
};

struct variant {
  payload_type payload = payload_type::as_is;
  double drop_ratio = 0.6;
  double momentum = 0;
  stop_policy stop = stop_policy::eager;
  double loss = 0.3;
  std::optional<double> budget = std::nullopt;
  std::uint64_t at_least_every = 0;
  std::size_t fragment_elements = 0;
  std::uint32_t bound_ppm = 500'000;
  std::size_t outages_of_16 = 0;  ///< transfers that do not take place at all: the shards are lost whole
  bool sends_sums = false;        ///< over a network that loses packets, too, with a bound of 0
  fault wrong = fault::none;
};

lamina::layout model_for(const variant& of) {
  return model_of({700, 0, 5, of.fragment_elements == 0 ? 900U : 5000U, 64, 320});
}

lamina::worker_options options_for(const variant& of, std::uint32_t worker) {
  return {.drop_ratio = of.drop_ratio,
          .send_budget = of.budget,
          .at_least_every = of.at_least_every,
          .fragment_elements = of.fragment_elements,
          .momentum = of.momentum,
          .payload = of.payload,
          .sender = worker,
          .frame_checksum = lamina::frame_checksum::none};
}

/// One direction between two workers, for frames of the shard of one owner.
template <class T>
struct way {
  way(const lamina::layout& fragments, payload_type payload, const simulated_link::options& options)
      : grid(chunk_grid::of<T>(fragments, payload, chunk_elements)), link(grid, options), memory(grid) {}

  const delivery& send(const lamina::encoded_frame& frame, const selection& sent, std::uint32_t bound_ppm) {
    const bounded::frame_chunks chunks(frame, sent, grid, {.bound_ppm = bound_ppm});
    const auto required = memory.required(sent, 3);
    link.transfer(chunks, {.required = required});
    REQUIRE(link.sender.state() == sender_state::done);
    memory.note(link.sender.arrived());
    return link.sender.arrived();
  }

  chunk_grid grid;
  simulated_link link;
  bounded::loss_memory memory;
};

/// One of four workers, and what it was known to have delivered: by the owners' buffers, not by what it was told.
template <class T>
struct worker {
  worker(const variant& of, std::uint32_t number)
      : of_model(model_for(of), options_for(of, number)), account(of_model.fragments(), of.momentum) {
    for (const std::size_t size : of_model.fragments().sizes()) replica.emplace_back(size);
  }

  lamina::worker<T> of_model;
  std::optional<typename lamina::worker<T>::step> step;
  ledger<T> account;
  std::vector<std::vector<T>> replica;  // minus the sum of all means
};

/// Four workers, each the owner of a shard. T must hold the sums exactly: with momentum 0.5 each step wants one more bit.
template <class T>
class group {
 public:
  explicit group(const variant& of)
      : of_(of), random_(211), fragments_(lamina::worker<T>(model_for(of), options_for(of, 0)).fragments()) {
    for (std::uint32_t w = 0; w < workers; ++w) {
      workers_.push_back(std::make_unique<worker<T>>(of, w));
      owners_.emplace_back(fragments_, lamina::server_options{.workers = workers});
      for (std::uint32_t to = 0; to < workers; ++to) {
        const channel_options data{
            .seed = 1000 + 16 * w + to, .loss = of.loss, .duplicate = 0.1, .damage = 0.05, .jitter = 4ms};
        up_.push_back(std::make_unique<way<T>>(fragments_, of.payload,
                                               simulated_link::options{.data = data, .stop = of.stop}));
        down_.push_back(std::make_unique<way<T>>(fragments_, payload_type::as_is,
                                                 simulated_link::options{.data = data, .stop = of.stop}));
      }
    }
  }

  void step() {
    compute();
    agree();
    std::vector<delivery> arrived(workers, delivery(chosen(), chunk_elements));
    for (std::size_t w = 0; w < workers; ++w) {
      workers_[w]->step->frame();
      for (std::size_t owner = 0; owner < workers; ++owner) {
        REQUIRE_FALSE(owners_[owner].add(send(w, owner, arrived[w])));
      }
    }
    for (std::size_t w = 0; w < workers; ++w) {
      lost_elements += arrived[w].lost_elements();
      if (of_.wrong == fault::commits_what_was_lost) {
        workers_[w]->step->commit();
      } else {
        workers_[w]->step->commit(arrived[w]);
      }
    }
    for (std::size_t owner = 0; owner < workers; ++owner) hand_on(owner);
  }

  bool conserves() const {
    return std::ranges::all_of(
        workers_, [](const auto& each) { return each->account.conserves(each->of_model.residual()); });
  }
  bool are_alike() const {
    return std::ranges::all_of(workers_, [&](const auto& each) {
      for (std::size_t fragment = 0; fragment < fragments_.layers(); ++fragment) {
        if (!same_bits(each->replica[fragment], workers_[0]->replica[fragment])) return false;
      }
      return true;
    });
  }
  /// Invariant 2: what all replicas have moved by is the mean of what was delivered, so dense SGD less the residuals.
  bool has_moved_by_what_was_delivered() const {
    for (std::size_t fragment = 0; fragment < fragments_.layers(); ++fragment) {
      for (std::size_t i = 0; i < fragments_.sizes()[fragment]; ++i) {
        T sum = 0;
        for (const auto& each : workers_) sum += each->account.delivered(fragment)[i];
        if (workers_[0]->replica[fragment][i] != -sum / workers) return false;
      }
    }
    return true;
  }
  selection shard(std::size_t owner) const {
    selection owned(fragments_);
    for (const std::size_t f : chosen().sent()) {
      if (f % workers == owner) owned.send(f);
    }
    return owned;
  }
  const selection& chosen() const { return workers_[0]->step->sent(); }
  const std::vector<std::vector<T>>& replica(std::size_t w) const { return workers_[w]->replica; }

  std::size_t lost_elements = 0;
  std::size_t late() const {
    return std::accumulate(up_.begin(), up_.end(), std::size_t{0}, [](std::size_t sum, const auto& each) {
      return sum + each->link.receiver.counters().of(packet_fate::late);
    });
  }

 private:
  // Integers, in every worker.
  void compute() {
    for (auto& each : workers_) {
      std::vector<std::vector<T>> gradients;
      for (const std::size_t size : each->of_model.model().sizes())
        gradients.push_back(random_integers<T>(random_, size));
      each->step.emplace(each->of_model.add(gradients));
      each->account.compute(each->of_model.tiles(), gradients);
    }
  }

  void agree() {
    std::vector<double> mean(fragments_.layers());
    for (const auto& each : workers_) {
      for (std::size_t fragment = 0; fragment < mean.size(); ++fragment)
        mean[fragment] += each->step->values()[fragment] / workers;
    }
    for (auto& each : workers_) {
      std::ranges::copy(mean, each->step->values().begin());
      each->step->select();
      // Also with at_least_every, by whose ages all must choose alike.
      REQUIRE(std::ranges::equal(each->step->sent().bitmap(), chosen().bitmap()));
    }
  }

  // What one worker has for an owner, and what the owner then adds; as bytes.
  std::vector<std::byte> send(std::size_t from, std::size_t owner, delivery& arrived) {
    const selection sent = shard(owner);
    lamina::frame_encoder<T> encoder(fragments_);
    const auto& frame =
        encoder.encode({.step = workers_[from]->step->number(),
                        .sender = static_cast<std::uint32_t>(from),
                        .payload = of_.payload,
                        .checksum = lamina::frame_checksum::none},
                       sent, [&](std::size_t f) { return workers_[from]->of_model.residual()[f]; });
    std::vector<std::byte> bytes = frame.to_bytes();
    if (from != owner && below(random_, 16) < of_.outages_of_16) {
      lose_all(sent, arrived);
      bytes = empty_frame(from);
    } else if (from != owner) {
      way<T>& over = *up_[workers * from + owner];
      say_lost(owner, over.send(frame, sent, of_.bound_ppm), arrived);
      if (of_.wrong != fault::adds_what_did_not_arrive)
        bytes.assign(over.link.receiver.frame().begin(), over.link.receiver.frame().end());
    }
    take(from, bytes, arrived);
    return bytes;
  }

  // A transfer that did not take place.
  static void lose_all(const selection& sent, delivery& arrived) {
    for (const std::size_t fragment : sent.sent()) {
      for (std::size_t c = 0; c < arrived.chunks(fragment); ++c) arrived.lose(fragment, c);
    }
  }
  std::vector<std::byte> empty_frame(std::size_t from) const {
    lamina::frame_encoder<T> encoder(fragments_);
    return encoder
        .encode({.step = workers_[from]->step->number(), .sender = static_cast<std::uint32_t>(from)},
                selection(fragments_), [](std::size_t) { return std::span<const T>(); })
        .to_bytes();
  }

  void say_lost(std::size_t owner, const delivery& has_arrived, delivery& arrived) const {
    if (of_.wrong != fault::of_another_shard) {
      for (const std::size_t f : has_arrived.sent().sent()) {
        for (std::size_t c = 0; c < has_arrived.chunks(f); ++c) {
          if (has_arrived.is_lost(f, c)) arrived.lose(f, c);
        }
      }
      return;
    }
    const std::size_t other = (owner + 1) % workers;
    const selection others = shard(other);
    const auto lost = has_arrived.sent().sent();
    auto from = lost.begin();
    for (const std::size_t f : others.sent()) {
      if (from == lost.end()) return;
      for (std::size_t c = 0; c < std::min(arrived.chunks(f), has_arrived.chunks(*from)); ++c) {
        if (has_arrived.is_lost(*from, c)) arrived.lose(f, c);
      }
      ++from;
    }
  }

  // Of the bytes that the owner has. Velocities begin anew where something was delivered.
  void take(std::size_t from, const std::vector<std::byte>& bytes, const delivery& arrived) {
    const auto frame = lamina::decode<T>(bytes, fragments_);
    for (std::size_t f = 0; f < fragments_.layers(); ++f) {
      if (frame.is_dropped(f)) continue;
      std::vector<T> values(fragments_.sizes()[f]);
      frame.restore(f, values);
      workers_[from]->account.deliver(f, 0, values);
      arrived.for_each_delivered(
          f, [&](std::size_t begin, std::size_t end) { workers_[from]->account.rest(f, begin, end); });
    }
  }

  // The mean of a shard, to all, whole.
  void hand_on(std::size_t owner) {
    const selection sent = owners_[owner].arrived();
    const std::uint64_t step = owners_[owner].step();
    std::vector<std::vector<T>> means;
    for (const std::size_t size : fragments_.sizes()) means.emplace_back(size);
    owners_[owner].update([&](std::size_t fragment, std::size_t begin, std::span<const T> block) {
      std::ranges::copy(block, means[fragment].begin() + static_cast<std::ptrdiff_t>(begin));
    });
    lamina::frame_encoder<T> encoder(fragments_);
    const auto& frame = encoder.encode(
        {.step = step, .sender = static_cast<std::uint32_t>(owner), .checksum = lamina::frame_checksum::none},
        sent, [&](std::size_t fragment) { return std::span<const T>(means[fragment]); });
    for (std::size_t w = 0; w < workers; ++w) {
      std::vector<std::byte> bytes = frame.to_bytes();
      if (w != owner && of_.sends_sums) {
        way<T>& over = *down_[workers * owner + w];
        REQUIRE(over.send(frame, sent, 0).is_complete());
        bytes.assign(over.link.receiver.frame().begin(), over.link.receiver.frame().end());
      }
      const auto view = lamina::decode<T>(bytes, fragments_);
      for (const std::size_t fragment : sent.sent()) {
        view.for_each_block(fragment, [&](std::size_t begin, std::span<const T> block) {
          T* at = workers_[w]->replica[fragment].data() + begin;
          for (const T each : block) *at++ -= each;
        });
      }
    }
  }

  variant of_;
  std::mt19937 random_;
  lamina::layout fragments_;
  std::vector<std::unique_ptr<worker<T>>> workers_;
  std::vector<lamina::server<T>> owners_;
  std::vector<std::unique_ptr<way<T>>> up_, down_;  // from each to each
};

// Gives how many packets came when their transfer had ended.
template <class T>
std::size_t check_variant(const variant& of, int steps) {
  group<T> all(of);
  for (int step = 0; step < steps; ++step) {
    all.step();
    REQUIRE(all.conserves());
    REQUIRE(all.are_alike());
    REQUIRE(all.has_moved_by_what_was_delivered());
  }
  if (of.bound_ppm > 0 && (of.stop == stop_policy::eager || of.loss > 0)) CHECK(all.lost_elements > 0);
  return all.late();
}

}  // namespace

TEST_CASE(
    "allreduce: delivered and residual are the sum of the gradients and replicas equal, at every step of "
    "1,000") {
  CHECK(check_variant<float>({}, 1000) > 0);
}

TEST_CASE("allreduce: with every payload type, both stops, momentum, a budget, an age and fragments") {
  for (const payload_type payload : {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                     payload_type::int8, payload_type::int4}) {
    for (const stop_policy stop : {stop_policy::eager, stop_policy::on_probe}) {
      CAPTURE(static_cast<int>(payload), static_cast<int>(stop));
      check_variant<double>(
          {.payload = payload, .momentum = 0.5, .stop = stop, .loss = 0.1, .at_least_every = 5}, 12);
      check_variant<float>({.payload = payload, .stop = stop, .loss = 0.2, .budget = 0.4}, 6);
    }
  }
  check_variant<float>({.drop_ratio = 0, .loss = 0}, 30);
  check_variant<float>(
      {.payload = payload_type::int8, .at_least_every = 4, .fragment_elements = 4096, .sends_sums = true},
      30);
}

TEST_CASE("allreduce: slices that are lost whole stay in the residual whole") {
  for (const payload_type payload : {payload_type::as_is, payload_type::int8}) {
    check_variant<float>({.payload = payload, .outages_of_16 = 5}, 60);
    check_variant<float>({.payload = payload, .drop_ratio = 0, .outages_of_16 = 16}, 10);
  }
}

TEST_CASE("allreduce: with a bound of 0 the replicas are, bit for bit, those where no packet is lost") {
  for (const payload_type payload : {payload_type::as_is, payload_type::bfloat16}) {
    group<float> lossy({.payload = payload, .loss = 0.4, .bound_ppm = 0, .sends_sums = true});
    group<float> whole({.payload = payload, .stop = stop_policy::on_probe, .loss = 0, .bound_ppm = 0});
    for (int step = 0; step < 30; ++step) {
      lossy.step();
      whole.step();
      for (std::size_t fragment = 0; fragment < lossy.replica(0).size(); ++fragment)
        REQUIRE(same_bits(lossy.replica(3)[fragment], whole.replica(0)[fragment]));
    }
    CHECK(lossy.lost_elements == 0);
  }
}

TEST_CASE(
    "allreduce: what commits, adds or blames other slices than those that were lost does not conserve") {
  for (const fault wrong :
       {fault::commits_what_was_lost, fault::adds_what_did_not_arrive, fault::of_another_shard}) {
    CAPTURE(static_cast<int>(wrong));
    group<float> all({.wrong = wrong});
    bool has_conserved = true;
    for (int step = 0; step < 5; ++step) {
      all.step();
      has_conserved = has_conserved && all.conserves();
      CHECK(all.are_alike());  // all have the sums of what the owners added, be it wrong
    }
    CHECK_FALSE(has_conserved);
  }
}

}  // namespace lamina_test::allreduce_test
