// SPDX-License-Identifier: MIT
#include "launch/roles.hpp"

#include <fmt/format.h>

#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "data/batches.hpp"
#include "launch/handshake.hpp"
#include "launch/local_updates.hpp"
#include "launch/overlap.hpp"
#include "loops/allreduce.hpp"
#include "loops/dense_allreduce.hpp"
#include "loops/local_updates.hpp"
#include "loops/node.hpp"
#include "loops/overlapped.hpp"
#include "loops/streaming.hpp"
#include "model/model_file.hpp"
#include "model/passes.hpp"
#include "records/trace_file.hpp"
#include "state/plan_file.hpp"
#include "state/saved_run.hpp"

namespace lab {
namespace {

constexpr std::size_t evaluation_batch_images = 100;

// A worker's part of a run; without a server also that of one.
struct worker_part {
  worker_part(const training& run, std::size_t worker_number, replica& trained)
      : options(run.options),
        data(run.data),
        part{run.topology.workers(), worker_number},
        local(trained),
        batches(std::make_unique<batch_stream>(data.train, part, options.batch_images, options.seed)),
        gradients([this](std::uint64_t, replica& of, step_report& report) {
          compute_gradients(of, batches->next(), report);
        }) {
    if (part.worker == 0 && !options.save.empty() && !std::ofstream(options.save + ".part"))
      throw std::runtime_error("cannot make the file " + options.save);
    if (run.added.gradients)
      gradients = run.added.gradients(options, part.worker, local.partition().model(), std::move(gradients));
  }
  worker_part(const worker_part&) = delete;
  worker_part& operator=(const worker_part&) = delete;

  worker_tasks tasks(transport& ranks) {
    return {
        .compute = [this](std::uint64_t step, step_report& report) { gradients(step, local, report); },
        .evaluate =
            [this, &ranks](step_report& report) {
              evaluate(
                  local, data.test, part, evaluation_batch_images, [&] { ranks.show_life(); }, report);
            },
        .finished =
            [this] {
              if (part.worker == 0) save_model(*local.network().ptr(), options.save);
            },
        .pulled = {},
        .save = [this] { return save_worker(local, *batches); },
        .load =
            [this](std::span<const std::byte> bytes) {
              const batch_stream::position taken = load_worker(bytes, local);
              batches =
                  std::make_unique<batch_stream>(data.train, part, options.batch_images, options.seed, taken);
            },
    };
  }

  const lab::options& options;
  const data_sets& data;
  shard part;
  replica& local;
  std::unique_ptr<batch_stream> batches;
  gradient_source gradients;
};

// What the loops report, printed and kept.
struct records {
  records(const training& run, const replica& local, std::uint64_t steps_done)
      : log({.name = run.name(),
             .directory = directory_of(run),
             .command_line = run.options.command_line,
             .workers = run.topology.workers(),
             .steps = run.options.steps,
             .interval = run.options.interval,
             .progress_columns = run.options.progress_columns,
             .steps_done = steps_done},
            local.model()),
        tasks{
            .records = {
                .record = [this](const step_metrics& step) { log.record(step); },
                .record_evaluation = [this](std::uint64_t step,
                                            const evaluation& seen) { log.record_evaluation(step, seen); }},
            .updated = run.added.updated,
            .save = [&run, &local](const server_state& state) { save_checkpoint(run, local, state); },
        } {}
  records(const records&) = delete;
  records& operator=(const records&) = delete;

