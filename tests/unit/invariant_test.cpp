// SPDX-License-Identifier: MIT
#include "oracle.hpp"

#include <array>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "accumulate.hpp"
#include "catch.hpp"
#include "lamina/lamina.hpp"

using namespace lamina_test;
using lamina::worker_options;

namespace {

// What a worker is made of, put together wrongly in one of two ways.
enum class defect { never_clears, never_accumulates };

template <defect Defect>
class broken_worker {
 public:
  broken_worker(const lamina::layout& model, double threshold, std::uint32_t rank)
      : model_(model),
        residual_(std::make_unique<lamina::residual_accumulator<float>>(model)),
        sent_(model),
        encoder_(model),
        threshold_(threshold),
        rank_(rank) {
    values_.resize(model.layers());
  }
  bytes send(const tensors<float>& gradients) {
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (Defect == defect::never_accumulates) residual_->clear(l);
      values_[l] = accumulate(*residual_, l, gradients[l]);
    }
    sent_.clear();
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (values_[l] >= threshold_) sent_.send(l);
    }
    bytes frame = encoder_
                      .encode({.step = ++step_, .sender = rank_}, sent_,
                              [this](std::size_t l) { return (*residual_)[l]; })
                      .to_bytes();
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (Defect != defect::never_clears && sent_.is_sent(l)) residual_->clear(l);
    }
    return frame;
  }
  const lamina::residual_accumulator<float>& residual() const { return *residual_; }

 private:
  lamina::layout model_;
  std::unique_ptr<lamina::residual_accumulator<float>> residual_;
  std::vector<double> values_;
  lamina::selection sent_;
  lamina::frame_encoder<float> encoder_;
  double threshold_;
  std::uint32_t rank_;
  std::uint64_t step_ = 0;
};

template <defect Defect>
auto broken_workers(double threshold) {
  return [threshold](const lamina::layout& model, std::uint32_t rank) {
    return broken_worker<Defect>(model, threshold, rank);
  };
}

}  // namespace

TEMPLATE_TEST_CASE("oracle 1 to 4, 6 and 8 hold at every step, for random models, R and W", "", float,
                   double) {
  for (std::uint32_t seed = 201; seed < 225; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::size_t workers = std::size_t{1} << below(random, 4);  // 1/W a power of two
    const double ratio = std::array{0.3, 0.5, 0.9, 0.95, 0.99}[below(random, 5)];
    CAPTURE(seed, workers, ratio);
    cluster<TestType> run(model, workers, TestType(0.25), workers_of<TestType>({.drop_ratio = ratio}));
    REQUIRE(replicas_agree(run));
    for (int step = 0; step < 30; ++step) {
      run.step(random_gradients_of_all(random, run));
      REQUIRE(conserves(run));
      REQUIRE(follows_dense_iterate(run));
      REQUIRE(replicas_agree(run));
      REQUIRE(publishes_the_union(run));
      for (std::size_t w = 0; w < workers; ++w) {
        REQUIRE(drops_as_asked(run, w, ratio));
        REQUIRE(drops_only_small_layers(run, w));
      }
    }
  }
}

TEST_CASE("oracle 1, 2, 4, 6 and 8 hold whatever the schedule") {
  const worker_options options =
      GENERATE(worker_options{.drop_ratio = 0.8, .search_every = 7}, worker_options{.threshold = 5},
               worker_options{.threshold = 1e30});  // of which nothing is ever sent
  std::mt19937 random(230);
  const lamina::layout model = random_model(random);
  cluster<float> run(model, 4, 0.5F, workers_of<float>(options));
  for (int step = 0; step < 50; ++step) {
    run.step(random_gradients_of_all(random, run));
    REQUIRE(conserves(run));
    REQUIRE(follows_dense_iterate(run));
    REQUIRE(replicas_agree(run));
    REQUIRE(publishes_the_union(run));
    for (std::size_t w = 0; w < 4; ++w) REQUIRE(drops_only_small_layers(run, w));
    if (options.threshold == 1e30) REQUIRE(run.dropped_elements(0) == model.elements());
  }
}

