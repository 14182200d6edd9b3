// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/packet.hpp"

/// Control messages, as docs/bounded-loss-protocol.md gives them: 24 bytes of header, then a body by the type. They go over a stream that keeps
/// order and loses nothing.
namespace lamina::inline LAMINA_ABI::bounded {

enum class control_type : std::uint8_t {
  hello = 1,   ///< both ends, first
  begin = 2,   ///< sender: a transfer is to begin
  ready = 3,   ///< receiver: send
  report = 4,  ///< receiver: how much got through
  probe = 5,   ///< sender: this round is over
  wanted = 6,  ///< receiver: send these again
  stop = 7,    ///< receiver: the transfer has ended; what has arrived
  abort = 8,   ///< both ends: given up
  ping = 10,   ///< there is no 9
  pong = 11,
  bye = 12,
  tick = 13,
};

inline constexpr std::size_t control_header_bytes = 24;
inline constexpr std::uint8_t control_version = 1;
/// The round of a WANTED that answers no PROBE.
inline constexpr std::uint32_t unasked_round = 0xffff'ffff;
inline constexpr std::size_t most_abort_bytes = 1024;
/// Packets sent, after which both ends take it for silence that none has come.
inline constexpr std::uint32_t least_sent_into_silence = 64;

struct control_header {
  std::uint32_t body_bytes = 0;
  control_type type{};
  std::uint8_t version = control_version;
  std::uint16_t reserved = 0;
  std::uint32_t transfer = 0;  // 0 where a message is of none
  std::uint32_t round = 0;
  std::uint64_t check = 0;
};
static_assert(sizeof(control_header) == control_header_bytes && offsetof(control_header, transfer) == 8 &&
              offsetof(control_header, check) == 16);

/// HELLO: who is at the other end, and whether both were built and started alike.
struct hello_body {
  std::uint32_t protocol = control_version;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint8_t element_type = 0;  ///< as in a frame: 1 float, 2 double
  std::uint8_t payload_type = 0;
  std::uint16_t reserved = 0;
  std::uint64_t fingerprint = 0;  ///< of the layout of the fragments
  std::uint32_t chunk_elements = 0;
  std::uint32_t mtu = 0;
};
static_assert(sizeof(hello_body) == 32);

/// The most bytes that the body of a message may have: a reader takes memory for no more.
class control_limits {
 public:
  /// Of a connection over which frames come that `takes` cuts, and go that `sends` cuts.
  control_limits(const chunk_grid& takes, const chunk_grid& sends) {
    using namespace lamina::detail;
    const std::size_t prefix =
        wire_header_bytes + padded_bitmap_bytes(takes.fragments().layers(), most_user_bytes);
    const std::size_t begin = 8 + prefix + 8 * takes.chunks();
    const std::size_t list = 32 + sends.chunks() / 8 + 8 * sends.fragments().layers();
    most_ = {0, sizeof(hello_body), begin, 12, 28, 4, list, list, most_abort_bytes, 0, 8, 8, 0, 0};
  }
  explicit control_limits(const chunk_grid& grid) : control_limits(grid, grid) {}

  [[nodiscard]] std::size_t of(control_type type) const noexcept {
    const auto index = static_cast<std::size_t>(type);
    return index < most_.size() ? most_[index] : 0;
  }

 private:
  std::array<std::size_t, 14> most_;  // by type
};

/// Header and body of a message, for who has read both.
struct control_message {
  control_header header;
  std::span<const std::byte> body;
};

/// The header of a message: how much body follows. `error` is set to truncated, unsupported_version, nonzero_reserved, unknown_type or
/// wrong_length, in this order. No check has been looked at then, but what the length may be is the reader's own.
inline control_header read_control_header(std::span<const std::byte> bytes, const control_limits& limits,
                                          std::error_code& error) noexcept {
  control_header header;
  error = bytes.size() < control_header_bytes ? errc::truncated : std::error_code();
  if (error) return header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.version != control_version) {
    error = errc::unsupported_version;
  } else if (header.reserved != 0) {
    error = errc::nonzero_reserved;
  } else if (header.type < control_type::hello || header.type > control_type::tick ||
             header.type == control_type{9}) {
    error = errc::unknown_type;
  } else if (header.body_bytes > limits.of(header.type)) {
    error = errc::wrong_length;
  }
  return header;
}

