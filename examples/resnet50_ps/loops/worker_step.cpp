// SPDX-License-Identifier: MIT
#include "loops/worker_step.hpp"

#include <torch/nn/functional/loss.h>

#include <lamina/codec.hpp>

#include "model/evaluation.hpp"

namespace resnet50_ps {

void pull(worker_link& link, replica& local, std::uint64_t step) {
  const std::span<const std::byte> bytes = link.receive();
  const auto frame = read_from(link.name_of_server(), [&] {
    auto parameters = lamina::decode<float>(bytes, local.model());
    lamina::expect(parameters, lamina::frame_kind::parameters, step);
    return parameters;
  });
  for (std::size_t l = 0; l < local.model().layers(); ++l) frame.apply_to(l, local[l]);
  local.upload();
}

step_report report_on_replica(replica& local, std::uint64_t step, const worker_tasks& tasks,
                              const worker_options& options) {
  step_report report;
  report.is_last = step > options.steps;
  if (report.is_last || is_due(options.hash_period_steps, step - 1)) {
    report.replica_hash = hash_of(local.model(), [&](std::size_t l) { return local[l]; });
  }
  if (report.is_last && tasks.finished) tasks.finished();
  if (tasks.evaluate && (report.is_last || is_due(options.evaluation_period_steps, step - 1)))
    tasks.evaluate(report);
  return report;
}

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

std::vector<std::byte> save_state(const lamina::gradient_compressor<float>* compressor,
                                  const worker_tasks& tasks) {
  std::vector<std::vector<std::byte>> parts(2);
  if (compressor != nullptr) parts[0] = compressor->save();
  if (tasks.save) parts[1] = tasks.save();
  return pack(parts);
}

void load_state(std::span<const std::byte> bytes, lamina::gradient_compressor<float>* compressor,
                const worker_tasks& tasks) {
  const std::vector<std::vector<std::byte>> parts = unpack(bytes);
  if (parts.size() != 2 || parts[0].empty() != (compressor == nullptr)) {
    throw link_error("the state to resume from is that of another kind of worker");
  }
  if (compressor != nullptr) compressor->load(parts[0]);
  if (tasks.load) tasks.load(parts[1]);
}

}  // namespace resnet50_ps
