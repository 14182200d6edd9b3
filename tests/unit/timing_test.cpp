// SPDX-License-Identifier: MIT
// Steps that are decided as layers are ready, or ahead: what docs/scheme/index.md promises of them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/partition.hpp"
#include "lamina/worker.hpp"
#include "oracle.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::compressor_options;
using lamina::decision_timing;
using lamina::refresh_schedule;

namespace {

using worker = lamina::gradient_compressor<float>;

constexpr double infinity = std::numeric_limits<double>::infinity();

compressor_options decided(decision_timing timing, double ratio = 0.5) {
  compressor_options options;
  options.drop_ratio = ratio;
  options.decide = timing;
  return options;
}

template <class T, class Compressor>
void accumulate_each(Compressor& compressor, const tensors<T>& gradients) {
  for (std::size_t l = 0; l < gradients.size(); ++l) compressor.accumulate(l, gradients[l]);
}

std::vector<double> copy_of(std::span<const double> values) {
  return {values.begin(), values.end()};
}

std::vector<bool> sent_of(const lamina::selection& chosen) {
  std::vector<bool> sent;
  for (std::size_t l = 0; l < chosen.model().layers(); ++l) sent.push_back(chosen.is_sent(l));
  return sent;
}

// One worker's step, ahead by its own predicted values.
void finish(worker& each, decision_timing timing) {
  if (timing == decision_timing::ahead) each.plan_next(copy_of(each.predicted_values()));
  each.encode();
  each.commit();
}

// A layer of `elements` numbers of this magnitude, signs in turn.
std::vector<float> alternating(std::size_t elements, float magnitude) {
  std::vector<float> layer(elements, magnitude);
  for (std::size_t i = 1; i < elements; i += 2) layer[i] = -magnitude;
  return layer;
}

const std::vector<decision_timing> early = {decision_timing::as_ready, decision_timing::ahead};

}  // namespace

TEST_CASE("timing as_ready: a layer is decided with its gradient, by the threshold of the last search") {
  for (const std::uint64_t period : {1U, 3U}) {
    for (std::uint32_t seed = 1; seed < 8; ++seed) {
      std::mt19937 random(seed);
      const lamina::layout model = random_model(random);
      const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
      compressor_options options = decided(decision_timing::as_ready, 0.6);
      options.refresh = refresh_schedule::every(period);
      worker each(model, options);
      double threshold = -infinity;
      for (std::uint64_t step = 1; step <= 12; ++step) {
        each.begin_step();
        REQUIRE(each.threshold() == threshold);  // known before the first gradient
        for (std::size_t l = model.layers(); l-- > 0;) {
          REQUIRE(each.is_decided(l) == (sizes[l] == 0));
          const double value = each.accumulate(l, random_integers<float>(random, sizes[l], 1 + l));
          REQUIRE(each.is_decided(l));
          const bool passes = step == 1 || (value >= threshold && value != 0);
          REQUIRE(each.is_sent(l) == (sizes[l] > 0 && passes));
        }
        const std::vector<bool> sent = sent_of(each.chosen());
        REQUIRE(each.threshold() == threshold);
        REQUIRE(sent_of(each.select()) == sent);
        if ((step - 1) % period == 0) {
          const std::vector<double> values = copy_of(each.values());
          threshold = literal_algorithm_1(values, sizes, 0.6);
          // Promise 3, of the threshold that this step has searched.
          double below = 0;
          double tied = 0;
          for (std::size_t l = 0; l < sizes.size(); ++l) {
            if (values[l] < threshold) below += static_cast<double>(sizes[l]);
            if (values[l] == threshold) tied += static_cast<double>(sizes[l]);
          }
          const double limit = 0.6 * static_cast<double>(model.elements());
          REQUIRE(below <= limit);
          REQUIRE(limit - tied < below);
        }
        each.encode();
        each.commit();
      }
    }
  }
}

TEST_CASE("timing as_ready: the first step sends everything, zeros too; within a budget these stay") {
  compressor_options options = decided(decision_timing::as_ready);
  for (const bool has_budget : {false, true}) {
    if (has_budget) options.byte_budget = 1;
    worker each(model_of({2, 3}), options);
    each.accumulate_all(tensors<float>{{0, 0}, {1, 2, 3}});
    CHECK(each.threshold() == -infinity);
    CHECK(each.is_sent(0) == !has_budget);
    CHECK(each.is_sent(1));
  }
}

TEST_CASE("timing as_ready: a decision does not depend on gradients that come later; at the end it does") {
  const auto is_first_sent = [](decision_timing timing, float later) {
    worker each(model_of({4, 4}), decided(timing));
    accumulate_each(each, tensors<float>{alternating(4, 2), alternating(4, 1)});
    each.encode();
    each.commit();
    each.accumulate(0, alternating(4, 2));
    const bool is_known = each.is_decided(0);
    const bool was_sent = is_known && each.is_sent(0);
    each.accumulate(1, alternating(4, later));
    each.select();
    CHECK(is_known == (timing == decision_timing::as_ready));
    if (is_known) CHECK(each.is_sent(0) == was_sent);
    return each.is_sent(0);
  };
  CHECK(is_first_sent(decision_timing::as_ready, 1) == is_first_sent(decision_timing::as_ready, 100));
  CHECK(is_first_sent(decision_timing::at_end, 1) != is_first_sent(decision_timing::at_end, 100));
}

