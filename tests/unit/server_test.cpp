// SPDX-License-Identifier: MIT
#include "lamina/server.hpp"

#include <algorithm>
#include <random>
#include <thread>
#include <tuple>

#include "catch.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::frame_errc;

namespace {

using bytes = std::vector<std::byte>;
template <class T>
using tensors = std::vector<std::vector<T>>;

// Layers that are empty vectors are not sent.
template <class T>
bytes frame_of(const lamina::layout& model, const tensors<T>& layers, std::uint32_t sender,
               std::uint64_t step = 1, lamina::frame_kind kind = lamina::frame_kind::gradients) {
  lamina::selection chosen(model);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].empty()) chosen.send(l);
  }
  lamina::frame_encoder<T> encoder(model);
  const auto layer = [&](std::size_t l) { return std::span<const T>(layers[l]); };
  return encoder.encode(kind, step, sender, chosen, layer).to_bytes();
}

template <class T>
std::vector<T> mean_of(const lamina::gradient_aggregator<T>& aggregator, std::size_t layer) {
  std::vector<T> whole;
  aggregator.mean(layer, [&](std::size_t begin, std::span<const T> part) {
    REQUIRE(begin == whole.size());
    REQUIRE_FALSE(part.empty());
    whole.insert(whole.end(), part.begin(), part.end());
  });
  return whole;
}

template <class Call>
std::error_code refusal(Call&& call) {
  try {
    call();
  } catch (const lamina::decode_error& error) {
    return error.code();
  }
  return {};
}

}  // namespace

TEMPLATE_TEST_CASE("server: the mean is the sum in rank order over W, for any order of arrival", "", float,
                   double) {
  const std::size_t workers = 5;  // 1/W is no power of two
  const lamina::layout model = model_of({1, 100, 4096, 4097, 9000, 0, 30});
  std::mt19937 random(91);
  std::vector<tensors<TestType>> sent(workers);
  for (auto& layers : sent) {
    for (const std::size_t size : model.sizes()) {
      layers.push_back(random_fractions<TestType>(random, random() % 4 == 0 ? 0 : size));
    }
    layers[6].clear();
  }
  std::vector<std::uint32_t> order = {0, 1, 2, 3, 4};
  do {
    auto aggregator = lamina::gradient_aggregator<TestType>::of_workers(model, workers);
    std::vector<bytes> frames;
    for (const std::uint32_t w : order) frames.push_back(frame_of(model, sent[w], w));
    for (const bytes& frame : frames) aggregator.add(lamina::decode<TestType>(frame, model));
    REQUIRE(aggregator.is_complete());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::vector<TestType> expected;
      for (const auto& layers : sent) {
        if (layers[l].empty()) continue;
        expected.resize(layers[l].size());
        for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += layers[l][i];
      }
      for (TestType& each : expected) each /= TestType(workers);
      REQUIRE(same_bits(mean_of(aggregator, l), expected));
      REQUIRE(aggregator.arrived().is_sent(l) == !expected.empty());
    }
    // 8 of the 120 orders, spread over them.
    for (int skip = 0; skip < 14; ++skip) std::ranges::next_permutation(order);
  } while (std::ranges::next_permutation(order).found && order != std::vector<std::uint32_t>{0, 1, 2, 3, 4});
}

TEST_CASE("server: rank order matters, so that the test above can fail") {
  const lamina::layout model = model_of({1});
  const auto mean_for = [&](const std::vector<float>& values) {
    auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 3);
    std::vector<bytes> frames;
    for (std::uint32_t w = 0; w < 3; ++w) frames.push_back(frame_of<float>(model, {{values[w]}}, w));
    for (const bytes& frame : frames) aggregator.add(lamina::decode<float>(frame, model));
    return mean_of(aggregator, 0)[0];
  };
  CHECK(mean_for({1e8F, -1e8F, 3}) == 1);
  CHECK(mean_for({3, 1e8F, -1e8F}) == 0);
}

TEST_CASE("server: a dropped layer counts as zeros, so the mean divides by all workers") {
  const lamina::layout model = model_of({2, 1});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 4);
  std::vector<bytes> frames = {frame_of<float>(model, {{}, {}}, 0), frame_of<float>(model, {{4, 8}, {}}, 1),
                               frame_of<float>(model, {{}, {}}, 2), frame_of<float>(model, {{12, 8}, {}}, 3)};
  for (const bytes& frame : frames) aggregator.add(lamina::decode<float>(frame, model));
  CHECK(mean_of(aggregator, 0) == std::vector<float>{4, 4});
  CHECK(aggregator.arrived().is_dropped(1));
  CHECK(aggregator.arrived().sent_elements() == 2);
  CHECK(mean_of(aggregator, 1).empty());  // no block for a layer that did not arrive
}

