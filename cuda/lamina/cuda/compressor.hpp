// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/cuda/detail/accumulate.hpp"
#include "lamina/cuda/detail/bindings.hpp"
#include "lamina/cuda/detail/compressor_memory.hpp"
#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/pack.hpp"
#include "lamina/cuda/detail/select.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/selector.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// What gradient_compressor::accumulate() does in the same launch, and what it is told of the gradients in device memory: a word
/// each, which the kernel reads when it runs, so that a scaler may write them after the launch was enqueued or captured.
struct accumulate_options {
  bool commit = false;  ///< before: the last frame has reached its receiver
  bool select = false;  ///< after: the step is decided, by this worker's own values
  /// Not 0: these gradients are refused. None: they are good.
  const float* found_inf = nullptr;
  /// Multiplies each element, as a T, rounded once, before it is added: the bits of lamina::gradient_compressor with that scale. One
  /// that is not finite leaves out all elements. None: 1.
  const float* inverse_scale = nullptr;
};

/// A worker's side on a device: what lamina::gradient_compressor does, with gradients, residual, values, threshold,
/// selection and frame in the device's memory. Values, thresholds, decisions and bytes are those of the CPU, to the last
/// bit. A step is
///
///     compressor.accumulate(execution);        // a <- a + g over all layers, and their values; also in pieces
///     compressor.select(execution);            // Algorithm 1
///     compressor.encode(execution, buffer);    // the frame, in one piece
///     compressor.commit(execution);            // once it has reached its receiver
///
/// where execution is on_stream of stream.cuh, which makes that four launches, none of which waits for the host or allocates; or
/// with_policy of thrust_execution.hpp. One stream at a time. Where the frame has arrived when the next gradients are there, and
/// this worker's own values decide, it is two:
///
///     compressor.accumulate(execution, {.commit = step > 1, .select = true});
///     compressor.encode(execution, buffer);
///
/// Elements whose sum would not be finite are left out and counted, as by finite_check::each_element, whatever
/// options.check says, since a refusal would have to wait for the host.
///
/// Calls out of order throw before anything is launched. What graphs launch does not pass by the host: there each launch
/// looks at how far the step has come in device memory. One that is out of order, such as commit() after the next
/// accumulate(), leaves residual and gradients as they are, and the next last_step() throws.
///
/// A representative of your own needs LAMINA_HOST_DEVICE before its functions of single elements. If its map ends in a
/// product, as x * x does, and its combine adds, nvcc may fuse the two into one instruction. The device then rounds once
/// where the CPU rounds twice. Call the combine of one of lamina's functors in yours, as in
/// `return lamina::l2_norm::combine(a, b);`, or compile with -fmad=false.
template <element T, representative F = mean_abs>
class gradient_compressor {
 public:
  /// Allocates on the current device: N elements, twice that with momentum, and tables. Throws std::invalid_argument,
  /// naming the option, for one outside its range, for options.decide other than at_end, options.priority other than value,
  /// which the host alone has, and for a model without layers;
  /// out_of_memory, naming what it is for.
  ///
  /// \param model    of the gradients
  /// \param options  as those of the host, without what is named above
  /// \param functor  the representative
  /// \param memory   where all device memory comes from; null: cudaMalloc, as Thrust calls it. Wait for the execution before the
  ///                 compressor goes, or another takes its place: cudaFree waits by itself, a pool does not
  explicit gradient_compressor(const layout& model, const compressor_options& options = {}, F functor = {},
                               std::pmr::memory_resource* memory = nullptr)
      : options_(checked(model, options)),
        functor_(functor),
        partition_(model, options.part_elements),
        gradients_(partition_, memory),
        memory_(partition_, options_, memory) {}

  gradient_compressor(const gradient_compressor&) = delete;
  gradient_compressor& operator=(const gradient_compressor&) = delete;
  gradient_compressor(gradient_compressor&&) noexcept = default;
  gradient_compressor& operator=(gradient_compressor&&) noexcept = default;

  /// Where the gradients are from now on, `gradients[l]` being that of layer l: n_l elements of T, lamina::float16 or
  /// lamina::bfloat16. The pointers are arguments of launches, one for each 224 layers: nothing is allocated or
  /// waited for. A graph works on the gradients that were bound last before its launch. Throws std::invalid_argument, naming the
  /// layer, and keeps what was bound before, for a number of elements or an element type other than the model's, and on a stream
  /// for memory that is not of its device; std::logic_error while a graph is captured.
  template <class Execution, std::ranges::random_access_range Tensors>
  void bind(const Execution& execution, Tensors&& gradients) {
    gradients_.bind(execution, gradients);
  }

