// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/power.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/detail/waiting_layers.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/payload.hpp"
#include "lamina/selection.hpp"
#include "lamina/threshold.hpp"

namespace lamina::inline LAMINA_ABI {

/// The decision of each step: values in, a selection out. Keeps the threshold between searches, the age of each layer
/// and the allowance of the budget. A value that is NaN counts as infinity, so that its layer goes out first. A layer of value
/// 0 goes out only where everything does, by always_sent or by max_age. A threshold that is infinite or 0 serves its own step alone,
/// and the next searches again.
///
/// Which calls make a step is a matter of options.decide:
///
///     at_end:    decide()                              with the values of all layers
///     as_ready:  begin(), decide_layer() of each, end()
///     ahead:     begin(); and plan() for the next step  before the first plan() all values count as infinite
///
/// and then commit(), once what was chosen has been sent.
class layer_selector {
 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range, for a byte_budget that always_sent alone
  /// uses up, and for priority_rule::value_times_waiting with another decision_timing than at_end; options.always_sent are layers of `model`.
  layer_selector(const layout& model, const compressor_options& options)
      : options_(options),
        chosen_(model),
        threshold_(first_threshold(options)),
        cleared_in_(model.layers()),
        is_decided_(options.decide == decision_timing::as_ready ? model.layers() : 0),
        waiting_(is_decided_.size()),
        planned_(options.decide == decision_timing::ahead ? model.layers() : 0, detail::infinite_value) {
    check_drop_ratio(options.drop_ratio);
    if (options.byte_budget &&
        (detail::is_nan(*options.byte_budget) || !(*options.byte_budget > 0 && *options.byte_budget <= 1))) {
      detail::raise(std::invalid_argument("byte budget must lie in (0, 1], got " +
                                          std::to_string(*options.byte_budget)));
    }
    detail::check_payload_type(options.payload);
    if (options.priority > priority_rule::value_times_waiting) {
      detail::raise(std::invalid_argument("priority " + std::to_string(static_cast<int>(options.priority)) +
                                          " is none of priority_rule"));
    }
    if (options.priority == priority_rule::value_times_waiting && options.decide != decision_timing::at_end)
      detail::raise(
          std::invalid_argument("priority_rule::value_times_waiting is for decision_timing::at_end"));
    for (const std::size_t layer : options.always_sent) {
      if (layer >= model.layers()) {
        detail::raise(std::invalid_argument("always_sent names layer " + std::to_string(layer) +
                                            " of a model that has " + std::to_string(model.layers())));
      }
    }
    search_.reserve(model.layers());  // so that a layer that is ready is decided, whatever memory there is
    if (!options.always_sent.empty()) {
      is_always_sent_.resize(model.layers());
      for (const std::size_t layer : options.always_sent) is_always_sent_[layer] = 1;
      check_budget_of_others();
    }
  }

