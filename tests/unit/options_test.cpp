// SPDX-License-Identifier: MIT
// What a worker can be told of its decisions: decision.hpp, and the tiling.
#include "lamina/options.hpp"

#include <cmath>

#include "catch.hpp"
#include "lamina/decision.hpp"
#include "lamina/threshold.hpp"
#include "steps.hpp"

namespace lamina_test::options_test {

using lamina::selector;
using lamina::tiling;
using lamina::worker_options;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan_value = std::numeric_limits<double>::quiet_NaN();

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

TEST_CASE("budget: of equal values the first in the model are sent, as far as they fit") {
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

TEST_CASE("always_sent: these come first within R and within a budget, of which they must leave some") {
  const lamina::layout model = model_of({10, 10, 10, 10});
  const std::vector<double> values = {4, 3, 2, 1};
  CHECK(decided(model, {.drop_ratio = 0.5, .always_sent = {3}}, values) == "1001");
  CHECK(decided(model, {.threshold = 1e9, .always_sent = {3}}, values) == "0001");
  CHECK(decided(model, {.send_budget = 0.3, .always_sent = {3}}, values) == "0001");  // 2 elements are left
  CHECK(decided(model, {.send_budget = 0.5, .always_sent = {3}}, values) == "1001");
  // A value of 0 sends nothing, whatever its sign.
  CHECK(decided(model, {.threshold = -1, .always_sent = {2}}, {4, -0.5, 0, -0.0}) == "1110");
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

TEST_CASE("threshold: equals a literal stable sort, with ties and empty layers") {
  std::mt19937 random(11);
  lamina::threshold_search kept;
  for (int round = 0; round < 3000; ++round) {
    const std::size_t layers = below(random, round % 10 == 0 ? 200 : 9);
    std::vector<double> values(layers);
    std::vector<std::size_t> sizes(layers);
    const std::size_t distinct = 1 + below(random, 12);  // few distinct values: ties
    for (double& value : values) value = static_cast<double>(below(random, distinct)) * 0.25 - 0.5;
    for (std::size_t& size : sizes) size = below(random, 4) == 0 ? 0 : below(random, 50);
    for (const double ratio : {0.0, 0.01, 0.07, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0}) {
      const double expected = literal_algorithm_1(values, sizes, ratio);
      REQUIRE(same_bits(lamina::search_threshold(values, sizes, ratio), expected));
      REQUIRE(same_bits(kept(values, sizes, ratio), expected));
    }
  }
}

TEST_CASE("threshold: a search without sense is refused by name, and the next one is as good as new") {
  lamina::threshold_search kept;
  const auto refused = [&](const std::vector<double>& values, const std::vector<std::size_t>& sizes,
                           double ratio, const std::string& named) {
    const auto message =
        message_of<std::invalid_argument>([&] { (void)lamina::search_threshold(values, sizes, ratio); });
    CHECK(contains(message, named));
    CHECK_THROWS_AS(kept(values, sizes, ratio), std::invalid_argument);
    CHECK(kept(std::vector<double>{2, 1}, std::vector<std::size_t>{1, 1}, 0.0) == 1);
  };
  refused(std::vector<double>(7), std::vector<std::size_t>(5), 0.5, "7 values");
  refused(std::vector<double>(7), std::vector<std::size_t>(5), 0.5, "5 layer sizes");
  refused({1, 2}, {std::numeric_limits<std::size_t>::max(), 1}, 0.5, "");
  for (std::size_t place = 0; place < 5; ++place) {
    std::vector<double> values(5, 1.0);
    values[place] = nan_value;
    refused(values, {1, 1, 1, 1, 1}, 0.5, "layer " + std::to_string(place));
  }
  for (const double ratio : {-0.001, 1.001, -1.0, infinity, -infinity, nan_value}) {
    refused({1}, {1}, ratio, "");
    CHECK_THROWS_AS(lamina::check_drop_ratio(ratio), std::invalid_argument);
  }
  CHECK(contains(message_of<std::invalid_argument>([] { lamina::check_drop_ratio(1.5); }), "1.5"));
}

TEST_CASE("threshold: it is never -0, by R or within a budget") {
  lamina::threshold_search search;
  const std::vector<std::size_t> sizes = {10, 10, 10};
  for (const auto& values : {std::vector<double>{-0.0, -0.0, 1}, std::vector<double>{0.0, -0.0, 1},
                             std::vector<double>{-0.0, 0.0, -0.0}}) {
    for (const double elements : {0.0, 10.0, 15.0, 20.0, 25.0}) {
      CHECK(std::signbit(search(values, sizes, elements / 30)) == false);
      search.begin();
      for (std::size_t l = 0; l < sizes.size(); ++l) search.add(values[l], sizes[l]);
      CHECK(std::signbit(search.within(elements).threshold) == false);
    }
  }
  lamina::selector selector(lamina::tiling(model_of({10, 10, 10})), {.send_budget = 0.5});
  selector.decide(1, std::vector<double>{-0.0, 0.0, -0.0});
  CHECK(same_bits(selector.threshold(), 0.0));
}

}  // namespace lamina_test::options_test
