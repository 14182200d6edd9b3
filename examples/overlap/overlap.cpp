// SPDX-License-Identifier: MIT
// Gradients are summed while the backward pass goes on. Four ranks in one process: a thread each, and one of its engine.
#include <chrono>
#include <cstdio>
#include <lamina/collectives/collectives.hpp>
#include <numeric>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
namespace collectives = lamina::collectives;

constexpr std::size_t ranks = 4;
constexpr int steps = 20;

// A model of eight layers, whose gradients become ready from the last to the first.
const lamina::layout model = [] {
  std::vector<lamina::layer> layers;
  for (int l = 0; l < 8; ++l) layers.push_back({"layer " + std::to_string(l), {200, 500}});
  return lamina::layout(layers);
}();

collectives::plan make_plan() {
  std::vector<std::size_t> ready_order(model.layers());
  std::iota(ready_order.rbegin(), ready_order.rend(), std::size_t{0});
  const std::vector<collectives::layer_class> classes(model.layers(),
                                                      collectives::layer_class::fully_connected);
  return {model,
          ranks,
          ready_order,
          classes,
          {.bucket_bytes = 0, .choice = collectives::algorithm_choice::always(collectives::algorithm::ring)}};
}

// What a rank computes: the gradient of |weights - target|², of which each rank has a target of its own.
void train(collectives::engine& engine, float target, std::vector<std::vector<float>>& weights) {
  std::vector<float> gradient;
  for (int step = 0; step < steps; ++step) {
    engine.begin_step();
    for (std::size_t l = model.layers(); l-- > 0;) {
      gradient = weights[l];
      for (float& each : gradient) each = 2 * (each - target);
      std::this_thread::sleep_for(2ms);  // backward of this layer
      engine.ready(l, gradient);         // its sum begins, and the layer below is computed meanwhile
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      engine.wait(l);
      for (std::size_t i = 0; i < weights[l].size(); ++i) weights[l][i] -= 0.2F * engine.mean(l)[i];
    }
  }
}

}  // namespace

int main() {
  std::printf("%s\n", make_plan().table().c_str());
  collectives::memory_network network(ranks);
  std::vector<std::vector<std::vector<float>>> weights(
      ranks, std::vector<std::vector<float>>(model.layers(), std::vector<float>(100'000, 7.0F)));
  std::vector<collectives::engine_totals> totals(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      collectives::engine engine(network.of(r), make_plan());
      train(engine, static_cast<float>(r), weights[r]);
      totals[r] = engine.totals();
    });
  }
  for (std::thread& each : threads) each.join();
  bool is_equal = true;
  for (const auto& each : weights) is_equal &= each == weights[0];
  const float error = weights[0][0][0] - 1.5F;  // the mean of the targets
  std::printf("%.0f ms of communication, of which %.0f ms were waited for\n",
              1e3 * totals[0].collective_seconds, 1e3 * totals[0].waited_seconds);
  std::printf("loss %.4f at the end, replicas %s\n", static_cast<double>(error * error),
              is_equal ? "equal" : "DIFFER");
  return is_equal && error * error < 0.01F ? 0 : 1;
}
