// SPDX-License-Identifier: MIT
// The baseline: all workers sum their gradients by MPI_Allreduce and update their own parameters. Nothing is dropped.
#include "training.hpp"

void work_by_allreduce(const run& of) {
  replica own(of);
  torch::optim::SGD sgd(fragments_of(own.parameters, of.with.fragment), torch::optim::SGDOptions(0).momentum(of.with.momentum));
  for (std::uint64_t step = 1;; ++step) {
    report told;
    if (of.tests_before(step)) own.test(told);
    if (step > of.with.steps) {
      told.checksum = checksum_of(own.parameters);
      of.who.send(std::as_bytes(std::span(&told, 1)), 0, report_tag);
      return;
    }
    own.compute(step, told);
    of.who.send(std::as_bytes(std::span(&told, 1)), 0, report_tag);
    std::vector<torch::Tensor> gradients = lamina::gradients_of(own.parameters);
    for (torch::Tensor& each : gradients) {
      MPI_Allreduce(MPI_IN_PLACE, each.data_ptr(), static_cast<int>(each.numel()), MPI_FLOAT, MPI_SUM, of.who.all);
      each.div_(of.who.workers);
    }
    update(sgd, fragments_of(gradients, of.with.fragment), of.rate(step));
  }
}

records watch_allreduce(const run& of) {
  const std::size_t elements = lamina::layout_of(resnet50(of.data.train->classes())).elements();
  records log(of.title, of.directory, of.with.steps, 0, of.who.workers, elements);
  std::printf("  no server, no layer dropping; a ring sends 2 (W - 1) / W of the gradients from each worker\n");
  auto begin = clock_type::now();
  for (std::uint64_t step = 1;; ++step) {
    step_record record = {.step = step};
    add_reports(record.told, of.who.all_workers, of.who);
    record.seconds = seconds_since(begin);
    if (step > of.with.steps) {
      log.finish(record.told);
      return log;
    }
    record.up_bytes = record.down_bytes = 2.0 * (of.who.workers - 1) / of.who.workers * 4.0 * static_cast<double>(elements);
    log.add(record);
    begin = clock_type::now();
  }
}
