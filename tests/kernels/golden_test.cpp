// SPDX-License-Identifier: MIT
// Bits written down once: every machine, compiler and instruction set computes these values and writes these frames.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "kernel_cases.hpp"
#include "lamina/codec.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using namespace lamina_test;

namespace {

// The same numbers everywhere: integers of the mantissa's width times powers of two, so that nothing rounds.
template <class T>
std::vector<T> golden_values(std::uint32_t seed, std::size_t count) {
  std::mt19937 random(seed);
  std::vector<T> values(count);
  for (T& value : values) {
    std::int64_t integer = static_cast<std::int32_t>(random()) / 256;
    if (sizeof(T) == 8) integer = integer * (1 << 28) + static_cast<std::int64_t>(random() % (1U << 28U));
    value =
        std::ldexp(static_cast<T>(integer), (sizeof(T) == 8 ? -56 : -28) + static_cast<int>(random() % 12));
  }
  return values;
}

template <lamina::half_element Half>
std::vector<Half> golden_halves(std::uint32_t seed, std::size_t count) {
  std::mt19937 random(seed);
  std::vector<Half> halves(count);
  // Magnitudes below 2, denormals and zeros of both signs among them.
  for (Half& half : halves) half.bits = static_cast<std::uint16_t>(random() & 0xbfffU);
  return halves;
}

template <class G>
std::vector<G> golden(std::uint32_t seed, std::size_t count) {
  if constexpr (lamina::half_element<G>) {
    return golden_halves<G>(seed, count);
  } else {
    return golden_values<G>(seed, count);
  }
}

// FNV-1a, continued from the hash of what came before.
std::uint64_t hash_of(std::span<const std::byte> bytes, std::uint64_t hash = 0xcbf29ce484222325) {
  for (const std::byte each : bytes) hash = (hash ^ static_cast<std::uint8_t>(each)) * 0x100000001b3;
  return hash;
}

template <class G>
constexpr std::size_t column = std::is_same_v<G, float>             ? 0
                               : std::is_same_v<G, double>          ? 1
                               : std::is_same_v<G, lamina::float16> ? 2
                                                                    : 3;

// A column for each type that elements have.
using golden_row = std::array<std::uint64_t, 4>;
struct golden_table {
  std::size_t elements;
  std::array<golden_row, functor_names.size()> expected;
};

constexpr golden_table golden_tables[] = {
    // Two whole blocks and 1,808 elements: 28 rows of lanes and 16 lanes.
    {10'000,
     {{
         {0x4014f2048e8a71de, 0x40160b084dbbd3d0, 0x3fc91f1a5119ce07, 0x3f97dd59652bd3c3},  // mean_abs
         {0x40e9916e90000000, 0x40eae877a2e3c810, 0x409eaa77a0000000, 0x406d21b3a0000000},  // l1_norm
         {0x4092e77f2c4c0f4c, 0x4093d44ea3a4c027, 0x404699901d4de4c6, 0x402e761a33511dfd},  // l2_norm
         {0x4028328e4d2e280f, 0x402961ac569570d5, 0x3fdced85443abe6f,
          0x3fc37ec9169a50a2},  // root_mean_square
         {0x404fee3380000000, 0x404ffe6164bac63c, 0x3ffff80000000000, 0x3fffc00000000000},  // max_abs
         {0xbfd29bfded288ce7, 0x3fbd82a70f6f09b2, 0x3f5695706f694467, 0x3f3644a31f8a0903},  // signed_mean
         {0x413655f398000000, 0x4138933bea1a5850, 0x409fec0e28000000, 0x406cff2500000000},  // own_square_sum
         {0x4014f2048e8a71de, 0x40160b084dbbd3d0, 0x3fc91f1a5119ce07,
          0x3f97dd59652bd3c3},  // own_scalar_mean_abs
     }}},
    // A run of 64 blocks, and one of nine whole blocks and 992 elements.
    {300'000,
     {{
         {0x40157685164f3e73, 0x40157e380d29c3bf, 0x3fc80f40397406aa, 0x3f98108156191149},  // mean_abs
         {0x41388ffa9e600000, 0x413898ca355063bc, 0x40eb88b407c00000, 0x40bb8a2383800000},  // l1_norm
         {0x40ba6e17e6550a8b, 0x40ba7ddc0b4b5784, 0x406e3eeceefcd5b9, 0x40555a1b303cf113},  // l2_norm
         {0x4028b4cebf7af1c2, 0x4028c38ba7829260, 0x3fdc45ee3cbc8f33,
          0x3fc3f59b18217052},  // root_mean_square
         {0x404fffe9c0000000, 0x404ffff7162c37c8, 0x3ffffc0000000000, 0x3fffe00000000000},  // max_abs
         {0xbfa2b8a0a5966eb4, 0xbf8afbe3d3f2d8cd, 0xbf3f8e1975c60e25, 0x3f33d899c15bc718},  // signed_mean
         {0x4185d46194800000, 0x4185ee74975bc622, 0x40ec9677e8e00000, 0x40bc7e82cd400000},  // own_square_sum
         {0x40157685164f3e73, 0x40157e380d29c3bf, 0x3fc80f40397406aa,
          0x3f98108156191149},  // own_scalar_mean_abs
     }}},
};

}  // namespace

