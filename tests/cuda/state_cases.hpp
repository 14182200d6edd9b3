// SPDX-License-Identifier: MIT
#pragma once

#include "device_support.hpp"
#include "follow_cases.hpp"
#include "memory_cases.hpp"

/// States that are saved and loaded here and on the CPU.
namespace lamina_test {

/// A state of steps within which something waits is refused, and so is one that this worker cannot take; nothing changes.
template <class Execution>
void refuses_states(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000});
  const lamina::worker_options options{.drop_ratio = 0.5, .momentum = 0.9};
  two_workers<float, lamina::mean_abs> pair(model, options);
  auto& device = pair.device;
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  device.add(execution);
  for (const bool is_selected : {false, true}) {
    if (is_selected) device.select(execution);
    refuses<std::logic_error>({"not encoded yet"}, [&] { (void)device.save(execution); });
  }
  device.encode(execution, pair.buffer.bytes());
  device.commit(execution);
  const auto saved = device.save(execution);
  const auto same_refusal = [&](std::span<const std::byte> bytes, const std::string& part) {
    const auto ours = message_of<std::exception>([&] { device.load(execution, bytes); });
    const auto theirs = message_of<std::exception>([&] { pair.cpu.load(bytes); });
    require(contains(ours, part) && ours == theirs,
            "another message than the CPU's: " + ours + ", and not: " + theirs);
    require(same_bits(device.save(execution), saved), "a refused state has changed something");
  };
  auto damaged = saved;
  damaged[damaged.size() / 2] ^= std::byte{1};
  same_refusal(damaged, "checksum");
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{63}, saved.size() - 1})
    same_refusal(std::span(saved).first(bytes), "bytes are missing");
  same_refusal(lamina::worker<float>(model_of({100, 5001}), options).save(), "another model");
  same_refusal(lamina::worker<float>(model, {.drop_ratio = 0.5}).save(), "momentum");
  // In a step, too.
  device.add(execution);
  device.load(execution, saved);
  require(same_bits(device.save(execution), saved), "what was loaded in a step is another state");
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
    refuses<std::domain_error>({"layer1", has_velocity ? "velocity" : "residual"},
                               [&] { (void)device.save(execution); });
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
    refuses<std::invalid_argument>({"NaN"}, [&] { device.load(execution, bytes); });
    *thrust::device_ptr<float>(last) = 0.0F;
    require(same_bits(device.save(execution), saved), "a refused state has changed something");
  }
}

template <class Execution>
void for_each_state_case(const Execution& execution, const visitor& visit) {
  visit("states that are refused", [&] { refuses_states(execution); });
  visit("states that are not finite", [&] { refuses_what_is_not_finite(execution); });
}

}  // namespace lamina_test
