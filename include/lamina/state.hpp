// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/residual.hpp"
#include "lamina/selector.hpp"
#include "lamina/state/format.hpp"
#include "lamina/tensor.hpp"

/// A worker's memory as bytes, for a trainer's checkpoint: residual, velocity, threshold, ages, allowance and step; and of steps
/// that are not decided at their end what the next one is decided by. What was lost on the way is residual, and saved as such; how
/// often in a row it was lost is not, and counts from 0 again.
namespace lamina::inline LAMINA_ABI {

namespace detail {

// A frame that was encoded and not committed counts as lost; gradients that wait to be encoded would be.
inline void check_between_steps(step_phase phase, std::uint64_t step) {
  if (phase == step_phase::committed || phase == step_phase::encoded) return;
  raise(std::logic_error("save: step " + std::to_string(step) + " has gradients that were not encoded yet"));
}

}  // namespace detail

/// The memory of a worker after step `step`, as bytes: 64, 8 a layer, or 16 unless steps are decided at their end, and the
/// residual and velocity in T. Cost: one read and one copy. gradient_compressor::save() calls it.
template <element T>
std::vector<std::byte> save_state(const residual_accumulator<T>& residual,
                                  const layer_selector::memory& memory, std::uint64_t step) {
  return detail::write_state<T>(residual.model(), memory, residual.elements(), residual.velocity(), step);
}

/// The same of a residual that lies elsewhere, on a device or in a framework's tensors: flat, of `parts.elements()` elements,
/// and as much velocity or none. Throws std::invalid_argument for other sizes, and
/// std::domain_error, naming the layer, for NaN or infinity.
template <element T>
std::vector<std::byte> save_state(const layout& parts, const layer_selector::memory& memory,
                                  std::span<const T> residual, std::span<const T> velocity,
                                  std::uint64_t step) {
  if (residual.size() != parts.elements() || (!velocity.empty() && velocity.size() != parts.elements()) ||
      memory.cleared_in.size() != parts.layers()) {
    detail::raise(std::invalid_argument("save: a residual of " + std::to_string(residual.size()) +
                                        " elements, a velocity of " + std::to_string(velocity.size()) +
                                        " and ages of " + std::to_string(memory.cleared_in.size()) +
                                        " layers, where the model has " + std::to_string(parts.elements()) +
                                        " elements in " + std::to_string(parts.layers()) + " layers"));
  }
  detail::check_savable(parts, residual, "residual");
  detail::check_savable(parts, velocity, "velocity");
  return detail::write_state<T>(parts, memory, residual, velocity, step);
}

/// What such a state holds.
template <element T>
struct saved_state {
  layer_selector::memory memory;
  std::vector<T> residual;  ///< flat
  std::vector<T> velocity;  ///< empty without momentum
  std::uint64_t step = 0;
};

/// Reads a state without a residual_accumulator to take it. Errors as load_state.
///
/// `with_momentum` says whether it must hold velocity, or must not; `timing` when the steps were decided, if not whenever.
template <element T>
[[nodiscard]] saved_state<T> read_state(std::span<const std::byte> bytes, const layout& parts,
                                        bool with_momentum,
                                        std::optional<decision_timing> timing = std::nullopt) {
  const detail::state_view state =
      detail::read_state<T>(bytes, parts, {.has_velocity = with_momentum, .timing = timing}, "saved state");
  saved_state<T> saved{state.memory(), detail::values_of<T>(state.elements),
                       detail::values_of<T>(state.velocity), state.header.step};
  const auto is_finite = [](const std::vector<T>& numbers) {
    return detail::is_finite_magnitude(
        detail::largest_magnitude<T>(numbers.size(), detail::read_only<T>{numbers.data()}));
  };
  if (!is_finite(saved.residual) || !is_finite(saved.velocity))
    detail::raise(std::invalid_argument("the saved residual holds NaN or infinity"));
  return saved;
}

/// Puts the saved memory back and returns the step. Throws decode_error, and changes nothing, with the state_errc that
/// says why; std::invalid_argument for numbers that are not finite.
template <element T>
std::uint64_t load_state(std::span<const std::byte> bytes, residual_accumulator<T>& residual,
                         layer_selector& selector) {
  const detail::state_view state = detail::read_state<T>(
      bytes, residual.model(), {.has_velocity = residual.has_velocity(), .timing = selector.timing()},
      "saved state");
  layer_selector::memory memory = state.memory();
  residual.restore(detail::values_of<T>(state.elements), detail::values_of<T>(state.velocity));
  selector.restore(std::move(memory));
  return state.header.step;
}

}  // namespace lamina::inline LAMINA_ABI