TEST_CASE("oracle 3: ties at the threshold are all sent, and the bound counts them") {
  const lamina::layout model = model_of({10, 10, 10, 10, 10});
  cluster<float> run(model, 1, 1.0F, workers_of<float>({.drop_ratio = 0.5}));
  tensors<float> gradients(5, std::vector<float>(10, 2));
  run.step({gradients});
  CHECK(run.dropped_elements(0) == 0);
  CHECK(drops_as_asked(run, 0, 0.5));
  gradients[3].assign(10, 1);  // the one below the tie
  run.step({gradients});
  CHECK(run.dropped_elements(0) == 10);
  CHECK(drops_as_asked(run, 0, 0.5));
}

TEST_CASE("oracle 3: one layer is still sent, and gradients that are all zero are not") {
  cluster<float> single(model_of({5}), 2, 1.0F, workers_of<float>({.drop_ratio = 0.99}));
  for (int step = 0; step < 5; ++step) {
    single.step({{{1, 2, 3, 4, 5}}, {{0, 0, 0, 0, 0}}});
    CHECK(single.dropped_elements(0) == 0);
    CHECK(single.dropped_elements(1) == 5);
    CHECK(drops_as_asked(single, 0, 0.99));
  }
}

TEST_CASE("oracle 5: with a fixed threshold each layer is sent every ceil(threshold / mean|g|) steps") {
  const double threshold = 8;
  const tensors<float> constant = {
      {8, -8}, {3, -3, 3}, {0.5F, -0.5F, 0.25F, 0.75F}, {16}, {1}, {-1.5F, -1.5F}, {5, 0}, {0}};
  std::vector<std::size_t> sizes;
  for (const auto& layer : constant) sizes.push_back(layer.size());
  const lamina::layout model = model_of(sizes);
  cluster<float> run(model, 1, 1.0F, workers_of<float>({.threshold = threshold}));
  std::size_t sent_bytes = 0;
  const int steps = 160;
  for (int step = 1; step <= steps; ++step) {
    run.step({constant});
    sent_bytes += run.frames[0].size();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const double mean = literal_mean_abs<float>(constant[l]);
      const bool due = mean > 0 && step % static_cast<int>(std::ceil(threshold / mean)) == 0;
      CAPTURE(step, l);
      REQUIRE(run.frame(0).is_dropped(l) == !due);
    }
  }
  std::size_t expected = static_cast<std::size_t>(steps) * (64 + 64);
  for (const auto& layer : constant) {
    const double mean = literal_mean_abs<float>(layer);
    if (mean == 0) continue;
    const auto period = static_cast<int>(std::ceil(threshold / mean));
    expected += static_cast<std::size_t>(steps / period) * layer.size() * sizeof(float);
  }
  CHECK(sent_bytes == expected);
}

TEMPLATE_TEST_CASE("oracle 7: R = 0 is dense SGD bitwise, whatever the schedule", "", float, double) {
  const std::uint64_t search_every = GENERATE(1U, 10U);
  const std::size_t workers = 3;
  std::mt19937 random(240);
  const lamina::layout model = random_model(random);
  const TestType rate = TestType(0.1);
  cluster<TestType> run(model, workers, rate,
                        workers_of<TestType>({.drop_ratio = 0, .search_every = search_every}));
  tensors<TestType> dense = zeros_like<TestType>(model);
  for (int step = 0; step < 20; ++step) {
    std::vector<tensors<TestType>> gradients;
    for (std::size_t w = 0; w < workers; ++w) {
      gradients.push_back(rounding_gradients<TestType>(random, model));
      for (auto& layer : gradients.back()) {
        for (TestType& g : layer) g /= TestType(1 + step * step);  // shrinking, so that a λ would go stale
      }
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t i = 0; i < model.sizes()[l]; ++i) {
        TestType sum = gradients[0][l][i];
        for (std::size_t w = 1; w < workers; ++w) sum += gradients[w][l][i];
        const volatile TestType change = rate * (sum / TestType(workers));  // no contraction to FMA
        dense[l][i] -= change;
      }
    }
    run.step(gradients);
    REQUIRE(same_tensors(run.parameters, dense));
    REQUIRE(replicas_agree(run));
    for (std::size_t w = 0; w < workers; ++w) REQUIRE(run.dropped_elements(w) == 0);
  }
}

