// SPDX-License-Identifier: MIT
// What does a whole step of a worker cost, and what does the receiver have for it? Residual, selection and message of
// lamina and of what others do, at several shares sent, compared with a copy of the gradient and the plain addition.

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "baselines/adacomp.hpp"
#include "baselines/block_sparse.hpp"
#include "baselines/fp8.hpp"
#include "baselines/one_bit.hpp"
#include "baselines/one_pass_threshold.hpp"
#include "baselines/power_sgd.hpp"
#include "baselines/random_k.hpp"
#include "baselines/terngrad.hpp"
#include "baselines/top_k.hpp"
#include "common/lamina_method.hpp"
#include "common/limits.hpp"
#include "common/method_steps.hpp"
#include "common/model.hpp"

namespace {

using lamina_baselines::method;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
const std::vector<std::vector<float>> gradients = lamina_benchmark::gradients_in_turn(model);

struct contestant {
  std::string name;
  std::function<std::unique_ptr<method>()> make;
  std::unique_ptr<method> kept = nullptr;  // between repetitions, which are interleaved

  method& worker() {
    if (!kept) {
      kept = make();
      for (std::size_t t = 0; t < 4; ++t)
        kept->step(gradients[t % gradients.size()]);  // memory has grown, residuals are not empty
    }
    return *kept;
  }
};

void set_counters(benchmark::State& state, double sent_bytes, double touched_bytes,
                  double entropy_bytes = 0) {
  lamina_benchmark::set_counters(state, model, sent_bytes, touched_bytes, entropy_bytes);
}

void step(benchmark::State& state, contestant& of) {
  lamina_benchmark::time_steps(state, model, of.worker(), gradients);
}

// The gradients of `steps` steps, one after the other.
struct gradient_source {
  std::uint64_t steps;
  std::function<void(std::uint64_t, std::span<float>)> write;  // of a step, counted from 1
};

// What the receiver has after some steps: its distance from the sum of the gradients, relative to that sum. Untimed.
void quality(benchmark::State& state, const contestant& of, const gradient_source& source) {
  double sent = 0;
  double entropy = 0;
  double error = 0;
  double norm = 0;
  for (auto _ : state) {
    const std::unique_ptr<method> worker = of.make();
    std::vector<float> gradient(model.elements());
    std::vector<float> received(model.elements());
    std::vector<float> sum(model.elements());
    for (std::uint64_t t = 1; t <= source.steps; ++t) {
      source.write(t, gradient);
      worker->step(gradient);
      worker->receive(received);
      sent += static_cast<double>(worker->message_bytes());
      entropy += worker->entropy_bytes();
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      const double distance = double{sum[i]} - received[i];
      error += distance * distance;
      norm += double{sum[i]} * sum[i];
    }
  }
  const auto steps = static_cast<double>(source.steps);
  set_counters(state, sent / steps, 0, entropy / steps);
  state.counters["relative_error"] = std::sqrt(error / norm);
  state.counters["steps"] = steps;
}

void plain_copy(benchmark::State& state) {
  std::vector<float> to(model.elements());
  std::size_t turn = 0;
  for (auto _ : state) {
    std::memcpy(to.data(), gradients[turn++ % gradients.size()].data(), to.size() * sizeof(float));
    benchmark::ClobberMemory();
  }
  set_counters(state, 0, 2.0 * sizeof(float) * static_cast<double>(model.elements()));
}

void plain_add(benchmark::State& state) {
  std::vector<float> sum(model.elements());
  std::size_t turn = 0;
  for (auto _ : state) {
    const float* from = gradients[turn++ % gradients.size()].data();
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += from[i];
    benchmark::ClobberMemory();
  }
  set_counters(state, 4.0 * static_cast<double>(model.elements()),
               3.0 * sizeof(float) * static_cast<double>(model.elements()));
}

std::vector<contestant> contestants() {
  using namespace lamina_baselines;
  std::vector<contestant> all;
  const std::vector<double> shares =
      lamina_benchmark::is_quick() ? std::vector{0.05} : std::vector{0.001, 0.01, 0.05, 0.5};
  for (const double share : shares) {
    char percent[16];
    std::snprintf(percent, sizeof percent, "/%g", 100 * share);
    const auto add = [&](const std::string& name, std::function<std::unique_ptr<method>()> make) {
      all.push_back({name + percent, std::move(make)});
    };
    add("lamina", [share] { return std::make_unique<lamina_benchmark::lamina_method>(model, share, 0); });
    add("lamina_fragments",
        [share] { return std::make_unique<lamina_benchmark::lamina_method>(model, share, 65'536); });
    add("top_k", [share] { return std::make_unique<top_k>(model, share); });
    add("one_pass_threshold", [share] { return std::make_unique<one_pass_threshold>(model, share); });
    add("sampled_top_k", [share] { return std::make_unique<sampled_top_k>(model, share); });
    add("random_k", [share] { return std::make_unique<random_k>(model, share); });
    add("block_sparse", [share] { return std::make_unique<block_sparse>(model, share); });
  }
  for (const std::size_t rank : {1, 2, 4, 8})
    all.push_back(
        {"power_sgd_" + std::to_string(rank), [rank] { return std::make_unique<power_sgd>(model, rank); }});
  all.push_back(
      {"lamina_int4",
       [] { return std::make_unique<lamina_benchmark::lamina_method>(model, lamina::payload_type::int4); }});
  all.push_back({"fp8", [] { return std::make_unique<fp8>(model); }});
  all.push_back({"one_bit", [] { return std::make_unique<one_bit>(model); }});
  all.push_back({"terngrad", [] { return std::make_unique<terngrad>(model); }});
  all.push_back({"adacomp", [] { return std::make_unique<adacomp>(model); }});
  return all;
}

// Those of a training run, as `lab --record DIR` keeps them: six steps of worker 0.
gradient_source recorded_in(const std::string& directory) {
  const auto file_of = [directory](std::uint64_t step) {
    return directory + "/worker-0-" + std::to_string(step - 1) + ".f32";
  };
  gradient_source source{0, [file_of](std::uint64_t step, std::span<float> gradient) {
                           std::ifstream file(file_of(step), std::ios::binary);
                           file.read(reinterpret_cast<char*>(gradient.data()),
                                     static_cast<std::streamsize>(gradient.size_bytes()));
                           if (!file) throw std::runtime_error(file_of(step) + " is not of ResNet-50");
                         }};
  while (std::filesystem::exists(file_of(source.steps + 1))) ++source.steps;
  if (source.steps == 0) throw std::runtime_error("there are no recorded gradients in " + directory);
  return source;
}

const bool registered = [] {
  benchmark::RegisterBenchmark("plain_copy", plain_copy)->Unit(benchmark::kMillisecond);
  benchmark::RegisterBenchmark("plain_add", plain_add)->Unit(benchmark::kMillisecond);
  static std::vector<contestant> all = contestants();
  static std::vector<std::pair<std::string, gradient_source>> sources = {
      {"drawn", {lamina_benchmark::is_quick() ? 2U : 32U, [](std::uint64_t step, std::span<float> gradient) {
                   lamina_benchmark::write_gradient(model, step, gradient);
                 }}}};
  if (const char* directory = std::getenv("LAMINA_BENCHMARK_GRADIENTS")) {
    sources.emplace_back("recorded", recorded_in(directory));
  }
  for (contestant& each : all) {
    benchmark::RegisterBenchmark(("step/" + each.name).c_str(), [&each](benchmark::State& state) {
      step(state, each);
    })->Unit(benchmark::kMillisecond);
    for (const auto& [name, source] : sources) {
      benchmark::RegisterBenchmark(
          ("quality_" + name + "/" + each.name).c_str(),
          [&each, &source = source](benchmark::State& state) { quality(state, each, source); })
          ->Unit(benchmark::kMillisecond)
          ->Iterations(1)
          ->Repetitions(1);
    }
  }
  return true;
}();

}  // namespace
