// SPDX-License-Identifier: MIT
// The engine over MPI: the bits of reference_sum on every rank, by every algorithm, with pieces of all kinds; and what MPI_Allreduce
// says of integers. Under mpirun, any number of ranks. The exit status is 0 where all ranks have seen what is expected.
//     --fault short|long|plan|silent   rank 1 sends another message than is due, has another plan, or does not come to an agreement
//     --single                         MPI without threads
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "lamina/collectives/mpi_channel.hpp"
#include "rounded_sums.hpp"

namespace {

using namespace lamina_test;
using namespace std::chrono_literals;
using collectives::algorithm;

int rank_of_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

bool all_hold = true;

void require(bool holds, const std::string& what) {
  if (holds) return;
  all_hold = false;
  std::fprintf(stderr, "rank %d: %s\n", rank_of_world(), what.c_str());
}

void require_said(const std::string& said, const std::string& expected) {
  require(contains(said, expected), "it was said: " + said + "\n  expected: " + expected);
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

// Numbers that travel in 16 bits: the bits of a sum that knows nothing of buckets, in half the bytes.
void run_rounded(collectives::mpi_channel& channel, lamina::payload_type type,
                 collectives::piece_sizes pieces) {
  const lamina::layout model = model_of({40'001, 3, 700, 0, 120'000});
  const collectives::plan plan =
      plan_for(model, channel.ranks(), {.bucket_bytes = 50'000, .chunk_bytes = 300'000, .payload = type});
  std::mt19937 random(80);
  collectives::engine engine(channel, plan, {.pieces = pieces, .timeout = 30s});
  for (int step = 0; step < 3; ++step) {
    const all_gradients gradients = random_gradients(random, model, channel.ranks());
    const std::uint64_t before = engine.totals().sent_bytes;
    engine.begin_step();
    for (std::size_t l = model.layers(); l-- > 0;) engine.ready(l, gradients[channel.rank()][l]);
    engine.drain();
    require(has_means(engine, rounded_means(type, gradients, std::vector<bool>(model.layers(), true))),
            std::string("other bits than the independent sum of ") + collectives::name_of(type));
    // Of so many elements headers and uneven shards are less than a hundredth.
    const auto p = static_cast<double>(channel.ranks());
    const double bytes = 2.0 * 2 * (p - 1) / p * static_cast<double>(model.elements());
    const auto sent = static_cast<double>(engine.totals().sent_bytes - before);
    require(sent >= 0.99 * bytes && sent <= 1.01 * bytes,
            "sends " + std::to_string(sent) + " bytes, not " + std::to_string(bytes));
  }
}

// Owners that leave the mean as it is: then it is what all ranks get.
void run_owners(collectives::mpi_channel& channel, algorithm how) {
  const lamina::layout model = model_of({40'000, 3, 701, 0, 120'000});
  const collectives::plan plan = plan_for(
      model, channel.ranks(),
      {.bucket_bytes = 50'000, .chunk_bytes = 300'000, .choice = collectives::algorithm_choice::always(how)});
  std::mt19937 random(79);
  collectives::engine engine(channel, plan,
                             {.timeout = 30s, .update = [](std::size_t, std::size_t, std::span<float>) {}});
  for (int step = 0; step < 3; ++step) {
    const all_gradients gradients = random_gradients(random, model, channel.ranks());
    engine.begin_step();
    for (std::size_t l = model.layers(); l-- > 0;) {
      step == 1 && l == 2 ? engine.hold_back(l) : engine.ready(l, gradients[channel.rank()][l]);
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      engine.wait(l);
      require(step == 1 && l == 2 ? engine.parameters(l).empty()
                                  : same_bits(engine.parameters(l), mean_by_shards(how, gradients, l)),
              std::string("other bits than the reference, by owners: ") + collectives::name_of(how));
    }
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
    require(same_bits(reference_sum(how, rank_vectors([&] {
                                      rank_vectors inputs;
                                      for (const auto& each : gradients) inputs.push_back(each[0]);
                                      return inputs;
                                    }())),
                      sum),
            "MPI_Allreduce gives other integers");
}

// Rank 1 gives the engine of rank 0 a message that is none of a collective's, or is too long.
void send_another_message(collectives::mpi_channel& channel, const std::string& kind) {
  if (channel.rank() == 1) {
    const std::vector<std::byte> bytes(kind == "long" ? 200 : 8, std::byte{1});
    channel.send(0, {{}, bytes});
    while (channel.progress().empty()) {
    }
    MPI_Barrier(MPI_COMM_WORLD);
    return;
  }
  // The last rank gets the element of the opening sum: of two, rank 0 waits for rank 1's answer of 36 bytes.
  const std::string said = message_of<collectives::channel_error>([&] {
    collectives::engine engine(channel, plan_for(model_of({1000}), 2, {}), {.timeout = 10s});
    engine.begin_step();
    engine.ready(0, std::vector<float>(1000));
    engine.drain();
  });
  require_said(said,
               kind == "long"
                   ? "rank 1 sends something that is no round of a collective, in collective 0 of step 0"
                   : "rank 1 sends 8 bytes where 36 are expected, in collective 0 of step 0");
  MPI_Barrier(MPI_COMM_WORLD);
}

// Those that hear of it name who has the other plan; who waits for them names them after its timeout, since nobody tells it.
void have_another_plan(collectives::mpi_channel& channel) {
  const lamina::layout model = model_of({100, 50});
  const std::string said = message_of<collectives::channel_error>([&] {
    const std::size_t bucket_bytes = channel.rank() == 1 ? 0 : 1'000'000;
    collectives::engine engine(channel, plan_for(model, channel.ranks(), {.bucket_bytes = bucket_bytes}),
                               {.timeout = 500ms});
    engine.begin_step();
    for (const std::size_t l : {1U, 0U}) engine.ready(l, std::vector<float>(model.sizes()[l]));
    engine.drain();
  });
  // The one element of the opening sum is the last rank's, which hears of the others first.
  const std::array<std::string, 3> expected = {"nothing heard for 0.500 s while exchanging with rank 2",
                                               "nothing heard for 0.500 s while exchanging with rank 2",
                                               "rank 1 was started with another plan"};
  require_said(said, expected[channel.rank()]);
  require_said(message_of<std::logic_error>([&] { channel.send(0, {}); }), "make a new channel");
  MPI_Barrier(MPI_COMM_WORLD);
}

// Rank 1 gives up before rank 0 comes: what rank 0 sends then is written to nobody's memory.
void come_too_late(collectives::mpi_channel& channel) {
  std::vector<std::size_t> order(1000);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  const lamina::layout model = model_of(std::vector<std::size_t>(order.size(), 1));
  if (channel.rank() == 0) {
    MPI_Barrier(MPI_COMM_WORLD);
    static_cast<void>(message_of<collectives::channel_error>(
        [&] { std::ignore = collectives::agree_on_order(channel, model, order, 200ms); }));
    MPI_Barrier(MPI_COMM_WORLD);
    return;
  }
  require_said(message_of<collectives::channel_error>(
                   [&] { std::ignore = collectives::agree_on_order(channel, model, order, 100ms); }),
               "nothing heard for 0.100 s while exchanging with rank 0 in collective 0 of step 0");
  const std::vector<std::uint64_t> own(order.size(), 7777);  // where the memory of the agreement was
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Barrier(MPI_COMM_WORLD);
  require(std::ranges::count(own, 7777U) == 1000,
          "a message was written into memory that had been given back");
}

void run_faults(collectives::mpi_channel& channel, const std::string& kind) {
  if (kind == "plan") return have_another_plan(channel);
  if (kind == "silent") return come_too_late(channel);
  send_another_message(channel, kind);
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  const bool is_single = argc > 1 && std::strcmp(argv[1], "--single") == 0;
  MPI_Init_thread(&argc, &argv, is_single ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &provided);
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int rank = rank_of_world();
  try {
    if (is_single) {
      require_said(message_of<std::runtime_error>([] { collectives::mpi_channel{MPI_COMM_WORLD}; }),
                   "this MPI gives threads level 1; overlap needs 2 (serialized)");
    } else {
      collectives::mpi_channel channel(MPI_COMM_WORLD);
      if (argc > 2) {
        run_faults(channel, argv[2]);
      } else {
        for (const algorithm how : collectives::all_algorithms) {
          run_steps(channel, how, {});
          if (ranks > 5) continue;  // they have fewer cores than they want
          run_steps(channel, how, {.both_ways = 1U << 20U, .one_way = 60'000});
          run_steps(channel, how, {.both_ways = 4096, .one_way = 10'000});
        }
        for (const algorithm how : {algorithm::pairwise, algorithm::ring}) run_owners(channel, how);
        run_rounded(channel, lamina::payload_type::bfloat16, {});
        run_rounded(channel, lamina::payload_type::float16, {.both_ways = 4096, .one_way = 10'000});
        compare_with_mpi(channel);
      }
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  int verdict = all_hold ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &verdict, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  MPI_Finalize();
  if (rank == 0) std::printf("%d ranks: %s\n", ranks, verdict != 0 ? "all as expected" : "NOT as expected");
  return verdict != 0 ? 0 : 1;
}
