// SPDX-License-Identifier: MIT
#include "launch/training.hpp"

#include <fmt/format.h>
#include <torch/cuda.h>
#include <torch/utils.h>

#include <cstring>
#include <fstream>
#include <lamina/partition.hpp>
#include <lamina/version.hpp>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "data/batches.hpp"
#include "loops/allreduce.hpp"
#include "loops/dense_allreduce.hpp"
#include "loops/node.hpp"
#include "loops/server.hpp"
#include "loops/worker.hpp"
#include "model/passes.hpp"
#include "model/resnet50.hpp"
#include "replay.hpp"
#include "state/saved_run.hpp"

namespace resnet50_ps {
namespace {

constexpr std::size_t evaluation_batch_images = 100;
constexpr std::uint64_t recorded_steps = 6;

training_plan plan_of(const training& run, std::uint64_t steps_done) {
  const options& given = run.given;
  return {
      .steps = given.steps,
      .steps_done = steps_done,
      .agrees_on_selection = run.layer_dropping && given.selection == "agreed",
      .evaluates = !given.no_evaluation && given.replay.empty(),
      .evaluation_period_steps = given.evaluation_period_steps,
      .hash_period_steps = given.mode == "sync" ? std::uint64_t{100} : std::uint64_t{0},
      .checkpoint_period_steps = given.checkpoint_period_steps,
      .saves_model = !given.save.empty(),
  };
}

server_options server_options_of(const training& run, std::uint64_t steps_done) {
  const options& given = run.given;
  return {
      .plan = plan_of(run, steps_done),
      .optimizer = {.learning_rate = given.learning_rate,
                    .momentum = given.momentum,
                    .weight_decay = given.weight_decay,
                    .nesterov = given.nesterov},
      .learning_rate = parse_schedule(given.schedule, given.learning_rate, given.steps, given.warm_up_steps),
      .least_update_seconds = given.server_seconds,
  };
}

lamina::compressor_options compression_of(const training& run, std::size_t sender) {
  const options& given = run.given;
  lamina::compressor_options compression;
  compression.sender = static_cast<std::uint32_t>(sender);
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
  return fmt::format(
      "lamina {}.{}.{}; {} of runs {}; {}; steps {}; evaluations every {}; checkpoints every {}; {}{}{}",
      LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR, LAMINA_VERSION_PATCH, run.name(), given.runs,
      workers_of(run.who), given.steps, given.evaluation_period_steps, given.checkpoint_period_steps,
      (given.degraded ? "degraded; " : std::string()) + (given.no_evaluation ? "not evaluated; " : "") +
          (given.save.empty() ? "" : "saved; ") + (given.load.empty() ? "" : "from " + given.load + "; "),
      given.replay.empty() ? "" : "replayed; ", configuration_of(run, model));
}

// Everyone introduces itself to rank 0, which answers with the steps that are done already. Returns them.
std::uint64_t shake_hands(transport& ranks, const training& run, const lamina::layout& model,
                          std::uint64_t steps_done) {
  const std::string mine = introduction(run, model);
  constexpr std::size_t first = 0;
  if (ranks.rank() > 0) {
    ranks.send({&first, 1}, message_kind::introduction, payload(std::as_bytes(std::span(mine))));
    const message answered = ranks.receive_from_each({&first, 1})[0];
    expect(answered, message_kind::welcome, run.who.name_of(first));
    if (answered.bytes.size() != sizeof steps_done)
      throw link_error("rank 0 gave no answer to an introduction");
    std::memcpy(&steps_done, answered.bytes.data(), sizeof steps_done);
    return steps_done;
  }
  std::vector<std::size_t> others(ranks.ranks() - 1);
  std::iota(others.begin(), others.end(), std::size_t{1});
  for (const message& each : ranks.receive_from_each(others)) {
    expect(each, message_kind::introduction, run.who.name_of(others[each.sender]));
    const std::string theirs(reinterpret_cast<const char*>(each.bytes.data()), each.bytes.size());
    if (theirs == mine) continue;
    throw link_error(fmt::format("{} was started for another run than {}\n  here:  {}\n  there: {}",
                                 run.who.name_of(others[each.sender]), run.who.name_of(0), mine, theirs));
  }
  ranks.send(others, message_kind::welcome, payload(std::as_bytes(std::span(&steps_done, 1))));
  return steps_done;
}

// A worker's part of a run; without a server also that of one.
struct worker_part {
  worker_part(const training& run, std::size_t worker_number, replica& trained)
      : given(run.given),
        data(run.data),
        part{run.who.workers(), worker_number},
        local(trained),
        batches(std::make_unique<batch_stream>(data.train, part, given.batch_images, given.seed)) {
    if (part.worker == 0 && !given.save.empty() && !std::ofstream(given.save + ".part"))
      throw std::runtime_error("cannot make the file " + given.save);
    if (!given.record.empty()) recorder.emplace(given.record, part.worker, given.steps, recorded_steps);
    if (!given.replay.empty())
      player.emplace(given.replay, part.worker, given.compute_seconds, trained.partition().model());
  }

