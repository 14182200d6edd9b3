// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/plan_text.hpp"
#include "lamina/collectives/schedule.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"

/// \file
/// Which layers are summed together, in which order and by which algorithm. Read it after cost.hpp.
///
/// All of it decides the order of additions, so it is the same on all ranks, is compared before the first sum, and is saved with a run:
/// two runs with one plan are bitwise identical.
namespace lamina::inline LAMINA_ABI::collectives {

/// What a layer belongs to. Biases and batch normalisation go with the module that owns them; normalisation is convolutional. It
/// comes from the types of a network's modules, not from shapes: a convolution of 1x1 may have two dimensions elsewhere.
enum class layer_class : std::uint8_t { convolutional, fully_connected };

/// How the algorithm of a bucket is chosen.
class algorithm_choice {
 public:
  /// The same for all.
  static constexpr algorithm_choice always(algorithm how) noexcept { return {rule::always, how}; }
  /// A butterfly for convolutional layers, a ring for fully connected ones (Kim, Yeo and Oh 2021).
  static constexpr algorithm_choice by_type() noexcept {
    return {rule::by_type, algorithm::halving_doubling};
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
  /// does. Sizes of buckets and chunks are of gradients as they lie in memory. See sum.hpp.
  payload_type payload = payload_type::as_is;
};

/// Layers that are summed together.
struct bucket {
  std::vector<std::size_t> layers;  ///< in the order in which their gradients become ready
  std::size_t elements = 0;
  algorithm how = algorithm::pairwise;
};

/// Where a layer is.
struct layer_place {
  std::size_t bucket = 0;
  std::size_t offset = 0;  ///< in the bucket, in elements, where all of its layers are sent
};

/// Collectives of a bucket that follow one another, chunk by chunk.
struct task {
  std::size_t bucket = 0;
  operation what = operation::all_reduce;
  bool operator==(const task&) const = default;
};

class plan {
 public:
  /// \param model        whose layers are summed
  /// \param ranks        P
  /// \param ready_order  every layer once, in the order in which gradients become ready: agree_on_order() gives it
  /// \param classes      of each layer of the model; a bucket has layers of one class alone
  /// \param options      buckets, chunks, algorithms
  /// \param costs        the same on all ranks
  /// Throws std::invalid_argument for an order that is none, another number of classes, no ranks, chunks below 4,096 bytes, a cost that
  /// cannot be, or a payload that sums have not, or not by the algorithm of a bucket.
  plan(const layout& model, std::size_t ranks, std::span<const std::size_t> ready_order,
       std::span<const layer_class> classes, const plan_options& options = {},
       const cost_table& costs = gigabit_costs)
      : model_(model),
        ranks_(ranks),
        chunk_bytes_(options.chunk_bytes),
        payload_(options.payload),
        costs_(costs) {
    if (ranks == 0) throw std::invalid_argument("a plan for no ranks");
    if (chunk_bytes_ < least_chunk_bytes) {
      throw std::invalid_argument("chunks of " + std::to_string(chunk_bytes_) + " bytes: at least " +
                                  std::to_string(least_chunk_bytes) + " are needed");
    }
    if (classes.size() != model.layers()) {
      throw std::invalid_argument("there are " + std::to_string(classes.size()) + " classes for " +
                                  std::to_string(model.layers()) + " layers");
    }
    check_costs(costs_);
    if (const auto mistake = mistake_in(ready_order)) throw std::invalid_argument(*mistake);
    const std::size_t bucket_bytes = options.bucket_bytes.value_or(default_bucket_bytes());
    bool is_open = false;
    for (const std::size_t layer : ready_order) {
      if (!is_open || classes[layer] != classes[buckets_.back().layers.front()]) buckets_.emplace_back();
      buckets_.back().layers.push_back(layer);
      buckets_.back().elements += model.sizes()[layer];
      is_open = buckets_.back().elements * sizeof(float) < bucket_bytes;
    }
    for (bucket& each : buckets_)
      each.how =
          options.choice.of(classes[each.layers.front()], ranks, each.elements, costs_, chunk_elements());
    if (const auto mistake = mistake_in_payload()) throw std::invalid_argument(*mistake);
    finish();
  }

