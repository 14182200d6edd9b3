// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_ptr.h>
#include <thrust/device_vector.h>

#include <functional>
#include <optional>
#include <stdexcept>

#include "lamina/cuda/device_tensor.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// What the device's cases share: gradients and frames in device memory, and a host to compare with.
namespace lamina_test {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

/// That the call throws an `Exception` whose message has all these parts.
template <class Exception, class Call>
void refuses(const std::vector<std::string>& parts, const Call& call) {
  const std::string message = message_of<Exception>(call);
  for (const std::string& part : parts)
    require(contains(message, part), "the message should name '" + part + "', but is: " + message);
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

/// Elements in device memory. They are copied as bytes, so that Thrust's copies are compiled once.
template <class X>
class on_device {
 public:
  explicit on_device(std::size_t elements) : bytes_(elements * sizeof(X)) {}
  explicit on_device(const std::vector<X>& host) : on_device(host.size()) { set(host); }

  X* data() const {
    return reinterpret_cast<X*>(const_cast<std::byte*>(thrust::raw_pointer_cast(bytes_.data())));
  }
  std::size_t size() const { return bytes_.size() / sizeof(X); }
  void set(std::span<const X> elements, std::size_t at = 0) {
    const auto from = std::as_bytes(elements);
    thrust::copy(from.data(), from.data() + from.size(),
                 bytes_.begin() + static_cast<std::ptrdiff_t>(at * sizeof(X)));
  }
  std::vector<X> get(std::size_t from = 0) const {
    std::vector<X> host(size() - from);
    thrust::copy(bytes_.begin() + static_cast<std::ptrdiff_t>(from * sizeof(X)), bytes_.end(),
                 std::as_writable_bytes(std::span(host)).data());
    return host;
  }

 private:
  thrust::device_vector<std::byte> bytes_;
};
template <class X>
std::vector<X> to_host(const X* begin, std::size_t elements) {
  std::vector<X> host(elements);
  const thrust::device_ptr<const std::byte> from(reinterpret_cast<const std::byte*>(begin));
  thrust::copy(from, from + static_cast<std::ptrdiff_t>(elements * sizeof(X)),
               std::as_writable_bytes(std::span(host)).data());
  return host;
}

/// Device memory that begins at a multiple of 64 bytes.
class frame_buffer {
 public:
  explicit frame_buffer(std::size_t bytes) : memory_(bytes + 63), bytes_(bytes) {
    skipped_ = (64 - reinterpret_cast<std::uintptr_t>(memory_.data()) % 64) % 64;
  }
  std::span<std::byte> bytes() const { return {memory_.data() + skipped_, bytes_}; }
  std::vector<std::byte> to_host() const { return lamina_test::to_host(bytes().data(), bytes_); }

 private:
  on_device<std::byte> memory_;
  std::size_t bytes_;
  std::size_t skipped_ = 0;
};

/// Sizes around lanes, rows and blocks; and some of them.
inline std::vector<std::size_t> some_sizes() {
  return {1, 0, 3, 63, 64, 65, 257, 1000, 4097, 9000, 2};
}
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
  void set(std::size_t layer, const std::vector<G>& gradient) { memory_[layer].set(gradient, skipped_); }
  std::vector<G> get(std::size_t layer) const { return memory_[layer].get(skipped_); }
  std::vector<lamina::cuda::device_tensor> tensors() {
    std::vector<lamina::cuda::device_tensor> tensors;
    for (auto& each : memory_) tensors.emplace_back(each.data() + skipped_, each.size() - skipped_);
    return tensors;
  }

 private:
  std::size_t skipped_;
  std::vector<on_device<G>> memory_;
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
  require(same_bits(to_host(device.values(), device.fragments().layers()), host.values()),
          "the values differ " + where);
}

template <class Host, class Device, class Execution>
void require_same_residuals(const Host& host, const Device& device, const Execution& execution,
                            const std::string& where) {
  for (std::size_t f = 0; f < device.fragments().layers(); ++f) {
    require(same_bits(device.residual(execution, f), host->residual()[f]),
            "the residuals of layer " + device.fragments()[f].name + " differ " + where);
  }
}

/// Calls visit(name, function) for each case of an execution.
using visitor = std::function<void(const std::string& name, const std::function<void()>& run)>;

/// In the place of an execution: launches that run when they are asked for. wait() runs them once, as on a stream on which nothing runs
/// before it has to; replay() again and again, as a graph, whose launches the host does not see.
template <class Execution>
class postponed {
 public:
  explicit postponed(const Execution& execution) : execution_(execution) {}

  template <class Kernel>
  void run(const Kernel& kernel) const {
    launches_.push_back([execution = &execution_, kernel] { execution->run(kernel); });
  }
  void wait() const {
    ++waits;
    for (const auto& launch : std::exchange(launches_, {})) launch();
    execution_.wait();
  }
  void replay() const {
    for (const auto& launch : launches_) launch();
  }
  void require_device_memory(const void* pointer, const char* what) const {
    execution_.require_device_memory(pointer, what);
  }
  void require_writable(const void* begin, std::size_t bytes, const char* what) const {
    execution_.require_writable(begin, bytes, what);
  }
  void require_no_capture(const char* call) const { execution_.require_no_capture(call); }
  void require_current_device() const { execution_.require_current_device(); }

  mutable std::size_t waits = 0;

 private:
  const Execution& execution_;
  mutable std::vector<std::function<void()>> launches_;
};

}  // namespace lamina_test
