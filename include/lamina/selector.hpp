// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/finite.hpp"
#include "lamina/detail/kernels.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selection.hpp"
#include "lamina/threshold.hpp"

namespace lamina {

/// The decision of each step: values in, a selection out. Keeps the threshold between searches, the age of each layer
/// and the allowance of the budget.
class layer_selector {
 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range.
  layer_selector(const layout& model, const compressor_options& options)
      : options_(options),
        chosen_(model),
        threshold_(options.refresh.fixed_threshold().value_or(invalid_threshold)),
        cleared_in_(model.layers()) {
    check_drop_ratio(options.drop_ratio);
    if (options.byte_budget &&
        (detail::is_nan(*options.byte_budget) || !(*options.byte_budget > 0 && *options.byte_budget <= 1))) {
      throw std::invalid_argument("byte budget must lie in (0, 1], got " +
                                  std::to_string(*options.byte_budget));
    }
  }

  /// Decides one step.
  ///
  /// \param step           counted from 1
  /// \param values         q_l, compared with the threshold: L values
  /// \param search_values  what the threshold is searched over; mostly the same
  /// \throws std::invalid_argument  a number of values other than L, or NaN
  const selection& decide(std::uint64_t step, std::span<const double> values,
                          std::span<const double> search_values) {
    const layout& model = chosen_.model();
    if (options_.byte_budget) {
      std::array<double, 1> product = {*options_.byte_budget * static_cast<double>(model.elements())};
      detail::round_by_itself(product);  // or machines that fuse it with the sum below would decide otherwise
      const double share = product[0];
      const double largest = model.layers() == 0 ? 0.0 : static_cast<double>(std::ranges::max(model.sizes()));
      const double allowance = std::min(allowance_ + share, share + largest);
      threshold_ = search_.within_budget(values, model.sizes(), allowance);
      chosen_.apply_threshold(values, threshold_);
      // Finite elements may have an infinite value, which is not below the threshold at which nothing fits.
      if (static_cast<double>(chosen_.sent_elements()) > allowance) chosen_.clear();
      allowance_ = allowance;
    } else {
      const double ratio = drop_ratio_in(step);
      if (ratio > 0 && options_.refresh.due(step)) threshold_ = search_(search_values, model.sizes(), ratio);
      chosen_.apply_threshold(values, threshold_);
      // Not told by the value of the threshold: a functor with negative values may have a true threshold of -1.
      if (ratio == 0 || (ratio == 1 && !options_.refresh.fixed_threshold())) chosen_.send_all();
    }
    if (options_.max_age > 0) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (step - cleared_in_[l] >= options_.max_age) chosen_.send(l);
      }
    }
    return chosen_;
  }

  /// What decide() chose in `step` has been sent.
  void commit(std::uint64_t step) {
    allowance_ -= static_cast<double>(chosen_.sent_elements());
    for (std::size_t l = 0; l < cleared_in_.size(); ++l) {
      if (chosen_.is_sent(l)) cleared_in_[l] = step;
    }
  }

  /// The drop ratio of a step, counted from 1.
  double drop_ratio_in(std::uint64_t step) const {
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    const double progress = static_cast<double>(step) / static_cast<double>(options_.warm_up_steps);
    return 1 - std::pow(1 - options_.drop_ratio, progress);
  }

  const selection& chosen() const noexcept { return chosen_; }
  double threshold() const noexcept { return threshold_; }

  /// What a later decide() depends on, for saving.
  struct memory {
    double threshold = invalid_threshold;
    double allowance = 0;
    std::vector<std::uint64_t> cleared_in;  // for each layer the step in which it was last sent, 0: never
  };
  memory remember() const { return {threshold_, allowance_, cleared_in_}; }
  /// Throws std::invalid_argument, and changes nothing, unless it is of as many layers.
  void restore(memory saved) {
    if (saved.cleared_in.size() != cleared_in_.size()) {
      throw std::invalid_argument("the saved ages are of another number of layers");
    }
    threshold_ = saved.threshold;
    allowance_ = saved.allowance;
    cleared_in_ = std::move(saved.cleared_in);
  }

 private:
  compressor_options options_;
  selection chosen_;
  threshold_search search_;
  double threshold_;
  double allowance_ = 0;  // elements
  std::vector<std::uint64_t> cleared_in_;
};

}  // namespace lamina
