// SPDX-License-Identifier: MIT
#pragma once

/// One other rank: its connection, both ends of transfers, and what came from it. Read after meeting.hpp, before transport.hpp.

#include "lamina/bounded/bounded.hpp"
#include "lamina/udp/meeting.hpp"

namespace lamina::inline LAMINA_ABI::udp {

/// A frame of one rank. What it points to stands until the next arrival of this rank is asked for, or a frame is sent to it.
struct arrival {
  std::size_t rank = 0;
  std::span<const std::byte> bytes;      ///< zeros where elements are missing
  delivery arrived;                      ///< what is missing of it
  std::vector<bounded::repair> repairs;  ///< elements of layers that are not in the frame
};

namespace detail {

/// One other rank, as the thread of a transport sees it. It does not wait and takes no lock. Its two ends of transfers may be called at any
/// time: the next say() writes their messages, and notices when one has failed.
class peer {
 public:
  peer(const transport_options& all, const peer_options& own, descriptor connection,
       const rank_addresses& addresses, bounded::instant now)
      : sender(own.sends, {.rank = static_cast<std::uint16_t>(all.rank),
                           .receiver = static_cast<std::uint16_t>(own.rank),
                           .secret = all.secret,
                           .rate = all.rate}),
        receiver(own.takes, {.rank = static_cast<std::uint16_t>(all.rank),
                             .sender = static_cast<std::uint16_t>(own.rank),
                             .secret = all.secret,
                             .kind = own.kind,
                             .most_bound_ppm = own.most_bound_ppm,
                             .stop = all.stop}),
        all_(all),
        options_(own),
        paths_(addresses.data.begin(), addresses.data.begin() + addresses.paths),
        channel_(std::move(connection), all.secret, bounded::control_limits(own.takes, own.sends)),
        writer_(all.secret, sizeof(std::uint64_t)),
        beat_(own.timeout) {
    beat_.heard(now);
  }

  [[nodiscard]] std::string name() const { return all_.name(options_.rank); }
  [[nodiscard]] bounded::instant timeout() const noexcept { return options_.timeout; }
  [[nodiscard]] const std::vector<endpoint>& paths() const noexcept { return paths_; }
  [[nodiscard]] const control_channel& channel() const noexcept { return channel_; }

  /// Not if it said BYE, closed its connection, was not heard of, or is wrong.
  [[nodiscard]] bool is_here() const noexcept { return channel_.descriptor_number() >= 0; }
  /// Whether it broke the protocol.
  [[nodiscard]] bool is_wrong() const noexcept { return is_wrong_; }
  /// Why it is not here: "connection closed", or the whole sentence of one that is wrong.
  [[nodiscard]] const std::string& why() const noexcept { return why_; }

  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;

  // What its rank asks for.
  void begin_frame(const bounded::frame_chunks& frame, const bounded::obligations& owed) {
    sender.begin(frame, owed);
    is_framing_ = true;
  }
  /// The rank gives its frame up, and with it this peer; nothing where none is under way.
  void abandon_frame() {
    sender.abandon();
    after_events();
  }
  /// Whether a frame has gone of which take_sent() was not asked.
  [[nodiscard]] bool has_sent_frame() const noexcept {
    return is_framing_ && sender.state() == bounded::sender_state::done;
  }
  const delivery& take_sent() {
    is_framing_ = false;
    return sender.arrived();
  }
  [[nodiscard]] bool has_arrival() const noexcept {
    return receiver.state() == bounded::receiver_state::frozen && !is_frame_taken_;
  }
  arrival take_arrival() {
    is_frame_taken_ = true;
    return {options_.rank, receiver.frame(), receiver.arrived(), receiver.repairs()};
  }
  /// Of the frame that the rank took last nothing is read any more: the next may come.
  void release(bounded::instant now) {
    if (std::exchange(is_frame_taken_, false)) receiver.release(now);
  }
  void set_awaited(bool is_awaited) noexcept { is_awaited_ = is_awaited; }
  void say_bye() {
    if (is_here()) channel_.put(writer_.write(bounded::control_type::bye, 0, 0));
  }

