// SPDX-License-Identifier: MIT
// A parameter server over plain MPI, both directions compressed. Rank 0 is the server, the others are workers.
//     mpirun -n 3 ./mpi_parameter_server [--agreed]    agreed: all workers choose the same layers
#include <mpi.h>

#include <cstdio>
#include <lamina/adapt/mpi.hpp>
#include <lamina/lamina.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

constexpr std::uint64_t steps = 100;
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

// Both return the loss of the last step; the server, the mean of its workers.
double serve(const std::vector<std::span<float>>& layers, int workers) {
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, static_cast<std::size_t>(workers));
  lamina::parameter_publisher<float> publisher(model, static_cast<std::size_t>(workers));
  double up = 0;
  double down = 0;
  for (std::uint64_t step = 1;; ++step) {
    // The whole model at first, later what has changed: the same frame for all workers.
    const auto& news = publisher.encode_for_all(step, [&](std::size_t l) { return layers[l]; });
    for (int rank = 1; rank <= workers; ++rank) lamina::mpi::send(news, rank, 0, MPI_COMM_WORLD);
    publisher.commit_all();
    double loss = 0;
    MPI_Reduce(MPI_IN_PLACE, &loss, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (step > steps) return loss / workers;

    std::vector<std::vector<std::byte>> frames;  // the aggregator looks into them until next_step()
    for (int rank = 1; rank <= workers; ++rank) {
      frames.push_back(lamina::mpi::receive(rank, 0, MPI_COMM_WORLD));
      aggregator.add(lamina::decode<float>(frames.back(), model));
      up += static_cast<double>(frames.back().size());
      down += static_cast<double>(news.size_bytes());
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        for (std::size_t i = 0; i < gradient.size(); ++i) layers[l][begin + i] -= learning_rate * gradient[i];
      });
    }
    publisher.update(aggregator.arrived());
    aggregator.next_step();
    if (step != 1 && step % 25 != 0) continue;
    const double percent = static_cast<double>(step * model.elements() * sizeof(float)) * workers / 100;
    std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes up and %.1f %% down\n",
                static_cast<int>(step), loss / workers, up / percent, down / percent);
  }
}

double work(std::vector<float>& weights, unsigned worker, int workers, MPI_Comm group, bool is_agreed) {
  const std::vector<std::span<float>> layers = layers_of(weights);
  std::vector<float> gradient;
  std::mt19937 random(worker);  // other data in each worker
  lamina::gradient_compressor<float> compressor(model, {.drop_ratio = 0.9, .sender = worker});
  for (std::uint64_t step = 1;; ++step) {
    lamina::apply<float>(lamina::mpi::receive(0, 0, MPI_COMM_WORLD), model, step, layers);
    const double loss = compute(weights, random, gradient);
    MPI_Reduce(&loss, nullptr, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (step > steps) return loss;

    compressor.accumulate_all(layers_of(gradient));
    if (is_agreed) {  // on the mean of a few values; otherwise encode() selects by this worker's own
      std::vector<double> mean(compressor.values().begin(), compressor.values().end());
      MPI_Allreduce(MPI_IN_PLACE, mean.data(), static_cast<int>(mean.size()), MPI_DOUBLE, MPI_SUM, group);
      for (double& each : mean) each /= workers;
      compressor.select(mean);
    }
    lamina::mpi::send(compressor.encode(), 0, 0, MPI_COMM_WORLD);
    compressor.commit();  // MPI has taken the bytes: only now is what was sent cleared
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_agreed = argc > 1 && std::string(argv[1]) == "--agreed";
  MPI_Init(&argc, &argv);
  int ranks = 0;
  int rank = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm group = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank == 0, rank, &group);

  std::vector<float> weights(model.elements());
  const double loss = rank == 0 ? serve(layers_of(weights), ranks - 1)
                                : work(weights, static_cast<unsigned>(rank - 1), ranks - 1, group, is_agreed);
  std::vector<float> of_server = weights;
  MPI_Bcast(of_server.data(), static_cast<int>(of_server.size()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int is_equal = weights == of_server;
  MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  if (rank == 0) std::printf("loss %.4f at the end, replicas %s\n", loss, is_equal ? "equal" : "DIFFER");
  MPI_Finalize();
  return is_equal && loss < 0.05 ? 0 : 1;
}
