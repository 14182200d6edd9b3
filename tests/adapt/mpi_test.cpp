// SPDX-License-Identifier: MIT
// Three ranks: rank 0 sends, the others receive.
#include <lamina/adapt/mpi.hpp>
#include <lamina/lamina.hpp>
#include <numeric>

namespace {

using lamina::mpi::receive;
using lamina::mpi::send;
using lamina::mpi::timeout_error;
using std::chrono::milliseconds;

const MPI_Comm world = MPI_COMM_WORLD;
constexpr std::size_t mebibyte = std::size_t{1} << 20;
const std::vector<int> others = {1, 2};

int rank = 0;
int failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "rank %d: not so: %s\n", rank, what);
  ++failures;
}

std::vector<std::byte> numbered(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::byte>((i * 2654435761U + seed) >> 13);
  return all;
}

// Of any length, in the order in which they were sent, into memory that is used again.
void bytes_arrive() {
  std::vector<std::byte> into;
  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, mebibyte - 1, mebibyte, mebibyte + 1,
                                   20 * mebibyte + 7, std::size_t{3}}) {
    const auto bytes = numbered(length, 5);
    if (rank == 0) {
      send(bytes, others, 3, world);
    } else {
      receive(into, 0, 3, world);
      expect(into == bytes, "the bytes that were sent arrive");
    }
  }
}

// A frame whose segments are much smaller and larger than one of MPI.
void frames_arrive() {
  std::vector<lamina::layer> layers;
  for (std::size_t l = 0; l < 300; ++l)
    layers.push_back({"layer " + std::to_string(l), {l % 50 == 7 ? 700'001 : 3 * l}});
  const lamina::layout model(layers);
  std::vector<std::vector<float>> gradients;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    gradients.emplace_back(model.sizes()[l]);
    std::iota(gradients.back().begin(), gradients.back().end(), static_cast<float>(l));
  }
  lamina::worker<float> worker(model, {.drop_ratio = 0.3});
  auto step = worker.add(gradients);
  const lamina::encoded_frame& frame = step.frame();
  if (rank == 0) {
    send(frame, others, 0, world);
    send(frame, 2, 0, world);
  } else {
    const auto bytes = receive(0, 0, world);
    expect(bytes == frame.to_bytes(), "a frame arrives");
    expect(lamina::decode<float>(bytes, model).sent_elements() == step.sent().sent_elements(),
           "it can be decoded");
    if (rank == 2) expect(receive(0, 0, world) == bytes, "one rank can be sent to alone");
  }
}

// More than an int can count, of which the sender holds a part.
void more_than_an_int() {
  const auto block = numbered(64 * mebibyte, 9);
  const std::vector<std::span<const std::byte>> segments(33, block);
  if (rank == 0)
    lamina::detail::mpi_send(segments, std::span(others).first(1), 1, world, lamina::mpi::for_ever);
  if (rank != 1) return;
  const auto bytes = receive(0, 1, world);
  bool is_equal = bytes.size() == 33 * block.size();
  for (std::size_t i = 0; is_equal && i < segments.size(); ++i)
    is_equal = std::memcmp(&bytes[i * block.size()], block.data(), block.size()) == 0;
  expect(is_equal, "2,112 MiB arrive");
}

// Whoever is first is told; without a wait, too.
void any_rank() {
  if (rank == 2) send(numbered(10, 1), 0, 4, world);
  if (rank != 0) return;
  expect(lamina::mpi::wait_for_message(MPI_ANY_SOURCE, 4, world) == 2, "rank 2 has sent");
  expect(lamina::mpi::wait_for_message(2, 4, world, milliseconds(0)) == 2,
         "a message that is there needs no patience");
  expect(receive(2, 4, world).size() == 10, "its message has 10 bytes");
}

int rank_that_was_lost(const auto& call) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    call();
  } catch (const timeout_error& error) {
    expect(std::chrono::steady_clock::now() - begin >= milliseconds(300), "patience lasts");
    expect(std::string(error.what()).find(" rank " + std::to_string(error.rank()) + " for 0 s") !=
                   std::string::npos ||
               error.rank() == MPI_ANY_SOURCE,
           error.what());
    return error.rank();
  }
  return -100;
}

void silence_is_an_error() {
  if (rank == 0) {
    const milliseconds patience(300);
    expect(rank_that_was_lost([&] { static_cast<void>(receive(2, 5, world, patience)); }) == 2,
           "rank 2 was silent");
    expect(rank_that_was_lost([&] { lamina::mpi::wait_for_message(MPI_ANY_SOURCE, 5, world, patience); }) ==
               MPI_ANY_SOURCE,
           "all were silent");
    // So small that all of it is under way: rank 1 gets it in spite of the error.
    const auto bytes = numbered(7 * mebibyte, 2);
    expect(rank_that_was_lost([&] { send(bytes, 1, 6, world, patience); }) == 1, "rank 1 took nothing");
    MPI_Barrier(world);
    MPI_Barrier(world);
  } else {
    MPI_Barrier(world);
    if (rank == 1) expect(receive(0, 6, world) == numbered(7 * mebibyte, 2), "what was given up has arrived");
    MPI_Barrier(world);
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(world, &rank);
  bytes_arrive();
  frames_arrive();
  more_than_an_int();
  any_rank();
  silence_is_an_error();
  MPI_Allreduce(MPI_IN_PLACE, &failures, 1, MPI_INT, MPI_SUM, world);
  if (rank == 0 && failures == 0) std::printf("all messages arrived\n");
  MPI_Finalize();
  return failures == 0 ? 0 : 1;
}
