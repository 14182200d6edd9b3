// SPDX-License-Identifier: MIT
#include "oracle.hpp"

#include <random>

#include "catch.hpp"
#include "lamina/lamina.hpp"

using namespace lamina_test;
using lamina::refresh_schedule;

namespace {

lamina::compressor_options options_with(double ratio, refresh_schedule refresh = refresh_schedule::every(1)) {
  lamina::compressor_options options;
  options.drop_ratio = ratio;
  options.refresh = refresh;
  return options;
}

// The parts of gradient_compressor, put together wrongly in one of two ways.
enum class defect { never_clears, never_accumulates };

template <defect Defect>
class broken_worker {
 public:
  broken_worker(const lamina::layout& model, double threshold, std::uint32_t rank)
      : model_(model), residual_(model), chosen_(model), encoder_(model), threshold_(threshold), rank_(rank) {
    values_.resize(model.layers());
  }
  void accumulate(std::size_t l, const std::vector<float>& gradient) {
    if (Defect == defect::never_accumulates) residual_.clear(l);
    values_[l] = residual_.accumulate(l, gradient);
  }
  const lamina::encoded_frame& encode() {
    chosen_.apply_threshold(values_, threshold_);
    return encoder_.encode(lamina::frame_kind::gradients, ++step_, rank_, chosen_,
                           [this](std::size_t l) { return residual_[l]; });
  }
  void commit() {
    if (Defect == defect::never_clears) return;
    for (std::size_t l = 0; l < model_.layers(); ++l) {
      if (chosen_.is_sent(l)) residual_.clear(l);
    }
  }
  const lamina::residual_accumulator<float>& residual() const { return residual_; }

 private:
  lamina::layout model_;
  lamina::residual_accumulator<float> residual_;
  std::vector<double> values_;
  lamina::selection chosen_;
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
    cluster<TestType> run(model, workers, TestType(0.25), compressors<TestType>(options_with(ratio)));
    REQUIRE(replicas_agree(run));
    for (int step = 0; step < 30; ++step) {
      run.step(random_gradients_of_all(random, run));
      REQUIRE(conserves(run));
      REQUIRE(follows_dense_iterate(run));
      REQUIRE(replicas_agree(run));
      REQUIRE(publishes_the_union(run));
      for (std::size_t w = 0; w < workers; ++w) {
        REQUIRE(drops_as_asked(run, w, ratio));
        REQUIRE(leaves_only_small_layers(run, w));
      }
    }
  }
}

TEST_CASE("oracle 1, 2, 4, 6 and 8 hold whatever the schedule") {
  const auto schedule = GENERATE(0, 1, 2, 3);
  const auto refresh = schedule == 0   ? refresh_schedule::every(7)
                       : schedule == 1 ? refresh_schedule::every(~std::uint64_t{0})
                       : schedule == 2 ? refresh_schedule::fixed(5)
                                       : refresh_schedule::fixed(1e30);  // nothing ever goes out
  std::mt19937 random(230);
  const lamina::layout model = random_model(random);
  cluster<float> run(model, 4, 0.5F, compressors<float>(options_with(0.8, refresh)));
  for (int step = 0; step < 50; ++step) {
    run.step(random_gradients_of_all(random, run));
    REQUIRE(conserves(run));
    REQUIRE(follows_dense_iterate(run));
    REQUIRE(replicas_agree(run));
    REQUIRE(publishes_the_union(run));
    for (std::size_t w = 0; w < 4; ++w) REQUIRE(leaves_only_small_layers(run, w));
    if (schedule == 3) REQUIRE(run.dropped_elements(0) == model.elements());
  }
}

TEST_CASE("oracle 3: ties at the threshold are all sent, and the bound counts them") {
  const lamina::layout model = model_of({10, 10, 10, 10, 10});
  cluster<float> run(model, 1, 1.0F, compressors<float>(options_with(0.5)));
  tensors<float> gradients = zeros_like<float>(model);
  for (auto& layer : gradients) layer.assign(layer.size(), 2);
  run.step({gradients});
  CHECK(run.dropped_elements(0) == 0);
  CHECK(drops_as_asked(run, 0, 0.5));
  gradients[3].assign(10, 1);  // the one below the tie
  run.step({gradients});
  CHECK(run.dropped_elements(0) == 10);
  CHECK(drops_as_asked(run, 0, 0.5));
}

TEST_CASE("oracle 3: one layer is still sent, and gradients that are all zero are not") {
  cluster<float> single(model_of({5}), 2, 1.0F, compressors<float>(options_with(0.99)));
  for (int step = 0; step < 5; ++step) {
    single.step({{{1, 2, 3, 4, 5}}, {{0, 0, 0, 0, 0}}});
    CHECK(single.dropped_elements(0) == 0);
    CHECK(single.dropped_elements(1) == 5);
    CHECK(drops_as_asked(single, 0, 0.99));
  }
}

