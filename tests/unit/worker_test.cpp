// SPDX-License-Identifier: MIT
#include "lamina/worker.hpp"

#include "lamina/codec.hpp"

#include <limits>
#include <memory>
#include <random>

#include "catch.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::refresh_schedule;

namespace {

using bytes = std::vector<std::byte>;
template <class T>
using tensors = std::vector<std::vector<T>>;

template <class T>
tensors<T> random_gradients(std::mt19937& random, const lamina::layout& model) {
  tensors<T> gradients;
  for (const std::size_t size : model.sizes()) gradients.push_back(random_integers<T>(random, size));
  return gradients;
}

template <class Compressor, class T>
void accumulate_each(Compressor& compressor, const tensors<T>& gradients) {
  for (std::size_t l = 0; l < gradients.size(); ++l) compressor.accumulate(l, gradients[l]);
}

template <class T>
void add(tensors<T>& to, const tensors<T>& from) {
  to.resize(from.size());
  for (std::size_t l = 0; l < from.size(); ++l) {
    to[l].resize(from[l].size());
    for (std::size_t i = 0; i < from[l].size(); ++i) to[l][i] += from[l][i];
  }
}

template <class T>
void add_frame(tensors<T>& to, const bytes& frame, const lamina::layout& model) {
  const auto view = lamina::decode<T>(frame, model);
  tensors<T> dense(model.layers());
  for (std::size_t l = 0; l < model.layers(); ++l) {
    dense[l].resize(model.sizes()[l]);
    view.restore(l, dense[l]);
  }
  add(to, dense);
}

lamina::compressor_options with_fixed(double threshold) {
  lamina::compressor_options options;
  options.refresh = refresh_schedule::fixed(threshold);
  return options;
}

lamina::compressor_options with_ratio(double ratio, refresh_schedule refresh = refresh_schedule::every(1)) {
  lamina::compressor_options options;
  options.drop_ratio = ratio;
  options.refresh = refresh;
  return options;
}

}  // namespace

TEMPLATE_TEST_CASE("worker: the frame holds step, sender and the layers at or above the threshold", "", float,
                   double) {
  const lamina::layout model = model_of({2, 3, 0, 1});
  auto options = with_fixed(2);
  options.sender = 5;
  lamina::gradient_compressor<TestType> compressor(model, options);
  CHECK(compressor.step() == 0);
  CHECK(compressor.accumulate(0, std::vector<TestType>{1, -3}) == 2);  // at the threshold
  CHECK(compressor.accumulate(1, std::vector<TestType>{1, 1, 3}) == literal_mean_abs<TestType>({{1, 1, 3}}));
  compressor.accumulate(3, std::vector<TestType>{-7});
  CHECK(compressor.step() == 1);
  CHECK(compressor.threshold() == 2);
  const bytes frame = compressor.encode().to_bytes();
  const auto view = lamina::decode<TestType>(frame, model);
  CHECK(view.kind() == lamina::frame_kind::gradients);
  CHECK(view.step() == 1);
  CHECK(view.sender() == 5);
  CHECK(same_bits(view.layer(0), std::vector<TestType>{1, -3}));
  CHECK(view.is_dropped(1));
  CHECK(view.is_dropped(2));
  CHECK(same_bits(view.layer(3), std::vector<TestType>{-7}));
}

TEST_CASE("worker: frames have a checksum unless the options say otherwise") {
  const lamina::layout model = model_of({3});
  const auto has_checksum = [&](lamina::frame_checksum asked) {
    lamina::gradient_compressor<float> compressor(model, {.frame_checksum = asked});
    compressor.accumulate(0, std::vector<float>{1, 2, 3});
    const auto bytes = compressor.encode().to_bytes();
    CHECK(lamina::decode<float>(bytes, model).layer(0)[2] == 3);
    return (bytes[8] & std::byte{1}) != std::byte{0};
  };
  CHECK_FALSE(has_checksum(lamina::frame_checksum::none));
  CHECK(has_checksum(lamina::frame_checksum::xxh3));
}

