// SPDX-License-Identifier: MIT
#include "model/optimizer.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <lamina/layout.hpp>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"
#include "model/schedule.hpp"

namespace {

using Catch::Matchers::Contains;
using lab::cosine_decay;
using lab::learning_rate_schedule;
using lab::parse_schedule;
using lab::sgd;
using lab::sgd_options;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

const lamina::layout three_layers({{"first", {3}}, {"second", {101}}, {"third", {2, 4}}});
const std::vector<sgd_options> combinations = {
    {0.1F, 0, 0, false},        {0.1F, 0, 0.01F, false}, {0.1F, 0.9F, 0, false},
    {0.1F, 0.9F, 0.01F, false}, {0.1F, 0.9F, 0, true},   {0.1F, 0.9F, 0.01F, true},
};

std::vector<float> normal(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(random);
  return values;
}

std::vector<std::uint32_t> bits(std::span<const float> values) {
  std::vector<std::uint32_t> all;
  for (const float value : values) all.push_back(std::bit_cast<std::uint32_t>(value));
  return all;
}

// A model's parameters, one layer behind the other, with their optimizer.
struct training {
  explicit training(const sgd_options& options) : optimizer(three_layers, options) {}

  std::span<float> layer(std::size_t l) {
    return std::span(parameters).subspan(three_layers.offset(l), three_layers.sizes()[l]);
  }
  void step(std::size_t l, std::uint32_t seed) {
    optimizer.begin(l, seed);
    optimizer.update(l, 0, normal(three_layers.sizes()[l], seed), layer(l));
  }

  std::vector<float> parameters = normal(three_layers.elements(), 1);
  sgd optimizer;
};

// Sums of powers of two, so that every step is exact and there is one right answer.
TEST_CASE("three steps of SGD are those of the formulas, for each combination of the options") {
  struct expectation {
    sgd_options options;
    std::array<float, 3> parameter;
    std::array<float, 3> velocity;
  };
  const auto [options, parameter, velocity] = GENERATE(values<expectation>({
      {{0.5F, 0, 0, false}, {0.5F, 0, -0.5F}, {}},
      {{0.5F, 0, 0.25F, false}, {0.375F, -0.171875F, -0.650390625F}, {}},
      {{0.5F, 0.5F, 0, false}, {0.5F, -0.25F, -1.125F}, {1, 1.5F, 1.75F}},
      {{0.5F, 0.5F, 0.25F, false}, {0.375F, -0.484375F, -1.353515625F}, {1.25F, 1.71875F, 1.73828125F}},
      {{0.5F, 0.5F, 0, true}, {0.25F, -0.625F, -1.5625F}, {1, 1.5F, 1.75F}},
      {{0.5F, 0.5F, 0.25F, true},
       {0.0625F, -0.85546875F, -1.650146484375F},
       {1.25F, 1.640625F, 1.6064453125F}},
  }));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  const lamina::layout model({{"layer", {101}}});
  sgd optimizer(model, options);
  std::vector<float> x(101, 1.0F);
  REQUIRE(optimizer.velocity().size() == (options.momentum == 0 ? 0 : 101));
  for (std::size_t step = 0; step < 3; ++step) {
    optimizer.update(0, 0, std::vector<float>(101, 1.0F), x);
    REQUIRE(x == std::vector<float>(101, parameter[step]));
    for (const float each : optimizer.velocity()) REQUIRE(each == velocity[step]);
  }
}

TEST_CASE("a new learning rate scales the next update and leaves the velocity as it is") {
  const lamina::layout model({{"layer", {1}}});
  sgd optimizer(model, {0.5F, 0.5F});
  std::vector<float> x = {1};
  optimizer.update(0, 0, std::vector<float>{1}, x);
  optimizer.set_learning_rate(0.25F);
  optimizer.update(0, 0, std::vector<float>{1}, x);
  REQUIRE(x[0] == 0.125F);
  REQUIRE(optimizer.velocity()[0] == 1.5F);
}

TEST_CASE("what does not arrive keeps parameters and velocity bit for bit") {
  const sgd_options options = GENERATE(from_range(combinations));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  training run(options);
  for (std::size_t l = 0; l < three_layers.layers(); ++l) run.step(l, 2);
  run.parameters.front() = -0.0F;
  run.parameters.back() = nan;
  const std::vector<std::uint32_t> parameters = bits(run.parameters);
  const std::vector<std::uint32_t> velocity = bits(run.optimizer.velocity());

  // Of the second layer alone, and of that the elements from 10 on without the last two.
  for (std::uint32_t step = 3; step < 6; ++step) {
    run.optimizer.update(1, 10, normal(89, step), run.layer(1));
    run.optimizer.update(0, 0, {}, run.layer(0));
  }

  const auto arrived = [](std::size_t i) { return i >= 3 + 10 && i < 3 + 99; };
  const std::vector<std::uint32_t> parameters_then = bits(run.parameters);
  const std::vector<std::uint32_t> velocity_then = bits(run.optimizer.velocity());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    CAPTURE(i);
    REQUIRE((parameters_then[i] == parameters[i]) == !arrived(i));
    if (!velocity.empty()) REQUIRE((velocity_then[i] == velocity[i]) == !arrived(i));
  }
}

