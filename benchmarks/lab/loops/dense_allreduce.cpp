// SPDX-License-Identifier: MIT
#include "loops/dense_allreduce.hpp"

#include <algorithm>
#include <vector>

#include "messages/mpi_session.hpp"

namespace lab {
namespace {

constexpr std::size_t bucket_elements = (std::size_t{25} << 20) / sizeof(float);

void sum(std::span<float> values, MPI_Comm workers) {
  while (!values.empty()) {
    const std::span<float> bucket = values.first(std::min(bucket_elements, values.size()));
    check_mpi(MPI_Allreduce(MPI_IN_PLACE, bucket.data(), static_cast<int>(bucket.size()), MPI_FLOAT, MPI_SUM,
                            workers),
              "MPI_Allreduce");
    values = values.subspan(bucket.size());
  }
}

}  // namespace

void train_by_mpi_allreduce(worker_group& group, MPI_Comm workers, replica& local, const worker_tasks& tasks,
                            const worker_options& worker, const server_options& server,
                            const server_tasks& records) {
  const training_plan& plan = worker.plan;
  const lamina::layout& model = local.model();
  sgd optimizer(model, server.optimizer);
  step_log log(model, records.records, group.clock());
  lamina::selection all(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    all.send(l);
    check_mpi(MPI_Bcast(local[l].data(), static_cast<int>(local[l].size()), MPI_FLOAT, 0, workers),
              "MPI_Bcast");
  }
  local.upload();

  std::vector<float> gradients(model.elements());
  for (std::uint64_t step = 1;; ++step) {
    step_report report = examine(local, step, plan, tasks, group.clock(),
                                 [&](std::span<double> statistics) { group.average(statistics); });
    if (plan.is_over(step)) return log_end(group, report, step, log);

    group.clock().take();
    tasks.compute(step, report);
    report.compute_seconds = group.clock().take();
    {
      const work_clock::pause summing(group.clock());
      for (std::size_t l = 0; l < model.layers(); ++l) {
        std::ranges::copy(local.gradient(l), gradients.data() + model.offset(l));
      }
      sum(gradients, workers);
    }
    for (float& each : gradients) each /= static_cast<float>(group.workers());
    optimizer.set_learning_rate(server.learning_rate.at(step));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      optimizer.begin(l, step);
      optimizer.update(l, 0, std::span(gradients).subspan(model.offset(l), model.sizes()[l]), local[l]);
    }
    local.upload();

    // As few as an allreduce can move in and out of each.
    const std::size_t model_bytes = model.elements() * sizeof(float);
    log_step(group, report, step, {.moved_bytes = model_bytes * (group.workers() - 1) / group.workers()},
             log);
    log.finish_step(step, optimizer.learning_rate(), all);
  }
}

}  // namespace lab
