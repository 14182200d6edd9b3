// SPDX-License-Identifier: MIT
#include "messages/lossy_way.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "messages/transport.hpp"

namespace resnet50_ps {
namespace {

namespace bounded = lamina::bounded;

// Nobody else is on this network.
constexpr std::uint64_t secret = 1;
constexpr std::uint64_t link_bits = 10'000'000'000;

bounded::channel_options channel_of(const lossy_options& options, const lossy_way::ends& ranks) {
  return {.seed = options.seed << 32U | std::uint64_t{ranks.from} << 16U | ranks.to, .loss = options.loss};
}

std::uint32_t most_bound(lamina::frame_kind kind, const lossy_options& options) {
  return kind == lamina::frame_kind::parameters ? options.most_bound_down_ppm : options.most_bound_up_ppm;
}

}  // namespace

lossy_way::lossy_way(const bounded::chunk_grid& grid, lamina::frame_kind kind, const lossy_options& options,
                     ends ranks)
    : ranks_(std::move(ranks)),
      sender_(grid, {.rank = ranks_.from,
                     .receiver = ranks_.to,
                     .secret = secret,
                     .rate = {.link_bits = link_bits, .senders = 1}}),
      receiver_(grid, {.rank = ranks_.to,
                       .sender = ranks_.from,
                       .secret = secret,
                       .takes = {.kind = kind, .most_bound_ppm = most_bound(kind, options)},
                       .stop = options.stop}),
      packets_(channel_of(options, ranks_)),
      limits_(grid),
      check_(secret) {}

sent_frame lossy_way::transfer(const bounded::frame_chunks& frame, const bounded::obligations& beside) {
  const transfer_cost before = cost_so_far();
  receiver_.release(now_);
  sender_.begin(frame, {}, beside);
  for (send(); sender_.is_under_way(); send()) {
    now_ = std::max(now_, std::min({packets_.next(), forth_.next(), back_.next(), sender_.deadline(),
                                    receiver_.deadline()}));
    take();
  }
  if (sender_.state() != bounded::sender_state::done) {
    const std::error_code why = receiver_.failure() ? receiver_.failure() : sender_.failure();
    throw link_error("a transfer to " + ranks_.name + " has failed: " + why.message());
  }
  const lamina::delivery& arrived = sender_.arrived();
  last_ = cost_so_far();
  last_.packets -= before.packets;
  last_.repeated -= before.repeated;
  last_.duplicate -= before.duplicate;
  last_.late -= before.late;
  last_.wire_bytes -= before.wire_bytes;
  last_.rounds = sender_.round() + std::uint64_t{1};
  last_.elements = arrived.sent().sent_elements();
  last_.lost_elements = arrived.lost_elements();
  return {arrived, last_};
}

arrived_frame lossy_way::arrived() const {
  arrived_frame all{receiver_.arrived(), {}, last_};
  receiver_.for_each_repair([&](std::size_t layer, std::size_t begin, std::span<const std::byte> elements) {
    all.repairs.push_back({layer, begin, {elements.begin(), elements.end()}});
  });
  return all;
}

// What both ends have to send goes out. Behind the last packet of a round there is a PROBE.
void lossy_way::send() {
  const auto say = [this](auto& end, bounded::lossy_channel& way) {
    for (auto said = end.poll_control(now_); !said.empty(); said = end.poll_control(now_))
      way.send(0, {said}, now_);
  };
  say(sender_, forth_);
  while (const auto packet = sender_.next_packet(now_))
    packets_.send(0, {packet->header, packet->data[0], packet->data[1]}, now_);
  say(sender_, forth_);
  say(receiver_, back_);
}

void lossy_way::take() {
  while (const auto packet = packets_.receive(now_)) receiver_.on_datagram(packet->bytes, now_);
  while (const auto message = forth_.receive(now_)) receiver_.on_control(read(message->bytes), now_);
  while (const auto message = back_.receive(now_)) sender_.on_control(read(message->bytes));
}

bounded::control_message lossy_way::read(std::span<const std::byte> bytes) {
  std::error_code error;
  const bounded::control_message message = bounded::read_control(bytes, limits_, check_, error);
  if (error) throw link_error("a control message to " + ranks_.name + " is bad: " + error.message());
  return message;
}

transfer_cost lossy_way::cost_so_far() const {
  transfer_cost cost;
  const bounded::sender_counters& sent = sender_.counters();
  const bounded::receiver_counters& received = receiver_.counters();
  cost.packets = sent.packets;
  cost.repeated = sent.repeated;
  cost.wire_bytes = sent.wire_bytes;
  cost.duplicate = received.of(bounded::packet_fate::duplicate);
  // Those that come when the next transfer has begun are stale to it.
  cost.late = received.of(bounded::packet_fate::late) + received.of(bounded::packet_fate::stale);
  return cost;
}

}  // namespace resnet50_ps
