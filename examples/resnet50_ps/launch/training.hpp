// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string>

#include "data/data.hpp"
#include "launch/options.hpp"
#include "launch/topology.hpp"
#include "messages/transport.hpp"
#include "model/replica.hpp"
#include "records/run_log.hpp"

namespace resnet50_ps {

/// One training run from beginning to end: what the command line says, with or without layer dropping.
struct training {
  options given;
  data_sets data;
  topology who;
  std::size_t place_on_machine = 0;  ///< of this rank, among the workers there
  bool layer_dropping = true;

  std::string name() const { return layer_dropping ? "with layer dropping" : "without layer dropping"; }
};

/// ResNet-50 as the seed makes it, or --load, for the server and each worker alike. Throws as load_model().
replica make_replica(const training& run, torch::Device device = torch::kCPU);

/// Throws std::invalid_argument, naming it, for an option that cannot be meant, before any time is spent.
void check_training(const training& run, bool is_worker);
/// The same for the output directory: one that --resume finds no checkpoint in, or that holds those of an earlier run.
void check_output(const training& run);

/// The part of the rank at this end. All end when training is over; rank 0 has the result. Errors as serve() and work().
run_result train(transport& ranks, const training& run);

}  // namespace resnet50_ps
