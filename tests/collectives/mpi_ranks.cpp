// SPDX-License-Identifier: MIT
// The engine over MPI: bitwise the expected means on every rank, by every variant, in segments of two sizes. Under mpirun, any number
// of ranks. The exit status is 0 where all ranks have seen what is expected.
//     --fault short|long|plan|silent   rank 1 sends another message than is due, has another plan, or does not come to an agreement
//     --single                         MPI without threads
#include <tuple>

#include "lamina/collectives/mpi_channel.hpp"
#include "ranks.hpp"

namespace {

using namespace lamina_test;
using namespace std::chrono_literals;

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

// Means by a variant, some layers dropped in one step, and of its bytes those of the formula.
void run_steps(collectives::mpi_channel& channel, const variant& tried, std::size_t piece_bytes) {
  if (!tried.exists(channel.ranks())) return;
  const lamina::layout model = model_of({4'001, 3, 701, 0, 30'000});
  const collectives::plan plan = tried.plan(model, channel.ranks(), 10'000, 60'000);
  std::mt19937 random(77);  // the same on all ranks: each knows what the others give
  collectives::engine engine(channel, plan, with_owners(tried, {.piece_bytes = piece_bytes, .timeout = 30s}));
  std::uint64_t bytes = opening_bytes(channel.ranks(), channel.rank());
  for (int step = 0; step < 2; ++step) {
    const all_gradients gradients = random_gradients(random, model, channel.ranks());
    std::vector<bool> is_sent(model.layers(), true);
    is_sent[2] = step != 1;
    engine.begin_step();
    for (std::size_t l = model.layers(); l-- > 0;)
      is_sent[l] ? engine.ready(l, gradients[channel.rank()][l]) : engine.hold_back(l);
    engine.drain();
    require(has_means(engine, tried, expected_means(plan, tried, gradients, is_sent)),
            "other bits than the reference: " + tried.name());
    bytes += step_bytes(plan, tried, channel.rank(), is_sent);
  }
  const std::uint64_t sent = engine.totals().sent_bytes;
  require(sent == bytes,
          tried.name() + " sends " + std::to_string(sent) + " bytes, not " + std::to_string(bytes));
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
  // The last rank gets the element of the opening sum: of two, rank 0 waits for rank 1's reply of 36 bytes.
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
        const std::string kind = argv[2];
        if (kind == "plan") {
          have_another_plan(channel);
        } else if (kind == "silent") {
          come_too_late(channel);
        } else {
          send_another_message(channel, kind);
        }
      } else {
        for (const variant& tried : all_variants()) {
          run_steps(channel, tried, collectives::default_piece_bytes);
          if (ranks > 4 || tried.has_owners) continue;  // many have fewer cores than they want
          run_steps(channel, tried, 4096);
        }
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
