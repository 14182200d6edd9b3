// SPDX-License-Identifier: MIT
// The baseline: all workers sum their gradients by MPI_Allreduce and update their own parameters. Nothing is dropped.
#include <lamina/lamina.hpp>

#include "training.hpp"

void work_by_allreduce(const run& of) {
  replica own(of);
  const lamina::partition cut(lamina::layout_of(own.network), of.with.fragment);
  fragment_sgd sgd(own.parameters, cut, of.with.momentum);
  MPI_Comm workers = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 1, of.who.rank, &workers);
  for (std::uint64_t step = 1;; ++step) {
    report told;
    if (of.tests_before(step)) own.test(told);
    if (step > of.with.steps) {
      told.checksum = checksum_of(own.parameters);
      send_report(told, of.who);
      break;
    }
    own.compute(step, told);
    send_report(told, of.who);
    std::vector<torch::Tensor> gradients = lamina::gradients_of(own.parameters);
    for (torch::Tensor& each : gradients) {
      MPI_Allreduce(MPI_IN_PLACE, each.data_ptr(), static_cast<int>(each.numel()), MPI_FLOAT, MPI_SUM,
                    workers);
      each.div_(of.who.workers);
    }
    sgd.step(lamina::parts_of(gradients, cut), of.rate(step));
  }
  MPI_Comm_free(&workers);
}

records watch_allreduce(const run& of) {
  MPI_Comm none = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, MPI_UNDEFINED, 0, &none);
  const resnet50 network(of.data.train->classes());
  const std::size_t model_bytes = lamina::layout_of(network).elements() * sizeof(float);
  records log(of.title, of.directory, of.with.steps, 0);
  std::printf(
      "  no server, no layer dropping; a ring sends 2 (W - 1) / W of the gradients from each worker\n");
  auto begin = clock_type::now();
  for (std::uint64_t step = 1;; ++step) {
    step_reports reports;
    reports.receive_all(of.who);
    reports.log_test(log, step - 1);
    if (step > of.with.steps) {
      reports.compare(reports.first_checksum());
      return log;
    }
    const double share = 2.0 * (of.who.workers - 1) / of.who.workers;
    step_record record;
    record.step = step;
    record.up_bytes = record.down_bytes = share * static_cast<double>(model_bytes);
    record.seconds = seconds_since(begin);
    reports.put_into(record);
    log.add(record, model_bytes);
    begin = clock_type::now();
  }
}
