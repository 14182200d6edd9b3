// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_ptr.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/cuda/device_tensor.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// What the device's cases share: gradients and frames in device memory, and a host to compare with.
namespace lamina_test {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

template <class G>
std::vector<G> random_gradient(std::mt19937& random, std::size_t elements, float strength) {
  std::vector<G> gradient;
  gradient.reserve(elements);
  for (const float value : random_fractions<float>(random, elements)) {
    if constexpr (lamina::half_element<G>) {
      gradient.push_back(lamina::saturating_round<G>(strength * value));
    } else {
      gradient.push_back(static_cast<G>(strength) * static_cast<G>(value));
    }
  }
  return gradient;
}

/// Device memory that begins at a multiple of 64 bytes.
class frame_buffer {
 public:
  explicit frame_buffer(std::size_t bytes) : memory_(bytes + 63) {
    auto* begin = thrust::raw_pointer_cast(memory_.data());
    skipped_ = (64 - reinterpret_cast<std::uintptr_t>(begin) % 64) % 64;
    bytes_ = {begin + skipped_, bytes};
  }
  std::span<std::byte> bytes() const { return bytes_; }
  std::vector<std::byte> to_host() const {
    std::vector<std::byte> host(bytes_.size());
    const auto begin = memory_.begin() + static_cast<std::ptrdiff_t>(skipped_);
    thrust::copy(begin, begin + static_cast<std::ptrdiff_t>(host.size()), host.begin());
    return host;
  }

 private:
  thrust::device_vector<std::byte> memory_;
  std::size_t skipped_ = 0;
  std::span<std::byte> bytes_;
};

/// L numbers or flags in device memory.
template <class X>
thrust::device_vector<X> on_device(const std::vector<X>& host) {
  return host;
}
template <class X>
const X* address_of(const thrust::device_vector<X>& each) {
  return thrust::raw_pointer_cast(each.data());
}

/// Sizes around lanes, rows and blocks.
inline std::vector<std::size_t> telling_sizes() {
  return {1, 0, 3, 63, 64, 65, 127, 255, 256, 257, 1000, 4095, 4096, 4097, 4160, 8192, 9000, 20001, 2};
}

/// Gradients of all layers in device memory, each `skipped` elements behind an aligned place.
template <class G>
class device_gradients {
 public:
  device_gradients(const lamina::layout& model, std::size_t skipped) : skipped_(skipped) {
    for (const std::size_t elements : model.sizes()) memory_.emplace_back(elements + skipped);
  }
  void set(std::size_t layer, const std::vector<G>& gradient) {
    thrust::copy(gradient.begin(), gradient.end(),
                 memory_[layer].begin() + static_cast<std::ptrdiff_t>(skipped_));
  }
  std::vector<G> get(std::size_t layer) const {
    std::vector<G> host(memory_[layer].size() - skipped_);
    thrust::copy(memory_[layer].begin() + static_cast<std::ptrdiff_t>(skipped_), memory_[layer].end(),
                 host.begin());
    return host;
  }
  std::vector<lamina::cuda::device_tensor> tensors() {
    std::vector<lamina::cuda::device_tensor> tensors;
    for (auto& each : memory_) {
      tensors.emplace_back(thrust::raw_pointer_cast(each.data()) + skipped_, each.size() - skipped_);
    }
    return tensors;
  }

 private:
  std::size_t skipped_;
  std::vector<thrust::device_vector<G>> memory_;
};

/// A lamina::worker in the order of calls of a device: gradients after a selection begin the next step, whatever became of the last.
template <class T, class F = lamina::mean_abs>
class host_worker {
 public:
  host_worker(const lamina::layout& model, lamina::worker_options options)
      : worker_(model, leaving_out(std::move(options))) {}