TEMPLATE_TEST_CASE("worker: commit clears what was sent and nothing else", "", float, double) {
  lamina::gradient_compressor<TestType> compressor(model_of({2, 3}), with_fixed(2));
  accumulate_each(compressor, tensors<TestType>{{2, 2}, {1, 1, 1}});
  compressor.encode();
  CHECK(same_bits(compressor.residual()[0], std::vector<TestType>{2, 2}));  // not before commit
  compressor.commit();
  CHECK(same_bits(compressor.residual()[0], std::vector<TestType>{0, 0}));
  CHECK(same_bits(compressor.residual()[1], std::vector<TestType>{1, 1, 1}));
}

TEMPLATE_TEST_CASE("worker: values are those of the residual, whatever the order of the layers", "", float,
                   double) {
  for (std::uint32_t seed = 51; seed < 56; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    lamina::gradient_compressor<TestType> forward(model, with_ratio(0.5));
    lamina::gradient_compressor<TestType> backward(model, with_ratio(0.5));
    for (std::uint64_t step = 1; step <= 20; ++step) {
      const auto gradients = random_gradients<TestType>(random, model);
      accumulate_each(forward, gradients);
      for (std::size_t l = model.layers(); l-- > 0;) backward.accumulate(l, gradients[l]);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        REQUIRE(forward.values()[l] == literal_mean_abs<TestType>(forward.residual()[l]));
      }
      REQUIRE(forward.encode().to_bytes() == backward.encode().to_bytes());
      REQUIRE(forward.step() == step);
      forward.commit();
      backward.commit();
    }
  }
}

TEST_CASE("worker: a layer may be accumulated in pieces within a step") {
  const lamina::layout model = model_of({2, 1});
  lamina::gradient_compressor<float> compressor(model, with_fixed(1));
  CHECK(compressor.accumulate(0, std::vector<float>{1, 2}) == 1.5);
  CHECK(compressor.accumulate(0, std::vector<float>{1, 2}) == 3);
  compressor.accumulate(1, std::vector<float>{0});
  CHECK(compressor.step() == 1);
  const bytes frame = compressor.encode().to_bytes();
  CHECK(same_bits(lamina::decode<float>(frame, model).layer(0), std::vector<float>{2, 4}));
}

TEST_CASE("worker: select decides as Algorithm 1 does on the values and encode sends just that") {
  for (std::uint32_t seed = 61; seed < 71; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
    lamina::gradient_compressor<float> compressor(model, with_ratio(0.7));
    for (int step = 0; step < 20; ++step) {
      accumulate_each(compressor, random_gradients<float>(random, model));
      const std::vector<double> values(compressor.values().begin(), compressor.values().end());
      const lamina::selection chosen = compressor.select();
      REQUIRE(compressor.threshold() == literal_algorithm_1(values, sizes, 0.7));
      const bytes frame = compressor.encode().to_bytes();
      const auto view = lamina::decode<float>(frame, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        REQUIRE(chosen.is_sent(l) == (sizes[l] > 0 && values[l] >= compressor.threshold()));
        REQUIRE(view.is_dropped(l) == chosen.is_dropped(l));
        if (chosen.is_sent(l)) REQUIRE(same_bits(view.layer(l), compressor.residual()[l]));
      }
      compressor.commit();
    }
  }
}

TEST_CASE("worker: select may be called twice, and after encode") {
  lamina::gradient_compressor<float> compressor(model_of({1, 1, 1}), with_ratio(0.5));
  accumulate_each(compressor, tensors<float>{{1}, {2}, {3}});
  CHECK(compressor.select().sent_layers() == 2);
  CHECK(compressor.select().sent_layers() == 2);
  const bytes frame = compressor.encode().to_bytes();
  CHECK(compressor.select().sent_layers() == 2);
  CHECK(compressor.encode().to_bytes() == frame);
  compressor.commit();
  CHECK(compressor.residual()[0][0] == 1);
  CHECK(compressor.residual()[1][0] == 0);
}

