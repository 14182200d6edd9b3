// SPDX-License-Identifier: MIT
#include "model/evaluation.hpp"

#include <algorithm>
#include <vector>

#include "records/metrics.hpp"

namespace resnet50_ps {

std::uint64_t correct_within(std::int64_t first, const torch::Tensor& logits, const torch::Tensor& target) {
  const torch::Tensor best = std::get<1>(logits.topk(std::min(first, logits.size(1)), 1));
  return static_cast<std::uint64_t>(best.eq(target.unsqueeze(1)).sum().item<std::int64_t>());
}

void average_statistics(worker_peers& peers, replica& local) {
  const std::vector<torch::Tensor> statistics = local.statistics();
  std::vector<float> all;
  for (const torch::Tensor& each : statistics) {
    if (!each.is_floating_point()) continue;
    const auto elements = lamina::elements_of<float>(each);
    all.insert(all.end(), elements.begin(), elements.end());
  }
  peers.average(std::span(all));
  std::span<const float> rest = all;
  for (const torch::Tensor& each : statistics) {
    if (!each.is_floating_point()) continue;
    const std::span<float> elements = lamina::writable_elements_of<float>(each);
    std::ranges::copy(rest.first(elements.size()), elements.begin());
    rest = rest.subspan(elements.size());
  }
  local.set_statistics(statistics);
}

void evaluate(worker_peers& peers, replica& local, const std::shared_ptr<image_set>& images,
              std::size_t batch_images, step_report& report) {
  const stopwatch whole;
  average_statistics(peers, local);
  const torch::NoGradGuard no_gradients;
  local.network().ptr()->eval();
  for_each_batch(images, {peers.workers(), peers.worker()}, batch_images,
                 [&](const batch_stream::batch& batch) {
                   const torch::Tensor target = batch.target.to(local.device());
                   const torch::Tensor logits = local.network().forward(batch.data.to(local.device()));
                   report.test_images += static_cast<std::uint64_t>(batch.target.size(0));
                   report.test_top1 += correct_within(1, logits, target);
                   report.test_top5 += correct_within(5, logits, target);
                   peers.show_life();
                 });
  report.evaluation_seconds = whole.seconds();
}

}  // namespace resnet50_ps
