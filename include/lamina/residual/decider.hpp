// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/failure.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selection.hpp"
#include "lamina/selector.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// When the parts of a step are decided on, and by whose values: a layer_selector, and the calls that it gets from the gradients
/// of a gradient_intake. `Intake` is that class, and `Fail` where errors go.
class step_decider {
 public:
  /// Errors as layer_selector; options.always_sent are parts.
  step_decider(const layout& parts, const compressor_options& options)
      : selector_(parts, options),
        predicted_(options.decide == decision_timing::ahead ? parts.layers() : 0) {}

  layer_selector& selector() noexcept { return selector_; }
  const layer_selector& selector() const noexcept { return selector_; }
  const selection& chosen() const noexcept { return selector_.chosen(); }

  void expect_more_pieces(bool expected) noexcept { expects_more_pieces_ = expected; }

  /// Layers [first, last) have got a gradient, or were skipped: decides them, or foresees their values, where that does not wait
  /// for the end of the step.
  template <class Intake>
  void take_up(const Intake& intake, std::size_t first, std::size_t last) {
    if (selector_.timing() == decision_timing::at_end) return;
    selector_.begin(intake.step());
    for (std::size_t part = intake.cut().first(first); part < intake.cut().first(last); ++part) {
      if (selector_.timing() == decision_timing::ahead) {
        predict(intake, part, chosen().is_sent(part));
      } else if (!expects_more_pieces_) {
        selector_.decide_layer(part, intake.values()[part]);
      }
    }
  }

  /// Of a part that was chosen nothing has arrived: what is predicted of it has its residual.
  template <class Intake>
  void take_back(const Intake& intake, std::size_t part) noexcept {
    if (!predicted_.empty()) predict(intake, part, false);
  }

  /// The step was abandoned: nothing of it was sent.
  template <class Intake>
  void abandon(const Intake& intake) noexcept {
    for (std::size_t part = 0; part < predicted_.size(); ++part) take_back(intake, part);
  }

  /// Throws std::logic_error, naming the call, unless steps are decided ahead and all parts have their gradient.
  template <class Intake>
  void require_prediction(const char* call, const Intake& intake) const {
    if (selector_.timing() != decision_timing::ahead) {
      raise(std::logic_error(std::string(call) +
                             ": options.decide is not ahead: nothing is foreseen of the next step"));
    }
    (void)intake.require_all(throws());
  }
  std::span<const double> predicted_values() const noexcept { return predicted_; }

  /// The end of a step, by this worker's own values.
  template <class Intake, class Fail>
  const selection& decide_own(Intake& intake, const Fail& fail) {
    return decide(intake, choice::own, intake.values(), intake.values(), {}, fail);
  }
  /// The same by agreed values, and without the parts that are held.
  template <class Intake, class Fail>
  const selection& decide_agreed(Intake& intake, std::span<const double> values, std::span<const char> held,
                                 const Fail& fail) {
    return decide(intake, held.empty() ? choice::agreed : choice::agreed_but_for_held, values, values, held,
                  fail);
  }

 private:
  enum class choice { own, agreed, agreed_but_for_held };

  template <class Intake>
  void predict(const Intake& intake, std::size_t part, bool is_sent) noexcept {
    predicted_[part] = predicted_value(is_sent, intake.values()[part], intake.fresh_values()[part]);
  }

  template <class Intake, class Fail>
  const selection& decide(Intake& intake, choice by, std::span<const double> values,
                          std::span<const double> search_values, std::span<const char> held,
                          const Fail& fail) {
    if (!intake.require_open_step("select", fail)) return chosen();
    const std::size_t parts = intake.parts().layers();
    if (values.size() != parts || (!held.empty() && held.size() != parts)) {
      fail(errc::wrong_count, [&] {
        return std::invalid_argument("select: there are " + std::to_string(parts) + " parts, got " +
                                     std::to_string(values.size()) + " values and " +
                                     std::to_string(held.size()) + " flags");
      });
      return chosen();
    }
    if (!check_way(intake, by, held, fail) || intake.phase() != step_phase::accumulating ||
        !intake.require_all(fail)) {
      return chosen();
    }
    held_.assign(held.begin(), held.end());
    if (selector_.timing() == decision_timing::at_end) {
      selector_.decide(intake.step(), values, search_values, held);
    } else {
      selector_.end(values, search_values);
    }
    chosen_by_ = by;
    intake.set_phase(step_phase::selected);
    return chosen();
  }

  // Whether the step is decided in this way, or may be.
  template <class Intake, class Fail>
  bool check_way(const Intake& intake, choice by, std::span<const char> held, const Fail& fail) const {
    const bool is_selected = intake.phase() != step_phase::accumulating;
    const char* way = nullptr;
    if (by != choice::own && selector_.timing() != decision_timing::at_end) {
      way = selector_.timing() == decision_timing::ahead
                ? " is decided ahead: plan_next() takes agreed values, of the next step"
                : " is decided as_ready, by this worker's own values: agreed ones decide at_end, or ahead";
    } else if (is_selected && by != chosen_by_) {
      way = chosen_by_ == choice::own ? " was selected by this worker's own values already; select in one way"
            : chosen_by_ == choice::agreed
                ? " was selected by agreed values, with nothing held already; select in one way"
                : " was selected by agreed values, with parts held already; select in one way";
    } else if (is_selected && by == choice::agreed_but_for_held && !held_as_before(held)) {
      way = " was selected with other parts held already";
    }
    if (way == nullptr) return true;
    fail(errc::out_of_order,
         [&] { return std::logic_error("select: step " + std::to_string(intake.step()) + way); });
    return false;
  }

  bool held_as_before(std::span<const char> held) const {
    return std::equal(held.begin(), held.end(), held_.begin(), held_.end(),
                      [](char a, char b) { return (a != 0) == (b != 0); });
  }

  layer_selector selector_;
  choice chosen_by_ = choice::own;
  std::vector<char> held_;  // of the last selection; none if there were no flags
  bool expects_more_pieces_ = false;
  std::vector<double> predicted_;  // ahead
};

}  // namespace lamina::inline LAMINA_ABI::detail
