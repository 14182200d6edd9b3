// SPDX-License-Identifier: MIT
// The handle of a step: how long it lives, what it takes and what it gives.
#include <cmath>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "frames.hpp"

struct tensor_of_another_library {};
template <>
struct lamina::tensor_traits<tensor_of_another_library> {
  static std::span<const float> elements(const tensor_of_another_library&) {
    throw std::runtime_error("the device is gone");
  }
};

namespace lamina_test::step_test {

using lamina::payload_type;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

using worker = lamina::worker<float>;

const tensors<float> one_and_two = {{1}, {2}};

void refuses(const auto& call, const char* named) {
  const std::string message = message_of<std::logic_error>(call);
  CAPTURE(message);
  CHECK(contains(message, named));
}

/// One step, planned by the worker's own residual. Gives what it sent.
std::string planned_step(worker& each, const tensors<float>& gradients, bool commits = true) {
  auto step = each.begin(each.plan());
  for (std::size_t l = gradients.size(); l-- > 0;) REQUIRE(step.add(l, gradients[l]));
  step.frame();
  const std::string sent = sent_of(step.sent());
  if (commits) step.commit();
  return sent;
}

}  // namespace

TEST_CASE("step: as long as one is open no other begins, and the worker tells which") {
  worker each(model_of({1, 1}));
  auto step = each.add(one_and_two);
  const bytes frame = step.frame().to_bytes();
  refuses([&] { (void)each.add(one_and_two); }, "add: step 1 is open");
  refuses([&] { (void)each.begin(); }, "begin: step 1 is open");
  refuses([&] { (void)each.begin(step.sent()); }, "begin: step 1 is open");
  refuses([&] { (void)each.values(); }, "values: step 1 is open");
  refuses([&] { (void)each.plan(); }, "plan: step 1 is open");
  refuses([&] { (void)each.save(); }, "save: step 1 is open");
  refuses([&] { each.load(frame); }, "load: step 1 is open");
  CHECK(step.frame().to_bytes() == frame);
  step.commit();
  CHECK_NOTHROW(each.begin());
}

TEST_CASE("step: one that got no gradient has not begun") {
  worker each(model_of({1, 1}), {.warm_up_steps = 8, .send_budget = 0.5, .at_least_every = 4});
  send(each, one_and_two);
  const bytes before = each.save();
  for (int k = 0; k < 2; ++k) {
    CHECK(each.begin().number() == 2);
    CHECK(each.begin(lamina::selection(each.fragments())).number() == 2);
    (void)each.begin().add(0, std::vector<float>{infinity});
    CHECK(each.steps() == 1);
    CHECK(each.save() == before);
  }
}

TEST_CASE("step: handles and workers move, and only the last handle ends the step") {
  STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<worker::step>);
  STATIC_REQUIRE_FALSE(std::is_copy_assignable_v<worker::step>);
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<worker::step>);
  worker each(model_of({1, 1}), {.drop_ratio = 0});
  worker another(model_of({1, 1}), {.drop_ratio = 0});
  std::optional<worker::step> first(each.add(one_and_two));
  worker::step second = std::move(*first);
  refuses([&] { first->commit(); }, "this handle has no step");
  first.reset();
  second.frame();
  // Of two workers: the step that is assigned over is let go.
  worker::step other = another.add(one_and_two);
  second = std::move(other);
  CHECK_NOTHROW(each.begin());
  CHECK(residual_of(each) == std::vector<float>{1, 2});
  each = worker(std::move(another));
  second.frame();
  second.commit();
  CHECK(residual_of(each) == std::vector<float>{0, 0});
  CHECK(each.steps() == 1);
}

