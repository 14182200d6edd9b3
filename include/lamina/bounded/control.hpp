// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <vector>

#include "lamina/bounded/chunks.hpp"
#include "lamina/bounded/error.hpp"
#include "lamina/bounded/grid.hpp"
#include "lamina/bounded/packet.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"

/// Control messages, as docs/bounded-loss/wire.md gives them: 24 bytes of header, then a body by the type. They go over a stream that keeps
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
  message = 9,
  ping = 10,
  pong = 11,
  bye = 12,
  tick = 13,
};

inline constexpr std::size_t control_header_bytes = 24;
inline constexpr std::uint8_t control_version = 1;
/// The round of a WANTED that answers no PROBE.
inline constexpr std::uint32_t unasked_round = 0xffff'ffff;
/// What the caller adds to a BEGIN, its own report of the step, may have so many bytes.
inline constexpr std::size_t most_report_bytes = 4096 - 32;
inline constexpr std::size_t most_abort_bytes = 1024;

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

/// The most bytes that the body of a message may have: a reader takes memory for no more.
class control_limits {
 public:
  explicit control_limits(const chunk_grid& grid, std::size_t most_message_bytes = 0) {
    const std::size_t parts = grid.fragments().layers();
    const auto set = [this](control_type type, std::size_t bytes) { most_[index(type)] = bytes; };
    set(control_type::hello, 64);
    set(control_type::begin, lamina::detail::wire_header_bytes + lamina::detail::padded_bitmap_bytes(parts) +
                                 4096 + 8 * grid.chunks());
    set(control_type::ready, 12);
    set(control_type::report, 28);
    set(control_type::probe, 4);
    set(control_type::wanted, 32 + grid.chunks() / 8 + 8 * parts);
    set(control_type::stop, of(control_type::wanted));
    set(control_type::abort, most_abort_bytes);
    set(control_type::message, most_message_bytes);
    set(control_type::ping, 8);
    set(control_type::pong, 8);
  }
  [[nodiscard]] std::size_t of(control_type type) const noexcept {
    return index(type) < most_.size() ? most_[index(type)] : 0;
  }

 private:
  static std::size_t index(control_type type) noexcept { return static_cast<std::size_t>(type); }
  std::array<std::size_t, 14> most_{};
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
  error.clear();
  if (bytes.size() < control_header_bytes) {
    error = bounded_errc::truncated;
    return header;
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.version != control_version) {
    error = bounded_errc::unsupported_version;
  } else if (header.reserved != 0) {
    error = bounded_errc::nonzero_reserved;
  } else if (header.type < control_type::hello || header.type > control_type::tick) {
    error = bounded_errc::unknown_type;
  } else if (header.body_bytes > limits.of(header.type)) {
    error = bounded_errc::wrong_length;
  }
  return header;
}

