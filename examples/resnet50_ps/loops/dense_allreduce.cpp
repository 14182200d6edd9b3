// SPDX-License-Identifier: MIT
#include "loops/dense_allreduce.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "loops/worker_step.hpp"
#include "messages/mpi_transport.hpp"
#include "records/metrics.hpp"

namespace resnet50_ps {
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
  const lamina::layout& model = local.model();
  sgd optimizer(model, server.optimizer);
  step_summary summary(model);
  evaluation_log evaluations;
  lamina::selection all(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    all.send(l);
    check_mpi(MPI_Bcast(local[l].data(), static_cast<int>(local[l].size()), MPI_FLOAT, 0, workers),
              "MPI_Bcast");
  }
  local.upload();

  std::vector<float> gradients(model.elements());
  for (std::uint64_t step = 1;; ++step) {
    if (tasks.pulled) tasks.pulled(step);
    step_report report = report_on_replica(local, step, tasks, worker);
    const std::vector<message> replicas = group.gather(report, {});
    if (group.worker() == 0) {
      take_reports(
          replicas, step, [&] { return report.replica_hash; },
          [&](std::size_t w) { return group.name_of(w); }, evaluations, records);
    }
    if (report.is_last) return;

    const stopwatch compute;
    tasks.compute(step, report);
    report.compute_seconds = compute.seconds();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::ranges::copy(local.gradient(l), gradients.data() + model.offset(l));
    }
    sum(gradients, workers);

    const stopwatch updating;
    const float learning_rate = server.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    for (float& each : gradients) each /= static_cast<float>(group.workers());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      optimizer.begin(l, step);
      optimizer.update(l, 0, std::span(gradients).subspan(model.offset(l), model.sizes()[l]), local[l]);
    }
    local.upload();
    const double update_seconds = updating.seconds();

    const std::vector<message> reports = group.gather(report, {});
    if (group.worker() == 0) {
      // As few as an allreduce can move in and out of each.
      const std::size_t moved_bytes =
          model.elements() * sizeof(float) * (group.workers() - 1) / group.workers();
      for (const message& each : reports) summary.add_report(each.report, moved_bytes);
      summary.add_published(moved_bytes, group.workers());
      summary.add_arrived(all);
      summary.add_server_seconds(update_seconds);
      const step_metrics metrics = summary.finish(step, learning_rate);
      if (records.record) records.record(metrics);
    }
  }
}

}  // namespace resnet50_ps
