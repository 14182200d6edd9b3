// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_vector.h>

#include <cstddef>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/frame.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// Steps whose launches do the work of several calls.
namespace lamina_test {

/// Beside the CPU, over steps of one to three pieces whose frames arrive or get lost: what has arrived is committed by itself
/// or with the first piece, and the step is decided by itself or with the last one.
template <class T, class G, class F = lamina::mean_abs, class Execution>
void together_follows_the_cpu(const Execution& execution, lamina::compressor_options options,
                              std::size_t steps, const std::vector<std::size_t>& sizes = telling_sizes()) {
  const lamina::layout model = model_of(sizes);
  options.non_finite = lamina::non_finite::skip;
  lamina::gradient_compressor<T, F> cpu(model, options);
  lamina::cuda::gradient_compressor<T, F> device(model, options);
  device_gradients<G> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  std::mt19937 random(17);
  bool commits = false;  // with the next gradients
  for (std::size_t step = 1; step <= steps; ++step) {
    const bool selects = below(random, 4) > 0;
    std::string how = " in step " + std::to_string(step) + (commits ? ", which commits" : "");
    if (commits) cpu.commit();
    for (std::size_t piece = below(random, 3);; --piece) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        auto gradient = random_gradient<G>(random, model.sizes()[l], 1);
        if constexpr (!lamina::half_element<G>) {
          using limits = std::numeric_limits<G>;
          for (const G bad : {limits::quiet_NaN(), limits::infinity(), limits::max(), -limits::max()}) {
            if (gradient.size() > 4000 && below(random, 4) == 0)
              gradient[below(random, gradient.size())] = bad;
          }
        }
        gradients.set(l, gradient);
        cpu.accumulate(l, gradient);
      }
      device.accumulate(execution,
                        {.commit = std::exchange(commits, false), .select = selects && piece == 0});
      execution.wait();
      if (piece == 0) break;
      how += ", in pieces";
    }
    if (!selects) device.select(execution);
    std::vector<double> values(device.parts().layers());
    const thrust::device_ptr<double> device_values(device.values());
    thrust::copy(device_values, device_values + static_cast<std::ptrdiff_t>(values.size()), values.begin());
    require(same_bits(values, cpu.values()), "the values differ" + how);
    device.encode(execution, buffer.bytes());
    const auto report = device.last_step(execution);
    const auto expected = cpu.encode().to_bytes();
    require(same_bits(report.threshold, cpu.threshold()), "the thresholds differ" + how);
    require(report.left_out_elements == cpu.residual().left_out_elements(),
            "other elements were left out" + how);
    auto bytes = buffer.to_host();
    require(same_bits(lamina::cuda::finish_frame(bytes), expected), "the frames differ" + how);
    for (std::size_t part = 0; part < device.parts().layers(); ++part) {
      require(same_bits(device.residual(execution, part), cpu.residual()[part]),
              "the residuals of layer " + device.parts()[part].name + " differ" + how);
    }
    const std::size_t fate = below(random, 4);  // 0: lost
    commits = fate > 1;
    if (fate == 1) {
      cpu.commit();
      device.commit(execution);
    }
  }
}

template <class Execution>
void for_each_together_case(const Execution& execution, const visitor& visit) {
  using lamina::payload_type;
  const lamina::compressor_options plain{.drop_ratio = 0.7};
  const lamina::compressor_options heavy{.drop_ratio = 0.7, .momentum = 0.9};
  visit("together, double", [&] { together_follows_the_cpu<double, double>(execution, plain, 8); });
  visit("together, double, momentum", [&] { together_follows_the_cpu<double, double>(execution, heavy, 8); });
  visit("together, double, payload int8 and momentum", [&] {
    together_follows_the_cpu<double, double>(
        execution, {.drop_ratio = 0.7, .momentum = 0.9, .payload = payload_type::int8}, 8);
  });
  visit("together, double, payload float16", [&] {
    together_follows_the_cpu<double, double>(execution, {.drop_ratio = 0.7, .payload = payload_type::float16},
                                             8);
  });
  visit("together, gradients of float16",
        [&] { together_follows_the_cpu<float, lamina::float16>(execution, heavy, 8); });
  visit("together, gradients of bfloat16, residual of double",
        [&] { together_follows_the_cpu<double, lamina::bfloat16>(execution, plain, 8); });
  visit("together, l2_norm",
        [&] { together_follows_the_cpu<float, float, lamina::l2_norm>(execution, plain, 8); });
  for (const std::size_t layers : {1024U, 1025U}) {
    visit("together, " + std::to_string(layers) + " layers", [&, layers] {
      together_follows_the_cpu<float, float>(execution, plain, 3, std::vector<std::size_t>(layers, 3));
    });
  }
  visit("together, max_abs",
        [&] { together_follows_the_cpu<double, double, lamina::max_abs>(execution, heavy, 8); });
}

}  // namespace lamina_test
