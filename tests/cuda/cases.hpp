// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/fill.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "device_support.hpp"
#include "follow_cases.hpp"
#include "lamina/cuda/device_tensor.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "memory_cases.hpp"
#include "misuse_cases.hpp"
#include "order_cases.hpp"
#include "refusal_cases.hpp"
#include "replay_cases.hpp"
#include "rule_cases.hpp"
#include "search_cases.hpp"
#include "state_cases.hpp"
#include "support.hpp"
#include "together_cases.hpp"
#include "totals_cases.hpp"

/// What the device has to do as the CPU does, for any execution: the tests with Thrust on a CPU and those on a GPU call the
/// same cases. A case throws std::runtime_error that says what differed; no test framework, since a machine with a GPU may
/// have none.
namespace lamina_test {

/// Algorithm 1 and the budget over values given, many layers and few, with ties, zeros of both signs and infinity.
template <class Execution>
void searches_as_the_cpu(const Execution& execution, std::size_t layers) {
  std::mt19937 random(static_cast<unsigned>(layers));
  std::vector<std::size_t> sizes(layers);
  for (auto& size : sizes) size = below(random, 5) == 0 ? below(random, 40) : below(random, 3);
  sizes.back() = 1;
  const lamina::layout model = model_of(sizes);
  device_gradients<float> gradients(model, 0);
  for (const double ratio : {0.0, 0.001, 0.5, 0.95, 0.9999, 1.0}) {
    for (const bool by_budget : {false, true}) {
      if (by_budget && ratio == 0) continue;
      lamina::worker_options options;
      (by_budget ? options.send_budget.emplace() : options.drop_ratio) = ratio;
      std::vector<double> values(layers);
      for (double& value : values) {
        const std::size_t kind = below(random, 8);
        value = kind == 0   ? -0.0
                : kind == 1 ? 0.0
                : kind < 4  ? static_cast<double>(below(random, 7)) - 3
                            : random_fractions<double>(random, 1)[0];
      }
      if (ratio == 0.95 || ratio == 0.001)  // of the latter no layer fits into the budget
        values[below(random, layers)] = std::numeric_limits<double>::infinity();
      lamina::selector cpu(lamina::tiling(model), options);
      const std::string expected = sent_layers(cpu.decide(1, values));
      lamina::cuda::worker<float> device(model, options);
      device.bind(execution, gradients.tensors());
      const thrust::device_vector<double> device_values = values;
      device.add(execution);
      device.select(execution, address_of(device_values));
      const std::string where =
          " at " + std::to_string(ratio) + (by_budget ? " as a budget" : " as a drop ratio");
      require_same(sent_layers(device, execution), expected, where);
      require(device.last_step(execution).threshold == cpu.threshold(), "the thresholds differ" + where);
    }
  }
}

/// Tensors of every kind that can be bound, and their values without a residual.
template <class Execution>
void takes_tensors_of_each_kind(const Execution& execution) {
  const lamina::layout model = model_of({5000, 6, 4097});
  std::mt19937 random(1);
  std::vector<std::vector<float>> host;
  std::vector<thrust::device_vector<float>> vectors;
  for (const std::size_t size : model.sizes()) {
    host.push_back(random_gradient<float>(random, size, 1));
    vectors.emplace_back(host.back());
  }
  const auto has_values = [&](const auto& tensors, const std::string& kind) {
    lamina::cuda::worker<float> device(model);
    device.bind(execution, tensors);
    device.add(execution);
    execution.wait();
    const thrust::device_ptr<double> computed(device.values());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const double value = computed[static_cast<std::ptrdiff_t>(l)];
      require(same_bits(value, lamina::mean_abs{}(host[l])),
              "the value of layer " + std::to_string(l) + " differs, bound as " + kind);
    }
  };
  has_values(vectors, "device_vector");
  // Bound as what they are, so that they may be written.
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0});
  device.bind(execution, vectors);
  device.add(execution);
  device.select(execution);
  const frame_buffer buffer(device.largest_frame_bytes());
  device.encode(execution, buffer.bytes());
  device.restore(execution, buffer.bytes().data() + device.prefix_bytes());
  execution.wait();
  std::vector<std::span<const float>> spans;
  std::vector<lamina::cuda::device_tensor> tensors;
  for (auto& each : vectors) spans.emplace_back(thrust::raw_pointer_cast(each.data()), each.size());
  const std::vector<std::vector<std::size_t>> shapes = {{50, 100}, {3, 2}, {4097}};
  for (std::size_t l = 0; l < shapes.size(); ++l) tensors.emplace_back(spans[l].data(), shapes[l]);
  has_values(spans, "span");
  has_values(tensors, "pointer and shape");
  // As tensor_traits knows them.
  std::vector<framework_tensor> taught;
  std::vector<tensor_here_or_there> there;
  for (auto& each : vectors) {
    taught.push_back({thrust::raw_pointer_cast(each.data()), each.size(), false});
    there.push_back({{thrust::raw_pointer_cast(each.data()), each.size()}});
  }
  has_values(taught, "a type of its own");
  has_values(there, "a type that lies here or there");
  require(lamina::cuda::device_tensor(taught[0]).is_writable() &&
              !lamina::cuda::device_tensor(there[0]).is_writable(),
          "what is const may be written, or the other way round");
  taught[0].is_half = true;
  require(lamina::cuda::device_tensor(taught[0]).type() == lamina::cuda::device_element::bfloat16,
          "the element type of run time is another");
  there[2] = {};
  const auto message = message_of<std::invalid_argument>([&] { device.bind(execution, there); });
  require(contains(message, "layer2") && contains(message, "no gradient"), "the message is: " + message);
}

