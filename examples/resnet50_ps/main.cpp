// SPDX-License-Identifier: MIT
// Trains ResNet-50 over MPI; see --help. Rank 0 is the server, the others are workers; in an allreduce all are.
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <lamina/error.hpp>
#include <optional>
#include <string>
#include <thread>

#include "data/data.hpp"
#include "launch/options.hpp"
#include "launch/training.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "records/run_log.hpp"

namespace resnet50_ps {
namespace {

struct place {
  int rank = 0;
  int ranks = 1;
  std::vector<int> machines = {0};  // of each rank, by the first rank on it
};

place find_place() {
  place here;
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &here.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &here.ranks), "MPI_Comm_size");
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  int first = here.rank;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, machine), "MPI_Allreduce");
  here.machines.resize(static_cast<std::size_t>(here.ranks));
  check_mpi(MPI_Allgather(&first, 1, MPI_INT, here.machines.data(), 1, MPI_INT, MPI_COMM_WORLD),
            "MPI_Allgather");
  check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
  return here;
}

// Runs `prepare` on every rank. If it throws anywhere, the first rank that failed says why, and all get false: they can
// then end in order instead of waiting for each other.
template <class Prepare>
bool all_succeed(const place& here, Prepare prepare) {
  std::string problem;
  try {
    prepare();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  int first_failed = problem.empty() ? here.ranks : here.rank;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first_failed, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  if (first_failed == here.rank) fmt::print(stderr, "resnet50_ps: {}\n", problem);
  return first_failed == here.ranks;
}

// Over MPI the ranks are the server, where there is one, and the workers; in one process, a single rank plays them all.
std::size_t worker_count(const options& given, const place& here) {
  if (given.transport == "inprocess") {
    if (here.ranks > 1) {
      throw std::invalid_argument(
          fmt::format("--transport inprocess needs one process, but mpirun started {}", here.ranks));
    }
    return given.workers.value_or(2);
  }
  const int servers = needs_server(given) ? 1 : 0;
  if (here.ranks < 1 + servers) {
    throw std::invalid_argument(
        "one rank alone cannot train: rank 0 is the server, so start at least two, as in mpirun -n 3 "
        "resnet50_ps, or play them all in this one with --transport inprocess");
  }
  const auto workers = static_cast<std::size_t>(here.ranks - servers);
  if (given.workers && *given.workers != workers) {
    throw std::invalid_argument(fmt::format("--workers {} needs {} ranks, but mpirun started {}",
                                            *given.workers,
                                            *given.workers + static_cast<std::size_t>(servers), here.ranks));
  }
  return workers;
}

topology find_topology(const options& given, const place& here) {
  const std::size_t workers = worker_count(given, here);
  if (!needs_server(given)) return allreduce_topology(workers);
  if (given.topology == "ps") return flat_topology(workers);
  if (given.workers_per_node) return hybrid_topology(workers, *given.workers_per_node);
  if (given.transport == "inprocess") return hybrid_topology(workers, workers);
  return hybrid_topology(std::vector<std::size_t>(here.machines.begin() + 1, here.machines.end()));
}

// The workers on this machine, of ranks below `end`.
std::size_t workers_here(const topology& who, const place& here, std::size_t end) {
  std::size_t workers = 0;
  for (std::size_t rank = 0; rank < end; ++rank) {
    const bool is_here = here.machines[rank] == here.machines[static_cast<std::size_t>(here.rank)];
    workers += is_here && !who.is_server(rank) ? 1 : 0;
  }
  return workers;
}

int thread_count(const training& run, const place& here) {
  if (run.given.threads > 0) return run.given.threads;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (run.given.transport == "inprocess") return cores;  // one works at a time
  // The server works while its workers wait and the other way round, so it does not count.
  if (run.who.is_server(static_cast<std::size_t>(here.rank))) return 1;
  return std::max(1, cores / static_cast<int>(workers_here(run.who, here, here.machines.size())));
}

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
  in_process_options ends{.name_of = [&](std::size_t rank) { return run.who.name_of(rank); }, .on_death = {}};
  if (run.given.degraded) {
    ends.on_death = [&](std::size_t rank, const std::exception& error) {
      fmt::print(stderr, "resnet50_ps: {}: {}\n", run.who.name_of(rank), reason_for(error));
    };
  }
  const auto body = [&](transport& ranks) {
    torch::set_num_threads(thread_count(run, {}));  // counts for this thread alone
    run_result mine = train(ranks, run);
    if (ranks.rank() == 0) result = std::move(mine);
  };
  run_in_process(run.who.ranks(), body, ends);
  return result;
}

