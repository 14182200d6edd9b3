// SPDX-License-Identifier: MIT
// From the mean of what the workers sent to what all subtract.

#include "lamina/outer_step.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <vector>

#include "catch.hpp"
#include "support.hpp"

namespace {

using lamina_test::same_bits;
using lamina_test::throws;

template <class T>
using tensors = std::vector<std::vector<T>>;

template <class T>
tensors<T> zeros_of(const lamina::layout& model) {
  tensors<T> all;
  for (const std::size_t elements : model.sizes()) all.emplace_back(elements);
  return all;
}

const lamina::payload_type payloads[] = {lamina::payload_type::as_is, lamina::payload_type::float16,
                                         lamina::payload_type::bfloat16, lamina::payload_type::int8,
                                         lamina::payload_type::int4};

/// A step of momentum in time, word for word: what is kept of m, how much of G joins it, and how much of it is taken off.
struct in_time {
  double kept, joins, counts;
  in_time(double mu, double periods)
      : kept(std::pow(mu, periods)), joins((1 - kept) / ((1 - mu) * periods)), counts(periods * kept) {}
};

}  // namespace

TEST_CASE("outer step: as its formula says, each sum and product rounded by itself") {
  std::mt19937 random(12);
  const lamina::layout model = lamina_test::model_of({9000, 70});
  for (const bool nesterov : {true, false}) {
    for (const float mu : {0.0F, 0.9F}) {
      lamina::outer_step<float> outer(model, {.rate = 0.7F, .momentum = mu, .nesterov = nesterov});
      tensors<float> m = zeros_of<float>(model);
      for (int t = 0; t < 3; ++t) {
        for (std::size_t part = 0; part < 2; ++part) {
          const auto g = lamina_test::random_fractions<float>(random, model.sizes()[part]);
          auto d = g;
          outer(part, 0, std::span(d).first(64));
          outer(part, 64, std::span(d).subspan(64));
          for (std::size_t i = 0; i < g.size(); ++i) {
            const volatile float decayed = mu * m[part][i];
            m[part][i] = decayed + g[i];
            const volatile float ahead = mu * m[part][i];
            const volatile float direction = mu == 0 ? g[i] : nesterov ? g[i] + ahead : m[part][i];
            REQUIRE(d[i] == 0.7F * direction);
          }
        }
      }
      CHECK(outer.momentum().size() == (mu == 0 ? 0 : model.elements()));
      CHECK(outer.rounding().empty());
    }
  }
}

TEST_CASE("outer step: what the payload takes away of d comes with a later one", "[oracle]") {
  std::mt19937 random(13);
  const lamina::layout model = lamina_test::model_of({300, 64});
  for (const auto payload : {lamina::payload_type::int8, lamina::payload_type::bfloat16}) {
    lamina::outer_step<double> outer(model, {.payload = payload});
    tensors<double> rest = zeros_of<double>(model);
    for (int t = 0; t < 6; ++t) {
      const std::size_t part = static_cast<std::size_t>(t) % 2;
      auto d = lamina_test::random_integers<double>(random, model.sizes()[part], 1000);
      for (std::size_t i = 0; i < d.size(); ++i) rest[part][i] += d[i];
      outer(part, 0, d);
      for (std::size_t i = 0; i < d.size(); ++i) rest[part][i] -= d[i];
      for (std::size_t l = 0; l < 2; ++l) {
        CHECK(std::ranges::equal(rest[l], outer.rounding().subspan(model.offset(l), rest[l].size())));
      }
    }
  }
}

TEST_CASE("outer step: bad options, elements and checkpoints are refused") {
  const lamina::layout model = lamina_test::model_of({130});
  for (const double rate : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")})
    CHECK(throws<std::invalid_argument>([&] { lamina::outer_step<float>(model, {.rate = rate}); }));
  for (const double momentum : {-0.1, 1.0, std::nan("")})
    CHECK(throws<std::invalid_argument>([&] { lamina::outer_step<float>(model, {.momentum = momentum}); }));
  // They are used as T: what is in range as a double may not be.
  for (const double rate : {1e-60, 1e60})
    CHECK(throws<std::invalid_argument>([&] { lamina::outer_step<float>(model, {.rate = rate}); }));
  CHECK(throws<std::invalid_argument>([&] { lamina::outer_step<float>(model, {.momentum = 1 - 1e-9}); }));
  CHECK(lamina::outer_step<double>(model, {.rate = 1e-60, .momentum = 1 - 1e-9}).momentum().size() == 130);
  lamina::outer_step<float> outer(model, {.momentum = 0.5});
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

TEST_CASE("outer step: a mean that is not finite is refused before anything is written") {
  const lamina::layout model = lamina_test::model_of({5000});
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const auto payload : payloads) {
      lamina::outer_step<float> outer(model, {.momentum = 0.5, .payload = payload});
      std::vector<float> g(5000, 1.0F);
      outer(0, 0, g);
      const std::vector<float> m(outer.momentum().begin(), outer.momentum().end());
      const std::vector<float> e(outer.rounding().begin(), outer.rounding().end());
      std::vector<float> broken(5000, 1.0F);
      broken[4999] = bad;
      CHECK(throws<std::domain_error>([&] { outer(0, 0, broken); }));
      CHECK(broken[0] == 1.0F);
      CHECK(same_bits(m, std::vector<float>(outer.momentum().begin(), outer.momentum().end())));
      CHECK(same_bits(e, std::vector<float>(outer.rounding().begin(), outer.rounding().end())));
    }
  }
}