TEST_CASE("step: after commit what was sent can be read until the next step, and nothing be done") {
  worker each(model_of({1, 1}), {.drop_ratio = 0.5});
  auto step = each.add(one_and_two);
  step.frame();
  step.commit();
  CHECK(sent_of(step.sent()) == "01");
  CHECK(step.is_sent(1));
  CHECK(step.number() == 1);
  std::vector<float> packed;
  refuses([&] { step.commit(); }, "commit: step 1 is over");
  refuses([&] { step.commit(lamina::delivery(step.sent(), 1)); }, "commit: step 1 is over");
  refuses([&] { (void)step.add(0, std::vector<float>{1}); }, "add: step 1 is over");
  refuses([&] { step.skip(0); }, "skip: step 1 is over");
  refuses([&] { (void)step.values(); }, "values: step 1 is over");
  refuses([&] { step.select(); }, "select: step 1 is over");
  refuses([&] { step.frame(); }, "frame: step 1 is over");
  refuses([&] { (void)step.fragment(0); }, "fragment: step 1 is over");
  refuses([&] { step.pack(packed); }, "pack: step 1 is over");
  CHECK(residual_of(each) == std::vector<float>{1, 0});

  SECTION("a refused batch is no next step") {
    CHECK_FALSE(each.add(tensors<float>{{1}, {infinity}}));
    CHECK(step.is_sent(1));
  }
  SECTION("the next step") {
    auto next = each.add(one_and_two);
    refuses([&] { (void)step.sent(); }, "sent: step 1 is not selected, or is over");
    step = std::move(next);  // the handle of a step that is over ends no other
    CHECK_NOTHROW(step.frame());
  }
  SECTION("the plan of the next step") {
    (void)each.plan();
    refuses([&] { (void)step.sent(); }, "sent: step 1 is not selected, or is over");
  }
}

TEST_CASE("step: a handle of before a load is not one of the step with its number") {
  worker each(model_of({1, 1}), {.drop_ratio = 0});
  const bytes fresh = each.save();
  auto old = each.add(one_and_two);
  old.frame();
  old.commit();
  each.load(fresh);
  auto now = each.add(one_and_two);
  REQUIRE(now.number() == old.number());
  refuses([&] { old.commit(); }, "is over");
  now.select();
  refuses([&] { (void)old.sent(); }, "is over");
  old = std::move(now);
  CHECK_NOTHROW(old.commit());
  CHECK(residual_of(each) == std::vector<float>{0, 0});
}

TEST_CASE("step: a layer that is refused is named, and lacks its gradient until a good one comes") {
  worker each(model_of({1, 1}), {.drop_ratio = 0});
  {
    auto refused = each.add(tensors<float>{{1}, {infinity}});
    CHECK_FALSE(refused);
    CHECK(refused.refused_layer() == 1);
    refuses([&] { refused.frame(); }, "this handle has no step");
  }
  auto step = each.begin();
  CHECK(step.add(0, std::vector<float>{1}));
  CHECK_FALSE(step.add(1, std::vector<float>{not_a_number}));
  CHECK_FALSE(step);
  CHECK(step.refused_layer() == 1);
  refuses([&] { step.frame(); }, "'layer1' has no gradient in step 1");
  CHECK_FALSE(step.add(tensors<float>{{1}, {infinity}}));  // none of the two
  CHECK(step.add(1, std::vector<float>{2}));
  CHECK(step);
  refuses([&] { (void)step.refused_layer(); }, "no gradient was refused");
  CHECK_NOTHROW(step.frame());
  CHECK(residual_of(each) == std::vector<float>{1, 2});
}