TEST_CASE(
    "timing as_ready: with a fixed threshold, and where everything is sent, the frames are those of at_end") {
  const auto require_same = [](compressor_options options) {
    std::mt19937 random(21);
    const lamina::layout model = model_of({3, 0, 70, 2 * 4096 + 5, 1, 9});
    worker at_end(model, options);
    options.decide = decision_timing::as_ready;
    worker as_ready(model, options);
    for (int step = 0; step < 20; ++step) {
      const auto gradients = random_gradients<float>(random, model);
      for (worker* each : {&at_end, &as_ready}) each->accumulate_all(gradients);
      REQUIRE(as_ready.encode().to_bytes() == at_end.encode().to_bytes());
      at_end.commit();
      as_ready.commit();
    }
  };
  for (const double threshold : {0.0, 3.0, 9.0, -infinity, infinity}) {
    compressor_options options;
    options.refresh = refresh_schedule::fixed(threshold);
    options.max_age = 5;
    options.part_elements = 4096;
    require_same(options);
  }
  for (const double ratio : {0.0, 1.0}) require_same(decided(decision_timing::at_end, ratio));
}

TEST_CASE(
    "timing as_ready: the drop ratio of a step is that of the warm-up in it, whose search comes a step "
    "before") {
  compressor_options options = decided(decision_timing::as_ready, 0.96875);
  options.warm_up_steps = 5;  // half, a quarter, ... of the elements are sent
  worker each(model_of(std::vector<std::size_t>(32, 1)), options);
  tensors<float> gradients;
  for (int l = 0; l < 32; ++l) gradients.push_back({static_cast<float>(l + 1)});
  for (int step = 1; step <= 7; ++step) {
    each.accumulate_all(gradients);  // nothing is committed: the values are step times 1, 2, ..., 32
    if (step > 1) {
      const double share = std::pow(0.5, std::min(step, 5));
      CHECK(each.threshold() == (step - 1) * (32 * (1 - share) + 1));
    }
    each.select();
    each.abandon();
  }
}

TEST_CASE("timing as_ready: a gradient in pieces is decided by its last, with momentum as in one piece") {
  compressor_options options = decided(decision_timing::as_ready);
  options.momentum = 0.5;
  std::mt19937 random(31);
  const lamina::layout model = model_of({5, 40, 0, 7});
  worker whole(model, options);
  worker pieces(model, options);
  for (int step = 0; step < 10; ++step) {
    const auto gradients = random_gradients<float>(random, model);
    whole.accumulate_all(gradients);
    pieces.expect_more_pieces(true);
    for (int k = 0; k < 3; ++k) {
      pieces.accumulate_all(gradients, 0.25);
      CHECK_FALSE(pieces.is_decided(0));
    }
    pieces.expect_more_pieces(false);
    if (step % 2 == 0) {
      pieces.accumulate_all(gradients, 0.25);
      CHECK(pieces.is_decided(0));
    } else {
      for (std::size_t l = 0; l < 2; ++l) pieces.accumulate(l, gradients[l], 0.25);
      pieces.expect_more_pieces(true);  // and then none comes: select() decides
      pieces.accumulate(3, gradients[3], 0.25);
      CHECK_FALSE(pieces.is_decided(3));
    }
    REQUIRE(pieces.encode().to_bytes() == whole.encode().to_bytes());
    pieces.commit();
    whole.commit();
  }
}

TEST_CASE("timing as_ready: a layer without its last piece is decided by skip()") {
  worker each(model_of({1, 1}), decided(decision_timing::as_ready));
  each.expect_more_pieces(true);
  each.accumulate_all(tensors<float>{{1}, {2}});
  each.expect_more_pieces(false);
  each.skip(0);
  CHECK(each.is_decided(0));
  CHECK_FALSE(each.is_decided(1));
}

namespace {

// What as_ready does within a budget, written down as it is told: an allowance, a queue, a threshold.
struct literal_queue {
  std::vector<std::size_t> sizes;
  double share;
  bool reserves = true;  // false: nothing is remembered of a layer that did not fit

  double allowance = 0;
  double threshold = -infinity;
  std::vector<std::pair<std::uint64_t, std::size_t>> queue = {};  // since, layer

  double next(double left) const {
    return std::min(left + share, share + static_cast<double>(*std::ranges::max_element(sizes)));
  }
  // The layers of the queue that have room, and what is left for the others.
  std::pair<std::vector<std::size_t>, double> with_room(double left) const {
    std::vector<std::size_t> found;
    for (const auto& [since, l] : queue) {
      if (static_cast<double>(sizes[l]) > left) return {found, 0.0};
      left -= static_cast<double>(sizes[l]);
      found.push_back(l);
    }
    return {found, left};
  }

