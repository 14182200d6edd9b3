// SPDX-License-Identifier: MIT
// lamina::cuda where Thrust is in a namespace of its own.
#include <thrust/execution_policy.h>

#include <span>
#include <vector>

#include "catch.hpp"
#include "lamina/cuda/thrust_execution.hpp"
#include "lamina/cuda/worker.hpp"

TEST_CASE("thrust: in a namespace of its own") {
  const lamina::cuda::with_policy execution(wrapped::thrust::device);
  const lamina::layout model({{"kernel", {100}}, {"bias", {50}}});
  std::vector<float> kernel(100, 3.0F);
  std::vector<float> bias(50, 2.0F);
  const std::vector<std::span<float>> gradients = {kernel, bias};
  lamina::cuda::worker<float> worker(model, {.drop_ratio = 0.5});
  worker.bind(execution, gradients);
  worker.add(execution);
  worker.select(execution);
  CHECK(worker.last_step(execution).sent_elements == 100);
  CHECK(worker.residual(execution, 1) == bias);
}