TEST_CASE("outer step: momentum in time, as its formula says", "[oracle]") {
  std::mt19937 random(22);
  const lamina::layout model = lamina_test::model_of({9000, 70});
  // With 0.25 over 2 steps each power is exact, and so are all bits.
  for (const auto& [mu, period] : {std::pair(0.25, 2.0), std::pair(0.9, 12.5), std::pair(0.5, 1.0)}) {
    lamina::outer_step<float> outer(model, {.rate = 0.75, .momentum = mu, .period = period});
    const auto mu_as_used = static_cast<double>(static_cast<float>(mu));
    tensors<float> m = zeros_of<float>(model);
    std::vector<std::uint64_t> came(2);
    std::uint64_t step = 0;
    for (int t = 0; t < 12; ++t) {
      step += 1 + lamina_test::below(random, 5);
      const std::size_t part = lamina_test::below(random, 2);
      const in_time of(mu_as_used, static_cast<double>(step - came[part]) / period);
      came[part] = step;
      const auto g = lamina_test::random_fractions<float>(random, model.sizes()[part]);
      auto d = g;
      outer(part, 0, std::span(d).first(64), step);
      outer(part, 64, std::span(d).subspan(64), step);
      for (std::size_t i = 0; i < g.size(); ++i) {
        const volatile float decayed = static_cast<float>(of.kept) * m[part][i];
        const volatile float joining = static_cast<float>(of.joins) * g[i];
        m[part][i] = decayed + joining;
        const volatile float ahead = static_cast<float>(of.counts) * m[part][i];
        const float expected = 0.75F * (g[i] + ahead);
        if (mu == 0.9) {
          REQUIRE(std::abs(d[i] - expected) <= 1e-5F * std::abs(g[i]) + 1e-5F * std::abs(ahead));
        } else {
          REQUIRE(d[i] == expected);
        }
      }
    }
    CHECK(std::ranges::equal(outer.came(), came));
  }
}

TEMPLATE_TEST_CASE(
    "outer step: where each part comes once a period, counting steps is counting sends, to the bit",
    "[oracle]", float, double) {
  std::mt19937 random(23);
  const lamina::layout model = lamina_test::model_of({9000});
  for (const auto payload : payloads) {
    for (const std::uint64_t period : {1, 7, 12}) {
      lamina::outer_options options{.rate = 0.7, .momentum = 0.9, .payload = payload};
      lamina::outer_step<TestType> sends(model, options);
      options.period = static_cast<double>(period);
      lamina::outer_step<TestType> steps(model, options);
      for (std::uint64_t t = 1; t <= 4; ++t) {
        auto d = lamina_test::random_fractions<TestType>(random, 9000);
        auto other = d;
        sends(0, 0, d);
        steps(0, 0, other, t * period);
        REQUIRE(same_bits(d, other));
      }
      CHECK(same_bits(sends.momentum(), steps.momentum()));
    }
  }
}

TEST_CASE("outer step: of a steady drift momentum in time is the same at whatever times the part comes",
          "[oracle]") {
  const lamina::layout model = lamina_test::model_of({64});
  for (const bool counts_time : {true, false}) {
    std::vector<double> reached;
    for (const std::uint64_t steps : {1, 4, 12}) {
      lamina::outer_step<double> outer(model, {.momentum = 0.5, .period = counts_time ? 4.0 : 0.0});
      for (std::uint64_t t = 1; t <= 400; ++t) {
        std::vector<double> g(64, 2.0 * static_cast<double>(steps));
        outer(0, 0, g, t * steps);
      }
      reached.push_back(outer.momentum()[0]);
    }
    const auto is_16 = [](double m) { return std::abs(m - 16) < 1e-9; };
    CHECK(std::ranges::all_of(reached, is_16) == counts_time);
  }
}

