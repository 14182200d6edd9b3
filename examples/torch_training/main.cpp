// SPDX-License-Identifier: MIT
// libtorch in one process: a parameter server with torch's optimizer, and two workers. Frames go through memory.
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <lamina/adapt/torch.hpp>
#include <lamina/lamina.hpp>
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
struct worker {
  worker(const lamina::layout& model, std::uint32_t index, const torch::Tensor& teacher)
      : compressor(model, {.drop_ratio = 0.9, .sender = index}),
        inputs(torch::randn({256, 64})),
        labels(inputs.matmul(teacher).argmax(1)) {}

  void pull(const std::vector<std::byte>& bytes, std::uint64_t step) {
    lamina::apply<float>(bytes, compressor.model(), step, parameters);
  }

  std::vector<std::byte> push() {
    mlp->zero_grad();
    loss = torch::nn::functional::cross_entropy(mlp->forward(inputs), labels);
    loss.backward();
    compressor.accumulate_all(lamina::gradients_of(parameters));
    std::vector<std::byte> bytes = compressor.encode().to_bytes();
    compressor.commit();  // the bytes stay in the process and arrive
    return bytes;
  }

  torch::nn::Sequential mlp = make_mlp();
  std::vector<torch::Tensor> parameters = mlp->parameters();
  lamina::gradient_compressor<float> compressor;
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
  std::vector<worker> replicas;
  for (std::uint32_t w = 0; w < workers; ++w) replicas.emplace_back(model, w, teacher);

  torch::optim::Adam optimizer(parameters, 0.005);
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, workers);
  lamina::parameter_publisher<float> publisher(model, workers);
  const auto layer = [&](std::size_t l) { return lamina::elements_of<float>(parameters[l]); };
  double loss = 0;
  double up = 0;
  double down = 0;
  for (std::uint64_t step = 1;; ++step) {
    // The whole model at first, later what has changed: the same frame for all workers.
    const std::vector<std::byte> news = publisher.encode_for_all(step, layer).to_bytes();
    for (worker& each : replicas) each.pull(news, step);
    publisher.commit_all();
    if (step > steps) break;

    loss = 0;
    std::vector<std::vector<std::byte>> frames;  // the aggregator looks into them until next_step()
    for (worker& each : replicas) {
      frames.push_back(each.push());
      aggregator.add(lamina::decode<float>(frames.back(), model));
      loss += each.loss.item<double>() / workers;
      up += static_cast<double>(frames.back().size());
      down += static_cast<double>(news.size());
    }
    // torch passes over a parameter without a gradient: a layer that did not arrive stays as it is, state included.
    for (std::size_t l = 0; l < model.layers(); ++l) {
      torch::Tensor& gradient = parameters[l].mutable_grad();
      gradient = aggregator.arrived().is_sent(l) ? torch::empty_like(parameters[l]) : torch::Tensor();
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> mean) {
        std::copy(mean.begin(), mean.end(), gradient.data_ptr<float>() + begin);
      });
    }
    optimizer.step();
    publisher.update(aggregator.arrived());
    aggregator.next_step();
    if (step != 1 && step % 25 != 0) continue;
    const double percent = static_cast<double>(step * model.elements() * sizeof(float) * workers) / 100;
    std::printf("step %3d: loss %.4f, so far %.1f %% of the dense bytes up and %.1f %% down\n",
                static_cast<int>(step), loss, up / percent, down / percent);
  }
  bool is_equal = true;
  for (worker& each : replicas) is_equal &= std::ranges::equal(each.parameters, parameters, torch::equal);
  std::printf("loss %.4f at the end, replicas %s\n", loss, is_equal ? "equal" : "DIFFER");
  return is_equal && loss < 0.1 ? 0 : 1;
}
