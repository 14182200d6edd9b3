// SPDX-License-Identifier: MIT
// A worker whose functor is known at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/options.hpp>
#include <lamina/representative.hpp>
#include <lamina/worker.hpp>

#include "alone.hpp"
#include "any_tensor.hpp"

namespace lamina_python {

/// The representative functors of representative.hpp, as a number.
enum class value_functor : std::uint8_t { mean_abs, l1_norm, l2_norm, root_mean_square, max_abs };

/// One of the functors, chosen at run time: the same loops over elements as those of its own type, and one compressor for all.
class any_functor {
 public:
  using is_chosen_at_run_time = void;
  using common = lamina::detail::sum_of_magnitudes;

  explicit any_functor(value_functor chosen) : chosen_(chosen) {}

  bool is_common() const { return chosen_ == value_functor::mean_abs || chosen_ == value_functor::l1_norm; }
  /// Functors that differ in finish() alone have their loops in common.
  template <class Visitor>
  auto visit(const Visitor& visitor) const {
    switch (chosen_) {
      case value_functor::l2_norm:
      case value_functor::root_mean_square:
        return visitor(lamina::detail::sum_of_squares());
      case value_functor::max_abs:
        return visitor(lamina::max_abs());
      default:
        return visitor(common());
    }
  }

  double map(double x) const {
    return visit([x](const auto& functor) { return functor.map(x); });
  }
  double combine(double a, double b) const {
    return visit([a, b](const auto& functor) { return functor.combine(a, b); });
  }
  double finish(double total, std::size_t elements) const {
    switch (chosen_) {
      case value_functor::l1_norm:
        return lamina::l1_norm::finish(total, elements);
      case value_functor::l2_norm:
        return lamina::l2_norm::finish(total, elements);
      case value_functor::root_mean_square:
        return lamina::root_mean_square::finish(total, elements);
      case value_functor::max_abs:
        return lamina::max_abs::finish(total, elements);
      default:  // a mean
        return lamina::mean_abs::finish(total, elements);
    }
  }

 private:
  value_functor chosen_;
};

struct compressor : lamina::gradient_compressor<float, any_functor> {
  compressor(const lamina::layout& model, const lamina::compressor_options& options, value_functor functor)
      : gradient_compressor(model, options, any_functor(functor)), decide(options.decide) {}

  lamina::decision_timing decide;
  one_at_a_time calls;
};

}  // namespace lamina_python
