// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/layout.hpp>
#include <span>

#include "metrics.hpp"
#include "optimizer.hpp"
#include "transport.hpp"

namespace resnet50_ps {

/// The server's copy of the parameters: for each layer, where its elements lie.
using parameter_store = std::function<std::span<float>(std::size_t layer)>;

struct server_options {
  std::uint64_t steps = 0;
  sgd_options optimizer;
};

/// Runs the synchronous parameter server for `steps` steps: sends the parameters, takes a gradient frame from
/// every worker, applies their mean. `record` is called after each step. At the end the workers hold the
/// final parameters. Throws lamina::decode_error for a bad frame and mpi_error for a lost peer.
void serve(transport& link, const lamina::layout& model, const parameter_store& parameters,
           const server_options& options, const std::function<void(const step_metrics&)>& record);

}  // namespace resnet50_ps
