// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/frame.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Integers that order as the numbers do, with the two zeros as one; not of NaN.
constexpr std::uint64_t key_of(double value) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  const auto bits = std::bit_cast<std::uint64_t>(value == 0 ? 0.0 : value);
  return (bits & sign) != 0 ? ~bits : bits | sign;
}
constexpr double value_of(std::uint64_t key) {
  constexpr std::uint64_t sign = std::uint64_t{1} << 63U;
  return std::bit_cast<double>((key & sign) != 0 ? key & ~sign : ~key);
}

/// The first key in ascending order with which the sum of the elements is greater than the limit.
struct crossing {
  bool is_found;  // not if the sum never is
  unsigned long long key;
  unsigned long long before;  // elements of smaller keys
};

/// Where a sum over keys in ascending order exceeds a limit: what lamina::threshold_search finds. The range of the keys is cut into 256 bins, in which the elements add up; the bin in which the sum crosses the limit is the next
/// range, until that is one key. So there are eight rounds at most, and two or three of layers that have different values. Sums are of
/// integers, so neither the number of threads nor the order of its threads changes what is found.
class crossing_search {
 public:
  static constexpr unsigned bins = 256;

  struct shared_memory {
    shared_sum elements[bins];
    unsigned bin;  // in which the sum crosses the limit
    unsigned long long before;
    std::uint32_t kept;
    union {
      block_scratch<2> least;
      block_scratch<1> sums;
    };
  };

  /// Called by all threads, which all get it; entry_of(i) is the i-th of `count`, fewer than 2^32. `kept` has room for twice as many.
  /// Two reads of all of them in the first round, one more and a write of what is left in the second, and from there on of that alone.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Entry>
  LAMINA_HOST_DEVICE LAMINA_CALLED static crossing find(const ThreadBlock& cta, shared_memory& shared,
                                                        candidate* kept, std::size_t count, double limit,
                                                        const Entry& entry_of) {
    const std::size_t room = count;
    const candidate* from = nullptr;
    const auto entry = [&](std::size_t i) { return from == nullptr ? entry_of(i) : from[i]; };
    unsigned long long first = 0;  // the range, and the elements below it
    unsigned long long last = ~0ULL;
    unsigned long long before = 0;
    const auto is_in_range = [&](const candidate& each) {
      return each.elements > 0 && each.key >= first && each.key <= last;
    };
    const auto exceeds = [&](unsigned long long sum) { return static_cast<double>(sum) > limit; };
    for (unsigned round = 0;; ++round) {
      candidate* const to = round == 0 ? nullptr : kept + (round % 2) * room;
      cta.barrier();  // what was found before may still be read
      if (cta.thread() == 0) shared.kept = 0;
      for (unsigned bin = cta.thread(); bin < bins; bin += cta.threads()) shared.elements[bin] = {0, 0};
      cta.barrier();
      unsigned long long least[2] = {~0ULL, ~0ULL};  // of keys, and of their complements
      for_each(cta, count, entry, [&](const candidate& each) {
        if (!is_in_range(each)) return;
        least[0] = lesser(least[0], each.key);
        least[1] = lesser(least[1], ~each.key);
        if (to != nullptr) to[cta.count(shared.kept)] = each;
      });
      cta.least(least, shared.least);
      const unsigned long long low = least[0];
      const unsigned long long high = ~least[1];
      if (low > high) return {false, 0, 0};
      if (to != nullptr) {
        from = to;
        count = shared.kept;
      }
      unsigned shift = 0;
      while ((high - low) >> shift >= bins) ++shift;
      for_each(cta, count, entry, [&](const candidate& each) {
        if (is_in_range(each)) cta.add(shared.elements[(each.key - low) >> shift], each.elements);
      });
      cta.barrier();
      if (!cross(cta, shared, before, exceeds)) return {false, 0, 0};
      before = shared.before;
      first = low + (static_cast<unsigned long long>(shared.bin) << shift);
      if (shift == 0) return {true, first, before};
      const unsigned long long width = (1ULL << shift) - 1;
      last = high - first < width ? high : first + width;
    }
  }

