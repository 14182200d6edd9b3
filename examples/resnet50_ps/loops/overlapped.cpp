// SPDX-License-Identifier: MIT
#include "loops/overlapped.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <lamina/collectives/torch_hooks.hpp>
#include <lamina/error.hpp>
#include <lamina/worker.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "loops/allreduce.hpp"

namespace resnet50_ps {
namespace {

namespace collectives = lamina::collectives;
using residual_compressor = lamina::gradient_compressor<float>;

// Of each part of a layer: by the module that owns the parameter.
std::vector<collectives::layer_class> classes_of(torch::nn::Module& network, const lamina::partition& cut) {
  std::vector<torch::Tensor> fully_connected;
  for (const auto& module : network.modules()) {
    if (module->as<torch::nn::LinearImpl>() == nullptr) continue;
    for (const torch::Tensor& each : module->parameters(/*recurse=*/false)) fully_connected.push_back(each);
  }
  const std::vector<torch::Tensor> parameters = network.parameters();
  std::vector<collectives::layer_class> classes;
  for (std::size_t p = 0; p < cut.parts().layers(); ++p) {
    const torch::Tensor& layer = parameters[cut.layer_of(p)];
    const bool is_linear =
        std::ranges::any_of(fully_connected, [&](const torch::Tensor& each) { return each.is_same(layer); });
    classes.push_back(is_linear ? collectives::layer_class::fully_connected
                                : collectives::layer_class::convolutional);
  }
  return classes;
}

void require_finite(const lamina::layout& model, std::size_t layer, std::span<const float> gradient) {
  if (std::ranges::all_of(gradient, [](float each) { return std::isfinite(each); })) return;
  throw lamina::non_finite_gradient(layer, layer, model[layer].name, "gradient holds NaN or infinity");
}

// The gradients of a step, from the hook of the backward pass to the parameters.
class gradient_exchange {
 public:
  /// `held_back` is empty where everything is sent.
  gradient_exchange(collectives::channel& over, replica& local, sgd& optimizer,
                    residual_compressor* held_back, const overlap_options& options)
      : channel_(over),
        local_(local),
        parameters_(local.network().ptr()->parameters()),
        optimizer_(optimizer),
        compressor_(held_back),
        options_(options) {
    const auto& sizes = local.model().sizes();
    if (options.has_owners) updated_.resize(*std::ranges::max_element(sizes));
    is_open_.resize(local.model().layers());
    ready_seconds_.resize(local.model().layers());
  }

  /// With layers in the order in which their gradients become ready, once.
  void plan(const std::vector<std::size_t>& order) {
    const lamina::partition& cut = local_.partition();
    std::vector<std::size_t> parts;
    for (const std::size_t l : collectives::agree_on_order(channel_, cut.model(), order, options_.timeout)) {
      for (std::size_t p = cut.first(l); p < cut.first(l + 1); ++p) parts.push_back(p);
    }
    const auto costs = options_.is_calibrated ? collectives::calibrate(channel_) : collectives::gigabit_costs;
    collectives::engine_options running;
    running.timeout = options_.timeout;
    running.record = options_.record;
    if (options_.has_owners)
      running.update = [this](std::size_t p, std::size_t begin, std::span<float> mean) {
        update_slice(p, begin, mean);
      };
    engine_.emplace(channel_,
                    collectives::plan(cut.parts(), channel_.ranks(), parts,
                                      classes_of(*local_.network().ptr(), cut), options_.plan, costs),
                    running);
  }
  [[nodiscard]] bool is_planned() const { return engine_.has_value(); }

  /// After finish() of the step before.
  void begin_step(std::uint64_t step) {
    step_ = step;
    before_ = engine_->totals();
    engine_->begin_step();
  }

  /// The gradient of a layer is complete: its parts go on their way, or are held back.
  void hand_over(std::size_t layer) {
    const lamina::partition& cut = local_.partition();
    const torch::Tensor gradient = parameters_[layer].grad();
    const auto elements = lamina::elements_of<float>(gradient);
    if (compressor_ == nullptr) {
      require_finite(cut.model(), layer, elements);
    } else {
      compressor_->accumulate(layer, gradient);
    }
    for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
      is_open_[p] = true;
      ready_seconds_[p] = since_begin_.seconds();
      if (compressor_ == nullptr) {
        engine_->ready(p, elements.subspan(cut.begin(p), cut.parts().sizes()[p]));
      } else if (compressor_->is_sent(p)) {
        engine_->ready(p, compressor_->residual()[p]);
      } else {
        engine_->hold_back(p);
      }
    }
  }

