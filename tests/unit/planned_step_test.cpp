// SPDX-License-Identifier: MIT
// Steps whose selection is known before their first gradient: worker.values(), worker.plan() and worker.begin(selection).
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/selection.hpp"
#include "steps.hpp"

namespace lamina_test::planned_step_test {

using lamina::payload_type;

namespace {

using worker = lamina::worker<float>;

constexpr double infinite = std::numeric_limits<double>::infinity();

/// One step, planned by the worker's own residual. Gives what it sent.
template <class T>
std::string planned_step(lamina::worker<T>& each, const tensors<T>& gradients, bool commits = true) {
  auto step = each.begin(each.plan());
  for (std::size_t l = gradients.size(); l-- > 0;) REQUIRE(step.add(l, gradients[l]));
  step.frame();
  const std::string sent = sent_of(step.sent());
  if (commits) step.commit();
  return sent;
}

lamina::selection selection_of(const lamina::layout& fragments, const std::vector<std::size_t>& sent) {
  lamina::selection made(fragments);
  for (const std::size_t f : sent) made.send(f);
  return made;
}

}  // namespace

TEST_CASE("planned: before the first gradient everything counts as infinite, and is sent") {
  worker each(model_of({2, 3, 0}), {.drop_ratio = 0.9});
  CHECK(copy_of(each.values()) == std::vector<double>(3, infinite));
  CHECK(sent_of(each.plan()) == "110");
  CHECK(planned_step(each, {{0, 0}, {1, 2, 3}, {}}) == "110");  // zeros, too
  CHECK(copy_of(each.values()) ==
        std::vector<double>{0, 2, 0});  // nothing is in the residual, but a gradient comes
  CHECK(planned_step(each, {{0, 0}, {1, 2, 3}, {}}) == "010");
  worker by_budget(model_of({2, 3}), {.send_budget = 0.5});
  CHECK(sent_of(by_budget.plan()) == "10");  // as far as it reaches
}

TEMPLATE_TEST_CASE("planned: values expect another mean gradient, and the plan is Algorithm 1 on them", "",
                   float, double) {
  std::mt19937 random(51);
  const lamina::layout model = model_of({3, 0, 70, 2 * 4096 + 5, 1});
  lamina::worker<TestType> each(model, {.drop_ratio = 0.7,
                                        .fragment_elements = 4096,
                                        .payload = GENERATE(payload_type::as_is, payload_type::int8)});
  const std::vector<std::size_t> sizes(each.fragments().sizes().begin(), each.fragments().sizes().end());
  std::vector<double> expected(sizes.size(), infinite);
  std::vector<int> sent_in(sizes.size());
  for (int t = 1; t <= 12; ++t) {
    const std::vector<double> values = copy_of(each.values());
    REQUIRE(values == expected);
    const lamina::selection& plan = each.plan();
    REQUIRE(each.threshold() == literal_algorithm_1(values, sizes, 0.7));
    for (std::size_t f = 0; f < sizes.size(); ++f)
      REQUIRE(plan.is_sent(f) == (sizes[f] > 0 && values[f] != 0 && values[f] >= each.threshold()));
    const std::string planned = sent_of(plan);
    auto step = each.begin(plan);
    const auto gradients = random_gradients<TestType>(random, model);
    for (std::size_t l = 0; l < gradients.size(); ++l) REQUIRE(step.add(l, gradients[l]));
    REQUIRE(sent_of(step.sent()) == planned);
    for (std::size_t f = 0; f < sizes.size(); ++f) {
      const double value = literal_mean_abs<TestType>(each.residual()[f]);
      expected[f] = (step.is_sent(f) ? 0 : value) + value / (t - sent_in[f]);
      if (step.is_sent(f)) sent_in[f] = t;
    }
    step.frame();
    step.commit();
  }
}

TEST_CASE(
    "planned: values that are written are those that are planned by, until a gradient or a load comes") {
  worker each(model_of({1, 1, 1}), {.drop_ratio = 0.7});
  const tensors<float> gradients = {{2}, {1}, {5}};
  send(each, gradients);
  const bytes saved = each.save();
  const auto agree = [&] {
    REQUIRE(copy_of(each.values()) == std::vector<double>{4, 2, 5});
    each.values()[1] = 6;
    CHECK(copy_of(each.values()) == std::vector<double>{4, 6, 5});
  };
  agree();
  CHECK(sent_of(each.plan()) == "010");
  CHECK(sent_of(each.plan()) == "010");  // they stay
  each.load(saved);
  CHECK(sent_of(each.plan()) == "001");
  agree();
  each.values()[0] = std::nan("");
  CHECK(sent_of(each.plan()) == "100");
  auto step = each.add(gradients);
  CHECK(copy_of(step.values()) == std::vector<double>{4, 2, 5});
}

TEST_CASE("planned: a fragment can be sent as soon as it has its gradient, and not before") {
  const lamina::layout model = model_of({2 * 4096, 3});
  worker each(model, {.fragment_elements = 4096});
  auto step = each.begin(selection_of(each.fragments(), {1, 2}));
  CHECK(step.number() == 1);
  CHECK_FALSE(step.is_sent(0));
  CHECK(step.is_sent(1));
  CHECK_THROWS_AS(step.fragment(1), std::logic_error);
  CHECK(step.add(0, std::vector<float>(2 * 4096, 3)));
  CHECK(step.fragment(1).size() == 4096);
  CHECK(step.fragment(1)[4095] == 3);
  CHECK(step.fragment(0)[0] == 3);  // its residual, too, though it is dropped
  CHECK_THROWS_AS(step.fragment(2), std::logic_error);
  CHECK_THROWS_AS(step.frame(), std::logic_error);
  CHECK_THROWS_AS(step.commit(), std::logic_error);
  step.skip(1);
  CHECK_NOTHROW(step.commit());  // without a frame: the caller has sent what it read
  CHECK(each.residual()[0][0] == 3);
  CHECK(each.residual().is_clear(1));
}

TEST_CASE("planned: the selection given is sent, whatever the values, and selecting changes nothing") {
  worker each(model_of({1, 1, 1}), {.drop_ratio = 0.5, .at_least_every = 1, .always_sent = {0}});
  auto step = each.begin(selection_of(each.fragments(), {1}));
  CHECK(step.add(tensors<float>{{9}, {1}, {5}}));
  CHECK(copy_of(step.values()) == std::vector<double>{9, 1, 5});
  CHECK(sent_of(step.select(std::vector<char>{0, 1, 0})) == "010");
  const bytes frame = step.frame().to_bytes();
  CHECK(lamina::decode<float>(frame, each.fragments()).layer(1)[0] == 1);
  CHECK_THROWS_AS(step.add(tensors<float>{{9}, {1}, {5}}), std::logic_error);  // the frame is made
}

TEST_CASE("planned: a selection of another layout is refused, and nothing has begun") {
  worker each(model_of({1, 4096 + 1}), {.fragment_elements = 4096});
  CHECK_THROWS_AS(each.begin(lamina::selection(each.model())), std::invalid_argument);
  CHECK(each.steps() == 0);
  CHECK_NOTHROW(each.begin());
}

TEST_CASE("planned: what was planned and not begun changes neither what is saved nor what comes") {
  std::mt19937 random(52);
  const lamina::layout model = model_of({5, 0, 3, 9});
  for (const auto& options : std::vector<lamina::worker_options>{
           {.drop_ratio = 0.7, .warm_up_steps = 8, .at_least_every = 4, .momentum = 0.5},
           {.drop_ratio = 0.7, .search_every = 3},
           {.send_budget = 0.3, .by_score = true, .payload = payload_type::bfloat16}}) {
    worker each(model, options);
    worker other(model, options);
    for (int t = 0; t < 20; ++t) {
      const bytes before = each.save();
      (void)each.plan();
      const double own = std::exchange(each.values()[0], 7);
      (void)each.plan();
      each.values()[0] = own;
      CHECK(each.save() == before);
      const auto gradients = rounding_gradients<float>(random, model);
      const bool commits = random() % 4 != 0;
      if (t % 2 == 0) {  // planned anew, by its own values
        CHECK(planned_step(each, gradients, commits) == planned_step(other, gradients, commits));
      } else {
        CHECK(send(each, gradients, commits) == send(other, gradients, commits));
      }
      CHECK(each.save() == other.save());
    }
  }
}

TEST_CASE("planned: a budget pays for a selection of elsewhere, too") {
  // What was sent by another's choice is paid for, and leaves nothing for the next plan.
  worker given(model_of({10, 10}), {.send_budget = 0.5});
  const tensors<float> gradients(2, std::vector<float>(10, 1));
  for (int t = 1; t <= 3; ++t) {
    lamina::selection all(given.fragments());
    if (t == 1) all.send_all();
    auto step = t == 1 ? given.begin(all) : given.begin(given.plan());
    CHECK(step.add(gradients));
    CHECK(step.sent().sent_layers() == (t == 1 ? 2U : t == 2 ? 0U : 1U));
    step.commit();
  }
}

TEST_CASE("planned: a fragment of which nothing arrived is planned with all of its residual") {
  worker each(model_of({10, 10, 10}), {.drop_ratio = 0});
  auto step = each.begin(each.plan());
  CHECK(step.add(
      tensors<float>{std::vector<float>(10, 1), std::vector<float>(10, 2), std::vector<float>(10, 3)}));
  lamina::delivery arrived(step.sent(), 5);
  arrived.lose(0, 0);
  arrived.lose(1, 0);
  arrived.lose(1, 1);
  step.commit(arrived);
  CHECK(copy_of(each.values()) == std::vector<double>{0.5 + 1, 2 + 2, 3});  // and a gradient like the last
  CHECK(each.residual().is_clear(2));                                       // as by a commit of all
}

}  // namespace lamina_test::planned_step_test