  // One step that is committed; the layers come in this order. Gives those that are sent.
  std::vector<bool> step(std::uint64_t number, const std::vector<std::size_t>& order,
                         const std::vector<double>& values) {
    allowance = next(allowance);
    auto [room, left] = with_room(allowance);
    std::vector<bool> sent(sizes.size());
    std::vector<std::pair<std::uint64_t, std::size_t>> refused;
    for (const std::size_t l : order) {
      const auto elements = static_cast<double>(sizes[l]);
      const bool has_room = std::ranges::count(room, l) > 0;
      if (sizes[l] == 0 || (!has_room && (values[l] == 0 || values[l] < threshold))) continue;
      if (!has_room && elements > left) {
        refused.emplace_back(number, l);
        continue;
      }
      sent[l] = true;
      if (!has_room) left -= elements;
    }
    std::erase_if(queue, [&](const auto& each) { return sent[each.second]; });
    std::ranges::sort(refused);
    for (const auto& each : refused) {
      const bool waits =
          std::ranges::any_of(queue, [&](const auto& other) { return other.second == each.second; });
      if (reserves && !waits) queue.push_back(each);
    }
    for (std::size_t l = 0; l < sizes.size(); ++l) allowance -= sent[l] ? static_cast<double>(sizes[l]) : 0;

    const auto [next_room, next_left] = with_room(next(allowance));
    std::vector<std::pair<double, std::size_t>> others;
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      if (sizes[l] > 0 && std::ranges::count(next_room, l) == 0) others.emplace_back(values[l], sizes[l]);
    }
    std::ranges::sort(others, std::greater());
    threshold = next_left > 0 ? -infinity : infinity;
    double sum = 0;
    for (const auto& [value, elements] : others) {
      sum += static_cast<double>(elements);
      if (next_left > 0 && sum > next_left) {
        threshold = value;
        break;
      }
    }
    return sent;
  }
};

}  // namespace

TEST_CASE("timing as_ready: a budget is kept, and a layer that did not fit comes before all others") {
  for (std::uint32_t seed = 1; seed < 60; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
    compressor_options options = decided(decision_timing::as_ready);
    options.byte_budget = std::vector<double>{1.0 / 64, 0.125, 0.5, 1}[seed % 4];
    const double share = *options.byte_budget * static_cast<double>(model.elements());
    worker each(model, options);
    literal_queue literal{sizes, share};
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    double sent_elements = 0;
    std::vector<std::uint64_t> deadline(sizes.size());  // 0: does not wait
    for (std::uint64_t step = 1; step <= 80; ++step) {
      CAPTURE(step);
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t l : order) each.accumulate(l, random_integers<float>(random, sizes[l], 1 + l));
      const std::vector<bool> expected = literal.step(step, order, copy_of(each.values()));
      REQUIRE(sent_of(each.select()) == expected);
      REQUIRE_FALSE(each.encode().size_bytes() == 0);
      each.commit();
      sent_elements += static_cast<double>(each.chosen().sent_elements());
      REQUIRE(sent_elements <= share * static_cast<double>(step));
      // A layer goes out once the shares since then add up to what waits before it and itself: at the latest, when they add
      // up to the model.
      double before = 0;
      for (const auto& [since, l] : literal.queue) {
        before += static_cast<double>(sizes[l]);
        const double wait = std::ceil(before / share);
        if (deadline[l] == 0) deadline[l] = step + static_cast<std::uint64_t>(wait);
        REQUIRE(wait <= std::ceil(1 / *options.byte_budget));
        REQUIRE(step < deadline[l]);
      }
      for (std::size_t l = 0; l < sizes.size(); ++l) {
        if (expected[l]) {
          REQUIRE((deadline[l] == 0 || step <= deadline[l]));
          deadline[l] = 0;
        }
      }
    }
  }
}

TEST_CASE("timing as_ready: without reservation a layer whose gradient comes last would starve") {
  // The shares are enough for one layer a step; layer 0 is last in backward.
  const std::vector<std::size_t> sizes(8, 4);
  compressor_options options = decided(decision_timing::as_ready);
  options.byte_budget = 0.125;
  worker each(model_of(sizes), options);
  const auto longest_wait = [&](bool reserves) {
    literal_queue literal{sizes, 4, reserves};
    std::vector<double> values(sizes.size());
    std::uint64_t waits = 0;
    std::uint64_t longest = 0;
    for (std::uint64_t step = 1; step <= 200; ++step) {
      for (double& value : values) value += 1;
      const auto sent = literal.step(step, {7, 6, 5, 4, 3, 2, 1, 0}, values);
      if (reserves) {
        for (std::size_t l = sizes.size(); l-- > 0;) each.accumulate(l, alternating(4, 1));
        REQUIRE(sent_of(each.select()) == sent);
        finish(each, decision_timing::as_ready);
      }
      for (std::size_t l = 0; l < values.size(); ++l) values[l] = sent[l] ? 0 : values[l];
      waits = sent[0] ? 0 : waits + 1;
      longest = std::max(longest, waits);
    }
    return longest;
  };
  CHECK(longest_wait(true) <= 8);
  CHECK(longest_wait(false) > 150);
}

TEST_CASE("timing as_ready: no bound by a layer's own size holds, but from when it is the first that waits") {
  // One element a step and three layers of four: all pass in step 1, and the last has room in step 12, not in 4 + 3.
  compressor_options options = decided(decision_timing::as_ready);
  options.byte_budget = 1.0 / 12;
  worker each(model_of({4, 4, 4}), options);
  std::vector<std::uint64_t> first_sent(3);
  for (std::uint64_t step = 1; step <= 12; ++step) {
    each.accumulate_all(tensors<float>(3, alternating(4, 1)));
    for (std::size_t l = 0; l < 3; ++l) {
      if (each.is_sent(l)) first_sent[l] = step;
    }
    finish(each, decision_timing::as_ready);
  }
  CHECK(first_sent == std::vector<std::uint64_t>{4, 8, 12});
}