  // What the thread does.
  void read_control(bounded::instant now) {
    while (is_here()) {
      using come = control_channel::arrival;
      const come what = channel_.read();
      if (channel_.has_heard()) beat_.heard(now);
      if (what == come::closed) return lose("connection closed");
      if (what == come::nothing) return;
      const std::error_code bad = what == come::refused ? channel_.failure() : take_message(now);
      if (bad) return fail(name() + " sent a bad control message: " + bad.message());
      after_events();
    }
  }
  /// Puts what is to be said now into the connection, and writes. What a sender says after its packets waits for `packets_have_gone`.
  void say(bounded::instant now, bool packets_have_gone) {
    if (!is_here()) return;
    put_all(receiver, now);
    if (packets_have_gone) put_all(sender, now);
    after_events();
    if (!is_here()) return;
    if (now >= beat_.ping_at()) {
      channel_.put(writer_.write(bounded::control_type::ping, 0, 0, std::int64_t{now.count()}));
      beat_.ping_sent(now);
    }
    if (!channel_.write()) lose("connection closed");
  }
  [[nodiscard]] bool is_streaming() const noexcept {
    return is_here() && sender.state() == bounded::sender_state::streaming;
  }
  /// Lost, if it is waited for and nothing was heard. `read_at` is a time after which all that had come was read.
  void judge(bounded::instant read_at) {
    if (!is_here() || !is_awaited_ || read_at < beat_.lost_at()) return;
    lose("nothing heard for " + std::to_string(options_.timeout.count()) + " ms");
  }
  /// When it has to say something again, or may be lost; packets apart.
  [[nodiscard]] bounded::instant deadline(bool packets_have_gone) const noexcept {
    if (!is_here()) return bounded::never;
    bounded::instant next = (std::min)(receiver.deadline(), beat_.ping_at());
    if (packets_have_gone && !is_streaming()) next = (std::min)(next, sender.deadline());
    return is_awaited_ ? (std::min)(next, beat_.lost_at()) : next;
  }

 private:
  std::error_code take_message(bounded::instant now) {
    using bounded::control_type;
    const bounded::control_message& come = channel_.message();
    std::error_code bad;
    std::int64_t sent_at = 0;
    switch (come.header.type) {
      case control_type::begin:
      case control_type::probe:
        receiver.on_control(come, now);  // what it refuses is its failure()
        break;
      case control_type::ready:
      case control_type::report:
      case control_type::wanted:
      case control_type::stop:
        sender.on_control(come);
        break;
      case control_type::ping:
        bad = bounded::read_body(come.body, sent_at);
        if (!bad) channel_.put(writer_.write(control_type::pong, 0, 0, sent_at));
        break;
      case control_type::pong:
        bad = bounded::read_body(come.body, sent_at);
        if (!bad) beat_.pong(bounded::instant(sent_at), now);
        receiver.set_quiet(beat_.quiet());
        break;
      case control_type::abort: {
        const std::string_view text = bounded::read_abort(come.body, bad);
        if (!bad) lose(name() + " has given up: " + std::string(text), true);
        break;
      }
      case control_type::bye:
        lose("gone before the end");
        break;
      case control_type::tick:
        break;
      default:
        bad = errc::unexpected_message;
    }
    return bad;
  }

  // All that an end of transfers has to say now.
  template <class End>
  void put_all(End& end, bounded::instant now) {
    for (auto said = end.poll_control(now); !said.empty(); said = end.poll_control(now)) channel_.put(said);
  }
  // What has failed ends all.
  void after_events() {
    if (!is_here()) return;
    if (receiver.failure()) {
      fail(failure_sentence(receiver.failure(), name(), all_.name(all_.rank)));
    } else if (sender.state() == bounded::sender_state::failed) {
      fail(failure_sentence(sender.failure(), all_.name(all_.rank), name()));
    }
  }
  [[nodiscard]] std::string failure_sentence(const std::error_code& why, const std::string& from,
                                             const std::string& to) const {
    if (why != errc::nothing_arrives) return "transfer from " + from + " to " + to + ": " + why.message();
    return "UDP from " + from + " to " + to +
           " does not arrive: is the port blocked, or the path's MTU below " + std::to_string(all_.mtu) + "?";
  }

  // The machines know of it already, or will in a moment; what came before stands.
  void lose(const std::string& why, bool is_wrong = false) {
    if (!is_here()) return;
    is_wrong_ = is_wrong;
    why_ = why;
    sender.lose();
    receiver.lose();
    channel_.close();
  }
  void fail(const std::string& sentence) {
    put_all(receiver, {});  // ABORT, with the reason
    put_all(sender, {});
    channel_.write();
    lose(sentence, true);
  }

  const transport_options& all_;
  peer_options options_;
  std::vector<endpoint> paths_;
  control_channel channel_;
  bounded::control_writer writer_;
  bounded::heartbeat beat_;
  bool is_wrong_ = false;
  std::string why_;
  bool is_awaited_ = false;
  bool is_framing_ = false;  // a frame goes, or has gone
  bool is_frame_taken_ = false;
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::udp
