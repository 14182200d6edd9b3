// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/pack.hpp"
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
/// gradients. An element whose sum is not finite is left out and counted, as by lamina::finite_check::each_element.
///
/// A team walks through the blocks of 4,096 elements, one after the other, by stages of a few rows of 64. What the next
/// stages need is copied to shared memory meanwhile, also beyond the end of a block. A thread adds the gradients of what it
/// copied itself, 16 bytes of residual at a time; after a barrier the 64 lanes, a thread each, take the rows of the stage in
/// their order. The team that is last to arrive calls `end`.
template <element T, representative F, reduction_of Of, class End>
struct accumulate_kernel {
  using lane_type = std::remove_cvref_t<decltype(std::declval<const F&>().map(T{}))>;

  static constexpr bool has_residual = Of != reduction_of::gradients;
  static constexpr bool has_velocity = Of == reduction_of::corrected_residuals;
  static constexpr unsigned threads = 256;
  static constexpr unsigned teams_at_once = 3;  // with 80 registers a thread
  static constexpr bool walks = true;
  static constexpr auto per_unit = static_cast<unsigned>(16 / sizeof(T));
  static constexpr unsigned units_per_stage = threads;
  static constexpr unsigned stage_elements = units_per_stage * per_unit;
  static constexpr auto rows_per_stage = static_cast<unsigned>(stage_elements / lanes);
  // Gradient, residual, velocity.
  static constexpr unsigned arrays = has_velocity ? 3 : has_residual ? 2 : 1;
  // In 40 KiB, so that with the rest a team stays below the 48 that every device has without asking. All but one are on
  // their way at a time.
  static constexpr unsigned stages = 10 / arrays;

  union shared_memory {
    struct {
      alignas(16) std::byte ring[stages][arrays][units_per_stage][16];
      lane_type lane[lanes];
      typename run_totals<F>::shared_memory totals;
      block_scales scales;
    } pass;
    typename End::shared_memory end;
  };

  model_view<T> at;
  F functor;
  double* values;  // L
  End end;
  T momentum = 0;
  frame_before before = {};
  gradient_terms terms = {};

  // Also without blocks, for the end.
  std::size_t teams() const { return at.blocks > 0 ? at.blocks : 1; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    const step_facts facts = facts_of_step();
    cursor ahead = {team.index(), 0, {}};
    if (ahead.block < at.blocks) ahead.from = source_of(ahead.block, facts);
    for (unsigned slot = 0; slot + 1 < stages; ++slot) copy_stage(team, shared, facts, ahead, slot);
    unsigned slot = 0;
    for (std::size_t block = team.index(); block < at.blocks; block += team.teams()) {
      const block_source from = source_of(block, facts);
      // By the thread that adds to it.
      for (unsigned j = team.thread(); j < lanes; j += team.threads()) shared.pass.lane[j] = lane_type{};
      for (unsigned first = 0; first < from.place.count; first += stage_elements) {
        const unsigned rest = from.place.count - first;
        const unsigned count = rest < stage_elements ? rest : stage_elements;
        team.template wait_for_copies<stages - 2>();
        if (from.is_rounded && has_blocks(before.payload)) {
          find_scales(team, before.payload, reinterpret_cast<const T*>(shared.pass.ring[slot][arrays > 1][0]),
                      count, shared.pass.scales);
        }
        add(team, shared, facts, from, first, count, slot);
        team.barrier();
        // To where the stage before was, which all have read.
        copy_stage(team, shared, facts, ahead, slot == 0 ? stages - 1 : slot - 1);
        add_to_lanes(team, shared, count, slot);
        slot = slot + 1 == stages ? 0 : slot + 1;
      }
      team.barrier();
      complete(team, shared, facts, block, from);
    }
    const bool is_last =
        team.is_last_to_arrive(at.arrivals[at.blocks], static_cast<std::uint32_t>(team.teams()));
    if (is_last) end(team, shared.end);
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
    block_place place;
    tensor_view gradient;
    std::size_t offset;  // in the residual
    bool is_clear;       // the residual is zero, whatever its memory holds
    bool is_sent;        // by the frame that has arrived, which leaves no velocity
    bool is_rounded;     // and what it said is taken off the residual
  };

