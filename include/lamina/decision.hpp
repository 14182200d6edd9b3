// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/options.hpp"
#include "lamina/selection.hpp"
#include "lamina/threshold.hpp"

/// Which fragments a step sends: the threshold, the ages and the budget of a worker. Read threshold.hpp before, worker.hpp after.
namespace lamina::inline LAMINA_ABI {

/// What decides whether a layer goes out: one text, which host and device both run.
namespace detail {

/// What the caller says of a layer, whatever its value.
enum class layer_rule : std::uint8_t {
  by_value,
  always,  ///< sent in every step: worker_options::always_sent
  held,    ///< not sent in this step: select(agreed, held)
};

/// The same in the search for R: a layer that is held is the first to be dropped, one that is always sent the last.
LAMINA_HOST_DEVICE constexpr double search_value(double value, layer_rule rule) {
  if (rule == layer_rule::held) return -infinite_value;
  if (rule == layer_rule::always) return infinite_value;
  return ordered_value(value);
}

/// Whether a threshold that was searched may serve a later step, which does not search. One of infinity may not: layers that are held, or
/// always sent, were more than the search could part, and it would drop, or send, everything from then on. One of 0 may not: more
/// than R of the elements were 0, as gradients of a network that begins with zeros are, and once they are not it would send everything.
LAMINA_HOST_DEVICE constexpr bool outlasts_its_step(double threshold) {
  return magnitude_bits(threshold) != 0 && is_finite(threshold);
}

/// Elements that a budget allows in a step: what remained and this step's share, at most one step's share and the largest layer.
LAMINA_HOST_DEVICE constexpr double grown_allowance(double allowance, double share,
                                                    std::size_t largest_layer) {
  const double most = share + static_cast<double>(largest_layer);
  return allowance + share < most ? allowance + share : most;
}

/// What is left of an allowance for layers that their values decide on: those that are always sent come first, and layers that max_age
/// forced out may have left less than nothing.
LAMINA_HOST_DEVICE constexpr double allowance_by_value(double allowance, std::size_t always_sent_elements) {
  const double left = allowance - static_cast<double>(always_sent_elements);
  return left > 0 ? left : 0;
}

/// The decision of one step, once its threshold is known.
struct step_decision {
  std::uint64_t step = 0;                                 // counted from 1
  double threshold = 0;                                   // λ
  std::uint64_t max_age = 0;                              // 0: none
  bool sends_all = false;                                 // R = 0, or R = 1 without a threshold of the user's
  std::size_t equals_end = static_cast<std::size_t>(-1);  // layers of value λ go out below this index

  /// Whether a layer goes out, `cleared_in` being the step in which it was sent last. A value of 0 sends nothing, whatever the threshold:
  /// it would be 0 where such layers hold more than R, and everything would go out.
  LAMINA_HOST_DEVICE constexpr bool sends(std::size_t layer, double value, std::size_t elements,
                                          std::uint64_t cleared_in, layer_rule rule) const {
    if (elements == 0 || rule == layer_rule::held) return false;
    if (sends_all || rule == layer_rule::always) return true;
    if (max_age > 0 && step - cleared_in >= max_age) return true;
    // By bits: -ffast-math takes NaN for 0.
    if (magnitude_bits(value) == 0) return false;
    const double ordered = ordered_value(value);
    return ordered > threshold || (ordered == threshold && layer < equals_end);
  }
};

}  // namespace detail

/// Representative values in, a selection out. Keeps the threshold between searches, the step in which each fragment was last sent, and the
/// allowance of a send_budget. A value that is NaN counts as infinity; a fragment of value 0 is sent only by always_sent, by
/// at_least_every, or where everything is sent. Throws std::invalid_argument for another number of values or flags than there are
/// fragments.
class selector {
 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range.
  selector(const tiling& cut, const worker_options& options)
      : options_(options),
        sent_(cut.fragments()),
        threshold_(options.threshold.value_or(invalid_threshold)),
        sent_in_(cut.fragments().layers()) {
    check_drop_ratio(options.drop_ratio);
    if (options.search_every == 0) detail::refuse("search_every must be at least 1 step");
    if (options.threshold && detail::is_nan(*options.threshold)) detail::refuse("threshold must not be NaN");
    if (options.send_budget &&
        (detail::is_nan(*options.send_budget) || !(*options.send_budget > 0 && *options.send_budget <= 1)))
      detail::refuse("send_budget must lie in (0, 1], got ", *options.send_budget);
    search_.reserve(fragments().layers());
    for (const std::size_t layer : options.always_sent) {
      if (layer >= cut.model().layers())
        detail::refuse("always_sent names layer ", layer, " of a model that has ", cut.model().layers());
      is_always_sent_.resize(fragments().layers());
      for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) is_always_sent_[f] = 1;
    }
    if (!options.send_budget || is_always_sent_.empty()) return;
    // Fragments that are always sent come first in a budget: those that leave nothing would drop all others for ever.
    std::size_t elements = 0;
    for (std::size_t f = 0; f < is_always_sent_.size(); ++f)
      elements += is_always_sent_[f] != 0 ? fragments().sizes()[f] : 0;
    const double share = static_cast<double>(elements) / static_cast<double>(fragments().elements());
    if (elements != 0 && share >= *options.send_budget) {
      detail::refuse("always_sent holds ", share, " of the elements, and send_budget is ",
                     *options.send_budget, ": nothing is left for other layers");
    }
  }

