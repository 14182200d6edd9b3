// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/search.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/team.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// What a decision needs of compressor_options, which own memory of the host.
struct decision_rules {
  std::optional<double> byte_budget;
  double drop_ratio;
  std::uint64_t warm_up_steps;
  refresh_schedule refresh;
  std::uint64_t max_age;
  payload_type payload;

  explicit decision_rules(const compressor_options& options)
      : byte_budget(options.byte_budget),
        drop_ratio(options.drop_ratio),
        warm_up_steps(options.warm_up_steps),
        refresh(options.refresh),
        max_age(options.max_age),
        payload(options.payload) {}
};
static_assert(std::is_trivially_copyable_v<decision_rules>);

/// Algorithm 1, the selection and the header of the frame, by one team: L values are little work, and teams could not
/// wait for each other. Decides by detail/decision.hpp, as lamina::layer_selector does.
template <element T>
struct select_kernel {
  static constexpr unsigned threads = 512;
  static constexpr unsigned teams_at_once = 1;
  static constexpr unsigned layers_at_once = 8;  // of a thread: a byte of the bitmap

  struct shared_memory {
    crossing_search::shared_memory search;
    union {
      team_scratch<1> sum;
      team_scratch<3> least;
    };
  };

  model_view<T> at;
  decision_rules rules;
  selection_kind kind;
  const double* values;                 // of this device or those that all workers agreed on; L
  const std::uint8_t* held;             // L: not 0 for layers not to be sent in this step; or none
  std::uint8_t* held_before;            // L: `held` as the step was decided, where there was one
  const std::uint8_t* always_sent;      // L: not 0 for layers sent in every step; or none
  const double* drop_ratio_in_warm_up;  // of the steps 1, 2, ... below rules.warm_up_steps
  std::size_t largest_layer;
  candidate* candidates;  // 2 L

