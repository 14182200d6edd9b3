// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/arrivals.hpp"
#include "lamina/bounded/rate.hpp"

/// The receiving end of bounded transfers: datagrams, messages and the time go in, messages come out. It reads no clock, does not wait,
/// takes no lock, and allocates when a BEGIN comes, and for no datagram.
namespace lamina::inline LAMINA_ABI::bounded {

enum class receiver_state : std::uint8_t {
  waiting,  ///< for a BEGIN
  open,     ///< packets are taken
  frozen,   ///< the transfer has ended, and stands until release()
  failed,   ///< for good: the connection is to be closed
};

/// When a transfer that is within its bound ends.
enum class stop_policy : std::uint8_t {
  eager,     ///< at once: what is sent last is left out even where no packet is lost
  on_probe,  ///< when all has come, or when the sender has sent all that was asked for
};

struct receiver_options {
  std::uint16_t rank = 0;
  std::uint16_t sender = 0;
  std::uint64_t secret = 0;
  frame_kind kind = frame_kind::gradients;  ///< of the frames that come
  std::uint32_t most_bound_ppm = 0;         ///< a sender may ask for less loss, never for more
  stop_policy stop = stop_policy::eager;
};

/// Takes frames of one grid from one sender, one after the other.
///
/// on_control() and on_datagram() as they come, poll_control() after every event and at deadline(). When the state is frozen, frame()
/// and arrived() stand until release(), after which the next frame may come. An error that a call returns is for
/// good: poll_control() then gives an ABORT, after which the connection is to be closed.
class bounded_receiver {
 public:
  bounded_receiver(const chunk_grid& grid, const receiver_options& options)
      : grid_(grid),
        options_(options),
        arrivals_(grid, options.kind, options.most_bound_ppm),
        check_(options.secret),
        writer_(options.secret, control_limits(grid).of(control_type::stop) + most_abort_bytes) {}

  /// BEGIN, PROBE or ABORT of the sender, as read_control() accepts it.
  std::error_code on_control(const control_message& message, instant now) {
    if (failure_) return failure_;
    return ended_by(take(message, now));
  }

  packet_fate on_datagram(std::span<const std::byte> datagram, instant now) {
    const packet_fate fate = take(datagram, now);
    ++counters_.of_fate[static_cast<std::size_t>(fate)];
    return fate;
  }

  /// The caller has done with the frame, and asks for the next: what frame() and the others gave is gone. Nothing, unless one is frozen,
  /// or the last call threw std::bad_alloc: the next frame then still waits. The error is what ended the connection meanwhile.
  std::error_code release(instant now) {
    if (state_ == receiver_state::frozen) {
      state_ = failure_ ? receiver_state::failed : receiver_state::waiting;
      if (failure_) return failure_;
    }
    if (state_ != receiver_state::waiting || held_transfer_ == 0) return {};
    const std::error_code bad = open(held_transfer_, held_, now);
    held_transfer_ = 0;
    return ended_by(bad);
  }

  /// The connection is closed, or nothing was heard for too long. A frame that is frozen stands.
  void lose() {
    held_transfer_ = 0;
    if (state_ == receiver_state::frozen) return;
    ended_by(errc::lost);
    sends_abort_ = false;
  }

  /// The next message to send, valid until the next call that is not const; empty if there is none now. It looks at the time: a receiver
  /// to which nothing comes fails here.
  [[nodiscard]] std::span<const std::byte> poll_control(instant now) {
    if (state_ == receiver_state::open && answer_at() <= now && arrivals_.is_within_bound()) freeze(now);
    if (!stop_.empty()) return sent(now, std::exchange(stop_, {}));
    if (state_ == receiver_state::open && silent_since_ + longest_silence <= now)
      ended_by(errc::nothing_arrives);
    if (std::exchange(sends_abort_, false)) return write_abort(writer_, transfer_, failure_);
    if (state_ == receiver_state::open) {
      if (std::exchange(sends_ready_, false))
        return sent(now, writer_.write(control_type::ready, transfer_, 0, granted_bits_, open_transfers_));
      if (answer_at() <= now) return sent(now, write_wanted(std::exchange(has_probe_, false), now));
      if (unasked_at() <= now) {
        ++unasked_;
        return sent(now, write_wanted(false, now));
      }
      if (report_at() <= now) {
        write_report(now);
        return writer_.finish(control_type::report, transfer_, 0);
      }
    }
    if (!ticker_.take(now)) return {};
    return writer_.write(control_type::tick, 0, 0);
  }

  /// When to come back, if nothing happens before; never if there is nothing to do. Of a receiver that has just been polled
  /// until it had nothing.
  [[nodiscard]] instant deadline() const noexcept {
    if (state_ != receiver_state::open) return ticker_.next();
    return (std::min)({ticker_.next(), answer_at(), unasked_at(), report_at(),
                       (std::min)(never, silent_since_ + longest_silence)});
  }