TEMPLATE_TEST_CASE(
    "server: leaders and closed steps: the sum of the frames present over the workers behind them", "", float,
    double) {
  const lamina::layout model = model_of({1, 4096 + 30, 0, 7, 3});
  std::mt19937 random(93);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::size_t> workers_of(1 + below(random, 5));
    for (std::size_t& workers : workers_of) workers = 1 + below(random, 4);
    auto aggregator = lamina::gradient_aggregator<TestType>::of_nodes(model, workers_of);
    std::size_t all_workers = 0;
    for (const std::size_t workers : workers_of) all_workers += workers;
    REQUIRE(aggregator.senders() == workers_of.size());
    REQUIRE(aggregator.workers() == all_workers);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      std::vector<std::uint32_t> order;
      for (std::uint32_t sender = 0; sender < workers_of.size(); ++sender) {
        if (random() % 3 != 0) order.push_back(sender);
      }
      if (order.empty()) order.push_back(0);
      std::size_t workers_present = 0;
      std::vector<tensors<TestType>> sent;
      std::vector<bytes> frames;
      for (const std::uint32_t sender : order) {
        workers_present += workers_of[sender];
        sent.emplace_back();
        for (const std::size_t size : model.sizes()) {
          sent.back().push_back(random_fractions<TestType>(random, random() % 3 == 0 ? 0 : size));
        }
        sent.back()[4].clear();
        frames.push_back(frame_of(model, sent.back(), sender, step));
      }
      for (std::size_t i = frames.size(); i-- > 0;) {
        aggregator.add(lamina::decode<TestType>(frames[i], model));
      }
      const bool complete = order.size() == workers_of.size();
      REQUIRE(aggregator.is_complete() == complete);
      if (!complete || random() % 2 == 0) aggregator.close();
      REQUIRE(aggregator.is_complete() == complete);
      REQUIRE(aggregator.workers_present() == workers_present);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        std::vector<TestType> expected;
        for (const auto& layers : sent) {
          expected.resize(std::max(expected.size(), layers[l].size()));
          for (std::size_t i = 0; i < layers[l].size(); ++i) expected[i] += layers[l][i];
        }
        for (TestType& each : expected) each /= static_cast<TestType>(workers_present);
        REQUIRE(same_bits(mean_of(aggregator, l), expected));
        REQUIRE(aggregator.arrived().is_sent(l) == !expected.empty());
      }
      aggregator.next_step();
      REQUIRE(aggregator.workers_present() == 0);
    }
  }
}

TEST_CASE("server: the mean over leaders is the mean over their workers") {
  const lamina::layout model = model_of({2});
  const std::vector<std::vector<float>> of_worker = {{1, -2}, {5, 7}, {3, 0}, {-8, 4}};
  auto by_worker = lamina::gradient_aggregator<float>::of_workers(model, 4);
  std::vector<bytes> frames;
  for (std::uint32_t w = 0; w < 4; ++w) frames.push_back(frame_of<float>(model, {of_worker[w]}, w));
  for (const bytes& frame : frames) by_worker.add(lamina::decode<float>(frame, model));
  auto by_leader = lamina::gradient_aggregator<float>::of_nodes(model, {3, 1});
  const bytes last = frame_of<float>(model, {{-8, 4}}, 1);
  const bytes sum_of_three = frame_of<float>(model, {{9, 5}}, 0);
  by_leader.add(lamina::decode<float>(sum_of_three, model));
  by_leader.add(lamina::decode<float>(last, model));
  CHECK(mean_of(by_leader, 0) == std::vector<float>{0.25F, 2.25F});
  CHECK(mean_of(by_worker, 0) == std::vector<float>{0.25F, 2.25F});
}

TEST_CASE("server: a sender that stands for no worker is refused by name") {
  const lamina::layout model = model_of({1});
  using workers = std::vector<std::size_t>;
  const auto refusal_of = [&](const workers& workers_of_sender) {
    return message_of<std::invalid_argument>(
        [&] { std::ignore = lamina::gradient_aggregator<float>::of_nodes(model, workers_of_sender); });
  };
  CHECK(contains(refusal_of({3, 0, 1}), "sender 1"));
  CHECK(contains(refusal_of({0}), "sender 0"));
  CHECK(contains(refusal_of({}), "at least one worker"));
  const auto one_leader = lamina::gradient_aggregator<float>::of_nodes(model, {3}, {.first_step = 7});
  CHECK(one_leader.senders() == 1);
  CHECK(one_leader.workers() == 3);
  CHECK(one_leader.step() == 7);
}

