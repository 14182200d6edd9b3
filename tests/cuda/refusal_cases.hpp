// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/device_vector.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/frame.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// Gradients that are scaled, and refused, by words in device memory.
namespace lamina_test {

/// Some batches are refused, also pieces of a step, and all are scaled: what is left is what the CPU does that never got the
/// refused ones. The launches of a step are recorded once: what the host does not know yet lies in device memory alone.
template <class T, class G, class Execution>
void refused_batches_were_never_given(const Execution& execution, lamina::compressor_options options,
                                      bool by_one_launch, std::size_t pieces) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  options.non_finite = lamina::non_finite::skip;
  lamina::gradient_compressor<T> cpu(model, options);
  lamina::cuda::gradient_compressor<T> device(model, options);
  device_gradients<G> gradients(model, 1);
  device.bind(execution, gradients.tensors());
  thrust::device_vector<float> found_inf(1);
  thrust::device_vector<float> inverse_scale(1);
  const frame_buffer buffer(device.largest_frame_bytes());
  const lamina::cuda::accumulate_options plain = {.found_inf = address_of(found_inf),
                                                  .inverse_scale = address_of(inverse_scale)};
  auto also = plain;
  also.commit = also.select = by_one_launch;
  const auto send = [&](const auto& by) {
    if (!by_one_launch) device.select(by);
    device.encode(by, buffer.bytes());
  };
  std::mt19937 random(31);
  const recording first(execution);
  device.accumulate(first, plain);
  device.select(first);
  device.encode(first, buffer.bytes());
  const recording piece(execution);
  device.accumulate(piece, also);
  const recording end(execution);
  send(end);
  const recording commit(execution);
  device.commit(commit);

  std::uint64_t refused = 0;
  bool has_begun = false;  // a step of the CPU's since its last commit
  bool has_sent = false;   // and it was encoded
  std::vector<std::uint64_t> left_out(model.layers());
  for (int round = 1; round <= 14; ++round) {
    const std::string where = "in round " + std::to_string(round);
    for (std::size_t k = 0; k < pieces; ++k) {
      const bool is_refused = below(random, 3) == 0;
      const float scale = round % 3 == 0 ? 1.0F : 1 / static_cast<float>(1 + below(random, 70'000));
      found_inf[0] = is_refused ? static_cast<float>(1 + below(random, 2)) : 0.0F;
      inverse_scale[0] = scale;
      // One launch commits what the round before has sent.
      if (by_one_launch && has_sent) cpu.commit();
      if (by_one_launch && has_sent) has_begun = false;
      has_sent = false;
      for (std::size_t l = 0; l < model.layers(); ++l) {
        auto gradient = random_gradient<G>(random, model.sizes()[l], 3);
        if constexpr (!lamina::half_element<G>) {
          if (gradient.size() > 60) {
            gradient[below(random, 30)] = std::numeric_limits<G>::infinity();
            gradient[30 + below(random, 30)] = std::numeric_limits<G>::quiet_NaN();
            if (!is_refused) left_out[l] += 2;
          }
        }
        gradients.set(l, gradient);
        if (!is_refused) cpu.accumulate(l, gradient, scale);
      }
      refused += is_refused ? 1 : 0;
      has_begun |= !is_refused;
      (round == 1 && by_one_launch ? first : piece).replay();
      execution.wait();  // for what is written next
    }
    if (!(round == 1 && by_one_launch)) end.replay();
    const auto report = device.last_step(execution);
    require(report.refused_batches == refused, "another number of batches was refused " + where);
    require(report.is_refused == !has_begun, "a step has begun or not, " + where);
    require(report.step == cpu.step(), "the steps differ " + where);
    require(device.left_out_elements(execution) == left_out, "other elements were left out " + where);
    require(report.left_out_elements == std::accumulate(left_out.begin(), left_out.end(), std::uint64_t{0}),
            "another number of elements was left out " + where);
    auto bytes = buffer.to_host();
    if (has_begun) {
      require(same_bits(lamina::cuda::finish_frame(bytes), cpu.encode().to_bytes()),
              "the frames differ " + where);
      has_sent = true;
    } else {
      require(report.payload_bytes == 0 && report.sent_elements == 0, "something was sent " + where);
      require(contains(message_of<lamina::decode_error>([&] { lamina::cuda::finish_frame(bytes); }), "magic"),
              "there is a frame of refused gradients " + where);
    }
    const std::vector<double> values(
        thrust::device_ptr<double>(device.values()),
        thrust::device_ptr<double>(device.values()) + static_cast<std::ptrdiff_t>(model.layers()));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const double value = lamina::mean_abs{}(cpu.residual()[l]);
      require(same_bits(values[l], value), "a value is not that of its residual " + where);
    }
    if (!by_one_launch && round % 4 != 3) {
      commit.replay();  // where nothing was sent, of nothing
      if (has_sent) cpu.commit();
      has_begun = has_sent = false;
    }
    require(same_bits(device.save(execution), cpu.save()), "the states differ " + where);
  }
  require(refused > 2, "nothing was refused");
}

/// Where nothing was given to the device, nothing leaves it: not over the gradients, not out of the residual.
template <class Execution>
void refused_steps_do_nothing(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000});
  lamina::cuda::gradient_compressor<float> device(model, {.drop_ratio = 0.5});
  device_gradients<float> gradients(model, 0);
  gradients.set(1, std::vector<float>(5000, 2.0F));
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto* const payload = buffer.bytes().data() + device.prefix_bytes();
  const thrust::device_vector<float> found_inf = std::vector{1.0F};
  const lamina::cuda::accumulate_options refused = {.found_inf = address_of(found_inf)};
  const auto saved = device.save(execution);
  device.accumulate(execution, refused);
  device.accumulate(execution, refused);
  device.select(execution);
  device.encode(execution, buffer.bytes());
  device.restore(execution, payload);
  device.commit(execution);
  require(device.last_step(execution).is_refused, "a refused step has begun");
  require(gradients.get(1) == std::vector<float>(5000, 2.0F), "restore() wrote over refused gradients");
  require(same_bits(device.save(execution), saved), "a refused step has changed something");
  // The next is the first.
  device.accumulate(execution);
  device.select(execution);
  device.encode(execution, buffer.bytes());
  device.commit(execution);
  const auto report = device.last_step(execution);
  require(report.step == 1 && !report.is_refused && report.sent_elements == 5000, "no step came after it");
  // What is out of order is told again.
  const recording late(execution);
  device.accumulate(execution);
  device.select(execution);
  device.encode(execution, buffer.bytes());
  device.commit(late);
  late.replay();
  late.replay();
  require(contains(message_of<std::logic_error>([&] { (void)device.last_step(execution); }), "twice"),
          "a commit out of order was not told");
}

