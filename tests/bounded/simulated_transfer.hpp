// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/bounded/bounded.hpp"
#include "lamina/codec.hpp"
#include "lossy_channel.hpp"
#include "support.hpp"

/// What the tests of bounded transfers share: frames of random numbers, and one sender and one receiver over a network in simulated
/// time.
namespace lamina_test {

namespace bounded = lamina::bounded;
using bounded::instant;
using bounded::packet_fate;
using bounded::receiver_state;
using bounded::sender_state;
using bounded::stop_policy;
using lamina::errc;
using lamina::payload_type;
using namespace std::chrono_literals;

constexpr std::uint64_t test_secret = 0x0123456789abcdef;

inline lamina::selection everything(const lamina::layout& model) {
  lamina::selection chosen(model);
  chosen.send_all();
  return chosen;
}
inline lamina::selection some_of(const lamina::layout& model, const std::vector<std::size_t>& layers) {
  lamina::selection some(model);
  for (const std::size_t l : layers) some.send(l);
  return some;
}

inline std::vector<std::byte> copy_of(std::span<const std::byte> all) {
  return {all.begin(), all.end()};
}
/// A packet as it arrives.
inline std::vector<std::byte> joined(const bounded::outgoing_packet& packet) {
  std::vector<std::byte> all(packet.header.begin(), packet.header.end());
  for (const auto piece : packet.data) all.insert(all.end(), piece.begin(), piece.end());
  return all;
}
/// The packet under a good check, whatever was changed in it.
inline std::vector<std::byte> sealed_packet(std::vector<std::byte> changed) {
  bounded::keyed_check check(test_secret);
  const std::span<const std::byte> all = changed;
  const std::uint64_t sum = check.of({all.first(48), all.subspan(56)});
  std::memcpy(changed.data() + 48, &sum, sizeof sum);
  return changed;
}

/// A frame of gradients, or of parameters, and what it points to.
template <class T>
class made_frame {
 public:
  made_frame(std::mt19937& random, const lamina::layout& model, const lamina::selection& chosen,
             payload_type type = payload_type::as_is, lamina::frame_kind kind = lamina::frame_kind::gradients)
      : sent(chosen), encoder_(model) {
    for (const std::size_t size : model.sizes()) values.push_back(random_integers<T>(random, size, 100));
    encoder_.encode(
        {.kind = kind, .step = 7, .sender = 3, .payload = type, .checksum = lamina::frame_checksum::none},
        chosen, [this](std::size_t l) { return std::span<const T>(values[l]); });
  }
  made_frame(const made_frame&) = delete;
  made_frame& operator=(const made_frame&) = delete;
  ~made_frame() = default;

  const lamina::encoded_frame& frame() const { return encoder_.frame(); }
  bounded::frame_chunks cut(const bounded::chunk_grid& grid, std::uint32_t bound_ppm = 0) const {
    return bounded::frame_chunks(frame(), sent, grid, {.bound_ppm = bound_ppm});
  }

  lamina::selection sent;
  std::vector<std::vector<T>> values;

 private:
  lamina::frame_encoder<T> encoder_;
};

/// One sender and one receiver, with a lossy way for data and one each way for messages that keeps order and loses nothing.
class simulated_link {
 public:
  struct options {
    channel_options data = {};
    lamina::frame_kind kind = lamina::frame_kind::gradients;
    std::uint32_t most_bound_ppm = bounded::most_bound_ppm;
    stop_policy stop = stop_policy::eager;
    bounded::rate_options rate = {.link_bits = 10'000'000'000, .senders = 1};
    std::uint32_t last_transfer = 0;
    instant begins_at = 0s;
    std::pair<lossy_channel*, std::size_t> shared =
        {};  ///< a way for the data of several, and whose these are
  };

  simulated_link(const bounded::chunk_grid& grid, const options& given)
      : sender(grid, {.rank = 2,
                      .receiver = 0,
                      .secret = test_secret,
                      .rate = given.rate,
                      .last_transfer = given.last_transfer}),
        receiver(grid, {.rank = 0,
                        .sender = 2,
                        .secret = test_secret,
                        .kind = given.kind,
                        .most_bound_ppm = given.most_bound_ppm,
                        .stop = given.stop}),
        data(given.data),
        now(given.begins_at),
        shared_(given.shared),
        limits_(grid),
        check_(test_secret) {}

  /// One transfer from its beginning until the sender has STOP, or an end fails. The receiver's last frame is released before.
  void transfer(const bounded::frame_chunks& chunks, const bounded::obligations& owed = {}) {
    receiver.release(now);
    sender.begin(chunks, owed);
    run([this] { return !sender.is_under_way(); });
  }