TEST_CASE("oracle 7: R = 1 gives the invalid threshold and sends everything") {
  std::mt19937 random(250);
  const lamina::layout model = random_model(random);
  cluster<float> run(model, 2, 1.0F, workers_of<float>({.drop_ratio = 1}));
  for (int step = 0; step < 10; ++step) {
    run.step(random_gradients_of_all(random, run));
    for (std::size_t w = 0; w < 2; ++w) {
      REQUIRE(run.worker[w].threshold() == -1);
      REQUIRE(run.dropped_elements(w) == 0);
    }
    REQUIRE(conserves(run));
  }
}

TEST_CASE("oracle 8: the bounds of the union are met by equal and by disjoint workers") {
  cluster<float> run(model_of({4, 4}), 2, 1.0F, workers_of<float>({.threshold = 2}));
  const tensors<float> first = {{2, 2, 2, 2}, {0, 0, 0, 0}};
  const tensors<float> second = {{0, 0, 0, 0}, {2, 2, 2, 2}};
  const auto published = [&](const tensors<float>& a, const tensors<float>& b) {
    run.step({a, b});
    CHECK(publishes_the_union(run));
    return run.published;
  };
  CHECK(published(first, first) == 4);
  CHECK(published(first, second) == 8);
  CHECK(published(zeros_like<float>(run.model), zeros_like<float>(run.model)) == 0);
}

// A quadratic ½ Σ (x − c)² with one strong and one weak layer.
template <class Cluster>
void descend_quadratic(Cluster& run, int steps) {
  for (int step = 0; step < steps; ++step) {
    std::vector<tensors<float>> gradients(run.workers(), run.replica[0]);
    for (std::size_t w = 0; w < run.workers(); ++w) {
      for (float& g : gradients[w][0]) g -= 64;
      for (float& g : gradients[w][1]) g -= 0.5F;
    }
    run.step(gradients);
  }
}

TEST_CASE("negative control: without accumulation a layer below the threshold never moves") {
  const lamina::layout model = model_of({2, 2});
  cluster<float, broken_worker<defect::never_accumulates>> broken(
      model, 2, 0.0625F, broken_workers<defect::never_accumulates>(1));
  descend_quadratic(broken, 100);
  CHECK(broken.parameters[0][0] > 32);
  CHECK(same_bits(broken.parameters[1], std::vector<float>{0, 0}));

  cluster<float> right(model, 2, 0.0625F, workers_of<float>({.threshold = 1}));
  descend_quadratic(right, 100);
  CHECK(right.parameters[0][0] > 32);
  CHECK(right.parameters[1][0] > 0.25F);
}

TEST_CASE("negative control: the signed mean never sends a layer that falls steadily") {
  const lamina::layout model = model_of({3});
  lamina::worker<float, signed_mean> literal(model, {.threshold = 1});
  lamina::worker<float> absolute(model, {.threshold = 1});
  const tensors<float> falling = {{-0.25F, -0.25F, -0.25F}};
  for (int t = 1; t <= 1000; ++t) {
    send(literal, falling);
    send(absolute, falling);
    REQUIRE(absolute.residual().is_clear(0) == (t % 4 == 0));
  }
  CHECK(literal.residual()[0][0] == -250);
}

TEST_CASE("negative control: without clearing, gradients count twice") {
  const lamina::layout model = model_of({3, 5});
  std::mt19937 random(260);
  cluster<float, broken_worker<defect::never_clears>> broken(model, 2, 0.5F,
                                                             broken_workers<defect::never_clears>(2));
  cluster<float> right(model, 2, 0.5F, workers_of<float>({.threshold = 2}));
  for (int step = 0; step < 10; ++step) {
    const auto gradients = random_gradients_of_all(random, broken);
    broken.step(gradients);
    right.step(gradients);
    REQUIRE(conserves(right));
    REQUIRE(follows_dense_iterate(right));
  }
  CHECK_FALSE(conserves(broken));
  CHECK_FALSE(follows_dense_iterate(broken));
}