  worker_tasks tasks(transport& ranks) {
    return {
        .compute = [this](std::uint64_t step, step_report& report) { compute(step, report); },
        .evaluate =
            [this, &ranks](step_report& report) {
              evaluate(
                  local, data.test, part, evaluation_batch_images, [&] { ranks.show_life(); }, report);
            },
        .finished =
            [this] {
              if (part.worker == 0) save_model(*local.network().ptr(), given.save);
            },
        .pulled = {},
        .save = [this] { return save_worker(local, *batches); },
        .load =
            [this](std::span<const std::byte> bytes) {
              const batch_stream::position taken = load_worker(bytes, local);
              batches =
                  std::make_unique<batch_stream>(data.train, part, given.batch_images, given.seed, taken);
            },
    };
  }

  void compute(std::uint64_t step, step_report& report) {
    if (player) return player->play(local, report);
    compute_gradients(local, batches->next(), report);
    if (recorder) recorder->record(step, local);
  }

  const options& given;
  const data_sets& data;
  shard part;
  replica& local;
  std::unique_ptr<batch_stream> batches;
  std::optional<gradient_recorder> recorder;
  std::optional<gradient_player> player;
};

worker_options worker_options_of(const training& run, std::size_t sender, std::uint64_t steps_done) {
  return {.plan = plan_of(run, steps_done), .compression = compression_of(run, sender)};
}

// The workers of a machine share its devices out among themselves.
torch::Device device_of(const training& run) {
  if (run.given.device == "cpu") return torch::kCPU;
  return {torch::kCUDA, static_cast<c10::DeviceIndex>(run.place_on_machine % torch::cuda::device_count())};
}

// What the loops report, printed and kept.
struct records {
  records(const training& run, const replica& local, std::uint64_t steps_done)
      : log({.name = run.name(),
             .directory = directory_of(run),
             .command_line = run.given.command_line,
             .workers = run.who.workers(),
             .steps = run.given.steps,
             .interval = run.given.interval,
             .progress_columns = run.given.progress_columns,
             .steps_done = steps_done},
            local.model()),
        tasks{
            .records = {
                .record = [this](const step_metrics& step) { log.record(step); },
                .record_evaluation = [this](std::uint64_t step,
                                            const evaluation& seen) { log.record_evaluation(step, seen); }},
            .save = [&run, &local](const server_state& state) { save_checkpoint(run, local, state); },
        } {}
  records(const records&) = delete;
  records& operator=(const records&) = delete;

