// SPDX-License-Identifier: MIT
#include "training.hpp"

#include <fmt/format.h>
#include <torch/utils.h>

#include <lamina/partition.hpp>
#include <lamina/version.hpp>
#include <map>
#include <memory>
#include <stdexcept>

#include "batches.hpp"
#include "evaluation.hpp"
#include "model.hpp"
#include "saved_run.hpp"
#include "server.hpp"
#include "worker.hpp"

namespace resnet50_ps {
namespace {

constexpr std::size_t evaluation_batch_images = 100;

server_options server_options_of(const training& run) {
  const options& given = run.given;
  return {
      .steps = given.steps,
      .optimizer = {.learning_rate = given.learning_rate,
                    .momentum = given.momentum,
                    .weight_decay = given.weight_decay,
                    .nesterov = given.nesterov},
      .learning_rate = parse_schedule(given.schedule, given.learning_rate, given.steps, given.warm_up_steps),
      .checkpoint_period_steps = given.checkpoint_period_steps,
      .resume = {},
  };
}

lamina::compressor_options compression_of(const training& run, std::size_t worker) {
  const options& given = run.given;
  lamina::compressor_options compression;
  compression.sender = static_cast<std::uint32_t>(worker);
  compression.part_elements = given.part_elements;
  compression.momentum = given.residual_momentum;
  compression.drop_ratio = 0;
  if (!run.layer_dropping) return compression;

  static const std::map<std::string, lamina::payload_type> payloads = {
      {"as_is", lamina::payload_type::as_is},
      {"float16", lamina::payload_type::float16},
      {"bfloat16", lamina::payload_type::bfloat16},
      {"int8", lamina::payload_type::int8},
  };
  compression.drop_ratio = given.drop_ratio;
  compression.warm_up_steps = given.drop_warm_up_steps;
  compression.byte_budget = given.byte_budget;
  compression.max_age = given.max_age_steps;
  compression.payload = payloads.at(given.payload);
  if (given.threshold) {
    compression.refresh = lamina::refresh_schedule::fixed(*given.threshold);
  } else if (given.refresh_steps == 0) {
    compression.refresh = lamina::refresh_schedule::first_step_only();
  } else {
    compression.refresh = lamina::refresh_schedule::every(given.refresh_steps);
  }
  return compression;
}

// Ranks may come from other builds and other command lines: nothing is sent before they are known to be alike.
std::string introduction(const training& run, const lamina::layout& model) {
  const options& given = run.given;
  return fmt::format("lamina {}.{}.{}; {}; steps {}; evaluations every {}; checkpoints every {}; {}",
                     LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR, LAMINA_VERSION_PATCH, run.name(),
                     given.steps, given.evaluation_period_steps, given.checkpoint_period_steps,
                     configuration_of(run, model));
}

// Returns whether the run goes on from a checkpoint.
bool greet_server(worker_link& link, const training& run, const lamina::layout& model) {
  const std::string mine = introduction(run, model);
  const std::span<const std::byte> bytes = std::as_bytes(std::span(mine));
  link.send({}, std::span(&bytes, 1));
  const std::span<const std::byte> answer = link.receive().bytes;
  if (answer.size() != 1) throw link_error("the server gave no answer to an introduction");
  return answer[0] == std::byte{1};
}

void greet_workers(server_link& link, const training& run, const lamina::layout& model, bool resumes) {
  const std::string mine = introduction(run, model);
  for (const message& each : link.receive_from_all()) {
    const std::string theirs(reinterpret_cast<const char*>(each.bytes.data()), each.bytes.size());
    if (theirs == mine) continue;
    throw link_error(
        fmt::format("worker {} was started for another run than the server\n  server: {}\n  worker: {}",
                    each.worker, mine, theirs));
  }
  const std::byte answer{resumes};
  const std::span<const std::byte> bytes(&answer, 1);
  link.send_to_all(std::span(&bytes, 1));
}

}  // namespace

replica make_replica(const training& run) {
  torch::manual_seed(run.given.seed);
  const model_options network{run.data.train->classes(), run.given.small_stem ? stem::small : stem::standard};
  return replica{torch::nn::AnyModule(resnet50(network)), run.given.part_elements};
}

void check_training(const training& run) {
  if (run.given.mode == "async" && (run.given.checkpoint_period_steps > 0 || run.given.resume)) {
    throw std::invalid_argument("checkpoints need --mode sync: an asynchronous run is in no one state");
  }
  const server_options server = server_options_of(run);
  sgd(lamina::layout({{"any", {1}}}), server.optimizer);
  lamina::partition(lamina::layout({{"any", {1}}}), run.given.part_elements);
  const std::size_t test_images = run.data.test->size().value();
  if (test_images < run.workers) {
    throw std::invalid_argument(
        fmt::format("{} test images are too few for {} workers", test_images, run.workers));
  }
  batch_stream(run.data.train, {run.workers, 0}, run.given.batch_images, run.given.seed);
}

void check_output(const training& run) {
  training other = run;
  other.layer_dropping = !run.layer_dropping;
  const bool is_there = has_checkpoints(run) || (run.given.runs == "both" && has_checkpoints(other));
  if (run.given.resume && !is_there) {
    throw std::invalid_argument("there is no checkpoint to resume from in " + run.given.output);
  }
  if (!run.given.resume && !run.given.output.empty() && is_there) {
    throw std::invalid_argument(
        run.given.output +
        " holds checkpoints of an earlier run: go on from them with --resume, or give another "
        "--output");
  }
}

run_result train_as_server(server_link& link, const training& run) {
  const options& given = run.given;
  const replica local = make_replica(run);
  server_options serving = server_options_of(run);
  if (given.resume) serving.resume = load_checkpoint(run, local);
  greet_workers(link, run, local.model(), serving.resume.has_value());
  run_log log({.name = run.name(),
               .directory = directory_of(run),
               .command_line = given.command_line,
               .workers = run.workers,
               .steps = given.steps,
               .interval = given.interval,
               .steps_done = serving.resume ? serving.resume->step : 0},
              local.model());
  const server_tasks tasks = {
      .record = [&](const step_metrics& step) { log.record(step); },
      .record_evaluation = [&](std::uint64_t step,
                               const evaluation& seen) { log.record_evaluation(step, seen); },
      .save = [&](const server_state& state) { save_checkpoint(run, local, state); },
  };
  const auto serve_as_asked = given.mode == "sync" ? serve : serve_asynchronously;
  serve_as_asked(
      link, local.model(), [&](std::size_t l) { return local[l]; }, serving, tasks);
  return log.result();
}

void train_as_worker(worker_link& link, const training& run) {
  const options& given = run.given;
  replica local = make_replica(run);
  const bool resumes = greet_server(link, run, local.model());
  const shard part{link.workers(), link.worker()};
  auto batches = std::make_unique<batch_stream>(run.data.train, part, given.batch_images, given.seed);
  const worker_tasks tasks = {
      .next_batch = [&] { return batches->next(); },
      .evaluate =
          [&](step_report& report) { evaluate(link, local, run.data.test, evaluation_batch_images, report); },
      .pulled = {},
      .save = [&] { return save_worker(local, *batches); },
      .load =
          [&](std::span<const std::byte> bytes) {
            const batch_stream::position taken = load_worker(bytes, local);
            batches =
                std::make_unique<batch_stream>(run.data.train, part, given.batch_images, given.seed, taken);
          },
  };
  const worker_options options = {
      .steps = given.steps,
      .compression = compression_of(run, link.worker()),
      .agrees_on_selection = run.layer_dropping && given.selection == "agreed",
      .evaluation_period_steps = given.evaluation_period_steps,
      .hash_period_steps = given.mode == "sync" ? std::uint64_t{100} : std::uint64_t{0},
      .checkpoint_period_steps = given.checkpoint_period_steps,
      .resumes = resumes,
  };
  work(link, local, tasks, options);
}

}  // namespace resnet50_ps
