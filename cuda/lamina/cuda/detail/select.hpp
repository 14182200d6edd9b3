// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
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
  static constexpr unsigned threads = 1024;
  static constexpr unsigned teams_at_once = 1;
  // Up to so many layers each thread adds up the layers below its own, which needs no passes; beyond it, by digits.
  static constexpr unsigned ranked_layers = threads;
  static constexpr unsigned digit_bits = 8;
  static constexpr unsigned digits = 1U << digit_bits;

  struct part {
    std::size_t elements;
    std::size_t bytes;
  };

  // Of a layer, for the search.
  struct entry {
    unsigned long long key;
    unsigned long long elements;
  };

  struct ranked_entries {
    unsigned long long key[ranked_layers];
    unsigned long long elements[ranked_layers];
  };

  struct shared_memory {
    union {
      ranked_entries ranked;
      unsigned long long of_digit[digits];
      part parts[threads];
    };
    unsigned long long crossing;
    unsigned long long above;
    unsigned long long tied;
    unsigned long long first_tied;
    unsigned long long before;
    bool found;
  };

  model_view<T> at;
  decision_rules rules;
  selection_kind kind;
  const double* values;                 // of this device or those that all workers agreed on; L
  const double* search_values;          // what the threshold is searched over; mostly the same
  const std::uint8_t* held;             // L: not 0 for layers not to be sent in this step; or none
  std::uint8_t* held_before;            // L: `held` as the step was decided, where there was one
  const std::uint8_t* always_sent;      // L: not 0 for layers sent in every step; or none
  const double* drop_ratio_in_warm_up;  // of the steps 1, 2, ... below rules.warm_up_steps
  std::size_t largest_layer;

  std::size_t teams() const { return 1; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    const step_phase phase = at.state->load_phase();
    if (phase != step_phase::accumulating) {
      // Asked again, which gives the same; or out of order.
      if (team.thread() != 0) return;
      if (!lamina::detail::may_select(phase)) {
        at.state->raise(misuse::select_without_gradients);
      } else if (at.state->selected_by != kind || !held_as_before()) {
        at.state->raise(misuse::other_selection);
      }
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
      if (lamina::detail::searches(rules.refresh, decision.step, ratio, decision.threshold))
        decision.threshold = searched(team, shared, product(ratio, elements));
      decision.sends_all = ratio == 0 || (ratio == 1 && !rules.refresh.fixed_threshold());
    }
    // Whole bytes of the bitmap for each thread, in order, so that what is sent before them is known from few sums.
    const std::size_t bytes = (at.layers + 7) / 8;
    const std::size_t bytes_per_thread = (bytes + team.threads() - 1) / team.threads();
    const std::size_t first = smaller(team.thread() * bytes_per_thread, bytes);
    const std::size_t last = smaller(first + bytes_per_thread, bytes);
    part sent = {0, 0};
    for (std::size_t byte = first; byte < last; ++byte) {
      unsigned bits = 0;
      for (std::size_t layer = 8 * byte; layer < smaller(8 * byte + 8, at.layers); ++layer) {
        if (!decision.sends(layer, values[layer], at.sizes[layer], at.cleared_in[layer], rule_of(layer)))
          continue;
        bits |= 1U << (layer % 8);
        sent.elements += at.sizes[layer];
        sent.bytes += lamina::payload_bytes<T>(rules.payload, at.sizes[layer]);
      }
      at.bitmap[byte] = static_cast<std::uint8_t>(bits);
    }
    team.barrier();
    shared.parts[team.thread()] = sent;
    team.barrier();
    if (team.thread() == 0) {
      part all = {0, 0};
      for (unsigned k = 0; k < team.threads() && k * bytes_per_thread < bytes; ++k) {
        const part own = shared.parts[k];
        shared.parts[k] = all;
        all = {all.elements + own.elements, all.bytes + own.bytes};
      }
      step_state& state = *at.state;
      state.step = decision.step;
      state.threshold = decision.threshold;
      state.allowance = allowance;
      state.sent_elements = all.elements;
      state.payload_bytes = all.bytes;
      state.selected_by = kind;
      state.store_phase(step_phase::selected);
      auto* header = reinterpret_cast<lamina::detail::wire_header*>(at.prefix);
      header->step = decision.step;
      header->payload_bytes = all.bytes;
    }
    team.barrier();
    std::size_t begin = first < last ? shared.parts[team.thread()].bytes : 0;
    for (std::size_t layer = 8 * first; layer < smaller(8 * last, at.layers); ++layer) {
      if (!at.is_sent(layer)) continue;
      at.payload_begin[layer] = begin;
      begin += lamina::payload_bytes<T>(rules.payload, at.sizes[layer]);
    }
  }

 private:
  LAMINA_HOST_DEVICE static std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

  LAMINA_HOST_DEVICE double drop_ratio_in(std::uint64_t step) const {
    if (step >= rules.warm_up_steps || rules.drop_ratio == 1) return rules.drop_ratio;
    return drop_ratio_in_warm_up[step - 1];
  }

  // By one thread: a selection that is asked for again is rare.
  LAMINA_HOST_DEVICE bool held_as_before() const {
    if (held == nullptr) return true;
    for (std::size_t layer = 0; layer < at.layers; ++layer) {
      if ((held[layer] != 0) != (held_before[layer] != 0)) return false;
    }
    return true;
  }

  LAMINA_HOST_DEVICE lamina::detail::layer_rule rule_of(std::size_t layer) const {
    using lamina::detail::layer_rule;
    if (held != nullptr && held[layer] != 0) return layer_rule::held;
    if (always_sent != nullptr && always_sent[layer] != 0) return layer_rule::always;
    return layer_rule::by_value;
  }

  LAMINA_HOST_DEVICE entry ascending(std::size_t layer) const {
    return {key_of(lamina::detail::search_value(search_values[layer], rule_of(layer))), at.sizes[layer]};
  }
  // What its value does not decide on does not count.
  LAMINA_HOST_DEVICE entry descending(std::size_t layer) const {
    const bool counts = rule_of(layer) == lamina::detail::layer_rule::by_value;
    return {~key_of(lamina::detail::ordered_value(search_values[layer])), counts ? at.sizes[layer] : 0};
  }

  // As lamina::threshold_search::beyond.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE double searched(const Team& team, shared_memory& shared, double limit) const {
    find_crossing(team, shared, limit, [this](std::size_t layer) { return ascending(layer); });
    const double threshold = shared.found ? value_of(shared.crossing) : invalid_threshold;
    team.barrier();
    return threshold;
  }

  // As lamina::layer_selector: the smallest value above the first that does not fit, and of the layers that have that one
  // the first that fit.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void within_budget(const Team& team, shared_memory& shared, double most,
                                        lamina::detail::step_decision& decision) const {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    find_crossing(team, shared, most, [this](std::size_t layer) { return descending(layer); });
    const bool found = shared.found;
    const std::uint64_t crossing = ~shared.crossing;
    team.barrier();
    decision.threshold = -infinity;
    if (!found) return;
    if (team.thread() == 0) {
      shared.above = key_of(infinity);
      shared.before = 0;
      shared.tied = 0;
      shared.first_tied = at.layers;
    }
    team.barrier();
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      const entry each = descending(layer);
      if (each.elements == 0) continue;
      if (~each.key > crossing) {
        team.lower(shared.above, ~each.key);
        team.add(shared.before, each.elements);
      } else if (~each.key == crossing) {
        team.add(shared.tied, 1);
        team.lower(shared.first_tied, layer);
      }
    }
    team.barrier();
    const double left = most - static_cast<double>(shared.before);
    const unsigned long long first_tied = shared.first_tied;
    const bool may_part = shared.tied > 1;
    decision.threshold = value_of(shared.above);
    team.barrier();
    std::size_t end = first_tied;  // alone it does not fit
    if (may_part) {
      find_crossing(team, shared, left, [this, crossing](std::size_t layer) {
        const entry each = descending(layer);
        return entry{layer, ~each.key == crossing ? each.elements : 0};
      });
      end = shared.crossing;
      team.barrier();
    }
    if (end > first_tied) decision.threshold = value_of(crossing);
    if (decision.threshold == value_of(crossing)) decision.equals_end = end;
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE std::size_t elements_always_sent(const Team& team, shared_memory& shared) const {
    if (always_sent == nullptr) return 0;
    if (team.thread() == 0) shared.above = 0;
    team.barrier();
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      if (rule_of(layer) == lamina::detail::layer_rule::always) team.add(shared.above, at.sizes[layer]);
    }
    team.barrier();
    const std::size_t elements = shared.above;
    team.barrier();
    return elements;
  }

  // shared.crossing: the first key in ascending order with which the sum of the sizes is greater than the limit.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE void find_crossing(const Team& team, shared_memory& shared, double limit,
                                        const Entry& entry_of) const {
    if (team.thread() == 0) {
      shared.found = false;
      shared.before = 0;
      shared.crossing = 0;
    }
    if (at.layers <= ranked_layers) {
      rank(team, shared, limit, entry_of);
    } else {
      narrow(team, shared, limit, entry_of);
    }
    team.barrier();
  }

  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE void rank(const Team& team, shared_memory& shared, double limit,
                               const Entry& entry_of) const {
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      const entry each = entry_of(layer);
      shared.ranked.key[layer] = each.key;
      shared.ranked.elements[layer] = each.elements;
    }
    team.barrier();
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      const unsigned long long own = shared.ranked.key[layer];
      unsigned long long before = 0;
      unsigned long long tied = 0;
      bool is_first = shared.ranked.elements[layer] > 0;
      for (std::size_t other = 0; other < at.layers; ++other) {
        const unsigned long long theirs = shared.ranked.key[other];
        const unsigned long long count = shared.ranked.elements[other];
        if (theirs < own) before += count;
        if (theirs == own) tied += count;
        if (theirs == own && other < layer && count > 0) is_first = false;
      }
      if (is_first && static_cast<double>(before) <= limit && static_cast<double>(before + tied) > limit) {
        shared.crossing = own;
        shared.found = true;
      }
    }
  }

  // Digit by digit from the highest: which value of the digit crosses, among the keys that begin as far as is known.
  LAMINA_ANY_CALLER template <class Team, class Entry>
  LAMINA_HOST_DEVICE void narrow(const Team& team, shared_memory& shared, double limit,
                                 const Entry& entry_of) const {
    for (unsigned shift = 64; shift > 0;) {
      shift -= digit_bits;
      for (unsigned digit = team.thread(); digit < digits; digit += team.threads())
        shared.of_digit[digit] = 0;
      team.barrier();
      const unsigned long long known = shared.crossing;
      for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
        const entry each = entry_of(layer);
        const bool begins_alike = shift + digit_bits == 64 || (each.key ^ known) >> (shift + digit_bits) == 0;
        if (begins_alike) team.add(shared.of_digit[(each.key >> shift) % digits], each.elements);
      }
      team.barrier();
      if (team.thread() == 0) {
        unsigned long long before = shared.before;
        unsigned digit = 0;
        while (digit < digits && !(static_cast<double>(before + shared.of_digit[digit]) > limit)) {
          before += shared.of_digit[digit++];
        }
        shared.found = digit < digits;
        if (shared.found) {
          shared.crossing = known | (static_cast<unsigned long long>(digit) << shift);
          shared.before = before;
        }
      }
      team.barrier();
      if (!shared.found) return;  // only possible in the first round
    }
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
