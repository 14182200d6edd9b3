// SPDX-License-Identifier: MIT
// Trains ResNet-50 with a parameter server over MPI; see --help. Rank 0 is the server, the others are
// workers.
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <functional>
#include <lamina/error.hpp>
#include <string>
#include <thread>

#include "batches.hpp"
#include "data.hpp"
#include "metrics.hpp"
#include "model.hpp"
#include "options.hpp"
#include "replica.hpp"
#include "server.hpp"
#include "transport.hpp"
#include "worker.hpp"

namespace resnet50_ps {
namespace {

constexpr std::size_t evaluation_batch_images = 100;

struct place {
  int rank = 0;
  int ranks = 1;
  int ranks_on_this_machine = 1;
  bool is_server() const { return rank == 0; }
  std::size_t workers() const { return static_cast<std::size_t>(ranks - 1); }
  shard part() const { return {workers(), static_cast<std::size_t>(rank - 1)}; }
};

place find_place() {
  place here;
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &here.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &here.ranks), "MPI_Comm_size");
  check_mpi(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_size(machine, &here.ranks_on_this_machine), "MPI_Comm_size");
  int server_is_here = here.is_server() ? 1 : 0;
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &server_is_here, 1, MPI_INT, MPI_MAX, machine), "MPI_Allreduce");
  // The server works while its workers wait and the other way round, so it does not count.
  here.ranks_on_this_machine -= server_is_here;
  check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
  return here;
}

// Runs `prepare` on every rank. If it throws anywhere, the first rank that failed says why, and all get
// false: they can then end in order instead of waiting for each other.
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

void check_place(const options& given, const place& here) {
  if (here.ranks < 2) {
    throw std::invalid_argument(
        "one rank alone cannot train: rank 0 is the server, so start at least two, as in mpirun -n 3 "
        "resnet50_ps");
  }
  if (given.workers && *given.workers != here.workers()) {
    throw std::invalid_argument(fmt::format("--workers {} needs {} ranks, but mpirun started {}",
                                            *given.workers, *given.workers + 1, here.ranks));
  }
}

int thread_count(const options& given, const place& here) {
  if (given.threads > 0) return given.threads;
  if (here.is_server()) return 1;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return std::max(1, cores / std::max(1, here.ranks_on_this_machine));
}

lamina::compressor_options compression_of(const options& given, const place& here, bool layer_dropping) {
  lamina::compressor_options compression;
  compression.sender = static_cast<std::uint32_t>(here.rank - 1);
  compression.drop_ratio = layer_dropping ? given.drop_ratio : 0;
  if (given.threshold) {
    compression.refresh = lamina::refresh_schedule::fixed(*given.threshold);
  } else if (given.refresh_steps == 0) {
    compression.refresh = lamina::refresh_schedule::first_step_only();
  } else {
    compression.refresh = lamina::refresh_schedule::every(given.refresh_steps);
  }
  return compression;
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const place& here, const std::string& reason) {
  fmt::print(stderr, "resnet50_ps: rank {} ({}): {}\n", here.rank,
             here.is_server() ? "the server" : "a worker", reason);
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  std::abort();
}

// Trains and evaluates. Returns the correct predictions of this rank.
std::uint64_t take_part(const options& given, const place& here, const data_sets& data, bool layer_dropping,
                        transport& link, replica& local,
                        const std::function<void(const step_metrics&)>& record) {
  if (here.is_server()) {
    serve(
        link, local.model, [&](std::size_t l) { return local[l]; },
        {given.steps, {given.learning_rate, given.momentum}}, record);
    return 0;
  }
  batch_stream batches(data.train, here.part(), given.batch_images, given.seed);
  work(link, local, [&] { return batches.next(); },
       {given.steps, compression_of(given, here, layer_dropping)});
  average_running_statistics(link, local);
  return count_correct(local, data.test, here.part(), evaluation_batch_images);
}

// One run from beginning to end; every rank takes part, the server knows the result.
run_result train(const options& given, const place& here, const data_sets& data, bool layer_dropping,
                 step_log* log) {
  torch::manual_seed(given.seed);
  const model_options network{data.train->classes(), given.small_stem ? stem::small : stem::standard};
  replica local{torch::nn::AnyModule(resnet50(network))};
  const std::size_t max_frame_bytes = local.model.elements() * sizeof(float) + local.model.layers() + 4096;
  transport link(MPI_COMM_WORLD, max_frame_bytes, std::chrono::seconds(given.timeout_seconds));

  run_result result{layer_dropping ? "with" : "without", {}, 0};
  if (here.is_server()) log->begin_run(result.name);
  try {
    const std::uint64_t correct =
        take_part(given, here, data, layer_dropping, link, local, [&](const step_metrics& step) {
          log->record(step);
          result.steps.push_back(step);
        });
    const std::uint64_t tested = data.test->size().value() / here.workers() * here.workers();
    result.test_accuracy = static_cast<double>(link.sum_over_ranks(correct)) / static_cast<double>(tested);
  } catch (const lamina::non_finite_gradient& error) {
    end_all_ranks(here, fmt::format("{}; training has diverged, try a lower --learning-rate", error.what()));
  } catch (const std::exception& error) {
    // Here and not further out: MPI may still be writing into what unwinding would free.
    end_all_ranks(here, error.what());
  }
  return result;
}

void check_data(const options& given, const place& here, const data_sets& data) {
  if (data.test->size().value() < here.workers()) {
    throw std::invalid_argument(
        fmt::format("{} test images are too few for {} workers", data.test->size().value(), here.workers()));
  }
  if (!here.is_server()) batch_stream(data.train, here.part(), given.batch_images, given.seed);
}

int run(const options& given, const place& here) {
  data_sets data;
  std::unique_ptr<step_log> log;
  const bool prepared = all_succeed(here, [&] {
    check_place(given, here);
    torch::set_num_threads(thread_count(given, here));
    data = open_data(given.data, {given.image_size_pixels, given.seed});
    check_data(given, here, data);
    if (here.is_server()) log = std::make_unique<step_log>(given.steps, given.interval, given.log);
  });
  if (!prepared) return EXIT_FAILURE;

  if (here.is_server()) {
    fmt::print(
        "ResNet-50 v1, {}: {} training and {} test images of {} classes, {} x {} pixels; {} workers x {} "
        "images\n",
        given.data, data.train->size().value(), data.test->size().value(), data.train->classes(),
        data.train->image_size_pixels(), data.train->image_size_pixels(), here.workers(), given.batch_images);
  }
  std::vector<run_result> results;
  if (given.runs != "with") results.push_back(train(given, here, data, false, log.get()));
  if (given.runs != "without") results.push_back(train(given, here, data, true, log.get()));
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
    end_all_ranks(here, error.what());
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
