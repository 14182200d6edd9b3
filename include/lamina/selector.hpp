// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selection.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI {

/// The decision of each step: values in, a selection out. Keeps the threshold between searches, the age of each layer
/// and the allowance of the budget. A value that is NaN counts as infinity, so that its layer goes out first. A layer of value
/// 0 goes out only where everything does, by always_sent or by max_age. A threshold that is infinite serves its own step alone,
/// and the next searches again.
class layer_selector {
 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range, and for a byte_budget that always_sent alone
  /// uses up; options.always_sent are layers of `model`.
  layer_selector(const layout& model, const compressor_options& options)
      : options_(options),
        chosen_(model),
        threshold_(options.refresh.fixed_threshold().value_or(invalid_threshold)),
        cleared_in_(model.layers()) {
    check_drop_ratio(options.drop_ratio);
    if (options.byte_budget &&
        (detail::is_nan(*options.byte_budget) || !(*options.byte_budget > 0 && *options.byte_budget <= 1))) {
      detail::raise(std::invalid_argument("byte budget must lie in (0, 1], got " +
                                          std::to_string(*options.byte_budget)));
    }
    for (const std::size_t layer : options.always_sent) {
      if (layer >= model.layers()) {
        detail::raise(std::invalid_argument("always_sent names layer " + std::to_string(layer) +
                                            " of a model that has " + std::to_string(model.layers())));
      }
    }
    if (!options.always_sent.empty()) {
      is_always_sent_.resize(model.layers());
      for (const std::size_t layer : options.always_sent) is_always_sent_[layer] = 1;
      check_budget_of_others();
    }
  }