TEST_CASE("timing: what goes out whatever its value comes first in a budget, and age counts") {
  for (const decision_timing timing : early) {
    compressor_options options = decided(timing);
    options.byte_budget = 0.25;
    options.always_sent = {3};
    options.max_age = 6;
    std::mt19937 random(41);
    const lamina::layout model = model_of({8, 20, 8, 2});
    worker each(model, options);
    std::vector<std::uint64_t> sent_in(4);
    for (std::uint64_t step = 1; step <= 60; ++step) {
      each.begin_step();
      for (std::size_t l = 0; l < 4; ++l) {
        // Layer 2 has next to no gradient.
        auto gradient = random_integers<float>(random, model.sizes()[l], 9);
        if (l == 2) gradient.assign(8, 0.001F);
        each.accumulate(l, gradient);
        if (each.is_sent(l)) sent_in[l] = step;
        REQUIRE(step - sent_in[l] < 6);
      }
      REQUIRE(each.is_sent(3));
      finish(each, timing);
    }
  }
}

TEST_CASE(
    "timing ahead: the first step sends everything, and its selection is there before its first gradient") {
  worker each(model_of({2, 3, 0}), decided(decision_timing::ahead, 0.9));
  each.begin_step();
  CHECK(each.is_sent(0));
  CHECK(each.is_sent(1));
  CHECK_FALSE(each.is_sent(2));
  CHECK(each.step() == 1);
  accumulate_each(each, tensors<float>{{0, 0}, {1, 2, 3}});
  CHECK(each.select().sent_elements() == 5);  // zeros, too
}

TEST_CASE("timing ahead: R = 0 and R = 1 send everything in every step") {
  for (const double ratio : {0.0, 1.0}) {
    worker each(model_of({2, 3}), decided(decision_timing::ahead, ratio));
    for (int step = 0; step < 4; ++step) {
      each.accumulate_all(tensors<float>{{0, 0}, {1, 2, 3}});
      CHECK(each.chosen().sent_elements() == 5);
      finish(each, decision_timing::ahead);
    }
  }
}

TEST_CASE("timing ahead: what is predicted is what would stay, and a gradient like the last") {
  std::mt19937 random(51);
  const lamina::layout model = model_of({3, 0, 70, 2 * 4096 + 5, 1});
  compressor_options options = decided(decision_timing::ahead, 0.7);
  options.part_elements = 4096;
  worker each(model, options);
  const lamina::partition cut(model, 4096);
  for (int step = 0; step < 8; ++step) {
    const auto gradients = random_gradients<float>(random, model);
    each.begin_step();
    const std::vector<bool> sent = sent_of(each.chosen());
    each.accumulate_all(gradients);
    const auto predicted = copy_of(each.predicted_values());
    for (std::size_t part = 0; part < predicted.size(); ++part) {
      const auto gradient =
          std::span(gradients[cut.layer_of(part)]).subspan(cut.begin(part), cut.parts().sizes()[part]);
      const double value = sent[part] ? 0 : literal_mean_abs<float>(each.residual()[part]);
      REQUIRE(predicted[part] == value + literal_mean_abs<float>(gradient));
    }
    REQUIRE(sent_of(each.select()) == sent);
    finish(each, decision_timing::ahead);
  }
}

TEST_CASE("timing ahead: with gradients that change the selection is not that of at_end") {
  compressor_options options = decided(decision_timing::ahead);
  worker ahead(model_of({1, 1}), options);
  options.decide = decision_timing::at_end;
  worker at_end(model_of({1, 1}), options);
  at_end.accumulate_all(tensors<float>{{1}, {2}});
  at_end.select(std::vector<double>{infinity, infinity});  // everything, as ahead does in its first step
  at_end.encode();
  at_end.commit();
  ahead.accumulate_all(tensors<float>{{1}, {2}});
  finish(ahead, decision_timing::ahead);
  for (worker* each : {&at_end, &ahead}) each->accumulate_all(tensors<float>{{2}, {1}});
  CHECK(sent_of(at_end.select()) == std::vector<bool>{true, false});
  CHECK(sent_of(ahead.select()) == std::vector<bool>{false, true});
}

TEST_CASE("timing ahead: with constant gradients a tie is parted where a mean rounds") {
  // 4/3 + 1/3, each rounded, is less than 5/3: layer 0 goes out a step later than at_end.
  const auto first_sent = [](decision_timing timing) {
    worker each(model_of({3, 3, 3}), decided(timing, 0.7));
    for (std::uint64_t step = 1;; ++step) {
      each.accumulate_all(tensors<float>{{1, 0, 0}, {5, 0, 0}, {0, 0, 0}});
      if (timing == decision_timing::at_end && step == 1) {
        each.select(std::vector<double>(3, infinity));  // everything, as ahead
      } else {
        each.select();
      }
      if (step > 1 && each.is_sent(0)) return step;
      finish(each, timing);
    }
  };
  CHECK(first_sent(decision_timing::at_end) == 6);
  CHECK(first_sent(decision_timing::ahead) == 7);
}

