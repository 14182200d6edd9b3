// SPDX-License-Identifier: MIT
#include "model/passes.hpp"

#include <torch/nn/functional/loss.h>

#include <algorithm>
#include <vector>

namespace lab {

void compute_gradients(replica& local, const batch_stream::batch& batch, step_report& report) {
  local.network().ptr()->train();
  local.network().ptr()->zero_grad();
  const torch::Tensor target = batch.target.to(local.device());
  const torch::Tensor logits = local.network().forward(batch.data.to(local.device()));
  const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, target);
  loss.backward();
  local.download();
  report.loss = loss.item<double>();
  report.correct = correct_within(1, logits, target);
  report.images = static_cast<std::uint64_t>(batch.target.size(0));
}

std::uint64_t correct_within(std::int64_t first, const torch::Tensor& logits, const torch::Tensor& target) {
  const torch::Tensor best = std::get<1>(logits.topk(std::min(first, logits.size(1)), 1));
  return static_cast<std::uint64_t>(best.eq(target.unsqueeze(1)).sum().item<std::int64_t>());
}

void average_statistics(replica& local, const std::function<void(std::span<double>)>& average) {
  const std::vector<torch::Tensor> statistics = local.statistics();
  std::vector<double> all;
  for (const torch::Tensor& each : statistics) {
    if (!each.is_floating_point()) continue;
    const auto elements = lamina::elements_of<float>(each);
    all.insert(all.end(), elements.begin(), elements.end());
  }
  average(all);
  auto mean = all.begin();
  for (const torch::Tensor& each : statistics) {
    if (!each.is_floating_point()) continue;
    for (float& element : lamina::writable_elements_of<float>(each)) element = static_cast<float>(*mean++);
  }
  local.set_statistics(statistics);
}

void evaluate(replica& local, const std::shared_ptr<image_set>& images, shard part, std::size_t batch_images,
              const std::function<void()>& show_life, step_report& report) {
  const torch::NoGradGuard no_gradients;
  local.network().ptr()->eval();
  for_each_batch(images, part, batch_images, [&](const batch_stream::batch& batch) {
    const torch::Tensor target = batch.target.to(local.device());
    const torch::Tensor logits = local.network().forward(batch.data.to(local.device()));
    report.test_images += static_cast<std::uint64_t>(batch.target.size(0));
    report.test_top1 += correct_within(1, logits, target);
    report.test_top5 += correct_within(5, logits, target);
    show_life();
  });
}

}  // namespace lab