/// A whole message. Besides the errors of its header: truncated or wrong_length, if the body is not as long as the header says, and
/// bad_check.
inline control_message read_control(std::span<const std::byte> bytes, const control_limits& limits,
                                    keyed_check& check, std::error_code& error) noexcept {
  control_message read{read_control_header(bytes, limits, error), {}};
  if (error) return read;
  read.body = bytes.subspan(control_header_bytes);
  if (read.body.size() != read.header.body_bytes) {
    error = read.body.size() < read.header.body_bytes ? errc::truncated : errc::wrong_length;
  } else if (check.of({bytes.first(offsetof(control_header, check)), read.body}) != read.header.check) {
    error = errc::bad_check;
  }
  return read;
}

/// Builds messages, one at a time, in memory of its own.
class control_writer {
 public:
  /// \param secret     of the run
  /// \param most_body  bytes; for more it allocates
  control_writer(std::uint64_t secret, std::size_t most_body) : check_(secret) {
    bytes_.reserve(control_header_bytes + most_body);
    clear();
  }

  /// Begins another message.
  void clear() noexcept { bytes_.resize(control_header_bytes); }
  /// The bytes of each, one after the other.
  template <class... Values>
  requires((!std::is_convertible_v<const Values&, std::span<const std::byte>> &&
            std::is_trivially_copyable_v<Values>)&&...) void put(const Values&... values) {
    (put(std::as_bytes(std::span(&values, 1))), ...);
  }
  void put(std::span<const std::byte> bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }

  /// The message, valid until the next clear().
  std::span<const std::byte> finish(control_type type, std::uint32_t transfer, std::uint32_t round) noexcept {
    control_header header{.body_bytes = static_cast<std::uint32_t>(bytes_.size() - control_header_bytes),
                          .type = type,
                          .transfer = transfer,
                          .round = round};
    std::memcpy(bytes_.data(), &header, sizeof header);
    const std::span<const std::byte> all = bytes_;
    header.check = check_.of({all.first(offsetof(control_header, check)), all.subspan(control_header_bytes)});
    std::memcpy(bytes_.data(), &header, sizeof header);
    return all;
  }
  /// A message of these values and nothing else.
  template <class... Values>
  std::span<const std::byte> write(control_type type, std::uint32_t transfer, std::uint32_t round,
                                   const Values&... values) {
    clear();
    put(values...);
    return finish(type, transfer, round);
  }

 private:
  keyed_check check_;
  std::vector<std::byte> bytes_;
};

namespace detail {

/// Takes numbers from the front of a body; zeros where it is too short, which error() then says.
class body_reader {
 public:
  explicit body_reader(std::span<const std::byte> body) noexcept : rest_(body) {}

  template <class... Values>
  requires(std::is_trivially_copyable_v<Values>&&...) void read(Values&... values) noexcept {
    ((values = take<Values>()), ...);
  }
  template <class Value>
  Value take() noexcept {
    Value value{};
    const auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::span<const std::byte> take(std::uint64_t count) noexcept {
    is_short_ = is_short_ || count > rest_.size();
    const auto taken = is_short_ ? std::span<const std::byte>() : rest_.first(count);
    rest_ = is_short_ ? std::span<const std::byte>() : rest_.subspan(count);
    return taken;
  }
  [[nodiscard]] std::span<const std::byte> rest() const noexcept { return rest_; }
  [[nodiscard]] bool is_short() const noexcept { return is_short_; }
  /// What is wrong with the length, when all fields have been taken.
  [[nodiscard]] std::error_code error() const noexcept {
    if (is_short_) return errc::truncated;
    return rest_.empty() ? std::error_code{} : errc::wrong_length;
  }

 private:
  std::span<const std::byte> rest_;
  bool is_short_ = false;
};

}  // namespace detail

/// A body that is these values and nothing else: truncated or wrong_length if it is none.
template <class... Values>
std::error_code read_body(std::span<const std::byte> body, Values&... values) noexcept {
  detail::body_reader from(body);
  from.read(values...);
  return from.error();
}

/// What REPORT, WANTED and STOP begin with.
struct transfer_report {
  std::uint64_t granted_bits = 0;    ///< a second; 0: no grant
  std::uint32_t received = 0;        ///< packets since the last report
  std::uint32_t transmissions = 0;   ///< by which `seen` has grown since
  std::uint32_t delay_us = 0;        ///< median time in queues, of those
  std::uint32_t seen = 0;            ///< the highest transmission of this transfer, plus 1
  std::uint32_t open_transfers = 0;  ///< at the receiver