TEST_CASE("step: calls that come too early are refused by name") {
  worker each(model_of({1, 1}), {.payload = payload_type::float16});
  auto step = each.begin();
  std::vector<lamina::float16> packed;
  refuses([&] { (void)step.values(); }, "values: layer 'layer0' has no gradient in step 1; add() or skip()");
  refuses([&] { step.select(); }, "select: layer 'layer0'");
  refuses([&] { step.frame(); }, "frame: layer 'layer0'");
  refuses([&] { (void)step.fragment(0); }, "fragment: layer 'layer0'");
  refuses([&] { step.pack(packed); }, "pack: step 1 is not selected");
  refuses([&] { (void)step.sent(); }, "sent: step 1 is not selected");
  refuses([&] { step.commit(); }, "commit: step 1 is not selected");
  CHECK(step.add(one_and_two));
  step.select();
  refuses([&] { step.commit(); }, "call frame() or pack() first");
  refuses([&] { step.skip(0); }, "skip: step 1 is selected already");
  refuses([&] { (void)step.add(one_and_two); }, "add: step 1 is selected already");
  CHECK_THROWS_AS(step.fragment(2), std::out_of_range);
  CHECK_THROWS_AS(step.is_sent(2), std::out_of_range);
  CHECK(residual_of(each) == std::vector<float>{1, 2});
}

TEST_CASE("step: a wrong layer or tensor throws and leaves the step as it was") {
  worker each(model_of({1, 1}));
  auto step = each.begin();
  CHECK(step.add(0, std::vector<float>{1}));
  CHECK_THROWS_AS(step.add(2, std::vector<float>{1}), std::out_of_range);
  CHECK_THROWS_AS(step.skip(2), std::out_of_range);
  CHECK_THROWS_AS(step.add(1, std::vector<float>{1, 2}), std::invalid_argument);
  CHECK_THROWS_AS(step.add(1, std::vector<float>{1}, std::nan("")), std::invalid_argument);
  const std::optional<std::vector<float>> none;
  CHECK(contains(message_of<std::invalid_argument>([&] { (void)step.add(1, none); }), "'layer1'"));
  CHECK(step.add(1, std::vector<float>{2}));
  CHECK(copy_of(step.values()) == std::vector<double>{1, 2});
}

TEST_CASE("step: selecting again, and a frame again, change nothing") {
  worker each(model_of({1, 1, 1}), {.drop_ratio = 0.5});
  auto step = each.add(tensors<float>{{1}, {2}, {3}});
  CHECK(sent_of(step.select()) == "011");
  const bytes frame = step.frame().to_bytes();
  step.values()[0] = 100;
  CHECK(sent_of(step.select(std::vector<char>{0, 1, 0})) == "011");
  CHECK(step.frame().to_bytes() == frame);
  step.commit();
  CHECK(residual_of(each) == std::vector<float>{1, 0, 0});
}

TEST_CASE("step: values that are written take the place of the worker's own, until a gradient comes") {
  worker each(model_of({1, 1}), {.drop_ratio = 0.5});
  {
    auto step = each.add(one_and_two);
    step.values()[0] = 5;
    CHECK(step.values()[0] == 5);
    CHECK(sent_of(step.select()) == "10");
    CHECK(each.threshold() == 5);
  }
  auto step = each.add(one_and_two);
  step.values()[0] = 50;
  CHECK(step.add(1, std::vector<float>{1}));  // a micro-batch more
  CHECK(copy_of(step.values()) == std::vector<double>{2, 5});
  step.values()[0] = 50;
  CHECK(sent_of(step.select()) == "10");
}

TEST_CASE("step: held fragments are dropped, whatever R, a budget, an age or a policy say") {
  const auto sent = [&](const lamina::worker_options& options, std::span<const char> held) {
    worker each(model_of({10, 10, 10, 10}), options);
    auto step = each.add(tensors<float>(4, std::vector<float>(10, 1)));
    std::ranges::copy(std::vector<double>{4, 3, 2, 1}, step.values().begin());
    if (!held.empty()) step.values()[0] = 1e300;  // not looked at
    return sent_of(step.select(held));
  };
  const std::vector<char> held = {1, 0, 0, 0};
  CHECK(sent({.drop_ratio = 0.5}, {}) == "1100");
  // The 10 held are the first of the 20 to be dropped, and of the others the smallest.
  CHECK(sent({.drop_ratio = 0.5}, held) == "0110");
  CHECK(sent({.drop_ratio = 0.1}, held) == "0111");  // more is held than R asks for
  CHECK(sent({.drop_ratio = 0}, held) == "0111");
  CHECK(sent({.drop_ratio = 1}, held) == "0111");
  CHECK(sent({.drop_ratio = 0.5, .at_least_every = 1}, held) == "0111");
  CHECK(sent({.send_budget = 0.25}, {}) == "1000");
  CHECK(sent({.send_budget = 0.25}, held) == "0100");
  CHECK(sent({.drop_ratio = 0.5, .always_sent = {0}}, held) == "0110");
  CHECK_THROWS_AS(sent({}, std::vector<char>(3)), std::invalid_argument);
}