 private:
  // Calls visit for the thread's entries, which are on their way several at a time.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Entry, class Visit>
  LAMINA_HOST_DEVICE static void for_each(const ThreadBlock& cta, std::size_t count, const Entry& entry_of,
                                          const Visit& visit) {
    constexpr unsigned at_once = 4;
    const std::size_t stride = cta.threads();
    for (std::size_t i = cta.thread(); i < count; i += at_once * stride) {
      candidate loaded[at_once];
      for (unsigned k = 0; k < at_once; ++k)
        loaded[k] = i + k * stride < count ? entry_of(i + k * stride) : candidate{0, 0};
      for (const candidate& each : loaded) visit(each);
    }
  }

  // Whether the sum over the bins crosses the limit; all threads may read where, then.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Exceeds>
  LAMINA_HOST_DEVICE static bool cross(const ThreadBlock& cta, shared_memory& shared,
                                       unsigned long long before, const Exceeds& exceeds) {
    const unsigned each = (bins + cta.threads() - 1) / cta.threads();
    const unsigned begin = cta.thread() * each < bins ? cta.thread() * each : bins;
    const unsigned end = begin + each < bins ? begin + each : bins;
    unsigned long long own = 0;
    for (unsigned bin = begin; bin < end; ++bin) own += shared.elements[bin].value();
    if (!exceeds(before + cta.sum_before(own, shared.sums))) return false;
    unsigned long long sum = before + own;
    for (unsigned bin = begin; bin < end; ++bin) {
      const unsigned long long next = sum + shared.elements[bin].value();
      if (!exceeds(sum) && exceeds(next)) {
        shared.bin = bin;
        shared.before = sum;
      }
      sum = next;
    }
    cta.barrier();
    return true;
  }
};

/// The most layers over which add_kernel decides a step, half of select_kernel's threads each with two: beyond it each layer is read
/// several times, and what counts is how many threads wait for that.
inline constexpr std::size_t most_selected_with_add = 1024;

/// Algorithm 1, the selection and the header of the frame, by one thread block: L values are little work, and thread blocks could not
/// wait for each other. Decides by decision.hpp, as lamina::selector does. A step that is decided already stays so.
template <element T>
struct select_kernel {
  static constexpr unsigned threads = 512;
  static constexpr unsigned thread_blocks_at_once = 1;
  static constexpr unsigned layers_at_once = 8;  // of a thread: a byte of the bitmap

  struct shared_memory {
    crossing_search::shared_memory search;
    union {
      block_scratch<1> sum;
      block_scratch<3> least;
    };
  };

  model_view<T> at;
  const double* values;      // L
  const std::uint8_t* held;  // L: not 0 for layers not to be sent in this step; or none
  // As in worker_options, which own memory of the host.
  bool has_threshold;
  double send_budget;  // 0: none
  double drop_ratio;
  std::uint64_t warm_up_steps;
  std::uint64_t search_every;
  std::uint64_t at_least_every;
  bool by_score;
  payload_type payload;

