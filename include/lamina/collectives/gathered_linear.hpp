// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "lamina/collectives/torch_hooks.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/visible.hpp"

/// Fully connected layers whose gradient is made on each rank from the activations of all ranks, in place of a sum of gradients.
namespace lamina::inline LAMINA_ABI::collectives {

namespace detail {

/// What one rank's passes through a Linear leave for the others.
struct LAMINA_VISIBLE linear_pass final : torch::CustomClassHolder {
  torch::Tensor input;  // rows x inputs
  torch::Tensor
      error;  // rows x outputs: the loss's gradient by the output; undefined before the backward pass
  const char* refusal = nullptr;  // why it must have no backward pass, if so
};

inline constexpr const char* second_backward =
    "a gathered_linear has two backward passes before set_gradients(): its error is of one";
inline constexpr const char* second_forward =
    "a gathered_linear has two forward passes before a backward pass: its input is of the last one";

/// x -> x W^T + b, whose backward keeps the error in place of making gradients of W and b. These are told undefined gradients, so that their
/// hooks run where they would.
struct LAMINA_VISIBLE linear_function : torch::autograd::Function<linear_function> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& input,
                               const torch::Tensor& weight, const torch::optional<torch::Tensor>& bias,
                               const c10::intrusive_ptr<linear_pass>& pass) {
    context->save_for_backward({weight});
    context->saved_data["pass"] = c10::IValue::make_capsule(pass);
    context->saved_data["has_input_gradient"] = input.requires_grad();
    return torch::linear(input, weight, bias.value_or(torch::Tensor()));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& of_output) {
    const auto pass =
        c10::static_intrusive_pointer_cast<linear_pass>(context->saved_data["pass"].toCapsule());
    const torch::Tensor weight = context->get_saved_variables()[0];
    if (pass->error.defined()) throw std::logic_error(second_backward);
    if (pass->refusal != nullptr) throw std::logic_error(pass->refusal);
    pass->error = of_output[0].detach().reshape({-1, weight.size(0)}).contiguous();
    torch::Tensor of_input;
    if (context->saved_data["has_input_gradient"].toBool()) of_input = of_output[0].matmul(weight);
    return {of_input, torch::Tensor(), torch::Tensor(), torch::Tensor()};
  }
};

}  // namespace detail

/// A gated Linear whose gradient needs no sum over the ranks. After gather(b) a training pass keeps its input X, b x n_in, and the error E of
/// its output, b x n_out. Each rank hands both over as gathered layers (layer_class::gathered) and makes the mean gradient of all itself,
/// W.grad = (1/P) E^T X over the P·b rows of all ranks (Lee et al., Parallel Computing 2019). That moves fewer bytes where
/// gathers_less(b, n_in, n_out, P), and takes P times the multiplications of a rank's own gradient.
///
///     linear->gather(rows);                                         // once
///     ... backward: the weight's hook of gradient_hooks runs when E is there
///     engine.ready(x, linear->inputs()); engine.ready(e, linear->errors());
///     engine.wait(x); engine.wait(e);
///     linear->set_gradients(engine.gathered(x), engine.gathered(e), P);
///
/// The bits of the gradient are the same on all ranks with as many threads of torch, and not those of a sum of gradients, which is rounded
/// elsewhere. A parameter's hook runs with no gradient defined.
class LAMINA_VISIBLE gathered_linear_impl : public gated_impl<torch::nn::LinearImpl> {
 public:
  using gated_impl::gated_impl;

  /// From now on each pass with gradients in train() has so many rows, the same on all ranks. 0: an ordinary Linear again.
  void gather(std::size_t rows) {
    rows_ = rows;
    pass_ = {};
  }
  [[nodiscard]] std::size_t rows() const noexcept { return rows_; }

