// SPDX-License-Identifier: MIT
// Trains ResNet-50 with a parameter server over MPI; see --help. Rank 0 is the server, the others are
// workers.
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <lamina/error.hpp>
#include <string>
#include <thread>

#include "data.hpp"
#include "in_process_link.hpp"
#include "metrics.hpp"
#include "mpi_link.hpp"
#include "options.hpp"
#include "training.hpp"

namespace resnet50_ps {
namespace {

struct place {
  int rank = 0;
  int ranks = 1;
  int workers_on_this_machine = 1;
  MPI_Comm workers = MPI_COMM_NULL;  // without the server; null on the server

  bool is_server() const { return rank == 0; }
};

place find_place() {
  place here;
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &here.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &here.ranks), "MPI_Comm_size");
  check_mpi(MPI_Comm_split(MPI_COMM_WORLD, here.is_server() ? MPI_UNDEFINED : 0, here.rank, &here.workers),
            "MPI_Comm_split");
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  // The server works while its workers wait and the other way round, so it does not count.
  const int worker = here.is_server() ? 0 : 1;
  check_mpi(MPI_Allreduce(&worker, &here.workers_on_this_machine, 1, MPI_INT, MPI_SUM, machine),
            "MPI_Allreduce");
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

// Over MPI the ranks are the server and the workers; in one process, a single rank plays them all.
std::size_t worker_count(const options& given, const place& here) {
  if (given.transport == "inprocess") {
    if (here.ranks > 1) {
      throw std::invalid_argument(
          fmt::format("--transport inprocess needs one process, but mpirun started {}", here.ranks));
    }
    return given.workers.value_or(2);
  }
  if (here.ranks < 2) {
    throw std::invalid_argument(
        "one rank alone cannot train: rank 0 is the server, so start at least two, as in mpirun -n 3 "
        "resnet50_ps, or play them all in this one with --transport inprocess");
  }
  const auto workers = static_cast<std::size_t>(here.ranks - 1);
  if (given.workers && *given.workers != workers) {
    throw std::invalid_argument(fmt::format("--workers {} needs {} ranks, but mpirun started {}",
                                            *given.workers, *given.workers + 1, here.ranks));
  }
  return workers;
}

int thread_count(const options& given, const place& here) {
  if (given.threads > 0) return given.threads;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (given.transport == "inprocess") return cores;  // one works at a time
  return here.is_server() ? 1 : std::max(1, cores / std::max(1, here.workers_on_this_machine));
}

std::string reason_for(const std::exception& error) {
  return dynamic_cast<const lamina::non_finite_gradient*>(&error) == nullptr
             ? error.what()
             : fmt::format("{}; training has diverged, try a lower --learning-rate", error.what());
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const place& here, const std::string& reason) {
  fmt::print(stderr, "resnet50_ps: rank {} ({}): {}\n", here.rank,
             here.is_server() ? "the server" : "worker " + std::to_string(here.rank - 1), reason);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  std::abort();
}

run_result train_in_process(const training& run) {
  run_result result;
  run_in_process(
      run.workers,
      [&](server_link& link) {
        torch::set_num_threads(thread_count(run.given, {}));  // counts for this thread alone
        result = train_as_server(link, run);
      },
      [&](worker_link& link) {
        torch::set_num_threads(thread_count(run.given, {}));
        train_as_worker(link, run);
      });
  return result;
}

// The server knows the result.
run_result train_over_mpi(const training& run, const place& here) {
  try {
    // When a worker hangs, the others wait for the server as long as the server for it: the server speaks first.
    const mpi_link_options link_options = {
        .max_message_bytes = std::size_t{1} << 40,
        .timeout = std::chrono::seconds(run.given.timeout_seconds) * (here.is_server() ? 1 : 2)};
    if (here.is_server()) {
      mpi_server_link link(MPI_COMM_WORLD, link_options);
      return train_as_server(link, run);
    }
    mpi_worker_link link(MPI_COMM_WORLD, here.workers, link_options);
    train_as_worker(link, run);
    return {};
  } catch (const std::exception& error) {
    // Here, where the reason is known; the other ranks may wait for this one for ever.
    end_all_ranks(here, reason_for(error));
  }
}

int run(const options& given, const place& here) {
  training described{.given = given, .data = {}, .workers = 1, .layer_dropping = given.runs == "with"};
  const bool prepared = all_succeed(here, [&] {
    described.workers = worker_count(given, here);
    torch::set_num_threads(thread_count(given, here));
    described.data = open_data(given.data, {given.image_size_pixels, given.seed});
    if (here.is_server()) check_output(described);  // the files are on its machine
    check_training(described);
  });
  if (!prepared) return EXIT_FAILURE;

  if (here.is_server()) {
    const data_sets& data = described.data;
    fmt::print(
        "ResNet-50 v1, {}: {} training and {} test images of {} classes, {} x {} pixels; {} workers x {} "
        "images\n",
        given.data, data.train->size().value(), data.test->size().value(), data.train->classes(),
        data.train->image_size_pixels(), data.train->image_size_pixels(), described.workers,
        given.batch_images);
  }
  std::vector<run_result> results;
  for (const bool layer_dropping : {false, true}) {
    if (given.runs == (layer_dropping ? "without" : "with")) continue;
    described.layer_dropping = layer_dropping;
    results.push_back(given.transport == "inprocess" ? train_in_process(described)
                                                     : train_over_mpi(described, here));
  }
  if (here.is_server()) print_table(results);
  return EXIT_SUCCESS;
}

int guarded_main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  const place here = find_place();
  try {
    const parsed command = parse_options(argc, argv);
    if (command.exit_code) {
      if (here.is_server()) fmt::print(*command.exit_code == 0 ? stdout : stderr, "{}", command.message);
      return *command.exit_code;
    }
    return run(command.options, here);
  } catch (const std::exception& error) {
    end_all_ranks(here, reason_for(error));
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