  friend bool operator==(const transfer_report&, const transfer_report&) = default;
};

inline void write_report(control_writer& to, const transfer_report& report) {
  to.put(report.granted_bits, report.received, report.transmissions, report.delay_us, report.seen,
         report.open_transfers);
}

/// A REPORT: truncated or wrong_length if it is none.
inline std::error_code read_report(std::span<const std::byte> body, transfer_report& report) noexcept {
  return read_body(body, report.granted_bits, report.received, report.transmissions, report.delay_us,
                   report.seen, report.open_transfers);
}

/// WANTED and STOP: a report, and chunks as bitmaps of fragments. In WANTED those that are to be sent again, in STOP those that have
/// arrived of each fragment that is incomplete; a STOP that lists none is of a complete transfer. Calls consume(fragment, bits) for each,
/// in order, until something is wrong: truncated, wrong_length, no_such_chunk (no such fragment) or bad_list: fragments out of order or
/// twice, a bit from c_l on. Allocates nothing.
template <class Consume>
std::error_code read_list(std::span<const std::byte> body, const chunk_grid& grid, transfer_report& report,
                          Consume&& consume) {
  detail::body_reader from(body);
  from.read(report.granted_bits, report.received, report.transmissions, report.delay_us, report.seen,
            report.open_transfers);
  const auto fragments = from.take<std::uint32_t>();
  std::uint32_t least = 0;
  for (std::uint32_t k = 0; k < fragments; ++k) {
    const auto fragment = from.take<std::uint32_t>();
    if (from.is_short()) break;
    if (fragment >= grid.fragments().layers()) return errc::no_such_chunk;
    if (fragment < least) return errc::bad_list;
    least = fragment + 1;
    const auto bits = from.take(grid.bitmap_bytes(fragment));
    if (from.is_short()) break;
    const std::uint32_t beyond = grid.chunks(fragment) % 8;
    if (beyond != 0 && (bits.back() >> beyond) != std::byte{0}) return errc::bad_list;
    consume(fragment, bits);
  }
  return from.error();
}

[[nodiscard]] inline std::uint32_t count_bits(std::span<const std::byte> bits) noexcept {
  std::uint32_t count = 0;
  for (const std::byte each : bits)
    count += static_cast<std::uint32_t>(std::popcount(std::to_integer<unsigned>(each)));
  return count;
}

/// What a transfer is to be: BEGIN, as it lies in the body.
struct begin_body {
  std::uint32_t bound_ppm = 0;
  std::span<const std::byte> prefix;    ///< header and bitmap of the frame
  std::span<const std::byte> required;  ///< 8 bytes a chunk: fragment, index; ascending

  /// consume(fragment, index) for each required chunk, in order. Those of fragments that are not in the frame are repairs.
  template <class Consume>
  void for_each_required(Consume&& consume) const {
    detail::body_reader from(required);
    while (!from.rest().empty()) {
      const auto fragment = from.take<std::uint32_t>();
      consume(fragment, from.take<std::uint32_t>());
    }
  }
};

/// `error` is set to truncated, wrong_length, bound_too_large (beyond half), no_such_chunk or bad_list (required chunks out of order or
/// twice). The prefix has not been looked at.
inline begin_body read_begin(std::span<const std::byte> body, const chunk_grid& grid,
                             std::error_code& error) noexcept {
  detail::body_reader from(body);
  begin_body begin;
  std::uint32_t prefix_bytes = 0;
  from.read(begin.bound_ppm, prefix_bytes);
  begin.prefix = from.take(prefix_bytes);
  begin.required = from.rest();
  error.clear();
  if (from.is_short()) {
    error = errc::truncated;
  } else if (begin.required.size() % 8 != 0) {
    error = errc::wrong_length;
  } else if (begin.bound_ppm > most_bound_ppm) {
    error = errc::bound_too_large;
  }
  if (error) return begin;
  std::optional<chunk> last;
  begin.for_each_required([&](std::uint32_t fragment, std::uint32_t index) {
    const chunk each{fragment, index, 0};
    if (!grid.has(fragment, index)) error = errc::no_such_chunk;
    if (last && *last >= each && !error) error = errc::bad_list;
    last = each;
  });
  return begin;
}

/// ABORT: why an end has given up, as a number and as text, which is cut where it is too long.
inline std::span<const std::byte> write_abort(control_writer& to, std::uint32_t transfer,
                                              const std::error_code& why) {
  const std::string text = why.message().substr(0, most_abort_bytes - sizeof(std::uint32_t));
  to.clear();
  to.put(static_cast<std::uint32_t>(why.value()));
  to.put(std::as_bytes(std::span(text)));
  return to.finish(control_type::abort, transfer, 0);
}
/// Its text; truncated if there is no number.
inline std::string_view read_abort(std::span<const std::byte> body, std::error_code& error) noexcept {
  detail::body_reader from(body);
  static_cast<void>(from.take<std::uint32_t>());
  error = from.is_short() ? errc::truncated : std::error_code{};
  return {reinterpret_cast<const char*>(from.rest().data()), from.rest().size()};
}

}  // namespace lamina::inline LAMINA_ABI::bounded
