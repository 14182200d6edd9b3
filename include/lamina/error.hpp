// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "lamina/detail/abi.hpp"

/// What goes wrong. Bytes from outside, frames and saved states, are refused with an errc. Mistakes of the caller throw
/// std::invalid_argument, std::out_of_range or std::logic_error. A gradient that is refused is a result: worker.hpp.
namespace lamina::inline LAMINA_ABI {

/// Why bytes were refused, or a transfer of lamina/bounded has failed.
enum class errc {
  truncated = 1,         ///< fewer bytes than the header, the bitmap, the ages or the payload need
  bad_magic,             ///< neither a frame nor a saved state of lamina
  unsupported_version,   ///< of a version of the format that this library does not read
  wrong_element_type,    ///< of double where float is expected, or the other way round
  nonzero_reserved,      ///< a flag is set, or a number stands in the header, that this version does not know
  wrong_layout,          ///< the fingerprint, or the number of layers or elements, is that of another model
  trailing_bytes,        ///< bytes after the end
  checksum_mismatch,     ///< damaged
  unknown_kind,          ///< a frame of no frame_kind
  unknown_payload_type,  ///< a frame of no payload_type
  bad_presence,  ///< a presence bit beyond the last layer or of an empty layer, or padding that is not zero
  bad_payload_size,     ///< the payload has another size than the layers that are present
  bad_trits,            ///< a ternary payload with a byte that is no five trits, beyond 121 or -121
  misaligned_buffer,    ///< the bytes do not lie where their elements can be read in place
  unexpected_kind,      ///< a frame of another kind
  unexpected_step,      ///< a frame of another step
  other_run,            ///< a frame of another run: see worker_options::run
  unknown_sender,       ///< the sender is none of the workers
  duplicate_frame,      ///< its sender has sent this frame before
  unexpected_sequence,  ///< not the next frame of its sender's step
  duplicate_layer,      ///< a layer that an earlier frame of the step has
  other_momentum,       ///< a state with velocity where there is no momentum, or the other way round
  impossible_age,       ///< a state in which a fragment was sent in a later step than the state's

  // Of packets, control messages and transfers of lamina/bounded.
  no_such_chunk,  ///< a fragment or chunk out of range, or neither of the frame nor required
  wrong_sizes,    ///< the number of chunks, the offset or the data bytes are not those of the layout
  bad_check,      ///< damaged on its way, or by somebody who does not know the secret
  unknown_type,   ///< no type of a control message
  wrong_length,   ///< a body longer than its type may have, or not as long as its fields say
  bad_list,       ///< fragments or chunks twice or out of order, a bit beyond the last, or nothing listed
  unexpected_message,  ///< a control message that does not belong to the state
  wrong_payload_type,  ///< a frame whose elements are written otherwise than was agreed
  has_checksum,        ///< a frame with a checksum, which would not hold for one that arrives in part
  bound_too_large,     ///< a transfer that may lose more than its receiver accepts
  beyond_bound,        ///< a transfer that ended with a fragment beyond its bound
  required_missing,    ///< a transfer that ended without a required chunk
  no_progress,         ///< so many rounds in a row brought nothing new
  nothing_arrives,     ///< packets are sent, and none comes
  aborted,             ///< the other end has given up
  lost,                ///< the connection is closed, or nothing was heard for too long
};

namespace detail {

class LAMINA_VISIBLE error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina"; }
  std::string message(int code) const override {
    // In the order of errc, from 1.
    static constexpr std::array sentences = {
        "bytes are missing",
        "not of lamina (bad magic)",
        "unsupported format version",
        "holds another element type",
        "an unknown flag, or an impossible number in the header",
        "belongs to another model, or to other fragments of it (layout fingerprint differs)",
        "bytes follow the end",
        "checksum mismatch: damaged",
        "frame is of an unknown kind",
        "frame has an unknown payload type",
        "presence bit set beyond the last layer or for an empty layer, or padding that is not zero: damaged?",
        "payload size does not match the present layers",
        "ternary payload has a byte that is no five trits",
        "buffer is not aligned for the element type",
        "frame is of another kind than expected",
        "frame belongs to another step",
        "frame belongs to another run",
        "sender is not one of the workers",
        "frame has been taken already",
        "frame is not the next of its sender's step",
        "frame holds a layer that an earlier frame of the step has",
        "state holds velocity where there is no momentum, or none where there is",
        "state says that a layer was sent in a step after its own",
        "chunk is not of this transfer",
        "sizes are not those of the chunk",
        "check does not hold: damaged, or of another run",
        "message is of an unknown type",
        "message is not as long as its type and fields say",
        "list of chunks is out of order, has a bit too many or nothing in it",
        "message does not belong to the state of the transfer",
        "frame has another payload type than was agreed",
        "frame of a bounded transfer has a checksum",
        "transfer may lose more than this end accepts",
        "transfer ended with a fragment beyond its bound",
        "transfer ended without a required chunk",
        "rounds go by and nothing new arrives",
        "UDP does not arrive: is the port blocked, or the path's MTU too small?",
        "the other end has aborted",
        "the other end is lost",
    };
    const auto index = static_cast<std::size_t>(code) - 1;
    return index < sentences.size() ? sentences[index] : "unknown error";
  }
};

}  // namespace detail

/// The category of errc: "lamina".
[[nodiscard]] LAMINA_VISIBLE inline const std::error_category& category() noexcept {
  static const detail::error_category category;
  return category;
}

[[nodiscard]] inline std::error_code make_error_code(errc code) noexcept {
  return {static_cast<int>(code), category()};
}

/// `error == errc::truncated` holds whichever shared object of the process the error comes from. error_code compares categories by
/// address, and a plugin that was loaded by itself, or another version of the library, has one of its own.
[[nodiscard]] inline bool operator==(const std::error_code& error, errc code) noexcept {
  return error.value() == static_cast<int>(code) &&
         (error.category() == category() || std::string_view(error.category().name()) == category().name());
}

/// Thrown when bytes are refused where there is no error code to return; `code()` is an errc.
class LAMINA_VISIBLE decode_error : public std::system_error {
 public:
  using std::system_error::system_error;
};

/// Thrown when a gradient holds NaN or infinity, or when adding it would overflow the residual, which is as it was, to within the rounding
/// that non_finite::refuse says: it is the only copy of what was not sent yet.
class LAMINA_VISIBLE non_finite_gradient : public std::domain_error {
 public:
  /// Of which layer of the model, and which of worker::fragments(), the same where layers are whole; its name, and what was found.
  non_finite_gradient(std::size_t layer, std::size_t fragment, const std::string& name, const char* reason)
      : std::domain_error("layer " + std::to_string(layer) + " '" + name + "': " + reason),
        layer_(layer),
        fragment_(fragment) {}
  [[nodiscard]] std::size_t layer() const noexcept { return layer_; }
  /// That in which the first bad element is.
  [[nodiscard]] std::size_t fragment() const noexcept { return fragment_; }

 private:
  std::size_t layer_;
  std::size_t fragment_;
};

}  // namespace lamina::inline LAMINA_ABI

/// \cond
template <>
struct std::is_error_code_enum<lamina::errc> : std::true_type {};
/// \endcond