// Rank 0 knows the result.
run_result train_over_mpi(const training& run, const place& here) {
  const auto rank = static_cast<std::size_t>(here.rank);
  try {
    const auto timeout_of = [&](std::size_t awaited) {
      return std::chrono::seconds(run.given.timeout_seconds) * run.who.patience(rank, awaited);
    };
    mpi_transport ranks(MPI_COMM_WORLD,
                        {.max_message_bytes = std::size_t{1} << 40,
                         .timeout_of = timeout_of,
                         .exchange_timeout = std::chrono::seconds(2 * run.given.timeout_seconds),
                         .name_of = [&](std::size_t each) { return run.who.name_of(each); },
                         .above = run.who.above(rank),
                         .life_period = std::chrono::milliseconds(250 * run.given.timeout_seconds)});
    return train(ranks, run);
  } catch (const std::exception& error) {
    // Here, where the reason is known; the other ranks may wait for this one for ever.
    if (!run.given.degraded) end_all_ranks(run.who.name_of(rank), reason_for(error));
    fmt::print(stderr, "resnet50_ps: {}: {}\n", run.who.name_of(rank), reason_for(error));
    end_alone(EXIT_FAILURE);
  }
}

int run(const options& given, const place& here) {
  training described{.given = given, .data = {}, .who = {}, .layer_dropping = given.runs == "with"};
  const bool prepared = all_succeed(here, [&] {
    described.who = find_topology(given, here);
    torch::set_num_threads(thread_count(described, here));
    described.data = open_data(given.data, {given.image_size_pixels, given.seed});
    if (here.rank == 0) check_output(described);  // the files are on its machine
    described.place_on_machine = workers_here(described.who, here, static_cast<std::size_t>(here.rank));
    check_training(described, !described.who.is_server(static_cast<std::size_t>(here.rank)) ||
                                  given.transport == "inprocess");
  });
  if (!prepared) return EXIT_FAILURE;

  if (here.rank == 0) {
    const data_sets& data = described.data;
    fmt::print(
        "ResNet-50 v1, {}: {} training and {} test images of {} classes, {} x {} pixels; {} workers x {} "
        "images\n",
        given.data, data.train->size().value(), data.test->size().value(), data.train->classes(),
        data.train->image_size_pixels(), data.train->image_size_pixels(), described.who.workers(),
        given.batch_images);
    for (const std::string& note : data.notes) fmt::print(stderr, "resnet50_ps: {}\n", note);
  }
  std::vector<run_result> results;
  for (const bool layer_dropping : {false, true}) {
    if (given.runs == (layer_dropping ? "without" : "with")) continue;
    described.layer_dropping = layer_dropping;
    results.push_back(given.transport == "inprocess" ? train_in_process(described)
                                                     : train_over_mpi(described, here));
  }
  if (here.rank == 0) {
    print_table(results);
    make_file(given.done_file);
  }
  if (given.degraded && given.transport == "mpi") end_alone(EXIT_SUCCESS);
  return EXIT_SUCCESS;
}

// Ranks may be started with different command lines: if one has nothing to run, all end, and the first such says why.
std::optional<int> first_exit_code(const parsed& command, const place& here) {
  int first = command.exit_code ? here.rank : here.ranks;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD), "MPI_Allreduce");
  if (first == here.ranks) return std::nullopt;
  int code = command.exit_code.value_or(EXIT_FAILURE);
  check_mpi(MPI_Bcast(&code, 1, MPI_INT, first, MPI_COMM_WORLD), "MPI_Bcast");
  if (first == here.rank) fmt::print(code == 0 ? stdout : stderr, "{}", command.message);
  return code;
}

int guarded_main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  const place here = find_place();
  try {
    const parsed command = parse_options(argc, argv);
    if (const std::optional<int> code = first_exit_code(command, here)) return *code;
    return run(command.options, here);
  } catch (const std::exception& error) {
    end_all_ranks(fmt::format("rank {}", here.rank), reason_for(error));
  }
}

}  // namespace
}  // namespace resnet50_ps

int main(int argc, char** argv) {
  try {
    return resnet50_ps::guarded_main(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "resnet50_ps: {}\n", error.what());
    return EXIT_FAILURE;
  }
}
