// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/options.hpp"
#include "lamina/reduction.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The gradients alone, or a <- a + g.
enum class reduction_of { gradients, residuals };

/// The total of each block in the order of reduction.hpp, over all layers at once; of residuals in the pass that adds
/// the gradients. Sixteen threads share a block, four lanes each, so that a row of 64 elements is read and written as
/// 16 neighbouring quads. An element whose sum is not finite is left out and counted, as by
/// lamina::finite_check::each_element.
template <element T, representative F, reduction_of Of>
struct accumulate_kernel {
  using lane_type = std::remove_cvref_t<decltype(std::declval<const F&>().map(T{}))>;

  static constexpr unsigned threads = 128;
  // With 85 registers a thread. The 780 teams of ResNet-50 then run at once on the 132 multiprocessors of an H200.
  static constexpr unsigned teams_at_once = 6;
  static constexpr auto threads_per_block = static_cast<unsigned>(lanes / 4);
  static constexpr unsigned blocks_per_team = threads / threads_per_block;
  // Rows on their way at a time: enough bytes in flight to keep the memory busy, few enough registers for 768 threads
  // on a multiprocessor.
  static constexpr unsigned rows_at_once = 4;

  struct shared_memory {
    lane_type lane[blocks_per_team][lanes];
  };

  model_view<T> at;
  F functor;
  T momentum = 0;

  std::size_t teams() const { return (at.blocks + blocks_per_team - 1) / blocks_per_team; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    for (unsigned item = team.thread(); item < threads; item += team.threads()) {
      const unsigned row_of_lanes = item / threads_per_block;
      const unsigned first_lane = 4 * (item % threads_per_block);
      const std::size_t block = team.index() * blocks_per_team + row_of_lanes;
      lane_type lane[4] = {};
      if (block < at.blocks) add_to_lanes(block, first_lane, lane);
      for (unsigned k = 0; k < 4; ++k) shared.lane[row_of_lanes][first_lane + k] = lane[k];
    }
    team.barrier();
    for (auto half = static_cast<unsigned>(lanes / 2); half > 0; half /= 2) {
      for (unsigned item = team.thread(); item < blocks_per_team * half; item += team.threads()) {
        lane_type* lane = shared.lane[item / half] + item % half;
        lane[0] = functor.combine(lane[0], lane[half]);
      }
      team.barrier();
    }
    for (unsigned item = team.thread(); item < blocks_per_team; item += team.threads()) {
      const std::size_t block = team.index() * blocks_per_team + item;
      if (block < at.blocks) at.block_totals[block] = static_cast<double>(shared.lane[item][0]);
    }
  }

 private:
  LAMINA_HOST_DEVICE void add_to_lanes(std::size_t block, unsigned first_lane, lane_type (&lane)[4]) const {
    const block_place place = place_of(at, block);
    const tensor_view gradient = at.gradients[place.layer];
    if (gradient.type == device_element::float16) {
      add_to_lanes<lamina::float16>(place, gradient.data, first_lane, lane);
    } else if (gradient.type == device_element::bfloat16) {
      add_to_lanes<lamina::bfloat16>(place, gradient.data, first_lane, lane);
    } else {
      add_to_lanes<T>(place, gradient.data, first_lane, lane);
    }
  }

  template <class G>
  LAMINA_HOST_DEVICE void add_to_lanes(const block_place& place, const void* data, unsigned first_lane,
                                       lane_type (&lane)[4]) const {
    const G* gradient = static_cast<const G*>(data) + place.begin;
    const bool is_aligned = is_aligned_for_quads(gradient);
    if constexpr (Of == reduction_of::gradients) {
      add_to_lanes(gradient_rows<G>{gradient, is_aligned}, place.count, first_lane, lane);
    } else {
      const std::size_t offset = at.offsets[place.layer] + place.begin;
      const sum_rows<G> sums = {gradient, is_aligned, at.residual + offset, at.is_clear[place.layer] != 0};
      if (at.velocity == nullptr) {
        add_to_lanes(sums, place.count, first_lane, lane);
      } else {
        // Only the first piece of a step decays the velocity.
        const bool begins = lamina::detail::begins_step(at.state->load_phase());
        add_to_lanes(corrected_rows<G>{sums, at.velocity + offset, begins ? momentum : T(1)}, place.count,
                     first_lane, lane);
      }
    }
  }

  // Rows are what is reduced: take<Rows>(i, to, left_out) gives the quads at i, i + 64, ... and writes what changed,
  // with all loads before the first store, so that they may all be on their way at once; take_one(i, left_out) a
  // single one.
  template <class G>
  struct gradient_rows {
    static constexpr unsigned at_once = rows_at_once;
    const G* gradient;
    bool is_aligned;

