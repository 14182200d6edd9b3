// SPDX-License-Identifier: MIT
#pragma once

#include <functional>
#include <map>

#include "lamina/bounded/bounded.hpp"
#include "lamina/codec.hpp"
#include "support.hpp"

/// What the tests of bounded transfers share: frames of random numbers, and one sender and one receiver over a network in simulated
/// time.
namespace lamina_test {

namespace bounded = lamina::bounded;
using bounded::instant;
using bounded::never;
using bounded::packet_fate;
using bounded::receiver_state;
using bounded::sender_state;
using bounded::stop_policy;
using lamina::errc;
using lamina::payload_type;
using namespace std::chrono_literals;

/// What a channel does to datagrams. With all at their defaults each arrives after 50 microseconds, in order.
struct channel_options {
  std::uint64_t seed = 1;
  double loss = 0;       ///< share of the datagrams, at random; all three lie in [0, 1]
  double duplicate = 0;  ///< arrive twice
  double damage = 0;     ///< arrive with one bit flipped
  instant delay = std::chrono::microseconds(50);
  instant jitter = {};  ///< so much more at most, drawn for each: they overtake each other
  /// Of the one link that all go through, before they are delayed; 0: none, and no queue.
  double link_bits = 0;              ///< a second
  std::size_t queue_bytes = 65'536;  ///< what does not fit is dropped at the tail
};

/// A network in simulated time: it loses, delays, reorders, duplicates and damages datagrams, the same ones with every seed on every
/// machine. Those of several senders may share it.
class lossy_channel {
 public:
  struct datagram {
    std::size_t from = 0;  ///< as it was given to send()
    std::vector<std::byte> bytes;
  };

  explicit lossy_channel(const channel_options& options = {}) : options_(options), random_(options.seed) {}

  /// Takes what the pieces are when they are joined.
  void send(std::size_t from, std::initializer_list<std::span<const std::byte>> pieces, instant now) {
    std::size_t bytes = 0;
    for (const auto piece : pieces) bytes += piece.size();
    // Drawn whatever becomes of it, so that a change of one share moves none of the others' draws.
    const bool is_lost = draw(options_.loss);
    const bool is_doubled = draw(options_.duplicate);
    const bool is_damaged = draw(options_.damage);
    const std::uint64_t bit = random_();
    const instant first = jitter();
    const instant second = jitter();
    if (is_lost) return;
    const std::optional<instant> leaves = through_link(bytes + lamina::bounded::packet_overhead_bytes, now);
    if (!leaves) return;
    std::vector<std::byte> joined;
    joined.reserve(bytes);
    for (const auto piece : pieces) joined.insert(joined.end(), piece.begin(), piece.end());
    if (is_damaged && bytes > 0) joined[bit / 8 % bytes] ^= std::byte{1} << (bit % 8);
    const instant arrives = *leaves + options_.delay;
    if (is_doubled) add({arrives + second, 0, {from, joined}});
    add({arrives + first, 0, {from, std::move(joined)}});
  }

  /// When the next datagram arrives; never if none is under way.
  [[nodiscard]] instant next() const noexcept { return under_way_.empty() ? never : under_way_.front().at; }
  /// The next one, if it has arrived by now.
  [[nodiscard]] std::optional<datagram> receive(instant now) {
    if (next() > now) return std::nullopt;
    std::ranges::pop_heap(under_way_, comes_later);
    datagram arrived = std::move(under_way_.back().what);
    under_way_.pop_back();
    return arrived;
  }
  /// What went through the link.
  [[nodiscard]] std::uint64_t wire_bytes() const noexcept { return wire_bytes_; }

 private:
  struct arrival {
    instant at;
    std::uint64_t number = 0;  // in the order of sending, where two arrive at once
    datagram what;
  };

  static bool comes_later(const arrival& a, const arrival& b) noexcept {
    return a.at != b.at ? a.at > b.at : a.number > b.number;
  }

  bool draw(double share) {
    // Of 53 bits, which a double holds.
    return static_cast<double>(random_() >> 11U) < share * 0x1p53;
  }
  instant jitter() {
    const std::uint64_t drawn = random_();
    return options_.jitter.count() == 0
               ? instant(0)
               : instant(static_cast<instant::rep>(drawn %
                                                   static_cast<std::uint64_t>(options_.jitter.count() + 1)));
  }

  // When a packet has left the link, if there was room for it in the queue.
  std::optional<instant> through_link(std::size_t wire_bytes, instant now) {
    if (options_.link_bits == 0) return now;
    const double bits = 8 * static_cast<double>(wire_bytes);
    const double waiting =
        std::chrono::duration<double>((std::max)(free_at_ - now, instant(0))).count() * options_.link_bits;
    if (waiting + bits > 8 * static_cast<double>(options_.queue_bytes)) return std::nullopt;
    free_at_ =
        (std::max)(free_at_, now) + instant(static_cast<instant::rep>(bits / options_.link_bits * 1e9));
    wire_bytes_ += wire_bytes;
    return free_at_;
  }

  void add(arrival each) {
    each.number = number_++;
    under_way_.push_back(std::move(each));
    std::ranges::push_heap(under_way_, comes_later);
  }

