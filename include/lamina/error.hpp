// SPDX-License-Identifier: MIT
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>

/// Errors come in two kinds.
///
/// A caller's mistake (a wrong size, an index out of range, a call out of order, a gradient that holds NaN)
/// throws std::invalid_argument, std::out_of_range or std::logic_error, or a class derived from one of them,
/// before anything is written. Bytes from outside give a `frame_errc`, thrown as decode_error or returned as
/// std::error_code, and change nothing either.
namespace lamina {

/// Why a frame was refused. 0 is success, as std::error_code wants it.
enum class frame_errc {
  truncated = 1,         ///< fewer bytes than the header, the bitmap or the payload needs
  bad_magic,             ///< not a lamina frame at all
  unsupported_version,   ///< written by a version of the format that this library does not read
  wrong_element_type,    ///< for example a frame of double where float is expected
  unknown_kind,          ///< neither gradients nor parameters
  unknown_payload_type,  ///< elements written in a way that this version does not know
  nonzero_reserved,      ///< a flag or a reserved byte that this version does not define is set
  wrong_layout,          ///< the fingerprint or the number of layers is that of another model
  bad_presence,          ///< a presence bit beyond the last layer, or of an empty layer
  bad_payload_size,      ///< the payload is not as long as the present layers are
  trailing_bytes,        ///< bytes after the end of the frame
  checksum_mismatch,     ///< the frame was damaged on its way
  checksum_unsupported,  ///< the frame has a checksum and this build has no xxHash to verify it
  misaligned_buffer,     ///< the bytes do not start at a multiple of the element's alignment
  unexpected_kind,       ///< a parameter frame where a gradient frame belongs, or the other way round
  unexpected_step,       ///< a frame of another step: late, early or replayed
  unknown_sender,        ///< a sender outside [0, senders)
  duplicate_sender,      ///< a second frame of one sender in the same step
};

namespace detail {

class frame_error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina.frame"; }
  std::string message(int code) const override {
    switch (static_cast<frame_errc>(code)) {
      case frame_errc::truncated:
        return "frame is truncated";
      case frame_errc::bad_magic:
        return "not a lamina frame (bad magic)";
      case frame_errc::unsupported_version:
        return "frame has an unsupported format version";
      case frame_errc::wrong_element_type:
        return "frame holds another element type";
      case frame_errc::unknown_kind:
        return "frame is of an unknown kind";
      case frame_errc::unknown_payload_type:
        return "frame has an unknown payload type";
      case frame_errc::nonzero_reserved:
        return "frame has an unknown flag or a reserved byte set";
      case frame_errc::wrong_layout:
        return "frame belongs to another model (layout fingerprint differs)";
      case frame_errc::bad_presence:
        return "presence bit set beyond the last layer or for an empty layer";
      case frame_errc::bad_payload_size:
        return "payload size does not match the present layers";
      case frame_errc::trailing_bytes:
        return "bytes follow the end of the frame";
      case frame_errc::checksum_mismatch:
        return "checksum mismatch: the frame was damaged";
      case frame_errc::checksum_unsupported:
        return "frame has a checksum but lamina was built without xxHash";
      case frame_errc::misaligned_buffer:
        return "buffer is not aligned for the element type";
      case frame_errc::unexpected_kind:
        return "frame is of another kind than expected";
      case frame_errc::unexpected_step:
        return "frame belongs to another step";
      case frame_errc::unknown_sender:
        return "sender is not one of the workers";
      case frame_errc::duplicate_sender:
        return "sender has already sent a frame in this step";
    }
    return "unknown frame error";
  }
};

}  // namespace detail

inline const std::error_category& frame_category() noexcept {
  static const detail::frame_error_category category;
  return category;
}

inline std::error_code make_error_code(frame_errc code) noexcept {
  return {static_cast<int>(code), frame_category()};
}

/// Thrown when bytes from outside are not an acceptable frame; `code()` says why and compares with
/// frame_errc.
class decode_error : public std::system_error {
 public:
  using std::system_error::system_error;
};

/// Thrown when a gradient holds NaN or infinity, or when adding it would overflow the residual. The residual
/// is as it was. Source: the residual must never be poisoned, since it is the only copy of what was not sent
/// yet.
class non_finite_gradient : public std::domain_error {
 public:
  non_finite_gradient(std::size_t layer, const std::string& name, const char* reason)
      : std::domain_error("layer " + std::to_string(layer) + " '" + name + "': " + reason), layer_(layer) {}
  /// Index of the layer whose gradient was refused.
  std::size_t layer() const noexcept { return layer_; }

 private:
  std::size_t layer_;
};

}  // namespace lamina

/// \cond
template <>
struct std::is_error_code_enum<lamina::frame_errc> : std::true_type {};
/// \endcond
