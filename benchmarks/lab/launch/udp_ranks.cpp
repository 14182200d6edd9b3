// SPDX-License-Identifier: MIT
#include "launch/udp_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "loops/losses.hpp"
#include "messages/mpi_session.hpp"
#include "messages/over_udp.hpp"

namespace lab {
namespace {

// Of each worker.
std::vector<lamina::bounded::chunk_grid> grids_of_slices(const training& run, const replica& local,
                                                         lamina::payload_type payload,
                                                         const loss_plan& losses) {
  std::vector<lamina::bounded::chunk_grid> grids;
  if (run.topology.has_server) return grids;
  const lamina::part_slices slices = slices_of(losses, local.model(), payload, run.topology.workers());
  for (std::size_t w = 0; w < slices.owners(); ++w)
    grids.push_back(frame_grid(slices.of(w), payload, losses.packet_data_bytes));
  return grids;
}

frame_options frames_of(const training& run, const replica& local) {
  const loss_plan losses = plan_of(run, 0).losses;
  const lamina::payload_type payload = worker_options_of(run, 0, 0).compression.payload;
  return {.gradients = frame_grid(local.model(), payload, losses.packet_data_bytes),
          .parameters = frame_grid(local.model(), lamina::payload_type::as_is, losses.packet_data_bytes),
          .slices = grids_of_slices(run, local, payload, losses),
          .up = frames_up(run.options),
          .most_bound_up_ppm = losses.bound_up_ppm,
          .most_bound_down_ppm = losses.bound_down_ppm,
          .stop = stop_of(run.options),
          .has_tags = losses.has_tags};
}

udp_options options_of(const training& run, const replica& local, std::size_t rank) {
  const lab::options& options = run.options;
  const topology& who = run.topology;
  // The clients send to the server at the same time; it sends to all of them over one link, which they share in turns. Without a server
  // each sends to one, and hears of one, at a time.
  const bool is_one_of_many = who.has_server && !who.is_server(rank);
  return {.rank = rank,
          .ranks = who.ranks(),
          .takes_gradients = !who.has_server || who.is_server(rank),
          .peers = who.peers_of(rank),
          .frames = frames_of(run, local),
          .link_bits = options.link_rate_bits,
          .senders =
              static_cast<std::uint32_t>(is_one_of_many ? std::max<std::size_t>(1, who.below(0).size()) : 1),
          .mtu = options.mtu,
          .max_message_bytes = largest_message_bytes(run, local),
          .timeout_of =
              [&run, rank](std::size_t awaited) {
                return std::chrono::seconds(run.options.timeout_seconds) *
                       run.topology.patience(rank, awaited);
              },
          .name_of = [&run](std::size_t each) { return run.topology.name_of(each); }};
}

}  // namespace

lamina::udp::rank_addresses udp_paths_of(const lab::options& options, const launch_info& here) {
  const bool is_one_machine =
      std::ranges::all_of(here.machines, [&](int each) { return each == here.machines[0]; });
  return local_paths(options.interfaces, is_one_machine);
}

std::unique_ptr<transport> meet_over_udp(const training& run, const replica& local) {
  const lab::options& options = run.options;
  int number = 0;
  check_mpi(MPI_Comm_rank(run.communicator, &number), "MPI_Comm_rank");
  const auto rank = static_cast<std::size_t>(number);
  return meet_over_udp(run.communicator, options_of(run, local, rank), run.paths,
                       {.inject_loss = options.inject_loss, .inject_seed = options.inject_seed << 8U | rank});
}

std::string describe_udp(const lab::options& options) {
  if (options.transport != "udp") return "";
  return fmt::format("udp, interface {}, link rate {}, mtu {}; ",
                     options.interfaces.empty() ? "any" : options.interfaces, options.link_rate_bits,
                     options.mtu);
}

}  // namespace lab