TEST_CASE("worker: encoding copies nothing, the segments lie in the residual") {
  lamina::gradient_compressor<float> compressor(model_of({2, 3, 4}), with_fixed(1));
  accumulate_each(compressor, tensors<float>{{1, 1}, {0, 0, 0}, {1, 1, 1, 1}});
  const auto segments = compressor.encode().segments();
  REQUIRE(segments.size() == 3);
  CHECK(segments[1].data() == reinterpret_cast<const std::byte*>(compressor.residual()[0].data()));
  CHECK(segments[2].data() == reinterpret_cast<const std::byte*>(compressor.residual()[2].data()));
  CHECK(segments[2].size() == 16);
}

TEST_CASE("worker: the threshold is searched when the schedule says so, and stays between") {
  std::mt19937 random(72);
  const lamina::layout model = model_of({5, 1, 7, 3, 0, 2});
  const std::vector<std::size_t> sizes(model.sizes().begin(), model.sizes().end());
  const auto period = GENERATE(1, 2, 3, 5, 0);  // 0: in the first step alone
  const auto schedule = period == 0 ? refresh_schedule::every(~std::uint64_t{0})
                                    : refresh_schedule::every(static_cast<std::uint64_t>(period));
  lamina::gradient_compressor<float> compressor(model, with_ratio(0.6, schedule));
  CHECK(compressor.threshold() == lamina::invalid_threshold);
  double expected = 0;
  int changes = 0;
  for (int step = 1; step <= 30; ++step) {
    accumulate_each(compressor, random_gradients<float>(random, model));
    const std::vector<double> values(compressor.values().begin(), compressor.values().end());
    const double fresh = literal_algorithm_1(values, sizes, 0.6);
    if (period == 0 ? step == 1 : (step - 1) % period == 0) expected = fresh;
    changes += expected != fresh;
    const lamina::selection& chosen = compressor.select();
    REQUIRE(compressor.threshold() == expected);
    for (std::size_t l = 0; l < sizes.size(); ++l) {
      REQUIRE(chosen.is_sent(l) == (sizes[l] > 0 && values[l] >= expected));
    }
    compressor.encode();
    compressor.commit();
  }
  CHECK((changes > 0) == (period != 1));
}

TEST_CASE("worker: with a fixed threshold the values decide, whatever R") {
  auto options = with_fixed(1.5);
  options.drop_ratio = 1;
  lamina::gradient_compressor<float> compressor(model_of({1, 1}), options);
  accumulate_each(compressor, tensors<float>{{1}, {2}});
  CHECK(compressor.select().is_dropped(0));
  CHECK(compressor.select().is_sent(1));
  CHECK(compressor.threshold() == 1.5);
}

TEST_CASE("worker: R = 0 sends everything whatever the schedule") {
  const auto schedule =
      GENERATE(0, 1) == 0 ? refresh_schedule::every(~std::uint64_t{0}) : refresh_schedule::every(2);
  std::mt19937 random(73);
  const lamina::layout model = model_of({5, 0, 7});
  lamina::gradient_compressor<float> compressor(model, with_ratio(0, schedule));
  for (int step = 0; step < 6; ++step) {
    auto gradients = random_gradients<float>(random, model);
    for (auto& each : gradients[0]) each /= static_cast<float>(1 << (3 * step));  // shrinking
    accumulate_each(compressor, gradients);
    CHECK(compressor.select().sent_elements() == model.elements());
    compressor.encode();
    compressor.commit();
  }
}