TEST_CASE("server: a closed step takes no more frames, and the next is open again") {
  const lamina::layout model = model_of({1, 1});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 3);
  const auto ask = [&] { aggregator.mean(0, [](std::size_t, std::span<const float>) {}); };
  const auto close = [&] { aggregator.close(); };
  CHECK(contains(message_of<std::logic_error>(close), "step 1"));
  CHECK_THROWS_AS(ask(), std::logic_error);  // refusing to close has not closed
  const bytes first = frame_of<float>(model, {{8}, {}}, 2);
  const bytes late = frame_of<float>(model, {{100}, {100}}, 1);
  aggregator.add(lamina::decode<float>(first, model));
  CHECK_THROWS_AS(ask(), std::logic_error);
  close();
  CHECK_NOTHROW(close());
  const auto add_late = [&] { aggregator.add(lamina::decode<float>(late, model)); };
  const std::string message = message_of<std::logic_error>(add_late);
  CHECK(contains(message, "sender 1"));
  CHECK(contains(message, "step 1"));
  std::error_code error;
  aggregator.add(lamina::decode<float>(late, model), error);
  CHECK(error == lamina::errc::out_of_order);
  CHECK(mean_of(aggregator, 0) == std::vector<float>{8});  // over one worker
  CHECK(aggregator.arrived().is_dropped(1));
  CHECK_FALSE(aggregator.is_complete());

  aggregator.next_step();
  CHECK(refusal(add_late) == frame_errc::unexpected_step);
  CHECK_THROWS_AS(close(), std::logic_error);
  std::vector<bytes> frames;
  for (std::uint32_t w = 0; w < 3; ++w) frames.push_back(frame_of<float>(model, {{3}, {}}, w, 2));
  aggregator.add(lamina::decode<float>(frames[0], model));
  aggregator.add(lamina::decode<float>(frames[1], model));
  CHECK_THROWS_AS(ask(), std::logic_error);  // waits for all again
  aggregator.add(lamina::decode<float>(frames[2], model));
  CHECK(mean_of(aggregator, 0) == std::vector<float>{3});
}

TEST_CASE("server: the mean comes in consecutive blocks that cover the layer") {
  const lamina::layout model = model_of({10000});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1);
  std::mt19937 random(92);
  const auto values = random_fractions<float>(random, 10000);
  const bytes frame = frame_of<float>(model, {values}, 0);
  aggregator.add(lamina::decode<float>(frame, model));
  CHECK(same_bits(mean_of(aggregator, 0), values));
}

TEST_CASE("server: frames of other steps, kinds and senders are refused by name and change nothing") {
  const lamina::layout model = model_of({1, 1});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 2, {.first_step = 7});
  CHECK(aggregator.step() == 7);
  CHECK(aggregator.workers() == 2);
  const auto offer = [&](const bytes& frame) { aggregator.add(lamina::decode<float>(frame, model)); };
  const bytes good = frame_of<float>(model, {{8}, {}}, 0, 7);
  offer(good);
  const auto refused = [&](std::uint32_t sender, std::uint64_t step,
                           lamina::frame_kind kind = lamina::frame_kind::gradients) {
    const bytes frame = frame_of<float>(model, {{100}, {100}}, sender, step, kind);
    const std::string message = message_of<lamina::decode_error>([&] { offer(frame); });
    CHECK(contains(message, "sender " + std::to_string(sender)));
    CHECK(contains(message, "step " + std::to_string(step)));
    CHECK(contains(message, "7"));  // the step that is expected
    const std::error_code code = refusal([&] { offer(frame); });
    std::error_code quiet;
    aggregator.add(lamina::decode<float>(frame, model), quiet);
    CHECK(quiet == code);
    CHECK(aggregator.workers_present() == 1);
    CHECK_FALSE(aggregator.is_complete());
    CHECK(aggregator.arrived().is_dropped(1));
    CHECK(aggregator.arrived().sent_elements() == 1);
    CHECK(aggregator.step() == 7);
    return code;
  };
  CHECK(refused(1, 7, lamina::frame_kind::parameters) == frame_errc::unexpected_kind);
  CHECK(refused(1, 6) == frame_errc::unexpected_step);
  CHECK(refused(1, 8) == frame_errc::unexpected_step);
  CHECK(refused(2, 7) == frame_errc::unknown_sender);
  CHECK(refused(~std::uint32_t{0}, 7) == frame_errc::unknown_sender);
  CHECK(refused(0, 7) == frame_errc::duplicate_sender);
  const bytes last = frame_of<float>(model, {{4}, {}}, 1, 7);
  offer(last);
  CHECK(aggregator.is_complete());
  CHECK(mean_of(aggregator, 0) == std::vector<float>{6});
}

