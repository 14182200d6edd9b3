// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory_resource>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/cuda/detail/add.hpp"
#include "lamina/cuda/detail/bindings.hpp"
#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/memory.hpp"
#include "lamina/cuda/detail/pack.hpp"
#include "lamina/cuda/detail/select.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// What else worker::add() does in its launch. The pointers are to a number each in device memory, which is read when the launch runs.
struct add_options {
  bool commit = false;                   ///< first: the frame before has arrived
  bool select = false;                   ///< last: the step is decided by this worker's own values
  const float* found_inf = nullptr;      ///< not 0: the gradients are refused; none: they are good
  const float* inverse_scale = nullptr;  ///< multiplies each element, as a T; none: 1
};

/// A lamina::worker whose gradients, residual, values, selection and frame are in a device's memory, and bitwise those of a host.
///
///     worker.add(execution);              // a <- a + g for all layers, and their values
///     worker.select(execution);           // Algorithm 1
///     worker.encode(execution, buffer);   // the frame, in one piece
///     worker.commit(execution);           // once it has arrived; what is not committed stays in the residual
///
/// The execution is on_stream of stream.cuh, or with_policy of thrust_execution.hpp. On a stream, one at a time, each call is a launch,
/// which neither allocates nor waits for the host, and can be captured into a graph. Where the frame has arrived when the next
/// gradients are there, a step is two launches:
///
///     worker.add(execution, {.commit = step > 1, .select = true});
///     worker.encode(execution, buffer);
///
/// Elements whose sum would not be finite are left out and counted, since the host would have to wait to refuse a layer.
///
/// Mistakes throw before anything is launched: std::logic_error for a call out of order, before bind(), or with another device current;
/// std::invalid_argument for memory that is not the device's; cuda_error for what CUDA refuses. What a graph launches out of order
/// does nothing, but that gradients are added, and last_step() throws.
///
/// A representative of your own needs LAMINA_HOST_DEVICE before its functions of single elements. If its map ends in a product, as
/// x * x does, nvcc may fuse that with the sum that follows: call the combine of one of lamina's functors, or compile with -fmad=false.
template <element T, representative F = mean_abs>
class worker {
 public:
  /// Allocates on the current device: N elements, twice that with momentum, and tables. Throws std::invalid_argument, naming the
  /// option, for one outside its range or that a device does not have, and for a model without layers; out_of_memory.
  ///
  /// \param model    the layers
  /// \param options  as of lamina::worker, but for `memory` and for frames without a checksum; `non_finite` counts as skip
  /// \param functor  gives the representative value
  /// \param memory   gives all device memory; null: cudaMalloc. A pool, unlike cudaFree, does not wait for what still runs
  explicit worker(const layout& model, const worker_options& options = {}, F functor = {},
                  std::pmr::memory_resource* memory = nullptr)
      : functor_(functor),
        memory_(tiling(model, options.fragment_elements), checked(model, options), memory),
        gradients_(memory_.tiles(), memory),
        largest_frame_bytes_(lamina::largest_frame_bytes<T>(fragments(), options.payload)) {}

  /// Where the gradients are from now on: for each layer a tensor of T, float16 or bfloat16. One launch for each 224 layers. A graph works
  /// on the gradients that were bound last before it is launched. Throws std::invalid_argument, naming the layer, for another number
  /// or type of elements than the model's, and std::logic_error in a capture; what was bound stays.
  template <class Execution, std::ranges::random_access_range Tensors>
  void bind(const Execution& execution, Tensors&& gradients) {
    gradients_.bind(execution, gradients);
  }

  /// a <- a + g for all layers (eq. 1 of the paper), and their values. Begins the next step, or adds the next micro-batch gradients to one
  /// that is not selected. Beyond 1,024 fragments also.select is a launch of its own.
  ///
  /// Gradients that *also.found_inf refuses were never given; a frame is committed all the same. If they would have begun a step, it has
  /// not begun: what is launched before the next gradients does nothing, the frame's place holds none, and last_step().is_refused.
  /// Workers that agree on values have to agree on *found_inf.
  ///
  /// Cost: moves 3 N elements, 2 N where the residual is clear, 2 N more with momentum.
  template <class Execution>
  void add(const Execution& execution, const add_options& also = {}) {
    const auto at = view(execution, "add");
    if (also.commit) require(phase_ == detail::step_phase::encoded, "add with commit", "encode()");
    if (also.found_inf != nullptr) execution.require_device_memory(also.found_inf, "found_inf");
    if (also.inverse_scale != nullptr) execution.require_device_memory(also.inverse_scale, "inverse_scale");
    const bool selects = also.select && at.layers <= detail::most_selected_with_add;
    // Before the launch: if it fails, no commit may discard what it may have added.
    phase_ = selects ? detail::step_phase::selected : detail::step_phase::adding;
    const auto run = [&](auto has_velocity) {
      execution.run(detail::add_kernel<T, F, has_velocity>{
          at, functor_, static_cast<T>(options().momentum), options().payload, also.commit, selects,
          also.found_inf, also.inverse_scale, selection(at, values(), nullptr)});
    };
    at.velocity != nullptr ? run(std::true_type()) : run(std::false_type());
    if (also.select && !selects) select(execution);
  }

