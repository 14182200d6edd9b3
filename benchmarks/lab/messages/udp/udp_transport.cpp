// SPDX-License-Identifier: MIT
#include "messages/udp/udp_transport.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "messages/udp/clock.hpp"

namespace lab {
namespace {

namespace bounded = lamina::bounded;

constexpr std::size_t nobody = static_cast<std::size_t>(-1);

peer_options options_for(const udp_transport_options& options, std::size_t rank) {
  const auto kind = options.takes_gradients ? options.frames.up : lamina::frame_kind::parameters;
  const frame_options& frames = options.frames;
  const auto mine = static_cast<std::uint16_t>(options.rank);
  const auto other = static_cast<std::uint16_t>(rank);
  return {.rank = rank,
          .name = options.name_of(rank),
          .own_name = options.name_of(options.rank),
          .sends = {.rank = mine,
                    .receiver = other,
                    .secret = options.secret,
                    .rate = {.link_bits = options.link_bits,
                             .senders = options.senders,
                             .is_controlled = options.controls_rate}},
          .receives = {.rank = mine,
                       .sender = other,
                       .secret = options.secret,
                       .takes = {.kind = kind,
                                 .most_bound_ppm = options.takes_gradients ? frames.most_bound_up_ppm
                                                                           : frames.most_bound_down_ppm},
                       .stop = frames.stop},
          .max_message_bytes = options.max_message_bytes,
          .timeout = options.timeout_of(rank),
          .ping_every = options.ping_every,
          .mtu = options.mtu};
}

// The frames that a rank takes, this one or another.
const bounded::chunk_grid& taken_by(const udp_transport_options& options, std::size_t rank) {
  const frame_options& frames = options.frames;
  if (!frames.slices.empty()) return frames.slices.at(rank);
  return options.takes_gradients == (rank == options.rank) ? frames.gradients : frames.parameters;
}

// On the wire.
std::size_t largest_packet_bits(const frame_options& frames) {
  const auto data_bytes = [](const bounded::chunk_grid& grid) {
    return grid.chunk_elements() * grid.element_bytes();
  };
  return 8 * (std::max(data_bytes(frames.gradients), data_bytes(frames.parameters)) +
              bounded::packet_header_bytes + bounded::packet_overhead_bytes);
}

}  // namespace

udp_transport::udp_transport(udp_transport_options options, std::vector<udp_socket> paths,
                             std::vector<met_rank> met)
    : options_(std::move(options)),
      paths_(std::move(paths)),
      place_of_(options_.ranks, nobody),
      sending_order_(options_.peers.size()),
      next_path_(options_.peers.size(), 0),
      largest_bits_(largest_packet_bits(options_.frames)),
      link_(largest_bits_) {
  const bounded::instant now = clock_now();
  for (std::size_t i = 0; i < options_.peers.size(); ++i) {
    const std::size_t rank = options_.peers[i];
    place_of_.at(rank) = i;
    for (const endpoint& each : met.at(i).paths) senders_.emplace_back(each, i);
    peers_.emplace_back(options_for(options_, rank), taken_by(options_, options_.rank),
                        taken_by(options_, rank), std::move(met[i].control), std::move(met[i].paths), now);
  }
  std::ranges::sort(senders_);
  std::iota(sending_order_.begin(), sending_order_.end(), std::size_t{0});
  prepare_thread();
  thread_ = std::thread([this] { run(); });
}

udp_transport::~udp_transport() {
  {
    const std::scoped_lock held(mutex_);
    end_ = std::uncaught_exceptions() > 0 ? end::at_once : end::saying_bye;
    end_at_ = clock_now();
    for (const std::size_t rank : options_.peers)
      end_at_ = std::max<bounded::instant>(end_at_, clock_now() + options_.timeout_of(rank));
    wake();
  }
  thread_.join();
  if (end_ != end::at_once) return;
  for (udp_peer& each : peers_) each.channel().leave_open();
}

udp_peer& udp_transport::peer(std::size_t rank) {
  if (rank >= place_of_.size() || place_of_[rank] == nobody)
    throw std::logic_error("rank " + std::to_string(options_.rank) + " does not talk to " +
                           std::to_string(rank));
  return peers_[place_of_[rank]];
}

template <class IsDone>
bool udp_transport::is_settled(std::span<const std::size_t> ranks, until when, IsDone is_done) {
  bool are_all = true;
  for (const std::size_t rank : ranks) {
    udp_peer& each = peer(rank);
    if (is_done(each)) continue;
    const bool ends_all = each.at() == udp_peer::presence::wrong || when == until::first_loss;
    if (!each.is_here() && ends_all) return true;
    are_all = are_all && !each.is_here();
  }
  return are_all;
}

// Sleeps until each of them is done or lost. Who is lost meanwhile is what this ends with.
template <class IsDone>
void udp_transport::wait(lock& held, std::span<const std::size_t> ranks, const std::string& doing, until when,
                         IsDone is_done) {
  const auto settled = [&] { return failure_ || is_settled(ranks, when, is_done); };
  if (!settled()) {
    for (const std::size_t rank : ranks) peer(rank).set_awaited(true);
    is_waited_for_ = settled;
    wake();
    settled_.wait(held, settled);
    is_waited_for_ = nullptr;
    for (const std::size_t rank : ranks) peer(rank).set_awaited(false);
  }
  if (failure_) std::rethrow_exception(failure_);
  throw_lost(ranks, doing, is_done);
}

template <class IsDone>
void udp_transport::throw_lost(std::span<const std::size_t> ranks, const std::string& doing, IsDone is_done) {
  std::vector<std::size_t> lost;
  std::string why;
  for (const std::size_t rank : ranks) {
    udp_peer& each = peer(rank);
    if (is_done(each) || each.is_here()) continue;
    if (each.at() == udp_peer::presence::wrong) throw link_error(each.why());
    lost.push_back(rank);
    why = each.why();
  }
  if (!lost.empty()) throw peers_lost(why + " while " + doing + " " + names_of(lost, options_.name_of), lost);
}

void udp_transport::post(lock& held, std::span<const std::size_t> to, message_kind kind,
                         const payload& what) {
  wait_sent(held, to);  // one behind the other
  for (const std::size_t rank : to) peer(rank).send_message(kind, what);
  wake();
}

void udp_transport::wait_sent(lock& held, std::span<const std::size_t> to) {
  wait(held, to, "sending to", until::all_settled, [](const udp_peer& each) { return !each.is_sending(); });
}

void udp_transport::send(std::span<const std::size_t> to, message_kind kind, const payload& what) {
  lock held(mutex_);
  post(held, to, kind, what);
  wait_sent(held, to);
}

void udp_transport::begin_send(std::size_t to, message_kind kind, const payload& what) {
  lock held(mutex_);
  post(held, {&to, 1}, kind, what);
}

std::vector<sent_frame> udp_transport::send_frame(std::span<const std::size_t> to, message_kind kind,
                                                  const outgoing_frame& what,
                                                  std::span<const bounded::obligations> of_each) {
  if (what.chunks == nullptr) return transport::send_frame(to, kind, what, of_each);
  lock held(mutex_);
  std::vector<sent_frame> sent(to.size());
  try {
    wait_sent(held, to);
  } catch (const peers_lost& loss) {
    // The others are to have it all the same: what is lost is said at the end.
    if (loss.ranks().size() == to.size()) throw;
  }
  const auto has_gone = [](const udp_peer& each) { return each.has_sent_frame(); };
  const auto collect = [&] {
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (has_gone(peer(to[i]))) sent[i] = peer(to[i]).take_sent();
    }
  };
  try {
    for (std::size_t i = 0; i < to.size(); ++i) {
      const bounded::obligations owed = of_each.empty() ? bounded::obligations() : of_each[i];
      if (!peer(to[i]).is_here()) continue;
      peer(to[i]).release(clock_now());
      peer(to[i]).begin_frame(what, owed);
      const auto place = std::ranges::find(sending_order_, place_of_[to[i]]);
      std::rotate(place, place + 1, sending_order_.end());
    }
    wake();
    wait(held, to, "sending to", until::all_settled, has_gone);
  } catch (const peers_lost& loss) {
    collect();
    throw frame_lost(loss, std::move(sent));
  } catch (...) {
    for (const std::size_t rank : to) peer(rank).abandon_frame();  // the frame may be gone from here on
    throw;
  }
  collect();
  return sent;
}

