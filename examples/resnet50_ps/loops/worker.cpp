// SPDX-License-Identifier: MIT
#include "loops/worker.hpp"

#include <vector>

#include "loops/worker_step.hpp"
#include "records/metrics.hpp"

namespace resnet50_ps {

void work(worker_link& link, replica& local, const worker_tasks& tasks, const worker_options& options) {
  lamina::gradient_compressor<float> compressor(local.partition().model(), options.compression);
  if (options.steps_done > 0) load_state(link.receive_state(), &compressor, tasks);
  for (std::uint64_t step = options.steps_done + 1;; ++step) {
    pull(link, local, step);
    if (tasks.pulled) tasks.pulled(step);
    step_report report = report_on_replica(local, step, tasks, options);
    if (report.is_last) {
      link.add_node(step, {}, report);
      return link.send(report, {});
    }

    const stopwatch compute;
    tasks.compute(step, report);
    report.compute_seconds = compute.seconds();
    link.add_node(
        step, [&](std::size_t l) { return local.gradient(l); }, report);

    const stopwatch compression;
    compressor.accumulate_all(local.gradients());
    double agreeing_seconds = 0;
    if (options.agrees_on_selection) {
      const stopwatch agreeing;
      std::vector<double> agreed(compressor.values().begin(), compressor.values().end());
      link.agree(agreed);
      agreeing_seconds = agreeing.seconds();
      compressor.select(agreed);
    }
    const lamina::encoded_frame& frame = compressor.encode();
    report.threshold = compressor.threshold();
    report.compute_seconds += compression.seconds() - agreeing_seconds;

    link.send(report, frame.segments());
    compressor.commit();
    if (is_checkpoint_due(options.checkpoint_period_steps, step, options.steps))
      link.send_state(save_state(&compressor, tasks));
  }
}

}  // namespace resnet50_ps
