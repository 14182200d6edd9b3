// SPDX-License-Identifier: MIT
#include "loops/worker.hpp"

#include <memory>
#include <string>
#include <vector>

#include "model/passes.hpp"

namespace lab {

void work(worker_link& server, replica& local, const worker_tasks& tasks, const worker_options& options) {
  const training_plan& plan = options.plan;
  // Shared with the frames on their way, which lie in its residual.
  const auto compressor =
      std::make_shared<lamina::gradient_compressor<float>>(local.partition().model(), options.compression);
  gradient_way way(plan.losses, compressor->parts(), options.compression.payload);
  if (plan.steps_done > 0) load_state(server.receive_states(1)[0], compressor.get(), tasks);
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    apply_parameters(server.receive_parameters(), server.name_of_server(), local, step);
    step_report report = examine(local, step, plan, tasks, server.clock(),
                                 [&](std::span<double> statistics) { server.average(statistics); });
    if (plan.is_over(step)) return server.finish(report);

    tasks.compute(step, report);
    send_gradients(server, compressor, way, local, plan, step, report);

    if (plan.makes_checkpoint_after(step)) server.send_states({{save_state(compressor.get(), tasks)}});
  }
}

void send_gradients(worker_link& server,
                    const std::shared_ptr<lamina::gradient_compressor<float>>& compressor, gradient_way& way,
                    const replica& local, const training_plan& plan, std::uint64_t step, step_report report) {
  compressor->accumulate_all(local.gradients());
  if (plan.agrees_on_selection) {
    std::vector<double> values(compressor->values().begin(), compressor->values().end());
    server.average(values);
    compressor->select(values);
  }
  const lamina::encoded_frame& frame = compressor->encode();
  report.threshold = compressor->threshold();
  way.send(server, compressor, frame, step, report);
}

void apply_parameters(const message& parameters, const std::string& sender, replica& local,
                      std::uint64_t step) {
  write_parameters(parameters, sender, local.model(), step, [&](std::size_t l) { return local[l]; });
  local.upload();
}

step_report examine(replica& local, std::uint64_t step, const training_plan& plan, const worker_tasks& tasks,
                    work_clock& clock, const average_over_workers& average) {
  if (tasks.pulled) tasks.pulled(step);
  step_report report;
  if (plan.compares_replicas_before(step)) report.replica_hash = hash_of(local);
  if (!plan.averages_statistics_before(step)) return report;
  const work_clock::pause examining(clock);
  const stopwatch whole;
  average_statistics(local, average);
  if (plan.saves_model_before(step) && tasks.finished) tasks.finished();
  if (plan.evaluates_before(step) && tasks.evaluate) tasks.evaluate(report);
  report.evaluation_seconds = whole.seconds();
  return report;
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

}  // namespace lab
