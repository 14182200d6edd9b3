// SPDX-License-Identifier: MIT
// The invariants of docs/algorithm.md as properties of random models, gradients, options and numbers of workers. What fails is
// made smaller and printed with a line that repeats it: RC_PARAMS="reproduce=..." in the environment.
#include <rapidcheck.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "invariants.hpp"
#include "lamina/lamina.hpp"

using namespace lamina_test;
using lamina::worker_options;

namespace {

// Some elements, none, one, around rows of 64 and blocks of 4,096; at least one layer is not empty.
std::vector<std::size_t> some_sizes() {
  const auto size =
      rc::gen::weightedOneOf<std::size_t>({{5, rc::gen::inRange<std::size_t>(1, 41)},
                                           {2, rc::gen::element<std::size_t>(0, 1)},
                                           {1, rc::gen::element<std::size_t>(63, 64, 65, 129)},
                                           {1, rc::gen::element<std::size_t>(4095, 4096, 4097, 8193)}});
  std::vector<std::size_t> sizes = *rc::gen::container<std::vector<std::size_t>>(size);
  sizes.push_back(*rc::gen::inRange<std::size_t>(1, 41));
  return sizes;
}

std::mt19937 some_random() {
  return std::mt19937(*rc::gen::arbitrary<std::uint32_t>());
}

// A multiple of 1/64, so that R·N is exact.
double some_ratio() {
  return *rc::gen::inRange(1, 64) / 64.0;
}

// Numbers whose inverse is exact.
std::size_t some_workers() {
  return *rc::gen::element<std::size_t>(1, 2, 4, 8);
}

// All but momentum, with which what is sent is no sum of gradients.
worker_options some_options() {
  worker_options options;
  options.drop_ratio = some_ratio();
  options.warm_up_steps = *rc::gen::inRange<std::uint64_t>(0, 6);
  options.search_every = *rc::gen::inRange<std::uint64_t>(1, 5);
  if (*rc::gen::inRange(0, 4) == 0) options.threshold = *rc::gen::inRange(0, 20);
  if (*rc::gen::arbitrary<bool>()) options.send_budget = some_ratio();
  options.at_least_every = *rc::gen::element<std::uint64_t>(0, 0, 1, 3);
  options.by_score = *rc::gen::arbitrary<bool>();
  if (*rc::gen::arbitrary<bool>()) options.non_finite = lamina::non_finite::skip;
  return options;
}

constexpr int steps = 6;

// Runs a cluster and calls `after_step` after each step.
template <class T, class AfterStep>
void run_steps(cluster<T>& run, const AfterStep& after_step) {
  std::mt19937 random = some_random();
  for (int step = 1; step <= steps; ++step) {
    run.step(random_gradients_of_all(random, run));
    after_step(step);
  }
}

template <class T>
cluster<T> some_cluster(const worker_options& options) {
  return cluster<T>(model_of(some_sizes()), some_workers(), T(0.25), workers_of<T>(options));
}

}  // namespace

TEMPLATE_TEST_CASE("property 1, 2, 6 and 8: nothing is lost, the iterate is the dense one, replicas agree",
                   "", float, double) {
  CHECK(rc::check([] {
    auto run = some_cluster<TestType>(some_options());
    run.how = *rc::gen::element(selects::alone, selects::agreed, selects::planned);
    RC_ASSERT(replicas_agree(run));
    run_steps(run, [&](int) {
      RC_ASSERT(conserves(run));
      RC_ASSERT(follows_dense_iterate(run));
      RC_ASSERT(replicas_agree(run));
      RC_ASSERT(publishes_the_union(run));
    });
  }));
}

TEMPLATE_TEST_CASE("property 3: with a threshold of this step as much is dropped as was asked for", "", float,
                   double) {
  CHECK(rc::check([] {
    worker_options options;
    options.drop_ratio = some_ratio();
    auto run = some_cluster<TestType>(options);
    run_steps(run, [&](int) {
      for (std::size_t w = 0; w < run.workers(); ++w) RC_ASSERT(drops_as_asked(run, w, options.drop_ratio));
    });
  }));
}