  /// Decides a step; called again for the same step, decides it anew from what was known before it.
  ///
  /// \param step    counted from 1
  /// \param values  the representative value of each fragment; with options.by_score it is multiplied by the fragment's age
  /// \param held    a flag for each fragment, or none: those of which it is not 0 are dropped, whatever the options say. They count as the
  ///                first to be dropped within R, take nothing from a budget, and their values are not looked at
  ///
  /// Cost: O(fragments) on average; allocates nothing.
  const selection& decide(std::uint64_t step, std::span<const double> values,
                          std::span<const char> held = {}) {
    check_count("select", values.size(), "values");
    if (!held.empty()) check_count("select", held.size(), "flags");
    begin(step);
    detail::step_decision decision{.step = step, .max_age = options_.at_least_every};
    if (options_.send_budget) {
      decide_by_budget(decision, values, held);
    } else {
      const double ratio = drop_ratio_in(step);
      if (searches_in(step, ratio)) threshold_ = searched(step, values, held, ratio);
      // Not told by the value of the threshold: a functor with negative values may have a true threshold of -1.
      decision.sends_all = ratio == 0 || (ratio == 1 && !options_.threshold);
    }
    decision.threshold = threshold_;
    sent_.clear();
    for (std::size_t f = 0; f < values.size(); ++f) {
      if (decision.sends(f, score(step, f, values[f]), fragments().sizes()[f], sent_in_[f], rule_of(f, held)))
        sent_.send(f);
    }
    return sent_;
  }

  /// Takes a decision that was made elsewhere, or before the step. Throws std::invalid_argument for one of another layout.
  const selection& take(std::uint64_t step, const selection& sent) {
    if (sent.model().fingerprint() != fragments().fingerprint())
      detail::refuse("begin: the selection is of another layout than the worker's");
    if (before_.step != step) {
      begin(step);
      if (options_.send_budget) allowance_ = grown_allowance();
    }
    if (&sent != &sent_) sent_ = sent;
    return sent_;
  }

  /// Before commit(): writes the values to expect in the next step, to select by before its first gradient: of what the last decision has
  /// left in the residual, and of a gradient like the mean of those since a fragment was last sent.
  void forecast(std::uint64_t step, std::span<const double> values, std::span<double> expected) const {
    check_count("forecast", values.size(), "values");
    check_count("forecast", expected.size(), "values to write");
    for (std::size_t f = 0; f < values.size(); ++f) {
      const double of_a_gradient = values[f] / static_cast<double>(step - sent_in_[f]);
      expected[f] = (sent_.is_sent(f) ? 0.0 : values[f]) + of_a_gradient;
    }
  }

  /// What the last decision selects was sent in `step`: a fragment of which nothing has arrived keeps its age. The budget is charged for
  /// all that was selected, since it has used the network.
  void commit(std::uint64_t step, const delivery* arrived = nullptr) {
    if (options_.send_budget) allowance_ -= static_cast<double>(sent_.sent_elements());
    for (const std::size_t f : sent_.sent())
      if (arrived == nullptr || arrived->lost_chunks(f) < arrived->chunks(f)) sent_in_[f] = step;
  }

  /// What was decided of `step`, or taken, is not done: all is as it was before it.
  void undo(std::uint64_t step) noexcept {
    if (before_.step != step) return;
    threshold_ = before_.threshold;
    allowance_ = before_.allowance;
    before_ = {};
  }

  /// R of a step, counted from 1: see worker_options::warm_up_steps.
  [[nodiscard]] double drop_ratio_in(std::uint64_t step) const {
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    const double progress = static_cast<double>(step) / static_cast<double>(options_.warm_up_steps);
    return 1 - detail::root_power(1 - options_.drop_ratio, progress);
  }
  /// λ, as the last decision used it.
  [[nodiscard]] double threshold() const noexcept { return threshold_; }
  [[nodiscard]] const selection& sent() const noexcept { return sent_; }

