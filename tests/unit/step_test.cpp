// SPDX-License-Identifier: MIT
// What a step is made of: gradients in pieces, scaled, or none; which calls come when; what goes out whatever its value.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "catch.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::compressor_options;
using lamina::errc;
using lamina::finite_check;
using lamina::gradient_compressor;
using lamina::refresh_schedule;

namespace {

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();

using gradients = std::vector<std::vector<float>>;
using optional_gradients = std::vector<std::optional<std::vector<float>>>;

std::vector<float> residual_of(const gradient_compressor<float>& compressor) {
  const auto elements = compressor.residual().elements();
  return {elements.begin(), elements.end()};
}

void send(auto& compressor) {
  compressor.encode();
  compressor.commit();
}

/// Fails in one piece, after which it has run the pieces before.
struct fails_in_the_middle {
  std::size_t piece;
  template <class Work>
  void operator()(std::size_t pieces, const Work& work) const {
    for (std::size_t i = 0; i < pieces; ++i) {
      if (i == piece) throw std::runtime_error("the pool is gone");
      work(i);
    }
  }
};

/// NaN for a layer of zeros: their mean over how many are not zero.
struct mean_of_what_is_not_zero {
  static double map(float x) { return x == 0 ? 0.0 : std::abs(static_cast<double>(x)); }
  static double map(double x) { return x == 0 ? 0.0 : std::abs(x); }
  static double combine(double a, double b) { return a + b; }
  static double finish(double total, std::size_t) { return total == 0 ? std::nan("") : total; }
};

}  // namespace

TEMPLATE_TEST_CASE("step: pieces of a gradient add up to it, also with momentum", "", float, double) {
  std::mt19937 random(811);
  const lamina::layout model = model_of({3, 70, 0, 4096 + 9, 5});
  for (const std::size_t pieces : {2, 4, 8}) {
    for (const auto check : {finite_check::whole_layer, finite_check::each_element, finite_check::caller}) {
      compressor_options options;
      options.momentum = 0.5;
      options.check = check;
      options.drop_ratio = 0.7;
      gradient_compressor<TestType> whole(model, options);
      gradient_compressor<TestType> in_pieces(model, options);
      for (int step = 0; step < 6; ++step) {
        std::vector<std::vector<TestType>> all;
        auto part = all;
        for (const std::size_t size : model.sizes()) {
          all.push_back(random_integers<TestType>(random, size));
          part.push_back(all.back());
          for (TestType& each : part.back()) each /= static_cast<TestType>(pieces);
        }
        whole.accumulate_all(all);
        for (std::size_t piece = 0; piece < pieces; ++piece) {
          // By layer and all at once, in turn.
          if (piece % 2 == 0) in_pieces.accumulate_all(part);
          if (piece % 2 == 1) {
            for (std::size_t l = 0; l < model.layers(); ++l) in_pieces.accumulate(l, part[l]);
          }
        }
        REQUIRE(same_bits(in_pieces.residual().elements(), whole.residual().elements()));
        REQUIRE(same_bits(in_pieces.residual().velocity(), whole.residual().velocity()));
        REQUIRE(same_bits(in_pieces.values(), whole.values()));
        REQUIRE(in_pieces.encode().to_bytes() == whole.encode().to_bytes());
        in_pieces.commit();
        whole.commit();
      }
    }
  }
}

TEST_CASE("step: a piece that would overflow residual or velocity is refused, or left out of both") {
  const float half = std::numeric_limits<float>::max() / 2;
  const lamina::layout model = model_of({2});
  for (const auto check : {finite_check::whole_layer, finite_check::each_element}) {
    compressor_options options;
    options.momentum = 0.5;
    options.check = check;
    gradient_compressor<float> compressor(model, options);
    // The velocity is at -1.5 halves and the residual at 0 when a piece of -1 half comes.
    compressor.accumulate(0, std::vector<float>{1.5F * half, 1});
    compressor.accumulate(0, std::vector<float>{-1.5F * half, 1});
    compressor.accumulate(0, std::vector<float>{-1.5F * half, 1});
    const std::vector<float> before = residual_of(compressor);
    const std::vector<float> velocity(compressor.residual().velocity().begin(),
                                      compressor.residual().velocity().end());
    const std::vector<float> too_much = {-half, 1};
    if (check == finite_check::whole_layer) {
      CHECK(contains(message_of<lamina::non_finite_gradient>([&] { compressor.accumulate(0, too_much); }),
                     "overflow"));
      CHECK(same_bits(residual_of(compressor), before));
      CHECK(same_bits(compressor.residual().velocity(), velocity));
    } else {
      compressor.accumulate(0, too_much);
      CHECK(compressor.residual().left_out_elements() == 1);
      CHECK(residual_of(compressor) == std::vector<float>{before[0], before[1] + 1});
      CHECK(compressor.residual().velocity()[0] == velocity[0]);
      CHECK(compressor.residual().velocity()[1] == velocity[1] + 1);
    }
  }
}

