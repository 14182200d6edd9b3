// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/failure.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/residual/gradient.hpp"
#include "lamina/residual/inspect.hpp"
#include "lamina/selector.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// The gradients of a step on their way into the residual: how far the step has come, which parts have a gradient in it, and
/// the values that they lead to.
template <element T, representative Representative>
class gradient_intake {
 public:
  gradient_intake(const layout& model, const compressor_options& options, Representative functor)
      : functor_(std::move(functor)),
        partition_(model, options.part_elements),
        residual_(partition_.parts(),
                  {.check = options.check, .momentum = options.momentum, .memory = options.memory}),
        values_(parts().layers()),
        fresh_values_(options.decide == decision_timing::ahead ? parts().layers() : 0),
        is_stale_(parts().layers()),
        marks_(parts().layers()) {}

  const layout& model() const noexcept { return partition_.model(); }
  const layout& parts() const noexcept { return partition_.parts(); }
  const partition& cut() const noexcept { return partition_; }
  residual_accumulator<T>& residual() noexcept { return residual_; }
  const residual_accumulator<T>& residual() const noexcept { return residual_; }

  std::uint64_t step() const noexcept { return step_; }
  step_phase phase() const noexcept { return phase_; }
  void set_phase(step_phase phase) noexcept { phase_ = phase; }
  /// Between steps, after `step`, with a residual that was restored.
  void resume_after(std::uint64_t step) noexcept {
    step_ = step;
    phase_ = step_phase::committed;
    std::fill(is_stale_.begin(), is_stale_.end(), char{1});
    std::fill(marks_.begin(), marks_.end(), mark::none);
  }

  std::span<const double> values() const noexcept { return values_; }
  /// Of the gradients of this step alone; empty unless the threshold is searched over them, or the next step predicted from
  /// them.
  std::span<const double> fresh_values() const noexcept { return fresh_values_; }
  /// A part was sent: its value is no longer that of its residual.
  void set_sent(std::size_t part) noexcept { is_stale_[part] = 1; }

  /// Adds the gradient of one layer; gives the value of its last part. `selector` tells whether the step may begin, whether
  /// the layer may have more, and whether the value of the gradient alone is wanted.
  template <class Tensor, class Execution, class Fail>
  double add_one(std::size_t layer, const Tensor& gradient, double scale, const Execution& execution,
                 const layer_selector& selector, const Fail& fail) {
    if (!check_layer(layer, fail)) return 0;
    if (!has_value(gradient)) {
      fail(errc::no_gradient, [&] {
        return std::invalid_argument("layer '" + model()[layer].name +
                                     "': there is no tensor to accumulate; skip() the layer");
      });
      return 0;
    }
    add(
        layer, layer + 1,
        [&](std::size_t, const auto& visitor) { visit_gradient<T>(gradient, visitor, fail); }, execution,
        {scale, false}, selector, fail);
    return fail.has_failed() ? 0 : values_[partition_.first(layer + 1) - 1];
  }

  /// The same of all layers, of which some may have none.
  template <class Tensors, class Execution, class Fail>
  void add_all(const Tensors& gradients, double scale, const Execution& execution,
               const layer_selector& selector, const Fail& fail) {
    if (!check_count(std::size(gradients), "gradients", fail)) return;
    add(
        0, model().layers(),
        [&](std::size_t layer, const auto& visitor) {
          const auto& tensor = tensor_at(gradients, layer);
          if (has_value(tensor)) visit_gradient<T>(tensor, visitor, fail);
        },
        execution, {scale, true}, selector, fail);
  }

