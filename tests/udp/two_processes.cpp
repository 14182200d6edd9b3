// SPDX-License-Identifier: MIT
// Rank 1 sends rank 0 a frame of gradients, of which a tenth of each layer may be missing: two_processes RANK ADDRESS ADDRESS SECRET
#include <cstdio>
#include <cstdlib>
#include <lamina/lamina.hpp>
#include <lamina/udp/udp.hpp>

namespace bounded = lamina::bounded;
namespace udp = lamina::udp;

int main(int argc, char** argv) try {
  if (argc != 5) return 2;
  const std::size_t rank = std::strtoul(argv[1], nullptr, 10);
  const std::vector<udp::rank_addresses> all = {udp::parse_addresses(argv[2]), udp::parse_addresses(argv[3])};

  const lamina::layout model({{"embedding", {1000, 64}}, {"head", {64, 10}}});
  constexpr auto type = lamina::payload_type::as_is;
  const auto grid = bounded::chunk_grid::of<float>(model, type, bounded::chunk_elements<float>(type, 1416));
  constexpr std::uint32_t tenth = 100'000;             // in parts per million
  constexpr auto none = lamina::frame_checksum::none;  // packets have one

  udp::transport ranks(udp::open_sockets(all.at(rank), {.inject_loss = 0.2}), all,
                       {.rank = rank,
                        .ranks = 2,
                        .peers = {{.rank = 1 - rank, .sends = grid, .takes = grid, .most_bound_ppm = tenth}},
                        .secret = std::strtoull(argv[4], nullptr, 10)});
  if (rank == 1) {
    lamina::worker<float> worker(model, {.drop_ratio = 0, .frame_checksum = none});
    auto step = worker.add(std::vector{std::vector<float>(64'000, 2.0F), std::vector<float>(640, 1.0F)});
    const lamina::encoded_frame& frame = step.frame();
    const bounded::frame_chunks chunks(frame, step.sent(), grid, {.bound_ppm = tenth});
    const std::size_t server = 0;
    const auto sent = ranks.send_frame({&server, 1}, chunks, {}, std::chrono::seconds(10));
    step.commit(*sent[0]);  // what is missing stays in the residual
  } else {
    const udp::arrival got = ranks.receive(1, std::chrono::seconds(10));
    const auto frame = lamina::decode<float>(got.bytes, model);  // missing elements are zeros
    std::vector<float> head(640);
    frame.copy(1, 0, head);
    std::printf("%zu of %zu chunks are missing, the head begins with %g\n", got.arrived.lost_chunks(),
                got.arrived.chunks(0) + got.arrived.chunks(1), static_cast<double>(head[0]));
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "two_processes: %s\n", error.what());
  return 1;
}