TEST_CASE("worker: R = 1 finds no threshold and sends everything") {
  lamina::gradient_compressor<float> compressor(model_of({5, 0, 7}), with_ratio(1));
  accumulate_each(compressor, tensors<float>{{1, 1, 1, 1, 1}, {}, {0, 0, 0, 0, 0, 0, 0}});
  CHECK(compressor.select().sent_elements() == 12);
  CHECK(compressor.threshold() == lamina::invalid_threshold);
}

TEST_CASE("worker: a threshold of -1 that was found is a threshold like any other") {
  lamina::gradient_compressor<float, lamina_test::signed_mean> compressor(model_of({1, 1}), with_ratio(0.5));
  accumulate_each(compressor, tensors<float>{{-3}, {-1}});
  CHECK(compressor.select().is_dropped(0));
  CHECK(compressor.select().is_sent(1));
  CHECK(compressor.threshold() == -1);
}

TEST_CASE("worker: select after encode changes nothing, the frame can still be committed") {
  lamina::gradient_compressor<float> compressor(model_of({1, 1}), with_ratio(0.5));
  accumulate_each(compressor, tensors<float>{{1}, {2}});
  compressor.encode();
  CHECK(compressor.select().sent_layers() == 1);
  CHECK_NOTHROW(compressor.commit());
}

TEST_CASE("worker: accumulate after select begins the next step") {
  lamina::gradient_compressor<float> compressor(model_of({1}), with_ratio(0.5));
  accumulate_each(compressor, tensors<float>{{1}});
  compressor.select();
  accumulate_each(compressor, tensors<float>{{1}});
  CHECK(compressor.step() == 2);
  CHECK(compressor.residual()[0][0] == 2);
}

TEST_CASE("worker: a model without layers is refused") {
  CHECK_THROWS_AS(lamina::gradient_compressor<float>(model_of({})), std::invalid_argument);
}

TEST_CASE("worker: an option outside its range is refused") {
  const lamina::layout model = model_of({1});
  for (const double ratio : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    CHECK_THROWS_AS(lamina::gradient_compressor<float>(model, with_ratio(ratio)), std::invalid_argument);
  }
  CHECK(lamina::compressor_options{}.drop_ratio == 0.95);
  CHECK(lamina::compressor_options{}.sender == 0);
  CHECK(lamina::compressor_options{}.refresh.due(2));
}

TEST_CASE("worker: the functor given decides") {
  const lamina::layout model = model_of({1, 4});
  // Sums favour the large layer, means the small one.
  const tensors<float> gradients = {{3}, {1, 1, 1, 1}};
  lamina::gradient_compressor<float> by_mean(model, with_fixed(2));
  lamina::gradient_compressor<float, lamina::l1_norm> by_sum(model, with_fixed(3.5));
  accumulate_each(by_mean, gradients);
  accumulate_each(by_sum, gradients);
  CHECK(by_mean.select().is_sent(0));
  CHECK(by_mean.select().is_dropped(1));
  CHECK(by_sum.select().is_dropped(0));
  CHECK(by_sum.select().is_sent(1));
  CHECK(by_sum.values()[1] == 4);
}

TEST_CASE("worker: when a send failed, encoding again gives the same frame") {
  lamina::gradient_compressor<float> compressor(model_of({2, 2}), with_ratio(0.5));
  accumulate_each(compressor, tensors<float>{{1, 2}, {3, 4}});
  const bytes first = compressor.encode().to_bytes();
  CHECK(compressor.encode().to_bytes() == first);
  CHECK_NOTHROW(compressor.commit());
}

TEST_CASE("worker: a frame that was not committed is in the next one, once") {
  const lamina::layout model = model_of({2});
  lamina::gradient_compressor<float> compressor(model, with_fixed(1));
  compressor.accumulate(0, std::vector<float>{1, 2});
  compressor.encode();  // lost
  compressor.accumulate(0, std::vector<float>{10, 20});
  CHECK(compressor.step() == 2);
  const bytes frame = compressor.encode().to_bytes();
  compressor.commit();
  CHECK(same_bits(lamina::decode<float>(frame, model).layer(0), std::vector<float>{11, 22}));
  compressor.accumulate(0, std::vector<float>{100, 200});
  const bytes next = compressor.encode().to_bytes();
  CHECK(same_bits(lamina::decode<float>(next, model).layer(0), std::vector<float>{100, 200}));
}

