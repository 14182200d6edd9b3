// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/device_vector.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// Layers whose value is NaN, that are always sent, and that are held.
namespace lamina_test {

/// Which layers a frame of this step holds, '1' for each that is sent.
template <class T, class F, class Execution>
std::string sent_layers(lamina::cuda::worker<T, F>& device, const Execution& execution) {
  const auto bytes = frame_of(device, execution, frame_buffer(device.largest_frame_bytes()));
  const auto frame = lamina::decode<T>(bytes, device.fragments());
  std::string sent;
  for (std::size_t f = 0; f < device.fragments().layers(); ++f) sent += frame.is_dropped(f) ? '0' : '1';
  return sent;
}

inline std::string sent_layers(const lamina::selection& chosen) {
  std::string sent;
  for (std::size_t l = 0; l < chosen.model().layers(); ++l) sent += chosen.is_sent(l) ? '1' : '0';
  return sent;
}

inline void require_same(const std::string& sent, const std::string& expected, const std::string& where) {
  require(sent == expected, "sent is " + sent + " and not " + expected + where);
}

/// The first step of `options` as literally as can be: layers in order of their value, one after the other, of equal
/// ones the first in the model.
inline std::string literal_decision(const std::vector<double>& values, const std::vector<std::size_t>& sizes,
                                    const std::vector<std::uint8_t>& held,
                                    const std::vector<std::uint8_t>& always,
                                    const lamina::worker_options& options, double& threshold) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::size_t layers = values.size();
  const double elements = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}));
  const auto value = [&](std::size_t l) { return values[l] != values[l] ? infinity : values[l]; };
  std::vector<std::size_t> order(layers);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<char> goes(layers);
  if (!options.send_budget) {
    const auto searched = [&](std::size_t l) {
      return held[l] != 0 ? -infinity : always[l] != 0 ? infinity : value(l);
    };
    std::ranges::stable_sort(order, {}, searched);
    threshold = -1;
    double sum = 0;
    for (const std::size_t l : order) {
      sum += static_cast<double>(sizes[l]);
      if (!(sum > options.drop_ratio * elements)) continue;
      threshold = searched(l);
      break;
    }
    const bool all = options.drop_ratio == 0 || options.drop_ratio == 1;
    for (std::size_t l = 0; l < layers; ++l) goes[l] = all || (value(l) >= threshold && values[l] != 0);
  } else {
    double left = *options.send_budget * elements;
    std::erase_if(order, [&](std::size_t l) {
      if (held[l] == 0 && always[l] != 0) left -= static_cast<double>(sizes[l]);
      return held[l] != 0 || always[l] != 0;
    });
    std::ranges::stable_sort(order, std::greater(), value);
    for (const std::size_t l : order) {
      left -= static_cast<double>(sizes[l]);
      if (sizes[l] > 0 && left < 0) break;
      goes[l] = values[l] != 0;
    }
  }
  std::string sent;
  for (std::size_t l = 0; l < layers; ++l) {
    const bool is_sent = sizes[l] > 0 && held[l] == 0 && (always[l] != 0 || goes[l] != 0);
    sent += is_sent ? '1' : '0';
  }
  return sent;
}