  /// Until `is_over`, or nothing is going to happen any more, or an end fails.
  template <class IsOver>
  void run(const IsOver& is_over) {
    pump();
    while (!is_over() && receiver.state() != receiver_state::failed && step()) {
    }
  }

  /// To the next moment at which something happens; false if there is none.
  bool step() {
    const instant at =
        std::min({data.next(), next(), delayed_.empty() ? bounded::never : delayed_.begin()->first});
    if (at >= bounded::never) return false;
    now = std::max(now, at);
    while (!delayed_.empty() && delayed_.begin()->first <= now) {
      take(delayed_.extract(delayed_.begin()).mapped());
    }
    while (auto datagram = data.receive(now)) take(datagram->bytes);
    deliver();
    return true;
  }
  /// When something happens, but for the data that are under way.
  instant next() const { return std::min({up.next(), down.next(), sender.deadline(), receiver.deadline()}); }
  /// A packet arrives, or the messages that have until now.
  void take(std::span<const std::byte> datagram) {
    receiver.on_datagram(datagram, now);
    pump();
  }
  void deliver() {
    while (auto message = up.receive(now)) receiver.on_control(read(message->bytes), now);
    while (auto message = down.receive(now)) {
      const auto of_receiver = read(message->bytes);
      reports += of_receiver.header.type == bounded::control_type::report ? 1 : 0;
      sender.on_control(of_receiver);
      pump();
    }
    pump();
  }

  /// What both ends have to send goes out.
  void pump() {
    send_all(sender, up);
    while (auto packet = sender.next_packet(now)) {
      if (is_dropped && is_dropped(*packet)) continue;
      if (delays) {
        for (const instant delay : delays(*packet)) delayed_.emplace(now + delay, joined(*packet));
        continue;
      }
      (shared_.first != nullptr ? *shared_.first : data)
          .send(shared_.second, {packet->header, packet->data[0], packet->data[1]}, now);
    }
    send_all(sender, up);  // the last packet of a round has a PROBE behind it
    send_all(receiver, down);
  }

  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;
  lossy_channel data;
  lossy_channel up;
  lossy_channel down;
  instant now;
  std::uint64_t reports = 0;
  /// An adversary: whether a packet is lost.
  std::function<bool(const bounded::outgoing_packet&)> is_dropped;
  /// In place of the channel for data: after how long a packet arrives, each time that it does.
  std::function<std::vector<instant>(const bounded::outgoing_packet&)> delays;

 private:
  bounded::control_message read(std::span<const std::byte> bytes) {
    std::error_code error;
    const auto message = bounded::read_control(bytes, limits_, check_, error);
    if (error) throw std::runtime_error("a message of our own is refused: " + error.message());
    return message;
  }
  template <class End>
  void send_all(End& from, lossy_channel& to) {
    for (auto all = from.poll_control(now); !all.empty(); all = from.poll_control(now))
      to.send(0, {all}, now);
  }

  std::pair<lossy_channel*, std::size_t> shared_;
  bounded::control_limits limits_;
  bounded::keyed_check check_;
  std::multimap<instant, std::vector<std::byte>> delayed_;
};

/// Whether both ends say the same of what has arrived.
inline bool same_delivery(const lamina::delivery& a, const lamina::delivery& b) {
  if (a.lost_chunks() != b.lost_chunks() || !same_bits(a.sent().bitmap(), b.sent().bitmap())) return false;
  for (const std::size_t fragment : a.sent().sent()) {
    for (std::size_t i = 0; i < a.chunks(fragment); ++i) {
      if (a.is_lost(fragment, i) != b.is_lost(fragment, i)) return false;
    }
  }
  return true;
}

/// Whether the receiver's frame is the sender's, with zeros where it says that chunks were lost.
inline bool holds_what_arrived(const bounded::bounded_receiver& receiver, const lamina::encoded_frame& frame,
                               const bounded::chunk_grid& grid) {
  std::vector<std::byte> expected = frame.to_bytes();
  const lamina::delivery& arrived = receiver.arrived();
  std::size_t begin = frame.segments().front().size();
  for (const std::size_t fragment : arrived.sent().sent()) {
    for (std::uint32_t i = 0; i < grid.chunks(fragment); ++i) {
      if (!arrived.is_lost(fragment, i)) continue;
      for (const auto piece : grid.pieces(fragment, i)) {
        for (std::size_t k = 0; k < piece.bytes; ++k) expected[begin + piece.begin + k] = std::byte{0};
      }
    }
    begin += grid.fragment_bytes(fragment);
  }
  return same_bits(expected, receiver.frame());
}

}  // namespace lamina_test
