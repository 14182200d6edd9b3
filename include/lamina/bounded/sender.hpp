// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/duties.hpp"
#include "lamina/bounded/rate.hpp"

/// The sending end of bounded transfers: events and the time go in, packets and control messages come out. It reads no clock, does not
/// wait, takes no lock, and allocates in begin() alone.
namespace lamina::inline LAMINA_ABI::bounded {

enum class sender_state : std::uint8_t {
  idle,       ///< nothing was sent yet
  begun,      ///< BEGIN is out, READY is waited for
  streaming,  ///< chunks go out
  probing,    ///< all went out, and PROBE too: WANTED or STOP is waited for
  done,       ///< STOP has come: arrived() says what to commit
  failed,     ///< nothing of the last transfer is to be committed. For good: the connection is to be closed.
};

struct sender_options {
  std::uint16_t rank = 0;
  std::uint16_t receiver = 0;
  std::uint64_t secret = 0;
  rate_options rate = {};
  std::uint32_t last_transfer = 0;  ///< other than 0 in tests alone: numbers wrap
};

struct sender_counters {
  std::uint64_t packets = 0;
  std::uint64_t repeated = 0;    ///< of these: sent before in the same transfer
  std::uint64_t wire_bytes = 0;  ///< of all of them, with all headers
  std::uint64_t ignored = 0;     ///< control messages of another transfer, and lists that came too late
};

/// Sends frames of one grid to one receiver, one after the other.
///
/// begin(), then poll_control() and next_packet() after every event and at deadline(), until the state is done or failed. An error that a
/// call returns has ended the transfer, unless that was done before: poll_control() then gives an ABORT, after which the connection is to
/// be closed.
class bounded_sender {
 public:
  bounded_sender(const chunk_grid& grid, const sender_options& options)
      : grid_(grid),
        options_(options),
        rate_(options.rate),
        pacer_(wire_bits(packet_header_bytes + grid.chunk_elements() * grid.element_bytes())),
        check_(options.secret),
        writer_(options.secret, most_abort_bytes),
        todo_(grid),
        required_(grid),
        transfer_(options.last_transfer) {}

  /// A frame is to be sent.
  ///
  /// \param frame  of this grid; it and the bytes it points to stay as they are until the transfer has ended
  /// \param owed   what the receiver must get; the elements of repairs stay as they are as well
  /// \throws std::logic_error       a transfer is under way, or has failed
  /// \throws std::invalid_argument  the frame is of another grid; what duties_of() throws
  void begin(const frame_chunks& frame, const obligations& owed = {}) {
    using lamina::detail::refuse;
    if (state_ != sender_state::idle && state_ != sender_state::done)
      refuse<std::logic_error>("a transfer is under way, or has failed");
    if (frame.grid() != grid_) refuse("the frame is cut by another grid");
    order_ = duties_of(frame, owed);
    arrived_.emplace(frame.sent(), grid_.chunk_elements());
    frame_ = &frame;
    if (++transfer_ == 0) transfer_ = 1;
    const auto prefix = frame.prefix();
    writer_.clear();
    writer_.put(frame.bound_ppm(), static_cast<std::uint32_t>(prefix.size()));
    writer_.put(prefix);
    required_.fill(std::byte{0});
    for (const duty& each : order_) {
      required_.add(each.which.fragment, each.which.index);
      writer_.put(each.which.fragment, each.which.index);
    }
    for (const chunk& each : frame.in_sending_order()) {
      if (!required_.has(each.fragment, each.index)) order_.push_back({each, nullptr});
    }
    pending_ = writer_.finish(control_type::begin, transfer_, 0);
    transmission_ = round_began_at_ = round_ = stuck_rounds_ = 0;
    last_wanted_ = static_cast<std::size_t>(-1);
    state_ = sender_state::begun;
  }
  /// The caller gives up the transfer that is under way.
  void abandon() {
    if (is_under_way()) fail(errc::aborted);
  }
  /// The connection is closed, or nothing was heard for too long: no ABORT.
  void lose() {
    if (!is_under_way()) return;
    fail(errc::lost);
    pending_ = {};
  }

  /// READY, REPORT, WANTED, STOP or ABORT of the receiver, as read_control() accepts it. The error is what ended the transfer.
  std::error_code on_control(const control_message& message) {
    const std::error_code bad = take(message);
    if (bad && is_under_way()) fail(bad);
    return bad;
  }

  /// The next message to send, valid until the next call that is not const; empty if there is none now.
  [[nodiscard]] std::span<const std::byte> poll_control(instant now) {
    if (!pending_.empty()) {
      ticker_.begin(now);
      return std::exchange(pending_, {});
    }
    if (!waits() || !ticker_.take(now)) return {};
    return writer_.write(control_type::tick, 0, 0);
  }