TEST_CASE("oracle 5: with a fixed threshold each layer goes out every ceil(threshold / mean|g|) steps") {
  const double threshold = 8;
  const std::vector<std::vector<float>> constant = {
      {8, -8}, {3, -3, 3}, {0.5F, -0.5F, 0.25F, 0.75F}, {16}, {1}, {-1.5F, -1.5F}, {5, 0}, {0}};
  std::vector<std::size_t> sizes;
  for (const auto& layer : constant) sizes.push_back(layer.size());
  const lamina::layout model = model_of(sizes);
  cluster<float> run(model, 1, 1.0F,
                     compressors<float>(options_with(0.9, refresh_schedule::fixed(threshold))));
  std::size_t bytes = 0;
  const int steps = 160;
  for (int step = 1; step <= steps; ++step) {
    run.step({constant});
    bytes += run.frames[0].size();
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
  CHECK(bytes == expected);
}

TEMPLATE_TEST_CASE("oracle 7: R = 0 is dense SGD bit for bit, whatever the schedule", "", float, double) {
  const auto schedule = GENERATE(0, 1, 2);
  const auto refresh = schedule == 0   ? refresh_schedule::every(1)
                       : schedule == 1 ? refresh_schedule::every(10)
                                       : refresh_schedule::every(~std::uint64_t{0});
  const std::size_t workers = 3;
  std::mt19937 random(240);
  const lamina::layout model = random_model(random);
  const TestType rate = TestType(0.1);
  cluster<TestType> run(model, workers, rate, compressors<TestType>(options_with(0, refresh)));
  tensors<TestType> dense = zeros_like<TestType>(model);
  for (int step = 0; step < 20; ++step) {
    std::vector<tensors<TestType>> gradients(workers);
    for (auto& each : gradients) {
      for (const std::size_t size : model.sizes()) {
        each.push_back(random_fractions<TestType>(random, size));
        for (TestType& g : each.back())
          g /= TestType(1 + step * step);  // shrinking, so that a λ would go stale
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
  cluster<float> run(model, 2, 1.0F, compressors<float>(options_with(1)));
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
  const lamina::layout model = model_of({4, 4});
  cluster<float> run(model, 2, 1.0F, compressors<float>(options_with(0.5, refresh_schedule::fixed(2))));
  const tensors<float> first = {{2, 2, 2, 2}, {0, 0, 0, 0}};
  const tensors<float> second = {{0, 0, 0, 0}, {2, 2, 2, 2}};
  run.step({first, first});
  CHECK(run.publisher.published_to_all().sent_elements() == 4);
  CHECK(publishes_the_union(run));
  run.step({first, second});
  CHECK(run.publisher.published_to_all().sent_elements() == 8);
  CHECK(publishes_the_union(run));
  run.step({{{0, 0, 0, 0}, {0, 0, 0, 0}}, {{0, 0, 0, 0}, {0, 0, 0, 0}}});
  CHECK(run.publisher.published_to_all().sent_elements() == 0);
  CHECK(publishes_the_union(run));
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

  cluster<float> right(model, 2, 0.0625F, compressors<float>(options_with(0.5, refresh_schedule::fixed(1))));
  descend_quadratic(right, 100);
  CHECK(right.parameters[0][0] > 32);
  CHECK(right.parameters[1][0] > 0.25F);
}

TEST_CASE("negative control: the signed mean never sends a layer that drifts steadily negative") {
  const lamina::layout model = model_of({3});
  const auto options = options_with(0.5, refresh_schedule::fixed(1));
  lamina::gradient_compressor<float, lamina_test::signed_mean> literal(model, options);
  lamina::gradient_compressor<float> absolute(model, options);
  const std::vector<float> falling = {-0.25F, -0.25F, -0.25F};
  for (int step = 1; step <= 1000; ++step) {
    literal.accumulate(0, falling);
    absolute.accumulate(0, falling);
    REQUIRE(literal.select().is_dropped(0));
    REQUIRE(absolute.select().is_sent(0) == (step % 4 == 0));
    literal.encode();
    literal.commit();
    absolute.encode();
    absolute.commit();
  }
  CHECK(literal.residual()[0][0] == -250);
}

TEST_CASE("negative control: without clearing, gradients count twice") {
  const lamina::layout model = model_of({3, 5});
  std::mt19937 random(260);
  cluster<float, broken_worker<defect::never_clears>> broken(model, 2, 0.5F,
                                                             broken_workers<defect::never_clears>(2));
  cluster<float> right(model, 2, 0.5F, compressors<float>(options_with(0.5, refresh_schedule::fixed(2))));
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
  cluster<float> run(model, 2, 0.5F, compressors<float>(options_with(0.5, refresh_schedule::fixed(3))));
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

// An asynchronous server: applies each gradient frame as it comes and replies to its sender. `told_as(w)` is
// the index under which the publisher keeps what worker w has seen.
struct asynchronous_run {
  lamina::layout model;
  std::vector<lamina::gradient_compressor<float>> worker;
  lamina::parameter_publisher<float> publisher;
  tensors<float> parameters;
  std::vector<tensors<float>> replica;
  std::function<std::size_t(std::size_t)> told_as = [](std::size_t w) { return w; };

  asynchronous_run(const lamina::layout& of_model, std::size_t workers,
                   const lamina::compressor_options& options)
      : model(of_model), publisher(model, workers), parameters(zeros_like<float>(model)) {
    for (std::size_t w = 0; w < workers; ++w) {
      worker.push_back(compressors<float>(options)(model, static_cast<std::uint32_t>(w)));
      replica.push_back(zeros_like<float>(model));
      for (auto& layer : replica[w]) layer.assign(layer.size(), -777);
    }
  }

  void push_and_pull(std::size_t w, const tensors<float>& gradients, bool reply_is_lost = false) {
    for (std::size_t l = 0; l < model.layers(); ++l) worker[w].accumulate(l, gradients[l]);
    const auto bytes = worker[w].encode().to_bytes();
    worker[w].commit();
    const auto frame = lamina::decode<float>(bytes, model);
    lamina::selection updated(model);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (frame.is_dropped(l)) continue;
      updated.send(l);
      for (std::size_t i = 0; i < frame.layer(l).size(); ++i) parameters[l][i] -= 0.5F * frame.layer(l)[i];
    }
    publisher.update(updated);
    pull(w, frame.step(), reply_is_lost);
  }

  void pull(std::size_t w, std::uint64_t step, bool reply_is_lost = false) {
    const auto layer = [this](std::size_t l) { return std::span<const float>(parameters[l]); };
    const auto bytes = publisher.encode(told_as(w), step, layer).to_bytes();
    if (reply_is_lost) return;
    receive<float>(replica[w], bytes, model);
    publisher.commit(told_as(w));
  }
};

}  // namespace

TEST_CASE("asynchronous: after each reply the worker's replica is the server's, bit for bit") {
  for (std::uint32_t seed = 271; seed < 281; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::size_t workers = 1 + below(random, 4);
    asynchronous_run run(model, workers, options_with(0.7));
    for (int event = 0; event < 60; ++event) {
      const std::size_t w = below(random, workers);
      const bool lost = random() % 5 == 0;
      run.push_and_pull(w, random_gradients<float>(random, model), lost);
      if (!lost) REQUIRE(same_tensors(run.replica[w], run.parameters));
    }
  }
}

TEST_CASE("asynchronous: a reply holds only what the worker has not seen") {
  const lamina::layout model = model_of({1, 1});
  asynchronous_run run(model, 2, options_with(0, refresh_schedule::every(1)));
  run.pull(0, 0);
  run.pull(1, 0);
  run.pull(0, 0);
  CHECK(run.publisher.published(0).sent_layers() == 0);
  run.push_and_pull(0, {{1}, {1}});
  CHECK(run.publisher.published(0).sent_layers() == 2);
  run.pull(0, 1);
  CHECK(run.publisher.published(0).sent_layers() == 0);
  run.pull(1, 1);
  CHECK(run.publisher.published(1).sent_layers() == 2);
}

TEST_CASE("negative control: a server-wide 'updated' leaves an asynchronous worker with a stale replica") {
  const bool server_wide = GENERATE(false, true);
  const lamina::layout model = model_of({1, 1});
  asynchronous_run run(model, 2, options_with(0.5, refresh_schedule::fixed(1)));
  run.pull(0, 0);
  run.pull(1, 0);
  run.replica[1] = run.parameters;  // both begin with the same model, whatever the books say
  if (server_wide) run.told_as = [](std::size_t) { return std::size_t{0}; };
  run.push_and_pull(0, {{4}, {0}});
  CHECK(same_tensors(run.replica[0], run.parameters));
  run.push_and_pull(1, {{0}, {4}});
  CHECK(same_tensors(run.replica[1], run.parameters) == !server_wide);
  CHECK(run.replica[1][0][0] == (server_wide ? 0.0F : -2.0F));
}
