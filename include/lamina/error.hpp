// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/visible.hpp"

/// What goes wrong. Bytes from outside, frames and saved states, are refused with an errc. Mistakes of the caller throw
/// std::invalid_argument, std::out_of_range or std::logic_error. A gradient that is refused is a result: worker.hpp.
namespace lamina::inline LAMINA_ABI {

/// Why bytes were refused.
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
};

namespace detail {

class LAMINA_VISIBLE error_category final : public std::error_category {
 public:
  const char* name() const noexcept override { return "lamina"; }
  std::string message(int code) const override {
    // In the order of errc.
    constexpr const char* messages[] = {
        "bytes are missing",
        "not of lamina (bad magic)",
        "unsupported format version",
        "holds another element type",
        "an unknown flag, or an impossible number in the header",
        "belongs to another model (layout fingerprint differs)",
        "bytes follow the end",
        "checksum mismatch: damaged",
        "frame is of an unknown kind",
        "frame has an unknown payload type",
        "presence bit set beyond the last layer or for an empty layer",
        "payload size does not match the present layers",
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
    };
    return code > 0 && code <= static_cast<int>(std::size(messages)) ? messages[code - 1] : "unknown error";
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

/// Thrown when a gradient holds NaN or infinity, or when adding it would overflow the residual, which is as it was: it is the only copy
/// of what was not sent yet.
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
