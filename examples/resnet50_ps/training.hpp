// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <lamina/adapt/torch.hpp>
#include <lamina/partition.hpp>
#include <span>
#include <string>
#include <vector>

#include "data.hpp"
#include "options.hpp"
#include "ranks.hpp"
#include "records.hpp"
#include "resnet50.hpp"

using clock_type = std::chrono::steady_clock;

inline double seconds_since(clock_type::time_point begin) {
  return std::chrono::duration<double>(clock_type::now() - begin).count();
}

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
    return step > with.steps || (!with.async && is_due(with.evaluate_every, step - 1));
  }
  bool saves_after(std::uint64_t step) const { return is_due(with.checkpoint_every, step); }
  /// The learning rate of a step: grows from zero in --warm-up steps.
  double rate(std::uint64_t step) const {
    return with.learning_rate *
           std::min(1.0, static_cast<double>(step) / static_cast<double>(with.warm_up + 1));
  }

 private:
  static bool is_due(std::uint64_t period, std::uint64_t done) {
    return period > 0 && done > 0 && done % period == 0;
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
    for (const float value : lamina::elements_of<float>(each)) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      sum = (sum ^ bits) * 1099511628211U;  // FNV-1a, by 32 bits
    }
  }
  return sum;
}

/// A worker's copy of the network, and its images.
struct replica {
  explicit replica(const run& of)
      : network((torch::manual_seed(of.with.seed), of.data.train->classes())),
        parameters(network.parameters()),
        test_images(*of.data.test),
        workers(static_cast<std::size_t>(of.who.workers)),
        worker(static_cast<std::size_t>(of.who.rank - 1)),
        images(*of.data.train, workers, worker, of.with.batch, of.with.seed) {}

  /// The gradients of a step's batch, in the parameters' grad().
  void compute(std::uint64_t step, report& told) {
    const auto begin = clock_type::now();
    const auto batch = images.of_step(step);
    network.zero_grad();
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(network.forward(batch.data), batch.target);
    loss.backward();
    told.loss = loss.item<double>();
    told.compute_seconds = seconds_since(begin);
  }

  /// Tries this worker's share of the test images, with its own running means of batch normalisation.
  void test(report& told) {
    const auto begin = clock_type::now();
    const torch::NoGradGuard no_gradients;
    network.eval();
    constexpr std::size_t at_once = 100;
    std::vector<std::size_t> indices;
    for (std::size_t i = worker; i < test_images.size(); i += workers) {
      indices.push_back(i);
      if (indices.size() < at_once && i + workers < test_images.size()) continue;
      const auto batch = batch_of(test_images, indices, 0);
      const torch::Tensor scores = network.forward(batch.data);
      told.test_right += scores.argmax(1).eq(batch.target).sum().item<std::int64_t>();
      told.test_loss +=
          torch::nn::functional::cross_entropy(
              scores, batch.target, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
              .item<double>();
      told.tested += static_cast<std::int64_t>(indices.size());
      indices.clear();
    }
    network.train();
    told.test_seconds = seconds_since(begin);
  }

  resnet50 network;
  std::vector<torch::Tensor> parameters;
  const image_set& test_images;
  std::size_t workers, worker;
  batches images;
};

/// torch's SGD over the fragments of the parameters; a fragment without a gradient stays as it is, momentum included.
class fragment_sgd {
 public:
  fragment_sgd(const std::vector<torch::Tensor>& parameters, const lamina::partition& cut, double momentum)
      : fragments_(lamina::parts_of(parameters, cut)),
        sgd_(fragments_, torch::optim::SGDOptions(0).momentum(momentum)) {}

  const std::vector<torch::Tensor>& fragments() const { return fragments_; }
  torch::optim::SGD& state() { return sgd_; }
  /// `gradients[f]` is undefined where fragment f has none.
  void step(const std::vector<torch::Tensor>& gradients, double rate) {
    for (std::size_t f = 0; f < fragments_.size(); ++f) fragments_[f].mutable_grad() = gradients[f];
    static_cast<torch::optim::SGDOptions&>(sgd_.param_groups()[0].options()).lr(rate);
    sgd_.step();
  }

 private:
  std::vector<torch::Tensor> fragments_;
  torch::optim::SGD sgd_;
};

/// The reports of one step, for its record.
class step_reports {
 public:
  /// Adds that of a worker, for which it waits.
  void receive(int worker, const ranks& who) { add(receive_report(worker, who)); }
  void receive_all(const ranks& who) {
    for (int worker = 1; worker <= who.workers; ++worker) receive(worker, who);
  }
  /// Mean loss, longest computation, and what the test of the parameters before this step gave.
  void put_into(step_record& record) const {
    record.loss = loss_ / count_;
    record.compute_seconds = compute_seconds_;
    record.seconds -= test_seconds_;
  }
  void log_test(records& log, std::uint64_t done) const {
    if (tested_ > 0) log.add_test(done, test_loss_ / tested_, right_ / tested_);
  }
  /// Throws unless each worker of the last step holds these bits.
  void compare(std::uint64_t checksum) const {
    for (std::size_t w = 0; w < checksums_.size(); ++w) {
      if (checksums_[w] != checksum)
        throw std::runtime_error("the parameters of " + name_of(static_cast<int>(w) + 1) +
                                 " differ from the others'");
    }
    std::printf("%zu replicas equal, checksum %016llx\n", checksums_.size(),
                static_cast<unsigned long long>(checksum));
  }
  std::uint64_t first_checksum() const { return checksums_.at(0); }

 private:
  void add(const report& told) {
    loss_ += told.loss;
    compute_seconds_ = std::max(compute_seconds_, told.compute_seconds);
    test_seconds_ = std::max(test_seconds_, told.test_seconds);
    test_loss_ += told.test_loss;
    right_ += static_cast<double>(told.test_right);
    tested_ += static_cast<double>(told.tested);
    checksums_.push_back(told.checksum);
    ++count_;
  }
  double loss_ = 0, compute_seconds_ = 0, test_seconds_ = 0, test_loss_ = 0, right_ = 0, tested_ = 0,
         count_ = 0;
  std::vector<std::uint64_t> checksums_;
};
