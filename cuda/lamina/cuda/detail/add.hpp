// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/select.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Combines the totals of blocks in the order of representative.hpp, without a launch of its own: the group that completes a run of 64
/// combines it, whichever that is, and goes on with the run of runs that this one belongs to. Called by all of a group, which has
/// `total` of a block in thread 0. Whether that completes the layer: then `total` is the layer's.
LAMINA_ANY_CALLER template <class F, class T, class Group>
LAMINA_HOST_DEVICE bool complete_layer(const F& functor, const model_view<T>& at, const Group& group,
                                       std::size_t layer, std::size_t block, double& total) {
  constexpr auto each = static_cast<unsigned>(totals_per_run) / Group::threads;
  const std::size_t first = at.first_block[layer];
  std::size_t count = at.first_block[layer + 1] - first;
  std::size_t index = block - first;
  double* const of_layer = at.block_totals + first;
  // The total of a run stands where its first did. Its counter does too, moved on by its level: only a run of one, which
  // needs no counter, has fewer than 64 blocks where a level lies below it.
  std::size_t distance = 1;
  for (unsigned level = 0;; ++level) {
    const std::size_t run = index / totals_per_run;
    const std::size_t head = run * totals_per_run * distance;
    const std::size_t rest = count - run * totals_per_run;
    const auto length = static_cast<unsigned>(rest < totals_per_run ? rest : totals_per_run);
    if (length == 1) {
      total = functor.combine(0.0, total);
    } else {
      if (group.thread() == 0) of_layer[head + index % totals_per_run * distance] = total;
      if (!group.is_last_to_arrive(at.arrivals[first + head + level], length)) return false;
      double own[each];
      for (unsigned k = 0; k < each; ++k) {
        const unsigned place = k * Group::threads + group.thread();
        own[k] = place < length ? of_layer[head + place * distance] : 0.0;
      }
      total = 0;
      for (unsigned k = 0; k < each; ++k) {
        for (unsigned thread = 0; thread < Group::threads; ++thread) {
          const double next = group.from(own[k], thread);
          if (k * Group::threads + thread < length) total = functor.combine(total, next);
        }
      }
    }
    if (count <= totals_per_run) return true;
    count = (count + totals_per_run - 1) / totals_per_run;
    index = run;
    distance *= totals_per_run;
  }
}

/// a <- a + g for all layers, and their values in the order of representative.hpp. With momentum correction (Lin et al. 2018, eq. 4 and 5)
/// u <- m u + g, a <- a + u for the first micro-batch gradient of a step; u <- u + g, a <- a + g for others, whose momentum is 1. An
/// element whose sums are not finite is left out and counted. The thread block that is last to arrive ends the step's phase.
///
/// A group takes a block of 4,096 elements, by rows of 64. Each thread loads its elements of a few rows, adds, stores, and keeps its
/// lanes in registers: there are neither barriers nor shared memory.
template <element T, representative F, bool HasVelocity>
struct add_kernel {
  using lane_type = std::remove_cvref_t<decltype(std::declval<const F&>().map(T{}))>;
  using shared_memory = typename select_kernel<T>::shared_memory;

  static constexpr unsigned threads = 256;
  // With 64 registers a thread, or 80; rows on their way at a time are in 32 of them, or 24.
  static constexpr unsigned thread_blocks_at_once = sizeof(T) == 4 && !HasVelocity ? 4 : 3;
  static constexpr unsigned rows_at_once = (HasVelocity ? 2 : 4) * 4 / static_cast<unsigned>(sizeof(T));

  model_view<T> at;
  F functor;
  T momentum;
  payload_type payload;
  bool has_arrived;            // the frame before, so that what was sent leaves the residual first
  bool selects;                // last
  const float* found_inf;      // none: the gradients are good
  const float* inverse_scale;  // none: 1
  select_kernel<T> select;

