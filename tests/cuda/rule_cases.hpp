// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>

#include "device_support.hpp"

/// Decisions over values given: ties, zeros of both signs, NaN and infinity, layers that are held and that are always sent.
namespace lamina_test {

/// What the first step over values given decides: '1' for each layer that is sent, and the threshold.
struct decision {
  std::string sent;
  double threshold = 0;
};

/// That of the device, which is that of the CPU. `tensors` may hold any gradients.
template <class Execution>
decision decided(const Execution& execution, const lamina::layout& model,
                 const std::vector<lamina::cuda::device_tensor>& tensors,
                 const lamina::worker_options& options, const std::vector<double>& values,
                 const std::vector<std::uint8_t>& held, const std::string& where) {
  lamina::cuda::worker<float> device(model, options);
  device.bind(execution, tensors);
  device.add(execution);
  const on_device<double> device_values(values);
  const on_device<std::uint8_t> device_held(held);
  device.select(execution, device_values.data(), device_held.data());
  const auto bytes = frame_of(device, execution, frame_buffer(device.largest_frame_bytes()));
  const auto frame = lamina::decode<float>(bytes, model);
  lamina::selector cpu(lamina::tiling(model), options);
  const lamina::selection& chosen = cpu.decide(1, values, std::vector<char>(held.begin(), held.end()));
  decision found;
  found.threshold = device.last_step(execution).threshold;
  require(found.threshold == cpu.threshold(), "the CPU's threshold differs" + where);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    require(frame.is_dropped(l) == chosen.is_dropped(l), "other layers are sent than by the CPU" + where);
    found.sent += frame.is_dropped(l) ? '0' : '1';
  }
  return found;
}

/// The same as literally as can be: layers in order of their value, one after the other, of equal ones the first in the model.
inline decision literal_decision(const std::vector<double>& values, const std::vector<std::size_t>& sizes,
                                 const std::vector<std::uint8_t>& held,
                                 const std::vector<std::uint8_t>& always,
                                 const lamina::worker_options& options) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const std::size_t layers = values.size();
  const double elements = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}));
  const auto value = [&](std::size_t l) { return values[l] != values[l] ? infinity : values[l]; };
  std::vector<std::size_t> order(layers);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::vector<char> goes(layers);
  decision made;
  if (!options.send_budget) {
    const auto searched = [&](std::size_t l) {
      return held[l] != 0 ? -infinity : always[l] != 0 ? infinity : value(l);
    };
    std::ranges::stable_sort(order, {}, searched);
    made.threshold = -1;
    double sum = 0;
    for (const std::size_t l : order) {
      sum += static_cast<double>(sizes[l]);
      if (!(sum > options.drop_ratio * elements)) continue;
      made.threshold = searched(l);
      break;
    }
    const bool all = options.drop_ratio == 0 || options.drop_ratio == 1;
    for (std::size_t l = 0; l < layers; ++l) goes[l] = all || (value(l) >= made.threshold && values[l] != 0);
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
  for (std::size_t l = 0; l < layers; ++l) {
    const bool is_sent = sizes[l] > 0 && held[l] == 0 && (always[l] != 0 || goes[l] != 0);
    made.sent += is_sent ? '1' : '0';
  }
  return made;
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
                    : kind == 3 ? -0.0
                    : kind < 6  ? static_cast<double>(below(random, 7)) - 3
                                : random_fractions<double>(random, 1)[0];
        held[l] = below(random, 5) == 0 ? 7 : 0;
        always[l] = below(random, 5) == 0 ? 1 : 0;
        const double share =
            static_cast<double>(elements_always_sent + sizes[l]) / static_cast<double>(model.elements());
        if (by_budget && share >= ratio) always[l] = 0;
        elements_always_sent += always[l] != 0 ? sizes[l] : 0;
        if (always[l] != 0) options.always_sent.push_back(l);
      }
      const decision expected = literal_decision(values, sizes, held, always, options);
      const std::string where =
          " at " + std::to_string(ratio) + (by_budget ? " as a budget" : " as a drop ratio");
      const decision found = decided(execution, model, gradients.tensors(), options, values, held, where);
      require(found.sent == expected.sent, "sent is " + found.sent + " and not " + expected.sent + where);
      require(by_budget || ratio == 0 || found.threshold == expected.threshold,
              "the thresholds differ" + where);
    }
  }
}

/// As many layers as a large model has parts: compared with the CPU, where R and a budget end among layers that are tied.
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
  const on_device<float> memory(3);
  std::vector<lamina::cuda::device_tensor> tensors;
  for (const std::size_t size : sizes) tensors.emplace_back(memory.data(), size);
  decided(execution, model, tensors, {.drop_ratio = 0.5, .always_sent = always_sent}, values, held,
          " by a drop ratio");
  decided(execution, model, tensors, {.send_budget = 0.3, .always_sent = always_sent}, values, held,
          " by a budget");
}

template <class Execution>
void for_each_rule_case(const Execution& execution, const visitor& visit) {
  for (const std::size_t layers : {1U, 2U, 7U, 8U, 9U, 161U, 1024U, 1025U, 5000U}) {
    visit("rules over " + std::to_string(layers) + " layers",
          [&, layers] { decides_by_rules(execution, layers); });
  }
  visit("at scale: rules over 100,000 layers", [&] { decides_among_many(execution); });
}

}  // namespace lamina_test