TEST_CASE("outer step: the powers of its momentum are the same bits on every machine") {
  // Of square roots and products by Python, in the order of detail/power.hpp.
  CHECK(same_bits(lamina::detail::root_power(0.9, 0.08), 0x1.fbb3db9ef506dp-1));
  CHECK(same_bits(lamina::detail::root_power(0.5, 1 / 65536.0), 0x1.fffe9d1c4b0f4p-1));
  CHECK(same_bits(lamina::detail::whole_power(0.99, 37), 0x1.60ff7878212b6p-1));
  CHECK(lamina::detail::root_power(0.7, 1) == 0.7);
  CHECK(lamina::detail::root_power(0, 0.5) == 0);
  CHECK(lamina::detail::whole_power(0.5, 0) == 1);
  CHECK(lamina::detail::whole_power(0.5, ~std::uint64_t{}) == 0);
  for (double exponent = 1 / 65536.0; exponent <= 1; exponent *= 1.37) {
    for (const double base : {1e-30, 0.1, 0.9, 0.999999})
      CHECK(std::abs(lamina::detail::root_power(base, exponent) - std::pow(base, exponent)) < 1e-14);
  }
}

TEST_CASE("outer step: saved and resumed, momentum in time goes on to the same bits", "[oracle]") {
  std::mt19937 random(24);
  const lamina::layout model = lamina_test::model_of({130, 64});
  const lamina::outer_options options{
      .rate = 0.7, .momentum = 0.9, .period = 3, .payload = lamina::payload_type::int8};
  lamina::outer_step<float> whole(model, options);
  const auto g = lamina_test::random_fractions<float>(random, 130);
  for (const std::uint64_t step : {2, 5, 6}) {
    auto d = g;
    whole(0, 0, d, step);
  }
  for (const bool keeps_came : {true, false}) {
    lamina::outer_step<float> resumed(model, options);
    lamina::outer_step<float> uninterrupted = whole;
    resumed.restore(whole.momentum(), whole.rounding(),
                    keeps_came ? whole.came() : std::vector<std::uint64_t>(2));
    auto d = g;
    auto other = g;
    uninterrupted(0, 0, d, 8);
    resumed(0, 0, other, 8);
    CHECK(same_bits(d, other) == keeps_came);
  }
}

TEST_CASE("outer step: bad periods, steps and times are refused, and change nothing") {
  const lamina::layout model = lamina_test::model_of({130, 64});
  using options = lamina::outer_options;
  for (const double period : {-1.0, 0.5, 65537.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
    CHECK(lamina_test::contains(lamina_test::message_of<std::invalid_argument>([&] {
                                  lamina::outer_step<float>(model,
                                                            options{.momentum = 0.5, .period = period});
                                }),
                                "the outer period must be 0, or lie in [1, 65536]"));
  }
  CHECK(lamina_test::message_of<std::invalid_argument>([&] {
          lamina::outer_step<float>(model, options{.momentum = 0.5, .nesterov = false, .period = 2});
        }) == "the outer period is for Nesterov's momentum: nesterov must be true");
  CHECK(lamina::outer_step<float>(model, options{.period = 2}).came().empty());  // there is no momentum

  lamina::outer_step<float> outer(model, options{.momentum = 0.5, .period = 2});
  std::vector<float> g(130, 1.0F);
  const auto message_of = [&](std::uint64_t step) {
    return lamina_test::message_of<std::logic_error>([&] { outer(0, 0, g, step); });
  };
  CHECK(message_of(0) == "the outer step: 'layer0' came in step 0, and comes again in step 0");
  outer(0, 0, std::span(g).first(128), 5);
  outer(0, 128, std::span(g).subspan(128), 5);
  const std::vector<float> m(outer.momentum().begin(), outer.momentum().end());
  CHECK(message_of(4) == "the outer step: 'layer0' came in step 5, and comes again in step 4");
  std::vector<float> broken(130, std::numeric_limits<float>::infinity());
  CHECK(throws<std::domain_error>([&] { outer(0, 0, broken, 9); }));
  CHECK(std::ranges::equal(outer.came(), std::vector<std::uint64_t>{5, 0}));
  CHECK(same_bits(m, outer.momentum()));

  lamina::outer_step<float> resumed(model, outer.options());
  CHECK(lamina_test::message_of<std::invalid_argument>([&] { resumed.restore(outer.momentum(), {}); }) ==
        "the saved outer step has the steps of 0 parts, this one of 2");
  resumed.restore(outer.momentum(), {}, outer.came());
  CHECK(throws<std::logic_error>([&] { resumed(0, 0, g, 5); }));  // between steps it was saved
  outer.restore(m, {}, std::vector<std::uint64_t>{5, 0});
  CHECK(throws<std::logic_error>([&] { outer(0, 0, g, 5); }));
}