    template <unsigned Rows>
    LAMINA_HOST_DEVICE void take(std::size_t i, quad<T> (&to)[Rows], unsigned& left_out) const {
      quad<G> from[Rows];
      for (unsigned r = 0; r < Rows; ++r) from[r] = load_quad(gradient + i + r * lanes, is_aligned);
      for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned k = 0; k < 4; ++k) to[r].at[k] = sum(T(0), widened<T>(from[r].at[k]), left_out);
      }
    }
    LAMINA_HOST_DEVICE T take_one(std::size_t i, unsigned& left_out) const {
      return sum(T(0), widened<T>(gradient[i]), left_out);
    }
  };

  template <class G>
  struct sum_rows {
    static constexpr unsigned at_once = rows_at_once;
    const G* gradient;
    bool is_aligned;
    T* residual;
    bool is_clear;

    template <unsigned Rows>
    LAMINA_HOST_DEVICE void take(std::size_t i, quad<T> (&to)[Rows], unsigned& left_out) const {
      quad<G> from[Rows];
      for (unsigned r = 0; r < Rows; ++r) from[r] = load_quad(gradient + i + r * lanes, is_aligned);
      load(i, to);
      for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned k = 0; k < 4; ++k) to[r].at[k] = sum(to[r].at[k], widened<T>(from[r].at[k]), left_out);
        store_quad(residual + i + r * lanes, to[r]);
      }
    }
    LAMINA_HOST_DEVICE T take_one(std::size_t i, unsigned& left_out) const {
      return residual[i] = sum(is_clear ? T(0) : residual[i], widened<T>(gradient[i]), left_out);
    }
    template <unsigned Rows>
    LAMINA_HOST_DEVICE void load(std::size_t i, quad<T> (&to)[Rows]) const {
      for (unsigned r = 0; r < Rows; ++r)
        to[r] = is_clear ? quad<T>{} : load_quad(residual + i + r * lanes, true);
    }
  };

  // With momentum correction: u <- m·u + g, a <- a + u for the first piece of a step; u <- u + g, a <- a + g for others,
  // whose momentum is 1. An element whose a or u would not be finite is left out of both.
  template <class G>
  struct corrected_rows {
    static constexpr unsigned at_once = rows_at_once / 2;
    sum_rows<G> sums;
    T* velocity;
    T momentum;

    template <unsigned Rows>
    LAMINA_HOST_DEVICE void take(std::size_t i, quad<T> (&to)[Rows], unsigned& left_out) const {
      quad<G> from[Rows];
      quad<T> moving[Rows];
      for (unsigned r = 0; r < Rows; ++r) {
        from[r] = load_quad(sums.gradient + i + r * lanes, sums.is_aligned);
        moving[r] = load_quad(velocity + i + r * lanes, true);
      }
      sums.load(i, to);
      for (unsigned r = 0; r < Rows; ++r) {
        for (unsigned k = 0; k < 4; ++k) {
          to[r].at[k] = corrected(to[r].at[k], widened<T>(from[r].at[k]), moving[r].at[k], left_out);
        }
        store_quad(sums.residual + i + r * lanes, to[r]);
        store_quad(velocity + i + r * lanes, moving[r]);
      }
    }
    LAMINA_HOST_DEVICE T take_one(std::size_t i, unsigned& left_out) const {
      return sums.residual[i] = corrected(sums.is_clear ? T(0) : sums.residual[i],
                                          widened<T>(sums.gradient[i]), velocity[i], left_out);
    }
    LAMINA_HOST_DEVICE T corrected(T before, T gradient, T& moving, unsigned& left_out) const {
      const T moved = product(momentum, moving) + gradient;
      const T after = before + (momentum < T(1) ? moved : gradient);
      if (is_finite(after) && is_finite(moved)) {
        moving = moved;
        return after;
      }
      ++left_out;
      return before;
    }
  };

  template <class Rows>
  LAMINA_HOST_DEVICE void add_to_lanes(const Rows& from, unsigned count, unsigned first_lane,
                                       lane_type (&lane)[4]) const {
    const auto whole = static_cast<unsigned>(count / lanes);
    unsigned left_out = 0;
    unsigned row = 0;
    for (; row + Rows::at_once <= whole; row += Rows::at_once) {
      add_rows<Rows::at_once>(from, row * lanes + first_lane, lane, left_out);
    }
    for (; row < whole; ++row) add_rows<1>(from, row * lanes + first_lane, lane, left_out);
    for (unsigned k = 0; k < 4; ++k) {
      const unsigned i = count - count % static_cast<unsigned>(lanes) + first_lane + k;
      if (i >= count) break;
      lane[k] = functor.combine(lane[k], rounded(functor.map(from.take_one(i, left_out))));
    }
    if (Of == reduction_of::residuals && left_out > 0) count_left_out(left_out);
  }

  template <unsigned Count, class Rows>
  LAMINA_HOST_DEVICE void add_rows(const Rows& from, std::size_t i, lane_type (&lane)[4],
                                   unsigned& left_out) const {
    quad<T> operands[Count];
    from.template take<Count>(i, operands, left_out);
    for (unsigned r = 0; r < Count; ++r) {
      for (unsigned k = 0; k < 4; ++k)
        lane[k] = functor.combine(lane[k], rounded(functor.map(operands[r].at[k])));
    }
  }

  // before + addend, or `before` if that is not finite.
  LAMINA_HOST_DEVICE static T sum(T before, T addend, unsigned& left_out) {
    const T after = before + addend;
    if (is_finite(after)) return after;
    ++left_out;
    return before;
  }

  LAMINA_HOST_DEVICE void count_left_out(unsigned count) const {
#if defined(__CUDA_ARCH__)
    atomicAdd(&at.state->left_out_elements, count);
#else
    // Threads of Thrust's CPU systems run teams at the same time.
    __atomic_fetch_add(&at.state->left_out_elements, count, __ATOMIC_RELAXED);
#endif
  }
};

