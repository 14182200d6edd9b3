// SPDX-License-Identifier: MIT
#include "messages/lossy_way.hpp"

#include <algorithm>
#include <system_error>
#include <utility>

#include "messages/transport.hpp"

namespace lab {
namespace {

namespace bounded = lamina::bounded;

// Nobody else is on this network.
constexpr std::uint64_t lossy_secret = 1;
constexpr std::uint64_t link_bits = 10'000'000'000;

lamina_test::channel_options channel_of(const lossy_options& options, const lossy_way::ends& ranks) {
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
                     .secret = lossy_secret,
                     .rate = {.link_bits = link_bits, .senders = 1}}),
      receiver_(grid, {.rank = ranks_.to,
                       .sender = ranks_.from,
                       .secret = lossy_secret,
                       .takes = {.kind = kind, .most_bound_ppm = most_bound(kind, options)},
                       .stop = options.stop}),
      packets_(channel_of(options, ranks_)),
      limits_(grid),
      check_(lossy_secret) {}

sent_frame lossy_way::transfer(const bounded::frame_chunks& frame, const bounded::obligations& beside) {
  bounded::bounded_sender& sender = sender_.machine();
  bounded::bounded_receiver& receiver = receiver_.machine();
  receiver.release(now_);
  sender_.begin(frame, {}, beside);
  for (send(); sender.is_under_way(); send()) {
    now_ = std::max(now_, std::min({packets_.next(), forth_.next(), back_.next(), sender.deadline(),
                                    receiver.deadline()}));
    take();
  }
  if (sender.state() != bounded::sender_state::done) {
    const std::error_code why = receiver.failure() ? receiver.failure() : sender.failure();
    throw link_error("a transfer to " + ranks_.name + " has failed: " + why.message());
  }
  const sent_frame sent = sender_.result();
  const transfer_cost at_receiver = receiver_.take_cost();
  last_ = sent.cost;
  last_.duplicate = at_receiver.duplicate;
  last_.late = at_receiver.late;
  return {sent.arrived, last_};
}

// What both ends have to send goes out. Behind the last packet of a round there is a PROBE.
void lossy_way::send() {
  bounded::bounded_sender& sender = sender_.machine();
  const auto into = [this](lamina_test::lossy_channel& way) {
    return [this, &way](std::span<const std::byte> said) { way.send(0, {said}, now_); };
  };
  say_all(sender, now_, into(forth_));
  while (const auto packet = sender.next_packet(now_))
    packets_.send(0, {packet->header, packet->data[0], packet->data[1]}, now_);
  say_all(sender, now_, into(forth_));
  say_all(receiver_.machine(), now_, into(back_));
}

void lossy_way::take() {
  while (const auto packet = packets_.receive(now_)) receiver_.machine().on_datagram(packet->bytes, now_);
  while (const auto message = forth_.receive(now_))
    receiver_.machine().on_control(read(message->bytes), now_);
  while (const auto message = back_.receive(now_)) sender_.machine().on_control(read(message->bytes));
}

bounded::control_message lossy_way::read(std::span<const std::byte> bytes) {
  std::error_code error;
  const bounded::control_message message = bounded::read_control(bytes, limits_, check_, error);
  if (error) throw link_error("a control message to " + ranks_.name + " is bad: " + error.message());
  return message;
}

}  // namespace lab
