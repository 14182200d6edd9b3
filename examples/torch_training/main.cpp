// SPDX-License-Identifier: MIT
// libtorch in one process: a parameter server with torch's optimizer, and two workers. Frames go through memory.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <lamina/adapt/torch.hpp>
#include <lamina/lamina.hpp>
#include <system_error>
#include <vector>

namespace {

constexpr std::uint64_t steps = 200;
constexpr std::size_t workers = 2;

torch::nn::Sequential make_mlp() {
  torch::nn::Sequential mlp;
  for (int hidden = 0; hidden < 5; ++hidden) {
    mlp->push_back(torch::nn::Linear(64, 64));
    mlp->push_back(torch::nn::ReLU());
  }
  mlp->push_back(torch::nn::Linear(64, 10));
  return mlp;
}

// Each has inputs of its own. The teacher says what is to be learned of them.
struct replica {
  replica(const lamina::layout& model, std::uint32_t index, const torch::Tensor& teacher)
      : worker(model, {.drop_ratio = 0.9, .sender = index}),
        inputs(torch::randn({256, 64})),
        labels(inputs.matmul(teacher).argmax(1)) {}

  void pull(const std::vector<std::byte>& bytes) { worker.apply(bytes, parameters); }

  std::vector<std::byte> push() {
    mlp->zero_grad();
    loss = torch::nn::functional::cross_entropy(mlp->forward(inputs), labels);
    loss.backward();
    auto step = worker.add(lamina::gradients_of(parameters));
    std::vector<std::byte> bytes = step.frame().to_bytes();
    step.commit();  // the bytes stay in the process and arrive
    return bytes;
  }

  torch::nn::Sequential mlp = make_mlp();
  std::vector<torch::Tensor> parameters = mlp->parameters();
  lamina::worker<float> worker;
  torch::Tensor inputs;
  torch::Tensor labels;
  torch::Tensor loss;
};

}  // namespace

int main() {
  torch::manual_seed(1);
  const torch::nn::Sequential mlp = make_mlp();
  const std::vector<torch::Tensor> parameters = mlp->parameters();
  const lamina::layout model = lamina::layout_of(mlp);
  const torch::Tensor teacher = torch::randn({64, 10});
  std::vector<replica> replicas;
  for (std::uint32_t w = 0; w < workers; ++w) replicas.emplace_back(model, w, teacher);

  torch::optim::Adam optimizer(parameters, 0.005);
  lamina::server<float> server(model, {.workers = workers});
  double up = 0;
  double down = 0;
  for (;;) {
    for (const std::size_t w : server.workers()) {
      const auto reply = server.reply(w, parameters);  // the whole model at first, later what has changed
      replicas[w].pull(reply.to_bytes());
      server.commit(w, reply.clock());
      down += static_cast<double>(reply.size_bytes());
    }
    const std::uint64_t step = server.step();
    if (step > steps) break;

    double loss = 0;
    for (replica& each : replicas) {
      std::vector<std::byte> frame = each.push();
      loss += each.loss.item<double>() / workers;
      up += static_cast<double>(frame.size());
      if (const auto error = server.add(std::move(frame))) throw std::system_error(error);
    }
    // torch passes over a parameter without a gradient: a layer that did not arrive stays as it is, state included.
    for (const torch::Tensor& each : parameters) each.mutable_grad() = torch::Tensor();
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      torch::Tensor& gradient = parameters[layer].mutable_grad();
      if (!gradient.defined()) gradient = torch::empty_like(parameters[layer]);
      std::copy(mean.begin(), mean.end(), gradient.data_ptr<float>() + begin);
    });
    optimizer.step();
    if (step != 1 && step % 25 != 0) continue;
    const double percent = static_cast<double>(step * model.elements() * sizeof(float) * workers) / 100;
    std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes up and %.1f %% down\n",
                static_cast<int>(step), loss, up / percent, down / percent);
  }
  bool is_equal = true;
  for (replica& each : replicas) is_equal &= std::ranges::equal(each.parameters, parameters, torch::equal);
  double loss = 0;
  for (const replica& each : replicas) loss += each.loss.item<double>() / workers;
  std::printf("loss %.4f at the end, replicas %s\n", loss, is_equal ? "equal" : "DIFFER");
  return is_equal && loss < 0.1 ? 0 : 1;
}
