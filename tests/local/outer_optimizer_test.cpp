// SPDX-License-Identifier: MIT
// From the mean of what the workers sent to what all subtract.

#include "lamina/local/outer_optimizer.hpp"

#include <cmath>
#include <stdexcept>

#include "unit/frames.hpp"

namespace lamina_test::outer_optimizer_test {

TEST_CASE("outer optimizer: as its formula says, each sum and product rounded by itself") {
  std::mt19937 random(12);
  const lamina::layout model = model_of({9000, 70});
  for (const bool nesterov : {true, false}) {
    for (const float mu : {0.0F, 0.9F}) {
      lamina::outer_optimizer<float> outer(model, {.rate = 0.7F, .momentum = mu, .nesterov = nesterov});
      tensors<float> m = zeros_like<float>(model);
      for (int t = 0; t < 3; ++t) {
        for (std::size_t fragment = 0; fragment < 2; ++fragment) {
          const auto g = random_fractions<float>(random, model.sizes()[fragment]);
          auto d = g;
          outer(fragment, 0, std::span(d).first(64));
          outer(fragment, 64, std::span(d).subspan(64));
          for (std::size_t i = 0; i < g.size(); ++i) {
            const volatile float decayed = mu * m[fragment][i];
            m[fragment][i] = decayed + g[i];
            const volatile float ahead = mu * m[fragment][i];
            const volatile float direction = mu == 0 ? g[i] : nesterov ? g[i] + ahead : m[fragment][i];
            REQUIRE(d[i] == 0.7F * direction);
          }
        }
      }
      CHECK(outer.momentum().size() == (mu == 0 ? 0 : model.elements()));
      CHECK(outer.rounding().empty());
    }
  }
}

TEST_CASE("outer optimizer: what the payload takes away joins the next update, once") {
  std::mt19937 random(19);
  const lamina::layout model = model_of({9000});
  for (const auto payload : std::span(all_payload_types).subspan(1)) {
    lamina::outer_optimizer<float> outer(model, {.payload = payload});
    std::vector<float> left(9000);
    for (int t = 0; t < 3; ++t) {
      const auto g = random_fractions<float>(random, 9000);
      auto d = g;
      outer(0, 0, d);
      std::vector<std::byte> said(lamina::payload_bytes<float>(payload, d.size()));
      std::vector<float> again(d.size());
      lamina::detail::encode_payload<float>(payload, d, said.data());
      lamina::detail::decode_payload<float>(payload, said.data(), d.size(), 0, again);
      REQUIRE(again == d);  // it travels as it is
      const auto rounding = outer.rounding();
      for (std::size_t i = 0; i < d.size(); ++i) REQUIRE(d[i] + rounding[i] == g[i] + left[i]);
      left.assign(rounding.begin(), rounding.end());
    }
    CHECK(std::ranges::any_of(left, [](float each) { return each != 0; }));
  }
}

TEST_CASE("outer optimizer: bad options, elements and checkpoints are refused") {
  const lamina::layout model = model_of({130});
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    CHECK(throws<std::invalid_argument>([&] { lamina::outer_optimizer<float>(model, {.rate = rate}); }));
  for (const double momentum : {-0.1, 1.0, std::nan("")})
    CHECK(throws<std::invalid_argument>(
        [&] { lamina::outer_optimizer<float>(model, {.momentum = momentum}); }));
  // They are used as T: what is in range as a double may not be.
  for (const double rate : {1e-60, 1e60})
    CHECK(throws<std::invalid_argument>([&] { lamina::outer_optimizer<float>(model, {.rate = rate}); }));
  CHECK(
      throws<std::invalid_argument>([&] { lamina::outer_optimizer<float>(model, {.momentum = 1 - 1e-9}); }));
  CHECK(lamina::outer_optimizer<double>(model, {.rate = 1e-60, .momentum = 1 - 1e-9}).momentum().size() ==
        130);
  lamina::outer_optimizer<float> outer(model, {.momentum = 0.5});
  std::vector<float> g(130);
  CHECK(throws<std::out_of_range>([&] { outer(1, 0, g); }));
  CHECK(throws<std::out_of_range>([&] { outer(0, 64, g); }));
  CHECK(throws<std::out_of_range>([&] { outer(0, 192, std::span(g).first(0)); }));
  CHECK(throws<std::invalid_argument>([&] { outer(0, 1, std::span(g).first(64)); }));
  CHECK(throws<std::invalid_argument>([&] { outer(0, 0, std::span(g).first(65)); }));
  outer(0, 128, std::span(g).first(2));
  std::vector<float> m(130, 1.0F);
  CHECK(throws<std::invalid_argument>([&] { outer.restore(std::span(m).first(3), {}); }));
  m[129] = std::numeric_limits<float>::infinity();
  CHECK(throws<std::invalid_argument>([&] { outer.restore(m, {}); }));
  CHECK(outer.momentum()[0] == 0);
}

TEMPLATE_TEST_CASE("outer optimizer: a mean that is or becomes infinite is refused", "", float, double) {
  const lamina::layout model = model_of({5000});
  using limits = std::numeric_limits<TestType>;
  const TestType most = limits::max();
  for (const auto payload : payload_types) {
    for (const bool nesterov : {true, false}) {
      const lamina::outer_optimizer_options options = {
          .rate = 0.7, .momentum = 0.9, .nesterov = nesterov, .payload = payload};
      lamina::outer_optimizer<TestType> outer(model, options);
      for (const TestType size :
           {TestType(1), limits::infinity(), limits::quiet_NaN(), most / 8, most / 2, most / 2, most, most}) {
        std::vector<TestType> mean(5000, 1);
        mean[4999] = size;
        const std::vector<TestType> before = mean;
        const std::vector<TestType> m(outer.momentum().begin(), outer.momentum().end());
        const std::vector<TestType> e(outer.rounding().begin(), outer.rounding().end());
        const bool is_refused = throws<std::domain_error>([&] { outer(0, 0, mean); });
        if (is_refused) {
          CHECK(same_bits(mean, before));
          CHECK(std::ranges::equal(outer.momentum(), m));
          CHECK(std::ranges::equal(outer.rounding(), e));
        }
        CHECK((is_refused || std::ranges::all_of(mean, [](TestType each) { return std::isfinite(each); })));
        CHECK((is_refused || std::isfinite(size)));
      }
      if (payload != lamina::payload_type::float16) {  // whose range ends below what is left in e
        std::vector<TestType> mean(5000, TestType(0.001));
        CHECK_NOTHROW(outer(0, 0, mean));
        CHECK(std::ranges::all_of(mean, [](TestType each) { return std::isfinite(each); }));
      }
      lamina::outer_optimizer<TestType> resumed(model, options);
      CHECK_NOTHROW(resumed.restore(outer.momentum(), outer.rounding()));
    }
  }
}

}  // namespace lamina_test::outer_optimizer_test
