// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <string>

#include "data.hpp"
#include "link.hpp"
#include "metrics.hpp"
#include "options.hpp"
#include "replica.hpp"

namespace resnet50_ps {

/// One training run from beginning to end: what the command line says, with or without layer dropping.
struct training {
  options given;
  data_sets data;
  std::size_t workers = 1;
  bool layer_dropping = true;

  std::string name() const { return layer_dropping ? "with layer dropping" : "without layer dropping"; }
};

/// ResNet-50 as the seed makes it, for the server and each worker alike.
replica make_replica(const training& run);

/// Throws std::invalid_argument, naming it, for an option that cannot be meant, before any time is spent.
void check_training(const training& run);
/// The same for the output directory: one that --resume finds no checkpoint in, or that holds those of an earlier run.
void check_output(const training& run);

/// The server's part and a worker's. Both end when training is over; errors as serve() and work().
run_result train_as_server(server_link& link, const training& run);
void train_as_worker(worker_link& link, const training& run);

}  // namespace resnet50_ps
