// SPDX-License-Identifier: MIT
#include "launch/program.hpp"

#include <fmt/format.h>
#include <torch/utils.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <lamina/error.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "launch/launch_info.hpp"
#include "launch/roles.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "records/run_log.hpp"

namespace resnet50_ps {
namespace {

std::string reason_for(const std::exception& error) {
  return dynamic_cast<const lamina::non_finite_gradient*>(&error) == nullptr
             ? error.what()
             : fmt::format("{}; training has diverged, try a lower --learning-rate", error.what());
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const std::string& who, const std::string& reason) {
  fmt::print(stderr, "resnet50_ps: {}: {}\n", who, reason);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  std::abort();
}

// Not through MPI_Finalize, where all wait for all, and some may be lost.
[[noreturn]] void end_alone(int status) {
  std::fflush(nullptr);
  std::_Exit(status);
}

void make_file(const std::string& name) {
  if (name.empty()) return;
  if (!std::ofstream(name)) throw std::runtime_error("cannot make the file " + name);
}

run_result train_in_process(const training& run) {
  run_result result;
  in_process_options ends{.name_of = [&](std::size_t rank) { return run.topology.name_of(rank); },
                          .on_death = {}};
  if (run.options.degraded) {
    ends.on_death = [&](std::size_t rank, const std::exception& error) {
      fmt::print(stderr, "resnet50_ps: {}: {}\n", run.topology.name_of(rank), reason_for(error));
    };
  }
  const auto body = [&](transport& ranks) {
    torch::set_num_threads(thread_count(run.options, run.topology, {}));  // counts for this thread alone
    replica local = make_replica(run, !run.topology.is_server(ranks.rank()));
    run_result mine = train(ranks, run, local);
    if (ranks.rank() == 0) result = std::move(mine);
  };
  run_in_process(run.topology.ranks(), body, ends);
  return result;
}

// Rank 0 knows the result.
run_result train_over_mpi(const training& run, const launch_info& here, replica& local) {
  const std::size_t rank = here.this_rank();
  try {
    const auto timeout_of = [&](std::size_t awaited) {
      return std::chrono::seconds(run.options.timeout_seconds) * run.topology.patience(rank, awaited);
    };
    mpi_transport ranks(MPI_COMM_WORLD,
                        {.max_message_bytes = largest_message_bytes(run, local),
                         .timeout_of = timeout_of,
                         .exchange_timeout = std::chrono::seconds(2 * run.options.timeout_seconds),
                         .name_of = [&](std::size_t each) { return run.topology.name_of(each); },
                         .above = run.topology.above(rank),
                         .life_period = std::chrono::milliseconds(250 * run.options.timeout_seconds)});
    return train(ranks, run, local);
  } catch (const std::exception& error) {
    // Here, where the reason is known; the other ranks may wait for this one for ever.
    if (!run.options.degraded) end_all_ranks(run.topology.name_of(rank), reason_for(error));
    fmt::print(stderr, "resnet50_ps: {}: {}\n", run.topology.name_of(rank), reason_for(error));
    end_alone(EXIT_FAILURE);
  }
}

int run(const resnet50_ps::options& options, const launch_info& here, const experiment& added) {
  training described{.options = options,
                     .data = {},
                     .topology = {},
                     .layer_dropping = options.runs == "with",
                     .added = added};
  const bool prepared = all_succeed(here, [&] {
    described.topology = find_topology(options, here);
    torch::set_num_threads(thread_count(options, described.topology, here));
    described.data = open_data(options.data, {options.image_size_pixels, options.seed});
    if (here.rank == 0) check_output(described);  // the files are on its machine
    described.place_on_machine = workers_here(described.topology, here, here.this_rank());
    check_training(described,
                   !described.topology.is_server(here.this_rank()) || options.transport == "inprocess");
  });
  if (!prepared) return EXIT_FAILURE;

  if (here.rank == 0) {
    const data_sets& data = described.data;
    fmt::print(
        "ResNet-50 v1, {}: {} training and {} test images of {} classes, {} x {} pixels; {} workers x {} "
        "images\n",
        options.data, data.train->size().value(), data.test->size().value(), data.train->classes(),
        data.train->image_size_pixels(), data.train->image_size_pixels(), described.topology.workers(),
        options.batch_images);
    for (const std::string& note : data.notes) fmt::print(stderr, "resnet50_ps: {}\n", note);
  }
  std::vector<run_result> results;
  for (const bool layer_dropping : {false, true}) {
    if (options.runs == (layer_dropping ? "without" : "with")) continue;
    described.layer_dropping = layer_dropping;
    if (options.transport == "inprocess") {
      results.push_back(train_in_process(described));
      continue;
    }
    std::optional<replica> local;  // before any rank waits for messages, since one may fail to make it
    if (!all_succeed(
            here, [&] { local = make_replica(described, !described.topology.is_server(here.this_rank())); }))
      return EXIT_FAILURE;
    results.push_back(train_over_mpi(described, here, *local));
  }
  if (here.rank == 0) {
    print_table(results);
    make_file(options.done_file);
  }
  if (options.degraded && options.transport == "mpi") end_alone(EXIT_SUCCESS);
  return EXIT_SUCCESS;
}

int guarded_main(int argc, char** argv, const experiment& added) {
  const mpi_session session(argc, argv);
  const launch_info here = find_launch_info();
  try {
    parsed command = parse_options(argc, argv, added.add_options);
    if (added.adjust) added.adjust(command.options);
    if (const std::optional<int> code = first_exit_code(command, here)) return *code;
    return run(command.options, here, added);
  } catch (const std::exception& error) {
    end_all_ranks(fmt::format("rank {}", here.rank), reason_for(error));
  }
}

}  // namespace

int run_program(int argc, char** argv, const experiment& added) {
  try {
    return guarded_main(argc, argv, added);
  } catch (const std::exception& error) {
    fmt::print(stderr, "resnet50_ps: {}\n", error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace resnet50_ps
