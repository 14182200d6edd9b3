// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <lamina/bounded/bounded.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "messages/transfer_ends.hpp"
#include "messages/transport.hpp"
#include "messages/udp/address.hpp"
#include "messages/udp/control_channel.hpp"

namespace lab {

/// What this rank and one other agree to.
struct peer_options {
  std::size_t rank = 0;
  std::string name;
  std::string own_name;
  lamina::bounded::sender_options sends;
  lamina::bounded::receiver_options receives;
  std::size_t max_message_bytes = 0;
  lamina::bounded::instant
      timeout{};  ///< without a byte of it, after which it counts as lost if it is waited for
  lamina::bounded::instant ping_every{};
  std::size_t mtu = 0;  ///< for what is said of a path on which nothing arrives
};

/// One other rank, as this one's thread sees it: its connection, both ends of transfers, and what came from it and was not taken yet. It
/// does not wait and takes no lock.
class udp_peer {
 public:
  /// `incoming` and `outgoing` cut the frames; `paths` are where the other takes packets.
  udp_peer(const peer_options& options, const lamina::bounded::chunk_grid& incoming,
           const lamina::bounded::chunk_grid& outgoing, descriptor connection, std::vector<endpoint> paths,
           lamina::bounded::instant now);

  std::size_t rank() const { return options_.rank; }
  const std::string& name() const { return options_.name; }
  const std::vector<endpoint>& paths() const { return paths_; }
  control_channel& channel() { return channel_; }

  enum class presence : std::uint8_t {
    here,
    left,   ///< said BYE
    lost,   ///< its connection is closed, or nothing was heard of it
    wrong,  ///< broke the protocol
  };
  presence at() const { return at_; }
  bool is_here() const { return at_ == presence::here; }
  /// Why it is not: "connection closed", or the whole sentence of one that is wrong.
  const std::string& why() const { return why_; }

  // What its rank asks for.
  void send_message(message_kind kind, const payload& what);
  /// The frame stays as it is until is_sending() is false.
  void begin_frame(const outgoing_frame& what, const lamina::bounded::obligations& owed);
  /// The rank gives it up, and with it this peer; nothing where none is under way.
  void abandon_frame();
  bool is_sending() const { return channel_.unsent_messages() > 0 || sending_.machine().is_under_way(); }
  /// Whether a frame has gone of which take_sent() was not asked.
  bool has_sent_frame() const {
    return is_framing_ && sending_.machine().state() == lamina::bounded::sender_state::done;
  }
  sent_frame take_sent();
  bool has_letter() const { return !inbox_.empty(); }
  message take_letter();
  /// Of the frame that the rank took last nothing is read any more: the next may come.
  void release(lamina::bounded::instant now);
  void set_awaited(bool is_awaited) { is_awaited_ = is_awaited; }
  void say_bye();

  // What its thread does.
  void read_control(lamina::bounded::instant now);
  void on_datagram(std::span<const std::byte> bytes, lamina::bounded::instant now);
  /// Puts what is to be said now into the connection, and writes. What a sender says behind its packets waits for `packets_have_gone`.
  void say(lamina::bounded::instant now, bool packets_have_gone);
  std::optional<lamina::bounded::outgoing_packet> next_packet(lamina::bounded::instant now);
  bool is_streaming() const { return sending_.machine().state() == lamina::bounded::sender_state::streaming; }
  bool is_sending_frame() const { return sending_.machine().is_under_way(); }
  bool is_open() const { return receiving_.machine().state() == lamina::bounded::receiver_state::open; }
  void set_load(std::uint32_t open_transfers, std::uint64_t granted_bits) {
    receiving_.machine().set_load(open_transfers, granted_bits);
  }
  /// Lost, if it is waited for and nothing was heard. `read_at` is a time after which all that had come was read.
  void judge(lamina::bounded::instant read_at);
  /// When it has to say something again, or may be lost; packets apart.
  lamina::bounded::instant deadline(bool packets_have_gone) const;
  /// Of packets alone: of one that streams.
  lamina::bounded::instant packet_deadline() const { return sending_.machine().deadline(); }
  /// Whether what comes over the connection waits until the rank takes what is there.
  bool is_held() const { return is_held_; }
  const lamina::bounded::receiver_counters& received() const { return receiving_.machine().counters(); }
  /// What is kept of messages that came.
  std::size_t inbox_bytes() const { return inbox_bytes_; }

 private:
  // What only the other end knows of a transfer comes with the next BEGIN, behind the caller's report.
  struct told_cost {
    std::uint64_t packets = 0;
    std::uint64_t repeated = 0;
    std::uint64_t wire_bytes = 0;
    std::uint64_t rounds = 0;
    std::uint64_t transfers = 0;
    double rate_bits = 0;
    std::uint64_t duplicate = 0;  // of the frames of who is told
    std::uint64_t late = 0;
  };
  struct letter {
    message_kind kind = message_kind::sign_of_life;
    std::shared_ptr<std::vector<std::byte>> bytes;  // none: the frame that is frozen
  };

  void take_message(lamina::bounded::instant now);
  void after_events();
  void post_frame();
  void lose(presence why, const std::string& what);
  void fail(const std::string& sentence);
  void put(lamina::bounded::control_type type, lamina::bounded::instant sent_at);  // PING, BYE

  peer_options options_;
  std::vector<endpoint> paths_;
  control_channel channel_;
  sending_end sending_;
  receiving_end receiving_;
  lamina::bounded::control_writer writer_;
  lamina::bounded::heartbeat beat_;
  presence at_ = presence::here;
  std::string why_;
  bool is_awaited_ = false;
  bool is_held_ = false;
  std::uint64_t bytes_heard_ = 0;

  std::deque<letter> inbox_;
  std::size_t inbox_bytes_ = 0;
  bool is_framing_ = false;       // a frame goes, or has gone
  bool is_frame_posted_ = false;  // in the inbox, or with the rank
  bool is_frame_taken_ = false;
  transfer_cost arrived_cost_;  // of that frame
  std::size_t report_bytes_ = 0;
  told_cost told_;  // by the other, and not yet said to the rank
  told_cost to_tell_;
};

}  // namespace lab