  /// Decides one step.
  ///
  /// \param step           counted from 1
  /// \param values         q_l, compared with the threshold, or its product as options.priority says: L values
  /// \param search_values  what the threshold is searched over, likewise; mostly the same
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
      if (detail::searches(options_.refresh, options_.warm_up_steps, step, ratio, threshold_)) {
        threshold_ = searched(step, search_values, held, ratio);
      }
      decision.sends_all = sends_all_at(ratio);
    }
    decision.threshold = threshold_;
    decision_ = decision;
    chosen_.clear();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const double priority = priority_of(step, l, values[l]);
      if (decision.sends(l, priority, model.sizes()[l], cleared_in_[l], rule_of(l, held))) chosen_.send(l);
    }
    return chosen_;
  }

  /// Begins a step, counted from 1: fixes the threshold and the allowance of one that is decided as_ready, and the whole
  /// selection of one that is decided ahead. Does nothing at_end, or if the step has begun.
  void begin(std::uint64_t step) {
    if (options_.decide == decision_timing::at_end || decision_.step == step) return;
    before_ = {threshold_, allowance_};
    if (options_.decide == decision_timing::ahead) {
      decide(step, planned_, planned_);
      return;
    }
    chosen_.clear();
    decision_ = {.step = step, .threshold = threshold_, .max_age = options_.max_age};
    const std::span<const std::size_t> sizes = chosen_.model().sizes();
    for (std::size_t l = 0; l < sizes.size(); ++l) is_decided_[l] = sizes[l] == 0 ? 1 : 0;
    if (options_.byte_budget) {
      allowance_ = allowance_after(allowance_);
      left_ = give_room(step, allowance_);
    } else {
      decision_.sends_all = sends_all_at(drop_ratio_in(step)) || has_no_threshold_yet();
    }
  }

  /// Takes back the begin() of a step in which no layer got a value: threshold and allowance are those of before.
  void take_back(std::uint64_t step) noexcept {
    if (options_.decide == decision_timing::at_end || decision_.step != step) return;
    threshold_ = before_.threshold;
    allowance_ = before_.allowance;
    decision_ = {};
  }

  /// as_ready: decides one layer of the step that has begun, by its value; does nothing if it is decided.
  void decide_layer(std::size_t layer, double value) {
    if (is_decided_[layer] != 0) return;
    is_decided_[layer] = 1;
    const std::size_t elements = chosen_.model().sizes()[layer];
    const bool has_room = options_.byte_budget && waiting_.has_room(layer);
    const detail::layer_rule rule = has_room ? detail::layer_rule::always : rule_of(layer, {});
    if (!decision_.sends(layer, value, elements, cleared_in_[layer], rule)) return;
    if (options_.byte_budget && !has_room) {
      if (static_cast<double>(elements) > left_) {
        waiting_.add(layer, decision_.step);
        return;
      }
      left_ -= static_cast<double>(elements);
    }
    chosen_.send(layer);
  }

  /// as_ready: decides the layers that are not decided yet, in the order of the model, and finds the threshold of the next step.
  /// Does nothing for other timings. Errors as decide().
  void end(std::span<const double> values, std::span<const double> search_values) {
    if (options_.decide != decision_timing::as_ready) return;
    check_count(values.size(), "values");
    check_count(search_values.size(), "values to search");
    for (std::size_t l = 0; l < values.size(); ++l) decide_layer(l, values[l]);
    if (options_.byte_budget) {
      threshold_ = threshold_within_next_budget(values);
    } else if (searches_at_end_of(decision_.step)) {
      threshold_ = searched(decision_.step + 1, search_values, {}, drop_ratio_in(decision_.step + 1));
    }
  }

  /// ahead: what the step after `step` is decided by, in its begin(); called again in the same step, counts in place of the
  /// last. Throws std::invalid_argument for a number of values other than L.
  void plan(std::uint64_t step, std::span<const double> agreed_values) {
    check_count(agreed_values.size(), "values to plan by");
    planned_.assign(agreed_values.begin(), agreed_values.end());
    planned_in_ = step;
    has_plan_ = true;
  }
  /// Whether the next step may begin: not ahead after a step that was committed without a plan for the next. A step that was not
  /// committed leaves its own plan to the next.
  [[nodiscard]] bool has_plan() const noexcept { return has_plan_; }

  /// What was chosen in `step` has been sent.
  void commit(std::uint64_t step) {
    end_step(step, [](std::size_t) { return true; });
  }
  /// The same, of which something was lost: a layer of which nothing has arrived keeps its age, and waits on if it waited. The
  /// allowance is charged for all that was chosen: it has used the network. Throws std::invalid_argument, and changes nothing,
  /// unless `arrived` is of chosen().
  void commit(std::uint64_t step, const delivery& arrived) {
    detail::check_delivery("commit", arrived, chosen_, payload_type::as_is);
    end_step(step, [&](std::size_t l) { return arrived.lost_chunks(l) < arrived.chunks(l); });
  }

  /// The drop ratio of a step, counted from 1.
  [[nodiscard]] double drop_ratio_in(std::uint64_t step) const {
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    const double progress = static_cast<double>(step) / static_cast<double>(options_.warm_up_steps);
    return 1 - detail::root_power(1 - options_.drop_ratio, progress);
  }
  /// Whether `step`, counted from 1 and the next to be decided, searches the threshold over the values of decide()'s
  /// search_values.
  [[nodiscard]] bool searches_in(std::uint64_t step) const {
    return !options_.byte_budget &&
           detail::searches(options_.refresh, options_.warm_up_steps, step, drop_ratio_in(step), threshold_);
  }
  /// The same of end(), which searches for the next step and its drop ratio.
  [[nodiscard]] bool searches_at_end_of(std::uint64_t step) const {
    return !options_.byte_budget && detail::searches(options_.refresh, options_.warm_up_steps, step,
                                                     drop_ratio_in(step + 1), threshold_);
  }
  /// Whether a layer of `step` is decided.
  [[nodiscard]] bool is_decided(std::uint64_t step, std::size_t layer) const {
    if (step == 0 || decision_.step != step) return false;
    return is_decided_.empty() || is_decided_[layer] != 0;
  }
  [[nodiscard]] decision_timing timing() const noexcept { return options_.decide; }
  [[nodiscard]] const selection& chosen() const noexcept { return chosen_; }
  /// The one found last; as_ready, from end() on that is of the next step. Minus infinity, as_ready and unless it is fixed,
  /// before one was searched.
  [[nodiscard]] double threshold() const noexcept { return threshold_; }

  /// What a later decide() depends on, for saving.
  struct memory {
    double threshold = invalid_threshold;  // of the next step, unless that searches
    double allowance = 0;
    std::vector<std::uint64_t> cleared_in;  // for each layer the step in which it was last sent, 0: never
    std::vector<std::uint64_t>
        waits_since{};              // as_ready: the step since which it waits for room, 0: it does not
    std::vector<double> planned{};  // ahead: the values of plan()
  };
  [[nodiscard]] memory remember() const {
    return {threshold_, allowance_, cleared_in_, waiting_.since(), planned_};
  }
  /// Throws std::invalid_argument, and changes nothing, unless it is of as many layers and was decided at the same time.
  void restore(memory saved) {
    if (saved.cleared_in.size() != cleared_in_.size()) {
      detail::raise(std::invalid_argument("the saved ages are of another number of layers"));
    }
    if (saved.waits_since.size() != is_decided_.size() || saved.planned.size() != planned_.size()) {
      detail::raise(std::invalid_argument("the saved decisions are of another decision_timing"));
    }
    threshold_ = saved.threshold;
    // A threshold that the user gives is the one of this run; a budget does not use it.
    if (!options_.byte_budget) threshold_ = options_.refresh.fixed_threshold().value_or(saved.threshold);
    decision_ = {};
    allowance_ = saved.allowance;
    cleared_in_ = std::move(saved.cleared_in);
    waiting_.restore(std::move(saved.waits_since));
    planned_ = std::move(saved.planned);
    has_plan_ = true;
    planned_in_ = 0;
  }

 private:
  static double first_threshold(const compressor_options& options) {
    if (options.decide == decision_timing::as_ready && options.byte_budget) return -detail::infinite_value;
    return options.refresh.fixed_threshold().value_or(
        options.decide == decision_timing::as_ready ? -detail::infinite_value : invalid_threshold);
  }

  template <class HasArrived>
  void end_step(std::uint64_t step, const HasArrived& has_arrived) {
    if (options_.byte_budget) allowance_ -= static_cast<double>(chosen_.sent_elements());
    for (const std::size_t l : chosen_.sent()) {
      if (!has_arrived(l)) continue;
      cleared_in_[l] = step;
      if (timing() == decision_timing::as_ready) waiting_.remove(l);
    }
    if (timing() == decision_timing::ahead) has_plan_ = planned_in_ == step;
  }

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

  // Not told by the value of the threshold: a functor with negative values may have a true threshold of -1.
  bool sends_all_at(double ratio) const {
    return ratio == 0 || (ratio == 1 && !options_.refresh.fixed_threshold());
  }
  // as_ready: nothing was searched, and the threshold is minus infinity.
  bool has_no_threshold_yet() const {
    return !options_.refresh.fixed_threshold() && threshold_ < 0 && !detail::outlasts_its_step(threshold_);
  }

  // What counts of a value in `step`: by itself, as the threshold that is searched over it must be the same bits.
  double priority_of(std::uint64_t step, std::size_t layer, double value) const {
    if (options_.priority == priority_rule::value) return value;
    return detail::rounded(value * static_cast<double>(step - cleared_in_[layer]));
  }

  double searched(std::uint64_t step, std::span<const double> values, std::span<const char> held,
                  double ratio) {
    const layout& model = chosen_.model();
    search_.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (model.sizes()[l] == 0) continue;
      search_.add(detail::search_value(priority_of(step, l, values[l]), rule_of(l, held)), model.sizes()[l]);
    }
    return search_.beyond(ratio * static_cast<double>(model.elements()));
  }

  // The allowance of the step after one that has left `allowance`.
  double allowance_after(double allowance) const {
    const layout& model = chosen_.model();
    const double share = detail::rounded(*options_.byte_budget * static_cast<double>(model.elements()));
    std::size_t largest = 0;
    for (const std::size_t elements : model.sizes()) largest = (std::max)(largest, elements);
    return detail::grown_allowance(allowance, share, largest);
  }

  // Held layers take nothing from the allowance; those that are always sent take theirs before all others.
  void decide_by_budget(detail::step_decision& decision, std::span<const double> values,
                        std::span<const char> held) {
    const layout& model = chosen_.model();
    const double allowance = allowance_after(allowance_);

    std::size_t always_sent_elements = 0;
    search_.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t elements = model.sizes()[l];
      const detail::layer_rule rule = rule_of(l, held);
      if (rule == detail::layer_rule::always) always_sent_elements += elements;
      if (rule == detail::layer_rule::by_value && elements > 0) {
        search_.add(detail::ordered_value(priority_of(decision.step, l, values[l])), elements);
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
      if (detail::ordered_value(priority_of(decision.step, end, values[end])) != *found.crossing) continue;
      left -= static_cast<double>(elements);
      if (left < 0) break;
      any = true;
    }
    if (any) threshold_ = *found.crossing;
    if (threshold_ == *found.crossing)
      decision.equals_end = end;  // also where they are infinite and none fits
  }

  // as_ready: what the allowance of `step` leaves for layers that their values decide on. In end() the layers that are chosen
  // have been decided in the step before; in begin() none is.
  double give_room(std::uint64_t step, double allowance) {
    return waiting_.give_room(
        allowance, chosen_.model().sizes(),
        [&](std::size_t l) {
          const std::uint64_t cleared_in = chosen_.is_sent(l) ? step - 1 : cleared_in_[l];
          return rule_of(l, {}) == detail::layer_rule::always ||
                 detail::is_overdue(step, cleared_in, options_.max_age);
        },
        [&](std::size_t l) { return chosen_.is_sent(l); });
  }

  // as_ready: the layers with the largest values pass, as far as the next allowance reaches, and those of the value with which it
  // ends, of which the ones that do not fit will wait: or layers of equal value, none of which passed, would stay for ever.
  double threshold_within_next_budget(std::span<const double> values) {
    const auto sent = static_cast<double>(chosen_.sent_elements());
    const double left = give_room(decision_.step + 1, allowance_after(allowance_ - sent));
    if (!(left > 0)) return detail::infinite_value;  // all of it is saved for those that wait
    const std::span<const std::size_t> sizes = chosen_.model().sizes();
    search_.begin();
    for (std::size_t l = 0; l < values.size(); ++l) {
      if (sizes[l] > 0 && !waiting_.has_room(l)) search_.add(detail::ordered_value(values[l]), sizes[l]);
    }
    return search_.within(left).crossing.value_or(-detail::infinite_value);
  }

  compressor_options options_;
  selection chosen_;
  threshold_search search_;
  double threshold_;                // the one last found
  detail::step_decision decision_;  // of the step that was decided last, or has begun
  double allowance_ = 0;            // elements
  struct {
    double threshold, allowance;
  } before_{};  // the last begin()
  std::vector<std::uint64_t> cleared_in_;
  std::vector<char> is_always_sent_;  // empty if none is
  // as_ready
  std::vector<char> is_decided_;
  detail::waiting_layers waiting_;
  double left_ = 0;  // of the allowance, for layers that do not wait
  // ahead
  std::vector<double> planned_;
  std::uint64_t planned_in_ = 0;  // the step in which plan() was called
  bool has_plan_ = true;
};

namespace detail {

/// What the selector of a model's parts is told: of the layers that are always sent, the parts are. Throws
/// std::invalid_argument for a layer that the model does not have.
inline compressor_options options_by_part(const compressor_options& options, const partition& cut) {
  compressor_options by_part = options;
  by_part.always_sent.clear();
  for (const std::size_t layer : options.always_sent) {
    if (layer >= cut.model().layers()) {
      raise(std::invalid_argument("always_sent names layer " + std::to_string(layer) +
                                  " of a model that has " + std::to_string(cut.model().layers())));
    }
    for (std::size_t part = cut.first(layer); part < cut.first(layer + 1); ++part) {
      by_part.always_sent.push_back(part);
    }
  }
  return by_part;
}

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI
