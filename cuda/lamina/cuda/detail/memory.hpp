// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/fill.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/search.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Where the layers of a model and their blocks are, in device memory.
class tables {
 public:
  /// Allocates on the current device, from a resource unless that is null. Throws std::invalid_argument for 2^32 layers or more.
  tables(const layout& model, std::pmr::memory_resource* memory)
      : elements_(model.elements()),
        sizes_(memory, "tables"),
        offsets_(memory, "tables"),
        first_block_(memory, "tables"),
        places_(memory, "tables"),
        block_totals_(memory, "the totals of blocks"),
        arrivals_(memory, "the totals of blocks") {
    if (model.layers() > (std::numeric_limits<std::uint32_t>::max)())
      throw std::invalid_argument("2^32 layers or more are not on the device");
    std::vector<std::size_t> first_block = {0};
    std::vector<block_place> places;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t size = model.sizes()[l];
      offset_of_.push_back(padded_elements_);
      for (std::size_t begin = 0; begin < size; begin += block_elements) {
        const std::size_t count = (std::min)(size - begin, block_elements);
        places.push_back(
            {static_cast<std::uint32_t>(l), static_cast<std::uint32_t>(count), padded_elements_ + begin});
      }
      first_block.push_back(places.size());
      // So that each layer begins where 16 bytes can be loaded at once.
      padded_elements_ += (size + lanes - 1) / lanes * lanes;
    }
    sizes_ = std::vector<std::size_t>(model.sizes().begin(), model.sizes().end());
    offsets_ = offset_of_;
    first_block_ = first_block;
    places_ = places;
    block_totals_.resize(places.size());
    arrivals_.resize(places.size() + 1);
  }

  /// Where a layer begins in a buffer of padded_elements(), on the host.
  std::size_t offset(std::size_t layer) const { return offset_of_[layer]; }
  std::size_t padded_elements() const noexcept { return padded_elements_; }

  template <class T>
  model_view<T> view() {
    model_view<T> at;
    at.layers = sizes_.size();
    at.blocks = places_.size();
    at.elements = elements_;
    at.sizes = sizes_.data().get();
    at.offsets = offsets_.data().get();
    at.first_block = first_block_.data().get();
    at.places = places_.data().get();
    at.block_totals = block_totals_.data().get();
    at.arrivals = arrivals_.data().get();
    return at;
  }

 private:
  std::size_t elements_;
  std::size_t padded_elements_ = 0;
  std::vector<std::size_t> offset_of_;
  device_array<std::size_t> sizes_;
  device_array<std::size_t> offsets_;
  device_array<std::size_t> first_block_;
  device_array<block_place> places_;
  device_array<double> block_totals_;
  device_array<std::uint32_t> arrivals_;
};

/// All device memory of a worker but the pointers to its gradients, and its state as bytes.
template <element T>
class worker_memory {
 public:
  /// Of options that were checked. Throws out_of_memory, naming what it is for.
  worker_memory(const partition& cut, const worker_options& options, std::pmr::memory_resource* resource)
      : resource_(resource), tables_(cut.parts(), resource) {
    const layout& fragments = cut.parts();
    const std::size_t count = fragments.layers();
    const selector decisions(cut, options);
    residual_.resize(tables_.padded_elements());
    if (options.momentum > 0) velocity_.resize(tables_.padded_elements());
    values_.resize(count);
    is_clear_.assign(count, 1);
    sent_in_.resize(count);
    payload_begin_.resize(count);
    candidates.resize(2 * count);
    if (options.payload != payload_type::as_is) rounded_in_.resize(tables_.view<T>().blocks);
    prefix_ = prefix_of_frames(fragments, options);
    if (!options.always_sent.empty()) {
      std::vector<std::uint8_t> flags(count);
      for (const std::size_t layer : options.always_sent)
        std::fill(flags.begin() + offset_in(cut, layer), flags.begin() + offset_in(cut, layer + 1), 1);
      always_sent = flags;
    }
    // By the host's text. Under a budget R does not count, and 1 does not grow.
    if (!options.send_budget && options.drop_ratio < 1) {
      std::vector<double> ratios;
      for (std::uint64_t step = 1; step < options.warm_up_steps; ++step)
        ratios.push_back(decisions.drop_ratio_in(step));
      warm_up = ratios;
    }
    step_state first;
    first.threshold = decisions.threshold();
    state.assign(1, first);
  }

  /// As kernels see it, without gradients.
  model_view<T> view() {
    auto at = tables_.template view<T>();
    at.residual = residual_.data().get();
    at.velocity = velocity_.data().get();
    at.values = values_.data().get();
    at.is_clear = is_clear_.data().get();
    at.sent_in = sent_in_.data().get();
    at.payload_begin = payload_begin_.data().get();
    at.rounded_in = rounded_in_.data().get();
    at.prefix = prefix_.data().get();
    at.prefix_bytes = prefix_.size();
    at.bitmap = reinterpret_cast<std::uint8_t*>(at.prefix) + lamina::detail::wire_header_bytes;
    at.state = state.data().get();
    return at;
  }
  std::size_t prefix_bytes() const noexcept { return prefix_.size(); }

  /// The residual of a fragment, copied to the host, as the following once all that was launched is done.
  std::vector<T> residual(const layout& fragments, std::size_t fragment) const {
    std::vector<T> elements(fragments.sizes()[fragment]);
    if (is_clear_[fragment] != 0) return elements;
    const auto begin = residual_.begin() + static_cast<std::ptrdiff_t>(tables_.offset(fragment));
    thrust::copy(begin, begin + static_cast<std::ptrdiff_t>(elements.size()), elements.begin());
    return elements;
  }