/// One step over values given, many layers and few, some of them NaN or infinite, some held, some always sent.
template <class Execution>
void decides_by_rules(const Execution& execution, std::size_t layers) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::mt19937 random(static_cast<unsigned>(layers));
  std::vector<std::size_t> sizes(layers);
  for (auto& size : sizes) size = below(random, 5) == 0 ? below(random, 40) : below(random, 3);
  sizes.back() = 1;
  const lamina::layout model = model_of(sizes);
  device_gradients<float> gradients(model, 0);
  for (const double ratio : {0.0, 0.1, 0.3, 0.6, 0.9, 1.0}) {
    for (const bool by_budget : {false, true}) {
      if (by_budget && ratio == 0) continue;
      lamina::worker_options options;
      (by_budget ? options.send_budget.emplace() : options.drop_ratio) = ratio;
      std::vector<double> values(layers);
      std::vector<std::uint8_t> held(layers);
      std::vector<std::uint8_t> always(layers);
      std::size_t elements_always_sent = 0;  // must leave some of a budget
      for (std::size_t l = 0; l < layers; ++l) {
        const std::size_t kind = below(random, 12);
        values[l] = kind == 0   ? std::numeric_limits<double>::quiet_NaN()
                    : kind == 1 ? infinity
                    : kind == 2 ? -infinity
                    : kind < 5  ? static_cast<double>(below(random, 7)) - 3
                                : random_fractions<double>(random, 1)[0];
        held[l] = below(random, 5) == 0 ? 1 : 0;
        always[l] = below(random, 5) == 0 ? 1 : 0;
        const double share =
            static_cast<double>(elements_always_sent + sizes[l]) / static_cast<double>(model.elements());
        if (by_budget && share >= ratio) always[l] = 0;
        elements_always_sent += always[l] != 0 ? sizes[l] : 0;
        if (always[l] != 0) options.always_sent.push_back(l);
      }
      double threshold = 0;
      const std::string expected = literal_decision(values, sizes, held, always, options, threshold);
      lamina::cuda::worker<float> device(model, options);
      device.bind(execution, gradients.tensors());
      device.add(execution);
      const auto device_values = on_device(values);
      const auto device_held = on_device(held);
      device.select(execution, address_of(device_values), address_of(device_held));
      const std::string where =
          " at " + std::to_string(ratio) + (by_budget ? " as a budget" : " as a drop ratio");
      require_same(sent_layers(device, execution), expected, where);
      const double found = device.last_step(execution).threshold;
      require(by_budget || ratio == 0 || found == threshold, "the thresholds differ" + where);
      lamina::selector cpu(lamina::tiling(model), options);
      const std::vector<char> cpu_held(held.begin(), held.end());
      require_same(sent_layers(cpu.decide(1, values, cpu_held)), expected, where + ", on the CPU");
      require(cpu.threshold() == found, "the CPU's threshold differs" + where);
    }
  }
}

/// As many layers as a large model has parts: beside the CPU, where R and a budget end among layers that are tied.
template <class Execution>
void decides_among_many(const Execution& execution) {
  constexpr std::size_t layers = 100'000;
  std::mt19937 random(100);
  std::vector<std::size_t> sizes(layers);
  std::vector<double> values(layers);
  std::vector<std::uint8_t> held(layers);
  std::vector<std::size_t> always_sent;
  for (std::size_t l = 0; l < layers; ++l) {
    sizes[l] = below(random, 4);
    const std::size_t kind = below(random, 10);
    values[l] = kind < 7
                    ? static_cast<double>(below(random, 5)) - 1
                    : std::ldexp(1.0 + static_cast<double>(kind), static_cast<int>(below(random, 600)) - 300);
    held[l] = below(random, 9) == 0 ? 1 : 0;
    if (below(random, 50) == 0) always_sent.push_back(l);
  }
  const lamina::layout model = model_of(sizes);
  thrust::device_vector<float> memory(3);
  std::vector<lamina::cuda::device_tensor> tensors;
  for (const std::size_t size : sizes) tensors.emplace_back(thrust::raw_pointer_cast(memory.data()), size);
  const auto device_values = on_device(values);
  const auto device_held = on_device(held);
  for (const lamina::worker_options& options :
       {lamina::worker_options{.drop_ratio = 0.5, .always_sent = always_sent},
        lamina::worker_options{.send_budget = 0.3, .always_sent = always_sent}}) {
    lamina::cuda::worker<float> device(model, options);
    device.bind(execution, tensors);
    device.add(execution);
    device.select(execution, address_of(device_values), address_of(device_held));
    lamina::selector cpu(lamina::tiling(model), options);
    const std::vector<char> cpu_held(held.begin(), held.end());
    const std::string expected = sent_layers(cpu.decide(1, values, cpu_held));
    require(sent_layers(device, execution) == expected, "other layers are sent than by the CPU");
    require(device.last_step(execution).threshold == cpu.threshold(), "the CPU's threshold differs");
  }
}

/// mean_abs of a layer of zeros, NaN.
struct unknown_of_zeros : lamina::mean_abs {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return total == 0 ? std::numeric_limits<double>::quiet_NaN() : lamina::mean_abs::finish(total, elements);
  }
};

