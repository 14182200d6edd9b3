// SPDX-License-Identifier: MIT
// Any sequence of events between a sender and a receiver: packets lost, late, twice and in any order, messages that take their time.
// Bounds hold, both ends agree, and delivered plus residual is the sum of the gradients.
#include <deque>
#include <map>

#include "bounded/simulated_transfer.hpp"
#include "fuzz.hpp"
#include "lamina/worker.hpp"

namespace lamina_fuzz::of_transfer {
namespace {

using namespace lamina_test;

constexpr std::array all_types = {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                  payload_type::int8, payload_type::int4};

// A network of the fuzzer's: it chooses how long everything takes.
class fuzzed_network {
 public:
  fuzzed_network(input& in, const bounded::chunk_grid& grid, stop_policy stop, std::uint32_t bound_ppm)
      : sender(grid, {.rank = 2, .secret = test_secret, .rate = {.link_bits = 10'000'000'000}}),
        receiver(grid, {.sender = 2, .secret = test_secret, .most_bound_ppm = bound_ppm, .stop = stop}),
        in_(in),
        limits_(grid),
        key_(test_secret) {}

  // Until the sender has STOP; when the fuzzer has no more choices, everything arrives at once. False where it let nothing through for
  // so long that an end gave up.
  bool run() {
    for (int steps = 0; sender.is_under_way(); ++steps) {
      check(steps < 100'000, "a transfer ends");
      pump();
      instant at = std::min(sender.deadline(), receiver.deadline());
      if (!data_.empty()) at = std::min(at, data_.begin()->first);
      for (const auto* each : {&up_, &down_}) {
        if (!each->empty()) at = std::min(at, each->front().first);
      }
      check(at < bounded::never, "something is going to happen");
      now_ = std::max(now_, at);
      while (!data_.empty() && data_.begin()->first <= now_)
        receiver.on_datagram(data_.extract(data_.begin()).mapped(), now_);
      deliver(up_, true);
      deliver(down_, false);
    }
    const std::error_code why = sender.failure();
    check(!why || why == errc::no_progress || why == errc::aborted, "a transfer ends well");
    return !why;
  }
  // What is still under way comes after the freeze.
  void flush() {
    for (const auto& [at, datagram] : data_) receiver.on_datagram(datagram, now_);
    data_.clear();
  }
  void release() {
    receiver.release(now_);
    pump();
  }

  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;

 private:
  using way = std::deque<std::pair<instant, bytes>>;

  void pump() {
    send(sender, up_);
    while (const auto packet = sender.next_packet(now_)) {
      bytes joined(packet->header.begin(), packet->header.end());
      for (const auto piece : packet->data) joined.insert(joined.end(), piece.begin(), piece.end());
      const std::size_t fate = in_.below(16);  // 0, when there are no more choices
      if (fate >= 12) continue;
      if (fate == 11) data_.emplace(now_ + static_cast<int>(in_.below(256)) * 1ms, joined);
      if (fate == 10) joined[in_.below(joined.size() > 256 ? 256 : joined.size())] ^= std::byte{4};
      data_.emplace(now_ + 50us + (fate == 9 ? static_cast<int>(in_.below(256)) * 100us : 0us),
                    std::move(joined));
    }
    send(sender, up_);
    send(receiver, down_);
  }
  template <class End>
  void send(End& end, way& to) {
    for (auto all = end.poll_control(now_); !all.empty(); all = end.poll_control(now_)) {
      const instant soonest = to.empty() ? now_ : to.back().first;  // in order
      to.emplace_back(std::max<instant>(soonest, now_ + 50us + static_cast<int>(in_.below(8) / 7) * 20ms),
                      bytes(all.begin(), all.end()));
    }
  }
  void deliver(way& from, bool goes_up) {
    while (!from.empty() && from.front().first <= now_) {
      std::error_code error;
      const auto message = bounded::read_control(from.front().second, limits_, key_, error);
      check(!error, "what one end writes the other reads");
      error = goes_up ? receiver.on_control(message, now_) : sender.on_control(message);
      check(!error || !sender.is_under_way(), "no end refuses the other");
      from.pop_front();
    }
  }

  input& in_;
  bounded::control_limits limits_;
  bounded::keyed_check key_;
  instant now_ = 1s;
  std::multimap<instant, bytes> data_;
  way up_, down_;
};

}  // namespace

void fuzz_one(input in) {
  const lamina::layout model = lamina_fuzz::model_of(in);
  const payload_type type = in.one_of(all_types);
  const auto bound_ppm = static_cast<std::uint32_t>(in.below(6) * 100'000);
  const stop_policy stop = in.flag() ? stop_policy::eager : stop_policy::on_probe;
  std::mt19937 random = in.random();
  lamina::worker<float> worker(
      model,
      {.drop_ratio = in.flag() ? 0.5 : 0, .payload = type, .frame_checksum = lamina::frame_checksum::none});
  const auto grid = bounded::chunk_grid::of<float>(model, type, 64);
  bounded::loss_memory memory(grid);
  fuzzed_network network(in, grid, stop, bound_ppm);
  std::vector<std::vector<float>> computed, delivered;
  for (const std::size_t size : model.sizes()) {
    computed.emplace_back(size);
    delivered.emplace_back(size);
  }
  for (int step = 0; step < 4; ++step) {
    auto of_worker = worker.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto gradient = random_integers<float>(random, model.sizes()[l]);
      for (std::size_t i = 0; i < gradient.size(); ++i) computed[l][i] += gradient[i];
      check(of_worker.add(l, gradient), "integers are taken");
    }
    const auto& frame = of_worker.frame();
    const bounded::frame_chunks chunks(frame, of_worker.sent(), grid, {.bound_ppm = bound_ppm});
    const auto required = memory.required(of_worker.sent(), 2);
    network.release();
    network.sender.begin(chunks, {.required = required});
    if (!network.run()) return;
    network.flush();
    const lamina::delivery& arrived = network.sender.arrived();
    check(same_delivery(arrived, network.receiver.arrived()), "both ends agree");
    check(holds_what_arrived(network.receiver, frame, grid), "what arrived is what was sent");
    for (const std::size_t part : arrived.sent().sent()) {
      check(arrived.lost_chunks(part) <= bounded::allowed_losses(bound_ppm, grid.chunks(part)),
            "no part is beyond its bound");
    }
    for (const auto& each : required)
      check(!arrived.is_lost(each.fragment, each.index), "what is required arrives");
    const auto view = lamina::decode<float>(network.receiver.frame(), model);
    for (const std::size_t l : arrived.sent().sent()) {
      std::vector<float> values(model.sizes()[l]);
      view.restore(l, values);
      for (std::size_t i = 0; i < values.size(); ++i) delivered[l][i] += values[i];
    }
    memory.note(arrived);
    of_worker.commit(arrived);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto residual = worker.residual()[l];
      for (std::size_t i = 0; i < residual.size(); ++i) {
        check(delivered[l][i] + residual[i] == computed[l][i],
              "delivered and residual are the sum of the gradients");
      }
    }
  }
}

}  // namespace lamina_fuzz::of_transfer

LAMINA_FUZZ_TARGET(transfer)
