// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/device_vector.h>
#include <thrust/fill.h>

#include <variant>

#include "device_support.hpp"
#include "follow_cases.hpp"
#include "memory_cases.hpp"
#include "misuse_cases.hpp"
#include "refusal_cases.hpp"
#include "replay_cases.hpp"
#include "rule_cases.hpp"
#include "search_cases.hpp"
#include "state_cases.hpp"
#include "totals_cases.hpp"

/// What the device has to do as the CPU does, for any execution: the tests with Thrust on a CPU and those on a GPU call the
/// same cases. A case throws std::runtime_error that says what differed; no test framework, since a machine with a GPU may
/// have none.
namespace lamina_test {

/// A framework's tensor, whose element type is known at run time, taught to lamina below.
struct framework_tensor {
  void* data;
  std::size_t elements;
  bool is_half;
};

/// The same where tensors lie here or there.
struct tensor_here_or_there {
  std::span<const float> on_device;
};

}  // namespace lamina_test

template <>
struct lamina::tensor_traits<lamina_test::framework_tensor> {
  static std::variant<std::span<float>, std::span<lamina::bfloat16>, std::span<int>> elements(
      const lamina_test::framework_tensor& tensor) {
    if (tensor.is_half) return std::span(static_cast<lamina::bfloat16*>(tensor.data), tensor.elements);
    return std::span(static_cast<float*>(tensor.data), tensor.elements);
  }
};
template <>
struct lamina::tensor_traits<lamina_test::tensor_here_or_there> {
  static std::span<const float> elements(const lamina_test::tensor_here_or_there&) {
    throw std::invalid_argument("not in host memory");
  }
  static std::span<const float> device_elements(const lamina_test::tensor_here_or_there& tensor) {
    return tensor.on_device;
  }
  static bool has_value(const lamina_test::tensor_here_or_there& tensor) {
    return tensor.on_device.data() != nullptr;
  }
};

namespace lamina_test {

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
    const auto values = to_host(device.values(), model.layers());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      require(same_bits(values[l], lamina::mean_abs{}(host[l])),
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
  refuses<std::invalid_argument>({"layer2", "no gradient"}, [&] { device.bind(execution, there); });
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
  longest({700, 20, 30, 200, 1, 49}, {.send_budget = 0.2, .always_sent = {1, 4}}, 900);
  longest({9000, 20, 4097}, {.send_budget = 0.1, .fragment_elements = 4096}, 1311 + 4096);
  longest({700, 20, 30}, {.send_budget = 0.1, .at_least_every = 3}, 750);
}

/// All cases: calls visit(name, function).
template <class Execution>
void for_each_case(const Execution& execution, const visitor& visit) {
  for_each_follow_case(execution, visit);
  visit("totals in runs", [&] { combines_totals_in_runs<tells_order>(execution); });
  visit("tensors of each kind", [&] { takes_tensors_of_each_kind(execution); });
  visit("the most that a step sends", [&] { sends_no_more_than_most(execution); });
  visit("misuse", [&] { refuses_misuse(execution); });
  visit("a call that is made again", [&] { can_be_called_again(execution); });
  for_each_replay_case(execution, visit);
  for_each_rule_case(execution, visit);
  for_each_memory_case(execution, visit);
  for_each_refusal_case(execution, visit);
  for_each_state_case(execution, visit);
  for_each_search_case(execution, visit);
}

}  // namespace lamina_test