TEST_CASE(
    "timing ahead: a step that fails leaves its selection to the next, and foresees that nothing was sent") {
  worker each(model_of({2, 2}), decided(decision_timing::ahead));
  each.accumulate_all(tensors<float>{{1, 1}, {4, 4}});
  finish(each, decision_timing::ahead);
  each.accumulate_all(tensors<float>{{1, 1}, {4, 4}});
  CHECK(sent_of(each.chosen()) == std::vector<bool>{false, true});
  CHECK(copy_of(each.predicted_values()) == std::vector<double>{2, 4});
  each.abandon();
  CHECK(copy_of(each.predicted_values()) == std::vector<double>{2, 8});
  each.accumulate_all(tensors<float>{{0, 0}, {1, 1}});
  finish(each, decision_timing::ahead);
  const std::vector<double> predicted = copy_of(each.predicted_values());
  each.abandon();  // between steps: what was sent stays sent
  CHECK(copy_of(each.predicted_values()) == predicted);
  worker again(model_of({2, 2}), decided(decision_timing::ahead));
  again.accumulate_all(tensors<float>{{1, 1}, {4, 4}});
  finish(again, decision_timing::ahead);
  again.accumulate_all(tensors<float>{{1, 1}, {4, 4}});
  again.abandon();
  each.load(again.save());

  // In the middle of backward, and again.
  for (int k = 0; k < 2; ++k) {
    each.begin_step();
    CHECK(sent_of(each.chosen()) == std::vector<bool>{false, true});
    each.accumulate(1, std::vector<float>{4, 4});
    CHECK_THROWS_AS(each.predicted_values(), std::logic_error);
    each.abandon();
  }
  each.accumulate_all(tensors<float>{{1, 1}, {4, 4}});
  CHECK(sent_of(each.chosen()) == std::vector<bool>{false, true});
  CHECK(each.residual()[1][0] == 16);
  CHECK_NOTHROW(finish(each, decision_timing::ahead));
  CHECK(each.residual()[0][0] == 2);
  CHECK(each.residual()[1][0] == 0);
}

TEST_CASE("timing ahead: a threshold that is kept is found when the second step begins") {
  compressor_options options = decided(decision_timing::ahead);
  options.refresh = refresh_schedule::every(~std::uint64_t{0});
  worker each(model_of({1, 1}), options);
  for (const float scale : {1.0F, 2.0F, 3.0F}) {
    each.accumulate_all(tensors<float>{{scale}, {4 * scale}});
    finish(each, decision_timing::ahead);
  }
  CHECK(each.threshold() == 4);
}

TEST_CASE("timing ahead: values that are NaN go out first") {
  worker each(model_of({1, 1}), decided(decision_timing::ahead));
  each.accumulate_all(tensors<float>{{1}, {2}});
  each.plan_next(std::vector<double>{std::numeric_limits<double>::quiet_NaN(), 2});
  each.encode();
  each.commit();
  each.begin_step();
  CHECK(sent_of(each.chosen()) == std::vector<bool>{true, false});
}

TEMPLATE_TEST_CASE("timing: nothing is lost, the iterate is the dense one, replicas agree, whatever fails",
                   "", float, double) {
  for (std::uint32_t seed = 1; seed < 17; ++seed) {
    for (const decision_timing timing : early) {
      CAPTURE(seed);
      std::mt19937 random(seed);
      compressor_options options = decided(timing, 0.75);
      if (seed % 4 != 0) options.byte_budget = std::vector<double>{0.05, 0.25, 1}[seed % 3];
      if (seed % 5 == 0) options.max_age = 3;
      cluster<TestType> run(random_model(random), 2, TestType(0.25), compressors<TestType>(options));
      run.plans_ahead = timing == decision_timing::ahead;
      double sent = 0;
      std::uint64_t step = 0;
      for (; step < 25; ++step) {
        const bool fails = random() % 4 == 0;
        run.step(random_gradients_of_all(random, run), fails);
        REQUIRE(conserves(run));
        REQUIRE(follows_dense_iterate(run));
        REQUIRE(replicas_agree(run));
        if (fails) continue;
        REQUIRE(publishes_the_union(run));
        if (run.plans_ahead) REQUIRE(sent_of(run.worker[0].chosen()) == sent_of(run.worker[1].chosen()));
        sent += static_cast<double>(run.worker[0].chosen().sent_elements());
        const double share = options.byte_budget.value_or(1) * static_cast<double>(run.model.elements());
        if (options.max_age == 0) REQUIRE(sent <= share * static_cast<double>(step + 1));
      }
      REQUIRE(sent > 0);
    }
  }
}