  std::size_t thread_blocks(unsigned) const { return 1; }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE LAMINA_CALLED void operator()(const ThreadBlock& cta, shared_memory& shared) const {
    cta.wait_for_launches();
    fetch(cta);
    const step_phase phase = at.state->load_phase();
    if (phase != step_phase::adding) {
      if (cta.thread() == 0 && !may_select(phase)) at.state->set_misused();
      return;
    }
    lamina::detail::step_decision decision;
    decision.step = at.state->step + 1;
    decision.threshold = at.state->threshold;
    decision.max_age = at_least_every;
    double allowance = at.state->allowance;
    const double elements = static_cast<double>(at.elements);
    if (send_budget > 0) {
      const double share = product(send_budget, elements);
      allowance = lamina::detail::grown_allowance(allowance, share, at.largest_layer);
      const double left = lamina::detail::allowance_by_value(allowance, elements_always_sent(cta, shared));
      within_budget(cta, shared, left, decision);
    } else {
      const double ratio = drop_ratio_in(decision.step);
      if (searches_in(decision.step, ratio, decision.threshold)) {  // as lamina::threshold_search::beyond
        const searched_layers by_value = {this, searched_layers::by::value, 0, decision.step};
        const crossing found = find_crossing(cta, shared, product(ratio, elements), by_value);
        decision.threshold = found.is_found ? value_of(found.key) : invalid_threshold;
      }
      decision.sends_all = ratio == 0 || (ratio == 1 && !has_threshold);
    }
    const total sent = write_selection(cta, shared, decision);
    if (cta.thread() != 0) return;
    step_state& state = *at.state;
    state.step = decision.step;
    state.threshold_before = state.threshold;
    state.allowance_before = state.allowance;
    state.threshold = decision.threshold;
    state.allowance = allowance;
    state.sent_elements = sent.elements;
    state.payload_bytes = sent.bytes;
    state.store_phase(step_phase::selected);
    auto* header = reinterpret_cast<lamina::detail::wire_header*>(at.prefix);
    header->step = decision.step;
    header->payload_bytes = sent.bytes;
  }

 private:
  struct total {
    std::size_t elements;
    std::size_t bytes;
  };

  // All that is read of the first layers is on its way before the first of it is waited for.
  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void fetch(const ThreadBlock& cta) const {
    const std::size_t end = at.layers < 4 * cta.threads() ? at.layers : 4 * cta.threads();
    for (std::size_t layer = cta.thread(); layer < end; layer += cta.threads()) {
      cta.prefetch(values + layer);
      cta.prefetch(at.sizes + layer);
      cta.prefetch(at.sent_in + layer);
    }
  }

  // Bitmap and payload_begin: a thread takes the layers of a byte at a time.
  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE total write_selection(const ThreadBlock& cta, shared_memory& shared,
                                           const lamina::detail::step_decision& decision) const {
    total sent = {0, 0};
    const std::size_t bytes_of_bitmap = (at.layers + layers_at_once - 1) / layers_at_once;
    for (std::size_t first = 0; first < bytes_of_bitmap; first += cta.threads()) {
      const std::size_t byte = first + cta.thread();
      unsigned is_sent = 0;  // a bit each
      unsigned long long begin = 0;
      for (unsigned k = 0; k < layers_at_once; ++k) {
        const std::size_t layer = byte * layers_at_once + k;
        const bool sends =
            layer < at.layers && decision.sends(layer, score(layer, decision.step), at.sizes[layer],
                                                at.sent_in[layer], rule_of(layer));
        if (!sends) continue;
        sent.elements += at.sizes[layer];
        begin += lamina::payload_bytes<T>(payload, at.sizes[layer]);
        is_sent |= 1U << k;
      }
      const std::size_t bytes = cta.sum_before(begin, shared.sum);
      begin += sent.bytes;
      for (unsigned k = 0; k < layers_at_once; ++k) {
        if (((is_sent >> k) & 1U) == 0) continue;
        const std::size_t layer = byte * layers_at_once + k;
        at.payload_begin[layer] = begin;
        begin += lamina::payload_bytes<T>(payload, at.sizes[layer]);
      }
      if (byte < bytes_of_bitmap) at.bitmap[byte] = static_cast<std::uint8_t>(is_sent);
      sent.bytes += bytes;
    }
    unsigned long long own = sent.elements;
    return {cta.sum_before(own, shared.sum), sent.bytes};
  }

  LAMINA_HOST_DEVICE double drop_ratio_in(std::uint64_t step) const {
    if (step >= warm_up_steps || drop_ratio == 1) return drop_ratio;
    return at.warm_up[step - 1];
  }

