// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>

#include "lamina/cuda/detail/select.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"

/// What the last team of an accumulate_kernel does, when all values are there.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Of values without a step.
struct nothing_more {
  static constexpr bool is_called = false;
  struct shared_memory {};
  template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team&, shared_memory&) const {}
};

/// What the caller says of the frame before: whether it has arrived, so that the pass which adds the next gradients takes what
/// it said out of the residual first.
struct frame_before {
  bool has_arrived = false;
  payload_type payload = payload_type::as_is;

  /// Not without a frame of the residual as it is, and not where commit was launched for it: the phase tells both.
  LAMINA_HOST_DEVICE bool is_committed_by(const step_state& state) const {
    return has_arrived && lamina::detail::may_commit(state.load_phase());
  }
};

/// What the caller says of the gradients, in device memory, where it may become known after the launch was enqueued.
struct gradient_terms {
  const float* found_inf = nullptr;      // none: they are good
  const float* inverse_scale = nullptr;  // none: 1

  LAMINA_HOST_DEVICE bool are_refused() const { return found_inf != nullptr && *found_inf != 0.0F; }
  template <class T>
  LAMINA_HOST_DEVICE T scale() const {
    return inverse_scale == nullptr ? T(1) : static_cast<T>(*inverse_scale);
  }
};

/// The most layers that a step is decided over by the last team, half of select_kernel's threads: beyond it each layer is
/// read several times, and what counts is how many threads wait for that.
inline constexpr std::size_t most_selected_by_last_team = 1024;

/// Of gradients that were added: the step has them, and is decided where that was asked for. Where they were refused the step is
/// what it was. Before it no team of the launch has written how far the step has come.
template <element T>
struct end_of_gradients {
  static constexpr bool is_called = true;
  using shared_memory = typename select_kernel<T>::shared_memory;

  step_state* state;
  frame_before before;
  gradient_terms terms;
  bool selects;
  select_kernel<T> select;

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    if (team.thread() == 0) note_phase();
    if (!selects) return;
    team.barrier();
    decide(team, shared, select);
  }

 private:
  // Called: beside the pass its registers would not fit.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE LAMINA_CALLED static void decide(const Team& team, shared_memory& shared,
                                                      const select_kernel<T>& select) {
    select(team, shared);
  }

  LAMINA_HOST_DEVICE void note_phase() const {
    const bool commits = before.is_committed_by(*state);
    if (commits) {
      state->allowance -= static_cast<double>(state->sent_elements);
    } else if (before.has_arrived) {
      state->raise(state->has_frame == 0 ? misuse::commit_without_frame : misuse::commit_twice);
    }
    if (!terms.are_refused()) {
      state->store_phase(step_phase::accumulating);
      state->has_frame = 0;
      state->is_refused = 0;
      return;
    }
    ++state->refused_batches;
    if (commits) state->store_phase(step_phase::committed);
    if (state->load_phase() != step_phase::committed) return;
    // No step has begun: there is nothing to decide, to send, or to write over the gradients.
    state->is_refused = 1;
    state->has_frame = 0;
    state->sent_elements = 0;
    state->payload_bytes = 0;
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