TEMPLATE_TEST_CASE(
    "step: a scale multiplies each element, rounded by itself, whatever the type of the gradient", "", float,
    double) {
  std::mt19937 random(812);
  const lamina::layout model = model_of({3, 4096 + 70, 131072 + 5});
  for (const auto check : {finite_check::whole_layer, finite_check::each_element, finite_check::caller}) {
    for (const double momentum : {0.0, 0.9}) {
      for (const double scale : {1.0, 1.0 / 1024, 1.0 / 3, -2.7, 0.0}) {
        CAPTURE(momentum, scale);
        compressor_options options;
        options.check = check;
        options.momentum = momentum;
        options.drop_ratio = 0.5;
        gradient_compressor<TestType> scaled(model, options);
        gradient_compressor<TestType> literal(model, options);
        for (int step = 0; step < 3; ++step) {
          std::vector<std::vector<lamina::bfloat16>> halves;
          std::vector<std::vector<TestType>> wide;
          std::vector<std::vector<TestType>> products;
          for (const std::size_t size : model.sizes()) {
            halves.emplace_back(size);
            wide.emplace_back(size);
            products.emplace_back(size);
            for (std::size_t i = 0; i < size; ++i) {
              halves.back()[i].bits = static_cast<std::uint16_t>(random() & 0xbfffU);
              wide.back()[i] = lamina::to_float(halves.back()[i]);
              const volatile TestType product = wide.back()[i] * static_cast<TestType>(scale);
              products.back()[i] = product;
            }
          }
          const auto run = [&](const auto& tensors) {
            if (step == 0) {
              scaled.accumulate_all(tensors, scale);
            } else {
              for (std::size_t l = 0; l < model.layers(); ++l) scaled.accumulate(l, tensors[l], scale);
            }
          };
          if (step == 1) {
            run(halves);
          } else {
            run(wide);
          }
          literal.accumulate_all(products);
          REQUIRE(same_bits(scaled.residual().elements(), literal.residual().elements()));
          REQUIRE(same_bits(scaled.values(), literal.values()));
          send(scaled);
          send(literal);
        }
      }
    }
  }
}

TEST_CASE("step: a scale that is not finite, or makes a gradient that is not, changes nothing") {
  gradient_compressor<float> compressor(model_of({2}));
  const std::vector<float> gradient = {1, 0x1p120F};
  for (const double scale : {static_cast<double>(not_a_number), static_cast<double>(infinity), 1e300}) {
    const auto add = [&] { compressor.accumulate(0, gradient, scale); };
    CHECK(contains(message_of<std::invalid_argument>(add), "scale"));
  }
  CHECK(contains(message_of<std::invalid_argument>([&] { compressor.accumulate(0, gradient, 1e-46); }),
                 "scale"));
  CHECK(contains(message_of<lamina::non_finite_gradient>([&] { compressor.accumulate(0, gradient, 0x1p10); }),
                 "overflow"));
  CHECK(residual_of(compressor) == std::vector<float>{0, 0});
  CHECK(compressor.step() == 0);
  compressor.accumulate(0, gradient, 0x1p-10);
  CHECK(residual_of(compressor) == std::vector<float>{0x1p-10F, 0x1p110F});
}

TEST_CASE("step: finite_check::caller adds what is there") {
  compressor_options options;
  options.check = finite_check::caller;
  gradient_compressor<float> compressor(model_of({3}), options);
  compressor.accumulate(0, std::vector<float>{1, infinity, 2});
  CHECK(residual_of(compressor) == std::vector<float>{1, infinity, 2});
  CHECK(compressor.residual().left_out_elements() == 0);
}

TEST_CASE("step: a number that is not finite is 0 in an int8 payload, which has none") {
  compressor_options options;
  options.check = finite_check::caller;
  options.payload = lamina::payload_type::int8;
  options.drop_ratio = 0;
  const lamina::layout model = model_of({2});
  gradient_compressor<float> compressor(model, options);
  compressor.accumulate(0, std::vector<float>{not_a_number, 1});
  std::vector<float> sent(2);
  const std::vector<std::byte> bytes = compressor.encode().to_bytes();
  lamina::decode<float>(bytes, model).restore(0, sent);
  CHECK(sent[0] == 0);
}

TEST_CASE("step: the layer that a refusal names is the model's, and the part is the part") {
  const lamina::layout model({{"embedding", {8 * 65536}}, {"head", {3}}});
  compressor_options options;
  options.part_elements = 65536;
  gradient_compressor<float> compressor(model, options);
  gradients given = {std::vector<float>(8 * 65536, 1), {1, not_a_number, 1}};
  const auto refused = [&](std::size_t layer, std::size_t part, const std::string& name) {
    try {
      compressor.accumulate_all(given);
      FAIL("accepted");
    } catch (const lamina::non_finite_gradient& error) {
      CHECK(error.layer() == layer);
      CHECK(error.part() == part);
      CHECK(contains(error.what(), "layer " + std::to_string(layer) + " '" + name + "'"));
    }
  };
  refused(1, 8, "head");
  given[1][1] = 1;
  given[0][5 * 65536] = infinity;
  refused(0, 5, "embedding[5]");
}