TEST_CASE("timing: parts of layers are conserved, also when a frame is encoded again") {
  for (const decision_timing timing : early) {
    std::mt19937 random(61);
    const lamina::layout model = model_of({3 * 4096 + 7, 20, 0, 2 * 4096});
    compressor_options options = decided(timing, 0.8);
    options.part_elements = 4096;
    worker each(model, options);
    std::vector<float> computed(model.elements());
    std::vector<float> received(model.elements());
    for (int step = 0; step < 25; ++step) {
      const auto gradients = random_gradients<float>(random, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        for (std::size_t i = 0; i < gradients[l].size(); ++i)
          computed[model.offset(l) + i] += gradients[l][i];
      }
      each.accumulate_all(gradients);
      if (timing == decision_timing::ahead) each.plan_next(copy_of(each.predicted_values()));
      const auto lost = each.encode().to_bytes();
      const auto bytes = each.encode().to_bytes();
      REQUIRE(bytes == lost);
      const auto frame = lamina::decode<float>(bytes, each.parts());
      for (std::size_t part = 0; part < each.parts().layers(); ++part) {
        REQUIRE(frame.is_dropped(part) == !each.is_sent(part));
        for (std::size_t i = 0; i < frame.layer(part).size(); ++i)
          received[each.parts().offset(part) + i] += frame.layer(part)[i];
      }
      each.commit();
      const auto residual = each.residual().elements();
      for (std::size_t i = 0; i < computed.size(); ++i) REQUIRE(received[i] + residual[i] == computed[i]);
    }
  }
}

namespace {
template <class G>
G as_gradient(float number) {
  if constexpr (std::is_same_v<G, float>) {
    return number;
  } else {
    return lamina::saturating_round<G>(number);
  }
}
}  // namespace

TEMPLATE_TEST_CASE("timing ahead: pack_ahead() writes what pack() writes once the gradients are added", "",
                   float, lamina::bfloat16) {
  for (std::uint32_t seed = 1; seed < 25; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = model_of({3 * 4096 + 7, 20, 0, 2 * 4096, 70});
    compressor_options options = decided(decision_timing::ahead, 0.6);
    options.part_elements = seed % 2 == 0 ? 4096 : 0;
    options.momentum = seed % 3 == 0 ? 0.875 : 0;
    options.check = seed % 5 == 0 ? lamina::finite_check::whole_layer : lamina::finite_check::each_element;
    const double scale = seed % 4 == 0 ? 0.125 : 1;
    const bool overflows = options.check == lamina::finite_check::each_element && seed % 4 == 1;
    const auto gradients_of_step = [&] {
      std::vector<std::vector<TestType>> gradients;
      for (const std::size_t size : model.sizes()) {
        std::vector<TestType>& layer = gradients.emplace_back();
        for (const float each : random_integers<float>(random, size, 1000))
          layer.push_back(as_gradient<TestType>(each));
        if (overflows && size > 0) layer[3] = as_gradient<TestType>(3e38F);  // two of them are too many
      }
      return gradients;
    };
    worker each(model, options);
    bool some_waited = false;
    for (int step = 0; step < 8; ++step) {
      const auto gradients = gradients_of_step();
      each.begin_step();
      std::vector<float> ahead(each.chosen().sent_elements());
      const auto foresee = [&] {
        std::size_t filled = 0;
        for (std::size_t l = 0; l < model.layers(); ++l) {
          std::size_t elements = 0;
          for (std::size_t part = each.cut().first(l); part < each.cut().first(l + 1); ++part)
            elements += each.is_sent(part) ? each.parts().sizes()[part] : 0;
          const auto to = std::span(ahead).subspan(filled, elements);
          REQUIRE(each.pack_ahead(l, gradients[l], to, 3.0F, scale) == elements);
          filled += elements;
        }
        REQUIRE(filled == ahead.size());
      };
      const auto before =
          std::vector<float>(each.residual().elements().begin(), each.residual().elements().end());
      foresee();
      REQUIRE(same_bits(std::span<const float>(before), each.residual().elements()));
      if (step == 5) {  // a bad batch on another worker: nothing of it is there
        each.abandon();
        REQUIRE(same_bits(std::span<const float>(before), each.residual().elements()));
        each.begin_step();
        ahead.resize(each.chosen().sent_elements());
        foresee();
      }
      each.accumulate_all(gradients, scale);
      each.plan_next(copy_of(each.predicted_values()));
      each.select();
      std::vector<float> packed(each.chosen().sent_elements());
      each.pack(packed, 3.0F);
      REQUIRE(same_bits(std::span<const float>(ahead), std::span<const float>(packed)));
      some_waited = some_waited || each.chosen().sent_elements() < model.elements();
      each.commit();
    }
    CHECK(some_waited);
    CHECK((each.residual().left_out_elements() > 0) == overflows);
  }
}

TEST_CASE("timing ahead: what pack_ahead() rounds is what a frame rounds, and the rest of it stays") {
  std::mt19937 random(5);
  const lamina::layout model = model_of({4096 + 7, 20, 0, 70});
  compressor_options options = decided(decision_timing::ahead, 0.6);
  options.payload = lamina::payload_type::bfloat16;
  worker each(model, options);
  std::vector<double> computed(model.elements());
  std::vector<double> received(model.elements());
  for (int step = 0; step < 12; ++step) {
    tensors<float> gradients;
    for (const std::size_t size : model.sizes()) {
      gradients.push_back(random_integers<float>(random, size, 1000));  // more digits than bfloat16 has
    }
    each.begin_step();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      for (std::size_t i = 0; i < gradients[l].size(); ++i)
        computed[model.offset(l) + i] += static_cast<double>(gradients[l][i]);
      std::vector<lamina::bfloat16> sent(each.is_sent(l) ? gradients[l].size() : 0);
      REQUIRE(each.pack_ahead(l, gradients[l], std::span(sent)) == sent.size());
      for (std::size_t i = 0; i < sent.size(); ++i)
        received[model.offset(l) + i] += static_cast<double>(lamina::detail::widened<float>(sent[i]));
    }
    each.accumulate_all(gradients);
    each.plan_next(copy_of(each.predicted_values()));
    each.encode();
    each.commit();
    const auto residual = each.residual().elements();
    for (std::size_t i = 0; i < computed.size(); ++i)
      REQUIRE(received[i] + static_cast<double>(residual[i]) == computed[i]);
  }
  // Elements that are not of the payload would be taken out of the residual otherwise than they were sent.
  each.begin_step();
  std::vector<float> whole(each.is_sent(1) ? 20 : 0);
  const auto message = message_of<std::invalid_argument>(
      [&] { each.pack_ahead(1, std::vector<float>(20), std::span(whole)); });
  CHECK(contains(message, "options.payload"));
}