  /// a <- a + g for all layers (eq. 1 of the paper), and their values. One launch; moves 3 N elements, 2 N where the residual is
  /// clear, 2 N more with momentum. With `also` the same launch does first what commit() does, and last what select(execution) does;
  /// beyond 1,024 parts selecting is a launch of its own. The first call after select(), encode() or commit() begins the next
  /// step; more calls before select() add micro-batch gradients, for which momentum does not decay again. Throws
  /// std::logic_error before the first bind(), and with also.commit unless encode() came last.
  ///
  /// Gradients that `also.found_inf` refuses were never given, as those that lamina::gradient_compressor::accumulate_all() refuses:
  /// residual, velocity, threshold and step stay, values() are those of the residual, and a frame is committed where also.commit
  /// says so. If they were the first of their step after a commit, that has not begun: select(), encode(), commit() and restore()
  /// do nothing until gradients come that are not refused, what lies at the frame's place has no magic number, and
  /// last_step().is_refused tells. After a frame that was not committed, encode() writes that one again. Workers that agree on
  /// values have to agree on *found_inf.
  template <class Execution>
  void accumulate(const Execution& execution, const accumulate_options& also = {}) {
    const auto at = view(execution, "accumulate");
    if (also.commit) require(lamina::detail::may_commit(phase_), "accumulate with commit", "encode()");
    const detail::gradient_terms terms = {also.found_inf, also.inverse_scale};
    if (also.found_inf != nullptr) execution.require_device_memory(also.found_inf, "found_inf");
    if (also.inverse_scale != nullptr) execution.require_device_memory(also.inverse_scale, "inverse_scale");
    // Before the launch: if it fails, no commit may discard what it may have added.
    phase_ = step_phase::accumulating;
    has_frame_ = false;
    const bool selects = also.select && parts().layers() <= detail::most_selected_by_last_team;
    if (selects) {
      phase_ = step_phase::selected;
      selected_by_ = selection_kind::own_values;
    }
    if (memory_.velocity.empty()) {
      add<detail::reduction_of::residuals>(execution, at, also.commit, terms, selects);
    } else {
      add<detail::reduction_of::corrected_residuals>(execution, at, also.commit, terms, selects);
    }
    if (also.select && !selects) select(execution);
  }

  /// Decides the step; called again, leaves it as it is. A layer whose value is NaN goes out first, and one whose value is 0
  /// only where everything does, by always_sent or by max_age. One launch. Throws std::logic_error unless accumulate() came
  /// before, and if agreed values decided the step.
  template <class Execution>
  void select(const Execution& execution) {
    select(execution, selection_kind::own_values, values(), nullptr);
  }
  /// The same by L values in device memory that all workers have agreed on, mostly the mean of their values(). Throws
  /// std::logic_error also if this worker's own values decided the step.
  template <class Execution>
  void select(const Execution& execution, const double* agreed_values) {
    execution.require_device_memory(agreed_values, "agreed values");
    select(execution, selection_kind::agreed_values, agreed_values, nullptr);
  }
  /// The same, and parts whose byte in `held`, L in device memory, is not 0 are not sent, whatever R, the budget, max_age or
  /// always_sent say. Their elements are the first that count as held back, they take nothing from the budget, and their
  /// values are not looked at. Throws std::logic_error also if the step was decided with nothing held; other bytes than the step
  /// was decided with are told by the next last_step(), since they lie on the device.
  template <class Execution>
  void select(const Execution& execution, const double* agreed_values, const std::uint8_t* held) {
    execution.require_device_memory(agreed_values, "agreed values");
    execution.require_device_memory(held, "flags of what is held");
    select(execution, selection_kind::agreed_but_for_held, agreed_values, held);
  }

  /// Writes the frame of this step: to device memory, or to host memory that the device can write, so that no copy
  /// follows. How long the frame is stands in its header and in last_step(); it has no checksum: finish_frame() adds it.
  /// One launch. Throws std::logic_error unless select() came before, std::invalid_argument unless `to` is aligned to 64
  /// bytes and has largest_frame_bytes(), and on a stream for a buffer that the device cannot write.
  template <class Execution>
  void encode(const Execution& execution, std::span<std::byte> to) {
    require(lamina::detail::may_encode(phase_), "encode", "select()");
    if (reinterpret_cast<std::uintptr_t>(to.data()) % lamina::detail::payload_alignment_bytes != 0) {
      throw std::invalid_argument("encode: the buffer is not aligned to 64 bytes");
    }
    if (to.size() < largest_frame_bytes()) {
      throw std::invalid_argument("encode: the buffer has " + std::to_string(to.size()) +
                                  " bytes, a frame may have " + std::to_string(largest_frame_bytes()));
    }
    execution.require_writable(to.data(), to.size(), "encode");
    execution.run(detail::pack_kernel<T>{view(execution, "encode"), options_.payload, to.data()});
    phase_ = step_phase::encoded;
    has_frame_ = true;
  }

