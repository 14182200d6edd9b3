// SPDX-License-Identifier: MIT
// benchmarks/lab with what an experiment on a network adds: gradients that are recorded and replayed, and seconds that
// computing takes on other machines. See --help.
#include <CLI/CLI.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "launch/numbers.hpp"
#include "launch/program.hpp"
#include "replay.hpp"

namespace {

using namespace lab;

struct network_options {
  std::string record;  ///< directory; empty: nothing is recorded
  std::uint64_t recorded_steps = 6;
  std::string replay;  ///< directory; empty: gradients are computed
  bool by_layer = false;
  double compute_seconds = 0;
  double server_seconds = 0;
};

void add_network_options(CLI::App& app, network_options& network) {
  const std::string group = "Experiments on a network";
  CLI::Option* record =
      app.add_option("--record", network.record,
                     "directory for the gradients of each worker's last steps, and for when in the last "
                     "one each of them was ready")
          ->group(group);
  app.add_option("--record-steps", network.recorded_steps,
                 "how many steps' gradients are kept; 0: none, which is enough where everything is sent")
      ->check(counted)
      ->needs(record)
      ->group(group);
  CLI::Option* replay =
      app.add_option("--replay", network.replay,
                     "directory of recorded gradients, which the workers send in place of computing any")
          ->excludes(record)
          ->group(group);
  app.add_flag("--by-layer", network.by_layer,
               "the seconds of computing pass layer by layer, forward and backward, as they did where the "
               "gradients were recorded; with --runs without no gradients need be recorded")
      ->needs(replay)
      ->group(group);
  app.add_option("--compute-seconds", network.compute_seconds,
                 "what it takes a worker to come by its gradients, waited out")
      ->check(CLI::Range(0.0, 1e6))
      ->needs(replay)
      ->group(group);
  app.add_option("--server-seconds", network.server_seconds,
                 "what a step takes the synchronous server, waited out if it is quicker")
      ->check(CLI::Range(0.0, 1e6))
      ->needs(replay)
      ->group(group);
}

gradient_source gradients_of(const network_options& network, const lab::options& options,
                             std::size_t worker, const lamina::layout& model, gradient_source compute) {
  if (!network.replay.empty() && network.by_layer) {
    const auto needed =
        options.runs == "without" ? paced_player::gradients::any : paced_player::gradients::recorded;
    const auto player =
        std::make_shared<paced_player>(network.replay, worker, network.compute_seconds, model, needed);
    return [player](std::uint64_t, replica& local, step_report& report) { player->play(local, report); };
  }
  if (!network.replay.empty()) {
    const auto player =
        std::make_shared<gradient_player>(network.replay, worker, network.compute_seconds, model);
    return [player](std::uint64_t, replica& local, step_report& report) { player->play(local, report); };
  }
  if (network.record.empty()) return compute;
  const gradient_recorder recorder(network.record, worker, options.steps, network.recorded_steps);
  return [recorder, compute = std::move(compute), directory = network.record, worker, last = options.steps](
             std::uint64_t step, replica& local, step_report& report) {
    if (step == last && worker == 0) {
      step_profile::of(local, [&] { compute(step, local, report); }).write(directory);
    } else {
      compute(step, local, report);
    }
    recorder.record(step, local);
  };
}

}  // namespace

int main(int argc, char** argv) {
  network_options network;
  const experiment added = {
      .add_options = [&](CLI::App& app) { add_network_options(app, network); },
      .adjust =
          [&](lab::options& options) {
            if (network.replay.empty()) return;
            options.no_evaluation = true;  // what is replayed trains nothing
            options.experiment = "replayed; ";
          },
      .gradients =
          [&](const lab::options& options, std::size_t worker, const lamina::layout& model,
              gradient_source compute) {
            return gradients_of(network, options, worker, model, std::move(compute));
          },
      .updated =
          [&](double server_seconds) {
            std::this_thread::sleep_for(
                std::chrono::duration<double>(network.server_seconds - server_seconds));
          },
  };
  return run_program(argc, argv, added);
}