  /// How long packets may be under way after the last that came: heartbeat::quiet().
  void set_quiet(instant quiet) noexcept { quiet_ = quiet; }
  /// What reports say besides what was seen: how many transfers are open here, and which rate the sender may take; 0: as it likes.
  void set_load(std::uint32_t open_transfers, std::uint64_t granted_bits) noexcept {
    open_transfers_ = open_transfers;
    granted_bits_ = granted_bits;
  }

  [[nodiscard]] receiver_state state() const noexcept { return state_; }
  [[nodiscard]] const std::error_code& failure() const noexcept { return failure_; }
  [[nodiscard]] std::uint32_t transfer() const noexcept { return transfer_; }
  /// Of a frame that is frozen: prefix and payload with zeros in the holes, for decode(); and what is in it.
  [[nodiscard]] std::span<const std::byte> frame() const noexcept { return arrivals_.frame(); }
  [[nodiscard]] const delivery& arrived() const noexcept { return arrivals_.arrived(); }
  /// Elements of layers that are not in the frame, a chunk each.
  [[nodiscard]] std::vector<repair> repairs() const { return arrivals_.repairs(); }
  [[nodiscard]] const receiver_counters& counters() const noexcept { return counters_; }

  /// After so long without any packet of a transfer whose sender has sent 64, the way is taken for blocked.
  static constexpr std::chrono::seconds longest_silence{10};

 private:
  // Of so many none: they all wait in a queue, or none will ever come.
  static constexpr instant quiet_of_silence = std::chrono::milliseconds(100);

  std::error_code ended_by(const std::error_code& error) {
    if (!error) return error;
    failure_ = error;
    if (state_ == receiver_state::frozen) {
      // Its sender may have committed: the frame stands, and STOP goes out, until release().
      held_transfer_ = 0;
      sends_abort_ = true;
      return error;
    }
    state_ = receiver_state::failed;
    sends_ready_ = has_probe_ = false;
    stop_ = {};
    sends_abort_ = true;
    ticker_.stop();
    return error;
  }

  std::error_code take(const control_message& message, instant now) {
    const control_header& header = message.header;
    switch (header.type) {
      case control_type::begin:
        if (header.transfer == 0 || header.transfer == transfer_ || held_transfer_ != 0) break;
        if (state_ == receiver_state::waiting) return open(header.transfer, message.body, now);
        if (state_ == receiver_state::frozen) {
          // The last frame was not taken yet: that READY waits is the back-pressure.
          held_.assign(message.body.begin(), message.body.end());
          held_transfer_ = header.transfer;
          ticker_.stop();
          return {};
        }
        break;
      case control_type::probe:
        if (header.transfer != transfer_ || transfer_ == 0) break;
        if (state_ == receiver_state::open) return on_probe(header.round, message.body, now);
        return {};  // STOP is on its way, or has come
      case control_type::tick:
        return {};
      case control_type::abort:
        if (state_ == receiver_state::open || held_transfer_ != 0) return errc::aborted;
        return {};
      default:
        break;
    }
    return errc::unexpected_message;
  }

  std::error_code open(std::uint32_t transfer, std::span<const std::byte> body, instant now) {
    std::error_code error;
    const begin_body begin = read_begin(body, grid_, error);
    if (!error) error = arrivals_.open(begin);
    if (error) return error;
    transfer_ = transfer;
    seen_ = seen_at_report_ = seen_at_wanted_ = round_began_at_ = 0;
    received_ = seen_in_round_ = next_round_ = unasked_ = 0;
    has_probe_ = false;
    last_packet_at_ = reported_at_ = now;
    silent_since_ = never;
    ticker_.stop();
    state_ = receiver_state::open;
    sends_ready_ = !arrivals_.is_complete();
    if (arrivals_.is_complete()) freeze(now);
    return {};
  }

  std::error_code on_probe(std::uint32_t round, std::span<const std::byte> body, instant now) {
    std::uint32_t transmissions = 0;
    if (const std::error_code error = read_body(body, transmissions)) return error;
    if (sends_ready_ || round != next_round_) return errc::unexpected_message;
    ++next_round_;
    if (has_probe_) begin_round(probed_);
    has_probe_ = true;
    probed_ = transmissions;
    probed_at_ = now;
    unasked_ = 0;
    ticker_.stop();
    if (seen_ == 0 && transmissions >= least_sent_into_silence && silent_since_ == never) silent_since_ = now;
    return {};
  }

  // What was sent before this transmission is of earlier rounds.
  void begin_round(std::uint32_t transmission) noexcept {
    round_began_at_ = transmission;
    seen_in_round_ = 0;
  }

