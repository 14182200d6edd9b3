// SPDX-License-Identifier: MIT
#include "lamina/options.hpp"

#include <cmath>
#include <limits>
#include <random>

#include "catch.hpp"
#include "lamina/partition.hpp"
#include "oracle.hpp"

using namespace lamina_test;

namespace {

template <class T, class Compressor>
void accumulate_all(Compressor& compressor, const tensors<T>& gradients) {
  for (std::size_t l = 0; l < gradients.size(); ++l) compressor.accumulate(l, gradients[l]);
}

template <class Compressor>
std::vector<std::byte> send(Compressor& compressor) {
  const auto bytes = compressor.encode().to_bytes();
  compressor.commit();
  return bytes;
}

}  // namespace

TEST_CASE("warm-up: the share that is sent shrinks exponentially to 1 - R") {
  const lamina::layout model = model_of({10});
  lamina::compressor_options options;
  options.drop_ratio = 0.9375;
  options.warm_up_steps = 4;
  const lamina::layer_selector selector(model, options);
  CHECK(selector.drop_ratio_in(1) == Approx(0.5));
  CHECK(selector.drop_ratio_in(2) == Approx(0.75));
  CHECK(selector.drop_ratio_in(3) == Approx(0.875));
  CHECK(selector.drop_ratio_in(4) == 0.9375);
  CHECK(selector.drop_ratio_in(1000) == 0.9375);
  options.drop_ratio = 1;
  CHECK(lamina::layer_selector(model, options).drop_ratio_in(1) == 1);
  options.drop_ratio = 0;
  CHECK(lamina::layer_selector(model, options).drop_ratio_in(1) == 0);
}

// Workers on machines with other C libraries must agree on R, so it is made of operations that IEEE 754 rounds.
TEST_CASE("warm-up: R is the same bits with every C library") {
  lamina::compressor_options options;
  options.drop_ratio = 0.95;
  options.warm_up_steps = 64;
  const lamina::layer_selector selector(model_of({10}), options);
  for (std::uint64_t step = 1; step < 64; ++step) {
    INFO(step);
    double power = 1;  // (1 - R)^(step / 64), by the bits of step
    double root = 1 - 0.95;
    for (std::uint64_t bit = 32; bit > 0; bit /= 2) {
      root = std::sqrt(root);
      if ((step & bit) != 0) power *= root;
    }
    const double expected = 1 - power;
    CHECK(selector.drop_ratio_in(step) == expected);
  }
}

TEST_CASE("warm-up: powers of square roots and products") {
  // By Python, in the order of detail/power.hpp.
  CHECK(same_bits(lamina::detail::root_power(0.9, 0.08), 0x1.fbb3db9ef506dp-1));
  CHECK(same_bits(lamina::detail::root_power(0.5, 1 / 65536.0), 0x1.fffe9d1c4b0f4p-1));
  CHECK(lamina::detail::root_power(0.7, 1) == 0.7);
  CHECK(lamina::detail::root_power(0, 0.5) == 0);
  for (double exponent = 1 / 65536.0; exponent <= 1; exponent *= 1.37) {
    for (const double base : {1e-30, 0.1, 0.9, 0.999999})
      CHECK(std::abs(lamina::detail::root_power(base, exponent) - std::pow(base, exponent)) < 1e-14);
  }
}