TEST_CASE("step: a layer without a gradient is skipped; what it holds may go out all the same") {
  compressor_options options;
  options.refresh = refresh_schedule::fixed(2);
  options.momentum = 0.5;
  gradient_compressor<float> compressor(model_of({2, 1}), options);
  compressor.accumulate_all(gradients{{1, 1}, {4}});
  send(compressor);  // the second
  CHECK(compressor.chosen().is_dropped(0));

  // An element of velocity does not decay for a step without a gradient.
  compressor.accumulate_all(optional_gradients{std::nullopt, {{1}}});
  CHECK(compressor.values()[0] == 1);
  CHECK(residual_of(compressor) == std::vector<float>{1, 1, 1});
  CHECK(compressor.residual().velocity()[0] == 1);
  send(compressor);

  compressor.skip(1);
  compressor.accumulate(0, std::vector<float>{1, 1});  // u = 1.5, a = 2.5
  CHECK(compressor.values()[1] == 1);
  compressor.select();
  CHECK(compressor.chosen().is_sent(0));
  send(compressor);
  // Sent, and then skipped: nothing is left.
  compressor.skip(0);
  CHECK(compressor.values()[0] == 0);
  CHECK(contains(message_of<std::logic_error>([&] { compressor.encode(); }), "layer1"));
  compressor.skip(1);
  CHECK(compressor.encode().segments().size() == 1);
  CHECK_THROWS_AS(compressor.skip(2), std::out_of_range);
}

TEST_CASE("step: a skipped layer whose payload was rounded has the value of what is left") {
  compressor_options options;
  options.drop_ratio = 0;
  options.payload = lamina::payload_type::bfloat16;
  gradient_compressor<float> compressor(model_of({1}), options);
  compressor.accumulate(0, std::vector<float>{1 + 0x1p-12F});
  send(compressor);
  compressor.skip(0);
  CHECK(compressor.values()[0] == 0x1p-12);
}

TEST_CASE("step: all layers skipped is a step; a piece before or after a skip is a gradient") {
  gradient_compressor<float> compressor(model_of({1, 1}));
  compressor.accumulate_all(optional_gradients{std::nullopt, std::nullopt});
  CHECK(compressor.step() == 1);
  compressor.accumulate(0, std::vector<float>{3});
  compressor.skip(0);
  CHECK(compressor.values()[0] == 3);
  send(compressor);
  CHECK(compressor.step() == 1);
}

TEST_CASE("step: one that is abandoned has sent nothing, decided nothing, and can be saved") {
  const lamina::layout model({{"a", {10}}, {"b", {20}}});
  const gradients given{std::vector<float>(10, 1), std::vector<float>(20, 2)};
  for (const int calls : {0, 1, 2, 3}) {
    gradient_compressor<float> worker(model, {.drop_ratio = 0.5, .byte_budget = 0.5, .momentum = 0.5});
    gradient_compressor<float> other(model, {.drop_ratio = 0.5, .byte_budget = 0.5, .momentum = 0.5});
    const std::vector<std::byte> fresh = worker.save();
    if (calls > 0) {
      worker.accumulate_all(given);
      CHECK_THROWS_AS(worker.save(), std::logic_error);
    }
    if (calls > 1) worker.select(worker.values());
    std::vector<float> packed(worker.chosen().sent_elements());
    if (calls > 2) worker.pack(std::span(packed));
    worker.abandon();
    CHECK_THROWS_AS(worker.commit(), std::logic_error);
    CHECK_THROWS_AS(worker.select(), std::logic_error);
    CHECK(residual_of(worker)[29] == (calls > 0 ? 2.0F : 0.0F));
    if (calls == 0) CHECK(worker.save() == fresh);
    if (calls == 1) CHECK(worker.threshold() == other.threshold());

    // Goes on as one that was saved there.
    other.load(worker.save());
    CHECK(other.step() == (calls > 0 ? 1U : 0U));
    for (auto* each : {&worker, &other}) each->accumulate_all(given);
    CHECK(worker.encode().to_bytes() == other.encode().to_bytes());
    CHECK(residual_of(worker)[29] == (calls > 0 ? 5.0F : 2.0F));
  }
}