  /// The next packet, if one may go out now.
  [[nodiscard]] std::optional<outgoing_packet> next_packet(instant now) {
    if (state_ != sender_state::streaming) return std::nullopt;
    pass_to_next();
    const duty next = order_[next_];
    const std::size_t data_bytes = grid_.data_bytes(next.which.fragment, next.which.index);
    const std::size_t bits = wire_bits(packet_header_bytes + data_bytes);
    packet_at_ = pacer_.when(now, rate_.bits(), bits);
    if (packet_at_ > now) return std::nullopt;
    pacer_.spend(bits);

    const bool is_repeated = round_ != 0;
    const bool is_repair = next.source != nullptr;
    outgoing_packet packet;
    packet.tag = next.which.tag;
    packet.data[0] = {next.source, data_bytes};
    if (!is_repair) packet.data = frame_->bytes_of(next.which);
    const packet_header header{.flags = static_cast<std::uint8_t>((is_repair ? flag_repair : 0) |
                                                                  (is_repeated ? flag_sent_before : 0)),
                               .tag = next.which.tag,
                               .sender = options_.rank,
                               .receiver = options_.receiver,
                               .transfer = transfer_,
                               .fragment = next.which.fragment,
                               .chunk = next.which.index,
                               .chunks = grid_.chunks(next.which.fragment),
                               .transmission = transmission_++,
                               .offset = grid_.begin(next.which.index),
                               .data_bytes = static_cast<std::uint32_t>(data_bytes),
                               .sent_at = wire_microseconds(now)};
    packet.header = write_packet_header(header, packet.data, check_);

    ++counters_.packets;
    counters_.repeated += is_repeated ? 1 : 0;
    counters_.wire_bytes += bits / 8;
    ++next_;
    pass_to_next();
    if (next_ == order_.size()) {
      state_ = sender_state::probing;
      pending_ = writer_.write(control_type::probe, transfer_, round_, transmission_);
    }
    return packet;
  }

  /// When to come back, if nothing happens before; never if there is nothing to do, and long ago if there is a message to send, as
  /// there is behind the last packet of a round. Of a sender that has just been asked for messages and packets until it had none.
  [[nodiscard]] instant deadline() const noexcept {
    if (!pending_.empty()) return (instant::min)();  // for poll_control()
    if (state_ == sender_state::streaming) return packet_at_;
    return waits() ? ticker_.next() : never;
  }

  [[nodiscard]] sender_state state() const noexcept { return state_; }
  [[nodiscard]] bool is_under_way() const noexcept { return waits() || state_ == sender_state::streaming; }
  /// Why it has failed.
  [[nodiscard]] const std::error_code& failure() const noexcept { return failure_; }
  /// What the receiver has of the frame: what to commit. In the state done alone.
  [[nodiscard]] const delivery& arrived() const noexcept { return *arrived_; }
  [[nodiscard]] std::uint32_t transfer() const noexcept { return transfer_; }
  [[nodiscard]] std::uint32_t round() const noexcept { return round_; }
  [[nodiscard]] const rate_control& rate() const noexcept { return rate_; }
  [[nodiscard]] const sender_counters& counters() const noexcept { return counters_; }

  /// Rounds in a row that brought a receiver nothing new, after which the transfer fails: a circuit breaker (RFC 8084). A receiver that
  /// sees no packet at all ends it before: within 64 rounds it takes the way for silent, and after 10 s of that, at 100 ms a round, for
  /// blocked.
  static constexpr std::uint32_t most_stuck_rounds = 250;

 private:
  [[nodiscard]] static std::size_t wire_bits(std::size_t datagram_bytes) noexcept {
    return 8 * (datagram_bytes + packet_overhead_bytes);
  }
  [[nodiscard]] bool waits() const noexcept {
    return state_ == sender_state::begun || state_ == sender_state::probing;
  }
  [[nodiscard]] bool is_in_frame(std::uint32_t fragment) const { return frame_->sent().is_sent(fragment); }

  void fail(const std::error_code& why) {
    state_ = sender_state::failed;
    failure_ = why;
    pending_ = write_abort(writer_, transfer_, failure_);
  }

  std::error_code take(const control_message& message) {
    const control_type type = message.header.type;
    const bool is_own = message.header.transfer == transfer_ && state_ != sender_state::idle;
    const bool is_answer =
        type == control_type::report || type == control_type::wanted || type == control_type::stop;
    if (state_ == sender_state::failed || (is_answer && !is_own)) {
      ++counters_.ignored;
      return {};
    }
    const bool has_sent = state_ == sender_state::streaming || state_ == sender_state::probing;
    switch (type) {
      case control_type::ready:
        if (state_ == sender_state::begun && is_own) return on_ready(message.body);
        break;
      case control_type::report:
        if (is_under_way()) {
          transfer_report report;
          const std::error_code error = read_report(message.body, report);
          if (!error) rate_.report(report);
          return error;
        }
        break;
      case control_type::wanted:
        if (has_sent) return on_wanted(message);
        break;
      case control_type::stop:
        if (has_sent || (state_ == sender_state::begun && order_.empty())) return on_stop(message.body);
        break;
      case control_type::tick:
        return {};
      case control_type::abort:
        return is_under_way() ? std::error_code(errc::aborted) : std::error_code();
      default:
        break;
    }
    return errc::unexpected_message;
  }