std::vector<message> udp_transport::receive_from_each(std::span<const std::size_t> from) {
  lock held(mutex_);
  for (const std::size_t rank : from) peer(rank).release(clock_now());
  wait(held, from, "waiting for", until::first_loss, [](const udp_peer& each) { return each.has_letter(); });
  std::vector<message> messages;
  for (std::size_t sender = 0; sender < from.size(); ++sender) messages.push_back(take(from, sender));
  wake();  // a connection may have been held
  return messages;
}

message udp_transport::receive_from_any(std::span<const std::size_t> from) {
  lock held(mutex_);
  const auto next = [&] {
    for (std::size_t k = 0; k < from.size(); ++k) {
      const std::size_t sender = (any_after_ + k) % from.size();
      if (peer(from[sender]).has_letter()) return sender;
    }
    return from.size();
  };
  for (const std::size_t rank : from) peer(rank).release(clock_now());
  wait(held, from, "waiting for", until::first_loss, [&](const udp_peer&) { return next() < from.size(); });
  const std::size_t sender = next();
  any_after_ = sender + 1;
  wake();
  return take(from, sender);
}

message udp_transport::exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) {
  lock held(mutex_);
  peer(from).release(clock_now());
  post(held, {&to, 1}, kind, what);
  wait_sent(held, {&to, 1});  // the other's message comes meanwhile
  wait(held, {&from, 1}, "exchanging with", until::first_loss,
       [](const udp_peer& each) { return each.has_letter(); });
  return take({&from, 1}, 0);
}

message udp_transport::take(std::span<const std::size_t> from, std::size_t sender) {
  message taken = peer(from[sender]).take_letter();
  taken.sender = sender;
  return taken;
}

std::vector<std::pair<std::string, std::uint64_t>> udp_transport::counters() {
  using bounded::packet_fate;
  const std::scoped_lock held(mutex_);
  udp_counters paths;
  for (const udp_socket& each : paths_) paths += each.counters();
  bounded::receiver_counters received;
  for (const udp_peer& each : peers_) {
    for (std::size_t fate = 0; fate < received.of_fate.size(); ++fate)
      received.of_fate[fate] += each.received().of_fate[fate];
  }
  return {{"sent", paths.sent},
          {"injected_loss", paths.injected},
          {"unsent", paths.unsent},
          {"overrun", paths.overrun},
          {"placed", received.of(packet_fate::placed)},
          {"duplicate", received.of(packet_fate::duplicate)},
          {"late", received.of(packet_fate::late)},
          {"stale", received.of(packet_fate::stale)},
          {"malformed", received.of(packet_fate::malformed)},
          {"foreign", foreign_ + received.of(packet_fate::foreign)},
          {"bad_check", received.of(packet_fate::bad_check)},
          {"inconsistent", received.of(packet_fate::inconsistent)}};
}

}  // namespace lab
