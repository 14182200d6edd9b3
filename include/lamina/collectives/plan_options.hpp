// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lamina/collectives/algorithm.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/options.hpp"

/// What a plan is made from: the classes of layers, the choice of an algorithm, the sizes of buckets, as what gradients travel.
namespace lamina::inline LAMINA_ABI::collectives {

/// What a layer belongs to. Biases and batch normalisation go with the module that owns them; normalisation is convolutional. It
/// comes from the types of a network's modules, not from shapes: a convolution of 1x1 may have two dimensions elsewhere.
///
/// A gathered layer is not summed: it is P slices of one length, of which rank r has slice r, and all ranks get all of them. Its
/// collective is an all_gather by algorithm::pairwise, which sends (P - 1)/P of its elements. Inputs and output errors of a fully
/// connected layer go so, from which each rank makes the gradient of all ranks (gathered_linear).
enum class layer_class : std::uint8_t { convolutional, fully_connected, gathered };

/// How the algorithm of a bucket is chosen.
class algorithm_choice {
 public:
  /// The same for all.
  static constexpr algorithm_choice always(algorithm how) noexcept { return {rule::always, how}; }
  /// A butterfly for convolutional layers, a ring for fully connected ones (Kim, Yeo and Oh 2021).
  static constexpr algorithm_choice by_type(algorithm butterfly = algorithm::halving_doubling) noexcept {
    return {rule::by_type, butterfly};
  }
  /// The cheapest by the table of costs.
  static constexpr algorithm_choice by_cost() noexcept { return {rule::by_cost, algorithm::ring}; }

  /// Of a bucket that goes in collectives of `chunk` elements. Cost: that of cheapest() for by_cost.
  [[nodiscard]] algorithm of(layer_class kind, std::size_t ranks, std::size_t elements,
                             const cost_table& costs,
                             std::size_t chunk = (std::numeric_limits<std::size_t>::max)()) const {
    if (rule_ == rule::by_cost) return cheapest(ranks, elements, costs, chunk);
    return rule_ == rule::by_type && kind == layer_class::fully_connected ? algorithm::ring : how_;
  }

 private:
  enum class rule : std::uint8_t { always, by_type, by_cost };
  constexpr algorithm_choice(rule which, algorithm how) noexcept : rule_(which), how_(how) {}

  rule rule_;
  algorithm how_;
};

struct plan_options {
  /// A bucket is closed as soon as it has so many bytes. 0: each layer by itself. Without a value: 8·P·alpha/beta_one_way, within 64
  /// KiB and 25 MiB, down to a power of two: of a ring's time, where the bucket goes in one collective, latency is then a ninth to a fifth.
  std::optional<std::size_t> bucket_bytes = std::nullopt;
  /// A larger bucket goes in collectives of so many bytes, so that it does not hold up what comes after; at least 4,096.
  std::size_t chunk_bytes = std::size_t{4} << 20U;
  algorithm_choice choice = algorithm_choice::always(algorithm::pairwise);
  /// As what gradients travel to be summed, and sums back: as_is, or rounded to bfloat16 or float16, which algorithm::pairwise alone
  /// does. Sizes of buckets and chunks are of gradients as they lie in memory. See sum_payload.hpp.
  payload_type payload = payload_type::as_is;
  /// For owners: of each layer, seconds after the beginning of a step at which its gradient is ready, the same numbers on all ranks. Where by
  /// these the link would be idle in the backward pass, parameters go round there: plan::tasks_of_owners(). None: after the last sum.
  std::vector<double> ready_seconds = {};
};

}  // namespace lamina::inline LAMINA_ABI::collectives
