// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/payload.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/step_end.hpp"
#include "lamina/cuda/detail/totals.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/payload.hpp"
#include "lamina/reduction.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The gradients alone; a <- a + g; or the same with momentum correction.
enum class reduction_of { gradients, residuals, corrected_residuals };

/// The value of each layer in the order of reduction.hpp, over all layers at once; of residuals in the pass that adds the
/// gradients. An element whose sum is not finite is left out and counted, as by lamina::non_finite::skip.
///
/// A group takes a block of 4,096 elements, by rows of 64. Each thread loads its elements of a few rows, adds, stores, and keeps its
/// lanes in registers: there are neither barriers nor shared memory. The team that is last to arrive calls `end`.
template <element T, representative F, reduction_of Of, class End>
struct accumulate_kernel {
  using lane_type = std::remove_cvref_t<decltype(std::declval<const F&>().map(T{}))>;
  using shared_memory = typename End::shared_memory;

  static constexpr bool has_residual = Of != reduction_of::gradients;
  static constexpr bool has_velocity = Of == reduction_of::corrected_residuals;
  static constexpr unsigned threads = 256;
  // With 64 registers a thread, or 80.
  static constexpr unsigned teams_at_once = sizeof(T) == 4 && !has_velocity ? 4 : 3;
  // On their way at a time, in 32 registers or 24.
  static constexpr unsigned rows_at_once = (has_velocity ? 2 : 4) * 4 / static_cast<unsigned>(sizeof(T));

  model_view<T> at;
  F functor;
  double* values;  // L
  End end;
  T momentum = 0;
  frame_before before = {};
  gradient_terms terms = {};

  // Also without blocks, for the end.
  std::size_t teams(unsigned groups) const { return at.blocks > 0 ? teams_for(at.blocks, groups) : 1; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    const auto group = team.group();
    const std::size_t block = team.index() * team.groups() + group.index();
    block_place place = {};
    if (block < at.blocks) place = at.places[block];
    team.wait_for_launches();
    if (block < at.blocks) add_block(group, block, place);
    if constexpr (End::is_called) {
      if (team.is_last_to_arrive(at.arrivals[at.blocks], static_cast<std::uint32_t>(team.teams())))
        end(team, shared);
    }
  }

 private:
  // Known before the pass, and the same until its last team ends the step.
  struct step_facts {
    bool commits;
    bool is_refused;
    T momentum;
    T scale;
  };

  struct block_source {
    T* residual;
    T* velocity;
    unsigned count;
    bool is_clear;  // the residual is zero, whatever its memory holds
    bool is_sent;   // by the frame that has arrived, which leaves no velocity
  };

  // The elements of a thread in some rows, and what becomes of them.
  template <class Group>
  struct sums {
    unit_of<lane_type, Group> lane = {};
    unsigned left_out = 0;
  };

  LAMINA_HOST_DEVICE step_facts facts_of_step() const {
    if constexpr (!has_residual) {
      return {false, false, T(0), terms.template scale<T>()};
    } else {
      // Only the first micro-batch gradient of a step decays the velocity. What is refused adds -0 at a momentum of 1, which changes
      // no bit.
      const bool is_refused = terms.are_refused();
      const bool begins = lamina::detail::begins_step(at.state->load_phase()) && !is_refused;
      return {before.is_committed_by(*at.state), is_refused, begins ? momentum : T(1),
              is_refused ? T(1) : terms.template scale<T>()};
    }
  }

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void add_block(const Group& group, std::size_t block, const block_place& place) const {
    const step_facts facts = facts_of_step();
    const tensor_view gradient = at.gradients[place.layer];
    const std::size_t in_layer = place.begin - at.offsets[place.layer];
    block_source from = {nullptr, nullptr, place.count, true, false};
    if constexpr (has_residual) {
      from.residual = at.residual + place.begin;
      from.velocity = has_velocity ? at.velocity + place.begin : nullptr;
      from.is_sent = facts.commits && at.is_sent(place.layer);
      const bool is_rounded = from.is_sent && before.payload != payload_type::as_is;
      from.is_clear = at.is_clear[place.layer] != 0 || (from.is_sent && !is_rounded);
      if (is_rounded) subtract_sent(group, before.payload, from.residual, place.count);
    }
    sums<Group> own;
    if (gradient.type == device_element::float16) {
      add_rows(group, facts, from, static_cast<const lamina::float16*>(gradient.data) + in_layer, own);
    } else if (gradient.type == device_element::bfloat16) {
      add_rows(group, facts, from, static_cast<const lamina::bfloat16*>(gradient.data) + in_layer, own);
    } else {
      add_rows(group, facts, from, static_cast<const T*>(gradient.data) + in_layer, own);
    }
    if constexpr (has_residual) {
      if (own.left_out > 0) count_left_out(at, place.layer, own.left_out);
    }
    complete(group, block, place.layer, total_of(group, own.lane));
  }

