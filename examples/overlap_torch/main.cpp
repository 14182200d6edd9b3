// SPDX-License-Identifier: MIT
// Data-parallel training with libtorch: an all-reduce over MPI overlapped with backward, and each layer is updated when its next forward
// needs it. With a drop ratio what is sent is selected before the first gradient; the others stay in the residual: mpirun -n 2 ./overlap_torch [RATIO]
#include <lamina/collectives/torch_hooks.hpp>  // first: torch before MPI

#include <cstdio>
#include <functional>
#include <lamina/adapt/torch.hpp>
#include <lamina/collectives/collectives.hpp>
#include <lamina/collectives/mpi_channel.hpp>
#include <lamina/lamina.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

namespace {
namespace collectives = lamina::collectives;
using gated_linear = collectives::gated<torch::nn::LinearImpl>;

constexpr int steps = 150;
constexpr float learning_rate = 0.3F;

// The mean over the ranks, bitwise the same on each.
void average(std::span<double> values, std::size_t ranks) {
  MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_SUM,
                MPI_COMM_WORLD);
  for (double& each : values) each /= static_cast<double>(ranks);
  MPI_Bcast(values.data(), static_cast<int>(values.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
}

void train(double drop_ratio) {
  collectives::mpi_channel channel(MPI_COMM_WORLD);
  torch::manual_seed(1);  // all ranks begin with the same
  torch::nn::Sequential network(gated_linear(nullptr, 32, 256), torch::nn::ReLU(),
                                gated_linear(nullptr, 256, 256), torch::nn::ReLU(),
                                gated_linear(nullptr, 256, 4));
  const torch::Tensor teacher = torch::randn({32, 4});
  torch::manual_seed(100 + static_cast<int>(channel.rank()));  // other data on each rank
  const torch::Tensor inputs = torch::randn({64, 32});
  const torch::Tensor labels = inputs.matmul(teacher).argmax(1);
  const auto forward = [&] {
    network->zero_grad();
    return torch::nn::functional::cross_entropy(network->forward(inputs), labels);
  };

  std::vector<torch::Tensor> parameters = network->parameters();
  const lamina::layout model = lamina::layout_of(network);
  const std::vector classes(model.layers(), collectives::layer_class::fully_connected);
  std::vector<std::size_t> order;  // in which gradients become ready: a step without communication tells
  {
    collectives::gradient_hooks hooks(*network, [&](std::size_t l) { order.push_back(l); });
    forward().backward();
  }
  order = collectives::agree_on_order(channel, model, order);
  const collectives::plan plan(model, channel.ranks(), order, classes, {.bucket_bytes = 64'000});
  collectives::engine engine(channel, plan);
  if (channel.rank() == 0) std::printf("%zu layers in %zu sums\n", model.layers(), plan.buckets().size());

  std::vector<bool> is_open(model.layers());  // summed, or on its way, and not yet part of the parameter
  const auto update = [&](std::size_t l) {
    if (!is_open[l]) return;
    engine.wait(l);
    const auto mean = engine.mean(l);  // empty where the layer was dropped
    const auto weights = lamina::writable_elements_of<float>(parameters[l]);
    for (std::size_t i = 0; i < mean.size(); ++i) weights[i] -= learning_rate * mean[i];
    is_open[l] = false;
  };
  collectives::set_gates(*network, update);
  lamina::worker<float> worker(model, {.drop_ratio = drop_ratio});
  std::optional<lamina::worker<float>::step> step;
  collectives::gradient_hooks hooks(*network, [&](std::size_t l) {
    if (!step->add(l, parameters[l].grad()))
      throw std::runtime_error("the gradient of '" + model[l].name + "' is not finite");
    step->is_sent(l) ? engine.ready(l, step->fragment(l)) : engine.hold_back(l);
    is_open[l] = true;
  });
  double sent_elements = 0;
  torch::Tensor loss;
  for (int k = 1; k <= steps; ++k) {
    loss = forward();  // waits for each layer of the last step
    // A sum that fails throws before this: what it would have brought is then still in the residual.
    if (step) step->commit();
    average(worker.values(), channel.ranks());
    step.emplace(worker.begin(worker.plan()));
    sent_elements += static_cast<double>(step->sent().sent_elements());
    engine.begin_step();
    loss.backward();  // hands over each layer of this one
    hooks.check_all_called();
    if (channel.rank() == 0 && k % 25 == 0) std::printf("step %3d: loss %.4f\n", k, loss.item<double>());
  }
  for (std::size_t l = 0; l < parameters.size(); ++l) update(l);
  step->commit();
  const torch::Tensor own = torch::nn::utils::parameters_to_vector(parameters).detach();
  const torch::Tensor of_first = own.clone();
  MPI_Bcast(of_first.data_ptr<float>(), static_cast<int>(own.numel()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int is_equal = torch::equal(own, of_first);
  MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  if (channel.rank() != 0) return;
  std::printf("%.1f %% of the gradients sent; %.3f s of communication, of which %.3f s were waited for\n",
              100.0 * sent_elements / static_cast<double>(steps * model.elements()),
              engine.totals().collective_seconds, engine.totals().waited_seconds);
  std::printf("loss %.4f at the end, replicas %s\n", loss.item<double>(), is_equal ? "equal" : "DIFFER");
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  if (level <
      MPI_THREAD_MULTIPLE) {  // average() makes calls that block while the engine's thread makes its own
    std::fprintf(stderr, "this program needs an MPI with MPI_THREAD_MULTIPLE\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  train(argc > 1 ? std::stod(argv[1]) : 0.0);
  MPI_Finalize();
}
