// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"

namespace lamina::cuda::detail {

/// Algorithm 1, the selection and the header of the frame, by one team: L values are little work, and teams could not
/// wait for each other. Decides as lamina::layer_selector does.
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

  struct shared_memory {
    union {
      struct {
        unsigned long long key[ranked_layers];
        unsigned long long elements[ranked_layers];
      } ranked;
      unsigned long long of_digit[digits];
      part parts[threads];
    };
    unsigned long long crossing;
    unsigned long long above;
    unsigned long long before;
    bool found;
  };

  model_view<T> at;
  compressor_options options;
  const double* values;                 // of this device or those that all workers agreed on; L
  const double* search_values;          // what the threshold is searched over; mostly the same
  const double* drop_ratio_in_warm_up;  // of the steps 1, 2, ... below options.warm_up_steps
  std::size_t largest_layer;

  std::size_t teams() const { return 1; }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    const std::uint64_t step = at.state->step + 1;
    const double elements = static_cast<double>(at.elements);
    double threshold = at.state->threshold;
    double allowance = at.state->allowance;
    bool sends_all = false;
    bool nothing_fits = false;
    if (options.byte_budget.has_value()) {
      const double share = product(options.byte_budget.value_or(0), elements);
      const double most = share + static_cast<double>(largest_layer);
      allowance = allowance + share < most ? allowance + share : most;
      // Layers that max_age forced out may have left less than nothing.
      threshold = within_budget(team, shared, allowance > 0 ? allowance : 0, nothing_fits);
    } else {
      const double ratio = drop_ratio_in(step);
      if (ratio > 0 && options.refresh.due(step))
        threshold = searched(team, shared, product(ratio, elements));
      sends_all = ratio == 0 || (ratio == 1 && !options.refresh.fixed_threshold());
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
        const bool is_nan = values[layer] != values[layer];  // must not wait for ever
        const bool waited = options.max_age > 0 && step - at.cleared_in[layer] >= options.max_age;
        const bool is_large = values[layer] >= threshold && !nothing_fits;
        if (at.sizes[layer] == 0 || !(is_large || sends_all || waited || is_nan)) continue;
        bits |= 1U << (layer % 8);
        sent.elements += at.sizes[layer];
        sent.bytes += lamina::payload_bytes<T>(options.payload, at.sizes[layer]);
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
      *at.state = {.step = step,
                   .threshold = threshold,
                   .allowance = allowance,
                   .sent_elements = all.elements,
                   .payload_bytes = all.bytes,
                   .left_out_elements = at.state->left_out_elements};
      auto* header = reinterpret_cast<lamina::detail::wire_header*>(at.prefix);
      header->step = step;
      header->payload_bytes = all.bytes;
    }
    team.barrier();
    std::size_t begin = first < last ? shared.parts[team.thread()].bytes : 0;
    for (std::size_t layer = 8 * first; layer < smaller(8 * last, at.layers); ++layer) {
      if (!at.is_sent(layer)) continue;
      at.payload_begin[layer] = begin;
      begin += lamina::payload_bytes<T>(options.payload, at.sizes[layer]);
    }
  }

 private:
  LAMINA_HOST_DEVICE static std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

  LAMINA_HOST_DEVICE double drop_ratio_in(std::uint64_t step) const {
    if (step >= options.warm_up_steps || options.drop_ratio == 1) return options.drop_ratio;
    return drop_ratio_in_warm_up[step - 1];
  }

  // As lamina::threshold_search::operator().
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE double searched(const Team& team, shared_memory& shared, double limit) const {
    find_crossing(team, shared, limit, [](double value) { return key_of(value); });
    const double threshold = shared.found ? value_of(shared.crossing) : invalid_threshold;
    team.barrier();
    return threshold;
  }

  // As lamina::threshold_search::within_budget: the smallest value above the first that does not fit. `nothing_fits` says
  // so where that is infinite, which no threshold does.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE double within_budget(const Team& team, shared_memory& shared, double most,
                                          bool& nothing_fits) const {
    find_crossing(team, shared, most, [](double value) { return ~key_of(value); });
    const bool found = shared.found;
    const std::uint64_t crossing = ~shared.crossing;
    nothing_fits = found && crossing == key_of(std::numeric_limits<double>::infinity());
    if (team.thread() == 0) shared.above = key_of(std::numeric_limits<double>::infinity());
    team.barrier();
    if (!found) return -std::numeric_limits<double>::infinity();
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      const std::uint64_t key = key_of(search_values[layer]);
      if (at.sizes[layer] > 0 && key > crossing) team.lower(shared.above, key);
    }
    team.barrier();
    const double threshold = value_of(shared.above);
    team.barrier();
    return threshold;
  }

  // shared.crossing: the first key in ascending order with which the sum of the sizes is greater than the limit.
  LAMINA_ANY_CALLER template <class Team, class Key>
  LAMINA_HOST_DEVICE void find_crossing(const Team& team, shared_memory& shared, double limit,
                                        const Key& key) const {
    if (team.thread() == 0) {
      shared.found = false;
      shared.before = 0;
      shared.crossing = 0;
    }
    if (at.layers <= ranked_layers) {
      rank(team, shared, limit, key);
    } else {
      narrow(team, shared, limit, key);
    }
    team.barrier();
  }

  LAMINA_ANY_CALLER template <class Team, class Key>
  LAMINA_HOST_DEVICE void rank(const Team& team, shared_memory& shared, double limit, const Key& key) const {
    for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
      shared.ranked.key[layer] = key(search_values[layer]);
      shared.ranked.elements[layer] = at.sizes[layer];
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
  LAMINA_ANY_CALLER template <class Team, class Key>
  LAMINA_HOST_DEVICE void narrow(const Team& team, shared_memory& shared, double limit,
                                 const Key& key) const {
    for (unsigned shift = 64; shift > 0;) {
      shift -= digit_bits;
      for (unsigned digit = team.thread(); digit < digits; digit += team.threads())
        shared.of_digit[digit] = 0;
      team.barrier();
      const unsigned long long known = shared.crossing;
      for (std::size_t layer = team.thread(); layer < at.layers; layer += team.threads()) {
        const std::uint64_t own = key(search_values[layer]);
        const bool begins_alike = shift + digit_bits == 64 || (own ^ known) >> (shift + digit_bits) == 0;
        if (begins_alike) team.add(shared.of_digit[(own >> shift) % digits], at.sizes[layer]);
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

}  // namespace lamina::cuda::detail
