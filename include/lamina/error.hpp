// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/visible.hpp"

/// Errors come in two kinds.
///
/// A caller's mistake (a wrong size, an index out of range, a call out of order, a gradient that holds NaN)
/// throws std::invalid_argument, std::out_of_range or std::logic_error, or a class derived from one of them,
/// before anything is written. Bytes from outside give a `frame_errc`, or a `state_errc` where they are a saved state, thrown as
/// decode_error or returned as std::error_code, and change nothing either.
///
/// Calls that take a std::error_code throw for neither: it is set to a `frame_errc`, or to an `errc` where the others
/// throw, and cleared when all went well.
namespace lamina::inline LAMINA_ABI {

/// Why a frame was refused. 0 is success, as std::error_code wants it.
enum class frame_errc {
  truncated = 1,         ///< fewer bytes than the header, the bitmap or the payload needs
  bad_magic,             ///< not a lamina frame at all
  unsupported_version,   ///< written by a version of the format that this library does not read
  wrong_element_type,    ///< for example a frame of double where float is expected
  unknown_kind,          ///< neither gradients, parameters nor updates
  unknown_payload_type,  ///< elements written in a way that this version does not know
  nonzero_reserved,      ///< a flag or a reserved byte that this version does not define is set
  wrong_layout,          ///< the fingerprint or the number of layers is that of another model
  bad_presence,          ///< a presence bit beyond the last layer, or of an empty layer
  bad_payload_size,      ///< the payload is not as long as the present layers are
  trailing_bytes,        ///< bytes after the end of the frame
  checksum_mismatch,     ///< the frame was damaged on its way
  misaligned_buffer,     ///< the bytes do not start at a multiple of the element's alignment
  unexpected_kind,       ///< a parameter frame where a gradient frame belongs, or the other way round
  unexpected_step,       ///< a frame of another step: late, early or replayed
  unknown_sender,        ///< a sender outside [0, senders)
  duplicate_sender,      ///< a second frame of one sender in the same step
  other_run,             ///< a frame of another run: from before a restart, or of a job beside this one
  unexpected_part,       ///< not the next part of its sender's step, or a part where a whole frame belongs
  duplicate_layer,       ///< a layer that an earlier part of the step has decided already
  bad_decided,           ///< what a part says is decided cannot be: see docs/wire-format/reading.md
};

namespace detail {

class LAMINA_VISIBLE frame_error_category final : public std::error_category {
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
      case frame_errc::other_run:
        return "frame belongs to another run";
      case frame_errc::unexpected_part:
        return "frame is not the next part of its sender's step";
      case frame_errc::duplicate_layer:
        return "part holds a layer that an earlier part of the step has decided";
      case frame_errc::bad_decided:
        return "part says of layers that they are decided which cannot be";
    }
    return "unknown frame error";
  }
};

}  // namespace detail

/// The category of frame_errc: "lamina.frame".
[[nodiscard]] LAMINA_VISIBLE inline const std::error_category& frame_category() noexcept {
  static const detail::frame_error_category category;
  return category;
}

[[nodiscard]] inline std::error_code make_error_code(frame_errc code) noexcept {
  return {static_cast<int>(code), frame_category()};
}

/// Why a saved state was refused.
enum class state_errc {
  truncated = 1,        ///< fewer bytes than the header, the ages or the numbers need
  bad_magic,            ///< not a saved state at all
  unsupported_version,  ///< written by a version of the format that this library does not read
  wrong_element_type,   ///< for example a state of double where float is expected
  nonzero_reserved,     ///< a flag that this version does not define is set
  wrong_layout,         ///< the fingerprint, the number of layers or of elements is that of another model
  other_momentum,       ///< it holds velocity and there is no momentum here, or the other way round
  trailing_bytes,       ///< bytes after the end of the state
  checksum_mismatch,    ///< the state was damaged
  impossible_age,       ///< a layer was sent, or waits since, a step later than the one that the state is of
  other_timing,         ///< its steps were decided at another time: see decision_timing
};

namespace detail {

class LAMINA_VISIBLE state_error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina.state"; }
  std::string message(int code) const override {
    switch (static_cast<state_errc>(code)) {
      case state_errc::truncated:
        return "state is truncated";
      case state_errc::bad_magic:
        return "not a saved state of lamina (bad magic)";
      case state_errc::unsupported_version:
        return "state has an unsupported format version";
      case state_errc::wrong_element_type:
        return "state holds another element type";
      case state_errc::nonzero_reserved:
        return "state has an unknown flag set";
      case state_errc::wrong_layout:
        return "state belongs to another model (layout fingerprint differs)";
      case state_errc::other_momentum:
        return "state holds velocity where there is no momentum, or none where there is: set momentum as it "
               "was "
               "saved";
      case state_errc::trailing_bytes:
        return "bytes follow the end of the state";
      case state_errc::checksum_mismatch:
        return "checksum mismatch: the state was damaged";
      case state_errc::impossible_age:
        return "state says that a layer was sent in a step after its own";
      case state_errc::other_timing:
        return "state is of steps that were decided at another time: set decide as it was saved";
    }
    return "unknown state error";
  }
};

}  // namespace detail

