// SPDX-License-Identifier: MIT
// The cases on a GPU, and what only a GPU can do: streams, graphs, pinned memory, pointers of the wrong place. Prints a line
// a case; exits with 77, naming the reason, where there is no device.
#include <cuda_runtime_api.h>
#include <thrust/execution_policy.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cuda/cases.hpp"
#include "lamina/cuda/lamina.cuh"

namespace {

using lamina::cuda::check_error;
using lamina::cuda::on_stream;
using lamina_test::contains;
using lamina_test::refuses;
using lamina_test::require;

class stream {
 public:
  stream() { check_error(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~stream() { cudaStreamDestroy(stream_); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class pinned {
 public:
  explicit pinned(std::size_t bytes) : bytes_(bytes) { check_error(cudaMallocHost(&memory_, bytes)); }
  ~pinned() { cudaFreeHost(memory_); }
  pinned(const pinned&) = delete;
  pinned& operator=(const pinned&) = delete;
  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(memory_), bytes_}; }

 private:
  void* memory_ = nullptr;
  std::size_t bytes_;
};

// What `launches` launches on the stream, as a graph.
class graph {
 public:
  template <class Launches>
  graph(cudaStream_t stream, const Launches& launches) : stream_(stream) {
    cudaGraph_t captured = nullptr;
    check_error(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launches();
    check_error(cudaStreamEndCapture(stream, &captured));
    check_error(cudaGraphInstantiate(&launchable_, captured, 0));
    check_error(cudaGraphDestroy(captured));
  }
  ~graph() { cudaGraphExecDestroy(launchable_); }
  graph(const graph&) = delete;
  graph& operator=(const graph&) = delete;
  void launch() const { check_error(cudaGraphLaunch(launchable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t launchable_ = nullptr;
};

// The frames of graphs that are launched again and again are those of the CPU, also when one gets lost: by one graph a step and one to
// commit, or in two launches a step, by one graph for after a frame that has arrived and one for after none.
void graphs_follow_the_cpu(bool commits_with_add) {
  const stream own;
  const on_stream execution(own.get());
  const lamina::layout model = lamina_test::model_of(lamina_test::telling_sizes());
  const lamina::worker_options options{
      .drop_ratio = 0.8, .momentum = 0.9, .payload = lamina::payload_type::int8};
  lamina_test::host_worker<float> cpu(model, options);
  lamina::cuda::worker<float> device(model, options);
  lamina_test::device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const pinned frame(device.largest_frame_bytes());
  const auto step = [&](bool commits) {
    return graph(own.get(), [&] {
      device.add(execution, {.commit = commits, .select = commits_with_add});
      if (!commits_with_add) device.select(execution);
      device.encode(execution, frame.bytes());
    });
  };
  const graph after_none = step(false);
  const graph after_a_frame = step(true);
  const graph commit(own.get(), [&] { device.commit(execution); });

  std::mt19937 random(5);
  bool has_arrived = false;
  for (int round = 1; round <= 20; ++round) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto gradient = lamina_test::random_gradient<float>(random, model.sizes()[l], 1.0F);
      gradients.set(l, gradient);
      cpu.add(l, gradient);
    }
    check_error(cudaDeviceSynchronize());
    (has_arrived && commits_with_add ? after_a_frame : after_none).launch();
    execution.wait();
    require(lamina_test::same_bits(lamina::cuda::finish_frame(frame.bytes()), cpu.encode()),
            "the frames differ in step " + std::to_string(round));
    has_arrived = round % 5 != 4;
    if (!has_arrived) continue;
    cpu.commit();
    if (!commits_with_add) commit.launch();
  }
  (void)device.last_step(execution);
}

// A graph's commit that is launched after the next gradients leaves them, and is told.
void graphs_lose_nothing_out_of_order() {
  const stream own;
  const on_stream execution(own.get());
  const lamina::layout model = lamina_test::model_of({100, 5000});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0});
  lamina_test::device_gradients<float> gradients(model, 0);
  gradients.set(1, std::vector<float>(5000, 1.0F));
  device.bind(execution, gradients.tensors());
  const pinned frame(device.largest_frame_bytes());
  const graph gather(own.get(), [&] { device.add(execution); });
  const graph send(own.get(), [&] {
    device.select(execution);
    device.encode(execution, frame.bytes());
  });
  const graph commit(own.get(), [&] { device.commit(execution); });
  check_error(cudaDeviceSynchronize());
  gather.launch();
  send.launch();
  gather.launch();
  commit.launch();
  require(device.residual(execution, 1)[4999] == 2.0F, "the commit discarded a gradient that came later");
  refuses<std::logic_error>({"out of order"}, [&] { (void)device.last_step(execution); });
  send.launch();
  commit.launch();
  require(device.residual(execution, 1)[4999] == 0.0F, "the commit in order did nothing");
  (void)device.last_step(execution);
}

// A graph sees the gradients that were bound before its launch, and none is captured that would bind those of its capture again.
void graphs_follow_pointers() {
  const stream own;
  const on_stream execution(own.get());
  const lamina::layout model = lamina_test::model_of({100, 5000});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0});
  std::vector<lamina_test::device_gradients<float>> gradients;
  for (int i = 0; i < 9; ++i) {
    gradients.emplace_back(model, 0);
    gradients.back().set(1, std::vector<float>(5000, static_cast<float>(1 << i)));
  }
  device.bind(execution, gradients[0].tensors());
  check_error(cudaDeviceSynchronize());
  const graph gather(own.get(), [&] {
    device.add(execution);
    refuses<std::logic_error>({"bind", "captured"}, [&] { device.bind(execution, gradients[1].tensors()); });
    refuses<std::logic_error>({"save", "captured"}, [&] { (void)device.save(execution); });
    refuses<std::logic_error>({"load", "captured"}, [&] { device.load(execution, {}); });
  });
  for (auto& each : gradients) {
    device.bind(execution, each.tensors());
    gather.launch();
  }
  require(device.residual(execution, 1) == std::vector<float>(5000, 511.0F),
          "a graph has seen other gradients than were bound before it");
}

void refuses_host_memory() {
  const on_stream execution;
  const lamina::layout model = lamina_test::model_of({100});
  lamina::cuda::worker<float> device(model);
  std::vector<float> host(100);
  const std::vector<lamina::cuda::device_tensor> tensors = {std::span(host)};
  using bad = std::invalid_argument;
  refuses<bad>({"layer0", "host memory"}, [&] { device.bind(execution, tensors); });

  lamina_test::device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  device.add(execution);
  const std::vector<double> values(1);
  refuses<bad>({"agreed values"}, [&] { device.select(execution, values.data()); });
  const lamina_test::on_device<double> device_values(1);
  const std::vector<std::uint8_t> held(1);
  refuses<bad>({"held"}, [&] { device.select(execution, device_values.data(), held.data()); });
  device.select(execution);
  alignas(64) static std::byte pageable[4096];
  refuses<bad>({"host memory"}, [&] { device.encode(execution, pageable); });
}

void refuses_another_device() {
  int devices = 0;
  check_error(cudaGetDeviceCount(&devices));
  if (devices < 2) {
    std::printf("     (left out: memory of another device, there is one)\n");
    return;
  }
  const lamina::layout model = lamina_test::model_of({100});
  check_error(cudaSetDevice(1));
  lamina_test::device_gradients<float> elsewhere(model, 0);
  check_error(cudaSetDevice(0));
  lamina::cuda::worker<float> device(model);
  refuses<std::invalid_argument>({"device 1"}, [&] { device.bind(on_stream(), elsewhere.tensors()); });
}

void errors_say_where() {
  using lamina::cuda::cuda_error;
  refuses<cuda_error>({"cudaErrorInvalidValue", "device_test.cu:"},
                      [] { check_error(cudaErrorInvalidValue); });
  refuses<cuda_error>({"cudaErrorInvalidDevice"}, [] { check_error(cudaSetDevice(1 << 20)); });
}

// As after an error that spoiled the context: a destructor that threw would end the program.
void passes_over_memory_that_cannot_be_freed() {
  int on_host = 0;
  lamina::cuda::detail::device_deleter{nullptr, 0}(&on_host);
  check_error(cudaDeviceSynchronize());  // and leaves no error behind
}

void takes_cuda_half_types() {
  thrust::device_vector<__half> halves(3);
  thrust::device_vector<__nv_bfloat16> brains(3);
  require(lamina::cuda::device_tensor(halves).type() == lamina::cuda::device_element::float16 &&
              lamina::cuda::device_tensor(brains).type() == lamina::cuda::device_element::bfloat16,
          "__half or __nv_bfloat16 is taken for another type");
}

// One layer of float, for an emulator to count: differences of two sizes and of two numbers of passes tell how many PTX instructions an
// element costs.
void add_passes(std::size_t elements, int passes) {
  const on_stream execution;
  const lamina::layout model = lamina_test::model_of({elements});
  lamina::cuda::worker<float> device(model);
  lamina_test::device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(elements, 1.0F));
  device.bind(execution, gradients.tensors());
  // The residual is clear before the first, and is loaded from the second on.
  for (int pass = 0; pass < passes; ++pass) device.add(execution);
  execution.wait();
}

}  // namespace