  channel_options options_;
  std::mt19937_64 random_;
  std::vector<arrival> under_way_;  // a heap
  std::uint64_t number_ = 0;
  instant free_at_{};
  std::uint64_t wire_bytes_ = 0;
};

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
inline lamina::selection all_without(const lamina::layout& model, const std::vector<std::size_t>& dropped) {
  lamina::selection some(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (std::ranges::find(dropped, l) == dropped.end()) some.send(l);
  }
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
/// A packet, whose check lies at 48, or a message, where it lies at 16, under a good check, whatever was changed in it.
inline std::vector<std::byte> sealed(std::vector<std::byte> changed, std::size_t check_at) {
  bounded::keyed_check check(test_secret);
  const std::span<const std::byte> all = changed;
  const std::uint64_t sum = check.of({all.first(check_at), all.subspan(check_at + 8)});
  std::memcpy(changed.data() + check_at, &sum, sizeof sum);
  return changed;
}

/// A control message of these fields under a good check.
template <class... Fields>
std::vector<std::byte> message(bounded::control_type type, std::uint32_t transfer, std::uint32_t round,
                               const Fields&... fields) {
  bounded::control_writer writer(test_secret, 0);
  (writer.put(fields), ...);
  return copy_of(writer.finish(type, transfer, round));
}
/// WANTED or STOP: a report, and for each fragment listed its bits.
using listed_bits = std::vector<std::pair<std::uint32_t, std::vector<std::byte>>>;
inline std::vector<std::byte> list_message(bounded::control_type type, std::uint32_t transfer,
                                           std::uint32_t round, const listed_bits& fragments,
                                           const bounded::transfer_report& report = {.open_transfers = 1}) {
  bounded::control_writer writer(test_secret, 0);
  bounded::write_report(writer, report);
  writer.put(static_cast<std::uint32_t>(fragments.size()));
  for (const auto& [fragment, bits] : fragments) {
    writer.put(fragment);
    writer.put(bits);
  }
  return copy_of(writer.finish(type, transfer, round));
}
/// What an end is given of a message, whose bytes must stay.
inline bounded::control_message as_read(std::span<const std::byte> all) {
  bounded::control_message read;
  std::memcpy(&read.header, all.data(), sizeof read.header);
  read.body = all.subspan(bounded::control_header_bytes);
  return read;
}

/// A frame of gradients, or of parameters, and what it points to.
template <class T>
class made_frame {
 public:
  made_frame(std::mt19937& random, const lamina::layout& model, const lamina::selection& chosen,
             payload_type type = payload_type::as_is, lamina::frame_kind kind = lamina::frame_kind::gradients,
             std::uint64_t step = 7)
      : sent(chosen), encoder_(model) {
    for (const std::size_t size : model.sizes()) values.push_back(random_integers<T>(random, size, 100));
    encoder_.encode(
        {.kind = kind, .step = step, .sender = 3, .payload = type, .checksum = lamina::frame_checksum::none},
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

/// A frame, the model that it is of, and its chunks.
struct cut_frame {
  struct options {
    std::uint32_t seed = 41;
    std::size_t chunk_elements = 8;
    std::uint32_t bound_ppm = 0;
    payload_type type = payload_type::as_is;
    lamina::frame_kind kind = lamina::frame_kind::gradients;
    std::vector<std::size_t> dropped = {};  ///< layers
  };

  cut_frame(const std::vector<std::size_t>& sizes, const options& given)
      : random_(given.seed),
        model(model_of(sizes)),
        grid(bounded::chunk_grid::of<float>(model, given.type, given.chunk_elements)),
        made(random_, model, all_without(model, given.dropped), given.type, given.kind),
        chunks(made.cut(grid, given.bound_ppm)) {}

 private:
  std::mt19937 random_;

 public:
  lamina::layout model;
  bounded::chunk_grid grid;
  made_frame<float> made;
  bounded::frame_chunks chunks;
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

/// Whether no fragment has lost more than its bound.
inline bool keeps_bound(const lamina::delivery& arrived, const bounded::chunk_grid& grid,
                        std::uint32_t bound_ppm) {
  return std::ranges::all_of(arrived.sent().sent(), [&](std::size_t fragment) {
    return std::uint64_t{arrived.lost_chunks(fragment)} * 1'000'000 <=
           std::uint64_t{bound_ppm} * grid.chunks(fragment);
  });
}

/// Whether these bytes are the sender's frame, with zeros where it is said that chunks were lost.
inline bool holds_what_arrived(std::span<const std::byte> taken, const lamina::delivery& arrived,
                               const lamina::encoded_frame& frame, const bounded::chunk_grid& grid) {
  std::vector<std::byte> expected = frame.to_bytes();
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
  return same_bits(expected, taken);
}
inline bool holds_what_arrived(const bounded::bounded_receiver& receiver, const lamina::encoded_frame& frame,
                               const bounded::chunk_grid& grid) {
  return holds_what_arrived(receiver.frame(), receiver.arrived(), frame, grid);
}

}  // namespace lamina_test
