// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_free.h>
#include <thrust/device_malloc.h>
#include <thrust/device_ptr.h>
#include <thrust/fill.h>
#include <thrust/version.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/cuda/detail/step.hpp"
#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/state.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// Thrust where it is: programs that also load another Thrust put theirs elsewhere by THRUST_CUB_WRAPPED_NAMESPACE.
namespace thrust = THRUST_NS_QUALIFIER;

/// There is not enough device memory; what() says for what, and how many bytes were asked for.
class out_of_memory : public std::bad_alloc {
 public:
  explicit out_of_memory(const std::string& what) : what_(what) {}
  const char* what() const noexcept override { return what_.what(); }

 private:
  std::runtime_error what_;  // whose copies do not throw
};

namespace detail {

template <class X>
std::vector<X> to_host(const X* from, std::size_t count) {
  std::vector<X> host(count);
  const thrust::device_ptr<const X> begin(from);
  thrust::copy(begin, begin + static_cast<std::ptrdiff_t>(count), host.begin());
  return host;
}
template <class X>
void to_device(const std::vector<X>& host, X* to) {
  thrust::copy(host.begin(), host.end(), thrust::device_ptr<X>(to));
}

/// Gives device memory back. After an error that spoiled the context, or once CUDA has shut down, it cannot be freed, and Thrust throws:
/// in a destructor that would end the program, mostly while the error itself is on its way to the caller.
struct device_deleter {
  std::pmr::memory_resource* resource;  // none: thrust::device_malloc, which is cudaMalloc
  std::size_t bytes;

  static constexpr std::size_t alignment_bytes = 16;  // what kernels load at once

  void operator()(void* memory) const noexcept {
    if (resource != nullptr) return resource->deallocate(memory, bytes, alignment_bytes);
    try {
      thrust::device_free(thrust::device_ptr<void>(memory));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next call of CUDA tells it
    }
  }
};

/// Arrays in device memory, from a resource unless that is null, which live as long as this. `what` is what an array is for, in
/// errors. Throws out_of_memory, and what the resource throws that is no std::bad_alloc.
class device_memory {
 public:
  explicit device_memory(std::pmr::memory_resource* resource) : resource_(resource) {}
  device_memory(device_memory&&) noexcept = default;
  device_memory& operator=(device_memory&&) noexcept = default;

  /// Null for no elements.
  template <class X>
  X* filled(std::size_t count, const X& value, const char* what) {
    static_assert(std::is_trivially_copyable_v<X>);
    if (count == 0) return nullptr;
    X* const array = static_cast<X*>(allocate(count * sizeof(X), what));
    thrust::fill_n(thrust::device_ptr<X>(array), count, value);
    return array;
  }
  template <class X>
  X* copy_of(const std::vector<X>& host, const char* what) {
    X* const array = filled(host.size(), X(), what);
    to_device(host, array);
    return array;
  }

 private:
  void* allocate(std::size_t bytes, const char* what) {
    constexpr std::size_t alignment = device_deleter::alignment_bytes;
    try {
      void* const memory =
          resource_ != nullptr ? resource_->allocate(bytes, alignment) : thrust::device_malloc(bytes).get();
      arrays_.emplace_back(memory, device_deleter{resource_, bytes});
      if (reinterpret_cast<std::uintptr_t>(memory) % alignment == 0) return memory;
    } catch (const std::bad_alloc& error) {
      throw out_of_memory(std::string("no device memory for ") + what + ", " + std::to_string(bytes) +
                          " bytes: " + error.what());
    }
    throw std::invalid_argument(std::string("the memory resource gave memory for ") + what +
                                " that does not begin at a multiple of 16 bytes");
  }

