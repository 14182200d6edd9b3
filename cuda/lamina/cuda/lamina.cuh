// SPDX-License-Identifier: MIT
#pragma once

/// Everything for layers on a GPU. For a CPU behind Thrust: worker.hpp and thrust_execution.hpp.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "lamina/cuda/device_tensor.hpp"
#include "lamina/cuda/stream.cuh"
#include "lamina/cuda/thrust_execution.hpp"
#include "lamina/cuda/worker.hpp"

/// \cond
template <>
struct lamina::cuda::device_element_of<__half> : lamina::cuda::device_element_of<lamina::float16> {};
template <>
struct lamina::cuda::device_element_of<__nv_bfloat16> : lamina::cuda::device_element_of<lamina::bfloat16> {};
/// \endcond
