// SPDX-License-Identifier: MIT
// What a worker can be told of its decisions: decision.hpp, and the tiling.
#include "lamina/options.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "catch.hpp"
#include "lamina/decision.hpp"
#include "lamina/layout.hpp"
#include "oracle.hpp"
#include "steps.hpp"

using namespace lamina_test;
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

// Workers on machines with other C libraries must agree on R, so it is made of operations that IEEE 754 rounds.
TEST_CASE("warm-up: R is bitwise the same with every C library") {
  const selector decisions(tiling(model_of({10})), {.drop_ratio = 0.95, .warm_up_steps = 64});
  for (std::uint64_t step = 1; step < 64; ++step) {
    double power = 1;  // (1 - R)^(step / 64), by the bits of step
    double root = 1 - 0.95;
    for (std::uint64_t bit = 32; bit > 0; bit /= 2) {
      root = std::sqrt(root);
      if ((step & bit) != 0) power *= root;
    }
    CHECK(decisions.drop_ratio_in(step) == 1 - power);
  }
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

TEST_CASE("warm-up: oracle 3 holds at each step with that step's ratio, however seldom a search is due") {
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
TEST_CASE("threshold: a searched one of 0 serves its own step alone, and a fixed one stays") {
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

TEST_CASE("threshold: one that is infinite since layers are held serves its own step alone") {
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

TEST_CASE("value 0: of experts without input nothing is sent") {
  // 100 experts of which 5 have a gradient: 95 % have the value 0, and R is 0.9.
  const lamina::layout experts = model_of(std::vector<std::size_t>(100, 1000));
  for (const auto& options : {worker_options{.drop_ratio = 0.9}, worker_options{.send_budget = 0.1}}) {
    lamina::worker<float> worker(experts, options);
    for (int t = 0; t < 3; ++t) {
      auto step = worker.begin();
      for (std::size_t l = 0; l < 100; ++l) {
        if (l < 5 || t % 2 == 1) {
          CHECK(step.add(l, std::vector<float>(1000, l < 5 ? 1.0F : -0.0F)));
        } else {
          step.skip(l);
        }
      }
      CHECK(step.select().sent_elements() == 5000);
      step.commit();
    }
  }
}

TEST_CASE("at_least_every: a layer is sent at the latest in that step, and its age begins anew") {
  const std::uint64_t most = GENERATE(1U, 2U, 5U);
  lamina::worker<float> worker(model_of({2, 3}), {.threshold = 100, .at_least_every = most});
  for (std::uint64_t t = 1; t <= 30; ++t) {
    // Layer 1 passes the threshold by itself in step 3.
    auto step = worker.add(tensors<float>{{1, 1}, std::vector<float>(3, t == 3 ? 1000.0F : 1.0F)});
    step.select();
    REQUIRE(step.is_sent(0) == (t % most == 0));
    if (most == 5) REQUIRE(step.is_sent(1) == (t == 3 || (t > 3 && (t - 3) % 5 == 0)));
    step.commit();
  }
}

TEST_CASE("at_least_every: a send that failed leaves the layer due") {
  lamina::worker<float> worker(model_of({1}), {.threshold = 100, .at_least_every = 3});
  for (int t = 1; t <= 5; ++t) {
    auto step = worker.add(tensors<float>{{1}});
    CHECK(step.select().is_sent(0) == (t >= 3));
    if (t < 3) step.commit();
  }
}

TEST_CASE("budget: what is sent stays within the allowance at every step and uses it up in the long run") {
  for (std::uint32_t seed = 411; seed < 421; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const double budget = std::array{0.02, 0.1, 0.5, 1.0}[seed % 4];
    cluster<float> run(model, 2, 0.5F, workers_of<float>({.send_budget = budget}));
    const auto elements = static_cast<double>(model.elements());
    const auto largest = static_cast<double>(std::ranges::max(model.sizes()));
    double sent = 0;
    const int steps = 400;
    for (int step = 1; step <= steps; ++step) {
      run.step(random_gradients_of_all(random, run));
      sent += static_cast<double>(run.frame(0).sent_elements());
      CAPTURE(seed, budget, step);
      REQUIRE(sent <= budget * elements * step);
      REQUIRE(conserves(run));
      REQUIRE(replicas_agree(run));
    }
    // Never more than the largest layer and one step's share remain unspent: they are what the saving may hold.
    CHECK(sent >= budget * elements * steps - 2 * (largest + budget * elements));
  }
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

TEST_CASE("budget: within a threshold are the largest values, ties together") {
  lamina::threshold_search search;
  const std::vector<double> values = {5, 3, 3, 9, 1};
  const std::vector<std::size_t> sizes = {10, 10, 10, 20, 0};
  CHECK(within_budget(search, values, sizes, 19.9) == infinity);
  CHECK(within_budget(search, values, sizes, 20) == 9);
  CHECK(within_budget(search, values, sizes, 30) == 5);
  CHECK(within_budget(search, values, sizes, 40) == 5);  // one of the two tied would fit, both do not
  CHECK(within_budget(search, values, sizes, 50) == -infinity);
  CHECK(within_budget(search, {}, {}, 1) == -infinity);
}

TEST_CASE("budget: a layer whose value is infinite is sent when it fits, and not before") {
  lamina::worker<float> worker(model_of({8, 8}), {.send_budget = 0.25});  // four elements a step
  {
    // The sum overflows, the residual does not.
    auto step = worker.add(tensors<float>{std::vector<float>(8, 1), std::vector<float>(8, 1e38F)});
    REQUIRE(std::isinf(step.values()[1]));
    CHECK(sent_of(step.select()) == "00");
    CHECK(std::isinf(worker.threshold()));
    step.commit();
  }
  CHECK(sent_of(worker.add(tensors<float>{std::vector<float>(8, 1), std::vector<float>(8)}).select()) ==
        "01");
}

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

TEST_CASE("fragments: a layer is decided, sent and cleared in fragments, which make up the layer") {
  const lamina::layout model({{"embedding", {3, 4096}}, {"bias", {5}}});
  lamina::worker<float> worker(model, {.threshold = 1, .fragment_elements = 4096});
  REQUIRE(worker.fragments().layers() == 4);
  CHECK(worker.fragments()[1].name == "embedding[1]");
  tensors<float> gradients = {std::vector<float>(3 * 4096, 0.25F), std::vector<float>(5, 0.5F)};
  std::fill_n(gradients[0].begin() + 4096, 4096, 2.0F);
  auto step = worker.add(gradients);
  CHECK(copy_of(step.values()) == std::vector<double>{0.25, 2, 0.25, 0.5});
  const bytes frame = step.frame().to_bytes();
  step.commit();
  CHECK(frame.size() == 128 + 4096 * sizeof(float));
  const auto view = lamina::decode<float>(frame, worker.fragments());
  CHECK(view.is_dropped(0));
  CHECK(view.layer(1)[4095] == 2);
  CHECK(worker.residual()[0][0] == 0.25F);
  CHECK(worker.residual()[1][0] == 0);
  std::error_code error;
  lamina::decode<float>(frame, model, error);
  CHECK(error == lamina::errc::wrong_layout);
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

TEST_CASE("momentum: the residual adds the velocity, which is cleared with what is sent") {
  lamina::worker<float> worker(model_of({1, 1}), {.threshold = 5, .momentum = 0.5});
  // u = 2, 3, 3.5; a = 2, 5 (sent), then from nothing again
  for (const float expected : {2.0F, 5.0F, 2.0F, 5.0F}) {
    auto step = worker.add(tensors<float>{{2}, {0}});
    CHECK(worker.residual()[0][0] == expected);
    CHECK(step.select().is_sent(0) == (expected >= 5));
    step.commit();
  }
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
