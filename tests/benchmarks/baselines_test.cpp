// SPDX-License-Identifier: MIT
// The methods that lamina is measured against do what their papers say: the property that defines each.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "baselines/adacomp.hpp"
#include "baselines/block_sparse.hpp"
#include "baselines/fp8.hpp"
#include "baselines/one_bit.hpp"
#include "baselines/one_pass_threshold.hpp"
#include "baselines/power_sgd.hpp"
#include "baselines/random_k.hpp"
#include "baselines/terngrad.hpp"
#include "baselines/thresholds.hpp"
#include "baselines/top_k.hpp"
#include "catch.hpp"

using namespace lamina_baselines;

namespace {

using numbers = std::vector<float>;

const lamina::layout model(
    {{"conv", {8, 4, 3, 3}}, {"bias", {8}}, {"empty", {0}}, {"head", {10, 333}}, {"scale", {}}});

// Integers, so that sums are exact; ties are many.
numbers integer_gradient(unsigned seed, std::size_t elements = model.elements()) {
  std::mt19937 random(seed);
  numbers gradient(elements);
  for (float& each : gradient) each = static_cast<float>(static_cast<int>(random() % 201) - 100);
  return gradient;
}

// Of one law of magnitudes, with random signs.
template <class Law>
numbers drawn(std::size_t elements, Law law, unsigned seed = 7) {
  std::mt19937 random(seed);
  numbers result(elements);
  for (float& each : result) each = static_cast<float>(law(random)) * (random() % 2 == 0 ? 1.0F : -1.0F);
  return result;
}

// What of this gradient, and of the residual, all receive.
numbers sent_of(method& worker, const numbers& gradient) {
  worker.step(gradient);
  numbers sum(gradient.size());
  worker.receive(sum);
  return sum;
}

void add_to(numbers& sum, const numbers& addend) {
  std::ranges::transform(sum, addend, sum.begin(), std::plus<>());
}

std::span<const float> layer(const numbers& all, std::size_t l, const lamina::layout& of = model) {
  return std::span(all).subspan(of.offset(l), of.sizes()[l]);
}

// The magnitudes, the largest first.
numbers ordered(std::span<const float> values) {
  numbers result(values.size());
  std::ranges::transform(values, result.begin(), [](float x) { return std::abs(x); });
  std::ranges::sort(result, std::greater<>());
  return result;
}

std::size_t nonzero(std::span<const float> values) {
  return values.size() - static_cast<std::size_t>(std::ranges::count(values, 0.0F));
}

}  // namespace

TEST_CASE(
    "baselines: what was received and the residual are the sum of the gradients, exactly where nothing "
    "rounds") {
  std::map<std::string, std::unique_ptr<method>> methods;
  for (const double fraction : {0.001, 0.05, 0.5, 1.0}) {
    const std::string share = std::to_string(fraction);
    methods[share + " top-k"] = std::make_unique<top_k>(model, fraction);
    methods[share + " sampled top-k"] = std::make_unique<sampled_top_k>(model, fraction);
    methods[share + " one pass"] = std::make_unique<one_pass_threshold>(model, fraction);
    methods[share + " random-k"] = std::make_unique<random_k>(model, fraction);
    methods[share + " block-sparse"] = std::make_unique<block_sparse>(model, fraction, 64);
  }
  methods["1-bit"] = std::make_unique<one_bit>(model);
  methods["AdaComp"] = std::make_unique<adacomp>(model);
  methods["fp8"] = std::make_unique<fp8>(model);
  for (const std::size_t rank : {1, 4})
    methods["PowerSGD " + std::to_string(rank)] = std::make_unique<power_sgd>(model, rank);
  const std::set<std::string> rounds = {"1-bit", "AdaComp", "fp8", "PowerSGD 1", "PowerSGD 4"};
  for (const auto& [name, worker] : methods) {
    INFO(name);
    const double tolerance = rounds.contains(name) ? 1e-2 : 0;
    numbers gradients(model.elements());
    numbers total(model.elements());
    for (unsigned step = 1; step <= 20; ++step) {
      const numbers gradient = integer_gradient(step);
      add_to(gradients, gradient);
      const numbers now = sent_of(*worker, gradient);
      // A threshold of the step before may leave nothing of layers this small.
      if (!name.ends_with("one pass")) REQUIRE(nonzero(now) > 0);
      add_to(total, now);
    }
    REQUIRE(worker->residual().size() == model.elements());
    for (std::size_t i = 0; i < total.size(); ++i)
      REQUIRE(std::abs(double{total[i]} + worker->residual()[i] - gradients[i]) <= tolerance);
  }
}

