// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

#include "lamina/bounded/rate.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::bounded {

/// Signs of life of one peer, and the round trip to it, of one control connection.
class heartbeat {
 public:
  /// \param timeout     without a byte of the peer, after which it counts as lost
  /// \param ping_every  from one PING to the next; the first come sooner
  explicit heartbeat(instant timeout, instant ping_every = std::chrono::seconds(1))
      : timeout_(timeout), ping_every_(ping_every) {
    newest_.fill(never);
  }

  /// Something has come from the peer, whatever it is. The first call begins.
  void heard(instant now) noexcept { lost_at_ = now + timeout_; }
  /// Whether one waited too long since; not before something was heard.
  [[nodiscard]] bool is_lost(instant now) const noexcept { return now >= lost_at_; }
  [[nodiscard]] instant lost_at() const noexcept { return lost_at_; }

  /// When the next PING is due, whose body is the time of it.
  [[nodiscard]] instant ping_at() const noexcept { return ping_at_; }
  void ping_sent(instant now) noexcept {
    ping_at_ = now + (pongs_ < newest_.size() ? (std::min)(ping_every_, first_pings_every) : ping_every_);
  }
  /// A PONG: `sent_at` is what the PING said. One that lies in the future, or longer ago than the timeout, is not
  /// counted.
  void pong(instant sent_at, instant now) noexcept {
    heard(now);
    if (sent_at > now || sent_at < now - timeout_)
      return;  // compared, since a difference of any two may not be a number
    newest_[pongs_++ % newest_.size()] = now - sent_at;
  }
  /// The least of the last eight; 0 before the first PONG. Not their mean: a PING that was lost, or whose peer still read its data,
  /// takes a hundred times as long and says nothing of the way.
  [[nodiscard]] instant round_trip() const noexcept {
    return pongs_ == 0 ? instant(0) : *std::ranges::min_element(newest_);
  }
  /// How long a receiver waits for packets that may still be under way before it answers a PROBE.
  [[nodiscard]] instant quiet() const noexcept {
    return std::max<instant>(std::chrono::milliseconds(3), 2 * round_trip());
  }

 private:
  static constexpr instant first_pings_every = std::chrono::milliseconds(50);

  instant timeout_;
  instant ping_every_;
  instant lost_at_ = never;
  instant ping_at_{};
  std::array<instant, 8> newest_{};
  std::size_t pongs_ = 0;
};

/// Messages after one that has nothing behind it. If that one is lost, TCP waits at least 200 ms before it sends it again; a few bytes
/// behind it show the loss in a round trip.
class ticker {
 public:
  /// A message has gone out: a TICK each 5 ms follows, for 100 ms.
  void begin(instant now) noexcept {
    next_ = now + interval;
    end_ = now + std::chrono::milliseconds(100);
  }
  /// The answer is there.
  void stop() noexcept { next_ = never; }
  /// Whether a TICK is due, which the caller then sends.
  [[nodiscard]] bool take(instant now) noexcept {
    if (now < next_) return false;
    next_ = now + interval <= end_ ? now + interval : never;
    return true;
  }
  [[nodiscard]] instant next() const noexcept { return next_; }

 private:
  static constexpr std::chrono::milliseconds interval{5};

  instant next_ = never;
  instant end_{};
};

}  // namespace lamina::inline LAMINA_ABI::bounded