TEST_CASE("step: a layer without a gradient is skipped; what it holds may be sent all the same") {
  worker each(model_of({2, 1}), {.threshold = 2, .momentum = 0.5});
  send(each, {{1, 1}, {4}});  // the second
  {
    // The velocity does not decay in a step without a gradient.
    auto step = each.add(std::vector<std::optional<std::vector<float>>>{std::nullopt, {{1}}});
    CHECK(copy_of(step.values()) == std::vector<double>{1, 1});
    CHECK(each.residual().velocity()[0] == 1);
    step.frame();
    step.commit();
  }
  {
    auto step = each.begin();
    step.skip(1);
    CHECK(step.add(0, std::vector<float>{1, 1}));  // u = 1.5, a = 2.5
    CHECK(copy_of(step.values()) == std::vector<double>{2.5, 1});
    CHECK(sent_of(step.select()) == "10");
    step.commit();
  }
  // Sent, and then skipped: nothing is left. A gradient before or after a skip is a gradient.
  auto step = each.begin();
  step.skip(0);
  CHECK(step.add(1, std::vector<float>{3}));
  step.skip(1);
  CHECK(copy_of(step.values()) == std::vector<double>{0, 4.5});
}

TEST_CASE("step: what is packed is what a frame would hold, scaled; unpack puts it back") {
  std::mt19937 random(814);
  const lamina::layout model = model_of({9000, 3, 0, 70, 4096});
  const lamina::worker_options options{.drop_ratio = 0.6, .fragment_elements = 4096};
  worker packing(model, options);
  worker framing(model, options);
  std::vector<float> packed;
  for (int t = 0; t < 5; ++t) {
    const auto gradients = random_gradients<float>(random, model);
    auto step = packing.add(gradients);
    step.select();
    for (const float scale : {infinity, not_a_number})
      CHECK_THROWS_AS(step.pack(packed, scale), std::invalid_argument);
    const std::span<float> written = step.pack(packed, 0.25F);
    CHECK(written.data() == packed.data());
    CHECK(written.size() == step.sent().sent_elements());
    step.commit();

    tensors<float> expected = zeros_like<float>(packing.fragments());
    receive<float>(expected, send(framing, gradients), framing.fragments());
    auto restored = gradients;
    step.unpack(packed, restored);
    std::vector<std::vector<lamina::bfloat16>> halves;
    for (const std::size_t size : model.sizes()) halves.emplace_back(size, lamina::bfloat16{0x7fc0});
    step.unpack(packed, halves);
    for (std::size_t f = 0; f < expected.size(); ++f) {
      const std::size_t layer = packing.tiles().layer_of(f);
      for (std::size_t i = 0; i < expected[f].size(); ++i) {
        const std::size_t at = packing.tiles().begin(f) + i;
        REQUIRE(restored[layer][at] == expected[f][i] / 4);
        REQUIRE(halves[layer][at] == lamina::saturating_round<lamina::bfloat16>(expected[f][i] / 4));
      }
    }
    REQUIRE(packing.save() == framing.save());
    restored[0].pop_back();
    CHECK_THROWS_AS(step.unpack(packed, restored), std::invalid_argument);
    CHECK_THROWS_AS(step.unpack(std::span(packed).subspan(1), halves), std::invalid_argument);
  }
}

