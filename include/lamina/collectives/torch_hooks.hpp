// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "lamina/detail/raise.hpp"

/// \file
/// When a gradient of a libtorch network is complete, and when a layer's parameters are needed again: what calls an engine. Read it last.
namespace lamina::inline LAMINA_ABI::collectives {

/// Thrown where a parameter took no part in a step: the other ranks would wait for its gradient.
class LAMINA_VISIBLE unused_parameter : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Calls `ready(l)` in the thread of backward() as soon as the gradient of parameter l is complete, in the order of
/// network.parameters(). One set a network at a time.
///
/// It hooks the node that accumulates a parameter's gradient, after it has run: a hook of the tensor itself runs before .grad is written.
/// A parameter that is used twice is told once. An exception from `ready` comes out of backward() as it is, and the next backward() works;
/// after another one, of a node of the program's, forget() is to be called. Where one parameter is told twice between two calls of
/// check_all_called(), two passes add up in it: pause() all but the last one.
class gradient_hooks {
 public:
  /// Throws std::invalid_argument, naming it, for a parameter that requires no gradient, and for one that has two names: it would be summed
  /// twice.
  gradient_hooks(torch::nn::Module& network, std::function<void(std::size_t layer)> ready)
      : shared_(std::make_shared<shared>()) {
    for (const auto& each : network.named_parameters()) {
      if (!each.value().requires_grad())
        detail::refuse("parameter '", each.key(), "' requires no gradient: it would never be ready");
      // The tensor holds its node weakly: without this one there would be another at each pass, and no hook.
      const auto node = torch::autograd::impl::grad_accumulator(each.value());
      for (std::size_t l = 0; l < nodes_.size(); ++l) {
        if (nodes_[l] != node) continue;
        detail::refuse("parameters '", shared_->names[l], "' and '", each.key(),
                       "' are one tensor: it would be summed twice");
      }
      nodes_.push_back(node);
      shared_->names.push_back(each.key());
    }
    shared_->ready = std::move(ready);
    shared_->was_called.resize(nodes_.size());
    for (std::size_t l = 0; l < nodes_.size(); ++l)
      keys_.push_back(nodes_[l]->add_post_hook(std::make_unique<post_hook>(shared_, l)));
  }
  gradient_hooks(const gradient_hooks&) = delete;
  gradient_hooks& operator=(const gradient_hooks&) = delete;
  ~gradient_hooks() {
    for (std::size_t l = 0; l < keys_.size(); ++l) nodes_[l]->del_post_hook(keys_[l]);
  }

  /// Until resume() nothing is told: for accumulation over several backward passes, of which the last one tells.
  void pause() noexcept { shared_->is_paused = true; }
  void resume() noexcept { shared_->is_paused = false; }

  /// Takes back what was told of a step that will not be finished, since backward() threw.
  void forget() noexcept { shared_->forget(); }

  /// Throws unused_parameter, naming those for which nothing was told since the last check. To be called after backward().
  void check_all_called() {
    std::string missing;
    for (std::size_t l = 0; l < nodes_.size(); ++l)
      if (!shared_->was_called[l]) missing += (missing.empty() ? "'" : ", '") + shared_->names[l] + "'";
    forget();
    if (!missing.empty())
      throw unused_parameter("no gradient for " + missing + ": every parameter must be used in every step");
  }

 private:
  struct shared {
    std::function<void(std::size_t)> ready;
    std::vector<std::string> names;
    std::vector<bool> was_called;
    bool is_paused = false;

    void forget() noexcept { was_called.assign(was_called.size(), false); }
  };

  class post_hook final : public torch::autograd::FunctionPostHook {
   public:
    post_hook(std::shared_ptr<shared> state, std::size_t layer) : state_(std::move(state)), layer_(layer) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                              const torch::autograd::variable_list&) override {
      if (state_->is_paused) return outputs;
      if (state_->was_called[layer_]) {
        detail::refuse<std::logic_error>(
            "the gradient of '", state_->names[layer_],
            "' is complete twice in one step: pause() the hooks in all passes but the last, and forget() a "
            "step in which backward() threw");
      }
      state_->was_called[layer_] = true;
      try {
        state_->ready(layer_);
      } catch (...) {
        state_->forget();
        throw;
      }
      return outputs;
    }

