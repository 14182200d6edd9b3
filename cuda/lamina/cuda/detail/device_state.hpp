// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/fill.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/device_layout.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selector.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"

/// A device's memory of its steps as the bytes of state.hpp, by way of the host: what is on the device is laid out another way,
/// each layer beginning at a row, and the bytes are written and read by the CPU's text.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// What a state is made of, on the device.
template <element T>
struct device_state {
  const layout& parts;
  const device_layout& tables;
  const compressor_options& options;
  device_array<T>& residual;
  device_array<T>& velocity;  // none without momentum
  device_array<std::uint8_t>& is_clear;
  device_array<std::uint64_t>& cleared_in;
  device_array<std::uint64_t>& rounded_in;
  device_array<step_state>& state;

  /// Once all that was launched is done.
  std::vector<std::byte> save() const {
    const step_state now = state[0];
    const auto phase = now.load_phase();
    // A step is counted when it is selected.
    lamina::detail::check_between_steps(phase, now.step + (phase == step_phase::accumulating ? 1 : 0));
    std::vector<std::uint8_t> clear(is_clear.size());
    thrust::copy(is_clear.begin(), is_clear.end(), clear.begin());
    layer_selector::memory memory;
    memory.threshold = now.threshold;
    memory.allowance = options.byte_budget ? now.allowance : 0;
    memory.cleared_in.resize(cleared_in.size());
    thrust::copy(cleared_in.begin(), cleared_in.end(), memory.cleared_in.begin());
    const std::vector<T> elements = to_host(residual, [&](std::size_t part) { return clear[part] != 0; });
    const std::vector<T> moving = to_host(velocity, [](std::size_t) { return false; });
    return save_state<T>(parts, memory, elements, moving, now.step);
  }

  /// Once all that was launched is done. All is read and checked before the first of it is written.
  void load(std::span<const std::byte> bytes) const {
    const saved_state<T> saved = read_state<T>(bytes, parts, !velocity.empty(), decision_timing::at_end);
    // Which threshold and allowance go on, the CPU's selector says.
    compressor_options of_parts = options;
    of_parts.always_sent.clear();  // indices of layers, which threshold and allowance do not depend on
    layer_selector selector(parts, of_parts);
    selector.restore(saved.memory);
    const layer_selector::memory memory = selector.remember();
    step_state next = state[0];
    next.step = saved.step;
    next.threshold = memory.threshold;
    next.allowance = memory.allowance;
    next.sent_elements = 0;
    next.payload_bytes = 0;
    next.store_phase(step_phase::committed);
    next.has_frame = 0;
    next.is_refused = 0;
    std::vector<T> rows(tables.padded_elements());
    to_device(saved.residual, residual, rows);
    if (!velocity.empty()) to_device(saved.velocity, velocity, rows);
    thrust::fill(is_clear.begin(), is_clear.end(), std::uint8_t{0});
    thrust::copy(memory.cleared_in.begin(), memory.cleared_in.end(), cleared_in.begin());
    // Steps are counted from another one on: none of them is rounded yet.
    thrust::fill(rounded_in.begin(), rounded_in.end(), std::uint64_t{0});
    state[0] = next;
  }

 private:
  // One part behind the other; zeros where is_zero(part).
  template <class IsZero>
  std::vector<T> to_host(const device_array<T>& from, const IsZero& is_zero) const {
    std::vector<T> elements(from.size());
    if (from.empty()) return elements;
    thrust::copy(from.begin(), from.end(), elements.begin());
    auto to = elements.begin();
    for (std::size_t part = 0; part < parts.layers(); ++part) {
      const auto begin = elements.begin() + static_cast<std::ptrdiff_t>(tables.offset(part));
      const auto size = static_cast<std::ptrdiff_t>(parts.sizes()[part]);
      // Never beyond where it is read.
      to = is_zero(part) ? std::fill_n(to, size, T(0)) : std::copy(begin, begin + size, to);
    }
    elements.erase(to, elements.end());
    return elements;
  }

  void to_device(const std::vector<T>& elements, device_array<T>& to, std::vector<T>& rows) const {
    auto from = elements.begin();
    for (std::size_t part = 0; part < parts.layers(); ++part) {
      const auto size = static_cast<std::ptrdiff_t>(parts.sizes()[part]);
      std::copy(from, from + size, rows.begin() + static_cast<std::ptrdiff_t>(tables.offset(part)));
      from += size;
    }
    thrust::copy(rows.begin(), rows.end(), to.begin());
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
