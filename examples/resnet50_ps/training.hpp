// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <chrono>
#include <lamina/adapt/torch.hpp>
#include <lamina/layout.hpp>
#include <numeric>

#include "data.hpp"
#include "options.hpp"
#include "ranks.hpp"
#include "records.hpp"
#include "resnet50.hpp"

using clock_type = std::chrono::steady_clock;

inline double seconds_since(clock_type::time_point begin) { return std::chrono::duration<double>(clock_type::now() - begin).count(); }

/// One training from the first step to the last.
struct run {
  const options& with;
  const ranks& who;
  const data_sets& data;
  double drop_ratio;
  std::string title;
  std::string directory;  // empty: nothing is kept

  bool agrees() const { return !with.local && !with.async; }
  bool tests_before(std::uint64_t step) const {
    return step > with.steps || (with.evaluate_every > 0 && !with.async && step > 1 && (step - 1) % with.evaluate_every == 0);
  }
  bool saves_after(std::uint64_t step) const { return with.checkpoint_every > 0 && step % with.checkpoint_every == 0; }
  /// The learning rate of a step: grows from zero in --warm-up steps.
  double rate(std::uint64_t step) const {
    return step > with.warm_up ? with.learning_rate
                               : with.learning_rate * static_cast<double>(step) / static_cast<double>(with.warm_up + 1);
  }
};

/// The server of a run, and each of its workers: server.cpp and worker.cpp.
records serve(const run& of);
void work(const run& of);
/// The same without a server, which only keeps the records: allreduce.cpp.
records watch_allreduce(const run& of);
void work_by_allreduce(const run& of);

/// The parameters' bits as one number: where it differs, they do.
inline std::uint64_t checksum_of(const std::vector<torch::Tensor>& parameters) {
  std::uint64_t sum = 14695981039346656037U;
  for (const torch::Tensor& each : parameters) {
    for (const float value : lamina::elements_of<float>(each))
      sum = (sum ^ std::bit_cast<std::uint32_t>(value)) * 1099511628211U;  // FNV-1a, by 32 bits
  }
  return sum;
}

/// A worker's copy of the network, and its images.
struct replica {
  explicit replica(const run& of)
      : network((torch::manual_seed(of.with.seed), of.data.train->classes())), parameters(network.parameters()), of_(of) {}

  /// The gradients of a step's batch, in the parameters' grad().
  void compute(std::uint64_t step, report& told) {
    const auto begin = clock_type::now();
    const auto batch = batch_of_step(step, *of_.data.train, worker_, workers_, of_.with.batch, of_.with.seed);
    network.zero_grad();
    const torch::Tensor loss = torch::nn::functional::cross_entropy(network.forward(batch.data), batch.target);
    loss.backward();
    told.loss = loss.item<double>();
    told.compute_seconds = seconds_since(begin);
  }

  /// Tries this worker's share of the test images, with its own running means of batch normalisation.
  void test(report& told) {
    const auto begin = clock_type::now();
    const torch::NoGradGuard no_gradients;
    network.eval();
    for (std::size_t first = worker_ * 100; first < of_.data.test->size(); first += workers_ * 100) {
      std::vector<std::size_t> indices(std::min<std::size_t>(100, of_.data.test->size() - first));
      std::iota(indices.begin(), indices.end(), first);
      const auto batch = batch_of(*of_.data.test, indices, 0);
      const torch::Tensor scores = torch::log_softmax(network.forward(batch.data), 1);
      told.test_right += scores.argmax(1).eq(batch.target).sum().item<double>();
      told.test_loss -= scores.gather(1, batch.target.unsqueeze(1)).sum().item<double>();
      told.tested += static_cast<double>(indices.size());
    }
    network.train();
    told.test_seconds = seconds_since(begin);
  }

  resnet50 network;
  std::vector<torch::Tensor> parameters;

 private:
  const run& of_;
  const std::size_t worker_ = static_cast<std::size_t>(of_.who.rank - 1), workers_ = static_cast<std::size_t>(of_.who.workers);
};

/// A tensor of one dimension for each fragment of up to m elements, which shares the parameter's memory and is not known to autograd.
inline std::vector<torch::Tensor> fragments_of(const std::vector<torch::Tensor>& parameters, std::size_t m) {
  std::vector<torch::Tensor> fragments;
  for (const torch::Tensor& parameter : parameters) {
    const std::int64_t elements = m == 0 ? std::max<std::int64_t>(1, parameter.numel()) : static_cast<std::int64_t>(m);
    for (const auto& each : parameter.detach().view({-1}).split(elements)) fragments.push_back(each);
  }
  return fragments;
}

/// A step of torch's SGD over fragments of the parameters. `gradients[f]` is undefined where fragment f has none: it then stays as it is,
/// momentum included.
inline void update(torch::optim::SGD& sgd, const std::vector<torch::Tensor>& gradients, double rate) {
  auto& group = sgd.param_groups()[0];
  for (std::size_t f = 0; f < gradients.size(); ++f) group.params()[f].mutable_grad() = gradients[f];
  static_cast<torch::optim::SGDOptions&>(group.options()).lr(rate);
  sgd.step();
}
