// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "lamina/collectives/sum.hpp"

/// \file
/// Which layers are summed together, in which order and by which algorithm. Read it after schedule.hpp.
///
/// All of it decides the order of additions, so it is the same on all ranks, and is compared before the first sum. The same arguments make
/// the same plan, and two runs with one plan are bitwise identical.
namespace lamina::inline LAMINA_ABI::collectives {

/// What a layer belongs to. Biases and batch normalisation go with the module that owns them; normalisation is convolutional. It
/// comes from the types of a network's modules, not from shapes: a convolution of 1x1 may have two dimensions elsewhere.
enum class layer_class : std::uint8_t { convolutional, fully_connected };

/// How the algorithm of a bucket is chosen.
struct algorithm_choice {
  algorithm convolutional;
  algorithm fully_connected;

  /// The same for all.
  static constexpr algorithm_choice always(algorithm how) noexcept { return {how, how}; }
  /// A butterfly for convolutional layers, a ring for fully connected ones (Kim, Yeo and Oh 2021).
  static constexpr algorithm_choice by_type() noexcept {
    return {algorithm::halving_doubling, algorithm::ring};
  }

  [[nodiscard]] constexpr algorithm of(layer_class kind) const noexcept {
    return kind == layer_class::fully_connected ? fully_connected : convolutional;
  }
};

struct plan_options {
  /// A bucket is closed as soon as it has so many bytes. 0: each layer by itself. Without a value: 8·P times the 36 kB that Gigabit
  /// Ethernet carries in the latency of a message, within 64 KiB and 25 MiB, down to a power of two: of a ring's time, where the bucket
  /// goes in one collective, latency is then a ninth to a fifth.
  std::optional<std::size_t> bucket_bytes = std::nullopt;
  /// A larger bucket goes in collectives of so many bytes, so that it does not hold up what comes after; at least 4,096.
  std::size_t chunk_bytes = std::size_t{4} << 20U;
  algorithm_choice choice = algorithm_choice::always(algorithm::pairwise);
  /// As what gradients travel to be summed, and sums back: as_is, or rounded to bfloat16 or float16, which algorithm::pairwise alone
  /// does. Sizes of buckets and chunks are of gradients as they lie in memory. See sum.hpp.
  payload_type payload = payload_type::as_is;
};

/// Layers that are summed together.
struct bucket {
  std::vector<std::size_t> layers;  ///< in the order in which their gradients become ready
  std::size_t elements = 0;
  algorithm how = algorithm::pairwise;
};

/// Collectives of a bucket that follow one another, chunk by chunk.
struct task {
  std::size_t bucket = 0;
  operation what = operation::all_reduce;
  bool operator==(const task&) const = default;
};

class plan {
 public:
  /// `ready_order` has every layer once, in the order in which gradients become ready, as agree_on_order() gives it; `classes` has one of
  /// each layer of the model, and a bucket has layers of one class. Throws std::invalid_argument for an order that is none, another number
  /// of classes, no ranks, chunks below 4,096 bytes, or a payload that sums have not, or not by the algorithm of a bucket.
  plan(const layout& model, std::size_t ranks, std::span<const std::size_t> ready_order,
       std::span<const layer_class> classes, const plan_options& options = {})
      : model_(model),
        ranks_(ranks),
        chunk_bytes_(options.chunk_bytes),
        payload_(options.payload),
        bucket_of_(model.layers()) {
    if (ranks == 0) refuse("a plan for no ranks");
    if (chunk_bytes_ < 4096) refuse("chunks of ", chunk_bytes_, " bytes: at least 4096 are needed");
    if (classes.size() != model.layers())
      refuse("there are ", classes.size(), " classes for ", model.layers(), " layers");
    check_order(ready_order);
    const std::size_t bucket_bytes = options.bucket_bytes.value_or(default_bucket_bytes(ranks));
    bool is_open = false;
    for (const std::size_t layer : ready_order) {
      if (!is_open || classes[layer] != classes[buckets_.back().layers.front()]) buckets_.emplace_back();
      bucket_of_[layer] = buckets_.size() - 1;
      buckets_.back().layers.push_back(layer);
      buckets_.back().elements += model.sizes()[layer];
      is_open = buckets_.back().elements * sizeof(float) < bucket_bytes;
    }
    for (bucket& each : buckets_) each.how = options.choice.of(classes[each.layers.front()]);
    check_payload();
    fingerprint_ = hash_of_all();
  }