  /// Writes what the parts of a layer that are sent would hold, once this gradient is added, one behind the other; returns the
  /// elements written. `sent` tells of a part whether it goes out.
  template <class Tensor, class Sent>
  std::size_t foresee(std::size_t layer, const Tensor& gradient, double scale, std::span<T> to,
                      const Sent& sent) {
    (void)residual_.check_scale(scale, throws());
    std::size_t written = 0;
    visit_gradient<T>(gradient, [&](auto from) {
      check_gradient(layer, from.size(), throws());
      std::size_t elements = 0;
      for (std::size_t part = partition_.first(layer); part < partition_.first(layer + 1); ++part) {
        if (marks_[part] == mark::gradient) {
          raise(std::logic_error("pack_ahead: layer '" + model()[layer].name + "' has a gradient in step " +
                                 std::to_string(step_) + " already; call pack_ahead() before accumulate()"));
        }
        if (sent(part)) elements += parts().sizes()[part];
      }
      if (to.size() != elements) {
        raise(std::invalid_argument("pack_ahead: there is room for " + std::to_string(to.size()) +
                                    " elements, " + std::to_string(elements) + " of layer '" +
                                    model()[layer].name + "' are sent"));
      }
      for (std::size_t part = partition_.first(layer); part < partition_.first(layer + 1); ++part) {
        if (!sent(part)) continue;
        const std::size_t size = parts().sizes()[part];
        residual_.foresee(part, from.subspan(partition_.begin(part), size), static_cast<T>(scale),
                          to.data() + written);
        written += size;
      }
    });
    return written;
  }

  /// What the execution of the last call threw, all being added.
  void rethrow() {
#if LAMINA_HAS_EXCEPTIONS
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
#endif
  }

  template <class Fail>
  void skip(std::size_t layer, const layer_selector& selector, const Fail& fail) {
    if (!check_layer(layer, fail) || !may_begin(selector, fail)) return;
    if (begins_step(phase_)) begin();
    for (std::size_t part = partition_.first(layer); part < partition_.first(layer + 1); ++part)
      skip_part(part);
  }

  /// Begins the next step.
  void begin() {
    residual_.begin_step();
    count_step();
  }

  /// Whether a step has begun of which no layer has a gradient or was skipped.
  bool has_nothing() const noexcept {
    return phase_ == step_phase::accumulating &&
           std::all_of(marks_.begin(), marks_.end(), [](mark each) { return each == mark::none; });
  }
  /// Such a step has not begun.
  void take_back() noexcept {
    --step_;
    phase_ = step_phase::committed;
  }

  /// Whether the next step may begin, if none is open.
  template <class Fail>
  bool may_begin(const layer_selector& selector, const Fail& fail) const {
    if (!begins_step(phase_) || selector.has_plan()) return true;
    fail(errc::out_of_order, [&] {
      return std::logic_error("step " + std::to_string(step_ + 1) +
                              " is to be decided ahead, and nothing was agreed for it: call plan_next() "
                              "after the gradients of step " +
                              std::to_string(step_));
    });
    return false;
  }
  /// Whether the step has begun and was not committed.
  template <class Fail>
  bool require_open_step(const char* call, const Fail& fail) const {
    if (may_select(phase_)) return true;
    fail(errc::out_of_order, [&] {
      return std::logic_error(std::string(call) + ": step " + std::to_string(step_) +
                              (step_ == 0 ? " has no gradients yet" : " has ended") +
                              "; accumulate the gradients of the next step first");
    });
    return false;
  }
  /// Whether all parts have a gradient, or were skipped.
  template <class Fail>
  bool require_all(const Fail& fail) const {
    for (std::size_t part = 0; part < marks_.size(); ++part) {
      if (marks_[part] != mark::none || parts().sizes()[part] == 0) continue;
      fail(errc::no_gradient, [&] {
        return std::logic_error(
            "step " + std::to_string(step_) + ": layer '" + parts()[part].name +
            "' has no gradient yet; accumulate every layer before select() or encode(), or "
            "skip() it");
      });
      return false;
    }
    return true;
  }
  template <class Fail>
  bool check_count(std::size_t count, const char* what, const Fail& fail) const {
    if (count == model().layers()) return true;
    fail(errc::wrong_count, [&] {
      return std::invalid_argument("the model has " + std::to_string(model().layers()) + " layers, got " +
                                   std::to_string(count) + " " + what);
    });
    return false;
  }

 private:
  /// What a part has in this step.
  enum class mark : char { none, skipped, gradient };
  struct manner {
    double scale;
    bool may_lack_gradients;
  };

  template <class Fail>
  bool check_layer(std::size_t layer, const Fail& fail) const {
    if (layer < model().layers()) return true;
    fail(errc::no_such_layer, [&] { return model().layer_error(layer); });
    return false;
  }