  // A round of all chunks, or of none so far.
  void begin_round(std::byte bits) noexcept {
    todo_.fill(bits);
    next_ = 0;
    packet_at_ = {};
    state_ = sender_state::streaming;
  }
  // From this chunk on to the first that is to be sent in this round, or to the end.
  void pass_to_next() noexcept {
    while (next_ < order_.size() && !todo_.has(order_[next_].which.fragment, order_[next_].which.index))
      ++next_;
  }

  std::error_code on_ready(std::span<const std::byte> body) {
    std::uint64_t granted_bits = 0;
    std::uint32_t open_transfers = 0;
    if (const std::error_code error = read_body(body, granted_bits, open_transfers)) return error;
    if (order_.empty()) return errc::unexpected_message;
    rate_.grant(granted_bits);
    begin_round(std::byte{0xff});
    return {};
  }

  std::error_code on_wanted(const control_message& message) {
    std::error_code bad;
    transfer_report report;
    std::size_t wanted = 0;
    const auto count = [&](std::uint32_t fragment, std::span<const std::byte> bits) {
      const std::uint32_t chunks = count_bits(bits);
      wanted += chunks;
      if (chunks == 0) bad = errc::bad_list;
      if (!is_in_frame(fragment) && !detail::has_all(required_.bits(fragment), bits))
        bad = errc::no_such_chunk;
    };
    if (const std::error_code error = read_list(message.body, grid_, report, count)) return error;
    if (wanted == 0) bad = errc::bad_list;
    if (bad) return bad;
    rate_.report(report);

    const bool is_answer = message.header.round == round_;
    const bool is_new = message.header.round == unasked_round && report.seen > round_began_at_;
    // Nor while the PROBE of this round waits to go out: the receiver counts rounds by them.
    if (state_ != sender_state::probing || !pending_.empty() || !(is_answer || is_new)) {
      ++counters_.ignored;  // older than what is under way
      return {};
    }
    const bool is_silent = report.seen == 0;
    if (is_silent && transmission_ >= least_sent_into_silence) rate_.silence();
    stuck_rounds_ = wanted < last_wanted_ ? 0 : stuck_rounds_ + 1;
    if (stuck_rounds_ >= most_stuck_rounds) return is_silent ? errc::nothing_arrives : errc::no_progress;
    last_wanted_ = (std::min)(last_wanted_, wanted);  // an honest list never grows
    begin_round(std::byte{0});
    read_list(message.body, grid_, report, [&](std::uint32_t fragment, std::span<const std::byte> bits) {
      std::ranges::copy(bits, todo_.bits(fragment).begin());
    });
    round_began_at_ = transmission_;
    ++round_;
    return {};
  }

  // The receiver is not trusted with the residual: what it says to have must be within the bound.
  std::error_code on_stop(std::span<const std::byte> body) {
    std::error_code bad;
    transfer_report report;
    const auto judge = [&](std::uint32_t fragment, std::span<const std::byte> bits) {
      const std::uint32_t chunks = grid_.chunks(fragment);
      const std::uint32_t missing = chunks - count_bits(bits);
      if (!is_in_frame(fragment)) {
        bad = errc::no_such_chunk;
      } else if (missing == 0) {
        bad = errc::bad_list;
      } else if (missing > allowed_losses(frame_->bound_ppm(), chunks)) {
        bad = errc::beyond_bound;
      } else if (!detail::has_all(bits, required_.bits(fragment))) {
        bad = errc::required_missing;
      }
    };
    if (const std::error_code error = read_list(body, grid_, report, judge)) return error;
    if (bad) return bad;
    rate_.report(report);
    read_list(body, grid_, report, [&](std::uint32_t fragment, std::span<const std::byte> bits) {
      for (std::uint32_t i = 0; i < grid_.chunks(fragment); ++i)
        if (!detail::has_bit(bits, i)) arrived_->lose(fragment, i);
    });
    pending_ = {};
    state_ = sender_state::done;
    return {};
  }

  chunk_grid grid_;
  sender_options options_;
  rate_control rate_;
  pacer pacer_;
  keyed_check check_;
  control_writer writer_;
  ticker ticker_;
  sender_counters counters_;

  sender_state state_ = sender_state::idle;
  std::error_code failure_;
  std::span<const std::byte> pending_;  // in the writer: the next message to send

  const frame_chunks* frame_ = nullptr;
  std::vector<duty> order_;  // what must arrive, as it lies in the layout, and then the frame's order
  std::size_t next_ = 0;     // in the order
  detail::chunk_set todo_;   // in this round
  detail::chunk_set required_;
  std::optional<delivery> arrived_;
  instant packet_at_{};
  std::uint32_t transfer_;
  std::uint32_t transmission_ = 0;    // the next one's
  std::uint32_t round_began_at_ = 0;  // its first transmission
  std::uint32_t round_ = 0;
  std::uint32_t stuck_rounds_ = 0;
  std::size_t last_wanted_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::bounded
