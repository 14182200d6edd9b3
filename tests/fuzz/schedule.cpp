// SPDX-License-Identifier: MIT
// Any collective of any ranks and length, all ranks in one thread: every send has its receive, each rank ends with the bits of the
// reference, and sends what the formulas say. And a plan: each layer in one bucket.
#include <array>
#include <limits>
#include <vector>

#include "collectives/simulated_ranks.hpp"
#include "fuzz.hpp"
#include "lamina/collectives/plan.hpp"

namespace lamina_fuzz::of_schedule {
namespace {

using namespace lamina::collectives;
using namespace lamina_test;

rank_vectors inputs_of(input& in, std::size_t ranks, std::size_t elements) {
  std::mt19937 random = in.random();
  return random_ranks(random, ranks, elements);
}

void fuzz_collective(input& in) {
  const std::size_t ranks = 1 + in.below(64);
  const std::size_t elements = in.flag() ? in.below(200) : in.value<std::uint16_t>() % 2000;
  const algorithm how = in.one_of(all_algorithms);
  rank_vectors vectors = inputs_of(in, ranks, elements);
  const std::vector<float> expected = reference_sum(how, vectors);
  const bool in_halves = in.flag();
  std::vector<std::size_t> sent_elements(ranks);
  const auto run = [&](operation what) {
    const rank_schedules all = schedules_of(what, how, ranks, elements);
    check(mismatch_in(all, elements).empty(), "every send has its receive");
    simulate(all, vectors);
    for (std::size_t r = 0; r < ranks; ++r) sent_elements[r] += sent(all[r]).elements;
  };
  if (in_halves) {
    run(operation::reduce_scatter);
    for (std::size_t r = 0; r < ranks; ++r) {
      const element_range own = owned_elements(how, ranks, r, elements);
      for (std::size_t i = 0; i < elements; ++i) {
        if (i < own.begin || i >= own.end) vectors[r][i] = std::numeric_limits<float>::quiet_NaN();
      }
    }
    run(operation::all_gather);
  } else {
    run(operation::all_reduce);
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    check(same_bits(vectors[r], expected), "each rank ends with the bits of the reference");
    check(sent_elements[r] == formula_of_sent(how, ranks, r, elements),
          "each rank sends what the formula says");
  }
}

void fuzz_plan(input& in) {
  const lamina::layout model = lamina_fuzz::model_of(in);
  const std::size_t ranks = 1 + in.below(9);
  std::vector<std::size_t> order(model.layers());
  for (std::size_t l = 0; l < order.size(); ++l) order[l] = l;
  std::ranges::shuffle(order, in.random());
  std::vector<layer_class> classes(model.layers());
  for (layer_class& each : classes)
    each = in.flag() ? layer_class::fully_connected : layer_class::convolutional;
  const std::array choices = {algorithm_choice::by_cost(), algorithm_choice::by_type(),
                              algorithm_choice::always(in.one_of(all_algorithms))};
  const plan made(model, ranks, order, classes,
                  {.bucket_bytes = in.value<std::uint16_t>(), .choice = in.one_of(choices)});
  std::vector<int> seen(model.layers());
  for (const bucket& each : made.buckets()) {
    std::size_t elements = 0;
    for (const std::size_t layer : each.layers) {
      elements += model.sizes()[layer];
      ++seen[layer];
      check(classes[layer] == classes[each.layers.front()], "a bucket has layers of one class");
      check(&made.buckets()[made.bucket_of(layer)] == &each, "a layer is in its bucket");
    }
    check(elements == each.elements, "a bucket has the elements of its layers");
  }
  check(std::ranges::all_of(seen, [](int count) { return count == 1; }), "each layer is in one bucket");
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? fuzz_collective(in) : fuzz_plan(in);
}

}  // namespace lamina_fuzz::of_schedule

LAMINA_FUZZ_TARGET(schedule)
