// SPDX-License-Identifier: MIT
// lamina::cuda where Thrust is in a namespace of its own.
#include <thrust/execution_policy.h>

#include <span>
#include <vector>

#include "catch.hpp"
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/thrust_execution.hpp"
#include "lamina/cuda/values.hpp"

TEST_CASE("thrust: in a namespace of its own") {
  const lamina::cuda::with_policy execution(wrapped::thrust::device);
  const lamina::layout model({{"kernel", {100}}, {"bias", {50}}});
  std::vector<float> kernel(100, 3.0F);
  std::vector<float> bias(50, 2.0F);
  const std::vector<std::span<float>> gradients = {kernel, bias};
  lamina::cuda::gradient_compressor<float> compressor(model, {.drop_ratio = 0.5});
  compressor.bind(execution, gradients);
  compressor.accumulate(execution);
  compressor.select(execution);
  CHECK(compressor.last_step(execution).sent_elements == 100);
  CHECK(compressor.residual(execution, 1) == bias);

  lamina::cuda::layer_values<float> values(model);
  values.bind(execution, gradients);
  values.compute(execution);
  CHECK(values.values()[1] == 2.0);
}
