// SPDX-License-Identifier: MIT
// What a worker can be told of its decisions: decision.hpp, and the tiling.
#include "lamina/options.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "catch.hpp"
#include "invariants.hpp"
#include "lamina/decision.hpp"
#include "lamina/layout.hpp"
#include "steps.hpp"

namespace lamina_test::options_test {

using lamina::selector;
using lamina::tiling;
using lamina::worker_options;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// What a selector without a history sends for these values.
std::string decided(const lamina::layout& model, const worker_options& options,
                    const std::vector<double>& values, const std::vector<char>& held = {}) {
  selector decisions(tiling(model), options);
  return sent_of(decisions.decide(1, values, held));
}

}  // namespace

TEST_CASE("warm-up: the share that is sent shrinks exponentially to 1 - R") {
  const auto ratio_in = [](std::uint64_t step, double ratio) {
    return selector(tiling(model_of({10})), {.drop_ratio = ratio, .warm_up_steps = 4}).drop_ratio_in(step);
  };
  CHECK(ratio_in(1, 0.9375) == Approx(0.5));
  CHECK(ratio_in(2, 0.9375) == Approx(0.75));
  CHECK(ratio_in(3, 0.9375) == Approx(0.875));
  CHECK(ratio_in(4, 0.9375) == 0.9375);
  CHECK(ratio_in(1000, 0.9375) == 0.9375);
  CHECK(ratio_in(1, 1) == 1);
  CHECK(ratio_in(1, 0) == 0);
}

TEST_CASE("warm-up: powers of square roots and products") {
  // By Python, in the order of root_power().
  CHECK(same_bits(lamina::detail::root_power(0.9, 0.08), 0x1.fbb3db9ef506dp-1));
  CHECK(same_bits(lamina::detail::root_power(0.5, 1 / 65536.0), 0x1.fffe9d1c4b0f4p-1));
  CHECK(lamina::detail::root_power(0.7, 1) == 0.7);
  CHECK(lamina::detail::root_power(0, 0.5) == 0);
  for (double exponent = 1 / 65536.0; exponent <= 1; exponent *= 1.37) {
    for (const double base : {1e-30, 0.1, 0.9, 0.999999})
      CHECK(std::abs(lamina::detail::root_power(base, exponent) - std::pow(base, exponent)) < 1e-14);
  }
}

TEST_CASE("warm-up: invariant 3 holds at each step with that step's ratio, however seldom a search is due") {
  std::mt19937 random(401);
  const lamina::layout model = random_model(random);
  const worker_options options{.drop_ratio = 0.97, .warm_up_steps = 20, .search_every = 100};
  cluster<float> run(model, 1, 1.0F, workers_of<float>(options));
  const selector schedule(tiling(model), options);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    run.step({random_gradients<float>(random, model)});
    REQUIRE(drops_as_asked(run, 0, schedule.drop_ratio_in(step)));
    REQUIRE(conserves(run));
  }
}

// bn3.weight = 0 makes most of the first gradients of ResNet-50 zero, and a threshold of 0 sends everything from then on.
TEST_CASE("threshold: a searched one of 0 serves only its own step, and a fixed one stays") {
  const auto run = [](const worker_options& options) {
    lamina::worker<float> worker(model_of({80, 5, 5, 5, 5}), options);
    std::vector<std::size_t> sent;
    for (const float largest : {0.0F, 2.5F}) {
      tensors<float> gradients = {std::vector<float>(80, largest)};
      for (const float value : {1.0F, 2.0F, 3.0F, 4.0F}) gradients.emplace_back(5, value);
      auto step = worker.add(gradients);
      sent.push_back(step.select().sent_elements());
      step.commit();
    }
    return sent;
  };
  CHECK(run({.drop_ratio = 0.75, .search_every = 100}) == std::vector<std::size_t>{20, 90});
  CHECK(run({.threshold = 0}) == std::vector<std::size_t>{20, 100});
}