  std::pmr::memory_resource* resource_;
  std::vector<std::unique_ptr<void, device_deleter>> arrays_;
};

/// Where the layers of a model begin in a residual: at a row of 64 elements each, so that 16 bytes can be loaded at once. L + 1.
inline std::vector<std::size_t> padded_offsets(const layout& model) {
  std::vector<std::size_t> offsets = {0};
  for (const std::size_t size : model.sizes())
    offsets.push_back(offsets.back() + (size + lanes - 1) / lanes * lanes);
  return offsets;
}

/// The tables of a model's layers and their blocks. Throws std::invalid_argument for 2^32 layers or more.
template <class T>
model_view<T> tables_of(const layout& model, device_memory& memory) {
  if (model.layers() > (std::numeric_limits<std::uint32_t>::max)())
    throw std::invalid_argument("2^32 layers or more are not on the device");
  const std::vector<std::size_t> offsets = padded_offsets(model);
  std::vector<std::size_t> first_block = {0};
  std::vector<block_place> places;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const std::size_t size = model.sizes()[l];
    for (std::size_t begin = 0; begin < size; begin += block_elements) {
      places.push_back({static_cast<std::uint32_t>(l),
                        static_cast<std::uint32_t>((std::min)(size - begin, block_elements)),
                        offsets[l] + begin});
    }
    first_block.push_back(places.size());
  }
  model_view<T> at;
  at.layers = model.layers();
  at.blocks = places.size();
  at.elements = model.elements();
  at.largest_layer = (std::ranges::max)(model.sizes());
  at.sizes = memory.copy_of(std::vector<std::size_t>(model.sizes().begin(), model.sizes().end()), "tables");
  at.offsets = memory.copy_of(offsets, "tables");
  at.first_block = memory.copy_of(first_block, "tables");
  at.places = memory.copy_of(places, "tables");
  at.block_totals = memory.filled(places.size(), 0.0, "the totals of blocks");
  at.arrivals = memory.filled(places.size() + 1, std::uint32_t{0}, "the totals of blocks");
  return at;
}

/// All device memory of a worker but the pointers to its gradients, and its state as bytes.
template <element T>
class worker_memory {
 public:
  /// Of options that were checked. Throws out_of_memory, naming what it is for.
  worker_memory(const tiling& cut, const worker_options& options, std::pmr::memory_resource* resource)
      : cut_(cut), options_(options), memory_(resource), offsets_(padded_offsets(cut.fragments())) {
    const layout& fragments = cut.fragments();
    const std::size_t count = fragments.layers();
    const selector decisions(cut, options);
    at_ = tables_of<T>(fragments, memory_);
    at_.residual = memory_.filled(offsets_.back(), T(0), "the residual");
    if (options.momentum > 0) at_.velocity = memory_.filled(offsets_.back(), T(0), "the velocity");
    at_.values = memory_.filled(count, 0.0, "values");
    at_.is_clear = memory_.filled(count, std::uint8_t{1}, "flags");
    at_.sent_in = memory_.filled(count, std::uint64_t{0}, "ages");
    at_.payload_begin = memory_.filled(count, std::size_t{0}, "tables");
    const std::vector<std::byte> prefix = prefix_of_frames();
    at_.prefix = memory_.copy_of(prefix, "the frame's header");
    at_.prefix_bytes = prefix.size();
    at_.bitmap = reinterpret_cast<std::uint8_t*>(at_.prefix) + lamina::detail::wire_header_bytes;
    at_.candidates = memory_.filled(2 * count, candidate{}, "tables");
    std::vector<std::uint8_t> always(options.always_sent.empty() ? 0 : count);
    for (const std::size_t l : options.always_sent)
      std::fill(always.data() + cut.first(l), always.data() + cut.first(l + 1), std::uint8_t{1});
    at_.always_sent = memory_.copy_of(always, "flags");
    // By the host's text. Under a budget R does not count, and 1 does not grow.
    std::vector<double> ratios;
    const bool grows = !options.send_budget && options.drop_ratio < 1;
    for (std::uint64_t step = 1; grows && step < options.warm_up_steps; ++step)
      ratios.push_back(decisions.drop_ratio_in(step));
    at_.warm_up = memory_.copy_of(ratios, "tables");
    step_state first;
    first.threshold = decisions.threshold();
    at_.state = memory_.filled(1, first, "the state of a step");
  }

  const tiling& tiles() const noexcept { return cut_; }
  const worker_options& options() const noexcept { return options_; }
  const model_view<T>& view() const noexcept { return at_; }  // without gradients

