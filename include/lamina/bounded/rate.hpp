// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>

#include "lamina/bounded/control.hpp"

/// How fast a sender may send, and the times of a connection. Without control eight senders into one port send every chunk four times.
/// RFC 8085, section 3.1, asks for it.
namespace lamina::inline LAMINA_ABI::bounded {

/// Since any beginning that both uses of it share; of no clock in particular.
using instant = std::chrono::nanoseconds;
/// No time comes after it, and any time may be added to it.
inline constexpr instant never = (instant::max)() / 2;

/// The clock of packets: microseconds, wrapping.
[[nodiscard]] constexpr std::uint32_t wire_microseconds(instant now) noexcept {
  return static_cast<std::uint32_t>(now.count() / 1000);
}

/// What a rate begins with.
struct rate_options {
  std::uint64_t link_bits = 0;  ///< a second; 0: not known
  std::uint32_t senders = 1;    ///< ranks that send into the same link at the same time
  bool is_controlled = true;    ///< false: always r_max, whatever is lost, to see what control is good for
};

/// The rate of one sender to one receiver, kept from transfer to transfer. In bits a second of the wire: a packet counts with its headers.
///
/// r begins at the link's rate over the senders, or at 100 Mb/s; r_max is the link's rate, or 10 Gb/s, and r_min = max(1 Mb/s,
/// r_max/100), or 1 Mb/s. Of a report of at least 16 transmissions, L is the share lost and d the delay in queues. It tells of
/// congestion if L is beyond 25 % by more than chance, or if L > 1 % and d > 1 ms; then r ← max(r_min, 0.95·r·(1 - L)), a little less
/// than what got through. Otherwise r ← min(r_max, r + r_max/(50·n)) for n transfers open at the receiver: all together add 2 % of the
/// link a report. Where the link is not known r grows by a tenth until the first congestion, and from then on by 2 % of 1 Gb/s over n:
/// only what all add alike makes them equal. A link that loses at random, and has no queue, is not taken for a full one.
class rate_control {
 public:
  explicit rate_control(const rate_options& options = {})
      : is_controlled_(options.is_controlled),
        is_link_known_(options.link_bits > 0),
        most_(is_link_known_ ? (std::max)(static_cast<double>(options.link_bits), least_of_all) : 10e9),
        least_(is_link_known_ ? (std::max)(least_of_all, most_ / 100) : least_of_all),
        rate_(is_link_known_ ? (std::max)(most_ / (std::max)(options.senders, 1U), least_) : 100e6) {}

  /// What may be sent now: the rate, or the receiver's grant if that is less.
  [[nodiscard]] double bits() const noexcept {
    if (!is_controlled_) return most_;
    return granted_ > 0 ? (std::min)(rate_, granted_) : rate_;
  }

  /// A grant of 0 is none.
  void grant(std::uint64_t bits) noexcept { granted_ = static_cast<double>(bits); }

  /// Of the transfer that is open.
  void report(const transfer_report& report) noexcept {
    grant(report.granted_bits);
    if (report.transmissions < least_transmissions) return;
    const double all = report.transmissions;
    const double lost = (std::max)(all - report.received, 0.0);
    // Two standard deviations of what a loss of 25 % would give.
    const double beyond = lost - all / 4;
    const bool is_overload = beyond > 0 && beyond * beyond > 4 * all * 3 / 16;
    if (is_overload || (lost > all / 100 && report.delay_us > 1000)) {
      rate_ = (std::max)(least_, 0.95 * rate_ * (1 - lost / all));
      was_full_ = true;
      return;
    }
    const double transfers = (std::max)(report.open_transfers, 1U);
    const double step = (is_link_known_ ? most_ : usual_link) / (50 * transfers);
    rate_ = (std::min)(most_, rate_ + (is_link_known_ || was_full_ ? step : rate_ / 10));
  }

  /// Packets were sent, and none has come.
  void silence() noexcept { rate_ = least_; }

  static constexpr std::uint32_t least_transmissions = 16;

 private:
  static constexpr double least_of_all = 1e6;
  static constexpr double usual_link = 1e9;

  bool is_controlled_;
  bool is_link_known_;
  double most_;
  double least_;
  double rate_;
  double granted_ = 0;
  bool was_full_ = false;  // ever
};

/// A token bucket of max(8 packets, 1 ms of the rate), in bits. It never cuts a packet in two. A rank that sends to several receivers
/// has one for each, and one more of the link for all.
class pacer {
 public:
  /// \param packet_bits  of the largest packet, on the wire
  explicit pacer(std::size_t packet_bits) : packet_bits_(static_cast<double>(packet_bits)) {}