/// A scale that is not finite leaves out every element, and counts none that the gradient does not have.
template <class T, class Execution>
void counts_what_a_scale_leaves_out(const Execution& execution) {
  const lamina::layout model = model_of({1, 0, 2, 63, 65, 4097, 9003});
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const double momentum : {0.0, 0.5}) {
      lamina::cuda::gradient_compressor<T> device(model, {.momentum = momentum});
      device_gradients<T> gradients(model, 0);
      device.bind(execution, gradients.tensors());
      const thrust::device_vector<float> inverse_scale = std::vector{scale};
      device.accumulate(execution, {.inverse_scale = address_of(inverse_scale)});
      const std::vector<std::uint64_t> all(model.sizes().begin(), model.sizes().end());
      require(device.left_out_elements(execution) == all, "another number of elements was left out");
    }
  }
}

template <class Execution>
void for_each_refusal_case(const Execution& execution, const visitor& visit) {
  const auto refuse = [&](const std::string& name, const lamina::compressor_options& options) {
    for (const bool by_one_launch : {false, true}) {
      visit("refused batches, " + name + (by_one_launch ? ", by one launch" : ""),
            [&, options, by_one_launch] {
              refused_batches_were_never_given<float, float>(execution, options, by_one_launch, 1);
              refused_batches_were_never_given<double, lamina::float16>(execution, options, by_one_launch, 1);
            });
    }
    visit("refused pieces, " + name, [&, options] {
      refused_batches_were_never_given<float, lamina::bfloat16>(execution, options, false, 3);
      refused_batches_were_never_given<double, double>(execution, options, false, 2);
    });
  };
  refuse("drop ratio 0.7", {.drop_ratio = 0.7});
  refuse("momentum", {.drop_ratio = 0.7, .momentum = 0.9});
  refuse("a budget, payload int8", {.byte_budget = 0.2, .payload = lamina::payload_type::int8});
  visit("a scale that is not finite", [&] {
    counts_what_a_scale_leaves_out<float>(execution);
    counts_what_a_scale_leaves_out<double>(execution);
  });
  visit("refused steps do nothing", [&] { refused_steps_do_nothing(execution); });
}

}  // namespace lamina_test