TEST_CASE("step: an execution that throws half-way loses nothing and leaves nothing half added") {
  const std::size_t piece = 131072;
  const lamina::layout model = model_of({piece + 3, piece, 7, 2 * piece});
  gradients given;
  for (const std::size_t size : model.sizes()) given.emplace_back(size, 1.0F);
  for (const auto check : {finite_check::whole_layer, finite_check::each_element}) {
    for (std::size_t place = 0; place < 5; ++place) {
      compressor_options options;
      options.check = check;
      gradient_compressor<float> compressor(model, options);
      gradient_compressor<float> expected(model, options);
      expected.accumulate_all(given);
      compressor.accumulate_all(given);
      // Whether it fails while the gradients are looked at or while they are added.
      if (place % 2 == 0) {
        CHECK_THROWS_AS(compressor.accumulate_all(given, fails_in_the_middle{place}), std::runtime_error);
      } else {
        std::error_code error;
        CHECK_THROWS_AS(compressor.accumulate_all(given, error, 1, fails_in_the_middle{place}),
                        std::runtime_error);
        CHECK(!error);
      }
      expected.accumulate_all(given);
      CHECK(same_bits(compressor.residual().elements(), expected.residual().elements()));
      CHECK(same_bits(compressor.values(), expected.values()));
      CHECK(compressor.encode().to_bytes() == expected.encode().to_bytes());
    }
  }
}

TEST_CASE("step: a value that is NaN sends its layer first, in steps that search and in those that do not") {
  const lamina::layout model = model_of({100, 1, 100});
  const auto sent = [&](const compressor_options& options) {
    gradient_compressor<float, mean_of_what_is_not_zero> compressor(model, options);
    compressor.accumulate_all(gradients{std::vector<float>(100, 1), {0}, std::vector<float>(100, 2)});
    CHECK(std::isnan(compressor.values()[1]));
    const lamina::selection& chosen = compressor.select();
    return std::array{chosen.is_sent(0), chosen.is_sent(1), chosen.is_sent(2)};
  };
  compressor_options options;
  options.refresh = refresh_schedule::fixed(1e9);
  CHECK(sent(options) == std::array{false, true, false});
  options.refresh = refresh_schedule::every(1);
  options.drop_ratio = 0.5;
  CHECK(sent(options) == std::array{false, true, true});
  options.byte_budget = 0.01;
  CHECK(sent(options) == std::array{false, true, false});
  options.byte_budget = 0.001;  // not even one element, but for the largest layer, which may be saved for
  CHECK(sent(options) == std::array{false, false, false});
}

TEST_CASE("step: a NaN among agreed values counts as infinity") {
  compressor_options options;
  options.drop_ratio = 0.5;
  gradient_compressor<float> compressor(model_of({1, 1}), options);
  compressor.accumulate_all(gradients{{1}, {2}});
  compressor.select(std::vector<double>{std::nan(""), 5});
  CHECK(compressor.chosen().is_sent(0));
  CHECK(compressor.chosen().is_dropped(1));
}

TEST_CASE("step: one selects by one's own values or by agreed ones, not by both") {
  const std::vector<double> agreed = {1, 2};
  gradient_compressor<float> compressor(model_of({1, 1}));
  const auto add = [&] { compressor.accumulate_all(gradients{{1}, {2}}); };
  add();
  compressor.select();
  CHECK(contains(message_of<std::logic_error>([&] { compressor.select(agreed); }), "own values"));
  CHECK_NOTHROW(compressor.select());
  compressor.encode();
  CHECK_THROWS_AS(compressor.select(agreed), std::logic_error);
  compressor.commit();
  add();
  compressor.select(agreed);
  CHECK(contains(message_of<std::logic_error>([&] { compressor.select(); }), "agreed values"));
  CHECK_NOTHROW(compressor.select(agreed));
  CHECK_THROWS_AS(compressor.select(agreed, std::vector<char>{1, 0}), std::logic_error);
  CHECK_THROWS_AS(compressor.select(std::vector<double>{1}), std::invalid_argument);
  CHECK_NOTHROW(compressor.encode());  // what was selected
  CHECK_NOTHROW(compressor.select(agreed));
  compressor.commit();
  add();
  compressor.encode();
  CHECK_THROWS_AS(compressor.select(agreed), std::logic_error);
  std::error_code error;
  compressor.select(agreed, error);
  CHECK(error == errc::out_of_order);
}