TEST_CASE("server: a frame of another model, or moved from, is refused and changes nothing") {
  const lamina::layout model = model_of({1});
  const lamina::layout other = model_of({2});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1);
  const bytes frame = frame_of<float>(other, {{1, 2}}, 0);
  const bytes good = frame_of<float>(model, {{1}}, 0);
  auto view = lamina::decode<float>(good, model);
  const auto taken = std::move(view);
  const auto refused = [&](const lamina::frame_view<float>& bad) {
    CHECK_THROWS_AS(aggregator.add(bad), std::invalid_argument);
    std::error_code error;
    aggregator.add(bad, error);
    CHECK(error == lamina::errc::other_layout);
    CHECK_FALSE(aggregator.is_complete());
    CHECK(aggregator.workers_present() == 0);
    CHECK(aggregator.arrived().sent_layers() == 0);
    CHECK_THROWS_AS(aggregator.close(), std::logic_error);
  };
  refused(lamina::decode<float>(frame, other));
  refused(lamina::frame_view<float>{});
  refused(view);  // NOLINT(bugprone-use-after-move): what is left is of no layout
  const lamina::layout equal = model_of({1});
  std::error_code error = make_error_code(frame_errc::truncated);
  aggregator.add(lamina::decode<float>(good, equal), error);
  CHECK_FALSE(error);
  CHECK(aggregator.is_complete());
}

TEST_CASE("server: a frame of another run is refused by name and changes nothing") {
  const lamina::layout model = model_of({1});
  const auto of_run = [&](std::uint32_t run, std::uint64_t step = 1) {
    lamina::frame_encoder<float> encoder(model, run);
    lamina::selection all(model);
    all.send_all();
    const std::vector<float> one = {4};
    return encoder
        .encode(lamina::frame_kind::gradients, step, 0, all,
                [&](std::size_t) { return std::span<const float>(one); })
        .to_bytes();
  };
  for (const std::uint32_t run : {0U, 7U, 0xffffffffU}) {
    auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1, {.run = run});
    for (const std::uint32_t other : {0U, 1U, 7U, 0xffffffffU}) {
      if (other == run) continue;
      for (const std::uint64_t step : {1, 2}) {
        const bytes old = of_run(other, step);
        const auto add = [&] { aggregator.add(lamina::decode<float>(old, model)); };
        CHECK(refusal(add) == frame_errc::other_run);
        const std::string message = message_of<lamina::decode_error>(add);
        CHECK(contains(message, "run " + std::to_string(other == 0 ? run : other)));
        CHECK(aggregator.workers_present() == 0);
      }
    }
    const bytes good = of_run(run);
    aggregator.add(lamina::decode<float>(good, model));
    CHECK(mean_of(aggregator, 0) == std::vector<float>{4});
  }
}

TEST_CASE("server: no mean before all frames are there, none of a layer that does not exist") {
  const lamina::layout model = model_of({1});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 2);
  const auto ask = [&](std::size_t l) { aggregator.mean(l, [](std::size_t, std::span<const float>) {}); };
  CHECK_THROWS_AS(ask(0), std::logic_error);
  const bytes first = frame_of<float>(model, {{1}}, 0);
  const bytes second = frame_of<float>(model, {{1}}, 1);
  aggregator.add(lamina::decode<float>(first, model));
  CHECK(contains(message_of<std::logic_error>([&] { ask(0); }), "1 of 2 senders"));
  aggregator.add(lamina::decode<float>(second, model));
  CHECK_NOTHROW(ask(0));
  CHECK_THROWS_AS(ask(1), std::out_of_range);
}

TEST_CASE("server: the next step starts from nothing") {
  const lamina::layout model = model_of({1, 1});
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1);
  const bytes first = frame_of<float>(model, {{1}, {}}, 0, 1);
  aggregator.add(lamina::decode<float>(first, model));
  aggregator.next_step();
  CHECK(aggregator.step() == 2);
  CHECK_FALSE(aggregator.is_complete());
  CHECK(aggregator.arrived().sent_layers() == 0);
  CHECK(refusal([&] { aggregator.add(lamina::decode<float>(first, model)); }) == frame_errc::unexpected_step);
  const bytes second = frame_of<float>(model, {{}, {5}}, 0, 2);
  aggregator.add(lamina::decode<float>(second, model));
  CHECK(aggregator.is_complete());
  CHECK(aggregator.arrived().is_dropped(0));
  CHECK(mean_of(aggregator, 1) == std::vector<float>{5});
}

TEST_CASE("server: expect refuses another kind and another step, naming sender and both steps") {
  const lamina::layout model = model_of({1});
  const bytes frame = frame_of<float>(model, {{1}}, 3, 41);
  const auto view = lamina::decode<float>(frame, model);
  const auto gradients = lamina::frame_kind::gradients;
  const auto parameters = lamina::frame_kind::parameters;
  CHECK_NOTHROW(lamina::expect(view, gradients, 41));
  CHECK(refusal([&] { lamina::expect(view, parameters, 41); }) == frame_errc::unexpected_kind);
  CHECK(refusal([&] { lamina::expect(view, gradients, 40); }) == frame_errc::unexpected_step);
  CHECK(refusal([&] { lamina::expect(view, gradients, 42); }) == frame_errc::unexpected_step);
  const std::string message = message_of<lamina::decode_error>([&] { lamina::expect(view, gradients, 57); });
  CHECK(contains(message, "sender 3"));
  CHECK(contains(message, "step 41"));
  CHECK(contains(message, "step 57"));
}

