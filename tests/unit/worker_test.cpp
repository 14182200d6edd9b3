// SPDX-License-Identifier: MIT
#include "lamina/worker.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "steps.hpp"

namespace lamina_test::worker_test {

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// NaN for a layer of zeros: their mean over how many are not zero.
struct mean_of_what_is_not_zero {
  static double map(float x) { return std::abs(static_cast<double>(x)); }
  static double map(double x) { return std::abs(x); }
  static double combine(double a, double b) { return a + b; }
  static double finish(double total, std::size_t) { return total == 0 ? std::nan("") : total; }
};

}  // namespace

TEMPLATE_TEST_CASE("worker: a frame holds the step, the sender and the layers at or above the threshold", "",
                   float, double) {
  const lamina::layout model = model_of({2, 3, 0, 1});
  lamina::worker<TestType> worker(model, {.threshold = 2, .sender = 5});
  CHECK(worker.steps() == 0);
  auto step = worker.add(tensors<TestType>{{1, -3}, {1, 1, 3}, {}, {-7}});
  REQUIRE(step);
  CHECK(step.number() == 1);
  CHECK(copy_of(step.values()) ==
        std::vector<double>{2, literal_mean_abs<TestType>(std::vector<TestType>{1, 1, 3}), 0, 7});
  const bytes frame = step.frame().to_bytes();
  const auto view = lamina::decode<TestType>(frame, model);
  CHECK(view.kind() == lamina::frame_kind::gradients);
  CHECK(view.step() == 1);
  CHECK(view.sender() == 5);
  CHECK(same_bits(view.layer(0), std::vector<TestType>{1, -3}));  // at the threshold
  CHECK(view.is_dropped(1));
  CHECK(view.is_dropped(2));
  CHECK(same_bits(view.layer(3), std::vector<TestType>{-7}));
  CHECK(sent_of(step.sent()) == "1001");
  CHECK(worker.threshold() == 2);
}

TEST_CASE("worker: select decides as Algorithm 1 does, and the frame holds just that") {
  for (std::uint32_t seed = 61; seed < 71; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
    lamina::worker<float> worker(model, {.drop_ratio = 0.7});
    for (int t = 0; t < 20; ++t) {
      auto step = worker.add(random_gradients<float>(random, model));
      const std::vector<double> values = copy_of(step.values());
      const lamina::selection& sent = step.select();
      REQUIRE(worker.threshold() == literal_algorithm_1(values, sizes, 0.7));
      const bytes frame = step.frame().to_bytes();
      const auto view = lamina::decode<float>(frame, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        REQUIRE(sent.is_sent(l) == (sizes[l] > 0 && values[l] != 0 && values[l] >= worker.threshold()));
        REQUIRE(view.is_dropped(l) == sent.is_dropped(l));
        if (sent.is_sent(l)) REQUIRE(same_bits(view.layer(l), worker.residual()[l]));
      }
      step.commit();
    }
  }
}

TEST_CASE("worker: the threshold is searched when it is due, and stays between") {
  std::mt19937 random(72);
  const lamina::layout model = model_of({5, 1, 7, 3, 0, 2});
  const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
  const std::uint64_t period = GENERATE(1U, 2U, 3U, 5U);
  lamina::worker<float> worker(model, {.drop_ratio = 0.6, .search_every = period});
  CHECK(worker.threshold() == lamina::invalid_threshold);
  double expected = 0;
  int stale = 0;
  for (std::uint64_t t = 1; t <= 30; ++t) {
    auto step = worker.add(random_gradients<float>(random, model));
    const double fresh = literal_algorithm_1(copy_of(step.values()), sizes, 0.6);
    if ((t - 1) % period == 0) expected = fresh;
    stale += expected != fresh;
    step.select();
    REQUIRE(worker.threshold() == expected);
    step.commit();
  }
  CHECK((stale > 0) == (period != 1));
}

TEST_CASE("worker: a search whose step was let go undecided is made up for in the next") {
  lamina::worker<float> worker(model_of({1, 1}), {.drop_ratio = 0.5, .search_every = 100});
  (void)worker.add(tensors<float>{{1}, {2}});
  auto step = worker.add(tensors<float>{{1}, {2}});
  CHECK(step.number() == 1);
  CHECK(sent_of(step.select()) == "01");
  CHECK(worker.threshold() == 4);
}

