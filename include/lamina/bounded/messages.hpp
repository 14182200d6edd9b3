// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <system_error>

#include "lamina/bounded/chunks.hpp"
#include "lamina/bounded/control.hpp"
#include "lamina/bounded/error.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"

/// The bodies of HELLO, BEGIN and ABORT.
namespace lamina::inline LAMINA_ABI::bounded {

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

namespace detail {

inline constexpr std::size_t hello_proof_offset = 32;

}  // namespace detail

/// HELLO, which proves by its last 8 bytes that its writer knows the secret.
inline std::span<const std::byte> write_hello(control_writer& to, const hello_body& hello) {
  to.clear();
  to.put(hello.protocol);
  to.put(hello.rank);
  to.put(hello.ranks);
  to.put(hello.element_type);
  to.put(hello.payload_type);
  to.put(std::uint16_t{0});
  to.put(hello.fingerprint);
  to.put(hello.chunk_elements);
  to.put(hello.mtu);
  to.put(to.keyed().of({to.body()}));
  return to.finish(control_type::hello, 0, 0);
}

/// `error` is set to truncated, wrong_length, nonzero_reserved, bad_proof or unsupported_version.
inline hello_body read_hello(std::span<const std::byte> body, keyed_check& check,
                             std::error_code& error) noexcept {
  detail::body_reader from(body);
  hello_body hello;
  hello.protocol = from.take<std::uint32_t>();
  hello.rank = from.take<std::uint32_t>();
  hello.ranks = from.take<std::uint32_t>();
  hello.element_type = from.take<std::uint8_t>();
  hello.payload_type = from.take<std::uint8_t>();
  const auto reserved = from.take<std::uint16_t>();
  hello.fingerprint = from.take<std::uint64_t>();
  hello.chunk_elements = from.take<std::uint32_t>();
  hello.mtu = from.take<std::uint32_t>();
  const auto proof = from.take<std::uint64_t>();
  error = from.error();
  if (error) return hello;
  if (reserved != 0) {
    error = bounded_errc::nonzero_reserved;
  } else if ((check.of({body.first(detail::hello_proof_offset)}) ^ proof) != 0) {  // in constant time
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
  begin.kind = static_cast<frame_kind>(from.take<std::uint8_t>());
  const auto reserved = from.take<std::uint8_t>() | from.take<std::uint16_t>();
  begin.bound_ppm = from.take<std::uint32_t>();
  begin.frame_bytes = from.take<std::uint64_t>();
  const auto report_bytes = from.take<std::uint32_t>();
  const auto prefix_bytes = from.take<std::uint32_t>();
  const std::uint64_t required = from.take<std::uint32_t>();
  const auto last_reserved = from.take<std::uint32_t>();
  begin.report = from.take(report_bytes);
  begin.prefix = from.take(prefix_bytes);
  begin.required = from.take(
      static_cast<std::size_t>(std::min<std::uint64_t>(8 * required, static_cast<std::size_t>(-1))));
  error = from.error();
  if (error) return begin;
  if (reserved != 0 || last_reserved != 0) {
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