TEST_CASE("server: a worker's frames are of the run that its options name") {
  const lamina::layout model = model_of({1});
  lamina::gradient_compressor<float> worker(model, {.drop_ratio = 0, .run = 8});
  worker.accumulate(0, std::vector<float>{4});
  const auto copy = worker;  // an encoder is copied with its run
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1, {.run = 8});
  for (auto each : {worker, copy}) {
    const bytes frame = each.encode().to_bytes();
    const auto view = lamina::decode<float>(frame, model);
    CHECK(view.run() == 8);
    CHECK(lamina::peek(frame).run == 8);
    if (!aggregator.is_complete()) aggregator.add(view);
  }
  CHECK(aggregator.is_complete());
}

TEST_CASE("server: expect gives the same as an error code, and always looks at the run") {
  const lamina::layout model = model_of({1});
  lamina::frame_encoder<float> encoder(model, 9);
  const bytes frame = encoder
                          .encode(lamina::frame_kind::gradients, 41, 3, lamina::selection(model),
                                  [](std::size_t) { return std::span<const float>(); })
                          .to_bytes();
  const auto view = lamina::decode<float>(frame, model);
  const auto gradients = lamina::frame_kind::gradients;
  const auto parameters = lamina::frame_kind::parameters;
  const auto checked = [&](auto kind, std::uint64_t step, auto... run) {
    std::error_code quiet = make_error_code(frame_errc::truncated);
    lamina::expect(view, kind, step, quiet, run...);
    CHECK(refusal([&] { lamina::expect(view, kind, step, run...); }) == quiet);
    return quiet;
  };
  // A frame of a run is not one of none.
  CHECK(checked(gradients, 41) == frame_errc::other_run);
  CHECK(checked(parameters, 41) == frame_errc::unexpected_kind);
  CHECK_FALSE(checked(gradients, 41, 9U));
  CHECK(checked(gradients, 41, 8U) == frame_errc::other_run);
  CHECK(checked(gradients, 42, 0U) == frame_errc::other_run);
  CHECK(checked(gradients, 42, 9U) == frame_errc::unexpected_step);
  CHECK(checked(parameters, 41, 8U) == frame_errc::unexpected_kind);
  const auto ask = [&] { lamina::expect(view, gradients, 41, 8U); };
  const std::string message = message_of<lamina::decode_error>(ask);
  CHECK(contains(message, "run 9"));
  CHECK(contains(message, "run 8"));
}

TEMPLATE_TEST_CASE("server: the mean is the same bits through any execution, and covers the layer once", "",
                   float, double) {
  constexpr std::size_t piece = 65'536;
  const lamina::layout model = model_of({1, 4096, piece - 1, piece, piece + 1, 3 * piece + 4097, 0});
  std::mt19937 random(94);
  auto aggregator = lamina::gradient_aggregator<TestType>::of_workers(model, 3);
  std::vector<bytes> frames;
  for (std::uint32_t w = 0; w < 3; ++w) {
    tensors<TestType> layers;
    for (const std::size_t size : model.sizes())
      layers.push_back(random_fractions<TestType>(random, (w + size) % 3 == 0 ? 0 : size));
    frames.push_back(frame_of(model, layers, w));
  }
  for (const bytes& frame : frames) aggregator.add(lamina::decode<TestType>(frame, model));
  std::size_t most_pieces = 0;
  const auto backwards = [&](std::size_t pieces, auto&& work) {
    most_pieces = std::max(most_pieces, pieces);
    while (pieces-- > 0) work(pieces);
  };
  const auto threads = [](std::size_t pieces, auto&& work) {
    std::vector<std::thread> all;
    for (std::size_t i = 0; i < pieces; ++i) all.emplace_back([&work, i] { work(i); });
    for (std::thread& each : all) each.join();
  };
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const std::vector<TestType> expected = mean_of(aggregator, l);
    const auto through = [&](const auto& execution) {
      std::vector<TestType> whole(expected.size(), TestType(-1));
      std::vector<char> seen(expected.size() / 4096 + 1);
      aggregator.mean(
          l,
          [&](std::size_t begin, std::span<const TestType> part) {
            ++seen[begin / 4096];
            std::ranges::copy(part, whole.begin() + static_cast<std::ptrdiff_t>(begin));
          },
          execution);
      for (std::size_t block = 0; block * 4096 < expected.size(); ++block) REQUIRE(seen[block] == 1);
      return whole;
    };
    CHECK(same_bits(through(lamina::sequential{}), expected));
    CHECK(same_bits(through(backwards), expected));
    CHECK(same_bits(through(threads), expected));
  }
  CHECK(most_pieces == 4);
}