  /// Waits for a layer of the step, unless it was taken: its parameters are the new ones.
  void take(std::size_t layer) {
    const lamina::partition& cut = local_.partition();
    for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
      if (!is_open_[p]) continue;
      engine_->wait(p);
      if (options_.has_owners) {
        std::ranges::copy(engine_->parameters(p), local_[p].begin());
      } else if (const auto mean = engine_->mean(p); !mean.empty()) {
        optimizer_.begin(p, step_);
        optimizer_.update(p, 0, mean, local_[p]);
      }
      is_open_[p] = false;
    }
  }
  /// All of them.
  void finish() {
    engine_->drain();
    for (std::size_t l = 0; l < local_.partition().model().layers(); ++l) take(l);
  }

  /// The forward pass begins, or the backward pass has ended.
  void note_begin() { since_begin_ = stopwatch(); }
  void note_end() { backward_seconds_ = since_begin_.seconds(); }
  /// Of the step that was finished last.
  [[nodiscard]] overlap_metrics metrics() const {
    const collectives::engine_totals now = engine_->totals();
    overlap_metrics seen;
    seen.exposed_seconds = now.waited_seconds - before_.waited_seconds;
    seen.hidden_seconds =
        std::max(0.0, now.collective_seconds - before_.collective_seconds - seen.exposed_seconds);
    seen.collectives = now.collectives - before_.collectives;
    if (compressor_ == nullptr && !options_.has_owners && !options_.reaches_forward) {
      seen.predicted_exposed_seconds =
          engine_->used_plan().predicted_exposed(ready_seconds_, backward_seconds_);
    }
    return seen;
  }
  [[nodiscard]] std::size_t sent_bytes() const {
    return static_cast<std::size_t>(engine_->totals().sent_bytes - before_.sent_bytes);
  }

 private:
  // In the engine's thread. Not in the network, whose parameters the backward pass may still read: beside it.
  void update_slice(std::size_t p, std::size_t begin, std::span<float> mean) {
    const std::span<float> whole = std::span(updated_).first(local_[p].size());
    const std::span<float> slice = whole.subspan(begin, mean.size());
    std::ranges::copy(local_[p].subspan(begin, mean.size()), slice.begin());
    optimizer_.begin(p, step_);
    optimizer_.update(p, begin, mean, whole);
    std::ranges::copy(slice, mean.begin());
  }

  collectives::channel& channel_;
  replica& local_;
  std::vector<torch::Tensor> parameters_;  // of the network
  sgd& optimizer_;                         // with owners, of the engine's thread while a step is open
  residual_compressor* compressor_;
  const overlap_options& options_;
  std::vector<float> updated_;  // a layer, of which an owner's slice counts
  std::vector<bool> is_open_;   // parts that were handed over and not taken
  std::uint64_t step_ = 0;
  collectives::engine_totals before_;  // the step
  stopwatch since_begin_;
  std::vector<double> ready_seconds_;
  double backward_seconds_ = 0;
  std::optional<collectives::engine> engine_;  // the last: its thread uses the others
};

class overlapped_training {
 public:
  overlapped_training(worker_group& group, collectives::channel& over, replica& local,
                      const worker_tasks& tasks, const worker_options& worker, const server_options& server,
                      const overlap_options& options, const server_tasks& records)
      : group_(group),
        local_(local),
        tasks_(tasks),
        plan_(worker.plan),
        server_(server),
        options_(options),
        records_(records),
        optimizer_(local.model(), server.optimizer),
        log_(local.model(), records.records, group.clock()),
        exchange_(over, local, optimizer_, make_compressor(worker.compression), options),
        hooks_(*local.network().ptr(), [this](std::size_t l) { gradient_is_ready(l); }) {
    if (options.reaches_forward)
      collectives::set_gates(*local.network().ptr(), [this](std::size_t l) {
        const work_clock::pause waiting(group_.clock());
        exchange_.take(l);
      });
  }
  overlapped_training(const overlapped_training&) = delete;
  overlapped_training& operator=(const overlapped_training&) = delete;
  ~overlapped_training() {
    if (options_.reaches_forward) collectives::set_gates(*local_.network().ptr(), {});
  }

  void run(server_state from) {
    begin_together(group_, local_, optimizer_, compressor_ ? &*compressor_ : nullptr, tasks_,
                   std::move(from));
    for (std::uint64_t step = plan_.steps_done + 1;; ++step) {
      const step_report begun = examine(local_, step, plan_, tasks_, group_.clock(),
                                        [&](std::span<double> statistics) { group_.average(statistics); });
      if (plan_.is_over(step)) return log_end(group_, begun, step, log_);
      compute(step, begun);
      if (!options_.reaches_forward || must_be_whole_after(step)) finish_step();
    }
  }

