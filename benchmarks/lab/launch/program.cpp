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
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "launch/launch_info.hpp"
#include "launch/roles.hpp"
#include "launch/udp_ranks.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "records/run_log.hpp"

namespace lab {
namespace {

std::string reason_for(const std::exception& error) {
  return dynamic_cast<const lamina::non_finite_gradient*>(&error) == nullptr
             ? error.what()
             : fmt::format("{}; training has diverged, try a lower --learning-rate", error.what());
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const std::string& who, const std::string& reason) {
  fmt::print(stderr, "lab: {}: {}\n", who, reason);
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
                          .on_death = {},
                          .losses = network_of(run)};
  if (run.options.degraded) {
    ends.on_death = [&](std::size_t rank, const std::exception& error) {
      fmt::print(stderr, "lab: {}: {}\n", run.topology.name_of(rank), reason_for(error));
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

std::size_t rank_in(MPI_Comm communicator) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  return static_cast<std::size_t>(rank);
}

std::unique_ptr<transport> meet_over_mpi(const training& run, const replica& local, std::size_t rank) {
  const auto timeout_of = [&](std::size_t awaited) {
    return std::chrono::seconds(run.options.timeout_seconds) * run.topology.patience(rank, awaited);
  };
  return std::make_unique<mpi_transport>(
      run.communicator,
      mpi_transport_options{.max_message_bytes = largest_message_bytes(run, local),
                            .timeout_of = timeout_of,
                            .exchange_timeout = std::chrono::seconds(2 * run.options.timeout_seconds),
                            .name_of = [&](std::size_t each) { return run.topology.name_of(each); },
                            .above = run.topology.above(rank),
                            .life_period = std::chrono::milliseconds(250 * run.options.timeout_seconds)});
}

// Rank 0 of the run knows the result.
run_result train_over_ranks(const training& run, replica& local) {
  const std::size_t rank = rank_in(run.communicator);
  try {
    const std::unique_ptr<transport> ranks =
        run.options.transport == "udp" ? meet_over_udp(run, local) : meet_over_mpi(run, local, rank);
    return train(*ranks, run, local);
  } catch (const std::exception& error) {
    // Here, where the reason is known; the other ranks may wait for this one for ever.
    if (!run.options.degraded) end_all_ranks(run.topology.name_of(rank), reason_for(error));
    fmt::print(stderr, "lab: {}: {}\n", run.topology.name_of(rank), reason_for(error));
    end_alone(EXIT_FAILURE);
  }
}

// What worker 0 knows, to the server, which sleeps between looks: MPI's own wait would take a core from the workers.
void hand_to_server(run_summary& summary, bool is_server) {
  static_assert(std::is_trivially_copyable_v<run_summary>);
  constexpr int worker_0 = 1;
  MPI_Request request = MPI_REQUEST_NULL;
  if (is_server) {
    check_mpi(MPI_Irecv(&summary, sizeof summary, MPI_BYTE, worker_0, 0, MPI_COMM_WORLD, &request),
              "MPI_Irecv");
  } else {
    check_mpi(MPI_Isend(&summary, sizeof summary, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &request), "MPI_Isend");
  }
  for (int is_done = 0; is_done == 0; std::this_thread::sleep_for(std::chrono::milliseconds(10)))
    check_mpi(MPI_Test(&request, &is_done, MPI_STATUS_IGNORE), "MPI_Test");
}

// The run to compare with, in which a server has no part but to keep the result.
std::optional<run_result> train_plainly(const training& compared, const launch_info& here) {
  training plain = plain_run(compared);
  const bool is_server = compared.topology.is_server(here.this_rank());
  std::optional<replica> local;
  if (!all_succeed(here, [&] {
        if (!is_server) local = make_replica(plain, true);
      }))
    return std::nullopt;
  check_mpi(MPI_Comm_split(MPI_COMM_WORLD, is_server ? MPI_UNDEFINED : 0, here.rank, &plain.communicator),
            "MPI_Comm_split");
  run_result result = {plain.name(), {}};
  if (!is_server) {
    result = train_over_ranks(plain, *local);
    check_mpi(MPI_Comm_free(&plain.communicator), "MPI_Comm_free");
  }
  if (compared.topology.has_server && here.rank <= 1) hand_to_server(result.summary, is_server);
  return result;
}

int run(const lab::options& options, const launch_info& here, const experiment& added) {
  training described{.options = options,
                     .data = {},
                     .topology = {},
                     .layer_dropping = options.runs == "with",
                     .added = added};
  const bool prepared = all_succeed(here, [&] {
    described.topology = find_topology(options, here);
    torch::set_num_threads(thread_count(options, described.topology, here));
    described.data = open_data(options.data, {options.image_size_pixels, options.seed});
    if (options.transport == "udp") described.paths = udp_paths_of(options, here);
    if (here.rank == 0) check_output(described);  // the files are on its machine
    described.place_on_machine = workers_here(described.topology, here, here.this_rank());
    check_training(described,
                   !described.topology.is_server(here.this_rank()) || options.transport == "inprocess");
  });
  if (!prepared) return EXIT_FAILURE;

  if (here.rank == 0) {
    const data_sets& data = described.data;
    fmt::print(
        "{}, {}: {} training and {} test images of {} classes, {} x {} pixels; {} workers x {} "
        "images\n",
        options.network == "vgg16" ? "VGG-16" : "ResNet-50 v1", options.data, data.train->size().value(),
        data.test->size().value(), data.train->classes(), data.train->image_size_pixels(),
        data.train->image_size_pixels(), described.topology.workers(), options.batch_images);
    for (const std::string& note : data.notes) fmt::print(stderr, "lab: {}\n", note);
  }
  std::fflush(stdout);
  std::vector<run_result> results;
  if (options.runs == "all") {
    const std::optional<run_result> plain = train_plainly(described, here);
    if (!plain) return EXIT_FAILURE;
    results.push_back(*plain);
  }
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
    results.push_back(train_over_ranks(described, *local));
  }
  if (here.rank == 0) {
    print_table(results);
    make_file(options.done_file);
  }
  if (options.degraded && options.transport != "inprocess") end_alone(EXIT_SUCCESS);
  return EXIT_SUCCESS;
}

int guarded_main(int argc, char** argv, const experiment& added) {
  parsed command = parse_options(argc, argv, added.add_options);
  // Collectives beside the computation have a thread that calls MPI as well.
  const bool overlaps = command.options.overlap != "none";
  const mpi_session session(argc, argv, overlaps ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);
  const launch_info here = find_launch_info();
  try {
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
    fmt::print(stderr, "lab: {}\n", error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace lab