  LAMINA_HOST_DEVICE bool searches_in(std::uint64_t step, double ratio, double threshold) const {
    if (!(ratio > 0) || has_threshold) return false;
    return (step - 1) % search_every == 0 || step <= warm_up_steps ||
           !lamina::detail::outlasts_its_step(threshold);
  }

  LAMINA_HOST_DEVICE double score(std::size_t layer, std::uint64_t step) const {
    if (!by_score) return values[layer];
    return product(values[layer], static_cast<double>(step - at.sent_in[layer]));
  }

  LAMINA_HOST_DEVICE lamina::detail::layer_rule rule_of(std::size_t layer) const {
    using lamina::detail::layer_rule;
    if (held != nullptr && held[layer] != 0) return layer_rule::held;
    if (at.always_sent != nullptr && at.always_sent[layer] != 0) return layer_rule::always;
    return layer_rule::by_value;
  }

  /// Layers as one of the searches sees them. One type, so that one text is compiled for all.
  struct searched_layers {
    const select_kernel* kernel;
    enum class by { value, value_descending, place } order;
    unsigned long long tied;  // by place: what does not have this key, descending, does not count
    std::uint64_t step;

    LAMINA_HOST_DEVICE candidate operator()(std::size_t layer) const {
      const lamina::detail::layer_rule rule = kernel->rule_of(layer);
      const double value = kernel->score(layer, step);
      const std::size_t elements = kernel->at.sizes[layer];
      if (order == by::value) return {key_of(lamina::detail::search_value(value, rule)), elements};
      // What its value does not decide on does not count.
      const unsigned long long key = ~key_of(lamina::detail::ordered_value(value));
      const bool counts = rule == lamina::detail::layer_rule::by_value;
      if (order == by::value_descending) return {key, counts ? elements : 0};
      return {layer, counts && key == tied ? elements : 0};
    }
  };

  // As lamina::selector: the smallest value above the first that does not fit; of layers tied there, the first that fit.
  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void within_budget(const ThreadBlock& cta, shared_memory& shared, double most,
                                        lamina::detail::step_decision& decision) const {
    constexpr double infinity = std::numeric_limits<double>::infinity();
    const searched_layers descending = {this, searched_layers::by::value_descending, 0, decision.step};
    const crossing found = find_crossing(cta, shared, most, descending);
    decision.threshold = -infinity;
    if (!found.is_found) return;
    // Above it, and the first and the last layer that are tied.
    unsigned long long least[3] = {key_of(infinity), at.layers, ~0ULL};
    for (std::size_t layer = cta.thread(); layer < at.layers; layer += cta.threads()) {
      const candidate each = descending(layer);
      if (each.elements == 0) continue;
      if (each.key < found.key) least[0] = lesser(least[0], ~each.key);
      if (each.key == found.key) {
        least[1] = lesser(least[1], layer);
        least[2] = ~layer;
      }
    }
    cta.least(least, shared.least);
    const unsigned long long first_tied = least[1];
    unsigned long long end = first_tied;  // alone it does not fit
    if (first_tied != ~least[2]) {
      const double left = most - static_cast<double>(found.before);
      end =
          find_crossing(cta, shared, left, {this, searched_layers::by::place, found.key, decision.step}).key;
    }
    const double value = value_of(~found.key);
    decision.threshold = end > first_tied ? value : value_of(least[0]);
    if (decision.threshold == value) decision.equals_end = end;
  }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE std::size_t elements_always_sent(const ThreadBlock& cta, shared_memory& shared) const {
    if (at.always_sent == nullptr) return 0;
    unsigned long long own = 0;
    for (std::size_t layer = cta.thread(); layer < at.layers; layer += cta.threads()) {
      if (rule_of(layer) == lamina::detail::layer_rule::always) own += at.sizes[layer];
    }
    return cta.sum_before(own, shared.sum);
  }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE crossing find_crossing(const ThreadBlock& cta, shared_memory& shared, double limit,
                                            const searched_layers& layers) const {
    return crossing_search::find(cta, shared.search, at.candidates, at.layers, limit, layers);
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