  packet_fate take(std::span<const std::byte> datagram, instant now) {
    std::error_code bad;
    const packet_header header = read_packet_header(datagram, bad);
    if (bad) return packet_fate::malformed;
    if (header.receiver != options_.rank || header.sender != options_.sender) return packet_fate::foreign;
    if (header.transfer != transfer_ || state_ == receiver_state::waiting ||
        state_ == receiver_state::failed) {
      return packet_fate::stale;
    }
    if (state_ == receiver_state::frozen) return packet_fate::late;
    bad = check_sizes(header, datagram.size(), grid_);
    const bool is_repair = (header.flags & flag_repair) != 0;
    if (!bad && !arrivals_.expects(header.fragment, header.chunk, is_repair)) bad = errc::no_such_chunk;
    ++counters_.hashed;
    if (!has_good_check(datagram, check_)) return packet_fate::bad_check;
    if (bad) {
      ended_by(bad);
      return packet_fate::inconsistent;
    }
    count(header, now);
    const bool is_new = arrivals_.place(header.fragment, header.chunk, datagram.subspan(packet_header_bytes));
    if (arrivals_.is_complete() || (options_.stop == stop_policy::eager && arrivals_.is_within_bound()))
      freeze(now);
    return is_new ? packet_fate::placed : packet_fate::duplicate;
  }

  void count(const packet_header& header, instant now) noexcept {
    seen_ = (std::max)(seen_, header.transmission + 1);
    if (header.transmission >= round_began_at_) ++seen_in_round_;
    ++received_;
    delay_.add(header.sent_at, now);
    last_packet_at_ = now;
    silent_since_ = never;
    ticker_.stop();
  }

  // No packet of this transfer is written after it, and STOP is of the very bits by which the holes are zeroed.
  void freeze(instant now) {
    state_ = receiver_state::frozen;
    has_probe_ = false;
    arrivals_.freeze();
    write_report(now);
    arrivals_.write_received(writer_);
    stop_ = writer_.finish(control_type::stop, transfer_, next_round_);
  }

  std::span<const std::byte> write_wanted(bool is_answer, instant now) {
    write_report(now);
    arrivals_.write_wanted(writer_);
    seen_at_wanted_ = seen_;
    if (is_answer) begin_round(probed_);
    return writer_.finish(control_type::wanted, transfer_, is_answer ? next_round_ - 1 : unasked_round);
  }
  // What REPORT, WANTED and STOP begin with.
  void write_report(instant now) {
    writer_.clear();
    bounded::write_report(writer_, {.granted_bits = granted_bits_,
                                    .received = std::exchange(received_, 0),
                                    .transmissions = seen_ - std::exchange(seen_at_report_, seen_),
                                    .delay_us = delay_.take_median(),
                                    .seen = seen_,
                                    .open_transfers = open_transfers_});
    reported_at_ = now;
  }
  std::span<const std::byte> sent(instant now, std::span<const std::byte> message) noexcept {
    ticker_.begin(now);
    return message;
  }

  // When the PROBE is to be answered, by WANTED or STOP: when all of its round have been seen, or none came for `quiet`. It may overtake
  // what is under way, which an answer at once would ask for again, or give up.
  [[nodiscard]] instant answer_at() const noexcept {
    if (!has_probe_) return never;
    if (seen_in_round_ >= probed_ - round_began_at_) return probed_at_;
    const bool is_silent = silent_since_ != never;
    return (std::max)(last_packet_at_, probed_at_) +
           (is_silent ? (std::max)(quiet_, quiet_of_silence) : quiet_);
  }
  // PROBE travels with the flood and can be lost. The next time takes twice as long, or a slow sender would be answered packet by packet.
  [[nodiscard]] instant unasked_at() const noexcept {
    if (has_probe_ || seen_ == seen_at_wanted_ || arrivals_.is_within_bound()) return never;
    return last_packet_at_ + 2 * quiet_ * (1U << (std::min)(unasked_, 10U));
  }
  [[nodiscard]] instant report_at() const noexcept {
    return seen_ - seen_at_report_ < rate_control::least_transmissions
               ? never
               : reported_at_ + std::chrono::milliseconds(5);
  }

  chunk_grid grid_;
  receiver_options options_;
  arrivals arrivals_;
  keyed_check check_;
  control_writer writer_;
  ticker ticker_;
  queueing_delay delay_;
  receiver_counters counters_;

  receiver_state state_ = receiver_state::waiting;
  std::error_code failure_;
  bool sends_ready_ = false;
  bool sends_abort_ = false;
  std::span<const std::byte> stop_;  // in the writer: to be sent

  std::uint32_t transfer_ = 0;
  std::vector<std::byte> held_;      // a BEGIN that came before release()
  std::uint32_t held_transfer_ = 0;  // 0: none

  instant quiet_ = std::chrono::milliseconds(3);
  std::uint32_t open_transfers_ = 1;
  std::uint64_t granted_bits_ = 0;

  std::uint32_t seen_ = 0;  // the highest transmission, plus 1
  std::uint32_t seen_at_report_ = 0;
  std::uint32_t seen_at_wanted_ = 0;
  std::uint32_t received_ = 0;  // since the last report
  instant reported_at_{};
  instant last_packet_at_{};
  instant silent_since_ = never;

  std::uint32_t next_round_ = 0;  // of the next PROBE
  bool has_probe_ = false;        // which waits for its answer
  std::uint32_t probed_ = 0;      // the transmissions that it says
  instant probed_at_{};
  std::uint32_t round_began_at_ = 0;
  std::uint32_t seen_in_round_ = 0;
  std::uint32_t unasked_ = 0;  // since the last PROBE
};

}  // namespace lamina::inline LAMINA_ABI::bounded