TEST_CASE("step: held parts stay, whatever R, a budget, an age or a policy say") {
  const lamina::layout model = model_of({10, 10, 10, 10});
  const std::vector<double> values = {4, 3, 2, 1};
  const std::vector<char> held = {1, 0, 0, 0};
  const auto sent = [&](const compressor_options& options, std::span<const char> flags) {
    gradient_compressor<float> compressor(model, options);
    compressor.accumulate_all(gradients(4, std::vector<float>(10, 1)));
    std::vector<double> given = values;
    if (!flags.empty()) given[0] = 1e300;  // not looked at
    const lamina::selection& chosen = compressor.select(given, flags);
    return std::vector<bool>{chosen.is_sent(0), chosen.is_sent(1), chosen.is_sent(2), chosen.is_sent(3)};
  };
  using bits = std::vector<bool>;
  compressor_options options;
  options.drop_ratio = 0.5;
  CHECK(sent(options, {}) == bits{true, true, false, false});
  // The 10 held are the first of the 20 to be held back, and of the rest the smallest.
  CHECK(sent(options, held) == bits{false, true, true, false});
  options.drop_ratio = 0.1;  // more is held than R asks for
  CHECK(sent(options, held) == bits{false, true, true, true});
  options.drop_ratio = 0;
  CHECK(sent(options, held) == bits{false, true, true, true});
  options.drop_ratio = 1;
  CHECK(sent(options, held) == bits{false, true, true, true});
  options.drop_ratio = 0.5;
  options.max_age = 1;
  CHECK(sent(options, held) == bits{false, true, true, true});
  options.max_age = 0;
  options.byte_budget = 0.25;
  CHECK(sent(options, {}) == bits{true, false, false, false});
  CHECK(sent(options, held) == bits{false, true, false, false});
  options.byte_budget.reset();
  options.always_sent = {0};
  CHECK(sent(options, held) == bits{false, true, true, false});
  gradient_compressor<float> compressor(model);
  compressor.accumulate_all(gradients(4, std::vector<float>(10, 1)));
  CHECK_THROWS_AS(compressor.select(values, std::vector<char>(3)), std::invalid_argument);
}

TEST_CASE("step: what is always sent goes out first, within R and within a budget") {
  const lamina::layout model = model_of({10, 10, 10, 10});
  const auto sent = [&](const compressor_options& options) {
    gradient_compressor<float> compressor(model, options);
    gradients given;
    for (int l = 0; l < 4; ++l) given.emplace_back(10, static_cast<float>(4 - l));
    compressor.accumulate_all(given);
    const lamina::selection& chosen = compressor.select();
    return std::vector<bool>{chosen.is_sent(0), chosen.is_sent(1), chosen.is_sent(2), chosen.is_sent(3)};
  };
  using bits = std::vector<bool>;
  compressor_options options;
  options.always_sent = {3};
  options.drop_ratio = 0.5;
  CHECK(sent(options) == bits{true, false, false, true});
  options.refresh = refresh_schedule::fixed(1e9);
  CHECK(sent(options) == bits{false, false, false, true});
  options.byte_budget = 0.3;  // 2 of 12 elements are left
  CHECK(sent(options) == bits{false, false, false, true});
  options.byte_budget = 0.5;
  CHECK(sent(options) == bits{true, false, false, true});
  options.always_sent = {4};
  CHECK(contains(message_of<std::invalid_argument>([&] { sent(options); }), "layer 4"));
}

TEST_CASE("step: a policy over layers holds for all of their parts") {
  const lamina::layout model = model_of({3 * 4096, 2});
  compressor_options options;
  options.part_elements = 4096;
  options.always_sent = {0};
  options.refresh = refresh_schedule::fixed(1e9);
  gradient_compressor<float> compressor(model, options);
  compressor.accumulate_all(gradients{std::vector<float>(3 * 4096, 1), {1, 1}});
  const lamina::selection& chosen = compressor.select();
  const auto range = chosen.sent();
  CHECK(std::vector<std::size_t>(range.begin(), range.end()) == std::vector<std::size_t>{0, 1, 2});
}

TEST_CASE("step: what is packed is what a frame would hold, divided; scatter puts it back") {
  std::mt19937 random(814);
  const lamina::layout model = model_of({9000, 3, 0, 70, 4096});
  compressor_options options;
  options.drop_ratio = 0.6;
  options.part_elements = 4096;
  gradient_compressor<float> packing(model, options);
  gradient_compressor<float> framing(model, options);
  for (int step = 0; step < 5; ++step) {
    gradients given;
    for (const std::size_t size : model.sizes()) given.push_back(random_integers<float>(random, size));
    packing.accumulate_all(given);
    framing.accumulate_all(given);
    CHECK_THROWS_AS(packing.pack({}), std::logic_error);
    packing.select();
    std::vector<float> packed(packing.chosen().sent_elements());
    CHECK_THROWS_AS(packing.pack(std::span(packed).subspan(1)), std::invalid_argument);
    CHECK_THROWS_AS(packing.pack(packed, 0), std::invalid_argument);
    CHECK_THROWS_AS(packing.pack(packed, not_a_number), std::invalid_argument);
    packing.pack(packed, 4);
    const auto bytes = framing.encode().to_bytes();
    const auto frame = lamina::decode<float>(bytes, framing.parts());

    gradients restored = given;
    lamina::scatter<float>(packing.chosen(), packing.cut(), packed, restored);
    std::vector<std::vector<lamina::bfloat16>> halves;
    for (const std::size_t size : model.sizes()) halves.emplace_back(size, lamina::bfloat16{0x7fc0});
    lamina::scatter<float>(packing.chosen(), packing.cut(), packed, halves);
    for (std::size_t part = 0; part < packing.parts().layers(); ++part) {
      const std::size_t layer = packing.cut().layer_of(part);
      std::vector<float> expected(packing.parts().sizes()[part]);
      if (!frame.is_dropped(part)) frame.restore(part, expected);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::size_t place = packing.cut().begin(part) + i;
        REQUIRE(restored[layer][place] == expected[i] / 4);
        REQUIRE(halves[layer][place] == lamina::saturating_round<lamina::bfloat16>(expected[i] / 4));
      }
    }
    packing.commit();
    framing.commit();
    CHECK_THROWS_AS(packing.commit(), std::logic_error);
    REQUIRE(same_bits(packing.residual().elements(), framing.residual().elements()));
  }
  gradients short_one(5);
  std::vector<float> packed(packing.chosen().sent_elements());
  CHECK_THROWS_AS(lamina::scatter<float>(packing.chosen(), packing.cut(), packed, short_one),
                  std::invalid_argument);
  packed.pop_back();
  CHECK_THROWS_AS(lamina::scatter<float>(packing.chosen(), packing.cut(), packed, short_one),
                  std::invalid_argument);
  const lamina::partition other(model);
  CHECK_THROWS_AS(lamina::scatter<float>(packing.chosen(), other, packed, short_one), std::invalid_argument);
}