/// A layer without a value goes out first, whatever decides.
template <class Execution>
void sends_layers_without_value_first(const Execution& execution) {
  const lamina::layout model = model_of({10, 100, 50});
  device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(10, 1.0F));
  gradients.set(2, std::vector<float>(50, 2.0F));
  const auto first_step = [&](const lamina::worker_options& options, const std::string& expected,
                              double threshold) {
    lamina::cuda::worker<float, unknown_of_zeros> device(model, options);
    device.bind(execution, gradients.tensors());
    device.add(execution);
    device.select(execution);
    require_same(sent_layers(device, execution), expected, "");
    const double found = device.last_step(execution).threshold;
    require(found == threshold, "the threshold is " + std::to_string(found));
  };
  constexpr double infinity = std::numeric_limits<double>::infinity();
  first_step({.drop_ratio = 0.3}, "011", 2);
  first_step({.drop_ratio = 0.5}, "010", infinity);
  first_step({.threshold = 1.5}, "011", 1.5);
  first_step({.threshold = infinity}, "010", infinity);
  first_step({.send_budget = 0.7}, "010", infinity);
  first_step({.send_budget = 0.95}, "011", 2);
  first_step({.send_budget = 0.5}, "000", infinity);  // too large for this step, so that all wait
}

/// Over several steps: what is held takes nothing, and its age goes on; what is always sent overdraws a budget.
template <class Execution>
void keeps_rules_over_steps(const Execution& execution) {
  const auto steps = [&](const std::vector<std::size_t>& sizes, const lamina::worker_options& options,
                         const std::vector<double>& values,
                         const std::vector<std::vector<std::uint8_t>>& held_in,
                         const std::vector<std::string>& expected) {
    const lamina::layout model = model_of(sizes);
    lamina::cuda::worker<float> device(model, options);
    device_gradients<float> gradients(model, 0);
    device.bind(execution, gradients.tensors());
    const auto agreed = on_device(values);
    for (std::size_t step = 0; step < expected.size(); ++step) {
      device.add(execution);
      if (step < held_in.size()) {
        const auto held = on_device(held_in[step]);
        device.select(execution, address_of(agreed), address_of(held));
      } else {
        device.select(execution, address_of(agreed));
      }
      require_same(sent_layers(device, execution), expected[step], " in step " + std::to_string(step + 1));
      device.commit(execution);
    }
  };
  // Held beyond at_least_every, and sent when it is not held any more.
  steps({10, 10}, {.drop_ratio = 0.5, .at_least_every = 2}, {1, 2}, {{1, 0}, {1, 0}, {1, 0}},
        {"01", "01", "01", "11"});
  // What the layer held did not take of the budget is left for it.
  steps({20, 80}, {.send_budget = 0.1}, {5, 3}, {{1, 0}, {1, 0}}, {"00", "00", "10", "10", "00"});
  // What is always sent leaves half of the budget: nine steps' for the other layer.
  steps({10, 90}, {.send_budget = 0.2, .always_sent = {0}}, {1, 2}, {},
        {"10", "10", "10", "10", "10", "10", "10", "10", "11", "10"});
  // A value of 0 goes out by its age, by a policy, or with everything, and not by a threshold or within a budget.
  steps({10, 20, 30}, {.drop_ratio = 0.4}, {0, 3, 0}, {}, {"010", "010"});
  steps({10, 20, 30}, {.drop_ratio = 0.4, .at_least_every = 2, .always_sent = {2}}, {0, 3, 0}, {},
        {"011", "111"});
  steps({10, 20, 30}, {.threshold = -1}, {0, 3, -0.0}, {}, {"010", "010"});
  steps({10, 20, 30}, {.drop_ratio = 0}, {0, 3, 0}, {}, {"111"});
  steps({10, 20, 30}, {.drop_ratio = 1}, {0, 3, 0}, {}, {"111"});
  steps({10, 20, 30}, {.send_budget = 1}, {0, 3, 0}, {}, {"010", "010"});
  // A threshold that is infinite, since what is held was more than R, is for its step alone.
  steps({10, 20, 30}, {.drop_ratio = 0.4, .search_every = 100}, {1, 2, 3}, {{0, 0, 1}},
        {"110", "011", "011"});
  steps({10, 90}, {.drop_ratio = 0, .always_sent = {0}}, {1, 2}, {{1, 0}}, {"01", "11"});
  // All parts of a layer.
  steps({9000, 100, 1}, {.drop_ratio = 0.98, .fragment_elements = 4096, .always_sent = {2, 0}},
        {0, 0, 0, 1, 0}, {}, {"11101", "11101"});
}

