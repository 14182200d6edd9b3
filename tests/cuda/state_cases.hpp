// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "memory_cases.hpp"
#include "support.hpp"

/// States that are saved and loaded here and on the CPU.
namespace lamina_test {

/// A worker on the device and one on the CPU, which get the same gradients.
template <class T, class G>
class two_workers {
 public:
  two_workers(const lamina::layout& model, const lamina::worker_options& options, unsigned seed)
      : model_(model),
        cpu(model, options),
        device(model, options),
        gradients_(model, 0),
        buffer_(device.largest_frame_bytes()),
        random_(seed) {}

  template <class Execution>
  void add(const Execution& execution) {
    device.bind(execution, gradients_.tensors());
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      const auto gradient = random_gradient<G>(random_, model_.sizes()[l],
                                               std::ldexp(1.0F, static_cast<int>(below(random_, 6))));
      cpu.add(l, gradient);
      gradients_.set(l, gradient);
    }
    device.add(execution);
  }
  template <class Execution>
  void encode(const Execution& execution, const std::string& where) {
    device.select(execution);
    require_same_frame(cpu, device, execution, buffer_, where);
  }
  template <class Execution>
  void commit(const Execution& execution) {
    cpu.commit();
    device.commit(execution);
  }
  template <class Execution>
  void require_same_state(const Execution& execution, const std::string& where) {
    require(same_bits(device.save(execution), cpu.save()), "the states differ " + where);
  }

 private:
  lamina::layout model_;

 public:
  host_worker<T> cpu;
  lamina::cuda::worker<T> device;

 private:
  device_gradients<G> gradients_;
  frame_buffer buffer_;
  std::mt19937 random_;
};

/// After each step the bytes are the CPU's, before and after the commit. They are loaded by the other side and by one that ran
/// elsewhere, and both go on as one that was not stopped.
template <class T, class G, class Execution>
void states_are_the_cpus(const Execution& execution, lamina::worker_options options) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  two_workers<T, G> workers(model, options, 11);
  workers.require_same_state(execution, "before the first step");
  two_workers<T, G> elsewhere(model, options, 12);
  for (int step = 1; step <= 9; ++step) {
    const std::string where = "in step " + std::to_string(step);
    workers.add(execution);
    workers.encode(execution, where);
    if (step % 4 != 3) workers.commit(execution);
    workers.require_same_state(execution, where);
    if (step % 3 != 0) continue;
    // A compressor of other steps, one of which is encoded and not committed.
    for (int other = 0; other < step; ++other) {
      elsewhere.add(execution);
      elsewhere.encode(execution, where + ", elsewhere");
      if (other % 2 == 0) elsewhere.commit(execution);
    }
    const auto saved = workers.cpu.save();
    elsewhere.device.load(execution, saved);
    elsewhere.cpu.load(workers.device.save(execution));
    require(same_bits(elsewhere.device.save(execution), saved), "what was loaded is another state " + where);
    require(elsewhere.device.last_step(execution).step == workers.cpu->steps(), "the steps differ " + where);
    for (int other = 0; other < 2; ++other) {
      elsewhere.add(execution);
      elsewhere.encode(execution, where + ", loaded");
      elsewhere.commit(execution);
      elsewhere.require_same_state(execution, where + ", loaded");
    }
  }
}

/// Steps that are done again from an earlier state: what is counted by step is not taken for done.
template <class Execution>
void steps_are_done_again(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000});
  two_workers<float, float> workers(model, {.drop_ratio = 0, .payload = lamina::payload_type::int8}, 41);
  const auto saved = workers.device.save(execution);
  for (int round = 0; round < 2; ++round) {
    workers.add(execution);
    workers.encode(execution, "in round " + std::to_string(round));
    workers.commit(execution);
    workers.require_same_state(execution, "in round " + std::to_string(round));
    workers.device.load(execution, saved);
    workers.cpu.load(saved);
  }
}

/// A state of steps within which something waits is refused, and so is one that this compressor cannot take; nothing changes.
template <class Execution>
void refuses_states(const Execution& execution) {
  using bad = lamina::decode_error;
  const lamina::layout model = model_of({100, 5000});
  const lamina::worker_options options{
      .drop_ratio = 0.5,
      .momentum = 0.9,
  };
  two_workers<float, float> workers(model, options, 5);
  workers.add(execution);
  const auto refuses = [](const std::string& part, const std::string& message) {
    require(contains(message, part), "the message should name '" + part + "', but is: " + message);
  };
  for (const bool is_selected : {false, true}) {
    if (is_selected) workers.device.select(execution);
    refuses("not encoded yet", message_of<std::logic_error>([&] { (void)workers.device.save(execution); }));
  }
  workers.encode(execution, "in step 1");
  workers.commit(execution);
  const auto saved = workers.device.save(execution);
  const auto unchanged = [&] {
    require(same_bits(workers.device.save(execution), saved), "a refused state has changed something");
  };
  const auto same_refusal = [&](std::span<const std::byte> bytes, const std::string& part) {
    const auto ours = message_of<std::exception>([&] { workers.device.load(execution, bytes); });
    const auto theirs = message_of<std::exception>([&] { workers.cpu.load(bytes); });
    refuses(part, ours);
    require(ours == theirs, "another message than the CPU's: " + ours + ", and not: " + theirs);
    unchanged();
  };
  auto damaged = saved;
  damaged[damaged.size() / 2] ^= std::byte{1};
  same_refusal(damaged, "checksum");
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{63}, saved.size() - 1})
    same_refusal(std::span(saved).first(bytes), "bytes are missing");
  same_refusal(lamina::worker<float>(model_of({100, 5001}), options).save(), "another model");
  same_refusal(lamina::worker<float>(model, {.drop_ratio = 0.5}).save(), "momentum");
  (void)message_of<bad>([&] { workers.device.load(execution, damaged); });
  // In a step, too.
  workers.add(execution);
  workers.device.load(execution, saved);
  unchanged();
}