/// The category of state_errc: "lamina.state".
[[nodiscard]] LAMINA_VISIBLE inline const std::error_category& state_category() noexcept {
  static const detail::state_error_category category;
  return category;
}

[[nodiscard]] inline std::error_code make_error_code(state_errc code) noexcept {
  return {static_cast<int>(code), state_category()};
}

/// What a call that takes a std::error_code says of a caller's mistake, or of a gradient that it refuses; the same call
/// without one throws an exception whose sentence has the details.
enum class errc {
  no_such_layer = 1,   ///< an index beyond the last layer
  wrong_size,          ///< a tensor has another number of elements than its layer
  wrong_element_type,  ///< a tensor holds another element type than can be taken
  wrong_count,         ///< another number of tensors, values or flags than there are layers, or parts
  non_finite,          ///< a gradient holds NaN or infinity
  overflow,            ///< adding the gradient would overflow the residual
  out_of_order,        ///< the step has not come so far, or is beyond it
  no_gradient,  ///< a layer has no gradient yet in this step, or a tensor that is to be accumulated is not there
  bad_tensor,    ///< a tensor cannot be read where it lies
  other_layout,  ///< made for another model
  bad_argument,  ///< a number outside its range
};

namespace detail {

class LAMINA_VISIBLE error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina"; }
  std::string message(int code) const override {
    switch (static_cast<errc>(code)) {
      case errc::no_such_layer:
        return "there is no such layer";
      case errc::wrong_size:
        return "a tensor has another number of elements than its layer";
      case errc::wrong_element_type:
        return "a tensor holds an element type that cannot be taken";
      case errc::wrong_count:
        return "another number of tensors or values than there are layers";
      case errc::non_finite:
        return "the gradient holds NaN or infinity";
      case errc::overflow:
        return "adding the gradient would overflow the residual";
      case errc::out_of_order:
        return "the call is out of order in this step";
      case errc::no_gradient:
        return "a layer has no gradient yet in this step";
      case errc::bad_tensor:
        return "a tensor cannot be read where it lies";
      case errc::other_layout:
        return "made for another layout";
      case errc::bad_argument:
        return "a number is outside its range";
    }
    return "unknown error";
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

namespace detail {

// error_code compares categories by address. A plugin that was loaded by itself may have one of its own all the same, and
// another version or configuration of the library has: its codes mean the same, and the category has the same name.
inline bool is_error(const std::error_code& error, int value, const std::error_category& category) noexcept {
  return error.value() == value &&
         (error.category() == category || std::string_view(error.category().name()) == category.name());
}

}  // namespace detail

/// `error == frame_errc::truncated` holds whichever shared object of the process the error comes from.
[[nodiscard]] inline bool operator==(const std::error_code& error, frame_errc code) noexcept {
  return detail::is_error(error, static_cast<int>(code), frame_category());
}
[[nodiscard]] inline bool operator==(const std::error_code& error, state_errc code) noexcept {
  return detail::is_error(error, static_cast<int>(code), state_category());
}
[[nodiscard]] inline bool operator==(const std::error_code& error, errc code) noexcept {
  return detail::is_error(error, static_cast<int>(code), category());
}

/// Thrown when bytes from outside are not an acceptable frame, or saved state; `code()` says why and compares with
/// frame_errc, or state_errc.
class LAMINA_VISIBLE decode_error : public std::system_error {
 public:
  using std::system_error::system_error;
};

/// Thrown when a gradient holds NaN or infinity, or when adding it would overflow the residual. The residual
/// is as it was. Source: the residual must never be poisoned, since it is the only copy of what was not sent
/// yet.
class LAMINA_VISIBLE non_finite_gradient : public std::domain_error {
 public:
  /// \param layer   in the model
  /// \param part    among what is decided on: the same where layers are whole
  /// \param name    of the layer
  /// \param reason  what was found
  non_finite_gradient(std::size_t layer, std::size_t part, const std::string& name, const char* reason)
      : std::domain_error("layer " + std::to_string(layer) + " '" + name + "': " + reason),
        layer_(layer),
        part_(part) {}
  /// Index in the model of the layer whose gradient was refused.
  [[nodiscard]] std::size_t layer() const noexcept { return layer_; }
  /// Index among gradient_compressor::parts() of the part in which the first bad element is; the layer's own where layers are
  /// whole.
  [[nodiscard]] std::size_t part() const noexcept { return part_; }

 private:
  std::size_t layer_;
  std::size_t part_;
};

}  // namespace lamina::inline LAMINA_ABI

/// \cond
template <>
struct std::is_error_code_enum<lamina::frame_errc> : std::true_type {};
template <>
struct std::is_error_code_enum<lamina::state_errc> : std::true_type {};
template <>
struct std::is_error_code_enum<lamina::errc> : std::true_type {};
/// \endcond