  /// Decides what the step sends; again, changes nothing.
  ///
  /// \param execution  what the launch goes to
  /// \param agreed     L values in device memory, mostly the mean of all workers' values(); null: this worker's own
  /// \param held       L bytes in device memory: fragments whose byte is not 0 are not sent, see lamina::worker::step::select; null: none
  template <class Execution>
  void select(const Execution& execution, const double* agreed = nullptr,
              const std::uint8_t* held = nullptr) {
    const auto at = view(execution, "select");
    if (agreed != nullptr) execution.require_device_memory(agreed, "agreed values");
    if (held != nullptr) execution.require_device_memory(held, "flags of what is held");
    require(detail::may_select(phase_), "select", "add()");
    if (phase_ == detail::step_phase::adding) phase_ = detail::step_phase::selected;
    // Also where the step is decided already, which the kernel sees: a graph that is captured now needs the launch.
    execution.run(selection(at, agreed == nullptr ? values() : agreed, held));
  }

  /// Writes the frame of this step to device memory, or to host memory that the device can write. Its length stands in its header and in
  /// last_step(); finish_frame() adds the checksum. `to` has largest_frame_bytes(), aligned to 64.
  template <class Execution>
  void encode(const Execution& execution, std::span<std::byte> to) {
    require(detail::may_encode(phase_), "encode", "select()");
    if (reinterpret_cast<std::uintptr_t>(to.data()) % lamina::detail::payload_alignment_bytes != 0)
      throw std::invalid_argument("encode: the buffer is not aligned to 64 bytes");
    if (to.size() < largest_frame_bytes()) {
      throw std::invalid_argument("encode: the buffer has " + std::to_string(to.size()) +
                                  " bytes, a frame may have " + std::to_string(largest_frame_bytes()));
    }
    execution.require_writable(to.data(), to.size(), "encode");
    run_over_blocks(execution, "encode", true, detail::pack<T>{options().payload, to.data()});
    phase_ = detail::step_phase::encoded;
  }

  /// The last frame has arrived: what was sent leaves the residual.
  template <class Execution>
  void commit(const Execution& execution) {
    require(phase_ == detail::step_phase::encoded, "commit", "encode()");
    run_over_blocks(execution, "commit", false, detail::commit<T>{options().payload});
    phase_ = detail::step_phase::committed;
  }

  /// Writes the payload of this step's frame over the gradients, and zeros where nothing was sent: after an all-reduce of the payloads
  /// each gradient is the mean of what was sent. Throws std::logic_error for half-width or const gradients, and payloads not as_is.
  ///
  /// \param execution  what the launch goes to
  /// \param payload    in device memory; begins prefix_bytes() into a frame
  template <class Execution>
  void restore(const Execution& execution, const std::byte* payload) {
    require(detail::has_frame(phase_), "restore", "encode()");
    if (!gradients_.are_writable() || options().payload != payload_type::as_is)
      throw std::logic_error("restore: gradients that are not const, and payloads, of the residual's type");
    if (reinterpret_cast<std::uintptr_t>(payload) % sizeof(T) != 0)
      throw std::invalid_argument("restore: the payload is not aligned to its elements");
    execution.require_device_memory(payload, "restore");
    run_over_blocks(execution, "restore", true, detail::restore<T>{reinterpret_cast<const T*>(payload)});
  }

  /// Waits for the execution. Throws std::logic_error, once, if launches came out of order since the last call.
  template <class Execution>
  step_report last_step(const Execution& execution) {
    execution.wait();
    detail::step_state state = memory_.state();
    if (std::exchange(state.is_misused, 0U) != 0) {
      memory_.set_state(state);
      throw std::logic_error("a graph has launched select, encode, commit or restore out of order");
    }
    state.is_refused = state.load_phase() == detail::step_phase::refused;
    return state;
  }
  /// The representative value of each fragment after the last add(): L in device memory. Writable, see select().
  double* values() const noexcept { return memory_.view().values; }
  /// The residual of a fragment, copied to the host. Waits for the execution. Throws std::out_of_range.
  template <class Execution>
  std::vector<T> residual(const Execution& execution, std::size_t fragment) const {
    fragments().check_layer(fragment);
    execution.wait();
    return memory_.residual(fragment);
  }

  /// The bytes of lamina::worker::save() after the same steps. A frame that was not committed counts as lost. Waits for the execution.
  /// Throws std::logic_error between add() and encode() and in a capture, std::domain_error, naming the fragment, for a residual that
  /// holds NaN or infinity. Cost: up to three times the bytes of residual and velocity on the host.
  template <class Execution>
  std::vector<std::byte> save(const Execution& execution) const {
    execution.require_no_capture("save");
    execution.wait();
    return memory_.save();
  }
  /// Goes on where a worker of the same model and options was saved, on a device or a host. Waits for the execution. Throws as
  /// lamina::worker::load(), and then changes nothing.
  template <class Execution>
  void load(const Execution& execution, std::span<const std::byte> bytes) {
    execution.require_no_capture("load");
    execution.wait();
    memory_.load(bytes);
    phase_ = detail::step_phase::none;
  }

