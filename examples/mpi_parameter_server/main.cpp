// SPDX-License-Identifier: MIT
// A parameter server over plain MPI, both directions compressed. Rank 0 is the server, the others are workers.
//     mpirun -n 3 ./mpi_parameter_server [--agreed]    agreed: all workers choose the same layers
#include <mpi.h>

#include <cstdio>
#include <lamina/adapt/mpi.hpp>
#include <lamina/lamina.hpp>
#include <random>
#include <string>
#include <system_error>
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
  lamina::server<float> server(model, {.workers = static_cast<std::size_t>(workers)});
  double up = 0;
  double down = 0;
  for (std::uint64_t step = 1;; ++step) {
    // The whole model at first, later what has changed.
    for (const std::size_t worker : server.workers()) {
      const auto news = server.reply(worker, layers);
      lamina::mpi::send(news.frame(), static_cast<int>(worker) + 1, 0, MPI_COMM_WORLD);
      server.commit(worker, news.clock());
      down += static_cast<double>(news.size_bytes());
    }
    double loss = 0;
    MPI_Reduce(MPI_IN_PLACE, &loss, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (step > steps) return loss / workers;

    for (int rank = 1; rank <= workers; ++rank) {
      auto frame = lamina::mpi::receive(rank, 0, MPI_COMM_WORLD);
      up += static_cast<double>(frame.size());
      if (const auto error = server.add(std::move(frame))) throw std::system_error(error);
    }
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) layers[l][begin + i] -= learning_rate * mean[i];
    });
    if (step != 1 && step % 25 != 0) continue;
    const double percent = static_cast<double>(step * model.elements() * sizeof(float)) * workers / 100;
    std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes up and %.1f %% down\n",
                static_cast<int>(step), loss / workers, up / percent, down / percent);
  }
}

double work(std::vector<float>& weights, unsigned index, int workers, MPI_Comm group, bool is_agreed) {
  const std::vector<std::span<float>> layers = layers_of(weights);
  std::vector<float> gradient;
  std::mt19937 random(index);  // other data in each worker
  lamina::worker<float> worker(model, {.drop_ratio = 0.9, .sender = index});
  for (std::uint64_t step = 1;; ++step) {
    worker.apply(lamina::mpi::receive(0, 0, MPI_COMM_WORLD), layers);
    const double loss = compute(weights, random, gradient);
    MPI_Reduce(&loss, nullptr, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
    if (step > steps) return loss;

    auto compressed = worker.add(layers_of(gradient));
    if (is_agreed) {  // on the mean of a few values; otherwise frame() selects by this worker's own
      const std::span<double> values = compressed.values();
      MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_SUM, group);
      for (double& each : values) each /= workers;
    }
    lamina::mpi::send(compressed.frame(), 0, 0, MPI_COMM_WORLD);
    compressed.commit();  // MPI has taken the bytes: only now is what was sent cleared
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