/// The value of each layer from the totals of its blocks, in the order of reduction.hpp: a team a layer, a thread a run. What is
/// in block_totals is used up. After gradients were added it writes down that the step has them.
template <element T, representative F>
struct finish_kernel {
  // A layer of 67 million elements has a run for each.
  static constexpr unsigned threads = 256;
  static constexpr unsigned teams_at_once = 1;
  // Loads on their way at a time: a thread that adds would wait for each by itself.
  static constexpr unsigned totals_at_once = 16;

  struct shared_memory {};

  model_view<T> at;
  F functor;
  double* values;          // L
  std::uint8_t* is_clear;  // set to no; none where gradients were only looked at
  refresh_schedule refresh =
      refresh_schedule::every(1);  // where gradients were only looked at: which steps search
  double ratio = 0;                // of the step, or any that is as far from 0

  std::size_t teams() const { return at.layers; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory&) const {
    const std::size_t layer = team.index();
    const std::size_t first_block = at.first_block[layer];
    std::size_t count = at.first_block[layer + 1] - first_block;
    double* const totals = at.block_totals + first_block;
    for (std::size_t distance = 1; count > 0; distance *= totals_per_run) {
      const std::size_t runs = (count + totals_per_run - 1) / totals_per_run;
      for (std::size_t run = team.thread(); run < runs; run += team.threads()) {
        // The total takes the place of the first in its run, which no other thread reads before the barrier.
        double* const first = totals + run * totals_per_run * distance;
        const std::size_t rest = count - run * totals_per_run;
        *first =
            total_of(first, distance, static_cast<unsigned>(rest < totals_per_run ? rest : totals_per_run));
      }
      if (runs == 1) break;
      team.barrier();
      count = runs;
    }
    if (team.thread() == 0) {  // whose run was the last
      values[layer] = at.sizes[layer] == 0 ? 0.0 : functor.finish(totals[0], at.sizes[layer]);
      if (is_clear != nullptr) is_clear[layer] = 0;
      if (layer == 0 && at.state != nullptr) note_phase(*at.state);
    }
  }

 private:
  LAMINA_HOST_DEVICE double total_of(const double* run, std::size_t distance, unsigned count) const {
    double total = 0;
    for (unsigned i = 0; i < count; i += totals_at_once) {
      double loaded[totals_at_once];
      for (unsigned k = 0; k < totals_at_once; ++k) loaded[k] = i + k < count ? run[(i + k) * distance] : 0.0;
      for (unsigned k = 0; k < totals_at_once; ++k) {
        if (i + k < count) total = functor.combine(total, loaded[k]);
      }
    }
    return total;
  }

  LAMINA_HOST_DEVICE void note_phase(step_state& state) const {
    if (is_clear != nullptr) {
      state.store_phase(step_phase::accumulating);
      state.has_frame = 0;
    } else if (!lamina::detail::begins_step(state.load_phase()) &&
               lamina::detail::searches(refresh, state.step + 1, ratio, state.threshold)) {
      state.raise(misuse::fresh_in_pieces);
    }
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