  /// Before the payload of a frame.
  std::size_t prefix_bytes() const noexcept { return memory_.view().prefix_bytes; }
  std::size_t largest_frame_bytes() const noexcept { return largest_frame_bytes_; }
  /// No step sends more elements: with a send_budget one step's share and the largest fragment; all elements without one, and with
  /// at_least_every.
  std::size_t most_sent_elements() const noexcept {
    if (!options().send_budget || options().at_least_every > 0) return fragments().elements();
    const auto all = static_cast<double>(fragments().elements());
    const double share = detail::product(*options().send_budget, all);
    const double most = lamina::detail::grown_allowance(all, share, memory_.view().largest_layer);
    return static_cast<std::size_t>((std::min)(all, most));
  }
  const worker_options& options() const noexcept { return memory_.options(); }
  const layout& model() const noexcept { return memory_.tiles().model(); }
  /// What is decided and sent: the layers, or their fragments.
  const layout& fragments() const noexcept { return memory_.tiles().fragments(); }

 private:
  static const worker_options& checked(const layout& model, const worker_options& options) {
    (void)selector(tiling(model, options.fragment_elements), options);
    (void)residual_accumulator<T>(layout(std::vector<layer>()), {.momentum = options.momentum});
    if (model.layers() == 0) throw std::invalid_argument("a model without layers has nothing to compress");
    if (options.memory != nullptr)
      throw std::invalid_argument("options.memory is the host's: give the device's as an argument");
    if (options.payload == payload_type::ternary)
      throw std::invalid_argument("options.payload: no device writes ternary yet");
    if (options.error_feedback) throw std::invalid_argument("options.error_feedback is of local_delta");
    if (options.frame_checksum == frame_checksum::none)
      throw std::invalid_argument("options.frame_checksum: finish_frame() adds one");
    return options;
  }

  static void require(bool holds, const char* call, const char* before) {
    if (!holds) throw std::logic_error(std::string(call) + ": call " + before + " of this step before");
  }

  detail::select_kernel<T> selection(const detail::model_view<T>& at, const double* values,
                                     const std::uint8_t* held) const {
    const worker_options& o = options();
    return {at,           values,          held,           o.threshold.has_value(), o.send_budget.value_or(0),
            o.drop_ratio, o.warm_up_steps, o.search_every, o.at_least_every,        o.by_score,
            o.payload};
  }

  template <class Execution, class Work>
  void run_over_blocks(const Execution& execution, const char* call, bool may_share, const Work& work) {
    const auto at = view(execution, call);
    // With as many groups as run at once many blocks need no sharing, and few would leave a GPU without work.
    const unsigned groups = may_share && at.blocks <= 16'384 ? 8 : 1;
    execution.run(detail::blocks_kernel<T, Work>{at, groups, work});
  }

  template <class Execution>
  detail::model_view<T> view(const Execution& execution, const char* call) {
    execution.require_current_device();
    detail::model_view<T> at = memory_.view();
    at.gradients = gradients_.views(call);
    return at;
  }

  F functor_;
  detail::worker_memory<T> memory_;
  detail::bindings<T> gradients_;
  std::size_t largest_frame_bytes_;
  detail::step_phase phase_ = {};  // as of the calls; in a graph they count when it is captured
};

/// The frame that worker::encode() has written to host memory, cut to its length and with its checksum: bitwise the frame of a
/// lamina::worker. Throws decode_error if there is no whole frame. Cost: one read of it.
inline std::span<std::byte> finish_frame(std::span<std::byte> buffer) {
  using namespace lamina::detail;
  if (buffer.size() < wire_header_bytes) throw decode_error(errc::truncated, "a device's frame");
  wire_header header = read_header(buffer);
  if (header.magic != wire_magic) throw decode_error(errc::bad_magic, "a device's frame");
  const std::size_t prefix_bytes = wire_header_bytes + padded_bitmap_bytes(std::size_t{header.layers});
  if (prefix_bytes > buffer.size() || header.payload_bytes > buffer.size() - prefix_bytes)
    throw decode_error(errc::truncated, "a device's frame");
  const auto frame = buffer.first(prefix_bytes + header.payload_bytes);
  header.flags |= flag_checksum;
  std::memcpy(frame.data(), &header, sizeof header);
  header.checksum =
      checksum().add(frame.first(checksum_offset)).add(frame.subspan(wire_header_bytes)).value();
  std::memcpy(frame.data(), &header, sizeof header);
  return frame;
}

}  // namespace lamina::inline LAMINA_ABI::cuda
