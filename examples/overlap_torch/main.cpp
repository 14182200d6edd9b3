// SPDX-License-Identifier: MIT
// Data-parallel training with libtorch: gradients are summed over MPI while backward goes on, and each layer is updated when its next
// forward needs it. With a drop ratio the layers of a step are chosen in the one before, and the others stay in the residual.
//     mpirun -n 2 ./overlap_torch [DROP_RATIO]
#include <lamina/collectives/torch_hooks.hpp>  // first: torch before MPI

#include <cstdio>
#include <lamina/adapt/torch.hpp>
#include <lamina/collectives/collectives.hpp>
#include <lamina/collectives/mpi_channel.hpp>
#include <lamina/lamina.hpp>
#include <optional>
#include <vector>

namespace {

namespace collectives = lamina::collectives;

constexpr int steps = 150;
constexpr float learning_rate = 0.3F;

// Two hidden layers; the two parameters of linear layer k are 2k and 2k + 1. `need(k)` is called before its forward.
torch::nn::Sequential make_network(const std::function<void(std::size_t)>& need) {
  torch::nn::Sequential network;
  const auto linear = [&](std::size_t k, int inputs, int outputs) {
    network->push_back(collectives::gated<torch::nn::LinearImpl>([need, k] { need(k); }, inputs, outputs));
  };
  linear(0, 32, 256);
  network->push_back(torch::nn::ReLU());
  linear(1, 256, 256);
  network->push_back(torch::nn::ReLU());
  linear(2, 256, 4);
  return network;
}

lamina::layout layout_of(const torch::nn::Sequential& network) {
  std::vector<lamina::layer> layers;
  for (const auto& each : network->named_parameters())
    layers.push_back(lamina::layer_of(each.key(), each.value()));
  return lamina::layout(layers);
}

// The layers of the next step: from what all ranks expect of it, the same numbers on each.
void plan_next(lamina::gradient_compressor<float>& compressor, std::size_t ranks) {
  const auto own = compressor.predicted_values();
  std::vector<double> agreed(own.size());
  MPI_Reduce(own.data(), agreed.data(), static_cast<int>(own.size()), MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
  for (double& each : agreed) each /= static_cast<double>(ranks);
  MPI_Bcast(agreed.data(), static_cast<int>(agreed.size()), MPI_DOUBLE, 0, MPI_COMM_WORLD);
  compressor.plan_next(agreed);
}

void train(collectives::channel& channel, double drop_ratio) {
  std::optional<collectives::engine> engine;
  std::vector<torch::Tensor> parameters;
  std::vector<bool> is_open(6);  // summed, or on its way, and not yet part of the parameter
  const auto update = [&](std::size_t l) {
    if (!is_open[l]) return;
    engine->wait(l);
    const auto mean = engine->mean(l);  // empty where the layer was held back
    const auto weights = lamina::writable_elements_of<float>(parameters[l]);
    for (std::size_t i = 0; i < mean.size(); ++i) weights[i] -= learning_rate * mean[i];
    is_open[l] = false;
  };

  torch::manual_seed(1);  // all ranks begin with the same
  auto network = make_network([&](std::size_t k) {
    for (const std::size_t l : {2 * k, 2 * k + 1}) update(l);
  });
  parameters = network->parameters();
  const lamina::layout model = layout_of(network);
  const torch::Tensor teacher = torch::randn({32, 4});
  torch::manual_seed(100 + static_cast<int>(channel.rank()));  // other data on each rank
  const torch::Tensor inputs = torch::randn({64, 32});
  const torch::Tensor labels = inputs.matmul(teacher).argmax(1);
  torch::Tensor loss;
  const auto forward = [&] {
    loss = torch::nn::functional::cross_entropy(network->forward(inputs), labels);
    network->zero_grad();
  };

  // Once without communication: in which order do gradients become ready?
  std::vector<std::size_t> order;
  {
    collectives::gradient_hooks hooks(*network, [&](std::size_t l) { order.push_back(l); });
    forward();
    loss.backward();
    hooks.check_all_called();
  }
  const std::vector classes(model.layers(), collectives::layer_class::fully_connected);
  const collectives::plan_options options = {.bucket_bytes = 64'000,  // a small network: two sums a step
                                             .choice = collectives::algorithm_choice::by_cost()};
  const collectives::cost_table costs = collectives::calibrate(channel);
  order = collectives::agree_on_order(channel, model, order);
  engine.emplace(channel, collectives::plan(model, channel.ranks(), order, classes, options, costs));
  if (channel.rank() == 0) std::printf("%s", engine->used_plan().table().c_str());
  lamina::gradient_compressor<float> compressor(
      model, {.drop_ratio = drop_ratio, .decide = lamina::decision_timing::ahead});
  collectives::gradient_hooks hooks(*network, [&](std::size_t l) {
    compressor.accumulate(l, parameters[l].grad());
    if (compressor.is_sent(l)) {
      engine->ready(l, compressor.residual()[l]);
    } else {
      engine->hold_back(l);
    }
    is_open[l] = true;
  });
  std::size_t sent_elements = 0;
  for (int step = 1; step <= steps; ++step) {
    forward();  // waits for each layer of the last step
    // A sum that fails throws before this: what it would have brought is then still in the residual.
    if (step > 1) compressor.commit();
    engine->begin_step();
    loss.backward();  // hands over each layer of this one
    hooks.check_all_called();
    plan_next(compressor, channel.ranks());
    compressor.encode();
    sent_elements += compressor.chosen().sent_elements();
    if (channel.rank() == 0 && step % 25 == 0)
      std::printf("step %3d: loss %.4f\n", step, loss.item<double>());
  }
  for (std::size_t l = 0; l < parameters.size(); ++l) update(l);
  compressor.commit();
  const torch::Tensor own = torch::nn::utils::parameters_to_vector(parameters).detach();
  const torch::Tensor of_first = own.clone();
  MPI_Bcast(of_first.data_ptr<float>(), static_cast<int>(own.numel()), MPI_FLOAT, 0, MPI_COMM_WORLD);
  int is_equal = torch::equal(own, of_first);
  MPI_Allreduce(MPI_IN_PLACE, &is_equal, 1, MPI_INT, MPI_LAND, MPI_COMM_WORLD);
  const collectives::engine_totals totals = engine->totals();
  if (channel.rank() != 0) return;
  std::printf("%.1f %% of the gradients sent; %.3f s of communication, of which %.3f s were waited for\n",
              100.0 * static_cast<double>(sent_elements) / static_cast<double>(steps * model.elements()),
              totals.collective_seconds, totals.waited_seconds);
  std::printf("loss %.4f at the end, replicas %s\n", loss.item<double>(), is_equal ? "equal" : "DIFFER");
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  // plan_next() makes calls that block, beside the engine's thread.
  if (level < MPI_THREAD_MULTIPLE) {
    std::fprintf(stderr, "this MPI gives threads level %d; this program needs %d (multiple)\n", level,
                 MPI_THREAD_MULTIPLE);
    MPI_Finalize();
    return 1;
  }
  {
    collectives::mpi_channel channel(MPI_COMM_WORLD);
    train(channel, argc > 1 ? std::stod(argv[1]) : 0.0);
  }
  MPI_Finalize();
}