TEST_CASE("timing ahead: pack_ahead() refuses by name what it cannot foresee") {
  const lamina::layout model = model_of({4, 2});
  const std::vector<float> gradient(4, 1.0F);
  std::vector<float> to(4);
  const auto refused = [&](worker& each, const char* named, std::size_t room = 4, float divisor = 1,
                           double scale = 1) {
    const auto message = message_of<std::logic_error>(
        [&] { each.pack_ahead(0, gradient, std::span(to).first(room), divisor, scale); });
    CHECK(contains(message, named));
  };
  worker at_end(model, decided(decision_timing::at_end));
  at_end.begin_step();
  refused(at_end, "not ahead");
  worker each(model, decided(decision_timing::ahead));
  refused(each, "begin_step()");
  each.begin_step();
  refused(each, "room for 3 elements, 4 of layer 'layer0'", 3);
  refused(each, "divisor", 4, 0);
  refused(each, "scale", 4, 1, infinity);
  CHECK(contains(message_of<std::invalid_argument>([&] { each.pack_ahead(1, gradient, to); }), "'layer1'"));
  CHECK_THROWS_AS(each.pack_ahead(2, gradient, to), std::out_of_range);
  CHECK(each.pack_ahead(0, gradient, to) == 4);
  each.accumulate(0, gradient);
  refused(each, "before accumulate()");
  each.accumulate(1, std::vector<float>(2));
  each.select();
  refused(each, "begin_step()");
}

TEST_CASE("timing: a commit of each layer before its send would lose what a failed step has sent") {
  const lamina::layout model = model_of({2});
  compressor_options options = decided(decision_timing::as_ready);
  lamina::residual_accumulator<float> residual(model);
  lamina::layer_selector selector(model, options);
  worker each(model, options);
  const std::vector<float> gradient = {1, 2};
  // The broken variant clears a layer when it is decided; then the send fails.
  selector.begin(1);
  selector.decide_layer(0, residual.accumulate(0, gradient));
  REQUIRE(selector.chosen().is_sent(0));
  residual.clear(0);
  each.accumulate(0, gradient);
  REQUIRE(each.is_sent(0));
  each.abandon();
  CHECK(residual[0][1] == 0);         // computed and neither sent nor kept
  CHECK(each.residual()[0][1] == 2);  // still there
}

TEST_CASE("timing as_ready: an abandoned step forgets neither who waits nor what was added") {
  compressor_options options = decided(decision_timing::as_ready);
  options.byte_budget = 0.5;
  worker each(model_of({4, 4}), options);
  each.accumulate(0, alternating(4, 1));
  each.accumulate(1, alternating(4, 1));
  CHECK(each.is_sent(0));
  CHECK_FALSE(each.is_sent(1));
  finish(each, decision_timing::as_ready);
  each.begin_step();
  each.accumulate(0, alternating(4, 9));
  CHECK_FALSE(each.is_sent(0));  // the share is that of layer 1
  each.abandon();
  each.accumulate(0, alternating(4, 9));
  each.accumulate(1, alternating(4, 1));
  CHECK(each.is_sent(1));
  CHECK(each.residual()[0][0] == 18);
  CHECK(each.residual()[1][0] == 2);
}

TEST_CASE("timing: a step that is abandoned before its first gradient has not begun") {
  std::mt19937 random(7);
  for (const decision_timing timing :
       {decision_timing::at_end, decision_timing::as_ready, decision_timing::ahead}) {
    for (const bool has_budget : {false, true}) {
      compressor_options options = decided(timing, has_budget ? 0 : 0.7);
      if (has_budget) options.byte_budget = 0.3;
      options.warm_up_steps = has_budget ? 0 : 8;
      options.max_age = 4;
      worker each(model_of({5, 0, 3, 9}), options);
      worker other(model_of({5, 0, 3, 9}), options);
      for (std::uint64_t step = 1; step <= 12; ++step) {
        INFO("timing " << static_cast<int>(timing) << ", step " << step);
        const std::vector<std::byte> before = each.save();
        const double threshold = each.threshold();
        for (int k = 0; k < 2; ++k) {
          each.begin_step();
          CHECK(each.step() == step);
          each.abandon();
          CHECK(each.step() == step - 1);
          CHECK(each.save() == before);
          CHECK(each.threshold() == threshold);
        }
        tensors<float> gradients;
        for (const std::size_t size : each.model().sizes())
          gradients.push_back(random_fractions<float>(random, size));
        each.accumulate_all(gradients);
        other.accumulate_all(gradients);
        finish(each, timing);
        finish(other, timing);
        CHECK(each.save() == other.save());
      }
      each.begin_step();
      each.skip(0);
      each.abandon();
      CHECK(each.step() == 13);  // something happened in it
    }
  }
}