TEST_CASE("server: a model without layers goes through") {
  const lamina::layout model = model_of({});
  lamina::frame_encoder<float> encoder(model);
  const auto none = [](std::size_t) { return std::span<const float>(); };
  const auto bytes =
      encoder.encode(lamina::frame_kind::gradients, 1, 0, lamina::selection(model), none).to_bytes();
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1);
  aggregator.add(lamina::decode<float>(bytes, model));
  CHECK(aggregator.is_complete());
}

TEST_CASE("server: without workers there is no server") {
  CHECK_THROWS_AS(lamina::parameter_publisher<float>(model_of({1}), 0), std::invalid_argument);
  CHECK_THROWS_AS(lamina::gradient_aggregator<float>::of_workers(model_of({1}), 0), std::invalid_argument);
}

namespace {

// A publisher with parameters that are as many as the model's elements, and what each frame holds.
struct publishing {
  lamina::layout model = model_of({2, 1, 0, 3});
  tensors<float> parameters = {{1, 2}, {3}, {}, {4, 5, 6}};
  lamina::parameter_publisher<float> publisher;

  explicit publishing(std::size_t workers) : publisher(model, workers) {}
  auto access() {
    return [this](std::size_t l) { return std::span<const float>(parameters[l]); };
  }
  void update(std::initializer_list<std::size_t> layers) {
    lamina::selection changed(model);
    for (const std::size_t l : layers) changed.send(l);
    publisher.update(changed);
  }
  std::vector<std::size_t> layers_in(const lamina::encoded_frame& frame, std::uint64_t step,
                                     const lamina::selection& published) {
    const bytes copy = frame.to_bytes();
    const auto view = lamina::decode<float>(copy, model);
    CHECK(view.kind() == lamina::frame_kind::parameters);
    CHECK(view.sender() == 0);
    CHECK(view.step() == step);
    std::vector<std::size_t> present;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      CHECK(view.is_dropped(l) == published.is_dropped(l));
      if (view.is_dropped(l)) continue;
      CHECK(same_bits(view.layer(l), parameters[l]));
      present.push_back(l);
    }
    return present;
  }
  std::vector<std::size_t> encode(std::size_t worker, std::uint64_t step = 1) {
    const lamina::encoded_frame& frame = publisher.encode(worker, step, access());
    return layers_in(frame, step, publisher.published(worker));
  }
  std::vector<std::size_t> encode_for_all(std::uint64_t step = 1) {
    const lamina::encoded_frame& frame = publisher.encode_for_all(step, access());
    return layers_in(frame, step, publisher.published_to_all());
  }
};

using indices = std::vector<std::size_t>;

}  // namespace

TEST_CASE("publisher: the first frame holds every layer, the next only what was updated since") {
  publishing server(1);
  CHECK(server.encode(0, 0) == indices{0, 1, 3});
  server.publisher.commit(0);
  CHECK(server.encode(0, 1).empty());
  server.publisher.commit(0);
  server.update({1, 2});  // layer 2 is empty
  CHECK(server.encode(0, 2) == indices{1});
  server.publisher.commit(0);
  CHECK(server.encode(0, 3).empty());
}

TEST_CASE("publisher: each worker is told what it has not seen, whoever caused it") {
  publishing server(3);
  server.encode_for_all();
  server.publisher.commit_all();
  server.update({0});
  CHECK(server.encode(0) == indices{0});
  server.publisher.commit(0);
  server.update({3});
  CHECK(server.encode(1) == indices{0, 3});
  server.publisher.commit(1);
  CHECK(server.encode(0) == indices{3});
  server.publisher.commit(0);
  CHECK(server.encode(1).empty());
  CHECK(server.encode(2) == indices{0, 3});
}

TEST_CASE("publisher: until it is committed a frame is repeated") {
  publishing server(2);
  CHECK(server.encode(0) == indices{0, 1, 3});
  CHECK(server.encode(0) == indices{0, 1, 3});  // not seen: raised at commit, not at encode
  server.publisher.commit(0);
  server.update({0});
  CHECK(server.encode(0) == indices{0});  // lost
  server.update({1});
  CHECK(server.encode(0) == indices{0, 1});
  server.publisher.commit(0);
  CHECK(server.encode(0).empty());
  CHECK(server.encode(1) == indices{0, 1, 3});
}

TEST_CASE("publisher: an update between encode and commit is not taken for seen") {
  publishing server(2);
  server.encode_for_all();
  server.publisher.commit_all();
  server.update({0});
  server.encode(0);
  server.update({1});
  server.update({0});
  server.publisher.commit(0);
  CHECK(server.encode(0) == indices{0, 1});
  server.publisher.commit(0);
  server.encode_for_all();
  server.update({3});
  server.publisher.commit_all();
  CHECK(server.encode_for_all() == indices{3});
}

TEST_CASE("publisher: a commit without a frame commits nothing") {
  publishing server(2);
  server.publisher.commit(0);
  server.publisher.commit_all();
  CHECK(server.encode(0) == indices{0, 1, 3});
}