  /// The plan whose save() gave the text. Throws plan_error, with what is there and what was expected.
  static plan load(std::string_view text, const layout& model, std::size_t ranks) {
    plan loaded(model, ranks);
    loaded.take(detail::plan_text::read(text));
    loaded.finish();
    if (loaded.text_ != text) throw plan_error("the plan is damaged: it is not as it is written");
    return loaded;
  }

  /// As lines of text that load() takes, the same on every machine.
  [[nodiscard]] const std::string& save() const noexcept { return text_; }
  /// 64 bits over the text: equal where plans are.
  [[nodiscard]] std::uint64_t fingerprint() const noexcept { return fingerprint_; }

  [[nodiscard]] const layout& model() const noexcept { return model_; }
  [[nodiscard]] std::size_t ranks() const noexcept { return ranks_; }
  [[nodiscard]] const cost_table& costs() const noexcept { return costs_; }
  /// In the order in which they are summed: the collectives of a step run in this order and in no other, on all ranks.
  [[nodiscard]] std::span<const bucket> buckets() const noexcept { return buckets_; }
  /// Throws std::out_of_range for a layer that there is not.
  [[nodiscard]] const layer_place& place(std::size_t layer) const {
    model_.check_layer(layer);
    return places_[layer];
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

  /// Seconds that the sums of a bucket take by the table of costs.
  [[nodiscard]] double seconds_of(const bucket& which) const {
    return seconds_in_chunks(operation::all_reduce, which.how, ranks_, which.elements, chunk_elements(),
                             costs_, bytes_of_element(payload_));
  }

  /// What ranks do in a step, one after the other, where every rank gets the mean of everything.
  [[nodiscard]] std::vector<task> tasks() const {
    std::vector<task> all;
    for (std::size_t b = 0; b < buckets_.size(); ++b) all.push_back({b, operation::all_reduce});
    return all;
  }
  /// The same with owners, who hand parameters round once all is summed: those of the bucket summed last first, which the next forward
  /// pass needs first.
  [[nodiscard]] std::vector<task> tasks_of_owners() const {
    std::vector<task> all;
    for (std::size_t b = 0; b < buckets_.size(); ++b) all.push_back({b, operation::reduce_scatter});
    for (std::size_t b = buckets_.size(); b-- > 0;) all.push_back({b, operation::all_gather});
    return all;
  }

  /// A layer is cut into P slices of ⌈n/P⌉ elements, of which the last may be shorter, or empty. Throws std::out_of_range for the layer.
  [[nodiscard]] element_range slice(std::size_t layer, std::size_t index) const {
    const std::size_t width = slice_elements(layer);
    const std::size_t elements = model_.sizes()[layer];
    return {(std::min)(elements, index * width), (std::min)(elements, (index + 1) * width)};
  }
  [[nodiscard]] std::size_t slice_elements(std::size_t layer) const {
    model_.check_layer(layer);
    return model_.sizes()[layer] / ranks_ + (model_.sizes()[layer] % ranks_ != 0 ? 1 : 0);
  }
  /// With owners: the elements of a layer that a rank updates, in all steps. Throws as owned_elements(), and std::out_of_range for the layer.
  [[nodiscard]] element_range owned_by(std::size_t rank, std::size_t layer) const {
    return slice(layer, owned_elements(buckets_[place(layer).bucket].how, ranks_, rank, ranks_).begin);
  }

  /// A table to print at the start: each bucket, its layers, bytes, algorithm and predicted microseconds.
  [[nodiscard]] std::string table() const {
    std::string lines = "bucket  layers       bytes  algorithm         microseconds  first layer\n";
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      const bucket& each = buckets_[b];
      std::array<char, 96> line{};
      std::snprintf(line.data(), line.size(), "%6zu %7zu %11zu  %-16s  %12.0f  ", b, each.layers.size(),
                    each.elements * sizeof(float), name_of(each.how), 1e6 * seconds_of(each));
      lines += line.data() + model_[each.layers.front()].name + "\n";
    }
    return lines;
  }

 private:
  static constexpr std::size_t least_chunk_bytes = 4096;

  plan(const layout& model, std::size_t ranks) : model_(model), ranks_(ranks) {}

