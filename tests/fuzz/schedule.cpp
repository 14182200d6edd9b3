// SPDX-License-Identifier: MIT
// Any collective of any ranks and length, all ranks in one thread: every send has its receive, each rank ends with the bits of the
// reference, and sends what the formulas say. And the text of a plan, whole and damaged.
#include <array>
#include <limits>
#include <string>

#include "collectives/simulated_ranks.hpp"
#include "fuzz.hpp"
#include "lamina/collectives/plan.hpp"

namespace lamina_fuzz {
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
  check(plan::load(made.save(), model, ranks).save() == made.save(), "what is saved loads");
  std::string damaged = made.save();
  for (int k = 0; k < 3 && !in.is_empty(); ++k)
    damaged[in.value<std::uint16_t>() % damaged.size()] = in.value<char>();
  if (damaged != made.save())
    check(throws<plan_error>([&] { plan::load(damaged, model, ranks); }), "a damaged plan is refused");
  const bytes any = in.take_rest();
  const std::string text(reinterpret_cast<const char*>(any.data()), any.size());
  check(throws<plan_error>([&] { plan::load(text, model, ranks); }), "what is no plan is refused");
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? fuzz_collective(in) : fuzz_plan(in);
}

}  // namespace lamina_fuzz