  std::size_t teams(unsigned) const { return 1; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    team.wait_for_launches();
    fetch(team);
    const step_phase phase = at.state->load_phase();
    if (phase != step_phase::accumulating) {
      again(team, shared, phase);
      return;
    }
    if (held != nullptr) {
      for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads())
        held_before[layer] = held[layer];
    }
    lamina::detail::step_decision decision;
    decision.step = at.state->step + 1;
    decision.threshold = at.state->threshold;
    decision.max_age = rules.max_age;
    double allowance = at.state->allowance;
    const double elements = static_cast<double>(at.elements);
    if (rules.byte_budget.has_value()) {
      const double share = product(rules.byte_budget.value_or(0), elements);
      allowance = lamina::detail::grown_allowance(allowance, share, largest_layer);
      const double left = lamina::detail::allowance_by_value(allowance, elements_always_sent(team, shared));
      within_budget(team, shared, left, decision);
    } else {
      const double ratio = drop_ratio_in(decision.step);
      if (lamina::detail::searches(rules.refresh, rules.warm_up_steps, decision.step, ratio,
                                   decision.threshold))
        decision.threshold = searched(team, shared, product(ratio, elements));
      decision.sends_all = ratio == 0 || (ratio == 1 && !rules.refresh.fixed_threshold());
    }
    const part sent = write_selection(team, shared, decision);
    if (team.thread() != 0) return;
    step_state& state = *at.state;
    state.step = decision.step;
    state.threshold = decision.threshold;
    state.allowance = allowance;
    state.sent_elements = sent.elements;
    state.payload_bytes = sent.bytes;
    state.selected_by = kind;
    state.store_phase(step_phase::selected);
    auto* header = reinterpret_cast<lamina::detail::wire_header*>(at.prefix);
    header->step = decision.step;
    header->payload_bytes = sent.bytes;
  }

 private:
  struct part {
    std::size_t elements;
    std::size_t bytes;
  };

  // All that is read of the first layers is on its way before the first of it is waited for.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void fetch(const Team& team) const {
    for (std::size_t layer = team.thread(); layer < at.layers && layer < 4 * team.threads();
         layer += team.threads()) {
      team.prefetch(values + layer);
      team.prefetch(at.sizes + layer);
      team.prefetch(at.cleared_in + layer);
    }
  }

  // Bitmap and payload_begin: a thread takes the layers of a byte at a time.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE part write_selection(const Team& team, shared_memory& shared,
                                          const lamina::detail::step_decision& decision) const {
    part sent = {0, 0};
    const std::size_t bytes_of_bitmap = (at.layers + layers_at_once - 1) / layers_at_once;
    for (std::size_t first = 0; first < bytes_of_bitmap; first += team.threads()) {
      const std::size_t byte = first + team.thread();
      unsigned is_sent = 0;  // a bit each
      unsigned long long begin = 0;
      for (unsigned k = 0; k < layers_at_once; ++k) {
        const std::size_t layer = byte * layers_at_once + k;
        const bool goes = layer < at.layers && decision.sends(layer, values[layer], at.sizes[layer],
                                                              at.cleared_in[layer], rule_of(layer));
        if (!goes) continue;
        sent.elements += at.sizes[layer];
        begin += lamina::payload_bytes<T>(rules.payload, at.sizes[layer]);
        is_sent |= 1U << k;
      }
      const std::size_t bytes = team.sum_before(begin, shared.sum);
      begin += sent.bytes;
      for (unsigned k = 0; k < layers_at_once; ++k) {
        if (((is_sent >> k) & 1U) == 0) continue;
        const std::size_t layer = byte * layers_at_once + k;
        at.payload_begin[layer] = begin;
        begin += lamina::payload_bytes<T>(rules.payload, at.sizes[layer]);
      }
      if (byte < bytes_of_bitmap) at.bitmap[byte] = static_cast<std::uint8_t>(is_sent);
      sent.bytes += bytes;
    }
    return {sum_over(team, shared, sent.elements), sent.bytes};
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE static std::size_t sum_over(const Team& team, shared_memory& shared, std::size_t own) {
    unsigned long long sum[1] = {own};
    team.combine(sum, shared.sum, sum_of());
    return sum[0];
  }

  LAMINA_HOST_DEVICE double drop_ratio_in(std::uint64_t step) const {
    if (step >= rules.warm_up_steps || rules.drop_ratio == 1) return rules.drop_ratio;
    return drop_ratio_in_warm_up[step - 1];
  }

  // Asked again, which gives the same; or out of order.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void again(const Team& team, shared_memory& shared, step_phase phase) const {
    const bool may_select = lamina::detail::may_select(phase);
    std::size_t held_otherwise = 0;
    if (may_select && at.state->selected_by == kind && held != nullptr) {
      for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads())
        held_otherwise += (held[layer] != 0) != (held_before[layer] != 0) ? 1 : 0;
      held_otherwise = sum_over(team, shared, held_otherwise);
    }
    if (team.thread() != 0) return;
    if (!may_select) {
      at.state->raise(misuse::select_without_gradients);
    } else if (at.state->selected_by != kind || held_otherwise > 0) {
      at.state->raise(misuse::other_selection);
    }
  }

  LAMINA_HOST_DEVICE lamina::detail::layer_rule rule_of(std::size_t layer) const {
    using lamina::detail::layer_rule;
    if (held != nullptr && held[layer] != 0) return layer_rule::held;
    if (always_sent != nullptr && always_sent[layer] != 0) return layer_rule::always;
    return layer_rule::by_value;
  }

  /// Layers as one of the searches sees them. One type, so that one text is compiled for all.
  struct searched_layers {
    const select_kernel* kernel;
    enum class by { value, value_descending, place } order;
    unsigned long long tied;  // by place: what does not have this key, descending, does not count

    LAMINA_HOST_DEVICE candidate operator()(std::size_t layer) const {
      const lamina::detail::layer_rule rule = kernel->rule_of(layer);
      const double value = kernel->values[layer];
      const std::size_t elements = kernel->at.sizes[layer];
      if (order == by::value) return {key_of(lamina::detail::search_value(value, rule)), elements};
      // What its value does not decide on does not count.
      const unsigned long long key = ~key_of(lamina::detail::ordered_value(value));
      const bool counts = rule == lamina::detail::layer_rule::by_value;
      if (order == by::value_descending) return {key, counts ? elements : 0};
      return {layer, counts && key == tied ? elements : 0};
    }
  };

  // As lamina::threshold_search::beyond.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE double searched(const Team& team, shared_memory& shared, double limit) const {
    const crossing found = find_crossing(team, shared, limit, {this, searched_layers::by::value, 0});
    return found.is_found ? value_of(found.key) : invalid_threshold;
  }

  // As lamina::layer_selector: the smallest value above the first that does not fit, and of the layers that have that one
  // the first that fit.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void within_budget(const Team& team, shared_memory& shared, double most,
                                        lamina::detail::step_decision& decision) const {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const searched_layers descending = {this, searched_layers::by::value_descending, 0};
    const crossing found = find_crossing(team, shared, most, descending);
    decision.threshold = -infinity;
    if (!found.is_found) return;
    // Above it, and the first and the last layer that are tied.
    unsigned long long least[3] = {key_of(infinity), at.layers, ~0ULL};
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      const candidate each = descending(layer);
      if (each.elements == 0) continue;
      if (each.key < found.key) least[0] = least_of()(least[0], ~each.key);
      if (each.key == found.key) {
        least[1] = least_of()(least[1], layer);
        least[2] = ~layer;
      }
    }
    team.combine(least, shared.least, least_of());
    const unsigned long long first_tied = least[1];
    unsigned long long end = first_tied;  // alone it does not fit
    if (first_tied != ~least[2]) {
      const double left = most - static_cast<double>(found.before);
      end = find_crossing(team, shared, left, {this, searched_layers::by::place, found.key}).key;
    }
    const double value = value_of(~found.key);
    decision.threshold = end > first_tied ? value : value_of(least[0]);
    if (decision.threshold == value) decision.equals_end = end;
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE std::size_t elements_always_sent(const Team& team, shared_memory& shared) const {
    if (always_sent == nullptr) return 0;
    std::size_t elements = 0;
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      if (rule_of(layer) == lamina::detail::layer_rule::always) elements += at.sizes[layer];
    }
    return sum_over(team, shared, elements);
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE crossing find_crossing(const Team& team, shared_memory& shared, double limit,
                                            const searched_layers& layers) const {
    return crossing_search::find(team, shared.search, candidates, at.layers, limit, layers);
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