  // Also without blocks, for the end of the step.
  std::size_t thread_blocks(unsigned groups) const {
    return at.blocks > 0 ? thread_blocks_for(at.blocks, groups) : 1;
  }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory& shared) const {
    const auto group = cta.group();
    const std::size_t block = cta.index() * cta.groups() + group.index();
    block_place place = {};
    if (block < at.blocks) place = at.places[block];
    cta.wait_for_launches();
    if (block < at.blocks) add_block(group, block, place);
    if (!cta.is_last_to_arrive(at.arrivals[at.blocks], static_cast<std::uint32_t>(cta.grid()))) return;
    if (cta.thread() == 0) end_gradients();
    if (!selects) return;
    cta.barrier();
    select(cta, shared);  // called: with the pass its registers would not fit
  }

 private:
  struct block_source {
    T* residual;
    T* velocity;
    unsigned count;
    bool is_clear;  // the residual is zero, whatever its memory holds
    bool is_sent;   // by the frame that has arrived, which leaves no velocity
    bool is_refused;
    T momentum;
    T scale;
  };

  // The elements of a thread in some rows, and what becomes of them.
  template <class Group>
  struct sums {
    unit_of<lane_type, Group> lane = {};
    unsigned left_out = 0;
  };

  LAMINA_HOST_DEVICE bool commits() const {
    return has_arrived && at.state->load_phase() == step_phase::encoded;
  }
  LAMINA_HOST_DEVICE bool is_refused() const { return found_inf != nullptr && *found_inf != 0.0F; }

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void add_block(const Group& group, std::size_t block, const block_place& place) const {
    const tensor_view gradient = at.gradients[place.layer];
    const std::size_t in_layer = place.begin - at.offsets[place.layer];
    const bool is_sent = commits() && at.is_sent(place.layer);
    const bool is_rounded = is_sent && payload != payload_type::as_is;
    // Only the first gradient of a step decays the velocity. What is refused adds -0 at a momentum of 1, which changes no bit.
    const bool adds = !is_refused();
    const bool decays = adds && at.state->load_phase() != step_phase::adding;
    const block_source from = {at.residual + place.begin,
                               HasVelocity ? at.velocity + place.begin : nullptr,
                               place.count,
                               at.is_clear[place.layer] != 0 || (is_sent && !is_rounded),
                               is_sent,
                               !adds,
                               decays ? momentum : T(1),
                               adds && inverse_scale != nullptr ? static_cast<T>(*inverse_scale) : T(1)};
    if (is_rounded) subtract_sent(group, payload, from.residual, place.count);
    sums<Group> own;
    if (gradient.type == device_element::float16) {
      add_rows(group, from, static_cast<const lamina::float16*>(gradient.data) + in_layer, own);
    } else if (gradient.type == device_element::bfloat16) {
      add_rows(group, from, static_cast<const lamina::bfloat16*>(gradient.data) + in_layer, own);
    } else {
      add_rows(group, from, static_cast<const T*>(gradient.data) + in_layer, own);
    }
    if (own.left_out > 0) {
#if defined(__CUDA_ARCH__)
      atomicAdd(&at.state->left_out_elements, own.left_out);
#else
      __atomic_fetch_add(&at.state->left_out_elements, own.left_out, __ATOMIC_RELAXED);
#endif
    }
    double total = total_of(group, own.lane);
    if (!complete_layer(functor, at, group, place.layer, block, total) || group.thread() != 0) return;
    at.values[place.layer] = functor.finish(total, at.sizes[place.layer]);
    at.is_clear[place.layer] = 0;
    if (commits() && at.is_sent(place.layer)) at.sent_in[place.layer] = at.state->step;
  }

  LAMINA_ANY_CALLER template <class Group, class G>
  LAMINA_HOST_DEVICE void add_rows(const Group& group, const block_source& from, const G* gradient,
                                   sums<Group>& own) const {
    constexpr auto row = static_cast<unsigned>(lanes);
    // A CPU has its rows in the first cache.
    constexpr unsigned at_once = Group::threads == 1 ? 1 : rows_at_once;
    constexpr unsigned each = row / Group::threads;
    const bool is_whole = is_aligned<unit<G, each>>(gradient) && !from.is_refused;
    unsigned first = group.thread() * each;
    unsigned rest = from.count;  // of the block, from this row on
    for (; rest >= at_once * row; rest -= at_once * row, first += at_once * row)
      add_some<at_once, each>(from, gradient + first, first, each, is_whole, own);
    for (; rest > 0; rest -= rest < row ? rest : row, first += row) {
      const unsigned begin = group.thread() * each;
      const unsigned some = rest > begin ? rest - begin : 0;
      add_some<1, each>(from, gradient + first, first, some < each ? some : each, is_whole && some >= each,
                        own);
    }
  }

  template <unsigned Rows, unsigned Each, class X>
  LAMINA_HOST_DEVICE static void load_rows(const X* from, unit<X, Each> (&to)[Rows]) {
    LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) to[r] = load<X, Each>(from + r * lanes);
  }

  // `Rows` rows from `first` on, of which this thread has `count` elements each.
  template <unsigned Rows, unsigned Each, class G, class Sums>
  LAMINA_HOST_DEVICE void add_some(const block_source& from, const G* gradient, unsigned first,
                                   unsigned count, bool is_whole, Sums& own) const {
    constexpr auto row = static_cast<unsigned>(lanes);
    unit<G, Each> addend[Rows];
    unit<T, Each> residual[Rows] = {};
    [[maybe_unused]] unit<T, Each> velocity[HasVelocity ? Rows : 1] = {};
    // All on their way before the first is added.
    if (is_whole) {
      load_rows(gradient, addend);
    } else {
      const unsigned given = from.is_refused ? 0 : count;
      LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) addend[r] =
          load_each<G, Each>(gradient + r * row, given);
    }
    if (!from.is_clear) load_rows(from.residual + first, residual);
    if constexpr (HasVelocity) {
      if (!from.is_sent) load_rows(from.velocity + first, velocity);
    }
    LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) {
      const unit<T, Each> before_it = residual[r];
      [[maybe_unused]] const unit<T, Each> velocity_before = velocity[HasVelocity ? r : 0];
      bool is_good[Each];
      bool are_good = true;
      for (unsigned k = 0; k < Each; ++k) {
        const T gradient_k = product(widened<T>(addend[r].at[k]), from.scale);
        T& sum = residual[r].at[k];
        if constexpr (HasVelocity) {
          T& moving = velocity[r].at[k];
          moving = product(from.momentum, moving) + gradient_k;
          sum = sum + (from.momentum < T(1) ? moving : gradient_k);
          is_good[k] = is_finite(sum) && is_finite(moving);
        } else {
          sum = sum + gradient_k;
          is_good[k] = is_finite(sum);
        }
        are_good = are_good && is_good[k];
      }
      if (!are_good) {
        for (unsigned k = 0; k < Each; ++k) {
          if (is_good[k]) continue;
          residual[r].at[k] = before_it.at[k];
          if constexpr (HasVelocity) velocity[r].at[k] = velocity_before.at[k];
          own.left_out += k < count ? 1 : 0;
        }
      }
      // Up to whole rows, which the memory of each layer has.
      store(from.residual + first + r * row, residual[r]);
      if constexpr (HasVelocity) store(from.velocity + first + r * row, velocity[r]);
      for (unsigned k = 0; k < Each; ++k) {
        if (k < count)
          own.lane.at[k] = functor.combine(own.lane.at[k], rounded(functor.map(residual[r].at[k])));
      }
    }
  }

  LAMINA_ANY_CALLER template <class Group, unsigned Each>
  LAMINA_HOST_DEVICE double total_of(const Group& group, unit<lane_type, Each> lane) const {
    for (unsigned distance = Group::threads / 2; distance > 0; distance /= 2) {
      for (unsigned k = 0; k < Each; ++k)
        lane.at[k] = functor.combine(lane.at[k], group.across(lane.at[k], distance));
    }
    for (unsigned half = Each / 2; half > 0; half /= 2) {
      for (unsigned k = 0; k < half; ++k) lane.at[k] = functor.combine(lane.at[k], lane.at[k + half]);
    }
    return static_cast<double>(lane.at[0]);
  }

  // Gradients that were refused leave a step that has begun as it is, and begin none.
  LAMINA_HOST_DEVICE void end_gradients() const {
    step_state& state = *at.state;
    step_phase phase = state.load_phase();
    if (commits()) {
      state.allowance -= static_cast<double>(state.sent_elements);
      phase = step_phase::committed;
    } else if (has_arrived) {
      state.set_misused();
    }
    if (!is_refused()) {
      if (may_encode(phase)) state.give_back();
      return state.store_phase(step_phase::adding);
    }
    ++state.refused_batches;
    if (may_select(phase)) return;
    state.store_phase(step_phase::refused);
    state.sent_elements = 0;
    state.payload_bytes = 0;
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