  /// 64 bits over all that decides the order of additions: equal where plans are.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  [[nodiscard]] const layout& model() const noexcept { return model_; }
  [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
  /// In the order in which they are summed: the collectives of a step run in this order and in no other, on all ranks.
  [[nodiscard]] std::span<const bucket> buckets() const noexcept { return buckets_; }
  /// Throws std::out_of_range for a layer that there is not.
  [[nodiscard]] std::size_t bucket_of(std::size_t layer) const {
    model_.check_layer(layer);
    return bucket_of_[layer];
  }
  /// The elements of a collective at most: chunk_bytes, down to a multiple of 16·P.
  [[nodiscard]] std::size_t chunk_elements() const noexcept {
    const std::size_t grain = 16 * ranks_;
    return (std::max)(grain, chunk_bytes_ / sizeof(float) / grain * grain);
  }

  /// As what numbers travel in a collective: gradients and their sums as plan_options::payload, parameters as they are.
  [[nodiscard]] payload_type payload_of(operation what) const noexcept {
    return what == operation::all_gather ? payload_type::as_is : payload_;
  }

  /// What ranks do in a step, one after the other, where every rank gets the mean of everything. With owners, who hand parameters round
  /// once all is summed: those of the bucket summed last first, which the next forward pass needs first.
  [[nodiscard]] std::vector<task> tasks(bool has_owners) const {
    std::vector<task> all;
    for (std::size_t b = 0; b < buckets_.size(); ++b)
      all.push_back({b, has_owners ? operation::reduce_scatter : operation::all_reduce});
    for (std::size_t b = buckets_.size(); has_owners && b-- > 0;) all.push_back({b, operation::all_gather});
    return all;
  }

 private:
  template <class... Words>
  [[noreturn]] static void refuse(const Words&... words) {
    detail::refuse(words...);
  }

  static std::size_t default_bucket_bytes(std::size_t ranks) {
    constexpr std::size_t least = 64 << 10U;
    constexpr std::size_t most = 25 << 20U;
    return std::bit_floor(ranks > most ? most : std::clamp(8 * ranks * 36'000, least, most));
  }

  void check_order(std::span<const std::size_t> order) const {
    std::vector<bool> is_there(model_.layers());
    for (const std::size_t layer : order) {
      if (layer >= is_there.size()) refuse("the order has layer ", layer, ", which there is not");
      if (is_there[layer]) refuse("layer '", model_[layer].name, "' stands twice in the order");
      is_there[layer] = true;
    }
    for (std::size_t layer = 0; layer < is_there.size(); ++layer)
      if (!is_there[layer]) refuse("layer '", model_[layer].name, "' is missing in the order");
  }

  // An algorithm that adds on the way would round at each rank.
  void check_payload() const {
    if (payload_ == payload_type::as_is) return;
    if (payload_ != payload_type::float16 && payload_ != payload_type::bfloat16)
      refuse("sums travel as_is, as float16 or as bfloat16, not as payload ", static_cast<int>(payload_));
    for (const bucket& each : buckets_) {
      if (each.how == algorithm::pairwise) continue;
      refuse("sums travel as ", name_of(payload_), " by pairwise alone, not by ", name_of(each.how));
    }
  }

  [[nodiscard]] std::uint64_t hash_of_all() const {
    std::uint64_t hash = lamina::detail::fnv_basis;
    const auto add = [&](std::uint64_t number) { hash = lamina::detail::fnv_number(hash, number); };
    add(model_.fingerprint());
    add(ranks_);
    add(chunk_bytes_);
    add(static_cast<std::uint64_t>(payload_));
    for (const bucket& each : buckets_) {
      add(static_cast<std::uint64_t>(each.how));
      add(each.layers.size());
      for (const std::size_t layer : each.layers) add(layer);
    }
    return hash;
  }

  layout model_;
  std::size_t ranks_;
  std::size_t chunk_bytes_;
  payload_type payload_;
  std::vector<bucket> buckets_;
  std::vector<std::size_t> bucket_of_;  // of each layer
  std::uint64_t fingerprint_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