  [[nodiscard]] std::size_t default_bucket_bytes() const {
    constexpr double least = 64 << 10U;
    constexpr double most = 25 << 20U;
    const double bytes = 8 * static_cast<double>(ranks_) * costs_.alpha / costs_.beta_one_way;
    return std::bit_floor(static_cast<std::size_t>(std::clamp(bytes, least, most)));
  }

  // What is wrong with an order that should have every layer once.
  [[nodiscard]] std::optional<std::string> mistake_in(std::span<const std::size_t> order) const {
    std::vector<bool> is_there(model_.layers());
    for (const std::size_t layer : order) {
      if (layer >= is_there.size())
        return "the order has layer " + std::to_string(layer) + ", which there is not";
      if (is_there[layer]) return "layer '" + model_[layer].name + "' stands twice in the order";
      is_there[layer] = true;
    }
    const auto missing = std::ranges::find(is_there, false);
    if (missing == is_there.end()) return std::nullopt;
    return "layer '" + model_[static_cast<std::size_t>(missing - is_there.begin())].name +
           "' is missing in the order";
  }

  // Of what travels to be summed: an algorithm that adds on the way would round at each rank.
  [[nodiscard]] std::optional<std::string> mistake_in_payload() const {
    if (std::ranges::find(all_sum_payloads, payload_) == all_sum_payloads.end()) {
      return "sums travel as_is, as float16 or as bfloat16, not as payload " +
             std::to_string(static_cast<int>(payload_));
    }
    const auto other =
        std::ranges::find_if(buckets_, [](const bucket& each) { return each.how != algorithm::pairwise; });
    if (payload_ == payload_type::as_is || other == buckets_.end()) return std::nullopt;
    return std::string("sums travel as ") + name_of(payload_) + " by pairwise alone, not by " +
           name_of(other->how);
  }

  // What a text says, where it is of this model and as many ranks.
  void take(const detail::plan_text& text) {
    const std::string own = detail::plan_text::hexadecimal(model_.fingerprint());
    if (text.model != own)
      throw plan_error("the plan is of the model " + text.model + ", this one is " + own);
    if (text.ranks != ranks_) {
      throw plan_error("the plan is for " + std::to_string(text.ranks) + " ranks, there are " +
                       std::to_string(ranks_));
    }
    chunk_bytes_ = text.chunk_bytes;
    payload_ = text.payload;
    costs_ = text.costs;
    std::vector<std::size_t> order;
    for (const auto& line : text.buckets) {
      buckets_.push_back({line.layers, 0, line.how});
      order.insert(order.end(), line.layers.begin(), line.layers.end());
    }
    if (const auto mistake = mistake_in(order)) throw plan_error("the plan: " + *mistake);
    for (bucket& each : buckets_) {
      for (const std::size_t layer : each.layers) each.elements += model_.sizes()[layer];
    }
    if (const auto mistake = mistake_in_payload()) throw plan_error("the plan: " + *mistake);
    if (chunk_bytes_ < least_chunk_bytes) throw plan_error("the plan has chunks below 4096 bytes");
    try {
      check_costs(costs_);
    } catch (const std::invalid_argument& error) {
      throw plan_error(std::string("the plan: ") + error.what());
    }
  }

  // Places, text and fingerprint, of the buckets.
  void finish() {
    places_.resize(model_.layers());
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      std::size_t offset = 0;
      for (const std::size_t layer : buckets_[b].layers) {
        places_[layer] = {b, offset};
        offset += model_.sizes()[layer];
      }
    }
    detail::plan_text::written said = text().write();
    text_ = std::move(said.text);
    fingerprint_ = said.fingerprint;
  }
  [[nodiscard]] detail::plan_text text() const {
    detail::plan_text said;
    said.model = detail::plan_text::hexadecimal(model_.fingerprint());
    said.ranks = ranks_;
    said.chunk_bytes = chunk_bytes_;
    said.payload = payload_;
    said.costs = costs_;
    for (const bucket& each : buckets_) said.buckets.push_back({each.how, each.layers});
    return said;
  }

  layout model_;
  std::size_t ranks_;
  std::size_t chunk_bytes_ = 0;
  payload_type payload_ = payload_type::as_is;
  cost_table costs_;
  std::vector<bucket> buckets_;
  std::vector<layer_place> places_;
  std::string text_;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