TEMPLATE_TEST_CASE("step: packed in half the bytes is what a frame would hold", "", lamina::float16,
                   lamina::bfloat16) {
  constexpr bool is_brain = std::is_same_v<TestType, lamina::bfloat16>;
  std::mt19937 random(611);
  const lamina::layout model = model_of({4096 + 70, 0, 3, 500});
  const lamina::worker_options options{.drop_ratio = 0.5,
                                       .momentum = 0.5,
                                       .payload = is_brain ? payload_type::bfloat16 : payload_type::float16};
  worker packing(model, options);
  worker framing(model, options);
  std::vector<TestType> packed;
  for (int t = 0; t < 6; ++t) {
    const auto gradients = rounding_gradients<float>(random, model);
    auto step = packing.add(gradients);
    step.select();
    std::vector<std::conditional_t<is_brain, lamina::float16, lamina::bfloat16>> other;
    CHECK_THROWS_AS(step.pack(other), std::invalid_argument);
    CHECK(step.pack(packed).size() == step.sent().sent_elements());
    step.commit();
    const bytes frame = send(framing, gradients);
    REQUIRE(std::ranges::equal(std::as_bytes(std::span(packed)), std::span(frame).last(packed.size() * 2)));
    REQUIRE(packing.save() == framing.save());
  }
  worker as_it_is(model);
  auto step = as_it_is.add(zeros_like<float>(model));
  step.select();
  CHECK_THROWS_AS(step.pack(packed), std::invalid_argument);
}

TEST_CASE("step: what a tensor's library throws goes on to the caller, and nothing has begun") {
  worker each(model_of({2}));
  CHECK_THROWS_WITH(each.add(std::vector<tensor_of_another_library>(1)), "the device is gone");
  CHECK_THROWS_WITH(each.begin().add(0, tensor_of_another_library{}), "the device is gone");
  CHECK(each.steps() == 0);
}

TEST_CASE("worker: a search whose step was let go undecided is made up for in the next") {
  lamina::worker<float> worker(model_of({1, 1}), {.drop_ratio = 0.5, .search_every = 100});
  (void)worker.add(tensors<float>{{1}, {2}});
  auto step = worker.add(tensors<float>{{1}, {2}});
  CHECK(step.number() == 1);
  CHECK(sent_of(step.select()) == "01");
  CHECK(worker.threshold() == 4);
}

TEST_CASE("worker: a threshold of -1 that was found is a threshold like any other") {
  lamina::worker<float, signed_mean> worker(model_of({1, 1}), {.drop_ratio = 0.5});
  CHECK(sent_of(worker.add(tensors<float>{{-3}, {-1}}).select()) == "01");
  CHECK(worker.threshold() == -1);
}

TEST_CASE("worker: a value that is NaN sends its layer first, its own and an agreed one") {
  struct nan_of_zeros : lamina::l1_norm {
    static double finish(double total, std::size_t) { return total == 0 ? std::nan("") : total; }
  };
  const lamina::layout model = model_of({100, 1, 100});
  const auto sent = [&](const lamina::worker_options& options) {
    lamina::worker<float, nan_of_zeros> worker(model, options);
    auto step = worker.add(tensors<float>{std::vector<float>(100, 1), {0}, std::vector<float>(100, 2)});
    CHECK(std::isnan(step.values()[1]));
    return sent_of(step.select());
  };
  CHECK(sent({.threshold = 1e9}) == "010");
  CHECK(sent({.drop_ratio = 0.5}) == "011");
  CHECK(sent({.send_budget = 0.01}) == "010");
  CHECK(sent({.send_budget = 0.001}) == "000");  // not even one element
  lamina::worker<float> worker(model_of({1, 1}), {.drop_ratio = 0.5});
  auto step = worker.add(tensors<float>{{1}, {2}});
  step.values()[0] = std::nan("");
  CHECK(sent_of(step.select()) == "10");
}