TEST_CASE("negative control: momentum on layers that nobody sent breaks the replicas") {
  const bool touches_all = GENERATE(false, true);
  const lamina::layout model = model_of({2, 2});
  cluster<float> run(model, 2, 0.5F, workers_of<float>({.threshold = 3}));
  tensors<float> velocity = zeros_like<float>(model);
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

namespace {

// An asynchronous server: applies each frame as it comes and replies to its sender. `told_as(w)` is the worker under whose name
// the server keeps what worker w has seen.
struct asynchronous_run {
  lamina::layout model;
  std::vector<lamina::worker<float>> worker;
  lamina::server<float> server;
  tensors<float> parameters;
  std::vector<tensors<float>> replica;
  std::function<std::size_t(std::size_t)> told_as = [](std::size_t w) { return w; };

  asynchronous_run(const lamina::layout& of_model, std::size_t workers, const worker_options& options)
      : model(of_model),
        server(model, {.workers = workers, .asynchronous = true}),
        parameters(zeros_like<float>(model)) {
    for (std::size_t w = 0; w < workers; ++w) {
      worker.push_back(workers_of<float>(options)(model, static_cast<std::uint32_t>(w)));
      replica.push_back(zeros_like<float>(model));
      for (auto& layer : replica[w]) layer.assign(layer.size(), -777);
    }
  }

  void push_and_pull(std::size_t w, const tensors<float>& gradients, bool reply_is_lost = false) {
    const auto error = server.add(send(worker[w], gradients));
    REQUIRE_FALSE(error);
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) parameters[l][begin + i] -= 0.5F * mean[i];
    });
    pull(w, reply_is_lost);
  }
  // Gives how many layers the reply holds.
  std::size_t pull(std::size_t w, bool reply_is_lost = false) {
    const auto reply = server.reply(told_as(w), parameters);
    if (!reply_is_lost) {
      receive<float>(replica[w], reply.to_bytes(), model);
      server.commit(told_as(w), reply.clock());
    }
    return reply.sent().sent_layers();
  }
};

}  // namespace

TEST_CASE("asynchronous: after each reply the worker's replica is the server's, bitwise") {
  for (std::uint32_t seed = 271; seed < 281; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::size_t workers = 1 + below(random, 4);
    asynchronous_run run(model, workers, {.drop_ratio = 0.7});
    for (int event = 0; event < 60; ++event) {
      const std::size_t w = below(random, workers);
      const bool lost = random() % 5 == 0;
      run.push_and_pull(w, random_gradients<float>(random, model), lost);
      if (!lost) REQUIRE(same_tensors(run.replica[w], run.parameters));
    }
  }
}

TEST_CASE("asynchronous: a reply holds only what the worker has not seen") {
  asynchronous_run run(model_of({1, 1}), 2, {.drop_ratio = 0});
  CHECK(run.pull(0) == 2);
  CHECK(run.pull(1) == 2);
  CHECK(run.pull(0) == 0);
  run.push_and_pull(0, {{1}, {1}});
  CHECK(run.pull(0) == 0);
  CHECK(run.pull(1) == 2);
}

TEST_CASE("negative control: one record of what was updated for all leaves an asynchronous worker stale") {
  const bool server_wide = GENERATE(false, true);
  asynchronous_run run(model_of({1, 1}), 2, {.threshold = 1});
  run.pull(0);
  run.pull(1);
  run.replica[1] = run.parameters;
  if (server_wide) run.told_as = [](std::size_t) { return std::size_t{0}; };
  run.push_and_pull(0, {{4}, {0}});
  CHECK(same_tensors(run.replica[0], run.parameters));
  run.push_and_pull(1, {{0}, {4}});
  CHECK(same_tensors(run.replica[1], run.parameters) == !server_wide);
  CHECK(run.replica[1][0][0] == (server_wide ? 0.0F : -1.0F));  // 0.5 times 4 over 2 workers
}