TEST_CASE("a layer's velocity does not change while it stays away") {
  const sgd_options options = GENERATE(from_range(combinations));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  training away(options);
  training always(options);
  for (const std::uint32_t step : {2U, 3U, 4U, 5U}) {
    away.step(0, step);
    if (step == 2 || step == 5) away.step(1, step);
  }
  always.step(1, 2);
  always.step(1, 5);
  REQUIRE(bits(away.layer(1)) == bits(always.layer(1)));
}

// An asynchronous server applies the shares of its workers one by one. Sums of powers of two, so that nothing is rounded.
TEST_CASE("several gradients of a step move a layer as far as their sum does") {
  const sgd_options options = GENERATE(values<sgd_options>({
      {0.5F, 0, 0, false},
      {0.5F, 0, 0.25F, false},
      {0.5F, 0.5F, 0, false},
      {0.5F, 0.5F, 0.25F, false},
      {0.5F, 0.5F, 0.25F, true},
  }));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  const lamina::layout model({{"layer", {5}}});
  sgd whole(model, options);
  sgd in_shares(model, options);
  std::vector<float> expected(5, 1.0F);
  std::vector<float> x = expected;
  for (std::uint64_t step = 1; step <= 3; ++step) {
    whole.begin(0, step);
    whole.update(0, 0, std::vector<float>(5, 2.5F), expected);
    for (const float share : {0.5F, 1.0F, -0.25F, 1.25F}) {
      in_shares.begin(0, step);
      in_shares.update(0, 0, std::vector<float>(2, share), x);
      in_shares.update(0, 2, std::vector<float>(3, share), x);
    }
    CAPTURE(step);
    REQUIRE(x == expected);
    REQUIRE(std::ranges::equal(in_shares.velocity(), whole.velocity()));
  }
}

TEST_CASE("a layer that stays away decays, when it comes back, for the steps that it missed") {
  const lamina::layout model({{"often", {1}}, {"seldom", {1}}});
  sgd optimizer(model, {.learning_rate = 0.5F, .weight_decay = 0.25F});
  std::vector<float> often = {1};
  std::vector<float> seldom = {1};
  const std::vector<float> nothing = {0};
  for (std::uint64_t step = 1; step <= 9; ++step) {
    optimizer.begin(0, step);
    optimizer.update(0, 0, nothing, often);
    if (step % 3 != 0) continue;
    optimizer.begin(1, step);
    optimizer.update(1, 0, nothing, seldom);
    REQUIRE(seldom[0] == Approx(often[0]).epsilon(1e-6));
  }
  REQUIRE(often[0] == Approx(std::pow(0.875, 9)).epsilon(1e-6));
  REQUIRE(std::ranges::equal(optimizer.updated_in(), std::vector<std::uint64_t>{9, 9}));
  REQUIRE_THROWS_WITH(optimizer.begin(1, 8), Contains("'seldom'") && Contains("step 9"));
  REQUIRE_THROWS_AS(optimizer.begin(2, 10), std::out_of_range);
}

TEST_CASE("an update in blocks is the update of the whole layer bit for bit") {
  const sgd_options options = GENERATE(from_range(combinations));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  const std::size_t block = GENERATE(as<std::size_t>(), 1, 3, 7, 16, 100);
  CAPTURE(block);
  training whole(options);
  training blocks(options);
  for (std::uint32_t step = 2; step < 7; ++step) {
    whole.step(1, step);
    const std::vector<float> gradient = normal(101, step);
    blocks.optimizer.begin(1, step);
    for (std::size_t begin = 0; begin < 101; begin += block) {
      const std::size_t count = std::min(block, 101 - begin);
      blocks.optimizer.update(1, begin, std::span(gradient).subspan(begin, count), blocks.layer(1));
    }
  }
  REQUIRE(bits(whole.parameters) == bits(blocks.parameters));
  REQUIRE(bits(whole.optimizer.velocity()) == bits(blocks.optimizer.velocity()));
}