TEMPLATE_TEST_CASE("worker: with sends that fail at random nothing is lost and nothing counts twice", "",
                   float, double) {
  for (std::uint32_t seed = 81; seed < 91; ++seed) {
    std::mt19937 random(seed);
    const lamina::layout model = random_model(random);
    lamina::gradient_compressor<TestType> compressor(model, with_ratio(0.6));
    tensors<TestType> computed;
    tensors<TestType> received(model.layers());
    for (std::size_t l = 0; l < model.layers(); ++l) received[l].resize(model.sizes()[l]);
    for (std::uint64_t step = 1; step <= 40; ++step) {
      const auto gradients = random_gradients<TestType>(random, model);
      add(computed, gradients);
      accumulate_each(compressor, gradients);
      const bytes frame = compressor.encode().to_bytes();
      REQUIRE(lamina::decode<TestType>(frame, model).step() == step);
      if (random() % 3 != 0) {
        add_frame(received, frame, model);
        compressor.commit();
      }
      for (std::size_t l = 0; l < model.layers(); ++l) {
        for (std::size_t i = 0; i < model.sizes()[l]; ++i) {
          REQUIRE(received[l][i] + compressor.residual()[l][i] == computed[l][i]);
        }
      }
    }
  }
}

TEST_CASE("worker: commit needs a frame and takes it once") {
  lamina::gradient_compressor<float> compressor(model_of({1}), with_fixed(0));
  CHECK_THROWS_AS(compressor.commit(), std::logic_error);  // nothing at all yet
  compressor.accumulate(0, std::vector<float>{5});
  const std::string message = message_of<std::logic_error>([&] { compressor.commit(); });
  CHECK(contains(message, "step 1"));
  CHECK(contains(message, "encode()"));
  compressor.select();
  CHECK_THROWS_AS(compressor.commit(), std::logic_error);  // selected, not encoded
  CHECK(compressor.residual()[0][0] == 5);
  compressor.encode();
  compressor.commit();
  CHECK_THROWS_AS(compressor.commit(), std::logic_error);  // twice
  compressor.accumulate(0, std::vector<float>{6});
  CHECK_THROWS_AS(compressor.commit(), std::logic_error);  // the next step is not encoded
  CHECK(compressor.residual()[0][0] == 6);
}

TEST_CASE("worker: a late commit after the next step began is refused and clears nothing") {
  lamina::gradient_compressor<float> compressor(model_of({1, 1}), with_fixed(0));
  accumulate_each(compressor, tensors<float>{{1}, {2}});
  compressor.encode();
  compressor.accumulate(0, std::vector<float>{10});
  CHECK_THROWS_AS(compressor.commit(), std::logic_error);
  CHECK(compressor.residual()[0][0] == 11);
  CHECK(compressor.residual()[1][0] == 2);
}

TEST_CASE("worker: select and encode need gradients, and a new step after commit") {
  lamina::gradient_compressor<float> compressor(model_of({1}), with_fixed(0));
  CHECK(contains(message_of<std::logic_error>([&] { compressor.encode(); }), "no gradients yet"));
  CHECK(contains(message_of<std::logic_error>([&] { compressor.select(); }), "no gradients yet"));
  compressor.accumulate(0, std::vector<float>{1});
  compressor.encode();
  compressor.commit();
  const std::string message = message_of<std::logic_error>([&] { compressor.encode(); });
  CHECK(contains(message, "encode"));
  CHECK(contains(message, "step 1 has ended"));
  CHECK(contains(message_of<std::logic_error>([&] { compressor.select(); }), "step 1 has ended"));
}