TEST_CASE("publisher: a frame for all holds what at least one has not seen") {
  publishing server(3);
  CHECK(server.encode_for_all() == indices{0, 1, 3});
  server.publisher.commit_all();
  CHECK(server.encode_for_all().empty());
  server.update({0});
  server.encode(1);
  server.publisher.commit(1);
  CHECK(server.encode_for_all() == indices{0});
  server.publisher.commit(0);
  CHECK(server.encode_for_all() == indices{0});  // worker 2 has not had it
  server.publisher.commit_all();
  CHECK(server.encode_for_all().empty());
}

TEST_CASE("publisher: frames point into the parameters") {
  publishing server(1);
  const auto segments = server.publisher.encode(0, 1, server.access()).segments();
  REQUIRE(segments.size() == 4);
  CHECK(segments[1].data() == reinterpret_cast<const std::byte*>(server.parameters[0].data()));
  CHECK(segments[3].data() == reinterpret_cast<const std::byte*>(server.parameters[3].data()));
}

TEST_CASE("publisher: a selection of another model is refused and changes nothing") {
  const lamina::layout model = model_of({1, 1, 1});
  lamina::parameter_publisher<float> publisher(model, 1);
  const std::vector<float> one(1);
  const auto layer = [&](std::size_t) -> const auto& {
    return one;
  };
  std::ignore = publisher.encode(0, 1, layer);
  publisher.commit(0);
  for (const auto& other : {model_of({1, 1, 2}), model_of({1})}) {
    lamina::selection changed(other);
    changed.send(0);
    CHECK_THROWS_AS(publisher.update(changed), std::invalid_argument);
  }
  std::ignore = publisher.encode(0, 2, layer);
  CHECK(publisher.published(0).sent_layers() == 0);
}

TEST_CASE("publisher: an encode that threw leaves nothing to commit") {
  const lamina::layout model = model_of({2, 2});
  lamina::parameter_publisher<float> publisher(model, 2);
  const std::vector<float> three(3);
  const std::vector<float> two(2);
  const auto wrong = [&](std::size_t) -> const auto& {
    return three;
  };
  const auto right = [&](std::size_t) -> const auto& {
    return two;
  };
  CHECK_THROWS_AS(publisher.encode(0, 1, wrong), std::invalid_argument);
  CHECK_THROWS_AS(publisher.encode_for_all(1, wrong), std::invalid_argument);
  publisher.commit(0);
  publisher.commit_all();
  std::ignore = publisher.encode_for_all(1, right);
  CHECK(publisher.published_to_all().sent_layers() == 2);
}

TEST_CASE("publisher: a worker that does not exist is refused") {
  publishing server(2);
  CHECK_THROWS_AS(server.encode(2), std::out_of_range);
  CHECK_THROWS_AS(server.publisher.commit(2), std::out_of_range);
  CHECK_THROWS_AS(server.publisher.forget(2), std::out_of_range);
  CHECK_THROWS_AS(server.publisher.published(2), std::out_of_range);
}

TEST_CASE("publisher: replies to several workers are under way at once") {
  publishing server(3);
  const auto segments_of = [](const lamina::encoded_frame& frame) {
    bytes joined;
    for (const auto segment : frame.segments()) joined.insert(joined.end(), segment.begin(), segment.end());
    return joined;
  };
  for (const auto payload : {lamina::payload_type::as_is, lamina::payload_type::bfloat16}) {
    lamina::parameter_publisher<float> publisher(server.model, 3, {.payload = payload});
    CHECK(publisher.published(0).sent_layers() == 0);
    const lamina::encoded_frame& first = publisher.encode(0, 1, server.access());
    const bytes sent_first = first.to_bytes();
    publisher.commit(0);
    lamina::selection changed(server.model);
    changed.send(3);
    publisher.update(changed);
    const lamina::encoded_frame& second = publisher.encode(1, 2, server.access());
    const bytes sent_second = second.to_bytes();
    const lamina::encoded_frame& all = publisher.encode_for_all(3, server.access());
    const bytes sent_to_all = all.to_bytes();
    CHECK(segments_of(first) == sent_first);
    CHECK(segments_of(second) == sent_second);
    const lamina::encoded_frame& next = publisher.encode(0, 4, server.access());
    CHECK(publisher.published(0).sent_layers() == 1);
    CHECK(publisher.published(1).sent_layers() == 3);
    CHECK(publisher.published_to_all().sent_layers() == 3);
    CHECK(next.to_bytes() != sent_first);
    CHECK(segments_of(second) == sent_second);
    CHECK(segments_of(all) == sent_to_all);
  }
}

TEST_CASE("publisher: a worker that was forgotten gets everything, and no commit from before counts") {
  publishing server(2);
  server.encode_for_all();
  server.publisher.commit_all();
  CHECK(server.encode(0).empty());
  server.publisher.forget(0);
  CHECK(server.encode(1).empty());  // the other has seen what it has seen
  CHECK(server.encode_for_all() == indices{0, 1, 3});
  server.encode(0);
  server.publisher.forget(0);
  server.publisher.commit(0);
  server.publisher.commit_all();
  CHECK(server.encode(0) == indices{0, 1, 3});
  server.publisher.commit(0);
  CHECK(server.encode(0).empty());
}

