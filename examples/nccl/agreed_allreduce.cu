// SPDX-License-Identifier: MIT
// Agreed selection over NCCL: the workers average the values of their layers, hence choose the same, and an allreduce of
// the chosen layers replaces that of all gradients. One process, one for each GPU; one GPU works as well. Each
// worker pulls the parameters towards a point of its own; together they must end in the middle. Exits with 77, naming the
// reason, where there is no device.
//
//     nvcc -std=c++20 --expt-relaxed-constexpr -Iinclude -Icuda examples/nccl/agreed_allreduce.cu -lnccl -o agreed_allreduce
//
// On one GPU it prints, T being what a step takes there,
//
//     1 GPUs, 200 steps of T us: 71.5 % of the elements exchanged, parameters within 3e-07 of the middle
//
// NCCL takes its count from the host, which has to wait for it once a step. With --no-wait the count is the most that a step may send
// under a budget, so it is known before; what is not sent is zeros behind the payload.
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/transform.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/cuda/lamina.cuh"

namespace {

using lamina::cuda::check_error;
using lamina::cuda::on_stream;
using tensors = std::vector<thrust::device_vector<float>>;

void check_error(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(std::string("NCCL: ") + ncclGetErrorString(result));
}

struct difference {
  __host__ __device__ float operator()(float a, float b) const { return a - b; }
};
struct descend {
  float rate;
  __host__ __device__ float operator()(float x, float gradient) const { return x - rate * gradient; }
};

/// One GPU: parameters, gradients and the worker between them.
struct replica {
  replica(const lamina::layout& model, const lamina::worker_options& options, int on_device, float point)
      : device(on_device) {
    check_error(cudaSetDevice(device));
    check_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (std::size_t l = 0; l < model.layers(); ++l) {
      parameters.emplace_back(model.sizes()[l], 0.0F);
      gradients.emplace_back(model.sizes()[l]);
      // Layers of different strength, so that some are sent less often than others.
      points.emplace_back(model.sizes()[l], point * static_cast<float>(l + 1));
    }
    worker = std::make_unique<lamina::cuda::worker<float>>(model, options);
    frame.resize(worker->largest_frame_bytes());
    std::vector<lamina::cuda::device_tensor> bound;
    for (auto& each : gradients) bound.emplace_back(each);
    worker->bind(on_stream(stream), bound);
  }
  ~replica() {
    cudaSetDevice(device);
    cudaStreamDestroy(stream);
  }
  replica(const replica&) = delete;
  replica& operator=(const replica&) = delete;
  std::byte* payload() { return thrust::raw_pointer_cast(frame.data()) + worker->prefix_bytes(); }

  int device;
  cudaStream_t stream = nullptr;
  tensors parameters, gradients, points;
  std::unique_ptr<lamina::cuda::worker<float>> worker;
  thrust::device_vector<std::byte> frame;
};

// Calls work(replica) with the device of each set.
template <class Work>
void on_each(std::vector<std::unique_ptr<replica>>& replicas, const Work& work) {
  for (auto& each : replicas) {
    check_error(cudaSetDevice(each->device));
    work(*each);
  }
}

int train(int devices, bool waits) {
  const lamina::layout model(
      {{"embedding", {256, 64}}, {"hidden", {256, 64}}, {"head", {256, 64}}, {"bias", {64}}});
  constexpr int steps = 200;
  constexpr float rate = 0.1F;
  lamina::worker_options options{.drop_ratio = 0.5};
  if (!waits) options.send_budget = 0.5;
  std::vector<std::unique_ptr<replica>> replicas;
  std::vector<int> ids;
  for (int d = 0; d < devices; ++d) {
    replicas.push_back(std::make_unique<replica>(model, options, d, static_cast<float>(d + 1)));
    ids.push_back(d);
  }
  std::vector<ncclComm_t> communicators(replicas.size());
  check_error(ncclCommInitAll(communicators.data(), devices, ids.data()));

  std::size_t exchanged_elements = 0;
  constexpr int steps_to_begin = 20;  // in which NCCL connects
  auto begin = std::chrono::steady_clock::now();
  for (int step = 1; step <= steps; ++step) {
    if (step == steps_to_begin + 1) {
      on_each(replicas, [](replica& each) { check_error(cudaStreamSynchronize(each.stream)); });
      begin = std::chrono::steady_clock::now();
    }
    on_each(replicas, [&](replica& each) {
      const auto policy = thrust::cuda::par_nosync.on(each.stream);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        thrust::transform(policy, each.parameters[l].begin(), each.parameters[l].end(),
                          each.points[l].begin(), each.gradients[l].begin(), difference());
      }
      each.worker->add(on_stream(each.stream));
    });
    check_error(ncclGroupStart());
    on_each(replicas, [&](replica& each) {
      double* values = each.worker->values();
      check_error(ncclAllReduce(values, values, model.layers(), ncclDouble, ncclAvg,
                                communicators[each.device], each.stream));
    });
    check_error(ncclGroupEnd());
    on_each(replicas, [&](replica& each) {
      const on_stream execution(each.stream);
      each.worker->select(execution, each.worker->values());
      if (!waits) {  // what the frame leaves of it is added up, too
        check_error(cudaMemsetAsync(each.payload(), 0, each.worker->most_sent_elements() * sizeof(float),
                                    each.stream));
      }
      each.worker->encode(execution, {thrust::raw_pointer_cast(each.frame.data()), each.frame.size()});
    });
    check_error(cudaSetDevice(0));
    auto& first = *replicas[0]->worker;
    // The same for all; where the host waits, it waits here.
    const std::size_t count =
        waits ? first.last_step(on_stream(replicas[0]->stream)).sent_elements : first.most_sent_elements();
    exchanged_elements += count;
    check_error(ncclGroupStart());
    on_each(replicas, [&](replica& each) {
      check_error(ncclAllReduce(each.payload(), each.payload(), count, ncclFloat, ncclAvg,
                                communicators[each.device], each.stream));
    });
    check_error(ncclGroupEnd());
    on_each(replicas, [&](replica& each) {
      const on_stream execution(each.stream);
      each.worker->commit(execution);
      each.worker->restore(execution, each.payload());  // the means, and zeros where nothing was sent
      const auto policy = thrust::cuda::par_nosync.on(each.stream);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        thrust::transform(policy, each.parameters[l].begin(), each.parameters[l].end(),
                          each.gradients[l].begin(), each.parameters[l].begin(), descend{rate});
      }
      if (waits) execution.wait();
    });
  }
  on_each(replicas, [&](replica& each) { (void)each.worker->last_step(on_stream(each.stream)); });
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;

  float furthest = 0;
  const float middle = static_cast<float>(devices + 1) / 2;
  on_each(replicas, [&](replica& each) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const float parameter = each.parameters[l][0];
      furthest = std::max(furthest, std::abs(parameter / (middle * static_cast<float>(l + 1)) - 1));
    }
  });
  for (const ncclComm_t each : communicators) check_error(ncclCommDestroy(each));
  std::printf(
      "%d GPUs, %d steps of %.1f us: %.1f %% of the elements exchanged, parameters within %.2g of the "
      "middle\n",
      devices, steps, elapsed.count() / (steps - steps_to_begin),
      100.0 * static_cast<double>(exchanged_elements) / static_cast<double>(model.elements()) / steps,
      furthest);
  return furthest < 0.01F ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(found));
    return 77;
  }
  try {
    return train(devices, !(count > 1 && std::string(arguments[1]) == "--no-wait"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