TEMPLATE_TEST_CASE("golden: the value of each functor", "", float, double, lamina::float16,
                   lamina::bfloat16) {
  for (const golden_table& table : golden_tables) {
    const auto values = golden<TestType>(2020, table.elements);
    for_each_functor([&](std::size_t f, const auto& functor) {
      INFO(functor_names[f] << " of " << table.elements);
      CHECK(std::bit_cast<std::uint64_t>(functor(values)) == table.expected[f][column<TestType>]);
    });
  }
}

// As from a layer of a thousand million elements, and from smaller ones.
TEST_CASE("golden: the sum of many totals") {
  constexpr std::pair<std::size_t, std::uint64_t> expected[] = {{64, 0x40462b3255ba4550},
                                                                {65, 0x40408ba3a48038c7},
                                                                {4096, 0xc07c92a57881d05e},
                                                                {4097, 0xc07c96315cd8f3d0},
                                                                {270'401, 0x4082213757a54924}};
  const auto totals = golden<double>(2021, 270'401);
  for (const auto& [count, bits] : expected) {
    const double sum = lamina::detail::finished_value(lamina::l1_norm{}, std::span(totals).first(count), 1);
    INFO(count << " totals");
    CHECK(std::bit_cast<std::uint64_t>(sum) == bits);
  }
}

// Frames of three steps, and the residual that they leave, with momentum: a threshold between the layers, rounding, and
// what it leaves over.
TEMPLATE_TEST_CASE("golden: the frames of a worker and the residual behind them", "", float, double) {
  struct row {
    lamina::payload_type type;
    std::array<std::uint64_t, 2> frames, checksum, residual;  // of float, of double
  };
  constexpr row rows[] = {
      {lamina::payload_type::as_is,
       {0xa231c2b678f0ca72, 0xc2e3df747f744519},
       {0xc94649ab61b8d02e, 0x6e1cee459342c333},
       {0xdb98f84499702565, 0x49b1c0d3b17da107}},
      {lamina::payload_type::float16,
       {0x2787a59b54c09145, 0x70c1f534d8746385},
       {0xfda050de47d86103, 0xd0f00d1b65cc6f59},
       {0xd9a9097b1920b8f3, 0x9d88c412f86e53d3}},
      {lamina::payload_type::bfloat16,
       {0x44f73c48b5fa124d, 0x7adea32e53bef155},
       {0x47b1028c763c799e, 0x79930f3846d302e1},
       {0x68079d6888e2dcaf, 0x291fe2bbcd97b615}},
      {lamina::payload_type::int8,
       {0x14571e7057624f67, 0x261b6edc53aa2e1c},
       {0x4cf338ffb3e4af01, 0x55d4e03fec5d4393},
       {0x8bc80b9a3e7aefb8, 0x5f6f42291293f28b}},
      {lamina::payload_type::int4,
       {0x410f23a09db0a185, 0xdd6d7bf9b429bf62},
       {0xa94cfe547c0eddaf, 0xe94639ad300b9247},
       {0xc65b3bdf272ce173, 0xd7c5aaa40824394f}},
  };
  constexpr std::size_t c = column<TestType>;
  const lamina::layout model = model_of({5000, 0, 70, 4096, 1});
  for (const row& expected : rows) {
    lamina::worker<TestType> worker(
        model, {.drop_ratio = 0.5, .momentum = 0.9, .payload = expected.type, .sender = 3});
    std::uint64_t frames = hash_of({});
    std::uint64_t checksum = 0;
    for (std::uint32_t step = 0; step < 3; ++step) {
      auto of_worker = worker.begin();
      for (std::size_t l = 0; l < model.layers(); ++l) {
        REQUIRE(
            of_worker.add(l, golden<TestType>(static_cast<std::uint32_t>(100 * step + l), model.sizes()[l])));
      }
      std::vector<std::byte> frame = of_worker.frame().to_bytes();
      of_worker.commit();
      std::memcpy(&checksum, frame.data() + 56, sizeof checksum);
      // Frames that go without a checksum differ in this field and in the flags.
      std::fill_n(frame.begin() + 56, 8, std::byte{0});
      std::fill_n(frame.begin() + 8, 4, std::byte{0});
      frames = hash_of(frame, frames);
    }
    INFO("payload type " << static_cast<int>(expected.type));
    CHECK(frames == expected.frames[c]);
    CHECK(checksum == expected.checksum[c]);
    CHECK(hash_of(std::as_bytes(worker.residual().elements())) == expected.residual[c]);
  }
}
