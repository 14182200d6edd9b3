// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "ways.hpp"

namespace lab {

/// What to run: the command line, with its defaults.
struct options {
  // Data and network.
  std::string data = "synthetic";
  std::string network = "resnet50";
  std::int64_t image_size_pixels = 0;
  std::int64_t classes = 10;
  std::size_t batch_images = 16;
  std::uint64_t steps = 300;
  std::uint64_t seed = 1;
  float learning_rate = 0.1F;
  std::uint64_t warm_up_steps = 20;
  float momentum = 0;
  bool no_evaluation = false;

  // Layer dropping.
  double drop_ratio = 0.95;
  std::optional<double> send_budget;
  std::uint64_t drop_warm_up_steps = 0;
  std::uint64_t refresh_steps = 1;
  std::string selection = "agreed";  ///< local or agreed
  std::size_t fragment_elements = 0;
  double residual_momentum = 0;

  // Who sends to whom.
  std::string topology = "ps";  ///< ps, allreduce or mpi_allreduce
  std::size_t workers_per_node = 1;
  link_options links;  ///< with ps

  // All-reduce.
  std::string overlap = "none";          ///< none, backward or step
  std::string decide = "at_end";         ///< at_end or ahead
  std::string exchange = "sums";         ///< sums or owners
  std::string collectives = "pairwise";  ///< an algorithm, or by_type
  std::string sum_payload = "as_is";     ///< or bfloat16
  std::optional<std::size_t> bucket_bytes;

  // Experiments on a network.
  std::string record;  ///< directory; empty: nothing is recorded
  std::uint64_t recorded_steps = 6;
  std::string replay;  ///< directory; empty: gradients are computed
  bool by_layer = false;
  double compute_seconds = 0;
  double server_seconds = 0;
  std::uint64_t timeout_seconds = 600;

  bool drops_layers() const { return send_budget || drop_ratio > 0; }
  bool has_server() const { return topology == "ps"; }
  bool overlaps() const { return overlap != "none"; }
};

}  // namespace lab