   private:
    std::shared_ptr<shared> state_;
    std::size_t layer_;
  };

  std::shared_ptr<shared> shared_;
  std::vector<std::shared_ptr<torch::autograd::Node>> nodes_;
  std::vector<std::uintptr_t> keys_;
};

/// What a layer's forward waits for: an engine's wait(), or nothing.
using gate = std::function<void()>;

/// What modules with a gate have in common, whatever else they are.
class LAMINA_VISIBLE gated_module {
 public:
  /// An empty one does not wait.
  explicit gated_module(gate opens) : opens_(std::move(opens)) {}
  gated_module(const gated_module&) = default;
  gated_module& operator=(const gated_module&) = default;
  virtual ~gated_module() = default;

  void set_gate(gate opens) { opens_ = std::move(opens); }
  void wait_at_gate() const {
    if (opens_) opens_();
  }

 private:
  gate opens_;
};

/// A module of libtorch with one input that waits at its gate before each forward, where its parameters are needed again: libtorch has no
/// forward hooks. A module in all else, with the same names of parameters, but for clone(). A Linear has two parameters, and waits for
/// both:
///
///     torch::nn::Sequential network;
///     network->push_back(gated<torch::nn::LinearImpl>([&] { engine.wait(0); engine.wait(1); }, 64, 10));
template <class Impl>
class gated_impl : public Impl, public gated_module {
 public:
  template <class... Arguments>
  explicit gated_impl(gate opens, Arguments&&... arguments)
      : Impl(std::forward<Arguments>(arguments)...), gated_module(std::move(opens)) {}

  torch::Tensor forward(const torch::Tensor& input) {
    wait_at_gate();
    return Impl::forward(input);
  }

  /// Throws std::logic_error: a copy would have no gate, or that of the original, whose parameters are other ones.
  [[nodiscard]] std::shared_ptr<torch::nn::Module> clone(
      const torch::optional<torch::Device>& = {}) const override {
    detail::refuse<std::logic_error>(
        "a gated ", this->name(),
        " is not cloned: make another with a gate of its own, and copy the parameters");
  }
};

template <class Impl>
using gated = torch::nn::ModuleHolder<gated_impl<Impl>>;

/// Lets each module of a network that was made of gated ones wait for its parameters: before its forward, need(l) is called for each of
/// its own, l as network.parameters() has them. An empty `need` takes the gates off again. Throws std::invalid_argument, naming it, for a
/// parameter whose module has no gate: its forward would not wait. No gate has changed then.
inline void set_gates(torch::nn::Module& network, const std::function<void(std::size_t layer)>& need) {
  const auto all = network.named_parameters();
  std::vector<bool> has_gate(all.size());
  std::vector<std::pair<gated_module*, std::vector<std::size_t>>> found;
  for (const auto& module : network.modules()) {
    auto* const with_gate = dynamic_cast<gated_module*>(module.get());
    if (with_gate == nullptr) continue;
    auto& [gates, layers] = found.emplace_back(with_gate, std::vector<std::size_t>());
    for (const torch::Tensor& own : module->parameters(/*recurse=*/false)) {
      for (std::size_t l = 0; l < all.size(); ++l) {
        if (!all[l].value().is_same(own)) continue;
        layers.push_back(l);
        has_gate[l] = true;
      }
    }
  }
  for (std::size_t l = 0; l < all.size(); ++l) {
    if (!has_gate[l])
      detail::refuse("parameter '", all[l].key(),
                     "' is of a module without a gate: its forward would not wait for it");
  }
  for (auto& [module, layers] : found) {
    const auto wait = [need, layers = std::move(layers)] {
      for (const std::size_t l : layers) need(l);
    };
    module->set_gate(need ? gate(wait) : gate());
  }
}

}  // namespace lamina::inline LAMINA_ABI::collectives