  /// The last frame has reached its receiver: takes what was sent out of the residual. One launch. Throws
  /// std::logic_error unless encode() came before, once.
  template <class Execution>
  void commit(const Execution& execution) {
    require(lamina::detail::may_commit(phase_), "commit", "encode()");
    execution.run(detail::commit_kernel<T>{view(execution, "commit"), options_.payload});
    phase_ = step_phase::committed;
  }

  /// Writes the payload of a frame of this step's selection over the bound tensors, zeros for the layers not sent: after an
  /// allreduce of the payload each gradient is the mean of what was sent. `payload` begins prefix_bytes() into a
  /// frame, in device memory. One launch. Throws std::logic_error unless encode() came after the last accumulate(), and
  /// where half-width or const gradients are bound or payloads are not as_is.
  template <class Execution>
  void restore(const Execution& execution, const std::byte* payload) {
    require(has_frame_, "restore", "encode()");
    if (!gradients_.are_writable() || options_.payload != payload_type::as_is) {
      throw std::logic_error(
          "restore: gradients must not be const, and gradients and payloads of the residual's type");
    }
    if (reinterpret_cast<std::uintptr_t>(payload) % sizeof(T) != 0) {
      throw std::invalid_argument("restore: the payload is not aligned to its elements");
    }
    execution.require_device_memory(payload, "restore");
    execution.run(detail::restore_kernel<T>{view(execution, "restore"), reinterpret_cast<const T*>(payload)});
  }

  /// What the last step came to.
  struct report {
    std::uint64_t step;  ///< counted from 1
    double threshold;    ///< λ
    std::size_t sent_elements;
    std::size_t payload_bytes;      ///< of the frame, which is prefix_bytes() longer
    std::size_t left_out_elements;  ///< so far, since their sums would not have been finite
    std::uint64_t refused_batches;  ///< so far, by *found_inf
    bool is_refused;                ///< the last one, and since the commit before it no step has begun
  };
  /// Waits for the execution. Throws std::logic_error, once, if launches came out of order since the last call.
  template <class Execution>
  report last_step(const Execution& execution) {
    execution.wait();
    detail::step_state state = memory_.state[0];
    if (const std::uint32_t misuses = std::exchange(state.misuse, 0U); misuses != 0) {
      memory_.state[0] = state;
      throw std::logic_error(detail::described(misuses));
    }
    return {state.step,           state.threshold,         state.sent_elements,
            state.payload_bytes,  state.left_out_elements, state.refused_batches,
            state.is_refused != 0};
  }
  /// The elements of each part that were left out so far: L numbers, in the order of parts(). Waits for the execution.
  template <class Execution>
  std::vector<std::uint64_t> left_out_elements(const Execution& execution) const {
    execution.wait();
    std::vector<std::uint64_t> elements(memory_.left_out.size());
    thrust::copy(memory_.left_out.begin(), memory_.left_out.end(), elements.begin());
    return elements;
  }
  /// q of each part after the last accumulate, L in device memory.
  double* values() noexcept { return memory_.values.data().get(); }
  /// The residual of a part, copied to the host. Waits for the execution. Throws std::out_of_range.
  template <class Execution>
  std::vector<T> residual(const Execution& execution, std::size_t part) const {
    parts().check_layer(part);
    execution.wait();
    std::vector<T> elements(parts().sizes()[part]);
    if (memory_.is_clear[part] == 0) {
      const auto begin = memory_.residual.begin() + static_cast<std::ptrdiff_t>(memory_.tables.offset(part));
      thrust::copy(begin, begin + static_cast<std::ptrdiff_t>(elements.size()), elements.begin());
    }
    return elements;
  }

  /// Everything a later step depends on, as the bytes that lamina::gradient_compressor::save() gives after the same steps: they load
  /// there and here, and lamina::merge_states<T>(states, parts()) merges them. A frame that was encoded and not committed counts as
  /// lost. Waits for the execution; copies residual and velocity to the host, and has up to twice their bytes there meanwhile. Throws
  /// std::logic_error while gradients of a step wait to be encoded, and std::domain_error, naming the part, for a residual that
  /// holds NaN or infinity.
  template <class Execution>
  std::vector<std::byte> save(const Execution& execution) {
    execution.require_no_capture("save");
    execution.wait();
    return memory_.state_of_steps(parts(), options_).save();
  }
  /// Takes up where a compressor of the same model and options was saved, here or on a CPU; from then on both do the same, bit for bit.
  /// What was bound stays. Waits for the execution, and copies residual and velocity to the device. Changes nothing and throws
  /// decode_error, with a state_errc, and std::invalid_argument as lamina::gradient_compressor::load().
  template <class Execution>
  void load(const Execution& execution, std::span<const std::byte> bytes) {
    execution.require_no_capture("load");
    execution.wait();
    memory_.state_of_steps(parts(), options_).load(bytes);
    phase_ = step_phase::committed;
    has_frame_ = false;
  }

