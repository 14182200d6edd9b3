// SPDX-License-Identifier: MIT
// No server: all ranks choose the same layers, and MPI_Allreduce sums those alone.
//     mpirun -n 3 ./mpi_allreduce
#include <mpi.h>

#include <cstdio>
#include <lamina/lamina.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr int steps = 100;
constexpr float learning_rate = 0.05F;

// The model, a linear regression. Each layer holds the weights of one group of features.
const lamina::layout model = [] {
  std::vector<lamina::layer> groups;
  for (std::size_t k = 1; k <= 20; ++k) groups.push_back({"group " + std::to_string(k), {10 * k}});
  return lamina::layout(groups);
}();

// The layers of a vector in which they lie one behind the other.
std::vector<std::span<float>> layers_of(std::vector<float>& all) {
  std::vector<std::span<float>> layers;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    layers.push_back(std::span(all).subspan(model.offset(l), model.sizes()[l]));
  }
  return layers;
}

// Draws a mini-batch, of which 0.05 is to be learned for each weight. Returns the loss and sets its gradient.
double compute(const std::vector<float>& weights, std::mt19937& random, std::vector<float>& gradient) {
  constexpr int batch = 128;
  std::normal_distribution<float> normal;
  std::vector<float> features(weights.size());
  gradient.assign(weights.size(), 0);
  double loss = 0;
  for (int k = 0; k < batch; ++k) {
    for (float& each : features) each = normal(random);
    float error = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) error += (weights[i] - 0.05F) * features[i];
    loss += error * error / (2 * batch);
    for (std::size_t i = 0; i < weights.size(); ++i) gradient[i] += error * features[i] / batch;
  }
  return loss;
}

// The mean over all ranks, bitwise identical on each of them.
void average(std::span<double> numbers) {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int count = static_cast<int>(numbers.size());
  MPI_Allreduce(MPI_IN_PLACE, numbers.data(), count, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  for (double& each : numbers) each /= ranks;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int ranks = 0;
  int rank = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);

  std::vector<float> weights(model.elements());  // all ranks begin with the same
  std::vector<float> gradient;
  std::mt19937 random(static_cast<unsigned>(rank));  // other data on each rank
  lamina::worker<float> worker(model, {.drop_ratio = 0.9});
  std::vector<float> packed;
  double loss = 0;
  std::size_t summed_bytes = 0;
  for (int step = 1; step <= steps; ++step) {
    loss = compute(weights, random, gradient);
    average({&loss, 1});

    // Agree on the layers: one value for each is all that is sent for it.
    auto compressed = worker.add(layers_of(gradient));
    average(compressed.values());
    compressed.select();

    // Sum the layers chosen. Each rank divides before, so that the sum is the mean.
    compressed.pack(packed, 1 / static_cast<float>(ranks));
    const int count = static_cast<int>(packed.size());
    MPI_Allreduce(MPI_IN_PLACE, packed.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    compressed.commit();  // all have it: only now is what was sent cleared

    // In the layers dropped the gradient becomes 0, which leaves the weights alone. That is so with plain SGD: momentum goes
    // into worker_options, and any other optimizer is to be called for the layers chosen alone.
    compressed.unpack(packed, layers_of(gradient));
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= learning_rate * gradient[i];

    summed_bytes += model.layers() * sizeof(double) + packed.size() * sizeof(float);
    if (rank == 0 && (step == 1 || step % 25 == 0)) {
      const double dense_bytes = static_cast<double>(model.elements() * sizeof(float)) * step;
      std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes\n", step, loss,
                  100 * static_cast<double>(summed_bytes) / dense_bytes);
    }
  }

  std::vector<float> of_first = weights;
  MPI_Bcast(of_first.data(), static_cast<int>(of_first.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int is_equal = weights == of_first;
  MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  if (rank == 0) std::printf("loss %.4f at the end, replicas %s\n", loss, is_equal ? "equal" : "DIFFER");
  MPI_Finalize();
  return is_equal && loss < 0.05 ? 0 : 1;
}