  /// Throws std::invalid_argument while it gathers, naming both numbers, for another number of rows than gather() was told, and for an input
  /// that is not float32 on the CPU; std::logic_error from backward() for a second pass before set_gradients(), and of a pass that another forward
  /// pass has followed.
  torch::Tensor forward(const torch::Tensor& input) {
    if (rows_ == 0 || !is_training() || !torch::GradMode::is_enabled()) return gated_impl::forward(input);
    wait_at_gate();
    if (input.scalar_type() != torch::kFloat || !input.device().is_cpu())
      throw std::invalid_argument("a gathered_linear takes float32 on the CPU, not " + input.toString());
    const torch::Tensor as_rows = input.detach().reshape({-1, input.size(-1)});
    if (static_cast<std::size_t>(as_rows.size(0)) != rows_) {
      throw std::invalid_argument("a gathered_linear was told " + std::to_string(rows_) +
                                  " rows and is given " + std::to_string(as_rows.size(0)) +
                                  ": all ranks must have the same");
    }
    const auto pass = c10::make_intrusive<detail::linear_pass>();
    // A copy: who has the input may write it before the backward pass.
    pass->input = as_rows.clone(torch::MemoryFormat::Contiguous);
    if (pass_ && pass_->error.defined()) {
      pass->refusal = detail::second_backward;
    } else {
      if (pass_) pass_->refusal = detail::second_forward;
      pass_ = pass;
    }
    const auto shift = bias.defined() ? torch::optional<torch::Tensor>(bias) : torch::nullopt;
    return detail::linear_function::apply(input, weight, shift, pass);
  }

  /// Leaves what a training pass with this input, rows x n_in, and this error of its output, rows x n_out, would leave: for what replays
  /// passes without computing them. Throws std::invalid_argument for other shapes; std::logic_error unless it gathers.
  void set_pass(const torch::Tensor& input, const torch::Tensor& error) {
    if (rows_ == 0) throw std::logic_error("a gathered_linear that gathers nothing has no pass");
    const auto rows = static_cast<std::int64_t>(rows_);
    if (input.sizes() != torch::IntArrayRef({rows, options.in_features()}) ||
        error.sizes() != torch::IntArrayRef({rows, options.out_features()})) {
      throw std::invalid_argument("the input and the error of a gathered_linear are " +
                                  std::to_string(rows_) + " rows of " +
                                  std::to_string(options.in_features()) + " and of " +
                                  std::to_string(options.out_features()) + " elements");
    }
    pass_ = c10::make_intrusive<detail::linear_pass>();
    pass_->input = input.contiguous();
    pass_->error = error.contiguous();
  }

  /// Of the last pass, rows x n_in, and rows x n_out, row after row, until set_gradients(). std::logic_error before its backward pass.
  [[nodiscard]] std::span<const float> inputs() const { return elements_of(passed().input); }
  [[nodiscard]] std::span<const float> errors() const { return elements_of(passed().error); }

  /// Writes the gradients of weight and bias: the means over the ranks, of which `all_inputs` and `all_errors` have the rows one rank
  /// behind the other. std::invalid_argument for another number of elements.
  void set_gradients(std::span<const float> all_inputs, std::span<const float> all_errors,
                     std::size_t ranks) {
    const torch::Tensor x = matrix(all_inputs, ranks, options.in_features(), "inputs");
    const torch::Tensor e = matrix(all_errors, ranks, options.out_features(), "errors");
    const auto count = static_cast<double>(ranks);
    write(weight, e.t().mm(x).div_(count));
    if (bias.defined()) write(bias, e.sum(0).div_(count));
    pass_ = {};
  }

 private:
  [[nodiscard]] const detail::linear_pass& passed() const {
    if (!pass_ || !pass_->error.defined())
      throw std::logic_error("a gathered_linear has no error before its backward pass");
    return *pass_;
  }
  static std::span<const float> elements_of(const torch::Tensor& of) {
    return {of.data_ptr<float>(), static_cast<std::size_t>(of.numel())};
  }
  [[nodiscard]] torch::Tensor matrix(std::span<const float> of, std::size_t ranks, std::int64_t columns,
                                     const char* name) const {
    const std::size_t rows = rows_ * ranks;
    if (rows == 0 || of.size() != rows * static_cast<std::size_t>(columns)) {
      throw std::invalid_argument("the " + std::string(name) + " of " + std::to_string(ranks) +
                                  " ranks are " + std::to_string(rows * static_cast<std::size_t>(columns)) +
                                  " elements, not " + std::to_string(of.size()));
    }
    return torch::from_blob(const_cast<float*>(of.data()), {static_cast<std::int64_t>(rows), columns});
  }
  static void write(torch::Tensor& parameter, const torch::Tensor& gradient) {
    if (parameter.grad().defined()) {
      parameter.mutable_grad().copy_(gradient);
    } else {
      parameter.mutable_grad() = gradient;
    }
  }

  std::size_t rows_ = 0;
  c10::intrusive_ptr<detail::linear_pass> pass_;
};

using gathered_linear = torch::nn::ModuleHolder<gathered_linear_impl>;

}  // namespace lamina::inline LAMINA_ABI::collectives
