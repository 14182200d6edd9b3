// SPDX-License-Identifier: MIT
#include "records/step_log.hpp"

#include <algorithm>
#include <utility>

namespace lab {

void step_log::published(std::size_t frame_bytes, std::size_t receivers) {
  metrics_.sent_down += share_of_model(frame_bytes) * static_cast<double>(receivers);
  metrics_.bytes_down += frame_bytes * receivers;
  published_frames_ += receivers;
}

void step_log::lost(std::span<const sent_frame> parameters) {
  for (const sent_frame& each : parameters) {
    if (each.arrived) transfers().down += each.cost;
  }
}

void step_log::received(std::span<const pushed> gradients, std::uint64_t step) {
  finished(gradients, step);
  for (const pushed& each : gradients) {
    add_report(each.report, each.bytes.size());
    add_transfer(each);
  }
}

void step_log::finished(std::span<const pushed> reports, std::uint64_t step) {
  for (const pushed& each : reports) evaluated(each.report, step, reports.size());
}

void step_log::applied(const pushed& gradients, const lamina::selection& layers,
                       std::uint64_t staleness_frames) {
  step_report report = gradients.report;
  report.evaluation_seconds = 0;  // others go on during an evaluation: it is part of the step's time
  add_report(report, gradients.bytes.size(), staleness_frames);
  add_transfer(gradients);
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (layers.is_sent(l)) arrived_.send(l);
  }
}

void step_log::add_report(const step_report& report, std::size_t frame_bytes,
                          std::uint64_t staleness_frames) {
  ++frames_;
  batches_ = merged(batches_, report);
  metrics_.threshold += report.threshold;
  metrics_.sent_up += share_of_model(frame_bytes);
  metrics_.bytes_up += frame_bytes;
  metrics_.staleness += static_cast<double>(staleness_frames);
}

void step_log::add_transfer(const pushed& gradients) {
  if (gradients.transfer) transfers().up += gradients.transfer->cost;
}

void step_log::evaluated(const step_report& report, std::uint64_t step, std::size_t reports) {
  if (report.test_images == 0) return;
  const std::uint64_t after = step - 1;
  shares& so_far = shares_[after];
  so_far.sum.images += report.test_images;
  so_far.sum.top1 += report.test_top1;
  so_far.sum.top5 += report.test_top5;
  if (++so_far.reports < reports) return;
  const work_clock::pause recording(clock_);
  if (tasks_.record_evaluation) tasks_.record_evaluation(after, so_far.sum);
  shares_.erase(after);
}

void step_log::finish_step(std::uint64_t step, float learning_rate, const lamina::selection& arrived) {
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (arrived.is_sent(l)) arrived_.send(l);
  }
  finish_step(step, learning_rate);
}

void step_log::finish_step(std::uint64_t step, float learning_rate) {
  step_metrics metrics = std::exchange(metrics_, {});
  const auto frames = static_cast<double>(std::exchange(frames_, 0));
  metrics.step = step;
  metrics.learning_rate = learning_rate;
  metrics.threshold /= frames;
  metrics.sent_up /= frames;
  metrics.staleness /= frames;
  metrics.sent_down /= static_cast<double>(std::exchange(published_frames_, 0));
  const step_report batches = std::exchange(batches_, {});
  metrics.loss = batches.loss;
  metrics.accuracy = static_cast<double>(batches.correct) / static_cast<double>(batches.images);
  metrics.worker_seconds = batches.compute_seconds;
  metrics.node_seconds = batches.node_seconds;
  metrics.server_seconds = clock_.take();
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (arrived_.is_sent(l)) metrics.arrived.push_back(l);
  }
  arrived_.clear();
  // An evaluation at the beginning of a step is no part of it.
  metrics.total_seconds = std::exchange(since_last_, stopwatch()).seconds() - batches.evaluation_seconds;
  // The asynchronous server works while its workers do.
  metrics.communication_seconds =
      std::max(0.0, metrics.total_seconds - metrics.server_seconds - metrics.worker_seconds);
  const work_clock::pause recording(clock_);
  if (tasks_.record) tasks_.record(metrics);
}

void step_log::restart() {
  since_last_ = stopwatch();
  clock_.take();
}

}  // namespace lab
