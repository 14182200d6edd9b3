// SPDX-License-Identifier: MIT
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>
#include <tuple>

#include "catch.hpp"
#include "counted_allocations.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

using namespace lamina_test;

TEST_CASE("allocation: allocations are counted") {
  int* volatile kept = nullptr;  // so that the compiler does not leave the allocation out
  CHECK(allocations_of([&] { kept = new int(1); }) == 1);
  delete kept;
  CHECK(allocations_of([] {}) == 0);
  CHECK(allocations_of([] { lamina::residual_accumulator<float> residual(model_of({100})); }) > 2);
}

TEMPLATE_TEST_CASE("allocation: a worker allocates nothing after its first step", "", float, double) {
  std::mt19937 random(301);
  std::vector<std::size_t> sizes(161);
  for (std::size_t& size : sizes) size = below(random, 3000);
  const lamina::layout model = model_of(sizes);
  const auto refresh = GENERATE(0, 1, 2);
  lamina::compressor_options options;
  options.decide = GENERATE(lamina::decision_timing::at_end, lamina::decision_timing::as_ready,
                            lamina::decision_timing::ahead);
  if (options.decide != lamina::decision_timing::at_end && refresh == 1) options.byte_budget = 0.2;
  options.drop_ratio = 0.8;
  options.refresh = refresh == 0   ? lamina::refresh_schedule::every(1)
                    : refresh == 1 ? lamina::refresh_schedule::every(3)
                                   : lamina::refresh_schedule::fixed(2);
  lamina::gradient_compressor<TestType> compressor(model, options);
  for (int step = 1; step <= 10; ++step) {
    std::vector<std::vector<TestType>> gradients;
    for (const std::size_t size : sizes) gradients.push_back(random_integers<TestType>(random, size));
    const long count = allocations_of([&] {
      for (std::size_t l = 0; l < sizes.size(); ++l) compressor.accumulate(l, gradients[l]);
      compressor.select();
      if (options.decide == lamina::decision_timing::ahead)
        compressor.plan_next(compressor.predicted_values());
      compressor.encode();
      compressor.encode();
      if (step % 4 != 0) compressor.commit();
    });
    if (step > 1) CHECK(count == 0);
  }
}

// No frame is built on the way, whose bytes nobody reads.
TEST_CASE("allocation: packing in half the bytes takes no memory, in the first step as well") {
  const lamina::layout model = model_of({5000, 64, 9000});
  lamina::gradient_compressor<float> compressor(model,
                                                {.drop_ratio = 0, .payload = lamina::payload_type::bfloat16});
  for (std::size_t l = 0; l < 3; ++l) compressor.accumulate(l, std::vector<float>(model.sizes()[l], 1.001F));
  compressor.select();
  std::vector<lamina::bfloat16> packed(model.elements());
  CHECK(bytes_of([&] { compressor.pack(std::span(packed)); }) == 0);
  // What the collective writes over it does not count.
  std::ranges::fill(packed, lamina::bfloat16{0x4000});
  CHECK(bytes_of([&] { compressor.commit(); }) == 0);
  CHECK(compressor.residual()[0][0] == 1.001F - 1.0F);
}

TEMPLATE_TEST_CASE("allocation: a step in parts allocates nothing after the first with as many", "", float,
                   double) {
  const lamina::layout model = model_of({500, 64, 0, 900, 1, 30});
  for (const auto payload : {lamina::payload_type::as_is, lamina::payload_type::int8}) {
    lamina::gradient_compressor<TestType> compressor(
        model, {.drop_ratio = 0, .decide = lamina::decision_timing::as_ready, .payload = payload});
    const std::vector<TestType> gradient(900, 1);
    for (int step = 1; step <= 4; ++step) {
      const long count = allocations_of([&] {
        for (std::size_t l = model.layers(); l-- > 0;) {
          compressor.accumulate(l, std::span(gradient).first(model.sizes()[l]));
          if (l > 0) compressor.encode_ready();
        }
        compressor.encode_rest();
        compressor.commit();
      });
      CHECK((count == 0) == (step > 1));
    }
  }
}

TEMPLATE_TEST_CASE("allocation: the commit of a frame that arrived in part allocates nothing", "", float,
                   double) {
  const lamina::layout model = model_of({5000, 64, 9000, 1});
  for (const auto payload :
       {lamina::payload_type::as_is, lamina::payload_type::float16, lamina::payload_type::bfloat16,
        lamina::payload_type::int8, lamina::payload_type::int4}) {
    for (const double momentum : {0.0, 0.5}) {
      lamina::gradient_compressor<TestType> compressor(
          model, {.drop_ratio = 0, .momentum = momentum, .payload = payload});
      for (int step = 1; step <= 3; ++step) {
        for (std::size_t l = 0; l < 4; ++l) {
          compressor.accumulate(l, std::vector<TestType>(model.sizes()[l], 1));
        }
        compressor.encode();
        lamina::delivery arrived(compressor.chosen(), 64);
        for (std::size_t chunk = 0; chunk < arrived.chunks(0); chunk += 3) arrived.lose(0, chunk);
        arrived.lose(1, 0);
        CHECK(allocations_of([&] { compressor.commit(arrived); }) == 0);
        CHECK(compressor.residual()[0][0] != 0);
      }
    }
  }
}

