// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/error.hpp"

namespace lamina::inline LAMINA_ABI::bounded {

/// Why a packet, a control message or a whole transfer was refused. 0 is success, as std::error_code wants it. What is wrong with the
/// prefix of a frame is a errc.
enum class bounded_errc {
  truncated = 1,        ///< fewer bytes than the header, or the fields of a body, need
  bad_magic,            ///< not a data packet at all
  unsupported_version,  ///< of a version of the protocol that this library does not speak
  nonzero_reserved,  ///< a flag, a bit of the tag or a reserved byte that this version does not define is set
  wrong_address,     ///< for another receiver, or from another sender
  other_transfer,    ///< of a transfer that is not open
  no_such_chunk,     ///< a part or chunk out of range, or neither of the frame nor required
  wrong_sizes,       ///< the number of chunks, the offset or the data bytes are not those of the layout
  bad_check,         ///< damaged on its way, or by somebody who does not know the secret
  unknown_type,      ///< no type of a control message
  wrong_length,      ///< a body longer than its type may have, or not as long as its fields say
  bad_list,   ///< parts or chunks twice or out of order, a bit beyond the last chunk, or nothing listed
  bad_proof,  ///< a HELLO by somebody who does not know the secret
  unexpected_message,  ///< a control message that does not belong to the state
  wrong_payload_type,  ///< a frame whose elements are written otherwise than was agreed
  has_checksum,        ///< a frame with a checksum, which would not hold for one that arrives in part
  bound_too_large,     ///< a transfer that may lose more than its receiver puts up with
  beyond_bound,        ///< an end that leaves a part beyond its bound
  required_missing,    ///< an end that leaves a required chunk missing
  no_progress,         ///< so many rounds in a row brought nothing new
  nothing_arrives,     ///< packets are sent, and none comes
  aborted,             ///< the other end has given up
  lost,                ///< the connection is closed, or nothing was heard for too long
};

namespace detail {

class LAMINA_VISIBLE bounded_error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina.bounded"; }
  std::string message(int code) const override {
    // In the order of bounded_errc, from 1.
    static constexpr std::array sentences = {
        "packet or message is truncated",
        "not a data packet of lamina (bad magic)",
        "packet or message has an unsupported version",
        "packet or message has an unknown flag or a reserved byte set",
        "packet is for another receiver or from another sender",
        "packet is of a transfer that is not open",
        "chunk is not of this transfer",
        "sizes are not those of the chunk",
        "check does not hold: damaged, or of another run",
        "message is of an unknown type",
        "message is not as long as its type and fields say",
        "list of chunks is out of order, has a bit too many or nothing in it",
        "HELLO does not prove the secret of this run",
        "message does not belong to the state of the transfer",
        "frame has another payload type than was agreed",
        "frame of a bounded transfer has a checksum",
        "transfer may lose more than this end puts up with",
        "transfer ended with a part beyond its bound",
        "transfer ended without a required chunk",
        "rounds go by and nothing new arrives",
        "UDP does not arrive: is the port blocked, or the path's MTU too small?",
        "the other end has aborted",
        "the other end is lost",
    };
    const auto index = static_cast<std::size_t>(code) - 1;
    return index < sentences.size() ? sentences[index] : "unknown error of a bounded transfer";
  }
};

}  // namespace detail

/// The category of bounded_errc: "lamina.bounded".
[[nodiscard]] LAMINA_VISIBLE inline const std::error_category& bounded_category() noexcept {
  static const detail::bounded_error_category category;
  return category;
}

[[nodiscard]] inline std::error_code make_error_code(bounded_errc code) noexcept {
  return {static_cast<int>(code), bounded_category()};
}

/// `error == bounded_errc::truncated` holds whichever shared object of the process the error comes from.
[[nodiscard]] inline bool operator==(const std::error_code& error, bounded_errc code) noexcept {
  return error.value() == static_cast<int>(code) &&
         (error.category() == bounded_category() ||
          std::string_view(error.category().name()) == bounded_category().name());
}

}  // namespace lamina::inline LAMINA_ABI::bounded

/// \cond
template <>
struct std::is_error_code_enum<lamina::bounded::bounded_errc> : std::true_type {};
/// \endcond

namespace lamina::inline LAMINA_ABI::bounded {

/// What to tell of a transfer that failed: who with whom, and why.
///
/// \param why   the error that ended it
/// \param from  the sender, as "worker 2"
/// \param to    the receiver, as "the server"
/// \param mtu   of the path as it was set, in bytes
[[nodiscard]] inline std::string failure_sentence(const std::error_code& why, const std::string& from,
                                                  const std::string& to, std::size_t mtu) {
  if (why == bounded_errc::nothing_arrives) {
    return "UDP from " + from + " to " + to +
           " does not arrive: is the port blocked, or the path's MTU below " + std::to_string(mtu) + "?";
  }
  return "transfer from " + from + " to " + to + ": " + why.message();
}

}  // namespace lamina::inline LAMINA_ABI::bounded
