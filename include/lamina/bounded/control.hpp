// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <system_error>
#include <type_traits>
#include <vector>

#include "lamina/bounded/error.hpp"
#include "lamina/bounded/grid.hpp"
#include "lamina/bounded/keyed_check.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"

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
  explicit control_limits(const chunk_grid& grid, std::size_t most_message_bytes = 0)
      : begin_(lamina::detail::wire_header_bytes +
               lamina::detail::padded_bitmap_bytes(grid.parts().layers()) + 4096 + 8 * grid.chunks()),
        list_(32 + grid.chunks() / 8 + 8 * grid.parts().layers()),
        message_(most_message_bytes) {}

  [[nodiscard]] std::size_t of(control_type type) const noexcept {
    switch (type) {
      case control_type::hello:
        return 64;
      case control_type::begin:
        return begin_;
      case control_type::ready:
        return 12;
      case control_type::report:
        return 28;
      case control_type::probe:
        return 4;
      case control_type::wanted:
      case control_type::stop:
        return list_;
      case control_type::abort:
        return most_abort_bytes;
      case control_type::message:
        return message_;
      case control_type::ping:
      case control_type::pong:
        return 8;
      default:
        return 0;
    }
  }

 private:
  std::size_t begin_;
  std::size_t list_;
  std::size_t message_;
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
  template <class Value>
  requires std::is_arithmetic_v<Value>
  void put(Value value) { put(std::as_bytes(std::span(&value, 1))); }
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

/// Takes numbers from the front of a body; zeros where it is too short, which is_short() then says.
class body_reader {
 public:
  explicit body_reader(std::span<const std::byte> body) noexcept : rest_(body) {}

  template <class Value>
  Value take() noexcept {
    Value value{};
    const auto bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  std::span<const std::byte> take(std::size_t count) noexcept {
    if (count > rest_.size()) {
      is_short_ = true;
      rest_ = {};
      return {};
    }
    const auto taken = rest_.first(count);
    rest_ = rest_.subspan(count);
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
  to.put(report.granted_bits);
  to.put(report.received);
  to.put(report.transmissions);
  to.put(report.delay_us);
  to.put(report.seen);
  to.put(report.open_transfers);
}

namespace detail {

inline transfer_report take_report(body_reader& from) noexcept {
  transfer_report report;
  report.granted_bits = from.take<std::uint64_t>();
  report.received = from.take<std::uint32_t>();
  report.transmissions = from.take<std::uint32_t>();
  report.delay_us = from.take<std::uint32_t>();
  report.seen = from.take<std::uint32_t>();
  report.open_transfers = from.take<std::uint32_t>();
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

/// READY.
struct ready_body {
  std::uint64_t granted_bits = 0;
  std::uint32_t open_transfers = 0;
};
inline ready_body read_ready(std::span<const std::byte> body, std::error_code& error) noexcept {
  detail::body_reader from(body);
  ready_body ready;
  ready.granted_bits = from.take<std::uint64_t>();
  ready.open_transfers = from.take<std::uint32_t>();
  error = from.error();
  return ready;
}

/// The one number of a PROBE (transmissions so far), or of a PING or PONG (sent at).
template <class Number>
Number read_number(std::span<const std::byte> body, std::error_code& error) noexcept {
  detail::body_reader from(body);
  const Number number = from.take<Number>();
  error = from.error();
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
  [[nodiscard]] std::uint32_t parts() const noexcept { return parts_; }
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
      if (part >= grid.parts().layers()) return bounded_errc::no_such_chunk;
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

}  // namespace lamina::inline LAMINA_ABI::bounded