TEST_CASE("worker: the functor given decides") {
  // Sums favour the large layer, means the small one.
  const tensors<float> gradients = {{3}, {1, 1, 1, 1}};
  lamina::worker<float> by_mean(model_of({1, 4}), {.threshold = 2});
  lamina::worker<float, lamina::l1_norm> by_sum(model_of({1, 4}), {.threshold = 3.5});
  CHECK(sent_of(by_mean.add(gradients).select()) == "10");
  CHECK(sent_of(by_sum.add(gradients).select()) == "01");
}

TEST_CASE("worker: a threshold of -1 that was found is a threshold like any other") {
  lamina::worker<float, signed_mean> worker(model_of({1, 1}), {.drop_ratio = 0.5});
  CHECK(sent_of(worker.add(tensors<float>{{-3}, {-1}}).select()) == "01");
  CHECK(worker.threshold() == -1);
}

TEST_CASE("worker: a value that is NaN sends its layer first, its own and an agreed one") {
  const lamina::layout model = model_of({100, 1, 100});
  const auto sent = [&](const lamina::worker_options& options) {
    lamina::worker<float, mean_of_what_is_not_zero> worker(model, options);
    auto step = worker.add(tensors<float>{std::vector<float>(100, 1), {0}, std::vector<float>(100, 2)});
    CHECK(std::isnan(step.values()[1]));
    return sent_of(step.select());
  };
  CHECK(sent({.threshold = 1e9}) == "010");
  CHECK(sent({.drop_ratio = 0.5}) == "011");
  CHECK(sent({.send_budget = 0.01}) == "010");
  CHECK(sent({.send_budget = 0.001}) == "000");  // not even one element
  lamina::worker<float> worker(model_of({1, 1}), {.drop_ratio = 0.5});
  auto step = worker.add(tensors<float>{{1}, {2}});
  step.values()[0] = std::nan("");
  CHECK(sent_of(step.select()) == "10");
}

TEST_CASE("worker: a mistake throws, names what is wrong, and changes nothing") {
  const lamina::layout model({{"first", {2}}, {"last", {2}}});
  lamina::worker<float> worker(model);
  const auto refused = [&](const tensors<float>& gradients, const char* named, double scale = 1) {
    CHECK(contains(message_of<std::invalid_argument>([&] { (void)worker.add(gradients, scale); }), named));
    CHECK(worker.steps() == 0);
    CHECK(residual_of(worker) == std::vector<float>(4));
  };
  refused({{1, 2}, {3, 4, 5}}, "'last'");
  refused({{1, 2}}, "2 layers, got 1");
  refused({{1, 2}, {3, 4}, {5}}, "2 layers, got 3");
  for (const double scale : {std::nan(""), HUGE_VAL, 1e300}) refused({{1, 2}, {3, 4}}, "scale", scale);
  refused({{1, 2}, {3, 4}}, "of their type, got 1e-46", 1e-46);
  CHECK_NOTHROW(worker.add(tensors<float>{{1, 2}, {3, 4}}).frame());
}

TEST_CASE("worker: a model without layers, and an option outside its range, are refused by name") {
  CHECK_THROWS_AS(lamina::worker<float>(model_of({})), std::invalid_argument);
  const auto refused = [](const lamina::worker_options& options, const char* named) {
    CHECK(contains(message_of<std::invalid_argument>([&] { lamina::worker<float>(model_of({1}), options); }),
                   named));
  };
  for (const double ratio : {-0.1, 1.1, std::nan("")}) refused({.drop_ratio = ratio}, "drop ratio");
  for (const double budget : {-1.0, 0.0, 1.1, std::nan("")}) refused({.send_budget = budget}, "send_budget");
  for (const double momentum : {-0.1, 1.0, std::nan("")}) refused({.momentum = momentum}, "momentum");
  refused({.search_every = 0}, "search_every");
  refused({.threshold = std::nan("")}, "threshold");
  refused({.fragment_elements = 1}, "must be a multiple of 4096");
  refused({.payload = static_cast<lamina::payload_type>(99)}, "payload");
  refused({.always_sent = {1}}, "layer 1");
}

}  // namespace lamina_test::worker_test
