// SPDX-License-Identifier: MIT
// Negative controls of invariants.hpp: each invariant notices what breaks it. tests/property has random runs that break none.
#include <memory>
#include <random>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "invariants.hpp"
#include "lamina/lamina.hpp"

namespace lamina_test::invariant_test {

namespace {

enum class defect { none, never_clears, never_accumulates };

// What a worker is made of, put together wrongly in one of two ways.
class worker_by_hand {
 public:
  worker_by_hand(const lamina::layout& model, defect wrong, std::uint32_t rank)
      : residual_(std::make_unique<lamina::residual_accumulator<float>>(model)),
        encoder_(model),
        wrong_(wrong),
        rank_(rank) {}
  bytes send(const tensors<float>& gradients) {
    lamina::selection sent(residual_->model());
    for (std::size_t l = 0; l < gradients.size(); ++l) {
      if (wrong_ == defect::never_accumulates) residual_->clear(l);
      if (accumulate(*residual_, l, gradients[l]) >= 2) sent.send(l);
    }
    const auto layer = [this](std::size_t l) { return (*residual_)[l]; };
    bytes frame = encoder_.encode({.step = ++step_, .sender = rank_}, sent, layer).to_bytes();
    for (const std::size_t l : sent.sent()) {
      if (wrong_ != defect::never_clears) residual_->clear(l);
    }
    return frame;
  }
  const lamina::residual_accumulator<float>& residual() const { return *residual_; }

 private:
  std::unique_ptr<lamina::residual_accumulator<float>> residual_;
  lamina::frame_encoder<float> encoder_;
  defect wrong_;
  std::uint32_t rank_;
  std::uint64_t step_ = 0;
};

}  // namespace

TEST_CASE("invariant 1 and 2: a worker that does not accumulate, or does not clear, breaks both") {
  const auto wrong = GENERATE(defect::none, defect::never_clears, defect::never_accumulates);
  std::mt19937 random(260);
  cluster<float, worker_by_hand> run(model_of({3, 5}), 2, 0.5F, [&](const auto& model, std::uint32_t rank) {
    return worker_by_hand(model, wrong, rank);
  });
  for (int step = 0; step < 10; ++step) run.step(random_gradients_of_all(random, run));
  CHECK(conserves(run) == (wrong == defect::none));
  CHECK(follows_dense_iterate(run) == (wrong == defect::none));
}

TEST_CASE("invariant 6: an optimizer that touches layers that nobody sent breaks the replicas") {
  const bool touches_all = GENERATE(false, true);
  cluster<float> run(model_of({2, 2}), 2, 0.5F, workers_of<float>({.threshold = 3}));
  tensors<float> velocity = zeros_like<float>(run.model);
  run.update = [&](std::size_t l, std::size_t begin, std::span<const float> mean) {
    for (std::size_t i = 0; i < mean.size(); ++i) {
      velocity[l][begin + i] = 0.5F * velocity[l][begin + i] + mean[i];
      run.parameters[l][begin + i] -= run.learning_rate * velocity[l][begin + i];
    }
  };
  if (touches_all) {
    run.update_untouched = [&](std::size_t l) {
      for (std::size_t i = 0; i < velocity[l].size(); ++i) {
        velocity[l][i] *= 0.5F;
        run.parameters[l][i] -= run.learning_rate * velocity[l][i];
      }
    };
  }
  bool agreed = true;
  for (int step = 0; step < 10; ++step) {
    run.step({{{4, 4}, {1, 1}}, {{4, 4}, {1, 1}}});
    agreed = agreed && replicas_agree(run);
  }
  CHECK(agreed == !touches_all);
}

}  // namespace lamina_test::invariant_test