TEST_CASE("threshold: one that is infinite since layers are held serves only its own step") {
  const lamina::layout model = model_of({10, 20, 30});
  selector decisions(tiling(model), {.drop_ratio = 0.4, .search_every = 100});
  CHECK(sent_of(decisions.decide(1, std::vector<double>{1, 2, 3}, std::vector<char>{0, 0, 1})) == "110");
  CHECK(decisions.threshold() == -infinity);
  decisions.commit(1);
  selector resumed(tiling(model), {.drop_ratio = 0.4, .search_every = 100});
  resumed.restore(decisions.remember(1));
  for (selector* each : {&decisions, &resumed}) {
    CHECK(sent_of(each->decide(2, std::vector<double>{1, 2, 3})) == "011");
    CHECK(each->threshold() == 2);
    each->decide(3, std::vector<double>{5, 6, 7});
    CHECK(each->threshold() == 2);  // the next search is not due
  }
  CHECK(decided(model, {.threshold = infinity}, {1, 2, 3}) == "000");
}

TEST_CASE("threshold: a step that is decided again is decided from what was known before it") {
  selector decisions(tiling(model_of({10, 10})), {.send_budget = 0.5, .by_score = true});
  const std::vector<double> values = {1, 2};
  CHECK(sent_of(decisions.decide(1, values)) == "01");
  decisions.commit(1);
  const std::string second = sent_of(decisions.decide(2, values));
  const double threshold = decisions.threshold();
  decisions.decide(2, std::vector<double>{infinity, infinity});
  CHECK(sent_of(decisions.decide(2, values)) == second);
  CHECK(decisions.threshold() == threshold);
  CHECK(decisions.remember(1).allowance == 0);
  CHECK(decisions.remember(2).allowance == 10);
}

TEST_CASE("value 0: a layer of it is sent with everything, by its age or by a policy, and not by its value") {
  const lamina::layout model = model_of({10, 20, 30});
  CHECK(decided(model, {.drop_ratio = 0.4}, {0, 3, 0}) == "010");
  CHECK(decided(model, {.drop_ratio = 0.4}, {0, 3, -0.0}) == "010");
  CHECK(decided(model, {.drop_ratio = 0.4}, {0, 0, 0}) == "000");
  CHECK(decided(model, {.drop_ratio = 0.4, .at_least_every = 1}, {0, 3, 0}) == "111");
  CHECK(decided(model, {.drop_ratio = 0.4, .always_sent = {2}}, {0, 3, 0}) == "011");
  CHECK(decided(model, {.threshold = -1}, {0, -0.5, -2}) == "010");
  CHECK(decided(model, {.drop_ratio = 0}, {0, 0, 0}) == "111");
  CHECK(decided(model, {.drop_ratio = 1}, {0, 0, 0}) == "111");
  CHECK(decided(model, {.send_budget = 1}, {0, 3, 0}) == "010");
}

TEST_CASE("budget: one that comes with a resume owes nothing for what was sent without") {
  const lamina::layout model = model_of({1000, 1000});
  const tensors<float> gradients(2, std::vector<float>(1000, 1.0F));
  lamina::worker<float> dense(model, {.drop_ratio = 0});
  for (int step = 0; step < 100; ++step) send(dense, gradients);
  lamina::worker<float> resumed(model, {.send_budget = 0.5});
  resumed.load(dense.save());
  std::size_t sent = 0;
  for (int t = 0; t < 10; ++t) {
    auto step = resumed.add(gradients);
    sent += step.select().sent_layers();
    step.commit();
  }
  CHECK(sent >= 9);
}

namespace {

double within_budget(lamina::threshold_search& search, std::span<const double> values,
                     std::span<const std::size_t> sizes, double most_elements) {
  search.begin();
  for (std::size_t l = 0; l < sizes.size(); ++l) {
    if (sizes[l] > 0) search.add(values[l], sizes[l]);
  }
  return search.within(most_elements).threshold;
}

}  // namespace