TEST_CASE("worker: a layer without a gradient in this step is named, an empty layer needs none") {
  const lamina::layout model({{"first", {1}}, {"nothing", {0}}, {"last.bias", {2}}});
  lamina::gradient_compressor<float> compressor(model, with_fixed(0));
  for (int step = 1; step <= 2; ++step) {  // the gradients of step 1 do not count in step 2
    compressor.accumulate(0, std::vector<float>{1});
    const std::string message = message_of<std::logic_error>([&] { compressor.encode(); });
    CHECK(contains(message, "'last.bias'"));
    CHECK(contains(message, "step " + std::to_string(step)));
    CHECK_THROWS_AS(compressor.select(), std::logic_error);
    CHECK_THROWS_AS(compressor.commit(), std::logic_error);
    compressor.accumulate(2, std::vector<float>{1, 1});
    CHECK_NOTHROW(compressor.encode());
    compressor.commit();
  }
}

TEST_CASE("worker: a refused gradient changes nothing, neither residual, value nor step") {
  const lamina::layout model({{"a", {2}}, {"b", {2}}});
  lamina::gradient_compressor<float> compressor(model, with_fixed(100));
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK_THROWS_AS(compressor.accumulate(0, std::vector<float>{1, infinity}), lamina::non_finite_gradient);
  CHECK(compressor.step() == 0);
  CHECK_THROWS_AS(compressor.encode(), std::logic_error);
  accumulate_each(compressor, tensors<float>{{1, 2}, {3, 4}});
  const bytes frame = compressor.encode().to_bytes();
  // Refused before it begins the next step: the frame can still be committed.
  const std::string message = message_of<lamina::non_finite_gradient>([&] {
    compressor.accumulate(1, std::vector<float>{-infinity, 0});
  });
  CHECK(contains(message, "'b'"));
  CHECK_THROWS_AS(compressor.accumulate(1, std::vector<float>{1}), std::invalid_argument);
  CHECK_THROWS_AS(compressor.accumulate(2, std::vector<float>{1}), std::out_of_range);
  CHECK(compressor.step() == 1);
  CHECK(compressor.encode().to_bytes() == frame);
  CHECK(compressor.values()[1] == 3.5);
  CHECK(same_bits(compressor.residual()[1], std::vector<float>{3, 4}));
  CHECK_NOTHROW(compressor.commit());
}

TEST_CASE("worker: a refused layer counts as missing until a good gradient comes") {
  lamina::gradient_compressor<float> compressor(model_of({1, 1}), with_fixed(0));
  compressor.accumulate(0, std::vector<float>{1});
  const std::vector<float> bad = {std::numeric_limits<float>::quiet_NaN()};
  CHECK_THROWS_AS(compressor.accumulate(1, bad), lamina::non_finite_gradient);
  CHECK_THROWS_AS(compressor.encode(), std::logic_error);
  compressor.accumulate(1, std::vector<float>{2});
  CHECK_NOTHROW(compressor.encode());
  CHECK(compressor.residual()[0][0] == 1);
  CHECK(compressor.residual()[1][0] == 2);
}

TEST_CASE("worker: a layer all zeros stays at threshold 0, and where everything is sent it is a true zero") {
  const lamina::layout model = model_of({1});
  const auto is_dropped = [&](const lamina::compressor_options& options) {
    lamina::gradient_compressor<float> compressor(model, options);
    compressor.accumulate(0, std::vector<float>{0});
    const bytes frame = compressor.encode().to_bytes();
    return lamina::decode<float>(frame, model).is_dropped(0);
  };
  CHECK(is_dropped(with_fixed(0)));
  CHECK_FALSE(is_dropped({.drop_ratio = 0}));
}