template <class Execution>
void restores_what_was_sent(const Execution& execution) {
  const lamina::layout model = model_of({5000, 3, 0, 70, 4096});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0.6});
  device_gradients<float> gradients(model, 1);
  std::mt19937 random(1);
  std::vector<std::vector<float>> written;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    written.push_back(random_gradient<float>(random, model.sizes()[l], static_cast<float>(1 + l)));
    gradients.set(l, written.back());
  }
  device.bind(execution, gradients.tensors());
  device.add(execution);
  device.select(execution);
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto bytes = frame_of(device, execution, buffer);
  const auto frame = lamina::decode<float>(bytes, model);
  require(frame.sent_elements() > 0 && frame.sent_elements() < model.elements(), "all or nothing was sent");
  device.restore(execution, buffer.bytes().data() + device.prefix_bytes());
  execution.wait();
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const std::vector<float> expected =
        frame.is_dropped(l) ? std::vector<float>(model.sizes()[l]) : written[l];
    require(same_bits(gradients.get(l), expected),
            "layer " + std::to_string(l) + " was restored as something else");
  }
}

/// Whatever came before, no step sends more than most_sent_elements(), and a step comes so far where a layer has saved for it; what
/// an allreduce of so many elements adds up behind the payload stays zeros.
template <class Execution>
void sends_no_more_than_most(const Execution& execution) {
  const auto longest = [&](const std::vector<std::size_t>& sizes, const lamina::worker_options& options,
                           std::size_t most) {
    lamina::cuda::worker<float> device(model_of(sizes), options);
    require(device.most_sent_elements() == most,
            "the most is " + std::to_string(device.most_sent_elements()));
    device_gradients<float> gradients(device.model(), 0);
    device.bind(execution, gradients.tensors());
    const frame_buffer buffer(device.largest_frame_bytes());
    std::mt19937 random(11);
    std::size_t largest = 0;
    for (int step = 1; step <= 60; ++step) {
      for (std::size_t l = 0; l < sizes.size(); ++l)
        gradients.set(l, random_gradient<float>(random, sizes[l], static_cast<float>(below(random, 5))));
      const auto payload = buffer.bytes().subspan(device.prefix_bytes(), most * sizeof(float));
      thrust::fill_n(thrust::device_ptr<std::byte>(payload.data()), payload.size(), std::byte{0});
      device.add(execution);
      device.select(execution);
      device.encode(execution, buffer.bytes());
      const std::size_t sent = device.last_step(execution).sent_elements;
      require(sent <= most, std::to_string(sent) + " elements are more than the most");
      largest = std::max(largest, sent);
      const auto bytes = buffer.to_host();
      const auto behind = std::span(bytes).subspan(device.prefix_bytes() + sent * sizeof(float),
                                                   (most - sent) * sizeof(float));
      require(std::ranges::all_of(behind, [](std::byte each) { return each == std::byte{0}; }),
              "something stands behind the payload");
      if (step % 4 != 3) device.commit(execution);
    }
    return largest;
  };
  const std::vector<std::size_t> alike(50, 20);
  require(longest(alike, {.send_budget = 0.31}, 330) > 310, "no step sends more than its share");
  longest({700, 20, 30, 200, 1, 49}, {.send_budget = 0.2}, 900);
  longest({700, 20, 30, 200, 1, 49}, {.send_budget = 0.2, .always_sent = {1, 4}}, 900);
  longest({9000, 20, 4097}, {.send_budget = 0.1, .fragment_elements = 4096}, 1311 + 4096);
  longest({700, 20, 30}, {.send_budget = 0.9}, 750);
  longest({700, 20, 30}, {.send_budget = 0.1, .at_least_every = 3}, 750);
  longest({700, 20, 30}, {.drop_ratio = 0.9}, 750);
}