TEST_CASE("with its velocity written back an optimizer goes on bit for bit") {
  const sgd_options options = GENERATE(from_range(combinations));
  CAPTURE(options.momentum, options.weight_decay, options.nesterov);
  training through(options);
  for (std::uint32_t step = 2; step < 5; ++step) through.step(1, step);
  training resumed(options);
  resumed.parameters = through.parameters;
  const sgd& saved = through.optimizer;
  std::ranges::copy(saved.velocity(), resumed.optimizer.velocity().begin());
  std::ranges::copy(saved.updated_in(), resumed.optimizer.updated_in().begin());
  for (std::uint32_t step = 7; step < 10; ++step) {  // after two steps without this layer
    through.step(1, step);
    resumed.step(1, step);
  }
  REQUIRE(bits(through.parameters) == bits(resumed.parameters));
}

TEST_CASE("SGD names the option that it refuses") {
  const auto refuses = [](const sgd_options& options, const std::string& name) {
    REQUIRE_THROWS_WITH(sgd(three_layers, options), Catch::Matchers::StartsWith(name));
    REQUIRE_THROWS_AS(sgd(three_layers, options), std::invalid_argument);
  };
  for (const float bad : {-0.1F, nan, infinity}) {
    refuses({.learning_rate = bad}, "learning_rate");
    refuses({.momentum = bad}, "momentum");
    refuses({.weight_decay = bad}, "weight_decay");
  }
  refuses({.momentum = 1}, "momentum");
  refuses({.nesterov = true}, "nesterov");

  sgd optimizer(three_layers, {.learning_rate = 0, .momentum = 0.999F});
  REQUIRE_THROWS_AS(optimizer.set_learning_rate(-1), std::invalid_argument);
  REQUIRE_THROWS_AS(optimizer.set_learning_rate(nan), std::invalid_argument);
  REQUIRE_NOTHROW(optimizer.set_learning_rate(0));
}

TEST_CASE("SGD refuses a block outside its layer and writes nothing") {
  training run({0.1F, 0.9F});
  const std::vector<float> before = run.parameters;
  const std::vector<float> gradient(4, 1.0F);
  REQUIRE_THROWS_AS(run.optimizer.update(0, 0, gradient, run.layer(0)), std::out_of_range);
  REQUIRE_THROWS_AS(run.optimizer.update(1, 98, gradient, run.layer(1)), std::out_of_range);
  REQUIRE_THROWS_AS(run.optimizer.update(1, 102, {}, run.layer(1)), std::out_of_range);
  REQUIRE_THROWS_AS(run.optimizer.update(1, std::numeric_limits<std::size_t>::max(), gradient, run.layer(1)),
                    std::out_of_range);
  REQUIRE_THROWS_AS(run.optimizer.update(3, 0, gradient, run.layer(1)), std::out_of_range);
  REQUIRE_THROWS_AS(run.optimizer.update(2, 0, gradient, run.layer(1)), std::invalid_argument);
  REQUIRE(run.parameters == before);
  for (const float each : run.optimizer.velocity()) REQUIRE(each == 0);
}

constexpr auto last_step = std::numeric_limits<std::uint64_t>::max();

TEST_CASE("the warm-up rises in equal parts and every schedule begins after it with the base rate") {
  const auto schedule = GENERATE(values({
      learning_rate_schedule(0.5F, {}, 4),
      learning_rate_schedule(0.5F, cosine_decay{6}, 4),
  }));
  REQUIRE(schedule.at(1) == 0.125F);
  REQUIRE(schedule.at(2) == 0.25F);
  REQUIRE(schedule.at(3) == 0.375F);
  REQUIRE(schedule.at(4) == 0.5F);
  REQUIRE(schedule.at(5) == 0.5F);
}