TEMPLATE_TEST_CASE("property 4: what is dropped is below the threshold", "", float, double) {
  CHECK(rc::check([] {
    worker_options options = some_options();
    options.at_least_every = 0;
    options.by_score = false;
    auto run = some_cluster<TestType>(options);
    run_steps(run, [&](int) {
      for (std::size_t w = 0; w < run.workers(); ++w)
        RC_ASSERT(drops_only_small_layers(run, w, options.send_budget.has_value()));
    });
  }));
}

TEST_CASE("property 5: with a constant gradient a layer goes out every ceil(threshold / mean) steps") {
  CHECK(rc::check([] {
    const int threshold = *rc::gen::inRange(1, 20);
    worker_options options;
    options.threshold = threshold;
    auto run = cluster<float>(model_of(some_sizes()), 1, 0.25F, workers_of<float>(options));
    tensors<float> gradients = zeros_like<float>(run.model);
    std::vector<int> means;
    for (auto& layer : gradients) {
      means.push_back(*rc::gen::inRange(0, 8));
      for (std::size_t i = 0; i < layer.size(); ++i)
        layer[i] = static_cast<float>(i % 2 == 0 ? means.back() : -means.back());
    }
    for (int step = 1; step <= 2 * threshold; ++step) {
      run.step({gradients});
      for (std::size_t l = 0; l < means.size(); ++l) {
        const int period = means[l] == 0 ? 0 : (threshold + means[l] - 1) / means[l];
        const bool is_due = period > 0 && step % period == 0 && !gradients[l].empty();
        RC_ASSERT(run.frame(0).is_dropped(l) == !is_due);
      }
    }
  }));
}

TEMPLATE_TEST_CASE("property 7: R = 0 is dense SGD, bitwise", "", float, double) {
  CHECK(rc::check([] {
    worker_options options;
    options.drop_ratio = 0;
    options.search_every = *rc::gen::inRange<std::uint64_t>(1, 5);
    const std::size_t workers = *rc::gen::inRange<std::size_t>(1, 5);
    const TestType rate = TestType(0.1);
    cluster<TestType> run(model_of(some_sizes()), workers, rate, workers_of<TestType>(options));
    tensors<TestType> dense = zeros_like<TestType>(run.model);
    std::mt19937 random = some_random();
    for (int step = 0; step < steps; ++step) {
      std::vector<tensors<TestType>> gradients(workers);
      for (auto& each : gradients) {
        for (const std::size_t size : run.model.sizes())
          each.push_back(random_fractions<TestType>(random, size));
      }
      run.step(gradients);
      for (std::size_t l = 0; l < dense.size(); ++l) {
        for (std::size_t i = 0; i < dense[l].size(); ++i) {
          TestType sum = gradients[0][l][i];
          for (std::size_t w = 1; w < workers; ++w) sum += gradients[w][l][i];
          const volatile TestType change = rate * (sum / TestType(workers));  // no contraction to FMA
          dense[l][i] -= change;
        }
      }
      RC_ASSERT(same_tensors(run.parameters, dense));
      for (std::size_t w = 0; w < workers; ++w) RC_ASSERT(run.dropped_elements(w) == 0U);
    }
  }));
}

TEST_CASE("property: a budget is kept at every step, and at_least_every whatever else is asked for") {
  CHECK(rc::check([] {
    worker_options options = some_options();
    auto run = some_cluster<float>(options);
    run.how = *rc::gen::element(selects::alone, selects::planned);
    std::vector<std::size_t> sent(run.workers());
    std::vector<std::vector<std::uint64_t>> waited(run.workers(),
                                                   std::vector<std::uint64_t>(run.model.layers()));
    run_steps(run, [&](int step) {
      for (std::size_t w = 0; w < run.workers(); ++w) {
        sent[w] += run.frame(w).sent_elements();
        if (options.send_budget && options.at_least_every == 0) {
          const double share = *options.send_budget * static_cast<double>(run.model.elements());
          RC_ASSERT(static_cast<double>(sent[w]) <= share * step);
        }
        for (std::size_t l = 0; options.at_least_every > 0 && l < run.model.layers(); ++l) {
          waited[w][l] = run.frame(w).is_dropped(l) ? waited[w][l] + 1 : 0;
          RC_ASSERT(run.model.sizes()[l] == 0U || waited[w][l] < options.at_least_every);
        }
      }
    });
  }));
}
