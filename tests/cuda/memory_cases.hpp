// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/device_free.h>
#include <thrust/device_malloc.h>
#include <thrust/device_ptr.h>
#include <thrust/fill.h>

#include <memory>
#include <memory_resource>
#include <new>

#include "device_support.hpp"

/// Where device memory comes from, and pointers that move in every step.
namespace lamina_test {

/// Thrust's memory, counted; so many more pieces can be had.
class counting_resource final : public std::pmr::memory_resource {
 public:
  explicit counting_resource(std::size_t left = static_cast<std::size_t>(-1)) : left_(left) {}

  /// What is out at the moment, and what of it has so many bytes or a few more, in order.
  std::size_t pieces() const { return given_.size(); }
  std::vector<void*> given_of(std::size_t bytes) const {
    std::vector<void*> found;
    for (const auto& [memory, size] : given_) {
      if (size >= bytes && size < bytes + 1024) found.push_back(memory);
    }
    return found;
  }

  std::size_t bad_returns = 0;
  bool is_misaligned = false;

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    if (bytes == 0) throw std::logic_error("nothing was asked for");
    if (left_ == 0) throw std::bad_alloc();
    --left_;
    // Nothing may count on what is in it.
    auto memory = thrust::device_malloc<std::byte>(bytes + 16);
    thrust::fill_n(memory, bytes, std::byte{0xa5});
    std::byte* const begin = memory.get() + (is_misaligned ? 4 : 0);
    given_.emplace_back(begin, bytes);
    return begin;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t) override {
    const auto found = std::ranges::find(given_, std::pair(memory, bytes));
    if (found == given_.end()) {
      ++bad_returns;
      return;
    }
    given_.erase(found);
    thrust::device_free(
        thrust::device_ptr<std::byte>(static_cast<std::byte*>(memory) - (is_misaligned ? 4 : 0)));
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }

  std::size_t left_;
  std::vector<std::pair<void*, std::size_t>> given_;
};

/// All memory comes from the resource and goes back, also where some of it cannot be had, and no step asks for more.
template <class Execution>
void memory_comes_from_a_resource(const Execution& execution) {
  using worker = lamina::cuda::worker<float>;
  const lamina::layout model = model_of({100, 0, 5000, 4097});
  const lamina::worker_options options{.drop_ratio = 0.5,
                                       .warm_up_steps = 3,
                                       .momentum = 0.5,
                                       .payload = lamina::payload_type::int8,
                                       .always_sent = {1}};
  counting_resource memory;
  std::size_t pieces = 0;
  {
    worker device(model, options, {}, &memory);
    pieces = memory.pieces();
    device_gradients<float> gradients(model, 0);
    const frame_buffer buffer(device.largest_frame_bytes());
    for (int step = 1; step <= 4; ++step) {
      device.bind(execution, gradients.tensors());
      device.add(execution);
      device.select(execution);
      device.encode(execution, buffer.bytes());
      device.commit(execution);
    }
    device.load(execution, device.save(execution));
    require(memory.pieces() == pieces, "a step has allocated device memory");
    // One that takes the place of another gives back what that had.
    counting_resource elsewhere;
    worker other(model, options, {}, &elsewhere);
    other = std::move(device);
    require(elsewhere.pieces() == 0 && memory.pieces() == pieces, "a move has not given back what was there");
    other.bind(execution, gradients.tensors());
    other.add(execution);
    execution.wait();
  }
  require(pieces > 15, "only " + std::to_string(pieces) + " pieces of memory came from the resource");
  require(memory.pieces() == 0 && memory.bad_returns == 0, "not all memory went back");

  const std::size_t elements = 128 + 5056 + 4160;  // in whole rows of 64
  bool has_named_the_residual = false;
  for (std::size_t left = 0; left < pieces; ++left) {
    counting_resource little(left);
    const auto message =
        message_of<lamina::cuda::out_of_memory>([&] { const worker device(model, options, {}, &little); });
    has_named_the_residual |= contains(message, "the residual, " + std::to_string(4 * elements) + " bytes");
    require(contains(message, "no device memory for ") && contains(message, " bytes"),
            "the message is: " + message);
    require(little.pieces() == 0 && little.bad_returns == 0,
            "memory was lost after " + std::to_string(left) + " pieces");
  }
  require(has_named_the_residual, "no error has named the residual and its bytes");
  counting_resource misaligned;
  misaligned.is_misaligned = true;
  refuses<std::invalid_argument>({"multiple of 16"},
                                 [&] { const worker device(model, options, {}, &misaligned); });
  require(misaligned.pieces() == 0, "memory that is not aligned did not go back");
}

/// Gradients that move in every step: each launch sees those that were bound before it, however late it runs, and the host never
/// waits. More layers than the arguments of one launch have room for, and parts of them.
template <class Execution>
void pointers_follow_without_waiting(const Execution& execution) {
  std::vector<std::size_t> sizes(500, 3);
  sizes[0] = 0;
  sizes[223] = 9000;
  sizes[224] = 5000;
  sizes[499] = 4097;
  const lamina::layout model = model_of(sizes);
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0, .fragment_elements = 4096});
  const postponed<Execution> stream(execution);
  std::vector<device_gradients<float>> gradients;
  float sum = 0;
  for (std::size_t i = 0; i < 5; ++i) {
    gradients.emplace_back(model, 0);
    const auto each = static_cast<float>(1U << i);
    for (std::size_t l = 0; l < sizes.size(); ++l)
      gradients.back().set(l, std::vector<float>(sizes[l], each * static_cast<float>(l + 1)));
    sum += each;
  }
  for (auto& each : gradients) {
    device.bind(stream, each.tensors());
    device.add(stream);
  }
  require(stream.waits == 0, "the host has waited");
  const auto adds_up_to = [&](float expected) {
    std::size_t part = 0;
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      std::vector<float> residual;
      while (residual.size() < sizes[l] || (sizes[l] == 0 && part == 0)) {
        const auto some = device.residual(stream, part++);
        residual.insert(residual.end(), some.begin(), some.end());
      }
      require(
          residual == std::vector<float>(sizes[l], expected * static_cast<float>(l + 1)),
          "a launch has seen other gradients of layer " + std::to_string(l) + " than were bound before it");
    }
  };
  adds_up_to(sum);
  // What is refused leaves what was bound.
  auto tensors = gradients[0].tensors();
  tensors[224] = {static_cast<float*>(tensors[224].data()), std::size_t{4999}};
  refuses<std::invalid_argument>({"layer224"}, [&] { device.bind(stream, tensors); });
  device.add(stream);
  adds_up_to(sum + 16);
}

template <class Execution>
void for_each_memory_case(const Execution& execution, const visitor& visit) {
  visit("memory of a resource", [&] { memory_comes_from_a_resource(execution); });
  visit("gradients that move", [&] { pointers_follow_without_waiting(execution); });
}

}  // namespace lamina_test