TEST_CASE("budget: layers of equal value take turns when they do not fit together") {
  lamina::worker<float> worker(model_of(std::vector<std::size_t>(10, 3)), {.send_budget = 0.2});
  std::vector<std::size_t> times(10);
  for (int t = 0; t < 50; ++t) {
    auto step = worker.add(tensors<float>(10, std::vector<float>(3, 1)));
    for (const std::size_t l : step.select().sent()) ++times[l];
    CHECK(step.sent().sent_layers() == 2);
    step.commit();
  }
  CHECK(times == std::vector<std::size_t>(10, 10));
}

TEST_CASE(
    "budget: of equal values the first in the model are sent as far as they fit, also of infinite ones") {
  const lamina::layout model = model_of({4, 2, 0, 3, 1, 10});  // 20 elements
  const auto sent_with = [&](double budget, const std::vector<double>& values,
                             const std::vector<char>& held = {}) {
    selector decisions(tiling(model), {.send_budget = budget});
    const std::string sent = sent_of(decisions.decide(1, values, held));
    return sent + ' ' + std::to_string(decisions.threshold());
  };
  CHECK(sent_with(0.25, {7, 7, 7, 7, 7, 7}) == "100000 7.000000");
  CHECK(sent_with(0.30, {7, 7, 7, 7, 7, 7}) == "110000 7.000000");
  CHECK(sent_with(0.45, {7, 7, 7, 7, 7, 7}) == "110100 7.000000");
  CHECK(sent_with(0.15, {7, 7, 7, 7, 7, 7}) == "000000 inf");  // the first does not fit: it is saved for
  CHECK(sent_with(0.30, {7, 8, 7, 7, 7, 7}) == "110000 7.000000");
  CHECK(sent_with(0.25, {7, 8, 7, 7, 7, 7}) == "010000 8.000000");
  CHECK(sent_with(0.25, {7, 7, 7, 7, 9, 7}, {1, 0, 0, 0, 0, 0}) == "010010 7.000000");
  CHECK(sent_with(1.00, {7, 7, 7, 7, 7, 7}) == "110111 -inf");
  CHECK(sent_with(0.25, {infinity, infinity, 1, infinity, infinity, 1}) == "100000 inf");
  CHECK(sent_with(0.35, {std::nan(""), infinity, 1, infinity, 2, 1}) == "110000 inf");
  CHECK(sent_with(0.15, {infinity, infinity, 1, 1, 1, 1}) == "000000 inf");
}

TEST_CASE("budget: the search equals the literal one for random values") {
  std::mt19937 random(431);
  lamina::threshold_search search;
  for (int round = 0; round < 2000; ++round) {
    std::vector<double> values(1 + below(random, 20));
    std::vector<std::size_t> sizes(values.size());
    for (double& value : values) value = static_cast<double>(below(random, 8));
    for (std::size_t& size : sizes) size = below(random, 10);
    const auto most = static_cast<double>(below(random, 60));
    const auto sent_at = [&](double threshold) {
      std::size_t sent = 0;
      for (std::size_t l = 0; l < values.size(); ++l) sent += values[l] >= threshold ? sizes[l] : 0;
      return static_cast<double>(sent);
    };
    const double found = within_budget(search, values, sizes, most);
    REQUIRE(sent_at(found) <= most);
    for (const double value : values) {
      if (value < found && sent_at(value) > sent_at(found)) REQUIRE(sent_at(value) > most);
    }
  }
}

TEST_CASE("always_sent: these come first within R and within a budget, of which they must leave some") {
  const lamina::layout model = model_of({10, 10, 10, 10});
  const std::vector<double> values = {4, 3, 2, 1};
  CHECK(decided(model, {.drop_ratio = 0.5, .always_sent = {3}}, values) == "1001");
  CHECK(decided(model, {.threshold = 1e9, .always_sent = {3}}, values) == "0001");
  CHECK(decided(model, {.send_budget = 0.3, .always_sent = {3}}, values) == "0001");  // 2 elements are left
  CHECK(decided(model, {.send_budget = 0.5, .always_sent = {3}}, values) == "1001");
  const auto refused = [](const lamina::layout& of, const worker_options& options) {
    return message_of<std::invalid_argument>([&] { selector(tiling(of), options); });
  };
  const std::string message = refused(model_of({100, 100, 10}), {.send_budget = 0.1, .always_sent = {0, 0}});
  CHECK(contains(message, "always_sent holds 0.47619 "));
  CHECK(contains(message, "send_budget is 0.1"));
  CHECK(refused(model_of({100, 100, 10}), {.send_budget = 0.1, .always_sent = {2, 2}}) == "(no exception)");
  CHECK(contains(refused(model_of({25, 75}), {.send_budget = 0.25, .always_sent = {0}}), "always_sent"));
  CHECK(refused(model_of({25, 75}), {.send_budget = 0.26, .always_sent = {0}}) == "(no exception)");
}