/// A whole message. Beside the errors of its header: truncated or wrong_length, if the body is not as long as the header says, and
/// bad_check.
inline control_message read_control(std::span<const std::byte> bytes, const control_limits& limits,
                                    keyed_check& check, std::error_code& error) noexcept {
  control_message read{read_control_header(bytes, limits, error), {}};
  if (error) return read;
  read.body = bytes.subspan(control_header_bytes);
  if (read.body.size() != read.header.body_bytes) {
    error = read.body.size() < read.header.body_bytes ? bounded_errc::truncated : bounded_errc::wrong_length;
  } else if (check.of({bytes.first(offsetof(control_header, check)), read.body}) != read.header.check) {
    error = bounded_errc::bad_check;
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
  requires(std::is_arithmetic_v<Values>&&...) void put(Values... values) {
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
  [[nodiscard]] keyed_check& keyed() noexcept { return check_; }
  /// What was put so far.
  [[nodiscard]] std::span<const std::byte> body() const noexcept {
    return std::span(bytes_).subspan(control_header_bytes);
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
    if (is_short_) return bounded_errc::truncated;
    return rest_.empty() ? std::error_code{} : bounded_errc::wrong_length;
  }

 private:
  std::span<const std::byte> rest_;
  bool is_short_ = false;
};

/// A body that is these values and nothing else: truncated or wrong_length if it is none.
template <class... Values>
std::error_code read_body(std::span<const std::byte> body, Values&... values) noexcept {
  body_reader from(body);
  from.read(values...);
  return from.error();
}

}  // namespace detail

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

namespace detail {

inline transfer_report take_report(body_reader& from) noexcept {
  transfer_report report;
  from.read(report.granted_bits, report.received, report.transmissions, report.delay_us, report.seen,
            report.open_transfers);
  return report;
}

}  // namespace detail

/// A REPORT: truncated or wrong_length if it is none.
inline transfer_report read_report(std::span<const std::byte> body, std::error_code& error) noexcept {
  detail::body_reader from(body);
  const transfer_report report = detail::take_report(from);
  error = from.error();
  return report;
}

/// The one number of a PROBE (transmissions so far), or of a PING or PONG (sent at).
template <class Number>
Number read_number(std::span<const std::byte> body, std::error_code& error) noexcept {
  Number number{};
  error = detail::read_body(body, number);
  return number;
}

/// WANTED and STOP: chunks as bitmaps of parts. In WANTED those that are to be sent again, in STOP those that have arrived of each part
/// that is incomplete; a STOP that lists no part is of a complete transfer.
class chunk_list {
 public:
  /// Sets `error` to truncated, wrong_length, no_such_chunk (no such part) or bad_list: parts out of order or twice, a bit from c_l on.
  /// Only then is what is listed to be looked at. Allocates nothing.
  static chunk_list read(std::span<const std::byte> body, const chunk_grid& grid,
                         std::error_code& error) noexcept {
    detail::body_reader from(body);
    chunk_list list;
    list.report_ = detail::take_report(from);
    list.parts_ = from.take<std::uint32_t>();
    list.lists_ = from.rest();
    error = list.verify(from, grid);
    return list;
  }

  [[nodiscard]] const transfer_report& report() const noexcept { return report_; }
  [[nodiscard]] std::uint32_t fragments() const noexcept { return parts_; }
  /// consume(part, bits) for each part listed, in order.
  template <class Consume>
  void for_each(const chunk_grid& grid, Consume&& consume) const {
    detail::body_reader from(lists_);
    for (std::uint32_t k = 0; k < parts_; ++k) {
      const auto part = from.take<std::uint32_t>();
      consume(part, from.take(grid.bitmap_bytes(part)));
    }
  }

 private:
  std::error_code verify(detail::body_reader from, const chunk_grid& grid) const noexcept {
    std::uint32_t least = 0;
    for (std::uint32_t k = 0; k < parts_ && !from.is_short(); ++k) {
      const auto part = from.take<std::uint32_t>();
      if (from.is_short()) break;
      if (part >= grid.fragments().layers()) return bounded_errc::no_such_chunk;
      if (part < least) return bounded_errc::bad_list;
      least = part + 1;
      const auto bits = from.take(grid.bitmap_bytes(part));
      const std::uint32_t chunks = grid.chunks(part);
      if (chunks % 8 != 0 && !bits.empty() && (bits.back() >> (chunks % 8)) != std::byte{0}) {
        return bounded_errc::bad_list;
      }
    }
    return from.error();
  }

  transfer_report report_;
  std::uint32_t parts_ = 0;
  std::span<const std::byte> lists_;
};

[[nodiscard]] inline std::uint32_t count_bits(std::span<const std::byte> bits) noexcept {
  std::uint32_t count = 0;
  for (const std::byte each : bits) {
    count += static_cast<std::uint32_t>(std::popcount(std::to_integer<unsigned>(each)));
  }
  return count;
}

/// Who is at the other end, and whether both were built and started alike.
struct hello_body {
  std::uint32_t protocol = control_version;
  std::uint32_t rank = 0;
  std::uint32_t ranks = 0;
  std::uint8_t element_type = 0;  ///< as in a frame: 1 float, 2 double
  std::uint8_t payload_type = 0;
  std::uint64_t fingerprint = 0;  ///< of the layout of the parts
  std::uint32_t chunk_elements = 0;
  std::uint32_t mtu = 0;

  friend bool operator==(const hello_body&, const hello_body&) = default;
};

/// HELLO, which proves by its last 8 bytes that its writer knows the secret.
inline std::span<const std::byte> write_hello(control_writer& to, const hello_body& hello) {
  to.clear();
  to.put(hello.protocol, hello.rank, hello.ranks, hello.element_type, hello.payload_type, std::uint16_t{0},
         hello.fingerprint, hello.chunk_elements, hello.mtu);
  to.put(to.keyed().of({to.body()}));
  return to.finish(control_type::hello, 0, 0);
}

/// `error` is set to truncated, wrong_length, nonzero_reserved, bad_proof or unsupported_version.
inline hello_body read_hello(std::span<const std::byte> body, keyed_check& check,
                             std::error_code& error) noexcept {
  hello_body hello;
  std::uint16_t reserved = 0;
  std::uint64_t proof = 0;
  error =
      detail::read_body(body, hello.protocol, hello.rank, hello.ranks, hello.element_type, hello.payload_type,
                        reserved, hello.fingerprint, hello.chunk_elements, hello.mtu, proof);
  if (error) return hello;
  if (reserved != 0) {
    error = bounded_errc::nonzero_reserved;
  } else if ((check.of({body.first(body.size() - sizeof proof)}) ^ proof) != 0) {  // in constant time
    error = bounded_errc::bad_proof;
  } else if (hello.protocol != control_version) {
    error = bounded_errc::unsupported_version;
  }
  return hello;
}

/// What a transfer is to be: BEGIN, as it lies in the body.
struct begin_body {
  frame_kind kind{};
  std::uint32_t bound_ppm = 0;
  std::uint64_t frame_bytes = 0;
  std::span<const std::byte> report;    ///< the caller's own, of the step
  std::span<const std::byte> prefix;    ///< header and bitmap of the frame
  std::span<const std::byte> required;  ///< 8 bytes a chunk: part, index; ascending

  [[nodiscard]] std::size_t required_chunks() const noexcept { return required.size() / 8; }
  /// consume(part, index) for each required chunk, in order. Those of parts that are not in the frame are repairs.
  template <class Consume>
  void for_each_required(Consume&& consume) const {
    detail::body_reader from(required);
    while (!from.rest().empty()) {
      const auto part = from.take<std::uint32_t>();
      consume(part, from.take<std::uint32_t>());
    }
  }
};

/// `error` is set to truncated, wrong_length, nonzero_reserved, bound_too_large (beyond half), no_such_chunk or bad_list (required chunks
/// out of order or twice). The prefix has not been looked at.
inline begin_body read_begin(std::span<const std::byte> body, const chunk_grid& grid,
                             std::error_code& error) noexcept {
  detail::body_reader from(body);
  begin_body begin;
  std::uint8_t reserved = 0;
  std::uint16_t more_reserved = 0;
  std::uint32_t report_bytes = 0, prefix_bytes = 0, required = 0, last_reserved = 0;
  from.read(begin.kind, reserved, more_reserved, begin.bound_ppm, begin.frame_bytes, report_bytes,
            prefix_bytes, required, last_reserved);
  begin.report = from.take(report_bytes);
  begin.prefix = from.take(prefix_bytes);
  begin.required = from.take(std::uint64_t{8} * required);
  error = from.error();
  if (error) return begin;
  if (reserved != 0 || more_reserved != 0 || last_reserved != 0) {
    error = bounded_errc::nonzero_reserved;
  } else if (report_bytes > most_report_bytes) {
    error = bounded_errc::wrong_length;
  } else if (begin.bound_ppm > most_bound_ppm) {
    error = bounded_errc::bound_too_large;
  } else {
    chunk last;
    bool is_first = true;
    begin.for_each_required([&](std::uint32_t part, std::uint32_t index) {
      const chunk each{part, index, 0};
      if (!grid.has(part, index)) error = bounded_errc::no_such_chunk;
      if (!is_first && !lies_before(last, each) && !error) error = bounded_errc::bad_list;
      is_first = false;
      last = each;
    });
  }
  return begin;
}

/// Why an end has given up.
struct abort_body {
  std::uint32_t reason = 0;  ///< a bounded_errc, or 0: the caller wanted to
  std::string_view text;
};
/// The text is cut where it is too long.
inline std::span<const std::byte> write_abort(control_writer& to, std::uint32_t transfer,
                                              const abort_body& abort) {
  to.clear();
  to.put(abort.reason);
  to.put(std::as_bytes(std::span(abort.text.substr(0, most_abort_bytes - sizeof abort.reason))));
  return to.finish(control_type::abort, transfer, 0);
}
inline abort_body read_abort(std::span<const std::byte> body, std::error_code& error) noexcept {
  detail::body_reader from(body);
  abort_body abort;
  abort.reason = from.take<std::uint32_t>();
  const auto text = from.rest();
  abort.text = {reinterpret_cast<const char*>(text.data()), text.size()};
  error = from.is_short() ? bounded_errc::truncated : std::error_code{};
  return abort;
}

}  // namespace lamina::inline LAMINA_ABI::bounded
