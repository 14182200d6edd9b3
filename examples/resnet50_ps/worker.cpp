// SPDX-License-Identifier: MIT
#include "worker.hpp"

#include <torch/nn/functional/loss.h>

#include <lamina/codec.hpp>

#include "metrics.hpp"

namespace resnet50_ps {
namespace {

std::uint64_t correct_predictions(const torch::Tensor& logits, const torch::Tensor& target) {
  return static_cast<std::uint64_t>(logits.argmax(1).eq(target).sum().item<std::int64_t>());
}

// Fills the gradients of the replica's parameters.
step_report compute_gradients(replica& local, const batch_stream::batch& batch) {
  local.network.ptr()->zero_grad();
  const torch::Tensor logits = local.network.forward(batch.data);
  const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, batch.target);
  loss.backward();
  step_report report;
  report.loss = loss.item<double>();
  report.correct = correct_predictions(logits, batch.target);
  report.images = static_cast<std::uint64_t>(batch.target.size(0));
  return report;
}

void pull(transport& link, replica& local, std::uint64_t step) {
  const auto frame = lamina::decode<float>(link.receive_from_server().frame, local.model);
  lamina::expect(frame, lamina::frame_kind::parameters, step);
  for (std::size_t l = 0; l < local.model.layers(); ++l) {
    if (!frame.is_dropped(l)) frame.restore(l, local[l]);
  }
}

}  // namespace

void work(transport& link, replica& local, const std::function<batch_stream::batch()>& next_batch,
          const worker_options& options, const std::function<void(std::uint64_t step)>& pulled) {
  lamina::gradient_compressor<float> compressor(local.model, options.compression);
  local.network.ptr()->train();
  for (std::uint64_t step = 1;; ++step) {
    pull(link, local, step);
    if (pulled) pulled(step);
    if (step > options.steps) return;

    const stopwatch compute;
    step_report report = compute_gradients(local, next_batch());
    for (std::size_t l = 0; l < local.model.layers(); ++l)
      compressor.accumulate(l, local.parameters[l].grad());
    const lamina::encoded_frame& frame = compressor.encode();
    report.compute_seconds = compute.seconds();

    link.send_to_server(report, frame);
    compressor.commit();
  }
}

std::uint64_t count_correct(replica& local, const std::shared_ptr<image_set>& images, shard part,
                            std::size_t batch_images) {
  const torch::NoGradGuard no_gradients;
  local.network.ptr()->eval();
  std::uint64_t correct = 0;
  for_each_batch(images, part, batch_images, [&](const batch_stream::batch& batch) {
    correct += correct_predictions(local.network.forward(batch.data), batch.target);
  });
  return correct;
}

void average_running_statistics(transport& link, replica& local) {
  for (const torch::Tensor& buffer : local.network.ptr()->buffers()) {
    if (buffer.is_floating_point()) link.mean_over_workers(lamina::writable_elements_of<float>(buffer));
  }
}

}  // namespace resnet50_ps