  LAMINA_ANY_CALLER template <class Group, class G>
  LAMINA_HOST_DEVICE void add_rows(const Group& group, const step_facts& facts, const block_source& from,
                                   const G* gradient, sums<Group>& own) const {
    constexpr auto row = static_cast<unsigned>(lanes);
    // A CPU has its rows in the first cache.
    constexpr unsigned at_once = Group::threads == 1 ? 1 : rows_at_once;
    constexpr unsigned each = row / Group::threads;
    const bool is_whole = is_aligned<unit<G, each>>(gradient) && !facts.is_refused;
    unsigned first = group.thread() * each;
    unsigned rest = from.count;  // of the block, from this row on
    for (; rest >= at_once * row; rest -= at_once * row, first += at_once * row)
      add_some<at_once, each>(facts, from, gradient + first, first, each, is_whole, own);
    for (; rest > 0; rest -= rest < row ? rest : row, first += row) {
      const unsigned begin = group.thread() * each;
      const unsigned some = rest > begin ? rest - begin : 0;
      add_some<1, each>(facts, from, gradient + first, first, some < each ? some : each,
                        is_whole && some >= each, own);
    }
  }

  // `Rows` rows from `first` on, of which this thread has `count` elements each.
  template <unsigned Rows, unsigned Each, class G, class Sums>
  LAMINA_HOST_DEVICE void add_some(const step_facts& facts, const block_source& from, const G* gradient,
                                   unsigned first, unsigned count, bool is_whole, Sums& own) const {
    constexpr auto row = static_cast<unsigned>(lanes);
    unit<G, Each> addend[Rows];
    unit<T, Each> residual[Rows];
    [[maybe_unused]] unit<T, Each> velocity[has_velocity ? Rows : 1];
    // All on their way before the first is added.
    if (is_whole) {
      LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) addend[r] = load<G, Each>(gradient + r * row);
    } else {
      const unsigned given = facts.is_refused ? 0 : count;
      LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) addend[r] =
          load_each<G, Each>(gradient + r * row, given);
    }
    if (from.is_clear) {
      LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) residual[r] = {};
    } else {
      LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) residual[r] =
          load<T, Each>(from.residual + first + r * row);
    }
    if constexpr (has_velocity) {
      if (from.is_sent) {
        LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) velocity[r] = {};
      } else {
        LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) velocity[r] =
            load<T, Each>(from.velocity + first + r * row);
      }
    }
    LAMINA_UNROLLED for (unsigned r = 0; r < Rows; ++r) {
      const unit<T, Each> before_it = residual[r];
      [[maybe_unused]] const unit<T, Each> velocity_before = velocity[has_velocity ? r : 0];
      bool is_good[Each];
      bool are_good = true;
      for (unsigned k = 0; k < Each; ++k) {
        const T gradient_k = product(widened<T>(addend[r].at[k]), facts.scale);
        if constexpr (has_velocity) {
          is_good[k] = add_gradient(residual[r].at[k], gradient_k, velocity[r].at[k], facts.momentum);
        } else {
          is_good[k] = add_gradient(residual[r].at[k], gradient_k);
        }
        are_good = are_good && is_good[k];
      }
      if (!are_good) {
        for (unsigned k = 0; k < Each; ++k) {
          if (is_good[k]) continue;
          residual[r].at[k] = before_it.at[k];
          if constexpr (has_velocity) velocity[r].at[k] = velocity_before.at[k];
          own.left_out += k < count ? 1 : 0;
        }
      }
      // Up to whole rows, which the memory of each layer has.
      if constexpr (has_residual) store(from.residual + first + r * row, residual[r]);
      if constexpr (has_velocity) store(from.velocity + first + r * row, velocity[r]);
      for (unsigned k = 0; k < Each; ++k) {
        if (k < count)
          own.lane.at[k] = functor.combine(own.lane.at[k], rounded(functor.map(residual[r].at[k])));
      }
    }
  }

  // In thread 0.
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

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void complete(const Group& group, std::size_t block, std::size_t layer,
                                   double total) const {
    const std::size_t first = at.first_block[layer];
    const run_totals<F> totals = {functor, at.block_totals, at.arrivals};
    const bool is_whole =
        totals.complete(group, first, at.first_block[layer + 1] - first, block - first, total);
    if (!is_whole || group.thread() != 0) return;
    values[layer] = functor.finish(total, at.sizes[layer]);
    if constexpr (has_residual) {
      at.is_clear[layer] = 0;
      if (before.is_committed_by(*at.state) && at.is_sent(layer)) at.cleared_in[layer] = at.state->step;
    }
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