TEST_CASE("a constant schedule stays, with a warm-up or without") {
  for (const std::uint64_t warm_up : {0U, 1U, 3U}) {
    const learning_rate_schedule schedule(0.1F, {}, warm_up);
    for (const std::uint64_t step : {std::uint64_t{3}, std::uint64_t{1000}, last_step}) {
      REQUIRE(schedule.at(step) == 0.1F);
    }
    if (warm_up < 2) REQUIRE(schedule.at(1) == 0.1F);
  }
}

TEST_CASE("a cosine goes from the base rate to its final fraction in the last step and stays there") {
  const learning_rate_schedule whole(1, cosine_decay{13}, 0);
  REQUIRE(whole.at(1) == 1);
  REQUIRE(whole.at(5) == Approx(0.75));
  REQUIRE(whole.at(7) == Approx(0.5));
  REQUIRE(whole.at(9) == Approx(0.25));
  REQUIRE(whole.at(13) == 0);
  REQUIRE(whole.at(14) == 0);
  REQUIRE(whole.at(last_step) == 0);

  const learning_rate_schedule warmed_up(2, cosine_decay{18, 0.125}, 5);
  REQUIRE(warmed_up.at(6) == 2);
  REQUIRE(warmed_up.at(10) == Approx(2 * (0.125 + 0.875 * 0.75)));
  REQUIRE(warmed_up.at(12) == Approx(2 * (0.125 + 0.875 * 0.5)));
  REQUIRE(warmed_up.at(18) == 0.25F);
  REQUIRE(warmed_up.at(last_step) == 0.25F);
}

TEST_CASE("a schedule names the parameter that it refuses") {
  const auto refuses = [](float base, const std::optional<cosine_decay>& decay, std::uint64_t warm_up,
                          const std::string& name) {
    REQUIRE_THROWS_WITH(learning_rate_schedule(base, decay, warm_up), Catch::Matchers::StartsWith(name));
    REQUIRE_THROWS_AS(learning_rate_schedule(base, decay, warm_up), std::invalid_argument);
  };
  for (const float bad : {-0.1F, nan, infinity}) {
    refuses(bad, {}, 0, "base");
    refuses(1, cosine_decay{10, bad}, 0, "final_fraction");
  }
  refuses(1, cosine_decay{10, 1.5}, 0, "final_fraction");
  refuses(1, cosine_decay{0}, 0, "steps");
  refuses(1, cosine_decay{1}, 0, "steps");
  refuses(1, cosine_decay{6}, 5, "steps");
  refuses(1, cosine_decay{5}, 6, "steps");
  REQUIRE_NOTHROW(learning_rate_schedule(0, cosine_decay{7, 1}, 5));
  REQUIRE_THROWS_AS(learning_rate_schedule(1, {}, 0).at(0), std::invalid_argument);
}

TEST_CASE("a schedule is read from text") {
  const auto same = [](const std::string& text, const std::optional<cosine_decay>& decay) {
    INFO(text);
    const learning_rate_schedule read = parse_schedule(text, 0.1F, 20, 3);
    const learning_rate_schedule expected(0.1F, decay, 3);
    for (std::uint64_t step = 1; step <= 25; ++step) REQUIRE(read.at(step) == expected.at(step));
  };
  same("constant", {});
  same("cosine", cosine_decay{20});
  same("cosine:0.25", cosine_decay{20, 0.25});
}

TEST_CASE("a schedule that cannot be read is named together with the forms there are") {
  const std::string text =
      GENERATE(as<std::string>(), "", "linear", "Constant", "constant:", "constant:1", "step:10:0.1",
               "cosine:", "cosine:x", "cosine:0.1x", "cosine: 0.1", "cosine:0:0.1", "linear:10:0.1");
  REQUIRE_THROWS_AS(parse_schedule(text, 0.1F, 20, 3), std::invalid_argument);
  REQUIRE_THROWS_WITH(parse_schedule(text, 0.1F, 20, 3), Contains("'" + text + "'") && Contains("constant") &&
                                                             Contains("cosine") &&
                                                             Contains("cosine:FINAL_FRACTION"));
}

TEST_CASE("a schedule read from text refuses values as one made in code does") {
  const auto refuses = [](const std::string& text, const std::string& name) {
    REQUIRE_THROWS_WITH(parse_schedule(text, 0.1F, 20, 3), Catch::Matchers::StartsWith(name));
  };
  refuses("cosine:-1", "final_fraction");
  REQUIRE_THROWS_WITH(parse_schedule("cosine", 0.1F, 4, 3), Catch::Matchers::StartsWith("steps"));
}

}  // namespace