TEST_CASE("baselines: top-k sends the k largest of each layer and k of them where there are ties") {
  const double fraction = GENERATE(0.001, 0.05, 0.5, 1.0);
  top_k worker(model, fraction);
  const numbers gradient = integer_gradient(3);
  const numbers sent = sent_of(worker, gradient);
  std::size_t kept = 0;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const auto keep = static_cast<std::size_t>(std::ceil(fraction * static_cast<double>(model.sizes()[l])));
    numbers largest = ordered(layer(gradient, l));
    std::fill(largest.begin() + static_cast<std::ptrdiff_t>(keep), largest.end(), 0.0F);
    REQUIRE(ordered(layer(sent, l)) == largest);
    kept += keep;
  }
  // A count for each layer, and an index and a number for each element.
  REQUIRE(worker.message_bytes() <= 4 * model.layers() + 8 * kept);
}

TEST_CASE("baselines: sampled top-k sends about as much as asked for, and never more than 1.3 times") {
  const lamina::layout one({{"layer", {400'000}}});
  const numbers gradient = drawn(one.elements(), std::exponential_distribution<double>());
  for (const double fraction : {0.001, 0.01, 0.05, 0.5}) {
    sampled_top_k worker(one, fraction);
    const std::size_t kept = nonzero(sent_of(worker, gradient));
    const double share = static_cast<double>(kept) / static_cast<double>(one.elements());
    REQUIRE(share < 1.3001 * fraction);
    REQUIRE(share > 0.5 * fraction);
    // A count, the numbers, and what is smaller, indices or a bitmap.
    REQUIRE(worker.message_bytes() == 4 + 4 * kept + std::min<std::size_t>(4 * kept, 50'000));
  }
  // All samples are zero, so that all elements are at or above the threshold: the exact selection among them decides.
  numbers misleading(one.elements());
  for (std::size_t i = 0; i < 4'000; ++i) misleading[100 * i] = 1.0F + static_cast<float>(i);
  sampled_top_k worker(one, 0.001);
  const numbers sent = sent_of(worker, misleading);
  REQUIRE(nonzero(sent) == 400);
  REQUIRE(std::ranges::all_of(sent, [](float x) { return x == 0 || x > 3'600; }));
}

TEST_CASE("baselines: one pass takes what a threshold leaves, and finds the share in a few steps") {
  const lamina::layout one({{"layer", {30'003}}, {"small", {5}}});
  for (const double fraction : {0.05, 0.5}) {
    one_pass_threshold worker(one, fraction);
    numbers last;
    std::size_t of_first = 0;  // elements of the first layer that go out in a step
    for (unsigned step = 1; step <= 40; ++step) {
      last = sent_of(worker, drawn(one.elements(), std::exponential_distribution<double>(), step));
      of_first = nonzero(std::span(last).first(30'003));
      // Nothing that stayed is as large as anything that went.
      const float smallest = of_first == 0 ? 1e9F : ordered(std::span(last).first(30'003))[of_first - 1];
      REQUIRE(ordered(std::span(worker.residual()).first(30'003)).front() <= smallest);
    }
    const double share = static_cast<double>(of_first) / 30'003;
    REQUIRE(share > 0.85 * fraction);
    REQUIRE(share < 1.15 * fraction);
    const std::size_t kept = nonzero(last);
    REQUIRE(worker.message_bytes() == 4 * kept + 2 * 4 + std::min<std::size_t>(4 * of_first, 3'751) +
                                          std::min<std::size_t>(4 * (kept - of_first), 1));
    // 5 % are 8.1 % as a bitmap and numbers, and about 5.9 % at the entropy of their places.
    REQUIRE(worker.entropy_bytes() < static_cast<double>(worker.message_bytes()));
    if (fraction == 0.05) REQUIRE(std::abs(worker.entropy_bytes() / (4.0 * 30'008) - share - 0.009) < 0.001);
  }
}

TEST_CASE("baselines: PowerSGD finds a matrix of its rank, and sends so much of each layer") {
  const lamina::layout one({{"matrix", {30, 5, 8}}, {"bias", {7}}});
  const std::normal_distribution<double> law;
  numbers gradient = drawn(one.elements(), law);
  const numbers left = drawn(2 * 30, law, 1);
  const numbers right = drawn(2 * 40, law, 2);
  for (std::size_t i = 0; i < 1200; ++i)
    gradient[i] = left[i / 40] * right[i % 40] + left[30 + i / 40] * right[40 + i % 40];
  const auto error_of = [&](std::size_t rank) {
    power_sgd worker(one, rank);
    const numbers sent = sent_of(worker, gradient);
    REQUIRE(worker.message_bytes() == 4 * (rank * (30 + 40) + 7));
    double squares = 0;
    for (std::size_t i = 0; i < sent.size(); ++i) squares += std::pow(double{sent[i]} - gradient[i], 2);
    return std::sqrt(squares);
  };
  REQUIRE(error_of(1) > 1);
  REQUIRE(error_of(2) < 1e-3);
  REQUIRE_THROWS_AS(power_sgd(one, 0), std::invalid_argument);
}

TEST_CASE("baselines: an 8-bit float is the nearest one, whatever the number") {
  std::vector<float> all;
  for (unsigned code = 0; code < 0x7f; ++code) all.push_back(fp8::value_of(code));
  REQUIRE(all.front() == 0);
  REQUIRE(all[1] == 1.0F / 512);
  REQUIRE(all.back() == 448);
  REQUIRE(std::ranges::is_sorted(all));
  std::mt19937 random(9);
  for (int i = 0; i < 10'000; ++i) {
    const float x =
        std::ldexp(static_cast<float>(random() % 65536) / 65536.0F, static_cast<int>(random() % 20) - 11);
    if (x > 448) continue;
    const float back = fp8::value_of(fp8::code_of(-x));
    const float nearest = std::ranges::min(all, {}, [&](float each) { return std::abs(each - x); });
    REQUIRE(std::abs(-back - x) == std::abs(nearest - x));
  }
}

TEST_CASE("baselines: 1-bit sends means of a row that keep its sum, and the sign of each element") {
  one_bit worker(model);
  const numbers gradient = integer_gradient(5);
  const numbers sent = sent_of(worker, gradient);
  for (std::size_t begin = 0; begin < 8 * 36; begin += 36) {  // rows of "conv"
    std::set<float> values;
    float sum = 0;
    float sum_sent = 0;
    for (std::size_t i = begin; i < begin + 36; ++i) {
      values.insert(sent[i]);
      sum += gradient[i];
      sum_sent += sent[i];
      REQUIRE((sent[i] > 0) == (gradient[i] >= 0));
    }
    REQUIRE(values.size() == 2);
    REQUIRE(sum_sent == Approx(sum).margin(1e-3));
  }
  // A bit an element and two means a row: 8 rows of 36, one of 8, 10 of 333 and one of one element.
  REQUIRE(worker.message_bytes() == 8 * (8 + 5) + (8 + 1) + 10 * (8 + 42) + (8 + 1));
}

TEST_CASE("baselines: TernGrad sends -s, 0 or s, and the gradient on average") {
  constexpr int draws = 4'000;
  const lamina::layout one({{"layer", {64}}});
  const numbers gradient = integer_gradient(9, one.elements());
  const float largest = ordered(gradient).front();
  terngrad worker(one, std::numeric_limits<double>::infinity());
  numbers sum(one.elements());
  for (int i = 0; i < draws; ++i) {
    const numbers now = sent_of(worker, gradient);
    for (const float each : now) REQUIRE((each == 0 || std::abs(each) == largest));
    add_to(sum, now);
  }
  for (std::size_t i = 0; i < sum.size(); ++i) {
    REQUIRE(std::abs(sum[i] / draws - gradient[i]) < 5 * largest / 2 / std::sqrt(draws));  // five deviations
  }
  REQUIRE(worker.residual().empty());
  REQUIRE(worker.message_bytes() == 4 + 64 / 4);

  // Clipped: one outlier does not set the scale.
  numbers outlier(one.elements(), 1.0F);
  outlier[17] = 1e6F;
  terngrad clipping(one);
  REQUIRE(std::ranges::max(sent_of(clipping, outlier)) < 4e5F);
}

TEST_CASE(
    "baselines: AdaComp sends where the residual and the gradient once more reach the largest of the bin") {
  adacomp worker(model);
  numbers residual(model.elements());
  for (unsigned step = 1; step <= 5; ++step) {
    const numbers gradient = integer_gradient(20 + step);
    add_to(residual, gradient);
    const numbers sent = sent_of(worker, gradient);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::size_t bin = model[l].shape.size() == 4 ? 50 : 500;
      std::set<float> scales;
      double mean = 0;
      for (std::size_t begin = 0; begin < model.sizes()[l]; begin += bin) {
        const auto elements = layer(residual, l).subspan(begin, std::min(bin, model.sizes()[l] - begin));
        const float largest = ordered(elements).front();
        mean += largest;
        for (std::size_t i = 0; i < elements.size(); ++i) {
          const std::size_t at = begin + i;
          const bool reaches = std::abs(elements[i] + layer(gradient, l)[at]) >= largest;
          REQUIRE((layer(sent, l)[at] != 0) == reaches);
          if (!reaches) continue;
          REQUIRE((layer(sent, l)[at] < 0) == (elements[i] < 0));
          scales.insert(std::abs(layer(sent, l)[at]));
        }
      }
      if (model.sizes()[l] == 0) continue;
      const auto bins = static_cast<double>((model.sizes()[l] + bin - 1) / bin);
      REQUIRE(scales.size() == 1);
      REQUIRE(*scales.begin() == Approx(mean / bins));
    }
    std::ranges::copy(worker.residual(), residual.begin());
  }
}

TEST_CASE("baselines: random-k sends k elements, all equally often, and no indices") {
  const double fraction = GENERATE(0.05, 0.5, 0.9, 1.0);
  const lamina::layout one({{"layer", {200}}});
  const numbers ones(one.elements(), 1.0F);
  const auto keep = static_cast<std::size_t>(std::lround(200 * fraction));
  std::vector<int> times(one.elements());
  constexpr int draws = 4'000;
  for (unsigned seed = 0; seed < draws; ++seed) {
    random_k worker(one, fraction, seed);
    const numbers sent = sent_of(worker, ones);
    REQUIRE(nonzero(sent) == keep);
    for (std::size_t i = 0; i < sent.size(); ++i) times[i] += sent[i] != 0 ? 1 : 0;
    REQUIRE(worker.message_bytes() == 8 + 4 * keep);
  }
  const double deviation = std::sqrt(draws * fraction * (1 - fraction));
  for (const int each : times) REQUIRE(std::abs(each - draws * fraction) <= 5 * deviation);
}

TEST_CASE(
    "baselines: block-sparse sends the blocks with the largest norms, whole, as one of lamina's frames") {
  block_sparse worker(model, 0.1, 64);
  const numbers gradient = integer_gradient(11);
  const numbers sent = sent_of(worker, gradient);
  const lamina::layout& blocks = worker.blocks();
  REQUIRE(blocks.elements() == model.elements());
  const auto keep = static_cast<std::size_t>(std::ceil(0.1 * static_cast<double>(blocks.layers())));
  numbers norms;
  numbers sent_norms;
  std::size_t sent_elements = 0;
  for (std::size_t b = 0; b < blocks.layers(); ++b) {
    const auto before = layer(gradient, b, blocks), after = layer(sent, b, blocks);
    norms.push_back(std::inner_product(before.begin(), before.end(), before.begin(), 0.0F));
    if (nonzero(after) == 0) continue;
    REQUIRE(std::ranges::equal(before, after));
    sent_norms.push_back(norms.back());
    sent_elements += before.size();
  }
  norms = ordered(norms);
  norms.resize(keep);
  REQUIRE(ordered(sent_norms) == norms);
  REQUIRE(worker.message_bytes() ==
          128 + 4 * sent_elements);  // header and bitmap, as docs/wire-format.md has it
}

TEST_CASE(
    "baselines: the exact threshold keeps exactly so many, and each estimate is near where its assumption "
    "holds") {
  std::vector<float> scratch;
  constexpr std::size_t count = 200'000;
  const numbers normal = drawn(count, std::normal_distribution<double>());
  const numbers exponential = drawn(count, std::exponential_distribution<double>());
  for (const double fraction : {0.01, 0.05, 0.5}) {
    INFO(fraction);
    const auto keep = static_cast<std::size_t>(fraction * count);
    const auto kept = [&](const numbers& elements, float threshold) {
      return static_cast<double>(count_at_or_above(elements, threshold)) / static_cast<double>(keep);
    };
    for (const numbers& elements : {normal, exponential}) {  // these two assume nothing
      // Of a sample of every 100th: four deviations of how many of the kept are in it.
      const double deviation = 1 / std::sqrt(static_cast<double>(keep) / 100);
      REQUIRE(kept(elements, sampled_threshold(elements, keep, scratch)) == Approx(1).margin(4 * deviation));
      REQUIRE(kept(elements, histogram_threshold(elements, keep)) >= 1);
      // An eighth of an octave at the tail of the normal law.
      REQUIRE(kept(elements, histogram_threshold(elements, keep)) < 3.5);
    }
    REQUIRE(kept(normal, gaussian_threshold(normal, keep)) == Approx(1).margin(0.05));
    REQUIRE(kept(exponential, exponential_threshold(exponential, keep, scratch)) == Approx(1).margin(0.1));
  }
  const numbers some = drawn(10'007, std::normal_distribution<double>());
  for (const std::size_t keep : {1U, 10U, 5'000U, 10'007U})
    REQUIRE(count_at_or_above(some, exact_threshold(some, keep, scratch)) == keep);
  // All zero: every threshold is zero, and keeps all.
  const numbers zeros(100);
  REQUIRE(exact_threshold(zeros, 3, scratch) == 0);
  REQUIRE(gaussian_threshold(zeros, 3) == 0);
  REQUIRE(exponential_threshold(zeros, 3, scratch) == 0);
  REQUIRE(histogram_threshold(zeros, 3) == 0);
}