  // What is copied next.
  struct cursor {
    std::size_t block;
    unsigned first;
    block_source from;
  };

  LAMINA_HOST_DEVICE step_facts facts_of_step() const {
    if constexpr (!has_residual) {
      return {false, false, T(0), terms.template scale<T>()};
    } else {
      // Only the first piece of a step decays the velocity.
      const bool begins = lamina::detail::begins_step(at.state->load_phase());
      return {before.is_committed_by(*at.state), terms.are_refused(), begins ? momentum : T(1),
              terms.template scale<T>()};
    }
  }

  LAMINA_HOST_DEVICE block_source source_of(std::size_t block, const step_facts& facts) const {
    const block_place place = place_of(at, block);
    const tensor_view gradient = at.gradients[place.layer];
    if constexpr (!has_residual) {
      return {place, gradient, 0, true, false, false};
    } else {
      const bool is_sent = facts.commits && at.is_sent(place.layer);
      const bool is_rounded = is_sent && before.payload != payload_type::as_is;
      const bool is_clear = at.is_clear[place.layer] != 0 || (is_sent && !is_rounded);
      return {place, gradient, at.offsets[place.layer] + place.begin, is_clear, is_sent, is_rounded};
    }
  }

  // Calls visit(G*) with the gradient of a block, for its element type.
  LAMINA_ANY_CALLER template <class Visit>
  LAMINA_HOST_DEVICE static void with_gradient(const block_source& from, const Visit& visit) {
    if (from.gradient.type == device_element::float16) {
      visit(static_cast<const lamina::float16*>(from.gradient.data) + from.place.begin);
    } else if (from.gradient.type == device_element::bfloat16) {
      visit(static_cast<const lamina::bfloat16*>(from.gradient.data) + from.place.begin);
    } else {
      visit(static_cast<const T*>(from.gradient.data) + from.place.begin);
    }
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void copy_stage(const Team& team, shared_memory& shared, const step_facts& facts,
                                     cursor& ahead, unsigned slot) const {
    if (ahead.block < at.blocks) {
      const block_source& from = ahead.from;
      with_gradient(from, [&](const auto* gradient) {
        for (unsigned item = team.thread(); item < units_per_stage; item += team.threads()) {
          const unsigned i = ahead.first + item * per_unit;
          if (i >= from.place.count) break;
          const unsigned rest = from.place.count - i;
          copy_unit<per_unit>(team, shared.pass.ring[slot][0][item], gradient + i, rest);
          // Up to whole rows, which the memory of each layer has.
          if constexpr (has_residual) {
            if (!from.is_clear)
              team.template copy_ahead<16>(shared.pass.ring[slot][1][item], at.residual + from.offset + i);
          }
          if constexpr (has_velocity) {
            if (!from.is_sent)
              team.template copy_ahead<16>(shared.pass.ring[slot][2][item], at.velocity + from.offset + i);
          }
        }
      });
      ahead.first += stage_elements;
      if (ahead.first >= from.place.count) {
        ahead.first = 0;
        ahead.block += team.teams();
        if (ahead.block < at.blocks) ahead.from = source_of(ahead.block, facts);
      }
    }
    team.end_group();
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void add(const Team& team, shared_memory& shared, const step_facts& facts,
                              const block_source& from, unsigned first, unsigned count, unsigned slot) const {
    unsigned left_out = 0;
    with_gradient(from, [&]<class G>(const G*) {
      for (unsigned item = team.thread(); item < units_per_stage; item += team.threads()) {
        if (item * per_unit >= count) break;
        add_unit<G>(shared, facts, from, first, item, slot, left_out);
      }
    });
    if (has_residual && left_out > 0)
      count_left_out(at, from.place.layer, left_out - left_out_beyond(team, facts, count));
  }

  // Of what fills up the stage's last unit, where it is this thread's: zeros, which only a scale that is not finite leaves out.
  template <class Team>
  LAMINA_HOST_DEVICE static unsigned left_out_beyond(const Team& team, const step_facts& facts,
                                                     unsigned count) {
    const unsigned last = (count - 1) / per_unit;
    const bool is_own = last % team.threads() == team.thread();
    return is_own && !is_finite(facts.scale) ? (last + 1) * per_unit - count : 0;
  }

  // The sums take the place of the gradients.
  template <class G>
  LAMINA_HOST_DEVICE void add_unit(shared_memory& shared, const step_facts& facts, const block_source& from,
                                   unsigned first, unsigned item, unsigned slot, unsigned& left_out) const {
    using operands = unit<T, per_unit>;
    auto& ring = shared.pass.ring[slot];
    const auto gradient = *reinterpret_cast<const unit<G, per_unit>*>(ring[0][item]);
    auto* const sums = reinterpret_cast<operands*>(ring[0][item]);
    if constexpr (!has_residual) {
      for (unsigned k = 0; k < per_unit; ++k)
        sums->at[k] = added(T(0), scaled(gradient.at[k], facts), left_out);
    } else {
      const std::size_t place = from.offset + first + item * per_unit;
      operands residual = {};
      if (!from.is_clear) residual = *reinterpret_cast<const operands*>(ring[1][item]);
      if (from.is_rounded) {
        const std::uint8_t scale =
            has_blocks(before.payload) ? shared.pass.scales[item * per_unit / payload_block_elements] : 0;
        for (unsigned k = 0; k < per_unit; ++k)
          residual.at[k] = left_over(residual.at[k], before.payload, scale);
      }
      if constexpr (has_velocity) {
        operands velocity = {};
        if (!from.is_sent) velocity = *reinterpret_cast<const operands*>(ring[2][item]);
        for (unsigned k = 0; k < per_unit && !facts.is_refused; ++k) {
          residual.at[k] = corrected(residual.at[k], scaled(gradient.at[k], facts), velocity.at[k],
                                     facts.momentum, left_out);
        }
        store(at.velocity + place, velocity);
      } else {
        for (unsigned k = 0; k < per_unit && !facts.is_refused; ++k)
          residual.at[k] = added(residual.at[k], scaled(gradient.at[k], facts), left_out);
      }
      store(at.residual + place, residual);
      *sums = residual;
    }
  }

  // Rounded once, in T.
  template <class G>
  LAMINA_HOST_DEVICE static T scaled(G element, const step_facts& facts) {
    return product(widened<T>(element), facts.scale);
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void add_to_lanes(const Team& team, shared_memory& shared, unsigned count,
                                       unsigned slot) const {
    const T* const sums = reinterpret_cast<const T*>(shared.pass.ring[slot][0][0]);
    for (unsigned j = team.thread(); j < lanes; j += team.threads()) {
      T row[rows_per_stage];  // all on their way before the first is added
      for (unsigned r = 0; r < rows_per_stage; ++r) {
        const auto i = static_cast<unsigned>(r * lanes + j);
        row[r] = i < count ? sums[i] : T(0);
      }
      lane_type total = shared.pass.lane[j];
      for (unsigned r = 0; r < rows_per_stage; ++r) {
        if (r * lanes + j < count) total = functor.combine(total, rounded(functor.map(row[r])));
      }
      shared.pass.lane[j] = total;
    }
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void complete(const Team& team, shared_memory& shared, const step_facts& facts,
                                   std::size_t block, const block_source& from) const {
    lane_type* const lane = shared.pass.lane;
    for (auto half = static_cast<unsigned>(lanes / 2); half > 0; half /= 2) {
      for (unsigned j = team.thread(); j < half; j += team.threads())
        lane[j] = functor.combine(lane[j], lane[j + half]);
      team.barrier();
    }
    const std::size_t layer = from.place.layer;
    const std::size_t first = at.first_block[layer];
    double total = static_cast<double>(lane[0]);  // thread 0's own
    const run_totals<F> totals = {functor, at.block_totals, at.arrivals};
    const bool is_whole = totals.complete(team, shared.pass.totals, first, at.first_block[layer + 1] - first,
                                          block - first, total);
    if (!is_whole || team.thread() != 0) return;
    values[layer] = functor.finish(total, at.sizes[layer]);
    if constexpr (has_residual) {
      at.is_clear[layer] = 0;
      if (facts.commits && at.is_sent(layer)) at.cleared_in[layer] = at.state->step;
    }
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
