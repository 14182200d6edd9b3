// SPDX-License-Identifier: MIT
#include "loops/overlapped.hpp"

#include <cstdint>
#include <lamina/collectives/torch_hooks.hpp>
#include <lamina/worker.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "loops/allreduce.hpp"
#include "loops/gradient_exchange.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;
using residual_compressor = lamina::gradient_compressor<float>;

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
        log_(local.model(), records.records, group.clock()),
        exchange_(group, over, local, server.optimizer, make_compressor(worker.compression), options),
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
    begin(std::move(from));
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

  // With the parameters of worker 0, and what it has of an earlier run.
  void begin(server_state from) {
    const bool is_first = group_.worker() == 0;
    std::string plan = from.plan.empty() ? options_.earlier_plan : std::move(from.plan);
    beginning begun = begin_alike(group_, local_, std::move(from));
    if (!begun.own.empty()) load_state(begun.own, compressor_ ? &*compressor_ : nullptr, tasks_);
    exchange_.take_up(std::move(begun.optimizer));
    // If the plan is another's worker 0 says so, and the others have nothing to go by.
    if (is_first && !plan.empty()) exchange_.take_up_plan(plan, options_.earlier_plan_is_from);
    const std::vector<std::byte> text = group_.scatter(message_kind::state, [&](std::size_t) {
      const auto bytes = std::as_bytes(std::span(plan));
      return std::vector<std::byte>(bytes.begin(), bytes.end());
    });
    if (is_first || text.empty()) return;
    plan.assign(reinterpret_cast<const char*>(text.data()), text.size());
    exchange_.take_up_plan(plan, "the plan of worker 0");
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
    exchange_.begin_step(computing_, server_.learning_rate.at(computing_));
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
    log_.finish_step(step, server_.learning_rate.at(step), compressor_ ? compressor_->chosen() : all);
    if (!plan_.makes_checkpoint_after(step)) return;
    save_together(group_, step, exchange_.gather_optimizer(),
                  save_state(compressor_ ? &*compressor_ : nullptr, tasks_), records_, exchange_.plan_text());
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

}  // namespace lab