TEST_CASE("step: with a lossy payload, what was packed leaves the residual whole") {
  compressor_options options;
  options.drop_ratio = 0;
  options.payload = lamina::payload_type::int8;
  gradient_compressor<float> compressor(model_of({2}), options);
  compressor.accumulate(0, std::vector<float>{1, 1.01F});
  compressor.select();
  std::vector<float> packed(2);
  compressor.pack(packed);
  compressor.commit();
  CHECK(packed == std::vector<float>{1, 1.01F});
  CHECK(residual_of(compressor) == std::vector<float>{0, 0});
}

TEST_CASE("step: the first gradient that is not finite is found, and those that are zero") {
  const lamina::layout model = model_of({3, 2 * 131072 + 9, 0, 2});
  const gradient_compressor<float> compressor(model);
  gradients given = {{1, 2, 3}, std::vector<float>(2 * 131072 + 9), {}, {0, -0.0F}};
  CHECK(!compressor.first_non_finite(given).has_value());
  std::vector<char> is_zero(4, 7);
  compressor.find_zero(given, is_zero);
  CHECK(is_zero == std::vector<char>{0, 1, 1, 1});
  given[1].back() = std::numeric_limits<float>::denorm_min();
  given[3][1] = infinity;
  compressor.find_zero(given, is_zero);
  CHECK(is_zero == std::vector<char>{0, 0, 1, 0});
  CHECK(compressor.first_non_finite(given) == std::size_t{3});
  given[1][131072] = not_a_number;
  CHECK(compressor.first_non_finite(given) == std::size_t{1});
  given[0][0] = std::numeric_limits<float>::max();  // finite
  CHECK(compressor.first_non_finite(given) == std::size_t{1});
  CHECK_THROWS_AS(compressor.find_zero(given, std::span(is_zero).first(3)), std::invalid_argument);
  given.pop_back();
  CHECK_THROWS_AS((void)compressor.first_non_finite(given), std::invalid_argument);
  const optional_gradients sparse = {
      std::nullopt, std::vector<float>(2 * 131072 + 9, not_a_number), {{}}, {{1, 1}}};
  compressor.find_zero(sparse, is_zero);
  CHECK(is_zero == std::vector<char>{1, 0, 1, 0});
  CHECK(compressor.first_non_finite(sparse) == std::size_t{1});
  const std::vector<std::vector<lamina::float16>> halves = {
      {{0x7bff}, {0}, {0x8000}}, std::vector<lamina::float16>(2 * 131072 + 9), {}, {{0x7c00}, {0}}};
  CHECK(compressor.first_non_finite(halves) == std::size_t{3});
}

TEST_CASE("step: by code, each mistake has its own, and changes nothing") {
  const lamina::layout model = model_of({2, 1});
  gradient_compressor<float> compressor(model);
  std::error_code error = errc::overflow;
  compressor.accumulate(0, std::vector<float>{1, 2}, error);
  CHECK(!error);
  const std::vector<float> before = residual_of(compressor);
  const auto refused = [&](errc code, const auto& call) {
    error.clear();
    call();
    CHECK(error == code);
    CHECK(error.category().name() == std::string("lamina"));
    CHECK(!error.message().empty());
    CHECK(same_bits(residual_of(compressor), before));
    CHECK(compressor.step() == 1);
  };
  refused(errc::no_such_layer, [&] { compressor.accumulate(2, std::vector<float>{1}, error); });
  refused(errc::no_such_layer, [&] { compressor.skip(2, error); });
  refused(errc::wrong_size, [&] { compressor.accumulate(0, std::vector<float>{1}, error); });
  refused(errc::non_finite, [&] { compressor.accumulate(0, std::vector<float>{1, not_a_number}, error); });
  refused(errc::bad_argument, [&] {
    compressor.accumulate(0, std::vector<float>{1, 1}, error, not_a_number);
  });
  refused(errc::wrong_count, [&] { compressor.accumulate_all(gradients{{1, 1}}, error); });
  refused(errc::wrong_size, [&] { compressor.accumulate_all(gradients{{1, 1}, {1, 1}}, error); });
  refused(errc::non_finite, [&] { compressor.accumulate_all(gradients{{1, 1}, {infinity}}, error); });
  refused(errc::no_gradient, [&] { compressor.select(error); });
  refused(errc::no_gradient, [&] { CHECK(compressor.encode(error).size_bytes() == 0); });
  refused(errc::wrong_count, [&] { compressor.select(std::vector<double>(3), error); });
  compressor.skip(1, error);
  CHECK(!error);
  CHECK(compressor.encode(error).size_bytes() > 0);
  CHECK(!error);
  compressor.commit();
  compressor.select(error);
  CHECK(error == errc::out_of_order);
  compressor.encode(error);
  CHECK(error == errc::out_of_order);

  const float largest = std::numeric_limits<float>::max();
  compressor.accumulate(0, std::vector<float>{largest, 0}, error);
  CHECK(!error);
  compressor.accumulate(0, std::vector<float>{largest, 0}, error);
  CHECK(error == errc::overflow);
}

