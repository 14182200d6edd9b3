// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/any_tensor.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/frame.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/representative.hpp"
#include "lamina/scatter.hpp"
#include "lamina/selection.hpp"
#include "lamina/worker.hpp"

namespace lamina::inline LAMINA_ABI {

/// The representative functors of representative.hpp, as a number.
enum class value_functor : std::uint8_t {
  mean_abs,
  l1_norm,
  l2_norm,
  root_mean_square,
  max_abs,
  signed_mean
};

namespace detail {

/// One of the functors, chosen at run time: the same loops over elements as those of its own type, and one compressor for all.
class any_functor {
 public:
  using is_chosen_at_run_time = void;
  using common = sum_of_magnitudes;

  explicit any_functor(value_functor chosen) : chosen_(chosen) {
    if (chosen > value_functor::signed_mean)
      raise(std::invalid_argument("there is no functor " + std::to_string(static_cast<int>(chosen))));
  }

  bool is_common() const { return chosen_ == value_functor::mean_abs || chosen_ == value_functor::l1_norm; }
  /// Functors that differ in finish() alone have their loops in common.
  template <class Visitor>
  auto visit(const Visitor& visitor) const {
    switch (chosen_) {
      case value_functor::l2_norm:
      case value_functor::root_mean_square:
        return visitor(sum_of_squares());
      case value_functor::max_abs:
        return visitor(lamina::max_abs());
      case value_functor::signed_mean:
        return visitor(lamina::signed_mean());
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

}  // namespace detail

/// An execution (see execution.hpp) whose type does not matter; an empty one is sequential.
using any_execution = std::function<void(std::size_t pieces, const std::function<void(std::size_t)>& work)>;

/// A gradient_compressor whose element type and functor are chosen at run time: for bindings to other languages, and for
/// frameworks whose tensors know their type at run time alone. It does what that class does, to the last bit, and its
/// functions have the same names, errors and meaning; a call costs a virtual call more. It has no forms with a
/// std::error_code.
///
/// This header instantiates a compressor of floats and one of doubles, with the loops of all functors: include it in one source
/// file of a program.
class any_compressor {
 public:
  /// \param model          its layers
  /// \param residual_type  of the residual and of what is sent: float32 or float64
  /// \param options        as of a gradient_compressor
  /// \param functor        whose values are compared with the threshold
  /// \throws std::invalid_argument  another residual_type or an unknown functor; and as gradient_compressor
  any_compressor(const layout& model, element_type residual_type, const compressor_options& options = {},
                 value_functor functor = value_functor::mean_abs)
      : type_(residual_type),
        decide_(options.decide),
        worker_(make(model, residual_type, options, functor)) {}

  double accumulate(std::size_t layer, const any_tensor& gradient, double scale = 1,
                    const any_execution& execution = {}) {
    return worker_->accumulate(layer, gradient, scale, execution);
  }
  std::span<const double> accumulate_all(std::span<const any_tensor> gradients, double scale = 1,
                                         const any_execution& execution = {}) {
    return worker_->accumulate_all(gradients, scale, execution);
  }
  void skip(std::size_t layer) { worker_->skip(layer); }
  void begin_step() { worker_->begin_step(); }
  void expect_more_pieces(bool expected) { worker_->expect_more_pieces(expected); }
  [[nodiscard]] bool is_decided(std::size_t part) const { return worker_->is_decided(part); }
  [[nodiscard]] bool is_sent(std::size_t part) const { return worker_->is_sent(part); }
  [[nodiscard]] std::span<const double> predicted_values() const { return worker_->predicted_values(); }
  void plan_next(std::span<const double> agreed_values) { worker_->plan_next(agreed_values); }
  [[nodiscard]] std::span<const double> values() const { return worker_->values(); }

  const selection& select() { return worker_->select(); }
  const selection& select(std::span<const double> agreed_values, std::span<const char> held = {}) {
    return worker_->select(agreed_values, held);
  }
  [[nodiscard]] const selection& chosen() const { return worker_->chosen(); }
  const encoded_frame& encode() { return worker_->encode(); }
  /// \param to       chosen().sent_elements() elements to write, of residual_type() or, with the payload float16 or bfloat16,
  ///                 of that type
  /// \param divisor  divides each element; 1 for the half-width types
  void pack(any_tensor to, double divisor = 1) { worker_->pack(to, divisor); }
  void commit() { worker_->commit(); }
  void commit(const delivery& arrived) { worker_->commit(arrived); }
  void abandon() noexcept { worker_->abandon(); }

  /// lamina::scatter() of what was packed in this step: a tensor to write for each layer, also for those without a gradient.
  void scatter(const any_tensor& packed, std::span<any_tensor> gradients) const {
    worker_->scatter(packed, gradients);
  }
  [[nodiscard]] std::optional<std::size_t> first_non_finite(std::span<const any_tensor> gradients,
                                                            const any_execution& execution = {}) const {
    return worker_->first_non_finite(gradients, execution);
  }
  void find_zero(std::span<const any_tensor> gradients, std::span<char> is_zero) const {
    worker_->find_zero(gradients, is_zero);
  }

  [[nodiscard]] std::vector<std::byte> save() const { return worker_->save(); }
  void load(std::span<const std::byte> bytes) { worker_->load(bytes); }

  [[nodiscard]] element_type residual_type() const noexcept { return type_; }
  /// The residual of a part, of residual_type(), to read; valid as long as this object.
  [[nodiscard]] any_tensor residual(std::size_t part) const { return worker_->residual(part); }
  /// Empty without momentum.
  [[nodiscard]] any_tensor velocity(std::size_t part) const { return worker_->velocity(part); }
  [[nodiscard]] std::size_t left_out_elements() const { return worker_->left_out_elements(); }
  [[nodiscard]] std::uint64_t step() const { return worker_->step(); }
  [[nodiscard]] double threshold() const { return worker_->threshold(); }
  [[nodiscard]] const layout& model() const { return cut().model(); }
  [[nodiscard]] const layout& parts() const { return cut().parts(); }
  [[nodiscard]] const partition& cut() const { return worker_->cut(); }
  /// As given.
  [[nodiscard]] decision_timing decide() const noexcept { return decide_; }

 private:
  struct worker {
    virtual ~worker() = default;
    virtual double accumulate(std::size_t, const any_tensor&, double, const any_execution&) = 0;
    virtual std::span<const double> accumulate_all(std::span<const any_tensor>, double,
                                                   const any_execution&) = 0;
    virtual void skip(std::size_t) = 0;
    virtual void begin_step() = 0;
    virtual void expect_more_pieces(bool) = 0;
    virtual bool is_decided(std::size_t) const = 0;
    virtual bool is_sent(std::size_t) const = 0;
    virtual std::span<const double> predicted_values() const = 0;
    virtual void plan_next(std::span<const double>) = 0;
    virtual std::span<const double> values() const = 0;
    virtual const selection& select() = 0;
    virtual const selection& select(std::span<const double>, std::span<const char>) = 0;
    virtual const selection& chosen() const = 0;
    virtual const encoded_frame& encode() = 0;
    virtual void pack(any_tensor&, double) = 0;
    virtual void commit() = 0;
    virtual void commit(const delivery&) = 0;
    virtual void abandon() noexcept = 0;
    virtual void scatter(const any_tensor&, std::span<any_tensor>) const = 0;
    virtual std::optional<std::size_t> first_non_finite(std::span<const any_tensor>,
                                                        const any_execution&) const = 0;
    virtual void find_zero(std::span<const any_tensor>, std::span<char>) const = 0;
    virtual std::vector<std::byte> save() const = 0;
    virtual void load(std::span<const std::byte>) = 0;
    virtual any_tensor residual(std::size_t) const = 0;
    virtual any_tensor velocity(std::size_t) const = 0;
    virtual std::size_t left_out_elements() const = 0;
    virtual std::uint64_t step() const = 0;
    virtual double threshold() const = 0;
    virtual const partition& cut() const = 0;
  };

  // An execution is called with its work as it comes; a std::function wants it by its own type.
  struct run_by {
    const any_execution& execution;
    template <class Work>
    void operator()(std::size_t pieces, const Work& work) const {
      if (execution) {
        execution(pieces, std::function<void(std::size_t)>(std::cref(work)));
      } else {
        sequential()(pieces, work);
      }
    }
  };

  template <element T>
  struct worker_of final : worker {
    gradient_compressor<T, detail::any_functor> each;

    worker_of(const layout& model, const compressor_options& options, value_functor functor)
        : each(model, options, detail::any_functor(functor)) {}
    double accumulate(std::size_t layer, const any_tensor& gradient, double scale,
                      const any_execution& execution) override {
      return each.accumulate(layer, gradient, scale, run_by{execution});
    }
    std::span<const double> accumulate_all(std::span<const any_tensor> gradients, double scale,
                                           const any_execution& execution) override {
      return each.accumulate_all(gradients, scale, run_by{execution});
    }
    void skip(std::size_t layer) override { each.skip(layer); }
    void begin_step() override { each.begin_step(); }
    void expect_more_pieces(bool expected) override { each.expect_more_pieces(expected); }
    bool is_decided(std::size_t part) const override { return each.is_decided(part); }
    bool is_sent(std::size_t part) const override { return each.is_sent(part); }
    std::span<const double> predicted_values() const override { return each.predicted_values(); }
    void plan_next(std::span<const double> agreed) override { each.plan_next(agreed); }
    std::span<const double> values() const override { return each.values(); }
    const selection& select() override { return each.select(); }
    const selection& select(std::span<const double> agreed, std::span<const char> held) override {
      return each.select(agreed, held);
    }
    const selection& chosen() const override { return each.chosen(); }
    const encoded_frame& encode() override { return each.encode(); }
    void pack(any_tensor& to, double divisor) override {
      const auto as_halves = [&](auto half) {
        if (divisor != 1) detail::raise(std::invalid_argument("pack: half-width elements are not divided"));
        each.pack(std::get<std::span<decltype(half)>>(tensor_traits<any_tensor>::elements(to)));
      };
      if (to.type() == element_type::float16) return as_halves(float16());
      if (to.type() == element_type::bfloat16) return as_halves(bfloat16());
      each.pack(writable_elements_of<T>(to), static_cast<T>(divisor));
    }
    void commit() override { each.commit(); }
    void commit(const delivery& arrived) override { each.commit(arrived); }
    void abandon() noexcept override { each.abandon(); }
    void scatter(const any_tensor& packed, std::span<any_tensor> gradients) const override {
      lamina::scatter<T>(each.chosen(), each.cut(), elements_of<T>(packed), gradients);
    }
    std::optional<std::size_t> first_non_finite(std::span<const any_tensor> gradients,
                                                const any_execution& execution) const override {
      return each.first_non_finite(gradients, run_by{execution});
    }
    void find_zero(std::span<const any_tensor> gradients, std::span<char> is_zero) const override {
      each.find_zero(gradients, is_zero);
    }
    std::vector<std::byte> save() const override { return each.save(); }
    void load(std::span<const std::byte> bytes) override { each.load(bytes); }
    any_tensor residual(std::size_t part) const override { return each.residual()[part]; }
    any_tensor velocity(std::size_t part) const override {
      each.parts().check_layer(part);
      const std::span<const T> all = each.residual().velocity();
      return all.empty() ? all : all.subspan(each.parts().offset(part), each.parts().sizes()[part]);
    }
    std::size_t left_out_elements() const override { return each.residual().left_out_elements(); }
    std::uint64_t step() const override { return each.step(); }
    double threshold() const override { return each.threshold(); }
    const partition& cut() const override { return each.cut(); }
  };

  static std::unique_ptr<worker> make(const layout& model, element_type type,
                                      const compressor_options& options, value_functor functor) {
    if (type == element_type::float32) return std::make_unique<worker_of<float>>(model, options, functor);
    if (type == element_type::float64) return std::make_unique<worker_of<double>>(model, options, functor);
    detail::raise(std::invalid_argument(
        "a residual is of float32 or float64: half-width gradients are added to those"));
  }

  element_type type_;
  decision_timing decide_;
  std::unique_ptr<worker> worker_;
};

}  // namespace lamina::inline LAMINA_ABI
