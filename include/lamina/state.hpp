// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/residual.hpp"
#include "lamina/selector.hpp"
#include "lamina/state/format.hpp"
#include "lamina/tensor.hpp"

/// A worker's memory as bytes, for a trainer's checkpoint: residual, velocity, threshold, ages, allowance and step.
namespace lamina::inline LAMINA_ABI {

/// The memory of a worker after step `step`, as bytes: 64, 8 a layer, and the residual and velocity in T. Cost: one copy.
/// gradient_compressor::save() calls it.
template <element T>
std::vector<std::byte> save_state(const residual_accumulator<T>& residual,
                                  const layer_selector::memory& memory, std::uint64_t step) {
  return detail::write_state<T>(residual.model(), memory, residual.elements(), residual.velocity(), step);
}

/// Puts the saved memory back and returns the step. Throws decode_error, and changes nothing, with the frame_errc that
/// says why; std::invalid_argument for numbers that are not finite.
template <element T>
std::uint64_t load_state(std::span<const std::byte> bytes, residual_accumulator<T>& residual,
                         layer_selector& selector) {
  const detail::state_view state =
      detail::read_state<T>(bytes, residual.model(), !residual.velocity().empty(), "saved state");
  layer_selector::memory memory{state.header.threshold, state.header.allowance,
                                detail::values_of<std::uint64_t>(state.cleared_in)};
  residual.restore(detail::values_of<T>(state.elements), detail::values_of<T>(state.velocity));
  selector.restore(std::move(memory));
  return state.header.step;
}

}  // namespace lamina::inline LAMINA_ABI
