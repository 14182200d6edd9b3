// SPDX-License-Identifier: MIT
// Nanoseconds a byte over MPI by the size of pieces: both ways with rank r xor 1, and one way round a ring. Run by ./pieces.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lamina/collectives/mpi_channel.hpp"

namespace {

namespace collectives = lamina::collectives;
using clock_type = std::chrono::steady_clock;

// Seconds until `bytes` have gone to one rank and come from another, all pieces posted at once.
double exchange(collectives::channel& over, std::size_t to, std::size_t from, std::size_t piece,
                std::vector<std::byte>& out, std::vector<std::byte>& in) {
  {
    const std::lock_guard lock(collectives::mpi_mutex());
    MPI_Barrier(MPI_COMM_WORLD);
  }
  const auto begin = clock_type::now();
  std::size_t open = 0;
  for (std::size_t at = 0; at < out.size(); at += piece) {
    const std::size_t size = std::min(piece, out.size() - at);
    over.receive(from, 0, {{}, std::span(in).subspan(at, size)});
    over.send(to, 0, {{}, std::span(std::as_const(out)).subspan(at, size)});
    open += 2;
  }
  while (open > 0) open -= over.progress().size();
  return std::chrono::duration<double>(clock_type::now() - begin).count();
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  {
    collectives::mpi_channel channel(MPI_COMM_WORLD);
    const std::size_t bytes = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::size_t{8} << 20U;
    const int repetitions = argc > 2 ? std::atoi(argv[2]) : 5;
    std::vector<std::byte> out(bytes);
    std::vector<std::byte> in(bytes);
    const std::size_t next = (channel.rank() + 1) % channel.ranks();
    const std::size_t last = (channel.rank() + channel.ranks() - 1) % channel.ranks();
    const std::size_t peer = channel.rank() ^ 1U;
    std::vector<std::size_t> pieces = {16'000, 60'000, 131'072, 262'144, 1U << 20U, bytes};
    std::vector<std::vector<double>> both(pieces.size());
    std::vector<std::vector<double>> ring(pieces.size());
    for (int k = 0; k < repetitions; ++k) {  // interleaved
      for (std::size_t p = 0; p < pieces.size(); ++p) {
        both[p].push_back(exchange(channel, peer, peer, pieces[p], out, in));
        ring[p].push_back(exchange(channel, next, last, pieces[p], out, in));
      }
    }
    const auto nanoseconds = [&](std::vector<double>& seconds) {
      std::ranges::sort(seconds);
      return seconds[seconds.size() / 2] / static_cast<double>(bytes) * 1e9;
    };
    for (std::size_t p = 0; p < pieces.size() && channel.rank() == 0; ++p) {
      std::printf("| %9zu | %8.2f | %8.2f |\n", pieces[p], nanoseconds(both[p]), nanoseconds(ring[p]));
    }
  }
  MPI_Finalize();
}