// bn3.weight = 0 makes most of the first gradients of ResNet-50 zero, and a threshold of 0 sends everything from then on.
TEST_CASE("a searched threshold of 0 serves its own step alone, and a fixed one stays") {
  const lamina::layout model = model_of({80, 5, 5, 5, 5});
  lamina::compressor_options options;
  options.drop_ratio = 0.75;
  options.refresh = lamina::refresh_schedule::every(100);
  const auto step = [&](lamina::gradient_compressor<float>& compressor, float largest_layer) {
    tensors<float> gradients = {std::vector<float>(80, largest_layer)};
    for (const float value : {1.0F, 2.0F, 3.0F, 4.0F}) gradients.emplace_back(5, value);
    accumulate_all(compressor, gradients);
    (void)compressor.encode();
    const std::size_t sent = compressor.chosen().sent_elements();
    compressor.commit();
    return sent;
  };
  lamina::gradient_compressor<float> searching(model, options);
  CHECK(step(searching, 0.0F) == 20);
  CHECK(searching.threshold() == 0.0);
  CHECK(step(searching, 2.5F) == 90);  // 10 of 100 are below 2.5, and not all are sent
  CHECK(searching.threshold() == 2.5);
  options.refresh = lamina::refresh_schedule::fixed(0);
  lamina::gradient_compressor<float> fixed(model, options);
  CHECK(step(fixed, 0.0F) == 20);
  CHECK(step(fixed, 2.5F) == 100);
}

TEST_CASE("warm-up: oracle 3 holds at each step with that step's ratio") {
  std::mt19937 random(401);
  const lamina::layout model = random_model(random);
  lamina::compressor_options options;
  options.drop_ratio = 0.97;
  options.warm_up_steps = 20;
  cluster<float> run(model, 1, 1.0F, compressors<float>(options));
  const lamina::layer_selector schedule(model, options);
  for (std::uint64_t step = 1; step <= 40; ++step) {
    run.step({random_gradients<float>(random, model)});
    REQUIRE(drops_as_asked(run, 0, schedule.drop_ratio_in(step)));
    REQUIRE(conserves(run));
  }
}

// Each of these steps has an R of its own: a threshold of the first one would send almost everything until it is searched again.
TEST_CASE("warm-up: every step of it searches, however rarely a threshold is searched later") {
  std::mt19937 random(402);
  const lamina::layout model = random_model(random);
  lamina::compressor_options options;
  options.drop_ratio = 0.97;
  options.warm_up_steps = 20;
  options.refresh = lamina::refresh_schedule::every(100);
  cluster<float> run(model, 1, 1.0F, compressors<float>(options));
  const lamina::layer_selector schedule(model, options);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    run.step({random_gradients<float>(random, model)});
    REQUIRE(drops_as_asked(run, 0, schedule.drop_ratio_in(step)));
  }
  lamina::layer_selector selector(model, options);
  for (std::uint64_t step = 1; step <= 110; ++step)
    CHECK(selector.searches_in(step) == (step <= 20 || step == 101));
}

TEST_CASE("max_age: a layer goes out at the latest in its max_age-th step, and its age begins anew") {
  const std::uint64_t max_age = GENERATE(1U, 2U, 5U);
  lamina::compressor_options options;
  options.refresh = lamina::refresh_schedule::fixed(100);
  options.max_age = max_age;
  lamina::gradient_compressor<float> compressor(model_of({2, 3}), options);
  for (std::uint64_t step = 1; step <= 30; ++step) {
    // Layer 1 passes the threshold by itself in step 3.
    accumulate_all(compressor, tensors<float>{{1, 1}, std::vector<float>(3, step == 3 ? 1000.0F : 1.0F)});
    const auto& chosen = compressor.select();
    REQUIRE(chosen.is_sent(0) == (step % max_age == 0));
    if (max_age == 5) REQUIRE(chosen.is_sent(1) == (step == 3 || (step > 3 && (step - 3) % 5 == 0)));
    send(compressor);
  }
}

TEST_CASE("max_age: a send that failed leaves the layer due") {
  lamina::compressor_options options;
  options.refresh = lamina::refresh_schedule::fixed(100);
  options.max_age = 3;
  lamina::gradient_compressor<float> compressor(model_of({1}), options);
  for (int step = 1; step <= 5; ++step) {
    accumulate_all(compressor, tensors<float>{{1}});
    compressor.encode();  // never committed
    CHECK(compressor.select().is_sent(0) == (step >= 3));
  }
}