TEST_CASE("partition: a part never has the name of a layer") {
  const lamina::layout model({{"w", {8192}}, {"w[0]", {4}}, {"w[x]", {1}}});
  const lamina::partition cut(model, 4096);
  CHECK(cut.parts()[0].name == "w[[0]]");
  CHECK(cut.parts()[1].name == "w[[1]]");
  CHECK(cut.parts()[2].name == "w[0]");
  const lamina::partition usual(lamina::layout({{"w", {8192}}, {"v[0]", {4}}}), 4096);
  CHECK(usual.parts()[0].name == "w[0]");
  CHECK_NOTHROW(lamina::partition(lamina::layout({{"w", {8192}}, {"w[0]", {4}}, {"w[[1]]", {4}}}), 4096));
}

TEST_CASE(
    "step: a layer of value 0 goes out with everything, by its age or by a policy, and not by its value") {
  // 100 experts of which 5 have a gradient: 95 % have the value 0, and R is 0.9.
  const lamina::layout experts = model_of(std::vector<std::size_t>(100, 1000));
  for (const auto& options :
       {compressor_options{.drop_ratio = 0.9}, compressor_options{.byte_budget = 0.1}}) {
    gradient_compressor<float> compressor(experts, options);
    for (int step = 0; step < 3; ++step) {
      for (std::size_t l = 0; l < 100; ++l) {
        if (l < 5) {
          compressor.accumulate(l, std::vector<float>(1000, 1));
        } else if (step % 2 == 0) {
          compressor.skip(l);
        } else {
          compressor.accumulate(l, std::vector<float>(1000, -0.0F));
        }
      }
      CHECK(compressor.select().sent_elements() == 5000);
      send(compressor);
    }
  }
  const lamina::layout model = model_of({10, 20, 30});
  const auto sent = [&](const compressor_options& options, const std::vector<double>& values) {
    lamina::layer_selector selector(model, options);
    std::string all;
    for (std::uint64_t step = 1; step <= 2; ++step) {
      const lamina::selection& chosen = selector.decide(step, values, values);
      for (std::size_t l = 0; l < 3; ++l) all += chosen.is_sent(l) ? '1' : '0';
      selector.commit(step);
    }
    return all;
  };
  CHECK(sent({.drop_ratio = 0.4}, {0, 3, 0}) == "010010");
  CHECK(sent({.drop_ratio = 0.4}, {0, 3, -0.0}) == "010010");
  CHECK(sent({.drop_ratio = 0.4}, {0, 0, 0}) == "000000");
  CHECK(sent({.drop_ratio = 0.4, .max_age = 2, .always_sent = {2}}, {0, 3, 0}) == "011111");
  CHECK(sent({.refresh = refresh_schedule::fixed(-1)}, {0, -0.5, -2}) == "010010");
  CHECK(sent({.drop_ratio = 0}, {0, 0, 0}) == "111111");
  CHECK(sent({.drop_ratio = 1}, {0, 0, 0}) == "111111");
  CHECK(sent({.byte_budget = 1}, {0, 3, 0}) == "010010");
}