TEST_CASE("allocation: functors, publisher and mean allocate nothing after the first step") {
  const lamina::layout model = model_of(std::vector<std::size_t>(20, 5000));
  const std::vector<float> values(5000, 1);
  lamina::parameter_publisher<float> publisher(model, 2);
  lamina::selection all(model);
  for (std::size_t l = 0; l < 20; ++l) all.send(l);
  const auto layer = [&](std::size_t) -> const auto& {
    return values;
  };
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, 1);
  lamina::frame_encoder<float> encoder(model);
  for (std::uint64_t step = 1; step <= 3; ++step) {
    const auto bytes = encoder.encode(lamina::frame_kind::gradients, step, 0, all, layer).to_bytes();
    aggregator.add(lamina::decode<float>(bytes, model));
    const long count = allocations_of([&] {
      lamina::mean_abs{}(values);
      for (std::size_t l = 0; l < 20; ++l) aggregator.mean(l, [](std::size_t, std::span<const float>) {});
      publisher.update(aggregator.arrived());
      std::ignore = publisher.encode(0, step, layer);
      publisher.commit(0);
      std::ignore = publisher.encode_for_all(step, layer);
      publisher.commit_all();
      aggregator.next_step();
    });
    if (step > 1) CHECK(count == 0);
  }
}

// Of docs/guide/threads-and-memory.md: once everything has been sent, in bytes an element.
TEST_CASE("allocation: what workers keep") {
  constexpr std::size_t elements = 1 << 20;
  const lamina::layout model({{"weight", {elements}}});
  const std::vector<float> numbers(elements, 1), others(elements, 2);
  const auto kept = [&](auto&& made) { return static_cast<double>(bytes_of(made)) / elements; };
  const auto worker = [&](lamina::compressor_options options) {
    options.drop_ratio = 0;
    return kept([&] {
      lamina::gradient_compressor<float> compressor(model, options);
      for (int step = 0; step < 2; ++step) {
        compressor.accumulate(0, numbers);
        compressor.encode();
        compressor.commit();
      }
    });
  };
  const auto drift = [&](lamina::payload_type payload) {
    return kept([&] {
      lamina::drift_compressor<float> compressor(model, {.drop_ratio = 0, .payload = payload});
      compressor.observe_all(std::array{std::span(numbers)}, std::array{std::span(others)});
      compressor.select();
      compressor.encode(std::array{std::span(numbers)}, std::array{std::span(others)});
      compressor.commit();
    });
  };
  const auto outer = [&](const lamina::outer_options& options) {
    return kept([&] { lamina::outer_step<float> step(model, options); });
  };
  using enum lamina::payload_type;
  const auto about = [](double bytes) { return Approx(bytes).margin(0.01); };
  CHECK(worker({}) == about(4));
  CHECK(worker({.momentum = 0.9}) == about(4 + 4));
  CHECK(worker({.payload = bfloat16}) == about(4 + 2));
  CHECK(worker({.payload = int8}) == about(4 + 1 + 1.0 / 64));
  CHECK(worker({.payload = int4}) == about(4 + 0.5 + 1.0 / 64));
  CHECK(drift(as_is) == about(4));
  CHECK(drift(int4) == about(4 + 0.5 + 1.0 / 64));
  CHECK(outer({}) == about(0));
  CHECK(outer({.momentum = 0.5}) == about(4));
  CHECK(outer({.momentum = 0.5, .payload = int4}) == about(4 + 4));
}

TEST_CASE("allocation: decode allocates by the layout, not by what the bytes claim") {
  const lamina::layout model = model_of({3, 4});
  lamina::frame_encoder<float> encoder(model);
  const auto good = encoder
                        .encode(lamina::frame_kind::gradients, 1, 0, lamina::selection(model),
                                [](std::size_t) { return std::span<const float>(); })
                        .to_bytes();
  for (std::size_t at = 0; at < good.size(); ++at) {
    auto bytes = good;
    bytes[at] = std::byte{0xff};
    std::error_code error;
    CHECK(allocations_of([&] { lamina::decode<float>(bytes, model, error); }) <= 2);
  }
}

TEST_CASE("allocation: an encode without memory leaves the step selected, and goes on when there is some") {
  const lamina::layout model = model_of({4000, 10});
  lamina::compressor_options options;
  options.byte_budget = 0.9;
  options.momentum = 0.5;
  options.payload = lamina::payload_type::int8;
  lamina::gradient_compressor<float> compressor(model, options);
  const std::vector<std::vector<float>> gradients = {std::vector<float>(4000, 1), std::vector<float>(10, 2)};
  compressor.accumulate_all(gradients);
  auto expected = compressor;
  for (long more = 0; more < 20; ++more) {
    std::error_code error;
    granted = more;
    const std::size_t bytes = compressor.encode(error).size_bytes();
    granted = std::numeric_limits<long>::max();
    if (!error) break;
    CHECK(error == std::errc::not_enough_memory);
    CHECK(bytes == 0);
    CHECK_THROWS_AS(compressor.commit(), std::logic_error);
    CHECK(compressor.step() == 1);
  }
  CHECK(compressor.encode().to_bytes() == expected.encode().to_bytes());
  compressor.commit();
  expected.commit();
  CHECK(compressor.save() == expected.save());
}

TEST_CASE("allocation: decode reports that the index cannot be allocated") {
  const lamina::layout model = model_of({3, 4});
  lamina::frame_encoder<float> encoder(model);
  const auto bytes = encoder
                         .encode(lamina::frame_kind::gradients, 1, 0, lamina::selection(model),
                                 [](std::size_t) { return std::span<const float>(); })
                         .to_bytes();
  std::error_code error;
  granted = 0;
  const auto view = lamina::decode<float>(bytes, model, error);
  granted = std::numeric_limits<long>::max();
  CHECK(error == std::errc::not_enough_memory);
  CHECK(view.layers() == 0);
}