/// Other layers held in each step, beside the CPU, where some layers are always sent, age, and have no value.
template <class Execution>
void rules_follow_the_cpu(const Execution& execution, lamina::worker_options options) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000, 4096, 12, 700});
  options.always_sent = {3, options.send_budget ? std::size_t{9} : std::size_t{6}};
  host_worker<float, unknown_of_zeros> cpu(model, options);
  lamina::cuda::worker<float, unknown_of_zeros> device(model, options);
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const std::size_t parts = device.fragments().layers();
  std::mt19937 random(21);
  for (std::size_t step = 1; step <= 12; ++step) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      auto gradient = random_gradient<float>(random, model.sizes()[l], 1);
      if (below(random, 3) == 0) std::ranges::fill(gradient, 0.0F);
      gradients.set(l, gradient);
      cpu.add(l, gradient);
    }
    device.add(execution);
    execution.wait();
    std::vector<double> agreed(cpu.values().begin(), cpu.values().end());
    std::vector<std::uint8_t> held(parts);
    for (auto& each : held) each = below(random, 4) == 0 ? 1 : 0;
    const std::vector<char> cpu_held(held.begin(), held.end());
    const auto device_agreed = on_device(agreed);
    const auto device_held = on_device(held);
    switch (step % 4) {
      case 0:
        cpu.select();
        device.select(execution);
        break;
      case 3:
        cpu.select({}, cpu_held);
        device.select(execution, nullptr, address_of(device_held));
        break;
      case 1:
        cpu.select(agreed);
        device.select(execution, address_of(device_agreed));
        break;
      default:
        cpu.select(agreed, cpu_held);
        device.select(execution, address_of(device_agreed), address_of(device_held));
    }
    require_same_frame(cpu, device, execution, buffer, "in step " + std::to_string(step));
    if (step % 4 == 3) continue;  // this frame was lost
    cpu.commit();
    device.commit(execution);
  }
}

template <class Execution>
void for_each_rule_case(const Execution& execution, const visitor& visit) {
  for (const std::size_t layers : {1U, 7U, 161U, 1025U, 5000U}) {
    visit("rules over " + std::to_string(layers) + " layers",
          [&, layers] { decides_by_rules(execution, layers); });
  }
  visit("rules over 100,000 layers", [&] { decides_among_many(execution); });
  visit("layers without a value", [&] { sends_layers_without_value_first(execution); });
  using options = lamina::worker_options;
  const auto add = [&](const std::string& name, const options& each) {
    visit("rules beside the CPU, " + name, [&execution, each] { rules_follow_the_cpu(execution, each); });
  };
  add("drop ratio 0.7", {.drop_ratio = 0.7});
  add("drop ratio 0", {.drop_ratio = 0});
  add("drop ratio 1", {.drop_ratio = 1});
  add("a fixed threshold", {.threshold = 8});
  add("at least every 2 steps", {.drop_ratio = 0.95, .at_least_every = 2});
  add("a budget of 20 %", {.send_budget = 0.2});
  add("a budget of 90 %, at least every 3 steps", {.send_budget = 0.9, .at_least_every = 3});
  add("fragments of 4,096", {.drop_ratio = 0.6, .fragment_elements = 4096});
  visit("choosing by score", [&] {
    rules_follow_the_cpu(execution, {.drop_ratio = 0.8, .by_score = true});
    rules_follow_the_cpu(execution, {.send_budget = 0.2, .by_score = true});
  });
  visit("decisions over several steps", [&] { keeps_rules_over_steps(execution); });
}

}  // namespace lamina_test
