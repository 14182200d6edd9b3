// SPDX-License-Identifier: MIT
#include "messages/udp/udp_peer.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>
#include <type_traits>
#include <utility>

namespace lab {
namespace {

namespace bounded = lamina::bounded;
using bounded::control_type;
using bounded::instant;

channel_limits limits_of(const bounded::chunk_grid& incoming, const bounded::chunk_grid& outgoing,
                         std::size_t max_message_bytes) {
  const std::size_t most = std::min<std::size_t>(max_message_bytes + sizeof(message_kind),
                                                 std::numeric_limits<std::uint32_t>::max());
  return {bounded::control_limits(incoming, most), bounded::control_limits(outgoing, most)};
}

}  // namespace

udp_peer::udp_peer(const peer_options& options, const bounded::chunk_grid& incoming,
                   const bounded::chunk_grid& outgoing, descriptor connection, std::vector<endpoint> paths,
                   instant now)
    : options_(options),
      paths_(std::move(paths)),
      channel_(std::move(connection), options.sends.secret,
               limits_of(incoming, outgoing, options.max_message_bytes)),
      sending_(outgoing, options.sends),
      receiving_(incoming, options.receives),
      writer_(options.sends.secret, sizeof(std::uint64_t)),
      beat_(options.timeout, options.ping_every) {
  beat_.heard(now);
}

void udp_peer::send_message(message_kind kind, const payload& what) {
  channel_.put_message(kind, what);
}

void udp_peer::begin_frame(const outgoing_frame& what, const bounded::obligations& owed) {
  static_assert(std::is_trivially_copyable_v<told_cost>);
  std::vector<std::byte> report;
  for (const auto segment : what.behind.segments())
    report.insert(report.end(), segment.begin(), segment.end());
  const auto told = std::as_bytes(std::span(&to_tell_, 1));
  report.insert(report.end(), told.begin(), told.end());
  sending_.begin(*what.chunks, report, owed);
  is_framing_ = true;
  to_tell_ = {};
}

void udp_peer::abandon_frame() {
  sending_.machine().abandon();
  after_events();
}

sent_frame udp_peer::take_sent() {
  is_framing_ = false;
  sent_frame sent = sending_.result();
  to_tell_.packets = sent.cost.packets;
  to_tell_.repeated = sent.cost.repeated;
  to_tell_.wire_bytes = sent.cost.wire_bytes;
  to_tell_.rounds = sent.cost.rounds;
  to_tell_.transfers = sent.cost.transfers;
  to_tell_.rate_bits = sent.cost.rate_bits;
  sent.cost.duplicate = std::exchange(told_.duplicate, 0);
  sent.cost.late = std::exchange(told_.late, 0);
  return sent;
}

message udp_peer::take_letter() {
  const letter taken = std::move(inbox_.front());
  inbox_.pop_front();
  is_held_ = false;
  if (taken.bytes) {
    inbox_bytes_ -= taken.bytes->size();
    return {.kind = taken.kind,
            .bytes = std::span(*taken.bytes).subspan(control_channel::message_begin),
            .owner = taken.bytes};
  }
  is_frame_taken_ = true;
  const bounded::bounded_receiver& receiver = receiving_.machine();
  return {.kind = taken.kind,
          .bytes = receiver.frame(),
          .owner = nullptr,
          .transfer = std::make_shared<const arrived_frame>(receiving_.result(arrived_cost_)),
          .behind = receiver.report().first(report_bytes_)};
}

void udp_peer::release(instant now) {
  if (!is_frame_taken_) return;
  is_frame_taken_ = is_frame_posted_ = false;
  receiving_.machine().release(now);
  after_events();
}

void udp_peer::put(control_type type, instant sent_at) {
  writer_.clear();
  if (type != control_type::bye) writer_.put(static_cast<std::uint64_t>(sent_at.count()));
  channel_.put(writer_.finish(type, 0, 0));
}

void udp_peer::say_bye() {
  if (is_here()) put(control_type::bye, {});
}

void udp_peer::read_control(instant now) {
  while (is_here()) {
    using arrival = control_channel::arrival;
    const std::size_t most = options_.max_message_bytes + sizeof(message_kind);
    const arrival come = channel_.read(inbox_bytes_ < most ? most - inbox_bytes_ : 0);
    if (std::exchange(bytes_heard_, channel_.bytes_read()) != channel_.bytes_read()) beat_.heard(now);
    is_held_ = come == arrival::held;
    if (come == arrival::closed) return lose(presence::lost, "connection closed");
    if (come == arrival::refused)
      return fail(options_.name + " sent a bad control message: " + channel_.error().message());
    if (come != arrival::message) return;
    take_message(now);
  }
}

void udp_peer::take_message(instant now) {
  const bounded::control_message& come = channel_.message();
  std::error_code error;
  switch (come.header.type) {
    case control_type::begin:
    case control_type::probe:
      receiving_.machine().on_control(come, now);
      break;
    case control_type::ready:
    case control_type::report:
    case control_type::wanted:
    case control_type::stop:
      sending_.machine().on_control(come);
      break;
    case control_type::message: {
      const message_kind kind = channel_.kind();
      auto bytes = channel_.take_message();
      inbox_bytes_ += bytes->size();
      inbox_.push_back({kind, std::move(bytes)});
      break;
    }
    case control_type::ping: {
      const auto sent_at = bounded::read_number<std::uint64_t>(come.body, error);
      if (!error) {
        writer_.clear();
        writer_.put(sent_at);
        channel_.put(writer_.finish(control_type::pong, 0, 0));
      }
      break;
    }
    case control_type::pong: {
      const auto sent_at = bounded::read_number<std::uint64_t>(come.body, error);
      if (!error) beat_.pong(instant(static_cast<std::int64_t>(sent_at)), now);
      receiving_.machine().set_quiet(beat_.quiet());
      break;
    }
    case control_type::abort: {
      const bounded::abort_body abort = bounded::read_abort(come.body, error);
      if (!error) return lose(presence::wrong, options_.name + " has given up: " + std::string(abort.text));
      break;
    }
    case control_type::bye:
      return lose(presence::left, "gone before the end");
    case control_type::tick:
      break;
    default:
      error = bounded::bounded_errc::unexpected_message;
  }
  if (error) return fail(options_.name + " sent a bad control message: " + error.message());
  after_events();
}

void udp_peer::on_datagram(std::span<const std::byte> bytes, instant now) {
  if (!is_here()) return;
  receiving_.machine().on_datagram(bytes, now);
  after_events();
}

// A frame that has come is put behind the messages before it; what has failed ends all.
void udp_peer::after_events() {
  const bounded::bounded_receiver& receiver = receiving_.machine();
  if (receiver.state() == bounded::receiver_state::frozen && !is_frame_posted_) post_frame();
  if (!is_here()) return;
  const auto sentence = [&](const std::error_code& why, const std::string& from, const std::string& to) {
    return bounded::failure_sentence(why, from, to, options_.mtu);
  };
  if (receiver.failure()) return fail(sentence(receiver.failure(), options_.name, options_.own_name));
  if (sending_.machine().state() == bounded::sender_state::failed)
    fail(sentence(sending_.machine().failure(), options_.own_name, options_.name));
}

void udp_peer::post_frame() {
  const bounded::bounded_receiver& receiver = receiving_.machine();
  is_frame_posted_ = true;
  arrived_cost_ = receiving_.take_cost();
  to_tell_.duplicate += arrived_cost_.duplicate;
  to_tell_.late += arrived_cost_.late;
  if (receiver.report().size() < sizeof(told_cost)) {
    return fail(options_.name + " sent a frame without what the one before took");
  }
  report_bytes_ = receiver.report().size() - sizeof(told_cost);
  told_cost told;
  std::memcpy(&told, receiver.report().data() + report_bytes_, sizeof told);
  arrived_cost_.packets = told.packets;
  arrived_cost_.repeated = told.repeated;
  arrived_cost_.wire_bytes = told.wire_bytes;
  arrived_cost_.rounds = told.rounds;
  arrived_cost_.transfers = told.transfers;
  arrived_cost_.rate_bits = told.rate_bits;
  told_.duplicate += told.duplicate;
  told_.late += told.late;
  const bool is_down = options_.receives.takes.kind == lamina::frame_kind::parameters;
  inbox_.push_back({is_down ? message_kind::parameters : message_kind::gradients, nullptr});
}

void udp_peer::say(instant now, bool packets_have_gone) {
  if (!is_here()) return;
  const auto put_all = [this](std::span<const std::byte> said) { channel_.put(said); };
  say_all(receiving_.machine(), now, put_all);
  if (packets_have_gone) say_all(sending_.machine(), now, put_all);
  after_events();
  if (!is_here()) return;
  if (now >= beat_.ping_at()) {
    put(control_type::ping, now);
    beat_.ping_sent(now);
  }
  if (!channel_.write()) lose(presence::lost, "connection closed");
}

std::optional<bounded::outgoing_packet> udp_peer::next_packet(instant now) {
  return is_here() ? sending_.machine().next_packet(now) : std::nullopt;
}

void udp_peer::judge(instant read_at) {
  if (!is_here() || !is_awaited_ || is_held_ || !beat_.is_lost(read_at)) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(options_.timeout).count();
  lose(presence::lost, "nothing heard for " + std::to_string(seconds) + " s");
}

instant udp_peer::deadline(bool packets_have_gone) const {
  if (!is_here()) return bounded::never;
  instant next = std::min(receiving_.machine().deadline(), beat_.ping_at());
  if (packets_have_gone && !is_streaming()) next = std::min(next, sending_.machine().deadline());
  if (is_awaited_ && !is_held_) next = std::min(next, beat_.lost_at());
  return next;
}

// The machines know of it already, or will in a moment; what came before stands.
void udp_peer::lose(presence why, const std::string& what) {
  if (!is_here()) return;
  at_ = why;
  why_ = what;
  sending_.machine().lose();
  receiving_.machine().lose();
  channel_.close();
}

void udp_peer::fail(const std::string& sentence) {
  const auto put_all = [this](std::span<const std::byte> said) { channel_.put(said); };
  say_all(receiving_.machine(), {}, put_all);  // ABORT, with the reason
  say_all(sending_.machine(), {}, put_all);
  channel_.write();
  lose(presence::wrong, sentence);
}

}  // namespace lab
