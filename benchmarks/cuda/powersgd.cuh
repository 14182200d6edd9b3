// SPDX-License-Identifier: MIT
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <thrust/device_vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/cuda/lamina.cuh"

/// What PowerSGD (Vogels et al. 2019, Algorithm 1) computes on a worker in a step, without its two all-reduces: the error is added to
/// the gradient, P = M Q, P is made orthonormal, Q = Mᵀ P, and what P Qᵀ says is taken off. By cuBLAS, all layers in one graph.
namespace lamina_benchmark {

inline void check_cublas(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string("cuBLAS: ") + cublasGetStatusString(status));
}

/// A layer as a matrix, column by column: as many rows as a weight has inputs, as many columns as it has outputs.
struct powersgd_layer {
  const float* gradient;
  float* matrix;  // error, and the gradient added to it
  float* p;       // rows x rank
  float* q;       // columns x rank
  unsigned rows;
  unsigned columns;
};

__global__ inline void powersgd_add(const powersgd_layer* layers, unsigned count) {
  for (unsigned l = blockIdx.y; l < count; l += gridDim.y) {
    const powersgd_layer& layer = layers[l];
    const std::size_t elements = std::size_t{layer.rows} * layer.columns;
    const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += stride)
      layer.matrix[i] += layer.gradient[i];
  }
}

/// Gram-Schmidt, modified, a block for each layer.
__global__ inline void powersgd_orthonormalise(const powersgd_layer* layers, unsigned rank) {
  __shared__ float of_warp[32];
  const powersgd_layer& layer = layers[blockIdx.x];
  const auto dot = [&](const float* a, const float* b) {
    float sum = 0;
    for (unsigned i = threadIdx.x; i < layer.rows; i += blockDim.x) sum += a[i] * b[i];
    for (unsigned step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0U, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    float all = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) all += of_warp[warp];
    return all;
  };
  for (unsigned c = 0; c < rank; ++c) {
    float* const column = layer.p + std::size_t{c} * layer.rows;
    const float factor = rsqrtf(dot(column, column) + 1e-30F);
    for (unsigned i = threadIdx.x; i < layer.rows; i += blockDim.x) column[i] *= factor;
    for (unsigned other = c + 1; other < rank; ++other) {
      float* const next = layer.p + std::size_t{other} * layer.rows;
      const float along = dot(column, next);
      for (unsigned i = threadIdx.x; i < layer.rows; i += blockDim.x) next[i] -= along * column[i];
    }
  }
}

class powersgd {
 public:
  /// Of layers of two dimensions and more, as many as there are gradients; the others go out as they are.
  powersgd(const lamina::layout& model, const std::vector<thrust::device_vector<float>>& gradients, int rank,
           cudaStream_t stream)
      : rank_(rank), stream_(stream), workspace_(std::size_t{32} << 20U) {
    std::size_t elements = 0;
    std::size_t of_p = 0;
    std::size_t of_q = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto& shape = model[l].shape;
      if (shape.size() < 2) continue;
      const auto columns = static_cast<unsigned>(shape[0]);
      layers_.push_back({gradients[l].data().get(), nullptr, nullptr, nullptr,
                         static_cast<unsigned>(model.sizes()[l] / columns), columns});
      elements += model.sizes()[l];
      of_p += std::size_t{layers_.back().rows} * static_cast<unsigned>(rank);
      of_q += std::size_t{columns} * static_cast<unsigned>(rank);
    }
    matrices_.resize(elements);
    p_.resize(of_p);
    q_.resize(of_q, 1.0F);
    float* matrix = matrices_.data().get();
    float* p = p_.data().get();
    float* q = q_.data().get();
    for (powersgd_layer& each : layers_) {
      each.matrix = matrix;
      each.p = p;
      each.q = q;
      matrix += std::size_t{each.rows} * each.columns;
      p += std::size_t{each.rows} * static_cast<unsigned>(rank);
      q += std::size_t{each.columns} * static_cast<unsigned>(rank);
    }
    on_device_ = layers_;
    check_cublas(cublasCreate(&cublas_));
    check_cublas(cublasSetStream(cublas_, stream));
    check_cublas(cublasSetWorkspace(cublas_, workspace_.data().get(), workspace_.size()));
    check_cublas(cublasSetMathMode(cublas_, CUBLAS_TF32_TENSOR_OP_MATH));
    compute();  // outside of the graph first, so that nothing is loaded while it is captured
    lamina::cuda::check_error(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    lamina::cuda::check_error(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    compute();
    lamina::cuda::check_error(cudaStreamEndCapture(stream, &graph));
    lamina::cuda::check_error(cudaGraphInstantiate(&launchable_, graph, 0));
    lamina::cuda::check_error(cudaGraphDestroy(graph));
  }
  ~powersgd() {
    cudaGraphExecDestroy(launchable_);
    cublasDestroy(cublas_);
  }
  powersgd(const powersgd&) = delete;
  powersgd& operator=(const powersgd&) = delete;

  void step() const { lamina::cuda::check_error(cudaGraphLaunch(launchable_, stream_)); }

 private:
  void compute() const {
    const auto count = static_cast<unsigned>(layers_.size());
    powersgd_add<<<dim3(32, count), 256, 0, stream_>>>(on_device_.data().get(), count);
    for (const powersgd_layer& each : layers_) multiply(CUBLAS_OP_N, each, each.q, each.p);
    powersgd_orthonormalise<<<count, 256, 0, stream_>>>(on_device_.data().get(),
                                                        static_cast<unsigned>(rank_));
    for (const powersgd_layer& each : layers_) multiply(CUBLAS_OP_T, each, each.p, each.q);
    for (const powersgd_layer& each : layers_) {
      const float minus = -1;
      const float one = 1;
      const auto rows = static_cast<int>(each.rows);
      const auto columns = static_cast<int>(each.columns);
      check_cublas(cublasSgemm(cublas_, CUBLAS_OP_N, CUBLAS_OP_T, rows, columns, rank_, &minus, each.p, rows,
                               each.q, columns, &one, each.matrix, rows));
    }
    lamina::cuda::check_error(cudaGetLastError());
  }

  // to = M from, or Mᵀ from.
  void multiply(cublasOperation_t operation, const powersgd_layer& layer, const float* from,
                float* to) const {
    const float one = 1;
    const float zero = 0;
    const auto rows = static_cast<int>(layer.rows);
    const auto columns = static_cast<int>(layer.columns);
    const bool is_plain = operation == CUBLAS_OP_N;
    check_cublas(cublasSgemm(cublas_, operation, CUBLAS_OP_N, is_plain ? rows : columns, rank_,
                             is_plain ? columns : rows, &one, layer.matrix, rows, from,
                             is_plain ? columns : rows, &zero, to, is_plain ? rows : columns));
  }

  int rank_;
  cudaStream_t stream_;
  thrust::device_vector<std::byte> workspace_;
  std::vector<powersgd_layer> layers_;
  thrust::device_vector<powersgd_layer> on_device_;
  thrust::device_vector<float> matrices_;
  thrust::device_vector<float> p_;
  thrust::device_vector<float> q_;
  cublasHandle_t cublas_ = nullptr;
  cudaGraphExec_t launchable_ = nullptr;
};

}  // namespace lamina_benchmark