  /// Bytes before the payload of a frame.
  std::size_t prefix_bytes() const noexcept { return memory_.prefix.size(); }
  std::size_t largest_frame_bytes() const noexcept { return memory_.largest_frame_bytes; }
  /// No step sends more elements, so that a count is known before it is decided: with a byte_budget one step's share and the
  /// largest layer (or part), which is as far as the allowance grows; all elements without one, and with max_age, which may send
  /// them all at once.
  std::size_t most_sent_elements() const noexcept {
    if (!options_.byte_budget || options_.max_age > 0) return parts().elements();
    const auto all = static_cast<double>(parts().elements());
    const double share = detail::product(*options_.byte_budget, all);
    return static_cast<std::size_t>(
        (std::min)(all, lamina::detail::grown_allowance(all, share, memory_.largest_layer)));
  }
  /// The model given, and what is decided on: the layers themselves, or their parts. Frames are of parts().
  const layout& model() const noexcept { return partition_.model(); }
  const layout& parts() const noexcept { return partition_.parts(); }

 private:
  using selection_kind = detail::selection_kind;
  using step_phase = lamina::detail::step_phase;

  static const compressor_options& checked(const layout& model, const compressor_options& options) {
    (void)layer_selector(model, options);
    (void)lamina::residual_accumulator<T>(lamina::layout(std::vector<layer>()),
                                          {.momentum = options.momentum});
    if (model.layers() == 0) throw std::invalid_argument("a model without layers has nothing to compress");
    if (options.decide != decision_timing::at_end) {
      throw std::invalid_argument(
          "options.decide must be decision_timing::at_end on a device: as_ready and ahead are of the host");
    }
    if (options.priority != priority_rule::value) {
      throw std::invalid_argument(
          "options.priority must be priority_rule::value on a device: value_times_waiting is of the host");
    }
    return options;
  }

  static void require(bool holds, const char* call, const char* before) {
    if (!holds) throw std::logic_error(std::string(call) + ": call " + before + " of this step before");
  }

  template <class Execution>
  void select(const Execution& execution, selection_kind kind, const double* values,
              const std::uint8_t* held) {
    const auto at = view(execution, "select");
    require(lamina::detail::may_select(phase_), "select", "accumulate()");
    if (phase_ == step_phase::accumulating) {
      phase_ = step_phase::selected;
      selected_by_ = kind;
    } else if (selected_by_ != kind) {
      throw std::logic_error(detail::other_selection_sentence);
    }
    // Also where the step is decided already, which the kernel sees: a graph that is captured now needs the launch.
    execution.run(selection(at, kind, values, held));
  }

  detail::select_kernel<T> selection(const detail::model_view<T>& at, selection_kind kind,
                                     const double* values, const std::uint8_t* held) {
    const std::uint8_t* always_sent = memory_.always_sent.data().get();
    return {at,
            detail::decision_rules(options_),
            kind,
            values,
            held,
            memory_.held_before.data().get(),
            always_sent,
            memory_.warm_up.data().get(),
            memory_.largest_layer,
            memory_.candidates.data().get()};
  }

  template <detail::reduction_of Of, class Execution>
  void add(const Execution& execution, const detail::model_view<T>& at, bool commits,
           const detail::gradient_terms& terms, bool selects) {
    const detail::frame_before before = {commits, options_.payload};
    const detail::end_of_gradients<T> end = {at.state, before, terms, selects,
                                             selection(at, selection_kind::own_values, values(), nullptr)};
    execution.run(detail::accumulate_kernel<T, F, Of, detail::end_of_gradients<T>>{
        at, functor_, values(), end, static_cast<T>(options_.momentum), before, terms});
  }

  // Before anything is noted: where it throws, nothing has happened.
  template <class Execution>
  detail::model_view<T> view(const Execution& execution, const char* call) {
    execution.require_current_device();
    detail::model_view<T> at = memory_.view();
    at.gradients = gradients_.views(call);
    return at;
  }

  compressor_options options_;
  F functor_;
  partition partition_;
  detail::bindings<T> gradients_;
  detail::compressor_memory<T> memory_;
  // As of the calls; in a graph they count when it is captured.
  step_phase phase_ = step_phase::committed;
  selection_kind selected_by_ = selection_kind::own_values;
  bool has_frame_ = false;  // of the gradients that came last
};

}  // namespace lamina::inline LAMINA_ABI::cuda