  run_log log;
  server_tasks tasks;
};

run_result train_as_server(transport& ranks, const training& run) {
  const options& given = run.given;
  const replica local = make_replica(run);
  server_state from = given.resume ? load_checkpoint(run, local) : server_state();
  shake_hands(ranks, run, local.model(), from.step);
  std::vector<client> clients;
  for (const auto& node : run.who.nodes) clients.push_back({node.front(), node.size()});
  const auto report_loss = [](const std::string& what) {
    fmt::print(stderr, "resnet50_ps: {}; the run goes on without it\n", what);
  };
  server_link link(ranks, clients, given.degraded ? report_loss : std::function<void(const std::string&)>());
  records kept(run, local, from.step);
  const server_options options = server_options_of(run, from.step);
  if (given.mode == "sync") {
    serve(link, local, options, kept.tasks, std::move(from));
  } else {
    serve_asynchronously(link, local, options, kept.tasks);
  }
  return kept.log.result();
}

void train_as_worker(transport& ranks, const training& run) {
  constexpr std::size_t server = 0;
  replica local = make_replica(run, device_of(run));
  const std::uint64_t steps_done = shake_hands(ranks, run, local.model(), 0);
  const std::size_t worker = run.who.worker_on(ranks.rank());
  const std::size_t node = run.who.node_of(ranks.rank());
  const std::size_t leader = run.who.nodes[node].front();
  worker_part part(run, worker, local);
  const worker_options options = worker_options_of(run, node, steps_done);
  const worker_tasks tasks = part.tasks(ranks);
  worker_link link(ranks, ranks.rank() == leader ? server : leader);
  if (ranks.rank() != leader) return work_in_node(link, local, tasks, options);
  if (run.who.nodes[node].size() == 1) return work(link, local, tasks, options);
  std::vector<client> members;
  for (const std::size_t rank : run.who.below(leader)) members.push_back({.rank = rank});
  server_link node_link(ranks, members);
  lead_node(link, node_link, local, tasks, options);
}

run_result train_without_server(transport& ranks, const training& run) {
  replica local = make_replica(run, device_of(run));
  const bool keeps_records = ranks.rank() == 0;
  server_state from = keeps_records && run.given.resume ? load_checkpoint(run, local) : server_state();
  const std::uint64_t steps_done = shake_hands(ranks, run, local.model(), from.step);
  worker_group group(ranks);
  worker_part part(run, group.worker(), local);
  std::optional<records> kept;
  if (keeps_records) kept.emplace(run, local, steps_done);
  if (run.given.topology == "mpi_allreduce") {
    train_by_mpi_allreduce(group, MPI_COMM_WORLD, local, part.tasks(ranks),
                           worker_options_of(run, group.worker(), 0), server_options_of(run, 0),
                           kept ? kept->tasks : server_tasks());
    return kept ? kept->log.result() : run_result();
  }
  train_by_allreduce(group, local, part.tasks(ranks), worker_options_of(run, group.worker(), steps_done),
                     server_options_of(run, steps_done), kept ? kept->tasks : server_tasks(),
                     std::move(from));
  return kept ? kept->log.result() : run_result();
}

}  // namespace

replica make_replica(const training& run, torch::Device device) {
  torch::manual_seed(run.given.seed);
  const model_options network{run.given.classes > 0 ? run.given.classes : run.data.train->classes(),
                              run.given.small_stem ? stem::small : stem::standard};
  resnet50 made(network);
  if (!run.given.load.empty()) load_model(*made, run.given.load);
  return replica{torch::nn::AnyModule(made), run.given.part_elements, device};
}

void check_training(const training& run, bool is_worker) {
  const options& given = run.given;
  const auto refuse_if = [](bool bad, const std::string& why) {
    if (bad) throw std::invalid_argument(why);
  };
  refuse_if(!needs_server(given) && given.mode == "async",
            "--mode async needs a server: not --topology " + given.topology);
  const bool is_plain = given.topology == "mpi_allreduce";
  refuse_if(is_plain && given.runs != "without",
            "--topology mpi_allreduce has no layer dropping: it needs --runs without");
  refuse_if(is_plain && given.transport != "mpi", "--topology mpi_allreduce needs --transport mpi");
  refuse_if(is_plain && (given.checkpoint_period_steps > 0 || given.resume),
            "--topology mpi_allreduce makes no checkpoints");
  const bool is_agreed_allreduce = given.topology == "allreduce";
  refuse_if(is_agreed_allreduce && given.selection != "agreed",
            "--topology allreduce needs --selection agreed: all must send the same layers");
  refuse_if(is_agreed_allreduce && given.payload != "as_is",
            "--topology allreduce adds numbers up on the way: it needs --payload as_is");
  refuse_if(given.workers_per_node && given.topology != "hybrid",
            "--workers-per-node needs --topology hybrid");
  refuse_if(given.degraded && (given.topology != "ps" || given.mode == "async"),
            "--degraded needs a server that waits for every worker: --mode sync and --topology ps");
  refuse_if(given.mode == "async" && given.selection == "agreed",
            "--selection agreed needs workers in step: --mode sync");
  refuse_if(given.degraded && given.runs == "both",
            "--degraded needs --runs with or without: who is lost in one run is missing in the other");
  refuse_if(!given.save.empty() && given.runs == "both",
            "--save needs --runs with or without: it keeps one model");
  refuse_if(!given.load.empty() && given.resume, "--load begins a run, --resume goes on with one: give one");
  refuse_if(
      given.classes > 0 && given.classes < run.data.train->classes(),
      fmt::format("--classes {} are too few: the data has {}", given.classes, run.data.train->classes()));
  refuse_if(given.device == "cuda" && is_worker && !torch::cuda::is_available(),
            "--device cuda: this libtorch finds no CUDA device; use --device cpu");
  refuse_if(given.merge_residuals && given.topology == "hybrid",
            "--merge-residuals needs workers that keep their own: not --topology hybrid");
  if (run.given.mode == "async" && (run.given.checkpoint_period_steps > 0 || run.given.resume)) {
    throw std::invalid_argument("checkpoints need --mode sync: an asynchronous run is in no one state");
  }
  const server_options server = server_options_of(run, 0);
  sgd(lamina::layout({{"any", {1}}}), server.optimizer);
  lamina::partition(lamina::layout({{"any", {1}}}), run.given.part_elements);
  const std::size_t test_images = run.data.test->size().value();
  if (test_images < run.who.workers()) {
    throw std::invalid_argument(
        fmt::format("{} test images are too few for {} workers", test_images, run.who.workers()));
  }
  batch_stream(run.data.train, {run.who.workers(), 0}, run.given.batch_images, run.given.seed);
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

namespace {

run_result play(transport& ranks, const training& run) {
  if (!run.who.has_server) return train_without_server(ranks, run);
  if (run.who.is_server(ranks.rank())) return train_as_server(ranks, run);
  train_as_worker(ranks, run);
  return {};
}

}  // namespace

run_result train(transport& ranks, const training& run) {
  if (!run.given.degraded) return play(ranks, run);
  // A rank that is gone is only lost to the others: one that knows why it ends must say so.
  try {
    return play(ranks, run);
  } catch (const peers_lost&) {
    throw;
  } catch (const std::exception& error) {
    std::vector<std::size_t> told = run.who.below(ranks.rank());
    if (told.empty()) told.push_back(run.who.above(ranks.rank()));
    send_failure(ranks, told, error.what());
    throw;
  }
}

}  // namespace resnet50_ps
