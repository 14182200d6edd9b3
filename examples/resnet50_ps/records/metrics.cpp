// SPDX-License-Identifier: MIT
#include "records/metrics.hpp"

#include <algorithm>
#include <utility>

namespace resnet50_ps {

void step_summary::add_report(const step_report& report, std::size_t frame_bytes,
                              std::uint64_t staleness_frames) {
  ++frames_;
  batches_ = merged(batches_, report);
  metrics_.threshold += report.threshold;
  metrics_.sent_up += share_of_model(frame_bytes);
  metrics_.bytes_up += frame_bytes;
  metrics_.staleness += static_cast<double>(staleness_frames);
}

void step_summary::add_arrived(const lamina::selection& layers) {
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (layers.is_sent(l)) arrived_.send(l);
  }
}

void step_summary::add_published(std::size_t bytes, std::size_t receivers) {
  metrics_.sent_down += share_of_model(bytes) * static_cast<double>(receivers);
  metrics_.bytes_down += bytes * receivers;
  published_frames_ += receivers;
}

step_metrics step_summary::finish(std::uint64_t step, float learning_rate) {
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
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (arrived_.is_sent(l)) metrics.arrived.push_back(l);
  }
  arrived_.clear();
  // An evaluation at the beginning of a step is no part of it.
  metrics.total_seconds = std::exchange(since_last_, stopwatch()).seconds() - batches.evaluation_seconds;
  // The asynchronous server works while its workers do.
  metrics.communication_seconds =
      std::max(0.0, metrics.total_seconds - metrics.server_seconds - metrics.worker_seconds);
  return metrics;
}

std::optional<evaluation> evaluation_log::add(std::uint64_t step, const step_report& report,
                                              std::size_t reports) {
  if (report.test_images == 0) return std::nullopt;
  shares& so_far = open_[step];
  so_far.sum.images += report.test_images;
  so_far.sum.top1 += report.test_top1;
  so_far.sum.top5 += report.test_top5;
  if (++so_far.reports < reports) return std::nullopt;
  const evaluation whole = so_far.sum;
  open_.erase(step);
  return whole;
}

}  // namespace resnet50_ps