TEST_CASE("budget: what is sent stays within the allowance at every step and uses it up in the long run") {
  for (std::uint32_t seed = 411; seed < 421; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const double budget = std::array{0.02, 0.1, 0.5, 1.0}[seed % 4];
    lamina::compressor_options options;
    options.byte_budget = budget;
    cluster<float> run(model, 2, 0.5F, compressors<float>(options));
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
  for (const auto decide : {lamina::decision_timing::at_end, lamina::decision_timing::as_ready}) {
    lamina::gradient_compressor<float> dense(model, {.drop_ratio = 0, .decide = decide});
    for (int step = 0; step < 100; ++step) {
      accumulate_all(dense, gradients);
      send(dense);
    }
    lamina::gradient_compressor<float> resumed(model, {.byte_budget = 0.5, .decide = decide});
    resumed.load(dense.save());
    std::size_t sent = 0;
    for (int step = 0; step < 10; ++step) {
      accumulate_all(resumed, gradients);
      send(resumed);
      sent += resumed.chosen().sent_layers();
    }
    CHECK(sent >= 9);
  }
}

TEST_CASE("budget: within a threshold are the largest values, ties together") {
  lamina::threshold_search search;
  const std::vector<double> values = {5, 3, 3, 9, 1};
  const std::vector<std::size_t> sizes = {10, 10, 10, 20, 0};
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(search.within_budget(values, sizes, 19.9) == infinity);
  CHECK(search.within_budget(values, sizes, 20) == 9);
  CHECK(search.within_budget(values, sizes, 30) == 5);
  CHECK(search.within_budget(values, sizes, 40) == 5);  // one of the two tied would fit, both do not
  CHECK(search.within_budget(values, sizes, 50) == -infinity);
  CHECK(search.within_budget({}, {}, 1) == -infinity);
}

TEST_CASE("budget: a layer whose value is infinite goes out when it fits, and not before") {
  const lamina::layout model = model_of({8, 8});
  lamina::compressor_options options;
  options.byte_budget = 0.25;  // four elements a step
  lamina::gradient_compressor<float> worker(model, options);
  worker.accumulate(0, std::vector<float>(8, 1.0F));
  worker.accumulate(1, std::vector<float>(8, 1e38F));  // the sum overflows, the residual does not
  REQUIRE(std::isinf(worker.values()[1]));
  CHECK(worker.encode().size_bytes() == 128);
  CHECK(std::isinf(worker.threshold()));
  worker.commit();
  worker.accumulate(0, std::vector<float>(8, 1.0F));
  worker.accumulate(1, std::vector<float>(8, 0.0F));
  CHECK(worker.select().is_dropped(0));
  CHECK(worker.select().is_sent(1));
}

TEST_CASE("budget: layers of equal value take turns when they do not fit together") {
  const lamina::layout model = model_of(std::vector<std::size_t>(10, 3));
  lamina::compressor_options options;
  options.byte_budget = 0.2;  // two of the ten layers a step
  lamina::gradient_compressor<float> worker(model, options);
  std::vector<std::size_t> times(10);
  for (int step = 0; step < 50; ++step) {
    for (std::size_t l = 0; l < 10; ++l) worker.accumulate(l, std::vector<float>(3, 1.0F));
    for (const std::size_t l : worker.select().sent()) ++times[l];
    CHECK(worker.chosen().sent_layers() == 2);
    std::ignore = worker.encode();
    worker.commit();
  }
  CHECK(times == std::vector<std::size_t>(10, 10));
}

TEST_CASE("budget: of equal values the first in the model go out as far as they fit, also of infinite ones") {
  const double infinity = std::numeric_limits<double>::infinity();
  const lamina::layout model = model_of({4, 2, 0, 3, 1, 10});  // 20 elements
  const auto sent_with = [&](double budget, const std::vector<double>& values,
                             const std::vector<char>& held = {}) {
    lamina::compressor_options options;
    options.byte_budget = budget;
    lamina::layer_selector selector(model, options);
    std::string sent;
    const lamina::selection& chosen = selector.decide(1, values, values, held);
    for (std::size_t l = 0; l < model.layers(); ++l) sent += chosen.is_sent(l) ? '1' : '0';
    return sent + ' ' + std::to_string(selector.threshold());
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
    const double found = search.within_budget(values, sizes, most);
    REQUIRE(sent_at(found) <= most);
    for (const double value : values) {
      if (value < found && sent_at(value) > sent_at(found)) REQUIRE(sent_at(value) > most);
    }
  }
}

TEST_CASE("agreed: workers that decide by the same values publish what one of them sends") {
  std::mt19937 random(441);
  const lamina::layout model = random_model(random);
  const std::size_t workers = 4;
  lamina::compressor_options options;
  options.drop_ratio = 0.8;
  std::vector<lamina::gradient_compressor<float>> worker;
  for (std::size_t w = 0; w < workers; ++w) {
    worker.push_back(compressors<float>(options)(model, static_cast<std::uint32_t>(w)));
  }
  bool local_would_differ = false;
  for (int step = 0; step < 30; ++step) {
    std::vector<double> agreed(model.layers());
    for (auto& each : worker) {
      accumulate_all(each, random_gradients<float>(random, model));
      for (std::size_t l = 0; l < model.layers(); ++l) agreed[l] += each.values()[l] / workers;
    }
    std::vector<lamina::selection> chosen;
    for (auto& each : worker) chosen.push_back(each.select(agreed));
    for (auto& each : worker) {
      REQUIRE(std::ranges::equal(each.select(agreed).bitmap(), chosen[0].bitmap()));
      lamina::selection local(model);
      local.apply_threshold(each.values(), lamina::search_threshold(each.values(), model.sizes(), 0.8));
      local_would_differ = local_would_differ || !std::ranges::equal(local.bitmap(), chosen[0].bitmap());
      const auto bytes = send(each);
      const auto frame = lamina::decode<float>(bytes, model);
      for (std::size_t l = 0; l < model.layers(); ++l)
        REQUIRE(frame.is_dropped(l) == chosen[0].is_dropped(l));
    }
  }
  CHECK(local_would_differ);
}

TEST_CASE("agreed: another number of values is refused") {
  lamina::gradient_compressor<float> compressor(model_of({1, 1}));
  accumulate_all(compressor, tensors<float>{{1}, {2}});
  CHECK_THROWS_AS(compressor.select(std::vector<double>{1}), std::invalid_argument);
  CHECK_NOTHROW(compressor.select());
}

TEST_CASE("parts: a layer is decided, sent and cleared in parts, and the parts make up the layer") {
  const lamina::layout model({{"embedding", {3, 4096}}, {"bias", {5}}});
  lamina::compressor_options options;
  options.part_elements = 4096;
  options.refresh = lamina::refresh_schedule::fixed(1);
  lamina::gradient_compressor<float> compressor(model, options);
  REQUIRE(compressor.parts().layers() == 4);
  CHECK(compressor.parts()[1].name == "embedding[1]");
  std::vector<float> gradient(3 * 4096, 0.25F);
  std::fill_n(gradient.begin() + 4096, 4096, 2.0F);
  compressor.accumulate(0, gradient);
  compressor.accumulate(1, std::vector<float>(5, 0.5F));
  CHECK(compressor.values()[0] == 0.25);
  CHECK(compressor.values()[1] == 2);
  CHECK(compressor.values()[3] == 0.5);
  const auto bytes = send(compressor);
  CHECK(bytes.size() == 128 + 4096 * sizeof(float));
  const lamina::partition partition(model, 4096);
  const auto frame = lamina::decode<float>(bytes, partition.parts());
  CHECK(frame.is_dropped(0));
  CHECK(frame.layer(1)[4095] == 2);
  CHECK(compressor.residual()[0][0] == 0.25F);
  CHECK(compressor.residual()[1][0] == 0);
  std::error_code error;
  lamina::decode<float>(bytes, model, error);
  CHECK(error == lamina::frame_errc::wrong_layout);
}

TEST_CASE("parts: sizes, names and the refusal of sizes that are no multiple of a block") {
  const lamina::layout model({{"a", {10000}}, {"empty", {0}}, {"b", {4096}}});
  const lamina::partition cut(model, 4096);
  CHECK(std::vector<std::size_t>(cut.parts().sizes().begin(), cut.parts().sizes().end()) ==
        std::vector<std::size_t>{4096, 4096, 1808, 0, 4096});
  CHECK(cut.parts()[3].name == "empty");
  CHECK(cut.parts()[4].name == "b");
  CHECK(cut.first(0) == 0);
  CHECK(cut.first(1) == 3);
  CHECK(cut.first(3) == 5);
  CHECK(lamina::partition(model).parts().fingerprint() == model.fingerprint());
  CHECK_THROWS_AS(lamina::partition(model, 1000), std::invalid_argument);
}

TEST_CASE("parts: a gradient that is refused in one part leaves all parts of the layer as they were") {
  const lamina::layout model({{"a", {3 * 4096}}});
  lamina::compressor_options options;
  options.part_elements = 4096;
  lamina::gradient_compressor<float> compressor(model, options);
  std::vector<float> gradient(3 * 4096, 1);
  gradient.back() = std::numeric_limits<float>::quiet_NaN();
  const std::string message =
      message_of<lamina::non_finite_gradient>([&] { compressor.accumulate(0, gradient); });
  CHECK(contains(message, "'a[2]'"));
  CHECK(compressor.step() == 0);
  for (std::size_t part = 0; part < 3; ++part) {
    CHECK(same_bits(compressor.residual()[part], std::vector<float>(4096, 0)));
  }
}

TEST_CASE("momentum: the residual adds the velocity, which is cleared with what is sent") {
  lamina::compressor_options options;
  options.momentum = 0.5;
  options.refresh = lamina::refresh_schedule::fixed(5);
  lamina::gradient_compressor<float> compressor(model_of({1, 1}), options);
  // u = 2, 3, 3.5; a = 2, 5 (sent), then from nothing again
  const std::vector<float> expected = {2, 5, 2, 5};
  for (std::size_t step = 0; step < expected.size(); ++step) {
    accumulate_all(compressor, tensors<float>{{2}, {0}});
    CHECK(compressor.residual()[0][0] == expected[step]);
    CHECK(compressor.select().is_sent(0) == (expected[step] >= 5));
    send(compressor);
  }
}

TEST_CASE("options: one outside its range is refused by name") {
  const lamina::layout model = model_of({1});
  const auto message = [&](auto change) {
    lamina::compressor_options options;
    change(options);
    return message_of<std::invalid_argument>([&] { lamina::gradient_compressor<float>(model, options); });
  };
  CHECK(contains(message([](auto& o) { o.drop_ratio = 1.5; }), "drop ratio"));
  CHECK(contains(message([](auto& o) { o.byte_budget = 0; }), "byte budget"));
  CHECK(contains(message([](auto& o) { o.byte_budget = std::nan(""); }), "byte budget"));
  CHECK(contains(message([](auto& o) { o.momentum = 1; }), "momentum"));
  CHECK(contains(message([](auto& o) { o.part_elements = 1; }), "part_elements"));
}

TEST_CASE("budget: what is always sent must leave some of it") {
  const lamina::layout model = model_of({100, 100, 10});
  const auto message = message_of<std::invalid_argument>([&] {
    lamina::gradient_compressor<float>(model, {.byte_budget = 0.1, .always_sent = {0, 0}});
  });
  CHECK(contains(message, "always_sent holds 0.476190"));
  CHECK(contains(message, "byte_budget is 0.1"));
  CHECK_NOTHROW(lamina::gradient_compressor<float>(model, {.byte_budget = 0.1, .always_sent = {2, 2, 2}}));
  const lamina::layout even = model_of({25, 75});
  CHECK_THROWS_AS(lamina::gradient_compressor<float>(even, {.byte_budget = 0.25, .always_sent = {0}}),
                  std::invalid_argument);
  CHECK_NOTHROW(lamina::gradient_compressor<float>(even, {.byte_budget = 0.26, .always_sent = {0}}));
}
