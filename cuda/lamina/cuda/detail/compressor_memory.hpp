// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/device_layout.hpp"
#include "lamina/cuda/detail/device_state.hpp"
#include "lamina/cuda/detail/pack.hpp"
#include "lamina/cuda/detail/search.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/selector.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// All device memory of a gradient_compressor but the pointers to its gradients, and what is computed once for it on the host.
/// L is the number of parts.
template <element T>
struct compressor_memory {
  /// For a model cut into parts, of one layer at least, and options that were checked, from a resource unless that is null. Throws
  /// out_of_memory, naming what it is for.
  compressor_memory(const partition& model, const compressor_options& options,
                    std::pmr::memory_resource* resource)
      : resource_(resource),
        largest_layer((std::ranges::max)(model.parts().sizes())),
        largest_frame_bytes(lamina::largest_frame_bytes<T>(model.parts(), options.payload)),
        tables(model.parts(), resource) {
    const layout& parts = model.parts();
    const std::size_t layers = parts.layers();
    residual.resize(tables.padded_elements());
    if (options.momentum > 0) velocity.resize(tables.padded_elements());
    values.resize(layers);
    left_out.resize(layers);
    is_clear.assign(layers, 1);
    held_before.resize(layers);
    if (!options.always_sent.empty()) always_sent = flags_of_always_sent(model, options);
    cleared_in.resize(layers);
    payload_begin.resize(layers);
    candidates.resize(2 * layers);
    if (options.payload != payload_type::as_is) rounded_in.resize(tables.blocks());
    prefix = prefix_of_frames(parts, options);
    warm_up = drop_ratios_in_warm_up(model.model(), options);
    step_state first;
    first.threshold = options.refresh.fixed_threshold().value_or(invalid_threshold);
    state.assign(1, first);
  }

  /// As kernels see it, without gradients.
  model_view<T> view() {
    auto at = tables.template view<T>();
    at.residual = residual.data().get();
    at.velocity = velocity.data().get();
    at.left_out = left_out.data().get();
    at.is_clear = is_clear.data().get();
    at.cleared_in = cleared_in.data().get();
    at.payload_begin = payload_begin.data().get();
    at.rounded_in = rounded_in.data().get();
    at.prefix = prefix.data().get();
    at.prefix_bytes = prefix.size();
    at.bitmap = reinterpret_cast<std::uint8_t*>(at.prefix) + lamina::detail::wire_header_bytes;
    at.state = state.data().get();
    return at;
  }

  /// What is saved of it.
  device_state<T> state_of_steps(const layout& parts, const compressor_options& options) {
    return {parts, tables, options, residual, velocity, is_clear, cleared_in, rounded_in, state};
  }

 private:
  std::pmr::memory_resource* resource_;

 public:
  std::size_t largest_layer;
  std::size_t largest_frame_bytes;
  device_layout tables;
  device_array<T> residual{resource_, "the residual"};
  device_array<T> velocity{resource_, "the velocity"};  // none without momentum
  device_array<double> values{resource_, "values"};
  device_array<unsigned long long> left_out{resource_, "counts"};
  device_array<std::uint8_t> is_clear{resource_, "flags"};
  device_array<std::uint8_t> always_sent{resource_, "flags"};  // none if no layer is
  device_array<std::uint8_t> held_before{resource_, "flags"};
  device_array<std::uint64_t> cleared_in{resource_, "ages"};
  device_array<std::size_t> payload_begin{resource_, "tables"};
  device_array<candidate> candidates{resource_, "tables"};
  device_array<std::uint64_t> rounded_in{resource_, "tables"};  // none where payloads are as_is
  device_array<std::byte> prefix{resource_, "the frame's header"};
  device_array<double> warm_up{resource_, "tables"};  // none without
  device_array<step_state> state{resource_, "the state of a step"};

 private:
  // By part.
  static std::vector<std::uint8_t> flags_of_always_sent(const partition& model,
                                                        const compressor_options& options) {
    std::vector<std::uint8_t> flags(model.parts().layers());
    for (const std::size_t layer : options.always_sent) {
      for (std::size_t part = model.first(layer); part < model.first(layer + 1); ++part) flags[part] = 1;
    }
    return flags;
  }

  // All of the header that does not change from step to step, and a bitmap of zeros.
  static std::vector<std::byte> prefix_of_frames(const layout& parts, const compressor_options& options) {
    lamina::detail::wire_header header;
    header.element_type = lamina::detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(frame_kind::gradients);
    header.sender = options.sender;
    header.run = options.run;
    header.fingerprint = parts.fingerprint();
    header.layers = parts.layers();
    header.payload_type = static_cast<std::uint8_t>(options.payload);
    std::vector<std::byte> bytes(lamina::detail::wire_header_bytes +
                                 lamina::detail::padded_bitmap_bytes(parts.layers()));
    lamina::detail::write_header(bytes, header);
    return bytes;
  }

  // By the CPU's text.
  static std::vector<double> drop_ratios_in_warm_up(const layout& model, const compressor_options& options) {
    std::vector<double> ratios;
    if (options.byte_budget || options.drop_ratio == 1) return ratios;  // R does not count, or does not grow
    const layer_selector selector(model, options);
    for (std::uint64_t step = 1; step < options.warm_up_steps; ++step)
      ratios.push_back(selector.drop_ratio_in(step));
    return ratios;
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