  step_state state() const { return to_host(at_.state, 1)[0]; }
  void set_state(const step_state& now) { to_device(std::vector{now}, at_.state); }

  std::vector<T> residual(std::size_t fragment) const {
    const std::size_t size = cut_.fragments().sizes()[fragment];
    if (to_host(at_.is_clear + fragment, 1)[0] != 0) return std::vector<T>(size);
    return to_host(at_.residual + offsets_[fragment], size);
  }

  std::vector<std::byte> save() const {
    step_state now = state();
    const step_phase phase = now.load_phase();
    if (phase == step_phase::encoded) now.give_back();
    if (phase == step_phase::adding || phase == step_phase::selected)
      throw std::logic_error("save: there are gradients that were not encoded yet");
    const std::vector<T> elements = without_padding(at_.residual, to_host(at_.is_clear, at_.layers));
    const std::vector<T> moving = without_padding(at_.velocity, std::vector<std::uint8_t>(at_.layers));
    const double allowance = options_.send_budget ? now.allowance : 0;
    return save_state<T>(cut_.fragments(), {now.threshold, allowance, to_host(at_.sent_in, at_.layers)},
                         elements, moving, now.step);
  }

  void load(std::span<const std::byte> bytes) {
    saved_state<T> saved = read_state<T>(bytes, cut_.fragments(), at_.velocity != nullptr);
    selector decisions(cut_, options_);
    decisions.restore({saved.memory.threshold, saved.memory.allowance, std::move(saved.memory.sent_in)});
    const auto memory = decisions.remember(saved.step);
    step_state next = state();
    next.step = saved.step;
    next.threshold = memory.threshold;
    next.allowance = memory.allowance;
    next.sent_elements = 0;
    next.payload_bytes = 0;
    next.store_phase(step_phase::none);
    to_device(with_padding(saved.residual), at_.residual);
    if (at_.velocity != nullptr) to_device(with_padding(saved.velocity), at_.velocity);
    to_device(std::vector<std::uint8_t>(at_.layers), at_.is_clear);
    to_device(memory.sent_in, at_.sent_in);
    set_state(next);
  }

 private:
  // All of the header that does not change from step to step, and a bitmap of zeros.
  std::vector<std::byte> prefix_of_frames() const {
    lamina::detail::wire_header header;
    header.element_type = lamina::detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(frame_kind::gradients);
    header.sender = options_.sender;
    header.run = options_.run;
    header.fingerprint = cut_.fragments().fingerprint();
    header.flags = lamina::detail::flag_last;
    header.layers = static_cast<std::uint32_t>(cut_.fragments().layers());
    const std::size_t bitmap_bytes = lamina::detail::padded_bitmap_bytes(cut_.fragments().layers());
    header.payload_type = static_cast<std::uint8_t>(options_.payload);
    std::vector<std::byte> bytes(lamina::detail::wire_header_bytes + bitmap_bytes);
    std::memcpy(bytes.data(), &header, sizeof header);
    return bytes;
  }

  // One fragment after the other, zeros where a flag says that it is clear.
  std::vector<T> without_padding(const T* from, const std::vector<std::uint8_t>& clear) const {
    if (from == nullptr) return {};
    const std::vector<T> rows = to_host(from, offsets_.back());
    std::vector<T> elements(cut_.fragments().elements());
    for (std::size_t f = 0; f < at_.layers; ++f) {
      const std::size_t count = clear[f] == 0 ? cut_.fragments().sizes()[f] : 0;
      std::copy_n(rows.data() + offsets_[f], count, elements.data() + cut_.fragments().offset(f));
    }
    return elements;
  }
  std::vector<T> with_padding(const std::vector<T>& elements) const {
    std::vector<T> rows(offsets_.back());
    for (std::size_t f = 0; f < at_.layers; ++f) {
      const std::size_t count = cut_.fragments().sizes()[f];
      std::copy_n(elements.data() + cut_.fragments().offset(f), count, rows.data() + offsets_[f]);
    }
    return rows;
  }

  tiling cut_;
  worker_options options_;
  device_memory memory_;
  std::vector<std::size_t> offsets_;
  model_view<T> at_;
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::cuda