  template <class G>
  void add(std::size_t layer, const std::vector<G>& gradient, double scale = 1) {
    if (!step_ || is_selected_) {
      step_.reset();
      step_.emplace(worker_.begin());
      is_selected_ = false;
    }
    step_->add(layer, gradient, scale);
  }
  void select(std::span<const double> agreed = {}, std::span<const char> held = {}) {
    if (!agreed.empty()) std::ranges::copy(agreed, step_->values().begin());
    step_->select(held);
    is_selected_ = true;
  }
  std::span<const double> values() { return step_->values(); }
  std::vector<std::byte> encode() {
    is_selected_ = true;
    return step_->frame().to_bytes();
  }
  void commit() { step_->commit(); }
  /// What was not committed is lost. Without expected values: a device plans nothing.
  std::vector<std::byte> save() {
    step_.reset();
    const bool has_velocity = worker_.residual().has_velocity() && worker_.model().elements() > 0;
    const auto saved = lamina::read_state<T>(worker_.save(), worker_.fragments(), has_velocity);
    return lamina::save_state<T>(worker_.fragments(), saved.memory, saved.residual, saved.velocity,
                                 saved.step);
  }
  void load(std::span<const std::byte> bytes) {
    step_.reset();
    worker_.load(bytes);
  }
  const lamina::worker<T, F>& operator*() const { return worker_; }
  const lamina::worker<T, F>* operator->() const { return &worker_; }

 private:
  static lamina::worker_options leaving_out(lamina::worker_options options) {
    options.non_finite = lamina::non_finite::skip;
    return options;
  }

  lamina::worker<T, F> worker_;
  std::optional<typename lamina::worker<T, F>::step> step_;
  bool is_selected_ = false;
};

/// The frame of a step that is selected, as a receiver gets it.
template <class Device, class Execution>
std::vector<std::byte> frame_of(Device& device, const Execution& execution, const frame_buffer& buffer) {
  device.encode(execution, buffer.bytes());
  execution.wait();
  auto bytes = buffer.to_host();
  bytes.resize(lamina::cuda::finish_frame(bytes).size());
  return bytes;
}

/// Whether the device's frame is the host's, and what is known of the step.
template <class Host, class Device, class Execution>
void require_same_frame(Host& host, Device& device, const Execution& execution, const frame_buffer& buffer,
                        const std::string& where) {
  const auto frame = frame_of(device, execution, buffer);
  require(same_bits(frame, host.encode()), "the frames differ " + where);
  const auto report = device.last_step(execution);
  require(same_bits(report.threshold, host->threshold()), "the thresholds differ " + where);
  require(report.step == host->steps(), "the steps differ " + where);
  require(report.left_out_elements == host->residual().left_out_elements(),
          "other elements were left out " + where);
}

template <class Host, class Device>
void require_same_values(Host& host, Device& device, const std::string& where) {
  std::vector<double> values(device.fragments().layers());
  const thrust::device_ptr<double> computed(device.values());
  thrust::copy(computed, computed + static_cast<std::ptrdiff_t>(values.size()), values.begin());
  require(same_bits(values, host.values()), "the values differ " + where);
}

template <class Host, class Device, class Execution>
void require_same_residuals(const Host& host, const Device& device, const Execution& execution,
                            const std::string& where) {
  for (std::size_t f = 0; f < device.fragments().layers(); ++f) {
    require(same_bits(device.residual(execution, f), host->residual()[f]),
            "the residuals of layer " + device.fragments()[f].name + " differ " + where);
  }
}

/// A framework's tensor, whose element type is known at run time, taught to lamina at the end of this file.
struct framework_tensor {
  void* data;
  std::size_t elements;
  bool is_half;
};

/// The same where tensors lie here or there.
struct tensor_here_or_there {
  std::span<const float> on_device;
};

/// Calls visit(name, function) for each case of an execution.
using visitor = std::function<void(const std::string& name, const std::function<void()>& run)>;

/// In the place of an execution: what a graph does while it is captured, and launched again and again. Nothing runs when it
/// is called, and the host's checks see nothing of a replay.
template <class Execution>
class recording {
 public:
  explicit recording(const Execution& execution) : execution_(execution) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    launches_.push_back([execution = &execution_, kernel] { execution->run(kernel); });
  }
  void wait() const { execution_.wait(); }
  void require_device_memory(const void* pointer, const char* what) const {
    execution_.require_device_memory(pointer, what);
  }
  void require_writable(const void* begin, std::size_t bytes, const char* what) const {
    execution_.require_writable(begin, bytes, what);
  }

  void require_current_device() const { execution_.require_current_device(); }

  void replay() const {
    for (const auto& launch : launches_) launch();
  }

 private:
  const Execution& execution_;
  mutable std::vector<std::function<void()>> launches_;
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