  // Adds the gradients of layers [first, last); `gradients` as in residual_accumulator::accumulate_layers.
  template <class Gradients, class Execution, class Fail>
  void add(std::size_t first, std::size_t last, const Gradients& gradients, const Execution& execution,
           manner how, const layer_selector& selector, const Fail& fail) {
    if (!may_begin(selector, fail)) return;
    const bool begins = begins_step(phase_);
    const bool wants_fresh = !fresh_values_.empty();
    for (std::size_t layer = first; layer < last; ++layer) {
      gradients(layer, [&](auto from) {
        check_gradient(layer, from.size(), fail);
        if (!begins && !fail.has_failed()) check_piece(layer, wants_fresh, selector, fail);
      });
      if (fail.has_failed()) return;
    }
    const auto by_part = [&](std::size_t part, const auto& visitor) {
      gradients(partition_.layer_of(part),
                [&](auto from) { visitor(from.subspan(partition_.begin(part), parts().sizes()[part])); });
    };
    const std::size_t first_part = partition_.first(first);
    const std::size_t count = partition_.first(last) - first_part;
    if (begins) residual_.begin_step();
    const std::exception_ptr thrown = residual_.add(
        first_part, first_part + count, by_part, std::span(values_).subspan(first_part, count), functor_,
        execution,
        {.scale = how.scale,
         .fresh_values =
             std::span(fresh_values_).subspan(wants_fresh ? first_part : 0, wants_fresh ? count : 0),
         .may_lack_gradients = how.may_lack_gradients,
         .cut = &partition_},
        fail);
    if (fail.has_failed()) return;
    if (begins) count_step();
    for (std::size_t part = first_part; part < first_part + count; ++part) {
      if (residual_.is_given_[part] == 0) {
        skip_part(part);
      } else {
        marks_[part] = mark::gradient;
        is_stale_[part] = 0;
      }
    }
    thrown_ = thrown;
  }

  template <class Fail>
  void check_gradient(std::size_t layer, std::size_t elements, const Fail& fail) const {
    if (elements == model().sizes()[layer]) return;
    fail(errc::wrong_size, [&] { return model().size_error(layer, elements); });
  }

  // Whether a layer may have one more piece of its gradient in the step that is open.
  template <class Fail>
  void check_piece(std::size_t layer, bool wants_fresh, const layer_selector& selector,
                   const Fail& fail) const {
    const std::size_t part = partition_.first(layer);
    if (model().sizes()[layer] == 0) return;
    if (wants_fresh && marks_[part] == mark::gradient) {
      fail(errc::out_of_order, [&] {
        return std::logic_error("layer '" + model()[layer].name + "' has a gradient in step " +
                                std::to_string(step_) +
                                " already: where the next step is decided ahead, they come in one piece");
      });
    } else if (selector.timing() == decision_timing::as_ready && selector.is_decided(step_, part)) {
      fail(errc::out_of_order, [&] {
        return std::logic_error("layer '" + model()[layer].name + "' is decided in step " +
                                std::to_string(step_) +
                                " already: say expect_more_pieces(true) before all pieces but the last");
      });
    }
  }

  void skip_part(std::size_t part) {
    if (marks_[part] == mark::gradient) return;
    marks_[part] = mark::skipped;
    if (!fresh_values_.empty()) fresh_values_[part] = 0;
    if (is_stale_[part] == 0) return;
    is_stale_[part] = 0;
    const std::size_t elements = parts().sizes()[part];
    // The value of zeros, without writing them.
    values_[part] = elements == 0              ? 0.0
                    : residual_.is_clear(part) ? static_cast<double>(functor_.finish(0.0, elements))
                                               : representative_value(functor_, residual_[part]);
  }

  void count_step() {
    ++step_;
    std::fill(marks_.begin(), marks_.end(), mark::none);
    phase_ = step_phase::accumulating;
  }

  Representative functor_;
  partition partition_;
  residual_accumulator<T> residual_;
  std::vector<double> values_;
  std::vector<double> fresh_values_;
  std::vector<char> is_stale_;  // of a part: sent since its value was taken
  std::vector<mark> marks_;
  std::uint64_t step_ = 0;
  step_phase phase_ = step_phase::committed;
  std::exception_ptr thrown_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
