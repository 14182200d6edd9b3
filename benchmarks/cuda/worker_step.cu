// SPDX-License-Identifier: MIT
// What does a worker's step cost on a GPU, compared with a copy that moves as many bytes? Without Google Benchmark, which machines
// with a GPU may lack: all contestants take turns, medians of events on one stream. Prints a table and writes CSV.
#include <cuda_runtime_api.h>
#include <thrust/copy.h>
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/iterator/counting_iterator.h>
#include <thrust/sort.h>
#include <thrust/transform.h>
#include <thrust/transform_reduce.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "../common/model.hpp"
#include "lamina/cuda/lamina.cuh"
#if defined(LAMINA_HAS_CUBLAS)
#include "powersgd.cuh"
#endif

namespace {

using lamina::cuda::check_error;
using lamina::cuda::on_stream;
using device_floats = thrust::device_vector<float>;

struct contestant {
  std::string name;
  std::function<void()> run;
  std::vector<float> milliseconds = {};

  float median() const {
    std::vector<float> sorted = milliseconds;
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
};

struct magnitude {
  __host__ __device__ float operator()(float x) const { return x < 0 ? -x : x; }
};
struct plus {
  __host__ __device__ float operator()(float a, float b) const { return a + b; }
};
struct at_or_above {
  const float* values;
  float threshold;
  __device__ bool operator()(std::size_t i) const { return magnitude()(values[i]) >= threshold; }
};
struct strided_magnitude {
  const float* values;
  std::size_t stride;
  __device__ float operator()(std::size_t i) const { return magnitude()(values[i * stride]); }
};

// For Thrust's temporaries: from the stream's pool, which keeps what it was given back.
struct pool_allocator {
  using value_type = char;
  cudaStream_t stream;

