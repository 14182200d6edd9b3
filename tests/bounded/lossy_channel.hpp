// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "lamina/bounded/packet.hpp"
#include "lamina/bounded/rate.hpp"

namespace lamina_test {

using lamina::bounded::instant;
using lamina::bounded::never;

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
  struct channel_counters {
    std::uint64_t wire_bytes = 0;  ///< that went through the link
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
  [[nodiscard]] const channel_counters& counters() const noexcept { return counters_; }

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
    counters_.wire_bytes += wire_bytes;
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
  channel_counters counters_;
};

}  // namespace lamina_test