TEST_CASE("step: a threshold that is infinite since layers are held serves its own step alone") {
  compressor_options options;
  options.drop_ratio = 0.4;
  options.refresh = GENERATE(refresh_schedule::every(100), refresh_schedule::every(~std::uint64_t{0}));
  const lamina::layout model = model_of({10, 20, 30});
  gradient_compressor<float> compressor(model, options);
  const std::vector<double> agreed = {1, 2, 3};
  const auto add = [&](auto& to) {
    to.accumulate_all(
        gradients{std::vector<float>(10, 1), std::vector<float>(20, 2), std::vector<float>(30, 3)});
  };
  add(compressor);
  compressor.select(agreed, std::vector<char>{0, 0, 1});
  CHECK(compressor.threshold() == -std::numeric_limits<double>::infinity());
  CHECK(compressor.chosen().sent_elements() == 30);
  send(compressor);
  gradient_compressor<float> resumed(model, options);
  resumed.load(compressor.save());
  for (auto* each : {&compressor, &resumed}) {
    add(*each);
    each->select(agreed);
    CHECK(each->threshold() == 2);
    CHECK(each->chosen().sent_elements() == 50);
    send(*each);
    add(*each);
    each->select(std::vector<double>{5, 6, 7});
    CHECK(each->threshold() == 2);  // the next search is not due
    send(*each);
  }
  // A threshold of the user's own is never searched.
  lamina::layer_selector fixed(model, {.refresh = refresh_schedule::fixed(infinity)});
  for (std::uint64_t step = 1; step <= 3; ++step) {
    CHECK_FALSE(fixed.searches_in(step));
    CHECK(fixed.decide(step, agreed, agreed).sent_layers() == 0);
  }
}

TEST_CASE("step: selecting again with other parts held is refused") {
  gradient_compressor<float> compressor(model_of({1, 1, 1}), {.drop_ratio = 0});
  const std::vector<double> agreed = {1, 2, 3};
  compressor.accumulate_all(gradients{{1}, {2}, {3}});
  compressor.select(agreed, std::vector<char>{1, 0, 0});
  CHECK_NOTHROW(compressor.select(agreed, std::vector<char>{7, 0, 0}));
  const auto other = [&] { compressor.select(agreed, std::vector<char>{0, 1, 0}); };
  CHECK(contains(message_of<std::logic_error>(other), "other parts held"));
  CHECK_THROWS_AS(compressor.select(agreed), std::logic_error);
  std::error_code error;
  compressor.select(agreed, std::vector<char>{1, 0, 1}, error);
  CHECK(error == errc::out_of_order);
  CHECK(compressor.chosen().sent_layers() == 2);
  send(compressor);
  compressor.accumulate_all(gradients{{1}, {2}, {3}});
  CHECK_NOTHROW(compressor.select(agreed, std::vector<char>{0, 1, 0}));
}

TEST_CASE("step: flags of layers become flags of their parts") {
  const lamina::layout model({{"embedding", {3, 4096}}, {"empty", {0}}, {"head", {10}}});
  gradient_compressor<float> compressor(model, {.drop_ratio = 0, .part_elements = 4096});
  const gradients given = {std::vector<float>(3 * 4096), {}, std::vector<float>(10, 1)};
  std::vector<char> is_zero(3);
  compressor.find_zero(given, is_zero);
  const std::vector<char> held = compressor.cut().by_part(is_zero);
  CHECK(held == std::vector<char>{1, 1, 1, 1, 0});
  compressor.accumulate_all(given);
  const std::vector<double> agreed(compressor.values().begin(), compressor.values().end());
  CHECK(compressor.select(agreed, held).sent_elements() == 10);
  CHECK_THROWS_AS(compressor.cut().by_part(held), std::invalid_argument);
  CHECK(lamina::partition(model).by_part(is_zero) == is_zero);
  CHECK(lamina::partition(model_of({}), 4096).by_part({}).empty());
}

namespace {

struct tensor_of_another_library {};

}  // namespace

template <>
struct lamina::tensor_traits<tensor_of_another_library> {
  static std::span<const float> elements(const tensor_of_another_library&) {
    throw std::runtime_error("the device is gone");
  }
};

TEST_CASE("step: by code, what a tensor's library throws is a bad tensor, and a missing one no gradient") {
  gradient_compressor<float> compressor(model_of({2}));
  std::error_code error;
  compressor.accumulate(0, tensor_of_another_library{}, error);
  CHECK(error == errc::bad_tensor);
  compressor.accumulate_all(std::vector<tensor_of_another_library>(1), error);
  CHECK(error == errc::bad_tensor);
  CHECK_THROWS_AS(compressor.accumulate(0, tensor_of_another_library{}), std::runtime_error);
  const std::optional<std::vector<float>> none;
  compressor.accumulate(0, none, error);
  CHECK(error == errc::no_gradient);
  CHECK(contains(message_of<std::invalid_argument>([&] { compressor.accumulate(0, none); }), "'layer0'"));
  CHECK(compressor.step() == 0);
}

TEST_CASE("step: a divisor whose inverse is not finite is refused") {
  gradient_compressor<float> compressor(model_of({1}), {.drop_ratio = 0});
  compressor.accumulate(0, std::vector<float>{1});
  compressor.select();
  std::vector<float> packed(1);
  for (const float divisor : {0.0F, 1e-40F, -1e-40F, infinity, not_a_number}) {
    CHECK_THROWS_AS(compressor.pack(packed, divisor), std::invalid_argument);
  }
  CHECK_NOTHROW(compressor.pack(packed, 0x1p-126F));
}
