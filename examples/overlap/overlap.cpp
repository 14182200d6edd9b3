// SPDX-License-Identifier: MIT
// Gradients are summed over MPI while the backward pass goes on: mpirun -n 4 ./overlap
#include <chrono>
#include <cstdio>
#include <lamina/collectives/collectives.hpp>
#include <lamina/collectives/mpi_channel.hpp>
#include <numeric>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
namespace collectives = lamina::collectives;

constexpr int steps = 20;

// A model of eight layers, whose gradients become ready from the last to the first.
const lamina::layout model = [] {
  std::vector<lamina::layer> layers;
  for (int l = 0; l < 8; ++l) layers.push_back({"layer " + std::to_string(l), {200, 500}});
  return lamina::layout(layers);
}();

collectives::plan make_plan(std::size_t ranks) {
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

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  bool is_right = false;
  {
    collectives::mpi_channel channel(MPI_COMM_WORLD);
    const collectives::plan plan = make_plan(channel.ranks());
    if (channel.rank() == 0) std::printf("%zu layers in %zu sums\n", model.layers(), plan.buckets().size());
    std::vector<std::vector<float>> weights(model.layers(), std::vector<float>(100'000, 7.0F));
    collectives::engine_totals totals;
    {
      collectives::engine engine(channel, plan);
      train(engine, static_cast<float>(channel.rank()), weights);
      totals = engine.totals();
    }
    std::vector<float> of_first = weights[0];
    MPI_Bcast(of_first.data(), static_cast<int>(of_first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
    int is_equal = of_first == weights[0] ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
    const float error =
        weights[0][0] - static_cast<float>(channel.ranks() - 1) / 2;  // the mean of the targets
    is_right = is_equal != 0 && error * error < 0.01F;
    if (channel.rank() == 0) {
      std::printf("%.0f ms of communication, of which %.0f ms were waited for\n",
                  1e3 * totals.collective_seconds, 1e3 * totals.waited_seconds);
      std::printf("loss %.4f at the end, replicas %s\n", static_cast<double>(error * error),
                  is_equal != 0 ? "equal" : "DIFFER");
    }
  }
  MPI_Finalize();
  return is_right ? 0 : 1;
}