TEST_CASE("worker: a mistake throws, names what is wrong, and changes nothing") {
  const lamina::layout model({{"first", {2}}, {"last", {2}}});
  lamina::worker<float> worker(model);
  const auto refused = [&](const tensors<float>& gradients, const char* named, double scale = 1) {
    CHECK(contains(message_of<std::invalid_argument>([&] { (void)worker.add(gradients, scale); }), named));
    CHECK(worker.steps() == 0);
    CHECK(residual_of(worker) == std::vector<float>(4));
  };
  refused({{1, 2}, {3, 4, 5}}, "'last'");
  refused({{1, 2}}, "2 layers, got 1");
  refused({{1, 2}, {3, 4}, {5}}, "2 layers, got 3");
  for (const double scale : {std::nan(""), HUGE_VAL, 1e300}) refused({{1, 2}, {3, 4}}, "scale", scale);
  refused({{1, 2}, {3, 4}}, "of their type, got 1e-46", 1e-46);
  CHECK_NOTHROW(worker.add(tensors<float>{{1, 2}, {3, 4}}).frame());
}

TEST_CASE("worker: a model without layers, and an option outside its range, are refused by name") {
  CHECK_THROWS_AS(lamina::worker<float>(model_of({})), std::invalid_argument);
  const auto refused = [](const lamina::worker_options& options, const char* named) {
    CHECK(contains(message_of<std::invalid_argument>([&] { lamina::worker<float>(model_of({1}), options); }),
                   named));
  };
  for (const double ratio : {-0.1, 1.1, std::nan("")}) refused({.drop_ratio = ratio}, "drop ratio");
  for (const double budget : {-1.0, 0.0, 1.1, std::nan("")}) refused({.send_budget = budget}, "send_budget");
  for (const double momentum : {-0.1, 1.0, std::nan("")}) refused({.momentum = momentum}, "momentum");
  refused({.search_every = 0}, "search_every");
  refused({.threshold = std::nan("")}, "threshold");
  refused({.fragment_elements = 1}, "must be a multiple of 4096");
  refused({.payload = static_cast<lamina::payload_type>(99)}, "payload");
  refused({.always_sent = {1}}, "layer 1");
}

// Steps whose selection is known before their first gradient: worker.values(), worker.plan() and worker.begin(selection).

TEST_CASE("planned: before the first gradient everything counts as infinite, and is sent") {
  worker each(model_of({2, 3, 0}), {.drop_ratio = 0.9});
  CHECK(copy_of(each.values()) == std::vector<double>(3, HUGE_VAL));
  CHECK(sent_of(each.plan()) == "110");
  CHECK(planned_step(each, {{0, 0}, {1, 2, 3}, {}}) == "110");  // zeros, too
  // Nothing is in the residual, but a gradient comes.
  CHECK(copy_of(each.values()) == std::vector<double>{0, 2, 0});
  CHECK(planned_step(each, {{0, 0}, {1, 2, 3}, {}}) == "010");
  worker by_budget(model_of({2, 3}), {.send_budget = 0.5});
  CHECK(sent_of(by_budget.plan()) == "10");  // as far as it reaches
}

TEMPLATE_TEST_CASE("planned: Algorithm 1 on values that expect another mean gradient", "", float, double) {
  std::mt19937 random(51);
  const lamina::layout model = model_of({3, 0, 70, 2 * 4096 + 5, 1});
  lamina::worker<TestType> each(model, {.drop_ratio = 0.7,
                                        .fragment_elements = 4096,
                                        .payload = GENERATE(payload_type::as_is, payload_type::int8)});
  const std::vector<std::size_t> sizes(each.fragments().sizes().begin(), each.fragments().sizes().end());
  std::vector<double> expected(sizes.size(), HUGE_VAL);
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

TEST_CASE("planned: values that are written count until a gradient or a load comes") {
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
  auto step = each.begin(some_of(each.fragments(), {1, 2}));
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
  auto step = each.begin(some_of(each.fragments(), {1}));
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
    auto step = given.begin(t == 1 ? everything(given.fragments()) : given.plan());
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

}  // namespace lamina_test::step_test