  /// What later steps depend on, for a checkpoint.
  struct memory {
    double threshold = invalid_threshold;
    double allowance = 0;                ///< elements
    std::vector<std::uint64_t> sent_in;  ///< of each fragment the step in which it was last sent; 0: never
  };
  /// As it was after `step`, whatever was decided of the next.
  [[nodiscard]] memory remember(std::uint64_t step) const {
    const bool is_ahead = before_.step > step;
    return {is_ahead ? before_.threshold : threshold_, is_ahead ? before_.allowance : allowance_, sent_in_};
  }
  /// Throws for ages of another number of fragments. A threshold that the options fix is that of the options.
  void restore(memory saved) {
    check_count("load", saved.sent_in.size(), "ages");
    threshold_ = options_.send_budget ? saved.threshold : options_.threshold.value_or(saved.threshold);
    allowance_ = saved.allowance;
    sent_in_ = std::move(saved.sent_in);
    before_ = {};
  }

 private:
  const layout& fragments() const noexcept { return sent_.model(); }

  void check_count(const char* call, std::size_t count, const char* what) const {
    if (count == sent_in_.size()) return;
    detail::refuse(call, ": ", count, " ", what, " for ", sent_in_.size(), " fragments");
  }

  void begin(std::uint64_t step) {
    undo(step);
    before_ = {step, threshold_, allowance_};
  }

  // The ratio of a warm-up changes from step to step, and with it what a threshold is for. There is none yet where the step that was to
  // search was let go undecided.
  bool searches_in(std::uint64_t step, double ratio) const {
    if (!(ratio > 0) || options_.threshold) return false;
    return (step - 1) % options_.search_every == 0 || step <= options_.warm_up_steps ||
           threshold_ == invalid_threshold || !detail::outlasts_its_step(threshold_);
  }

  detail::layer_rule rule_of(std::size_t fragment, std::span<const char> held) const {
    if (!held.empty() && held[fragment] != 0) return detail::layer_rule::held;
    if (!is_always_sent_.empty() && is_always_sent_[fragment] != 0) return detail::layer_rule::always;
    return detail::layer_rule::by_value;
  }

  // Rounded by itself: the threshold that is searched over it must be bitwise the same.
  double score(std::uint64_t step, std::size_t fragment, double value) const {
    if (!options_.by_score) return value;
    return detail::rounded(value * static_cast<double>(step - sent_in_[fragment]));
  }

  double searched(std::uint64_t step, std::span<const double> values, std::span<const char> held,
                  double ratio) {
    search_.begin();
    for (std::size_t f = 0; f < values.size(); ++f) {
      if (fragments().sizes()[f] == 0) continue;
      search_.add(detail::search_value(score(step, f, values[f]), rule_of(f, held)), fragments().sizes()[f]);
    }
    return search_.beyond(ratio * static_cast<double>(fragments().elements()));
  }

  double grown_allowance() const {
    const double share = detail::rounded(*options_.send_budget * static_cast<double>(fragments().elements()));
    std::size_t largest = 0;
    for (const std::size_t elements : fragments().sizes()) largest = (std::max)(largest, elements);
    return detail::grown_allowance(allowance_, share, largest);
  }

  void decide_by_budget(detail::step_decision& decision, std::span<const double> values,
                        std::span<const char> held) {
    const std::span<const std::size_t> sizes = fragments().sizes();
    const double allowance = grown_allowance();
    std::size_t always_sent_elements = 0;
    search_.begin();
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      const detail::layer_rule rule = rule_of(f, held);
      if (rule == detail::layer_rule::always) always_sent_elements += sizes[f];
      if (rule == detail::layer_rule::by_value && sizes[f] > 0)
        search_.add(detail::ordered_value(score(decision.step, f, values[f])), sizes[f]);
    }
    const auto found = search_.within(detail::allowance_by_value(allowance, always_sent_elements));
    allowance_ = allowance;
    threshold_ = found.threshold;
    if (!found.crossing) return;
    // Of the fragments that are tied where the allowance runs out, the first that fit.
    double left = found.left;
    std::size_t end = 0;
    bool any = false;
    for (; end < sizes.size(); ++end) {
      if (sizes[end] == 0 || rule_of(end, held) != detail::layer_rule::by_value) continue;
      if (detail::ordered_value(score(decision.step, end, values[end])) != *found.crossing) continue;
      left -= static_cast<double>(sizes[end]);
      if (left < 0) break;
      any = true;
    }
    if (any) threshold_ = *found.crossing;
    if (threshold_ == *found.crossing)
      decision.equals_end = end;  // also where they are infinite and none fits
  }

  worker_options options_;
  selection sent_;
  threshold_search search_;
  double threshold_;
  double allowance_ = 0;  // elements
  struct {
    std::uint64_t step = 0;
    double threshold = 0;
    double allowance = 0;
  } before_;  // the step that was decided last
  std::vector<std::uint64_t> sent_in_;
  std::vector<char> is_always_sent_;  // empty if none is
};

}  // namespace lamina::inline LAMINA_ABI
