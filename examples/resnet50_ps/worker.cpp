// SPDX-License-Identifier: MIT
#include "worker.hpp"

#include <torch/nn/functional/loss.h>

#include <array>
#include <cstring>
#include <lamina/codec.hpp>
#include <vector>

#include "evaluation.hpp"
#include "metrics.hpp"

namespace resnet50_ps {
namespace {

// Fills the gradients of the replica's parameters.
void compute_gradients(replica& local, const batch_stream::batch& batch, step_report& report) {
  local.network.ptr()->train();
  local.network.ptr()->zero_grad();
  const torch::Tensor logits = local.network.forward(batch.data);
  const torch::Tensor loss = torch::nn::functional::cross_entropy(logits, batch.target);
  loss.backward();
  report.loss = loss.item<double>();
  report.correct = correct_within(1, logits, batch.target);
  report.images = static_cast<std::uint64_t>(batch.target.size(0));
}

void pull(worker_link& link, replica& local, std::uint64_t step) {
  const auto frame = lamina::decode<float>(link.receive().bytes, local.model());
  lamina::expect(frame, lamina::frame_kind::parameters, step);
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    if (!frame.is_dropped(l)) frame.restore(l, local[l]);
  }
}

// The compressor's state with its length before it, then the worker's other one.
void send_state(worker_link& link, const lamina::gradient_compressor<float>& compressor,
                const worker_tasks& tasks) {
  const std::vector<std::byte> compressed = compressor.save();
  const std::vector<std::byte> other = tasks.save ? tasks.save() : std::vector<std::byte>();
  const std::uint64_t length = compressed.size();
  const std::array<std::span<const std::byte>, 3> segments = {std::as_bytes(std::span(&length, 1)),
                                                              compressed, other};
  link.send({}, segments);
}

void receive_state(worker_link& link, lamina::gradient_compressor<float>& compressor,
                   const worker_tasks& tasks) {
  const std::span<const std::byte> bytes = link.receive().bytes;
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) throw link_error("the server sent no state to resume from");
  std::memcpy(&length, bytes.data(), sizeof length);
  const auto rest = bytes.subspan(sizeof length);
  if (length > rest.size()) throw link_error("the server sent half a state to resume from");
  compressor.load(rest.first(length));
  if (tasks.load) tasks.load(rest.subspan(length));
}

}  // namespace

void work(worker_link& link, replica& local, const worker_tasks& tasks, const worker_options& options) {
  lamina::gradient_compressor<float> compressor(local.partition.model(), options.compression);
  if (options.resumes) receive_state(link, compressor, tasks);
  for (std::uint64_t step = compressor.step() + 1;; ++step) {
    pull(link, local, step);
    if (tasks.pulled) tasks.pulled(step);
    const bool is_over = step > options.steps;
    step_report report;
    if (is_due(options.hash_period_steps, step - 1) || is_over) {
      report.replica_hash = hash_of(local.model(), [&](std::size_t l) { return local[l]; });
    }
    if (tasks.evaluate && (is_due(options.evaluation_period_steps, step - 1) || is_over))
      tasks.evaluate(report);
    if (is_over) {
      report.is_last = true;
      return link.send(report, {});
    }

    const stopwatch compute;
    double agreeing_seconds = 0;
    compute_gradients(local, tasks.next_batch(), report);
    compressor.accumulate_all(local.gradients());
    if (options.agrees_on_selection) {
      const stopwatch agreeing;
      std::vector<double> agreed(compressor.values().begin(), compressor.values().end());
      link.mean_over_workers(std::span(agreed));
      agreeing_seconds = agreeing.seconds();
      compressor.select(agreed);
    }
    const lamina::encoded_frame& frame = compressor.encode();
    report.threshold = compressor.threshold();
    report.compute_seconds = compute.seconds() - agreeing_seconds;

    link.send(report, frame.segments());
    compressor.commit();
    if (is_checkpoint_due(options.checkpoint_period_steps, step, options.steps))
      send_state(link, compressor, tasks);
  }
}

}  // namespace resnet50_ps