TEST_CASE("publisher: the options say how parameters are written, and of which run") {
  publishing server(1);
  server.parameters[0] = {1.0F, 1.0F + 0x1p-20F};
  lamina::parameter_publisher<float> publisher(server.model, 1,
                                               {.payload = lamina::payload_type::bfloat16, .run = 5});
  for (const bool for_all : {false, true}) {
    const bytes frame = for_all ? publisher.encode_for_all(1, server.access()).to_bytes()
                                : publisher.encode(0, 1, server.access()).to_bytes();
    const auto view = lamina::decode<float>(frame, server.model);
    CHECK(view.run() == 5);
    CHECK(view.payload() == lamina::payload_type::bfloat16);
    std::vector<float> replica(2);
    CHECK(view.apply_to(0, replica));
    CHECK(replica == std::vector<float>{1, 1});  // rounded, and the server's is not
  }
  const bytes plain =
      lamina::parameter_publisher<float>(server.model, 1).encode(0, 1, server.access()).to_bytes();
  CHECK(lamina::decode<float>(plain, server.model).run() == 0);
}

TEST_CASE("publisher: frames have a checksum unless the options say otherwise") {
  publishing server(1);
  const auto has_checksum = [&](lamina::frame_checksum asked) {
    lamina::parameter_publisher<float> publisher(server.model, 1, {.frame_checksum = asked});
    const bytes frame = publisher.encode(0, 1, server.access()).to_bytes();
    CHECK(lamina::decode<float>(frame, server.model).sent_elements() == server.model.elements());
    CHECK(publisher.encode_for_all(1, server.access()).to_bytes() == frame);
    return (frame[8] & std::byte{1}) != std::byte{0};
  };
  CHECK_FALSE(has_checksum(lamina::frame_checksum::none));
  CHECK(has_checksum(lamina::frame_checksum::xxh3));
}

TEST_CASE("publisher: random updates, sends and losses leave each worker with just what it missed") {
  for (std::uint32_t seed = 101; seed < 106; ++seed) {
    std::mt19937 random(seed);
    const std::size_t workers = 1 + below(random, 4);
    publishing server(workers);
    std::vector<std::vector<bool>> missing(workers, {true, true, false, true});
    for (int event = 0; event < 400; ++event) {
      if (random() % 3 == 0) {
        const std::size_t l = below(random, 4);
        server.update({l});
        for (auto& each : missing) each[l] = l != 2;
      } else {
        const std::size_t w = below(random, workers);
        indices expected;
        for (std::size_t l = 0; l < 4; ++l) {
          if (missing[w][l]) expected.push_back(l);
        }
        REQUIRE(server.encode(w) == expected);
        if (random() % 2 == 0) {
          server.publisher.commit(w);
          missing[w].assign(4, false);
        }
      }
    }
  }
}

TEST_CASE("server: an encode of parameters that throws leaves no frame, and nothing to commit") {
  const lamina::layout model = model_of({2, 300, 3});
  const tensors<float> parameters = {{1, 2}, std::vector<float>(300, 3), {4, 5, 6}};
  const auto layer = [&](std::size_t l) -> const std::vector<float>& { return parameters[l]; };
  const auto failing = [&](std::size_t l) -> const std::vector<float>& {
    if (l == 1) throw std::runtime_error("the source is gone");
    return parameters[l];
  };
  lamina::parameter_publisher<float> publisher(model, 2);
  const bytes whole = publisher.encode(0, 1, layer).to_bytes();
  publisher.commit(0);
  lamina::selection first(model);
  first.send(0);
  publisher.update(first);
  const lamina::encoded_frame& small = publisher.encode(0, 2, layer);
  CHECK(small.size_bytes() < whole.size());
  lamina::selection all(model);
  all.send_all();
  publisher.update(all);
  CHECK_THROWS_AS(publisher.encode(0, 3, failing), std::runtime_error);
  CHECK(small.to_bytes().empty());
  CHECK(publisher.published(0).sent_layers() == 0);
  publisher.commit(0);
  CHECK(publisher.encode(0, 1, layer).to_bytes() == whole);

  const lamina::encoded_frame& to_all = publisher.encode_for_all(1, layer);
  CHECK(to_all.to_bytes() == whole);
  CHECK_THROWS_AS(publisher.encode_for_all(4, failing), std::runtime_error);
  CHECK(to_all.to_bytes().empty());
  CHECK(publisher.published_to_all().sent_layers() == 0);
  publisher.commit_all();
  CHECK(publisher.encode_for_all(1, layer).to_bytes() == whole);
}