  std::vector<std::byte> save(const layout& fragments, const worker_options& options) const {
    const step_state now = state[0];
    const step_phase phase = now.load_phase();
    if (phase == step_phase::adding || phase == step_phase::selected) {
      throw std::logic_error("save: step " +
                             std::to_string(now.step + (phase == step_phase::adding ? 1 : 0)) +
                             " has gradients that were not encoded yet");
    }
    const std::vector<std::uint8_t> clear = to_host(is_clear_);
    const std::vector<T> elements = without_padding(fragments, residual_, clear);
    const std::vector<T> moving = without_padding(fragments, velocity_, {});
    return save_state<T>(fragments,
                         {now.threshold, options.send_budget ? now.allowance : 0, to_host(sent_in_)},
                         elements, moving, now.step);
  }

  /// All is read and checked before the first of it is written.
  void load(const partition& cut, const worker_options& options, std::span<const std::byte> bytes) {
    const layout& fragments = cut.parts();
    saved_state<T> saved = read_state<T>(bytes, fragments, !velocity_.empty());
    selector decisions(cut, options);
    decisions.restore({saved.memory.threshold, saved.memory.allowance, std::move(saved.memory.cleared_in)});
    const auto memory = decisions.remember(saved.step);
    step_state next = state[0];
    next.step = saved.step;
    next.threshold = memory.threshold;
    next.allowance = memory.allowance;
    next.sent_elements = 0;
    next.payload_bytes = 0;
    next.store_phase(step_phase::none);
    write(fragments, saved.residual, residual_);
    if (!velocity_.empty()) write(fragments, saved.velocity, velocity_);
    thrust::fill(is_clear_.begin(), is_clear_.end(), std::uint8_t{0});
    thrust::copy(memory.sent_in.begin(), memory.sent_in.end(), sent_in_.begin());
    // Steps are counted from another one on: none of them is rounded yet.
    thrust::fill(rounded_in_.begin(), rounded_in_.end(), std::uint64_t{0});
    state[0] = next;
  }

 private:
  std::pmr::memory_resource* resource_;
  tables tables_;
  device_array<T> residual_{resource_, "the residual"};
  device_array<T> velocity_{resource_, "the velocity"};  // none without momentum
  device_array<double> values_{resource_, "values"};
  device_array<std::uint8_t> is_clear_{resource_, "flags"};
  device_array<std::uint64_t> sent_in_{resource_, "ages"};
  device_array<std::size_t> payload_begin_{resource_, "tables"};
  device_array<std::uint64_t> rounded_in_{resource_, "tables"};  // none where payloads are as_is
  device_array<std::byte> prefix_{resource_, "the frame's header"};

 public:
  device_array<candidate> candidates{resource_, "tables"};
  device_array<std::uint8_t> always_sent{resource_, "flags"};  // none if no layer is
  device_array<double> warm_up{resource_, "tables"};           // R of its steps; none without
  device_array<step_state> state{resource_, "the state of a step"};

 private:
  static std::ptrdiff_t offset_in(const partition& cut, std::size_t layer) {
    return static_cast<std::ptrdiff_t>(cut.first(layer));
  }

  // All of the header that does not change from step to step, and a bitmap of zeros.
  static std::vector<std::byte> prefix_of_frames(const layout& fragments, const worker_options& options) {
    lamina::detail::wire_header header;
    header.element_type = lamina::detail::element_code<T>;
    header.kind = static_cast<std::uint8_t>(frame_kind::gradients);
    header.sender = options.sender;
    header.run = options.run;
    header.fingerprint = fragments.fingerprint();
    header.layers = fragments.layers();
    header.payload_type = static_cast<std::uint8_t>(options.payload);
    std::vector<std::byte> bytes(lamina::detail::wire_header_bytes +
                                 lamina::detail::padded_bitmap_bytes(fragments.layers()));
    lamina::detail::write_header(bytes, header);
    return bytes;
  }

  template <class X>
  static std::vector<X> to_host(const device_array<X>& from) {
    std::vector<X> numbers(from.size());
    thrust::copy(from.begin(), from.end(), numbers.begin());
    return numbers;
  }

  // One fragment after the other, zeros where a flag says that it is clear.
  std::vector<T> without_padding(const layout& fragments, const device_array<T>& from,
                                 std::span<const std::uint8_t> clear) const {
    std::vector<T> elements = to_host(from);
    if (from.empty()) return elements;
    auto to = elements.begin();
    for (std::size_t f = 0; f < fragments.layers(); ++f) {
      const auto begin = elements.begin() + static_cast<std::ptrdiff_t>(tables_.offset(f));
      const auto size = static_cast<std::ptrdiff_t>(fragments.sizes()[f]);
      // Never beyond where it is read.
      const bool is_zero = !clear.empty() && clear[f] != 0;
      to = is_zero ? std::fill_n(to, size, T(0)) : std::copy(begin, begin + size, to);
    }
    elements.erase(to, elements.end());
    return elements;
  }

  void write(const layout& fragments, const std::vector<T>& elements, device_array<T>& to) const {
    std::vector<T> rows(tables_.padded_elements());
    auto from = elements.begin();
    for (std::size_t f = 0; f < fragments.layers(); ++f) {
      const auto end = from + static_cast<std::ptrdiff_t>(fragments.sizes()[f]);
      std::copy(from, end, rows.begin() + static_cast<std::ptrdiff_t>(tables_.offset(f)));
      from = end;
    }
    thrust::copy(rows.begin(), rows.end(), to.begin());
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
