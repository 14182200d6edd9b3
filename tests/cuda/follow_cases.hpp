// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_ptr.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/frame.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// A device and the CPU through the same steps.
namespace lamina_test {

/// Values, threshold, frame and residual of a device and of the CPU, over steps some of whose frames are lost.
template <class T, class G, class F = lamina::mean_abs, class Execution>
void follows_the_cpu(
    const Execution& execution, const std::vector<std::size_t>& sizes, lamina::compressor_options options,
    std::size_t steps, std::size_t skipped = 0,
    const std::function<void(std::size_t step, std::size_t layer, std::vector<G>&)>& change = {}) {
  const lamina::layout model = model_of(sizes);
  options.check = lamina::finite_check::each_element;
  options.sender = 3;
  options.run = 5;
  lamina::gradient_compressor<T, F> cpu(model, options);
  lamina::cuda::gradient_compressor<T, F> device(model, options);
  device_gradients<G> gradients(model, skipped);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  std::mt19937 random(7);
  for (std::size_t step = 1; step <= steps; ++step) {
    const std::string where = "in step " + std::to_string(step);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      auto gradient =
          random_gradient<G>(random, sizes[l], std::ldexp(1.0F, static_cast<int>(below(random, 6))));
      if (change) change(step, l, gradient);
      cpu.accumulate(l, gradient);
      gradients.set(l, gradient);
    }
    device.accumulate(execution);
    device.select(execution);
    device.encode(execution, buffer.bytes());
    const auto report = device.last_step(execution);
    std::vector<double> values(device.parts().layers());
    const thrust::device_ptr<double> device_values(device.values());
    thrust::copy(device_values, device_values + static_cast<std::ptrdiff_t>(values.size()), values.begin());
    require(same_bits(values, cpu.values()), "the values differ " + where);
    const auto expected = cpu.encode().to_bytes();
    require(same_bits(report.threshold, cpu.threshold()), "the thresholds differ " + where);
    require(report.step == cpu.step(), "the steps differ " + where);
    require(report.left_out_elements == cpu.residual().left_out_elements(),
            "other elements were left out " + where);
    auto bytes = buffer.to_host();
    require(same_bits(lamina::cuda::finish_frame(bytes), expected), "the frames differ " + where);
    if (step % 4 == 3) continue;  // this frame was lost
    cpu.commit();
    device.commit(execution);
    for (std::size_t part = 0; part < device.parts().layers(); ++part) {
      require(same_bits(device.residual(execution, part), cpu.residual()[part]),
              "the residuals of layer " + device.parts()[part].name + " differ " + where);
    }
  }
}

/// With every option, by name.
template <class T>
std::vector<std::pair<std::string, lamina::compressor_options>> all_options() {
  using options = lamina::compressor_options;
  std::vector<std::pair<std::string, options>> all;
  const auto add = [&](const std::string& name, const auto& set) {
    options each{.drop_ratio = 0.7};
    set(each);
    all.emplace_back(name, each);
  };
  add("drop ratio 0.7", [](options&) {});
  add("drop ratio 0", [](options& o) { o.drop_ratio = 0; });
  add("drop ratio 1", [](options& o) { o.drop_ratio = 1; });
  add("refresh every 3 steps", [](options& o) { o.refresh = lamina::refresh_schedule::every(3); });
  add("the first threshold kept",
      [](options& o) { o.refresh = lamina::refresh_schedule::every(~std::uint64_t{0}); });
  add("a fixed threshold", [](options& o) { o.refresh = lamina::refresh_schedule::fixed(8); });
  add("warm-up", [](options& o) { o.drop_ratio = 0.99, o.warm_up_steps = 5; });
  add("a budget of 20 %", [](options& o) { o.byte_budget = 0.2; });
  add("a budget of 1 %", [](options& o) { o.byte_budget = 0.01; });
  add("max_age 2", [](options& o) { o.drop_ratio = 0.95, o.max_age = 2; });
  add("a budget and max_age, which overdraws it", [](options& o) { o.byte_budget = 0.01, o.max_age = 2; });
  add("parts of 4,096", [](options& o) { o.part_elements = 4096; });
  add("momentum", [](options& o) { o.momentum = 0.9; });
  add("payload float16", [](options& o) { o.payload = lamina::payload_type::float16; });
  add("payload bfloat16", [](options& o) { o.payload = lamina::payload_type::bfloat16; });
  add("payload int8 and momentum",
      [](options& o) { o.payload = lamina::payload_type::int8, o.momentum = 0.5; });
  add("payload int4", [](options& o) { o.payload = lamina::payload_type::int4; });
  return all;
}

}  // namespace lamina_test