int main(int count, char** arguments) {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(found));
    return 77;
  }
  if (count == 4 && std::string(arguments[1]) == "--add") {
    add_passes(std::strtoull(arguments[2], nullptr, 10), std::atoi(arguments[3]));
    return 0;
  }
  // The cases whose names hold the first argument, and none of the others.
  const std::string wanted = count > 1 ? arguments[1] : "";
  const std::span others(arguments + (std::min)(count, 2), arguments + count);
  const auto is_left_out = [&](const std::string& name) {
    return std::ranges::any_of(others, [&](const char* part) { return contains(name, part); });
  };
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // so that a hang or an abort leaves what came before
  int failed = 0;
  int run = 0;
  const auto visit = [&](const std::string& name, const std::function<void()>& one) {
    if (!contains(name, wanted) || is_left_out(name)) return;
    ++run;
    try {
      one();
      check_error(cudaDeviceSynchronize());
      std::printf("ok   %s\n", name.c_str());
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL %s: %s\n", name.c_str(), error.what());
    }
  };
  const stream own;
  lamina_test::for_each_case(on_stream(own.get()),
                             [&](const auto& name, const auto& one) { visit("stream: " + name, one); });
  visit("Thrust's policy follows the CPU", [] {
    lamina_test::follows_the_cpu<float, float>(lamina::cuda::with_policy(thrust::device), {.steps = 5});
  });
  visit("graphs follow the CPU", [] { graphs_follow_the_cpu(false); });
  visit("graphs of two launches follow the CPU", [] { graphs_follow_the_cpu(true); });
  visit("graphs lose nothing out of order", graphs_lose_nothing_out_of_order);
  visit("graphs follow pointers", graphs_follow_pointers);
  visit("host memory is refused", refuses_host_memory);
  visit("memory of another device is refused", refuses_another_device);
  visit("errors say where", errors_say_where);
  visit("CUDA's half types", takes_cuda_half_types);
  visit("memory that cannot be freed", passes_over_memory_that_cannot_be_freed);
  std::printf("%d of %d cases passed\n", run - failed, run);
  return failed == 0 && run > 0 ? 0 : 1;
}
