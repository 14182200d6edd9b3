// SPDX-License-Identifier: MIT
// Trains ResNet-50 over MPI; see --help. Rank 0 is the server, the others are workers; in an allreduce all are.
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <lamina/error.hpp>
#include <string>
#include <thread>

#include "data/data.hpp"
#include "options.hpp"
#include "records/run_log.hpp"
#include "training.hpp"
#include "transport/in_process_transport.hpp"
#include "transport/mpi_transport.hpp"

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
  const int servers = given.topology == "allreduce" ? 0 : 1;
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
  if (given.topology == "allreduce") return allreduce_topology(workers);
  if (given.topology == "ps") return flat_topology(workers);
  if (given.workers_per_node) return hybrid_topology(workers, *given.workers_per_node);
  if (given.transport == "inprocess") return hybrid_topology(workers, workers);
  return hybrid_topology(std::vector<std::size_t>(here.machines.begin() + 1, here.machines.end()));
}

int thread_count(const training& run, const place& here) {
  if (run.given.threads > 0) return run.given.threads;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (run.given.transport == "inprocess") return cores;  // one works at a time
  // The server works while its workers wait and the other way round, so it does not count.
  if (run.who.is_server(static_cast<std::size_t>(here.rank))) return 1;
  int workers = 0;
  for (std::size_t rank = 0; rank < here.machines.size(); ++rank) {
    const bool is_here = here.machines[rank] == here.machines[static_cast<std::size_t>(here.rank)];
    workers += is_here && !run.who.is_server(rank) ? 1 : 0;
  }
  return std::max(1, cores / workers);
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

// The same without the others, who go on.
[[noreturn]] void end_alone(const std::string& who, const std::string& reason) {
  fmt::print(stderr, "resnet50_ps: {}: {}\n", who, reason);
  std::fflush(stderr);
  std::_Exit(EXIT_FAILURE);  // not through MPI_Finalize, where all wait for all
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

// When a rank hangs, those who wait for it wait for each other as well: the server speaks first.
int patience_of(const training& run, std::size_t rank) {
  if (rank == 0) return 1;
  return run.who.nodes[run.who.node_of(rank)].front() == rank ? 2 : 3;
}

// Rank 0 knows the result.
run_result train_over_mpi(const training& run, const place& here) {
  const auto rank = static_cast<std::size_t>(here.rank);
  try {
    mpi_transport ranks(MPI_COMM_WORLD,
                        {.max_message_bytes = std::size_t{1} << 40,
                         .timeout = std::chrono::seconds(run.given.timeout_seconds) * patience_of(run, rank),
                         .name_of = [&](std::size_t each) { return run.who.name_of(each); }});
    return train(ranks, run);
  } catch (const std::exception& error) {
    // Here, where the reason is known; the other ranks may wait for this one for ever.
    if (!run.given.degraded || rank == 0) end_all_ranks(run.who.name_of(rank), reason_for(error));
    end_alone(run.who.name_of(rank), reason_for(error));
  }
}

int run(const options& given, const place& here) {
  training described{.given = given, .data = {}, .who = {}, .layer_dropping = given.runs == "with"};
  const bool prepared = all_succeed(here, [&] {
    described.who = find_topology(given, here);
    torch::set_num_threads(thread_count(described, here));
    described.data = open_data(given.data, {given.image_size_pixels, given.seed});
    if (here.rank == 0) check_output(described);  // the files are on its machine
    check_training(described);
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
  }
  std::vector<run_result> results;
  for (const bool layer_dropping : {false, true}) {
    if (given.runs == (layer_dropping ? "without" : "with")) continue;
    described.layer_dropping = layer_dropping;
    results.push_back(given.transport == "inprocess" ? train_in_process(described)
                                                     : train_over_mpi(described, here));
  }
  if (here.rank == 0) print_table(results);
  return EXIT_SUCCESS;
}

int guarded_main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  const place here = find_place();
  try {
    const parsed command = parse_options(argc, argv);
    if (command.exit_code) {
      if (here.rank == 0) fmt::print(*command.exit_code == 0 ? stdout : stderr, "{}", command.message);
      return *command.exit_code;
    }
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