/// All cases: calls visit(name, function).
template <class Execution>
void for_each_case(const Execution& execution, const visitor& visit) {
  using lamina::bfloat16;
  using lamina::float16;
  const auto sizes = telling_sizes();
  for (const auto& each : all_options<float>()) {
    const lamina::worker_options& options = each.second;
    visit("float, " + each.first, [&] { follows_the_cpu<float, float>(execution, sizes, options, 9); });
    visit("double, " + each.first, [&] { follows_the_cpu<double, double>(execution, sizes, options, 5); });
  }
  const lamina::worker_options plain{.drop_ratio = 0.7};
  visit("gradients of float16", [&] { follows_the_cpu<float, float16>(execution, sizes, plain, 5); });
  visit("gradients of bfloat16", [&] { follows_the_cpu<float, bfloat16>(execution, sizes, plain, 5); });
  visit("gradients of bfloat16, momentum",
        [&] { follows_the_cpu<float, bfloat16>(execution, sizes, {.drop_ratio = 0.7, .momentum = 0.9}, 5); });
  visit("gradients of float16, residual of double",
        [&] { follows_the_cpu<double, float16>(execution, sizes, plain, 3); });
  visit("a layer of more than 1,024 blocks", [&] {
    follows_the_cpu<float, float>(execution, {4'500'000, 1, 70'000}, {.drop_ratio = 0.5}, 2);
  });
  visit("totals in runs", [&] { combines_totals_in_runs<lamina::l1_norm>(execution); });
  visit("totals in runs, max_abs", [&] { combines_totals_in_runs<lamina::max_abs>(execution); });
  visit("totals in runs, whatever combines them", [&] { combines_totals_in_runs<tells_order>(execution); });
  for (const std::size_t skipped : {1U, 2U, 3U}) {
    visit("gradients " + std::to_string(skipped) + " elements off", [&, skipped] {
      follows_the_cpu<float, float>(execution, sizes, plain, 3, skipped);
      follows_the_cpu<double, double>(execution, sizes, plain, 3, skipped);
      follows_the_cpu<float, float16>(execution, sizes, plain, 3, skipped);
      follows_the_cpu<float, float>(execution, sizes, {.drop_ratio = 0.7, .fragment_elements = 4096}, 3,
                                    skipped);
    });
  }
  visit("l2_norm", [&] { follows_the_cpu<float, float, lamina::l2_norm>(execution, sizes, plain, 3); });
  visit("l2_norm of double",
        [&] { follows_the_cpu<double, double, lamina::l2_norm>(execution, sizes, plain, 3); });
  visit("max_abs", [&] { follows_the_cpu<float, float, lamina::max_abs>(execution, sizes, plain, 3); });
  visit("signed_mean",
        [&] { follows_the_cpu<float, float, lamina_test::signed_mean>(execution, sizes, plain, 3); });
  visit("NaN, infinity and overflow are left out", [&] {
    const auto spoil = [](std::size_t step, std::size_t layer, std::vector<float>& gradient) {
      if (gradient.empty()) return;
      using limits = std::numeric_limits<float>;
      const float bad[] = {limits::quiet_NaN(), limits::infinity(), -limits::infinity(), limits::max()};
      const std::size_t n = gradient.size();
      for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
        if ((layer + at) % 2 == step % 2) gradient[at] = bad[(layer + step) % 4];
      }
    };
    follows_the_cpu<float, float>(execution, sizes, plain, 9, 0, spoil);
    follows_the_cpu<float, float>(execution, sizes, {.drop_ratio = 0.7, .momentum = 0.9}, 9, 0, spoil);
  });
  for (const std::size_t layers : {1U, 2U, 7U, 8U, 9U, 161U, 1024U, 1025U, 9000U}) {
    visit("search over " + std::to_string(layers) + " layers",
          [&, layers] { searches_as_the_cpu(execution, layers); });
  }
  visit("tensors of each kind", [&] { takes_tensors_of_each_kind(execution); });
  visit("restore", [&] { restores_what_was_sent(execution); });
  visit("the most that a step sends", [&] { sends_no_more_than_most(execution); });
  visit("misuse", [&] { refuses_misuse(execution); });
  visit("a call that is made again", [&] { can_be_called_again(execution); });
  for_each_order_case(execution, visit);
  for_each_replay_case(execution, visit);
  for (const auto& each : all_options<float>()) {
    const lamina::worker_options& options = each.second;
    visit("together, " + each.first, [&] { together_follows_the_cpu<float, float>(execution, options, 12); });
  }
  for_each_together_case(execution, visit);
  for_each_rule_case(execution, visit);
  for_each_memory_case(execution, visit);
  for_each_refusal_case(execution, visit);
  for_each_state_case(execution, visit);
  for_each_search_case(execution, visit);
}

}  // namespace lamina_test