TEMPLATE_TEST_CASE("worker: all layers at once do what they do one by one, whatever the options", "", float,
                   double) {
  std::mt19937 random(61);
  const lamina::layout model = model_of({0, 5, 2 * 4096 + 70, 1, 4096, 33});
  for (const std::size_t part_elements : {0, 4096}) {
    auto options = with_ratio(0.9);
    options.part_elements = part_elements;
    lamina::gradient_compressor<TestType> one_by_one(model, options);
    lamina::gradient_compressor<TestType> at_once(model, options);
    const auto backwards = [](std::size_t pieces, auto&& work) {
      for (std::size_t i = pieces; i-- > 0;) work(i);
    };
    for (int step = 0; step < 5; ++step) {
      const auto gradients = random_gradients<TestType>(random, model);
      accumulate_each(one_by_one, gradients);
      const auto values = at_once.accumulate_all(gradients, backwards);
      REQUIRE(same_bits(values, one_by_one.values()));
      bytes expected(one_by_one.encode().size_bytes());
      bytes frame(at_once.encode().size_bytes());
      one_by_one.encode().copy_to(expected);
      at_once.encode().copy_to(frame);
      REQUIRE(frame == expected);
      one_by_one.commit();
      at_once.commit();
    }
  }
}

TEST_CASE("worker: of all layers at once none is added if one is refused, and the step goes on") {
  const lamina::layout model({{"first", {2}}, {"last", {2}}});
  lamina::gradient_compressor<float> compressor(model);
  compressor.accumulate_all(tensors<float>{{1, 2}, {3, 4}});
  const std::vector<double> values(compressor.values().begin(), compressor.values().end());
  const auto refused = [&]<class Exception>(const tensors<float>& gradients, const char* named, Exception*) {
    CHECK(contains(message_of<Exception>([&] { compressor.accumulate_all(gradients); }), named));
    CHECK(same_bits(compressor.residual().elements(), std::vector<float>{1, 2, 3, 4}));
    CHECK(same_bits(compressor.values(), values));
    CHECK(compressor.step() == 1);
  };
  const float infinity = std::numeric_limits<float>::infinity();
  refused({{1, 2}, {3, infinity}}, "'last'", static_cast<lamina::non_finite_gradient*>(nullptr));
  refused({{1, 2}, {3, 4, 5}}, "'last'", static_cast<std::invalid_argument*>(nullptr));
  refused({{1, 2}}, "2 layers, got 1", static_cast<std::invalid_argument*>(nullptr));
  refused({{1, 2}, {3, 4}, {5}}, "2 layers, got 3", static_cast<std::invalid_argument*>(nullptr));
  CHECK_NOTHROW(compressor.encode());
}

// Before an execution begins everything that may throw has thrown.
TEST_CASE("worker: a layer in parts is refused whole, its parts keep what they have") {
  lamina::compressor_options options;
  options.part_elements = 4096;
  lamina::gradient_compressor<float> compressor(model_of({2 * 4096 + 1}), options);
  std::vector<float> gradient(2 * 4096 + 1, 1.0F);
  compressor.accumulate(0, gradient);
  const std::vector<float> before = gradient;
  gradient.back() = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(compressor.accumulate(0, gradient), lamina::non_finite_gradient);
  CHECK(same_bits(compressor.residual().elements(), before));
}

TEST_CASE("worker: a copy of one with a frame in flight encodes its own and shares nothing") {
  for (const auto payload : {lamina::payload_type::as_is, lamina::payload_type::bfloat16}) {
    lamina::compressor_options options = with_ratio(0);
    options.payload = payload;
    auto original = std::make_unique<lamina::gradient_compressor<float>>(model_of({100}), options);
    original->accumulate_all(tensors<float>{std::vector<float>(100, 1.001F)});
    const bytes frame = original->encode().to_bytes();
    lamina::gradient_compressor<float> copy = *original;
    original.reset();
    CHECK_THROWS_AS(copy.commit(), std::logic_error);
    CHECK(copy.encode().to_bytes() == frame);
    CHECK_NOTHROW(copy.commit());
  }
}