  char* allocate(std::ptrdiff_t bytes) const {
    void* memory = nullptr;
    check_error(cudaMallocAsync(&memory, static_cast<std::size_t>(bytes), stream));
    return static_cast<char*>(memory);
  }
  void deallocate(char* memory, std::size_t) const { cudaFreeAsync(memory, stream); }
};

void let_pool_keep_memory() {
  cudaMemPool_t pool = nullptr;
  check_error(cudaDeviceGetDefaultMemPool(&pool, 0));
  std::uint64_t everything = ~std::uint64_t{0};
  check_error(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything));
}

// Interleaved, each alone on the stream: events around one call, the median of all rounds. Before each, more than the L2
// cache holds is written, so that nobody finds there what the one before left.
void measure(cudaStream_t stream, std::vector<contestant>& contestants, int rounds) {
  thrust::device_vector<std::byte> cache(std::size_t{256} << 20U);
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_error(cudaEventCreate(&begin));
  check_error(cudaEventCreate(&end));
  for (int round = -2; round < rounds; ++round) {
    for (contestant& each : contestants) {
      check_error(cudaMemsetAsync(thrust::raw_pointer_cast(cache.data()), round & 1, cache.size(), stream));
      check_error(cudaEventRecord(begin, stream));
      each.run();
      check_error(cudaEventRecord(end, stream));
      check_error(cudaEventSynchronize(end));
      float milliseconds = 0;
      check_error(cudaEventElapsedTime(&milliseconds, begin, end));
      if (round >= 0) each.milliseconds.push_back(milliseconds);
    }
  }
  check_error(cudaEventDestroy(begin));
  check_error(cudaEventDestroy(end));
}

struct limit {
  std::string numerator;
  double most;
};

// A model's worker step at 5 % sent. With `baselines` also what others do, which takes longer.
void compare(const std::string& name, const lamina::layout& model, int rounds, bool baselines,
             const std::vector<limit>& limits, std::FILE* csv) {
  cudaStream_t stream = nullptr;
  check_error(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const on_stream execution(stream);
  pool_allocator allocator{stream};
  const auto policy = thrust::cuda::par_nosync(allocator).on(stream);
  const std::size_t elements = model.elements();

  std::vector<device_floats> gradients;
  std::vector<lamina::cuda::device_tensor> tensors;
  const std::vector<float> host = lamina_benchmark::gradient_of_step(model, 1);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const auto layer = lamina_benchmark::layer_of(host, model, l);
    gradients.emplace_back(layer.begin(), layer.end());
  }
  for (auto& each : gradients) tensors.emplace_back(each);

  lamina::cuda::worker<float> worker(model, {.drop_ratio = 0.95});
  worker.bind(execution, tensors);
  thrust::device_vector<std::byte> frame(worker.largest_frame_bytes());
  const std::span<std::byte> on_device(thrust::raw_pointer_cast(frame.data()), frame.size());
  void* pinned = nullptr;
  check_error(cudaMallocHost(&pinned, frame.size()));
  const std::span<std::byte> on_host(static_cast<std::byte*>(pinned), frame.size());
  const auto step = [&](std::span<std::byte> to) {
    worker.add(execution);
    worker.select(execution);
    worker.encode(execution, to);
    worker.commit(execution);
  };
  step(on_device);

  // The same in two launches, each step committing the frame before it.
  lamina::cuda::worker<float> together(model, {.drop_ratio = 0.95});
  together.bind(execution, tensors);
  together.add(execution, {.select = true});
  together.encode(execution, on_device);
  const auto step_in_two = [&] {
    together.add(execution, {.commit = true, .select = true});
    together.encode(execution, on_device);
  };
  execution.wait();
  check_error(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  step_in_two();
  cudaGraph_t graph = nullptr;
  check_error(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t launchable = nullptr;
  check_error(cudaGraphInstantiate(&launchable, graph, 0));

  // Reads and writes what adding to a residual has to: g, a and a again.
  const std::size_t moved_bytes = 3 * elements * sizeof(float);
  thrust::device_vector<std::byte> source(moved_bytes / 2);
  thrust::device_vector<std::byte> target(moved_bytes / 2);

  std::vector<contestant> contestants;
  contestants.push_back({"copy", [&] {
                           check_error(cudaMemcpyAsync(thrust::raw_pointer_cast(target.data()),
                                                       thrust::raw_pointer_cast(source.data()),
                                                       moved_bytes / 2, cudaMemcpyDeviceToDevice, stream));
                         }});
  contestants.push_back({"step, four launches", [&] { step(on_device); }});
  contestants.push_back({"step, two launches", step_in_two});
  contestants.push_back(
      {"step, two launches, graph", [&] { check_error(cudaGraphLaunch(launchable, stream)); }});
  contestants.push_back({"step, frame to pinned memory", [&] { step(on_host); }});
  contestants.push_back({"add", [&] { worker.add(execution); }});
  contestants.push_back({"add and select", [&] { together.add(execution, {.select = true}); }});

  std::vector<device_floats> residuals;
  device_floats all, sample;
  thrust::device_vector<std::size_t> indices;
  std::vector<float> values(model.layers());
#if defined(LAMINA_HAS_CUBLAS)
  std::vector<std::unique_ptr<lamina_benchmark::powersgd>> by_rank;
  for (const int rank : {1, 2, 4, 8}) {
    if (!baselines) break;
    by_rank.push_back(std::make_unique<lamina_benchmark::powersgd>(model, gradients, rank, stream));
    contestants.push_back({"PowerSGD's products, rank " + std::to_string(rank) + ", graph",
                           [&own = *by_rank.back()] { own.step(); }});
  }
#endif
  if (baselines) {
    for (const std::size_t count : model.sizes()) residuals.emplace_back(count);
    contestants.push_back({"two launches and a wait a layer, with Thrust", [&] {
                             for (std::size_t l = 0; l < model.layers(); ++l) {
                               thrust::transform(policy, residuals[l].begin(), residuals[l].end(),
                                                 gradients[l].begin(), residuals[l].begin(), plus());
                               values[l] =
                                   thrust::transform_reduce(policy, residuals[l].begin(), residuals[l].end(),
                                                            magnitude(), 0.0F, plus());
                             }
                           }});
    all.resize(elements);
    std::size_t offset = 0;
    for (const auto& each : gradients) {
      thrust::copy(each.begin(), each.end(), all.begin() + static_cast<std::ptrdiff_t>(offset));
      offset += each.size();
    }
    // 1 % of the elements, by a threshold from a sorted sample of 1 %, as Deep Gradient Compression selects.
    const std::size_t sampled = elements / 100;
    sample.resize(sampled);
    indices.resize(elements);
    contestants.push_back(
        {"sampled top 1 % (Deep Gradient Compression)", [&, sampled] {
           const float* begin = thrust::raw_pointer_cast(all.data());
           const thrust::counting_iterator<std::size_t> first(0);
           thrust::transform(policy, first, first + static_cast<std::ptrdiff_t>(sampled), sample.begin(),
                             strided_magnitude{begin, 100});
           thrust::sort(policy, sample.begin(), sample.end());
           float threshold = 0;
           check_error(cudaMemcpyAsync(&threshold,
                                       thrust::raw_pointer_cast(sample.data()) + sampled - sampled / 100,
                                       sizeof threshold, cudaMemcpyDeviceToHost, stream));
           check_error(cudaStreamSynchronize(stream));
           thrust::copy_if(policy, first, first + static_cast<std::ptrdiff_t>(elements), indices.begin(),
                           at_or_above{begin, threshold});
         }});
  }
  measure(stream, contestants, rounds);

  const auto report = worker.last_step(execution);
  std::printf("\n%s: %zu layers, %zu elements, %.1f %% sent in the last step\n", name.c_str(), model.layers(),
              elements, 100.0 * static_cast<double>(report.sent_elements) / static_cast<double>(elements));
  const float copy = contestants.front().median();
  for (const contestant& each : contestants) {
    std::printf("  %-46s %10.1f us  %6.3f of the copy\n", each.name.c_str(), 1e3 * each.median(),
                each.median() / copy);
    std::fprintf(csv, "%s,\"%s\",%.3f,%.4f\n", name.c_str(), each.name.c_str(), 1e3 * each.median(),
                 each.median() / copy);
  }
  for (const limit& each : limits) {
    const auto found = std::ranges::find(contestants, each.numerator, &contestant::name);
    const double value = found->median() / copy;
    std::printf("ratio %-44s %6.3f limit %.2f %s\n", (name + ", " + each.numerator + " over a copy").c_str(),
                value, each.most, value <= each.most ? "ok" : "over");
  }
  const auto median_of = [&](const char* what) {
    return std::ranges::find(contestants, what, &contestant::name)->median();
  };
  const double decision_us = 1e3 * (median_of("add and select") - median_of("add"));
  std::printf("%s, the decision %.1f us limit 10.0 %s\n", name.c_str(), decision_us,
              decision_us <= 10 ? "ok" : "over");
  check_error(cudaFreeHost(pinned));
  check_error(cudaGraphExecDestroy(launchable));
  check_error(cudaGraphDestroy(graph));
  check_error(cudaStreamDestroy(stream));
}

}  // namespace

int main(int count, char** arguments) {
  try {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
      std::printf("skipped: no CUDA device\n");
      return 77;
    }
    cudaDeviceProp device{};
    check_error(cudaGetDeviceProperties(&device, 0));
    int driver = 0;
    check_error(cudaDriverGetVersion(&driver));
    std::printf("%s, driver for CUDA %d.%d\n", device.name, driver / 1000, driver % 1000 / 10);
    std::FILE* csv = std::fopen(count > 1 ? arguments[1] : "worker_step.csv", "w");
    if (csv == nullptr) throw std::runtime_error("cannot write the results");
    std::fprintf(csv, "model,what,microseconds,ratio to a copy (%s)\n", device.name);
#if !defined(LAMINA_HAS_CUBLAS)
    std::printf("PowerSGD's products: left out, cuBLAS was not found\n");
#endif

    let_pool_keep_memory();
    compare("ResNet-50", lamina_benchmark::read_model("resnet50"), 200, true,
            {{"step, two launches, graph", 1.30}, {"step, two launches", 1.30}}, csv);
    std::vector<lamina::layer> layers;
    for (std::size_t l = 0; l < 1000; ++l) layers.push_back({std::to_string(l), {1000, 1000}});
    std::size_t available = 0;
    std::size_t total = 0;
    check_error(cudaMemGetInfo(&available, &total));
    // Gradients, residual, frame and the copy's two sides, and tables.
    if (available > std::size_t{24} << 30U) {
      compare("10^9 elements", lamina::layout(std::move(layers)), 20, false,
              {{"step, two launches, graph", 1.20}}, csv);
      // Whose 244,141 totals are combined in runs of 64, on three levels.
      compare("one layer of 10^9", lamina::layout({{"all", {1000, 1000, 1000}}}), 10, false, {}, csv);
    } else {
      std::printf("\n10^9 elements: left out, they need 24 GiB and %.1f are free\n",
                  static_cast<double>(available) / 0x1p30);
    }
    std::fclose(csv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