  run_log log;
  server_tasks tasks;
};

run_result train_as_server(transport& ranks, const training& run, const replica& local) {
  const lab::options& options = run.options;
  server_state from = options.resume ? load_checkpoint(run, local) : server_state();
  shake_hands(ranks, run, local.model(), from.step);
  std::vector<client> clients;
  for (const auto& node : run.topology.nodes) clients.push_back({node.front(), node.size()});
  const auto report_loss = [](const std::string& what) {
    fmt::print(stderr, "lab: {}; the run goes on without it\n", what);
  };
  server_link link(ranks, clients,
                   options.degraded ? report_loss : std::function<void(const std::string&)>());
  records kept(run, local, from.step);
  const server_options serving = server_options_of(run, from.step);
  if (options.updates == "local") {
    serve_local_updates(link, local, serving, local_options_of(run), kept.tasks, std::move(from));
  } else if (options.decide == "as_ready" && options.overlap != "none") {
    serve_in_parts(link, local, serving, streaming_options_of(options), kept.tasks, std::move(from));
  } else if (options.mode == "sync") {
    serve(link, local, serving, kept.tasks, std::move(from));
  } else {
    serve_asynchronously(link, local, serving, kept.tasks);
  }
  kept.log.record_counters(ranks.counters());
  return kept.log.result();
}

void train_as_worker(transport& ranks, const training& run, replica& local) {
  constexpr std::size_t server = 0;
  const std::uint64_t steps_done = shake_hands(ranks, run, local.model(), 0);
  const std::size_t worker = run.topology.worker_on(ranks.rank());
  const std::size_t node = run.topology.node_of(ranks.rank());
  const std::size_t leader = run.topology.nodes[node].front();
  worker_part part(run, worker, local);
  const worker_options options = worker_options_of(run, node, steps_done);
  const worker_tasks tasks = part.tasks(ranks);
  worker_link link(ranks, ranks.rank() == leader ? server : leader);
  if (run.options.updates == "local") {
    return work_on_local_updates(link, local, tasks, options, server_options_of(run, steps_done),
                                 local_options_of(run));
  }
  if (run.options.decide == "as_ready")
    return work_as_ready(link, local, tasks, options, streaming_options_of(run.options));
  if (ranks.rank() != leader) return work_in_node(link, local, tasks, options);
  if (run.topology.nodes[node].size() == 1) return work(link, local, tasks, options);
  std::vector<client> members;
  for (const std::size_t rank : run.topology.below(leader)) members.push_back({.rank = rank});
  server_link node_link(ranks, members);
  lead_node(link, node_link, local, tasks, options);
}

// Of worker 0: the plan that the run begins with, if it is given one, and where its own is kept.
void add_plan_files(const training& run, overlap_options& overlap) {
  const std::string& given = run.options.plan;
  if (!given.empty()) overlap.earlier_plan = read_plan(given);
  overlap.earlier_plan_is_from = given.empty() ? "the checkpoint" : given;
  if (const std::string directory = directory_of(run); !directory.empty())
    overlap.planned = [directory](const lamina::collectives::plan& made) { write_plan(directory, made); };
}

run_result train_without_server(transport& ranks, const training& run, replica& local) {
  const bool keeps_records = ranks.rank() == 0;
  server_state from = keeps_records && run.options.resume ? load_checkpoint(run, local) : server_state();
  const std::uint64_t steps_done = shake_hands(ranks, run, local.model(), from.step);
  worker_group group(ranks);
  worker_part part(run, group.worker(), local);
  std::optional<records> kept;
  if (keeps_records) kept.emplace(run, local, steps_done);
  if (run.is_plain()) {
    train_by_mpi_allreduce(group, run.communicator, local, part.tasks(ranks),
                           worker_options_of(run, group.worker(), 0), server_options_of(run, 0),
                           kept ? kept->tasks : server_tasks());
    return kept ? kept->log.result() : run_result();
  }
  const worker_options working = worker_options_of(run, group.worker(), steps_done);
  const server_options serving = server_options_of(run, steps_done);
  const server_tasks recording = kept ? kept->tasks : server_tasks();
  if (run.options.updates == "local") {
    train_on_local_updates(group, local, part.tasks(ranks), working, serving, local_options_of(run),
                           recording, std::move(from));
  } else if (run.options.overlap == "none") {
    train_by_allreduce(group, local, part.tasks(ranks), working, serving, recording, std::move(from));
  } else {
    const trace_file trace(run.options.timeline, group.worker(), local.model());
    overlap_options overlap = overlap_options_of(run);
    overlap.record = trace.events();
    if (keeps_records) add_plan_files(run, overlap);
    const auto channel = ranks.make_channel();
    train_overlapped(group, *channel, local, part.tasks(ranks), working, serving, overlap, recording,
                     std::move(from));
    trace.write();
  }
  if (!kept) return {};
  kept->log.record_counters(ranks.counters());
  return kept->log.result();
}

run_result play(transport& ranks, const training& run, replica& local) {
  if (!run.topology.has_server) return train_without_server(ranks, run, local);
  if (run.topology.is_server(ranks.rank())) return train_as_server(ranks, run, local);
  train_as_worker(ranks, run, local);
  return {};
}

}  // namespace

run_result train(transport& ranks, const training& run, replica& local) {
  if (!run.options.degraded) return play(ranks, run, local);
  // A rank that is gone is only lost to the others: one that knows why it ends must say so.
  try {
    return play(ranks, run, local);
  } catch (const peers_lost&) {
    throw;
  } catch (const std::exception& error) {
    std::vector<std::size_t> told = run.topology.below(ranks.rank());
    if (told.empty()) told.push_back(run.topology.above(ranks.rank()));
    send_failure(ranks, told, error.what());
    throw;
  }
}

}  // namespace lab