  /// When a packet may go out at this rate, which may be now. The rate is above 0.
  [[nodiscard]] instant when(instant now, double rate, std::size_t bits) noexcept {
    const double most = (std::max)(8 * packet_bits_, rate / 1000);
    const double seconds = std::chrono::duration<double>(now - refilled_at_).count();
    tokens_ = (std::min)(most, tokens_ + (std::max)(seconds, 0.0) * rate);
    refilled_at_ = now;
    const double missing = static_cast<double>(bits) - tokens_;
    if (missing <= 0) return now;
    return now + instant(static_cast<instant::rep>(missing / rate * 1e9) + 1);
  }
  void spend(std::size_t bits) noexcept { tokens_ -= static_cast<double>(bits); }

 private:
  double packet_bits_;
  double tokens_ = (std::numeric_limits<double>::max)();  // the first call cuts it to the bucket
  instant refilled_at_{};
};

/// How long packets wait in queues: arrival less `sent at`, less the least of that over the last 10 s. The clocks of the two ends need
/// not agree, and may wrap. Allocates nothing.
class queueing_delay {
 public:
  void add(std::uint32_t sent_at, instant now) noexcept {
    const std::uint32_t way = wire_microseconds(now) - sent_at;
    if (!reference_) reference_ = way;
    // Modulo 2^32: what differs is what counts.
    const auto relative = static_cast<std::int32_t>(way - *reference_);
    const auto second = std::chrono::duration_cast<std::chrono::seconds>(now).count();
    least_of_second& slot = slots_[static_cast<std::size_t>(second) % slots_.size()];
    if (slot.second != second) slot = {second, relative};
    slot.least = (std::min)(slot.least, relative);
    newest_ = second;
    samples_[added_++ % samples_.size()] = relative;
  }

  /// The median of those added since it was asked for last, of the newest 256 at most, in microseconds; 0 of none.
  [[nodiscard]] std::uint32_t take_median() noexcept {
    const std::size_t count = (std::min)(added_, samples_.size());
    added_ = 0;
    if (count == 0) return 0;
    const auto middle = samples_.begin() + static_cast<std::ptrdiff_t>(count / 2);
    std::nth_element(samples_.begin(), middle, samples_.begin() + static_cast<std::ptrdiff_t>(count));
    std::int32_t least = *middle;
    for (const least_of_second& each : slots_) {
      if (each.second > newest_ - static_cast<std::int64_t>(slots_.size()))
        least = (std::min)(least, each.least);
    }
    return static_cast<std::uint32_t>(*middle) - static_cast<std::uint32_t>(least);  // at most 2^32 - 1 apart
  }

 private:
  struct least_of_second {
    std::int64_t second = -1'000'000;
    std::int32_t least = 0;
  };

  std::array<least_of_second, 10> slots_;
  std::int64_t newest_ = 0;
  std::optional<std::uint32_t> reference_;
  std::array<std::int32_t, 256> samples_{};
  std::size_t added_ = 0;
};

/// Signs of life of one peer, and the round trip to it, of one control connection.
class heartbeat {
 public:
  /// \param timeout  without a byte of the peer, after which it counts as lost
  explicit heartbeat(instant timeout) : timeout_(timeout) { newest_.fill(never); }

  /// Something has come from the peer, whatever it is.
  void heard(instant now) noexcept { lost_at_ = now + timeout_; }
  /// When it counts as lost; never before something was heard.
  [[nodiscard]] instant lost_at() const noexcept { return lost_at_; }

  /// When the next PING is due, whose body is the time of it: after 1 s, and sooner at first and for a short timeout.
  [[nodiscard]] instant ping_at() const noexcept { return ping_at_; }
  void ping_sent(instant now) noexcept {
    const instant usual = std::chrono::milliseconds(pongs_ < newest_.size() ? 50 : 1000);
    ping_at_ = now + (std::min)(timeout_ / 4, usual);
  }
  /// A PONG: `sent_at` is what the PING said. One that lies in the future, or longer ago than the timeout, is not counted.
  void pong(instant sent_at, instant now) noexcept {
    heard(now);
    // Compared, since a difference of any two may not be a number.
    if (sent_at > now || sent_at < now - timeout_) return;
    newest_[pongs_++ % newest_.size()] = now - sent_at;
  }
  /// How long a receiver waits for packets that may still be under way before it answers a PROBE: two round trips, of which the least of
  /// the last eight counts. Not their mean: a PING that was lost, or whose peer still read its data, takes a hundred times as long and says
  /// nothing of the way.
  [[nodiscard]] instant quiet() const noexcept {
    const instant trip = pongs_ == 0 ? instant(0) : *std::ranges::min_element(newest_);
    return std::max<instant>(std::chrono::milliseconds(3), 2 * trip);
  }

 private:
  instant timeout_;
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