 private:
  residual_compressor* make_compressor(const lamina::compressor_options& compression) {
    if (compression.decide != lamina::decision_timing::ahead) return nullptr;
    return &compressor_.emplace(local_.partition().model(), compression);
  }

  bool must_be_whole_after(std::uint64_t step) const {
    return plan_.makes_checkpoint_after(step) || plan_.compares_replicas_before(step + 1) ||
           plan_.averages_statistics_before(step + 1);
  }

  // Forward, whose gates take the layers of the last step, and backward, whose hooks hand over those of this one.
  void compute(std::uint64_t step, step_report report) {
    computing_ = step;
    is_begun_ = false;
    seconds_before_ = 0;
    group_.clock().take();
    exchange_.note_begin();
    note(collectives::event_kind::begin);
    tasks_.compute(step, report);
    note(collectives::event_kind::end);
    hooks_.check_all_called();
    report.compute_seconds = seconds_before_ + group_.clock().take();
    if (!exchange_.is_planned()) {
      exchange_.plan(order_);
      begin_step();
      for (const std::size_t l : order_) exchange_.hand_over(l);
    }
    exchange_.note_end();
    open_ = {step, report};
  }

  void note(collectives::event_kind kind) const {
    if (options_.record != nullptr) options_.record->record({.kind = kind, .step = computing_});
  }

  void gradient_is_ready(std::size_t layer) {
    if (!exchange_.is_planned()) {
      order_.push_back(layer);
      return;
    }
    if (!is_begun_) begin_step();
    exchange_.hand_over(layer);
  }

  // With the first gradient, when the forward pass has taken all of the last step.
  void begin_step() {
    seconds_before_ += group_.clock().take();
    finish_step();
    optimizer_.set_learning_rate(server_.learning_rate.at(computing_));
    exchange_.begin_step(computing_);
    is_begun_ = true;
    group_.clock().take();
  }

  // The step that was computed last, if it is open: its parameters, the choice for the next one, the records.
  void finish_step() {
    if (!open_) return;
    {
      const work_clock::pause waiting(group_.clock());
      exchange_.finish();
    }
    local_.upload();
    auto [step, report] = *std::exchange(open_, std::nullopt);
    lamina::selection all(local_.model());
    if (compressor_) {
      std::vector<double> agreed(compressor_->predicted_values().begin(),
                                 compressor_->predicted_values().end());
      group_.average(agreed);
      compressor_->plan_next(agreed);
      compressor_->encode();
      report.threshold = compressor_->threshold();
      compressor_->commit();
    } else {
      report.threshold = -1;  // which every layer passes
      for (std::size_t l = 0; l < local_.model().layers(); ++l) all.send(l);
    }
    log_.overlapped(exchange_.metrics());
    // Half of what a worker sends are sums on their way to where they are made.
    log_step(group_, report, step, {.moved_bytes = exchange_.sent_bytes() / 2}, log_);
    log_.finish_step(step, optimizer_.learning_rate(), compressor_ ? compressor_->chosen() : all);
    if (!plan_.makes_checkpoint_after(step)) return;
    save_together(group_, step, state_of(optimizer_),
                  save_state(compressor_ ? &*compressor_ : nullptr, tasks_), records_);
    log_.restart();
  }

  struct computed_step {
    std::uint64_t step = 0;
    step_report report;
  };

  worker_group& group_;
  replica& local_;
  const worker_tasks& tasks_;
  const training_plan& plan_;
  const server_options& server_;
  const overlap_options& options_;
  const server_tasks& records_;
  sgd optimizer_;
  step_log log_;
  std::optional<residual_compressor> compressor_;
  gradient_exchange exchange_;
  collectives::gradient_hooks hooks_;
  std::vector<std::size_t> order_;  // of layers, as the first step has seen them
  std::uint64_t computing_ = 0;
  bool is_begun_ = false;      // the step that is computed has handed over a layer
  double seconds_before_ = 0;  // of its computation, before that
  std::optional<computed_step> open_;
};

}  // namespace

void train_overlapped(worker_group& group, collectives::channel& over, replica& local,
                      const worker_tasks& tasks, const worker_options& worker, const server_options& server,
                      const overlap_options& options, const server_tasks& records, server_state from) {
  overlapped_training(group, over, local, tasks, worker, server, options, records).run(std::move(from));
}

}  // namespace resnet50_ps
