// SPDX-License-Identifier: MIT
#include "lamina/collectives/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <stdexcept>

#include "catch.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/lamina.hpp"
#include "simulated_ranks.hpp"

using namespace lamina_test;
using collectives::algorithm;
using collectives::operation;

namespace {

std::vector<std::size_t> lengths_for(std::size_t ranks, std::mt19937& random) {
  return {0, 1, ranks - 1, ranks, ranks + 1, 1000, 1 + below(random, 3000)};
}

}  // namespace

// Invariants of a schedule: for all ranks at once, and for every length at the edges.
TEST_CASE("schedule: every send has its receive, sums are the reference, bytes are the formula") {
  std::mt19937 random(1901);
  for (std::size_t ranks = 1; ranks <= 64; ++ranks) {
    for (const std::size_t elements : lengths_for(ranks, random)) {
      const rank_vectors inputs = random_ranks(random, ranks, elements);
      for (const algorithm how : collectives::all_algorithms) {
        INFO(collectives::name_of(how) << ", " << ranks << " ranks, " << elements << " elements");
        const rank_schedules all = schedules_of(operation::all_reduce, how, ranks, elements);
        REQUIRE(mismatch_in(all, elements) == "");
        rank_vectors vectors = inputs;
        simulate(all, vectors);
        const std::vector<float> expected = reference_sum(how, inputs);
        for (std::size_t r = 0; r < ranks; ++r) {
          REQUIRE(same_bits(vectors[r], expected));
          REQUIRE(sent(all[r]).elements == formula_of_sent(how, ranks, r, elements));
        }
      }
    }
  }
}

TEST_CASE("schedule: the halves of an algorithm give each rank what it owns, and then all of it") {
  std::mt19937 random(1902);
  for (std::size_t ranks = 1; ranks <= 64; ++ranks) {
    for (const std::size_t elements : lengths_for(ranks, random)) {
      for (const algorithm how : collectives::all_algorithms) {
        INFO(collectives::name_of(how) << ", " << ranks << " ranks, " << elements << " elements");
        rank_vectors vectors = random_ranks(random, ranks, elements);
        const std::vector<float> expected = reference_sum(how, vectors);
        const rank_schedules reduce = schedules_of(operation::reduce_scatter, how, ranks, elements);
        const rank_schedules gather = schedules_of(operation::all_gather, how, ranks, elements);
        REQUIRE(mismatch_in(reduce, elements) == "");
        REQUIRE(mismatch_in(gather, elements) == "");
        simulate(reduce, vectors);
        std::size_t owned_by_all = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
          const collectives::element_range own = collectives::owned_elements(how, ranks, r, elements);
          owned_by_all += own.size();
          for (std::size_t i = 0; i < elements; ++i) {
            const bool is_own = i >= own.begin && i < own.end;
            if (is_own) REQUIRE(same_bits(std::span(&vectors[r][i], 1), std::span(&expected[i], 1)));
            // What others own must come from them.
            if (!is_own) vectors[r][i] = std::numeric_limits<float>::quiet_NaN();
          }
          const std::size_t both = sent(reduce[r]).elements + sent(gather[r]).elements;
          REQUIRE(both == formula_of_sent(how, ranks, r, elements));
        }
        REQUIRE(owned_by_all == elements);
        simulate(gather, vectors);
        for (const auto& each : vectors) REQUIRE(same_bits(each, expected));
      }
    }
  }
}

TEST_CASE("schedule: shards stay right where the product of elements and ranks overflows") {
  const std::size_t elements = std::numeric_limits<std::size_t>::max() / 3;
  std::size_t end = 0;
  for (std::size_t r = 0; r < 7; ++r) {
    const auto own = collectives::owned_elements(algorithm::pairwise, 7, r, elements);
    CHECK(own.begin == end);
    CHECK(own.size() - elements / 7 <= 1);
    end = own.end;
  }
  CHECK(end == elements);
}

TEST_CASE("schedule: the rounds of each half of a pairwise sum are under way together, eight at most") {
  for (const algorithm how : collectives::all_algorithms) {
    std::string together;
    for (const auto& each : rounds_of(operation::all_reduce, how, 12, 3, 1200))
      together += each.joins ? '+' : '|';
    CHECK((together.find('+') != std::string::npos) == (how == algorithm::pairwise));
    if (how == algorithm::pairwise) CHECK(together == "|+++++++|++|+++++++|++");
  }
}

TEST_CASE("schedule: rounds that join others in spite of what they change are noticed") {
  for (const algorithm how : {algorithm::ring, algorithm::halving_doubling}) {
    rank_schedules all = schedules_of(operation::all_reduce, how, 4, 100);
    for (auto& rounds : all) rounds.at(1).joins = true;
    CHECK(mismatch_in(all, 100) != "");
  }
}

