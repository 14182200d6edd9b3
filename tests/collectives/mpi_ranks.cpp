// SPDX-License-Identifier: MIT
// The engine over MPI: the bits of reference_sum on every rank, by every algorithm, with pieces of all kinds; what MPI_Allreduce says of
// integers; and whoever has another plan. Under mpirun, any number of ranks. --fault: rank 1 sends a shorter message than is due.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "lamina/collectives/mpi_channel.hpp"
#include "memory_ranks.hpp"

namespace {

using namespace lamina_test;
using namespace std::chrono_literals;
using collectives::algorithm;

int rank_of_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "rank %d: %s\n", rank_of_world(), what.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

void run_steps(collectives::mpi_channel& channel, algorithm how, collectives::piece_sizes pieces) {
  const lamina::layout model = model_of({40'000, 3, 700, 0, 120'000});
  const collectives::plan plan = plan_for(
      model, channel.ranks(),
      {.bucket_bytes = 50'000, .chunk_bytes = 300'000, .choice = collectives::algorithm_choice::always(how)});
  std::mt19937 random(77);  // the same on all ranks: each knows what the others give
  collectives::engine engine(channel, plan, {.pieces = pieces, .timeout = 30s});
  for (int step = 0; step < 3; ++step) {
    const all_gradients gradients = random_gradients(random, model, channel.ranks());
    engine.begin_step();
    for (std::size_t l = model.layers(); l-- > 0;) engine.ready(l, gradients[channel.rank()][l]);
    engine.drain();
    require(has_means(engine, expected_means(plan, gradients, std::vector<bool>(model.layers(), true))),
            std::string("other bits than the reference: ") + collectives::name_of(how));
  }
}

void compare_with_mpi(collectives::mpi_channel& channel) {
  std::mt19937 random(78);
  const all_gradients gradients = [&] {
    all_gradients made(channel.ranks());
    for (auto& each : made) each.push_back(random_integers<float>(random, 5000, 1000));
    return made;
  }();
  std::vector<float> sum(5000);
  {
    const std::lock_guard lock(collectives::mpi_mutex());
    MPI_Allreduce(gradients[channel.rank()][0].data(), sum.data(), 5000, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  for (const algorithm how : collectives::all_algorithms)
    require(same_bits(collectives::reference_sum(how, rank_vectors([&] {
                                                   rank_vectors inputs;
                                                   for (const auto& each : gradients)
                                                     inputs.push_back(each[0]);
                                                   return inputs;
                                                 }())),
                      sum),
            "MPI_Allreduce gives other integers");
}

// Rank 1 gives the engine of rank 0 a message that is none of a collective's, or is too long.
void fault(collectives::mpi_channel& channel, const std::string& kind) {
  const lamina::layout model = model_of({1000});
  if (channel.rank() == 1) {
    const std::vector<std::byte> bytes(kind == "long" ? 200 : 8, std::byte{1});
    channel.send(0, 0, {{}, bytes});
    while (channel.progress().empty()) {
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return;
  }
  std::string said = "(no exception)";
  try {
    // The last rank gets the element of the opening sum: of two, rank 0 waits for rank 1's answer of 36 bytes.
    collectives::engine engine(channel, plan_for(model, 2, {}), {.timeout = 10s});
    engine.begin_step();
    engine.ready(0, std::vector<float>(1000));
    engine.drain();
  } catch (const collectives::channel_error& error) {
    said = error.what();
  }
  std::printf("%s\n", said.c_str());
  std::fflush(stdout);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Abort(MPI_COMM_WORLD, 3);  // a message of rank 0 is still open
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  const bool is_single = argc > 1 && std::strcmp(argv[1], "--single") == 0;
  MPI_Init_thread(&argc, &argv, is_single ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &provided);
  try {
    collectives::mpi_channel channel(MPI_COMM_WORLD);
    if (argc > 2) {
      fault(channel, argv[2]);
    } else {
      for (const algorithm how : collectives::all_algorithms) {
        run_steps(channel, how, {});
        run_steps(channel, how, {.both_ways = 1U << 20U, .one_way = 60'000});
        run_steps(channel, how, {.both_ways = 4096, .one_way = 10'000});
      }
      compare_with_mpi(channel);
      if (channel.rank() == 0) std::printf("%zu ranks: the same bits\n", channel.ranks());
    }
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    std::fflush(stdout);
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
