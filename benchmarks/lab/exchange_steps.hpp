// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/layout.hpp>
#include <lamina/selection.hpp>
#include <string>
#include <vector>

#include "mpi_ranks.hpp"
#include "ways.hpp"

/// Steps of a synchronous parameter server without a model: the frames of a layout go up and down, and are decoded, summed and
/// applied as in training. Nobody computes gradients, and nobody waits for anything but frames.
namespace exchange {

/// Of silence, after which a rank is lost.
inline constexpr std::chrono::seconds timeout(60);
inline std::string name_of(std::size_t rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

/// What is exchanged. The same on all ranks.
struct exchange_plan {
  lamina::layout layers{std::vector<lamina::layer>()};
  double share = 1;  ///< of the elements, in each frame of gradients; above 0, at most 1
  std::uint64_t steps = 50;
  lab::link_options links = {};
};

/// One step, as all ranks together saw it. The ranks' clocks must agree, as on one machine they do.
struct step_seen {
  std::uint64_t step = 0;
  double down_seconds = 0;  ///< from the first byte of the parameters to the last worker that has them
  double up_seconds = 0;    ///< from the first worker's first byte to the last frame at the server
  double seconds = 0;  ///< of both: from the first byte of the parameters to the last frame at the server
  double period_seconds = 0;     ///< from the first byte of the parameters to that of the next
  std::uint64_t bytes_down = 0;  ///< of all frames
  std::uint64_t bytes_up = 0;
  double missing_up = 0;            ///< share of the elements
  double cpu_seconds = 0;           ///< of all ranks, in the period
  lab::packet_counts packets = {};  ///< likewise
};

/// Which layers go in each step: as many as make the share, on the average to the element, from all over the layout. All layers have
/// their turn before one has its second.
class rotation {
 public:
  rotation(const lamina::layout& layers, double share);
  /// Of the next step.
  const lamina::selection& next();

 private:
  lamina::layout layers_;
  double share_;
  std::vector<std::size_t> order_;
  std::size_t at_ = 0;
  std::uint64_t steps_ = 0;
  std::uint64_t sent_elements_ = 0;
  lamina::selection chosen_;
};

/// The server, rank 0: what all its steps took. Throws std::runtime_error for a lost peer, and for a worker whose parameters at the
/// end are not the server's. `ranks` are those of the way, by MPI.
std::vector<step_seen> serve(lab::way& over, const lab::mpi_ranks& ranks, const exchange_plan& plan);
/// Any other rank.
void work(lab::way& over, const lab::mpi_ranks& ranks, const exchange_plan& plan);

}  // namespace exchange