// A sum is so told from another of the same numbers.
TEST_CASE("schedule: a butterfly that adds in the order of a ring is noticed") {
  std::mt19937 random(1903);
  const rank_vectors inputs = random_ranks(random, 8, 100);
  rank_vectors vectors = inputs;
  simulate(schedules_of(operation::all_reduce, algorithm::ring, 8, 100), vectors);
  CHECK_FALSE(same_bits(vectors[0], reference_sum(algorithm::halving_doubling, inputs)));
}

// The second oracle.
TEST_CASE("sum: integers add up alike in every order, and as the server adds them") {
  std::mt19937 random(1904);
  for (std::size_t ranks = 1; ranks <= 17; ++ranks) {
    const std::size_t elements = 1 + below(random, 500);
    rank_vectors inputs;
    for (std::size_t r = 0; r < ranks; ++r) inputs.push_back(random_integers<float>(random, elements, 1000));
    const std::vector<float> expected = reference_sum(algorithm::pairwise, inputs);
    for (const algorithm how : collectives::all_algorithms)
      CHECK(same_bits(reference_sum(how, inputs), expected));
  }
}

TEST_CASE("sum: pairwise is the mean of the server, bit for bit") {
  std::mt19937 random(1905);
  const std::size_t ranks = 5;
  const rank_vectors inputs = random_ranks(random, ranks, 777);
  const lamina::layout model = model_of({777});
  lamina::server<float> server(model, {.workers = ranks});
  lamina::frame_encoder<float> encoder(model);
  lamina::selection all(model);
  all.send_all();
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto& frame = encoder.encode({.sender = static_cast<std::uint32_t>(r)}, all,
                                       [&](std::size_t) { return std::span(inputs[r]); });
    REQUIRE_FALSE(server.add(frame.to_bytes()));
  }
  std::vector<float> mean(777);
  server.update([&](std::size_t, std::size_t begin, std::span<const float> block) {
    std::ranges::copy(block, mean.begin() + static_cast<std::ptrdiff_t>(begin));
  });
  std::vector<float> expected = reference_sum(algorithm::pairwise, inputs);
  for (float& each : expected) each /= static_cast<float>(ranks);
  CHECK(same_bits(mean, expected));
}

TEST_CASE("sum: fractions differ between algorithms by rounding alone") {
  std::mt19937 random(1906);
  for (std::size_t ranks = 2; ranks <= 17; ++ranks) {
    const rank_vectors inputs = random_ranks(random, ranks, 300);
    const std::vector<float> first = reference_sum(algorithm::pairwise, inputs);
    for (const algorithm how : collectives::all_algorithms) {
      const std::vector<float> other = reference_sum(how, inputs);
      for (std::size_t i = 0; i < 300; ++i) {
        double magnitude = 0;
        for (const auto& each : inputs) magnitude += std::abs(double(each[i]));
        CHECK(std::abs(double(first[i]) - double(other[i])) <=
              static_cast<double>(ranks) * 0x1p-24 * magnitude * 2);
      }
    }
  }
  const rank_vectors four = random_ranks(random, 4, 50);
  const auto sum = [&](algorithm how) { return reference_sum(how, four); };
  for (std::size_t i = 0; i < 50; ++i) {
    const volatile float far0 = four[0][i] + four[2][i];
    const volatile float far1 = four[1][i] + four[3][i];
    CHECK(sum(algorithm::halving_doubling)[i] == far0 + far1);
  }
}

TEST_CASE("sum: the kernel folds in rank order, whichever rank is its own") {
  std::mt19937 random(1907);
  for (const std::size_t ranks : {1U, 2U, 3U, 6U}) {
    const rank_vectors inputs = random_ranks(random, ranks, 203);
    const std::vector<float> expected = reference_sum(algorithm::pairwise, inputs);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      std::vector<float> own = inputs[rank];
      std::vector<float> held(203 * (ranks - 1));
      for (std::size_t r = 0; r < ranks; ++r) {
        if (r == rank) continue;
        std::ranges::copy(inputs[r],
                          held.begin() + static_cast<std::ptrdiff_t>(203 * collectives::held_place(rank, r)));
      }
      collectives::fold_in_rank_order(lamina::payload_type::as_is, rank, ranks, own,
                                      std::as_bytes(std::span(held)));
      CHECK(same_bits(own, expected));
    }
  }
}

TEST_CASE("schedule: what cannot be is refused by name") {
  CHECK(message_of<std::out_of_range>([] {
          std::ignore = rounds_of(operation::all_reduce, algorithm::ring, 4, 4, 10);
        }) == "rank 4 is out of range: there are 4 ranks");
  CHECK(message_of<std::invalid_argument>([] {
          std::ignore = reference_sum(algorithm::ring, rank_vectors{{1, 2}, {1}});
        }) == "rank 1 has 1 elements, rank 0 has 2");
}