  /// Decides one step.
  ///
  /// \param step           counted from 1
  /// \param values         q_l, compared with the threshold: L values
  /// \param search_values  what the threshold is searched over; mostly the same
  /// \param held           L flags, or none: layers that are not sent whatever R, the budget or max_age say, and that count
  ///                       as the first to be held back; their values are not looked at
  /// \throws std::invalid_argument  a number of values or flags other than L
  const selection& decide(std::uint64_t step, std::span<const double> values,
                          std::span<const double> search_values, std::span<const char> held = {}) {
    const layout& model = chosen_.model();
    check_count(values.size(), "values");
    check_count(search_values.size(), "values to search");
    if (!held.empty()) check_count(held.size(), "flags of what is held");

    detail::step_decision decision{.step = step, .max_age = options_.max_age};
    if (options_.byte_budget) {
      decide_by_budget(decision, values, held);
    } else {
      const double ratio = drop_ratio_in(step);
      if (detail::searches(options_.refresh, step, ratio, threshold_)) {
        threshold_ = searched(search_values, held, ratio);
      }
      // Not told by the value of the threshold: a functor with negative values may have a true threshold of -1.
      decision.sends_all = ratio == 0 || (ratio == 1 && !options_.refresh.fixed_threshold());
    }
    decision.threshold = threshold_;
    chosen_.clear();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (decision.sends(l, values[l], model.sizes()[l], cleared_in_[l], rule_of(l, held))) chosen_.send(l);
    }
    return chosen_;
  }

  /// What decide() chose in `step` has been sent.
  void commit(std::uint64_t step) {
    allowance_ -= static_cast<double>(chosen_.sent_elements());
    for (const std::size_t l : chosen_.sent()) cleared_in_[l] = step;
  }

  /// The drop ratio of a step, counted from 1.
  [[nodiscard]] double drop_ratio_in(std::uint64_t step) const {
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    const double progress = static_cast<double>(step) / static_cast<double>(options_.warm_up_steps);
    return 1 - std::pow(1 - options_.drop_ratio, progress);
  }
  /// Whether `step`, counted from 1 and the next to be decided, searches the threshold over the values of decide()'s
  /// search_values.
  [[nodiscard]] bool searches_in(std::uint64_t step) const {
    return !options_.byte_budget && detail::searches(options_.refresh, step, drop_ratio_in(step), threshold_);
  }

  [[nodiscard]] const selection& chosen() const noexcept { return chosen_; }
  [[nodiscard]] double threshold() const noexcept { return threshold_; }

  /// What a later decide() depends on, for saving.
  struct memory {
    double threshold = invalid_threshold;
    double allowance = 0;
    std::vector<std::uint64_t> cleared_in;  // for each layer the step in which it was last sent, 0: never
  };
  [[nodiscard]] memory remember() const { return {threshold_, allowance_, cleared_in_}; }
  /// Throws std::invalid_argument, and changes nothing, unless it is of as many layers.
  void restore(memory saved) {
    if (saved.cleared_in.size() != cleared_in_.size()) {
      detail::raise(std::invalid_argument("the saved ages are of another number of layers"));
    }
    threshold_ = saved.threshold;
    // A threshold that the user gives is the one of this run; a budget does not use it.
    if (!options_.byte_budget) threshold_ = options_.refresh.fixed_threshold().value_or(saved.threshold);
    allowance_ = saved.allowance;
    cleared_in_ = std::move(saved.cleared_in);
  }

 private:
  void check_count(std::size_t count, const char* what) const {
    if (count == cleared_in_.size()) return;
    detail::raise(std::invalid_argument(std::to_string(count) + " " + what + " for " +
                                        std::to_string(cleared_in_.size()) + " layers"));
  }

  // Layers that are always sent come first in a budget: those that leave nothing would keep all others back for ever.
  void check_budget_of_others() const {
    if (!options_.byte_budget) return;
    const layout& model = chosen_.model();
    std::size_t elements = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (is_always_sent_[l] != 0) elements += model.sizes()[l];
    }
    const double share = static_cast<double>(elements) / static_cast<double>(model.elements());
    if (elements == 0 || share < *options_.byte_budget) return;
    detail::raise(std::invalid_argument(
        "always_sent holds " + std::to_string(share) + " of the elements, and byte_budget is " +
        std::to_string(*options_.byte_budget) + ": nothing is left for the other layers"));
  }

  detail::layer_rule rule_of(std::size_t layer, std::span<const char> held) const {
    if (!held.empty() && held[layer] != 0) return detail::layer_rule::held;
    if (!is_always_sent_.empty() && is_always_sent_[layer] != 0) return detail::layer_rule::always;
    return detail::layer_rule::by_value;
  }

  double searched(std::span<const double> values, std::span<const char> held, double ratio) {
    const layout& model = chosen_.model();
    search_.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (model.sizes()[l] == 0) continue;
      search_.add(detail::search_value(values[l], rule_of(l, held)), model.sizes()[l]);
    }
    return search_.beyond(ratio * static_cast<double>(model.elements()));
  }

  // Held layers take nothing from the allowance; those that are always sent take theirs before all others.
  void decide_by_budget(detail::step_decision& decision, std::span<const double> values,
                        std::span<const char> held) {
    const layout& model = chosen_.model();
    const double share = detail::rounded(*options_.byte_budget * static_cast<double>(model.elements()));
    std::size_t largest = 0;
    for (const std::size_t elements : model.sizes()) largest = std::max(largest, elements);
    const double allowance = detail::grown_allowance(allowance_, share, largest);

    std::size_t always_sent_elements = 0;
    search_.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t elements = model.sizes()[l];
      const detail::layer_rule rule = rule_of(l, held);
      if (rule == detail::layer_rule::always) always_sent_elements += elements;
      if (rule == detail::layer_rule::by_value && elements > 0) {
        search_.add(detail::ordered_value(values[l]), elements);
      }
    }
    const auto found = search_.within(detail::allowance_by_value(allowance, always_sent_elements));
    allowance_ = allowance;  // once nothing can fail any more
    threshold_ = found.threshold;
    if (!found.crossing) return;
    // Of the layers that are tied where the allowance ends, the first that fit.
    double left = found.left;
    std::size_t end = 0;
    bool any = false;
    for (; end < model.layers(); ++end) {
      const std::size_t elements = model.sizes()[end];
      if (elements == 0 || rule_of(end, held) != detail::layer_rule::by_value) continue;
      if (detail::ordered_value(values[end]) != *found.crossing) continue;
      left -= static_cast<double>(elements);
      if (left < 0) break;
      any = true;
    }
    if (any) threshold_ = *found.crossing;
    if (threshold_ == *found.crossing)
      decision.equals_end = end;  // also where they are infinite and none fits
  }

  compressor_options options_;
  selection chosen_;
  threshold_search search_;
  double threshold_;
  double allowance_ = 0;  // elements
  std::vector<std::uint64_t> cleared_in_;
  std::vector<char> is_always_sent_;  // empty if none is
};

}  // namespace lamina::inline LAMINA_ABI