TEST_CASE("timing: a refused gradient leaves its layer undecided") {
  for (const decision_timing timing : early) {
    worker each(model_of({1, 1}), decided(timing));
    const std::vector<float> bad = {std::numeric_limits<float>::infinity()};
    CHECK_THROWS_AS(each.accumulate(0, bad), lamina::non_finite_gradient);
    CHECK(each.step() == 0);
    CHECK_FALSE(each.is_decided(0));
    each.accumulate(1, std::vector<float>{1});
    CHECK_THROWS_AS(each.accumulate(0, bad), lamina::non_finite_gradient);
    CHECK(each.is_decided(0) == (timing == decision_timing::ahead));
    each.accumulate(0, std::vector<float>{3});
    CHECK(each.is_sent(0));
    CHECK(each.residual()[0][0] == 3);
  }
}

TEST_CASE("timing: at_end a step may be begun by itself, too, and is decided when it is selected") {
  worker each(model_of({1}), decided(decision_timing::at_end));
  CHECK_FALSE(each.is_decided(0));
  each.begin_step();
  CHECK(each.step() == 1);
  each.accumulate(0, std::vector<float>{1});
  CHECK(each.step() == 1);
  CHECK_FALSE(each.is_decided(0));
  CHECK_THROWS_AS(each.is_sent(0), std::logic_error);
  each.encode();
  CHECK(each.is_sent(0));
  each.commit();
  CHECK(each.is_sent(0));
  each.begin_step();
  CHECK_FALSE(each.is_decided(0));
}

TEST_CASE("timing: a call that does not belong there is refused by name, and changes nothing") {
  const std::vector<double> values = {1, 1};
  const tensors<float> gradients = {{1}, {2}};
  const auto refused = [](const auto& call, const char* named) {
    CHECK(contains(message_of<std::logic_error>(call), named));
  };
  for (const decision_timing timing : early) {
    worker each(model_of({1, 1}), decided(timing));
    each.begin_step();
    refused([&] { each.begin_step(); }, "step 1 has begun");
    each.accumulate_all(gradients);
    refused([&] { each.accumulate(1, gradients[1]); },
            timing == decision_timing::ahead ? "one piece" : "expect_more_pieces(true)");
    refused([&] { each.accumulate_all(gradients); }, "'layer0'");
    std::error_code error;
    each.accumulate(1, gradients[1], error);
    CHECK(error == lamina::errc::out_of_order);
    CHECK(each.residual()[1][0] == 2);
    const char* const instead = timing == decision_timing::ahead ? "plan_next()" : "as_ready";
    refused([&] { each.select(values); }, instead);
    refused([&] { each.select(values, std::vector<char>{1, 0}); }, instead);
    CHECK_THROWS_AS(each.is_sent(2), std::out_of_range);
  }
  for (const decision_timing timing : {decision_timing::at_end, decision_timing::as_ready}) {
    worker each(model_of({1, 1}), decided(timing));
    each.accumulate_all(gradients);
    refused([&] { (void)each.predicted_values(); }, "not ahead");
    refused([&] { each.plan_next(values); }, "not ahead");
  }

  worker ahead(model_of({1, 1}), decided(decision_timing::ahead));
  refused([&] { ahead.plan_next(values); }, "has no gradient");
  ahead.accumulate(0, gradients[0]);
  refused([&] { (void)ahead.predicted_values(); }, "'layer1'");
  ahead.accumulate(1, gradients[1]);
  CHECK_THROWS_AS(ahead.plan_next(std::vector<double>{1}), std::invalid_argument);
  ahead.encode();
  ahead.commit();
  refused([&] { ahead.begin_step(); }, "plan_next()");
  refused([&] { ahead.accumulate(0, gradients[0]); }, "step 2");
  refused([&] { ahead.accumulate_all(gradients); }, "step 2");
  refused([&] { ahead.skip(0); }, "step 2");
  refused([&] { (void)ahead.save(); }, "plan_next()");
  CHECK(ahead.step() == 1);
  CHECK(ahead.residual()[0][0] == 0);
  ahead.plan_next(values);
  CHECK_NOTHROW(ahead.begin_step());
}

TEST_CASE("timing: skipped layers are decided as any other") {
  for (const decision_timing timing : early) {
    worker each(model_of({1, 1}), decided(timing));
    each.accumulate_all(tensors<float>{{1}, {2}});
    finish(each, timing);
    each.accumulate_all(tensors<float>{{1}, {2}});
    CHECK_FALSE(each.is_sent(0));
    finish(each, timing);
    each.skip(1);
    each.accumulate(0, std::vector<float>{1});
    if (timing == decision_timing::ahead) {
      CHECK(copy_of(each.predicted_values()) == std::vector<double>{each.is_sent(0) ? 1.0 : 3.0, 0});
    } else {
      CHECK(each.is_sent(0));  // 2, which is the threshold
      CHECK_FALSE(each.is_sent(1));
    }
    each.skip(0);  // has a gradient already: nothing changes
    CHECK_NOTHROW(finish(each, timing));
  }
}