/// A residual that is not finite is not saved, and one that was saved is not loaded.
template <class Execution>
void refuses_what_is_not_finite(const Execution& execution) {
  const lamina::layout model = model_of({64, 4096});
  for (const bool has_velocity : {false, true}) {
    counting_resource memory;
    lamina::cuda::worker<float> device(model, {.momentum = has_velocity ? 0.5 : 0.0}, {}, &memory);
    device_gradients<float> gradients(model, 0);
    device.bind(execution, gradients.tensors());
    device.add(execution);
    device.select(execution);
    const frame_buffer buffer(device.largest_frame_bytes());
    device.encode(execution, buffer.bytes());
    const auto saved = device.save(execution);
    // The residual is the first of so many bytes, the velocity the second.
    const auto large = memory.given_of(model.elements() * sizeof(float));
    require(large.size() == (has_velocity ? 2 : 1), "where is the residual?");
    auto* const last = static_cast<float*>(large.back()) + model.elements() - 1;
    *thrust::device_ptr<float>(last) = std::numeric_limits<float>::quiet_NaN();
    const auto message = message_of<std::domain_error>([&] { (void)device.save(execution); });
    require(contains(message, "layer1") && contains(message, has_velocity ? "velocity" : "residual"),
            "the message is: " + message);
    // With a checksum that is right.
    const std::vector<float> elements(model.elements(), 1.0F);
    const std::vector<float> velocity(has_velocity ? model.elements() : 0);
    auto bytes = lamina::save_state<float>(model, {.sent_in = {0, 0}}, elements, velocity, 1);
    lamina::detail::state_header header;
    const float infinity = std::numeric_limits<float>::infinity();
    std::memcpy(
        bytes.data() + sizeof header + 2 * sizeof(std::uint64_t) + (elements.size() - 1) * sizeof(float),
        &infinity, sizeof infinity);
    std::memcpy(&header, bytes.data(), sizeof header);
    header.checksum = lamina::detail::state_checksum(header, std::span(bytes).subspan(sizeof header));
    std::memcpy(bytes.data(), &header, sizeof header);
    require(contains(message_of<std::invalid_argument>([&] { device.load(execution, bytes); }), "NaN"),
            "infinity was loaded");
    *thrust::device_ptr<float>(last) = 0.0F;
    require(same_bits(device.save(execution), saved), "a refused state has changed something");
  }
}

/// Two workers go on as one, whose state is what the CPU merges.
template <class Execution>
void states_merge(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000, 4097});
  const lamina::worker_options options{
      .send_budget = 0.3,
      .fragment_elements = 4096,
      .momentum = 0.5,
  };
  two_workers<float, float> first(model, options, 21);
  two_workers<float, float> second(model, options, 22);
  for (auto* worker : {&first, &second}) {
    for (int step = 1; step <= 3; ++step) {
      worker->add(execution);
      worker->encode(execution, "in step " + std::to_string(step));
      worker->commit(execution);
    }
  }
  const std::vector states = {first.device.save(execution), second.device.save(execution)};
  const auto merged = lamina::merge_states<float>(states, first.device.fragments());
  first.device.load(execution, merged);
  first.cpu.load(merged);
  first.require_same_state(execution, "after they were merged");
  first.add(execution);
  first.encode(execution, "after they were merged");
}

/// always_sent names layers and not parts, also where a state is loaded.
template <class Execution>
void loads_with_layers_always_sent(const Execution& execution) {
  const lamina::layout model = model_of({20'000, 100, 300});
  const lamina::worker_options options{.send_budget = 0.05, .fragment_elements = 4096, .always_sent = {1}};
  lamina::cuda::worker<float> device(model, options);
  host_worker<float> cpu(model, options);
  const auto state = cpu.save();
  device.load(execution, state);
  require(same_bits(device.save(execution), state), "another state was loaded");
}

template <class Execution>
void for_each_state_case(const Execution& execution, const visitor& visit) {
  using options = lamina::worker_options;
  const auto follow = [&](const std::string& name, const options& each) {
    visit("states, " + name, [&, each] {
      states_are_the_cpus<float, float>(execution, each);
      states_are_the_cpus<double, double>(execution, each);
    });
  };
  follow("drop ratio 0.7", {.drop_ratio = 0.7});
  follow("momentum, at least every 2 steps", {.drop_ratio = 0.95, .at_least_every = 2, .momentum = 0.9});
  follow("a budget, in fragments", {.send_budget = 0.2, .fragment_elements = 4096});
  follow("a fixed threshold", {.threshold = 8});
  follow("search every 3 steps, by score", {.drop_ratio = 0.7, .search_every = 3, .by_score = true});
  follow("warm-up", {.drop_ratio = 0.99, .warm_up_steps = 5});
  follow("payload int8 and momentum",
         {.drop_ratio = 0.7, .momentum = 0.5, .payload = lamina::payload_type::int8});
  visit("states, gradients of float16",
        [&] { states_are_the_cpus<float, lamina::float16>(execution, {.drop_ratio = 0.7}); });
  visit("steps that are done again", [&] { steps_are_done_again(execution); });
  visit("states that are refused", [&] { refuses_states(execution); });
  visit("states that are not finite", [&] { refuses_what_is_not_finite(execution); });
  visit("always sent layers, loaded", [&] { loads_with_layers_always_sent(execution); });
  visit("states that are merged", [&] { states_merge(execution); });
}

}  // namespace lamina_test