TEST_CASE("always_sent: a policy over layers holds for all of their fragments") {
  lamina::worker<float> worker(model_of({3 * 4096, 2}),
                               {.threshold = 1e9, .fragment_elements = 4096, .always_sent = {0}});
  CHECK(sent_of(worker.add(tensors<float>{std::vector<float>(3 * 4096, 1), {1, 1}}).select()) == "1110");
}

TEST_CASE(
    "by_score: the value counts for the steps since the fragment was sent, also in a search and a budget") {
  const lamina::layout model = model_of({10, 10});
  for (const auto& options : {worker_options{.drop_ratio = 0.5, .by_score = true},
                              worker_options{.send_budget = 0.5, .by_score = true}}) {
    selector decisions(tiling(model), options);
    std::string sent;
    for (std::uint64_t step = 1; step <= 6; ++step) {
      sent += sent_of(decisions.decide(step, std::vector<double>{2, 5})) + ' ';
      decisions.commit(step);
    }
    CHECK(sent == "01 01 10 01 01 10 ");
  }
}

TEST_CASE("fragments: sizes, names and the refusal of sizes that are no multiple of a block") {
  const lamina::layout model({{"a", {10000}}, {"empty", {0}}, {"b", {4096}}});
  const tiling cut(model, 4096);
  CHECK(std::vector<std::size_t>(cut.fragments().sizes().begin(), cut.fragments().sizes().end()) ==
        std::vector<std::size_t>{4096, 4096, 1808, 0, 4096});
  CHECK(cut.fragments()[3].name == "empty");
  CHECK(cut.fragments()[4].name == "b");
  CHECK(cut.first(0) == 0);
  CHECK(cut.first(1) == 3);
  CHECK(cut.first(3) == 5);
  CHECK(tiling(model).fragments().fingerprint() == model.fingerprint());
  CHECK_THROWS_AS(tiling(model, 1000), std::invalid_argument);
}

TEST_CASE("fragments: one never has the name of a layer") {
  const lamina::layout model({{"w", {8192}}, {"w[0]", {4}}, {"w[x]", {1}}});
  const tiling cut(model, 4096);
  CHECK(cut.fragments()[0].name == "w[[0]]");
  CHECK(cut.fragments()[1].name == "w[[1]]");
  CHECK(cut.fragments()[2].name == "w[0]");
  const tiling usual(lamina::layout({{"w", {8192}}, {"v]", {4}}}), 4096);
  CHECK(usual.fragments()[0].name == "w[0]");
  CHECK_NOTHROW(tiling(lamina::layout({{"w", {8192}}, {"w[0]", {4}}, {"w[[1]]", {4}}}), 4096));
}

TEST_CASE("selector: another number of values, flags or ages is refused, and changes nothing") {
  selector decisions(tiling(model_of({1, 1})), {.drop_ratio = 0.5});
  const std::vector<double> values = {1, 2};
  decisions.decide(1, values);
  CHECK_THROWS_AS(decisions.decide(2, std::vector<double>{1}), std::invalid_argument);
  CHECK_THROWS_AS(decisions.decide(2, values, std::vector<char>(3)), std::invalid_argument);
  CHECK_THROWS_AS(decisions.restore({1, 0, {0}}), std::invalid_argument);
  CHECK_THROWS_AS(decisions.take(2, lamina::selection(model_of({1}))), std::invalid_argument);
  CHECK(sent_of(decisions.sent()) == "01");
  CHECK(decisions.threshold() == 2);
}

}  // namespace lamina_test::options_test
