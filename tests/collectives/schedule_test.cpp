// SPDX-License-Identifier: MIT
// Schedules and plans as data: for all ranks at once, and for every length at the edges.
#include "lamina/collectives/schedule.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>

#include "catch.hpp"
#include "lamina/collectives/plan.hpp"
#include "lamina/lamina.hpp"
#include "ranks.hpp"

namespace lamina_test::schedule_test {

using collectives::algorithm_choice;
using collectives::layer_class;
using collectives::plan;

namespace {

rank_vectors random_ranks(std::mt19937& random, std::size_t ranks, std::size_t elements) {
  rank_vectors made;
  for (std::size_t r = 0; r < ranks; ++r) made.push_back(random_fractions<float>(random, elements));
  return made;
}

rank_schedules schedules_of(operation what, algorithm how, std::size_t ranks, std::size_t elements) {
  rank_schedules all;
  for (std::size_t r = 0; r < ranks; ++r) all.push_back(rounds_of(what, how, ranks, r, elements));
  return all;
}

// What does not match: a send without its receive of the same elements in the same round, a rank out of range, elements that are
// sent and overwritten in one round. Empty if all is well.
std::string mismatch_in(const rank_schedules& all, std::size_t elements) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() != all[0].size()) return "rank " + std::to_string(r) + " has another number of rounds";
    for (std::size_t k = 0; k < all[r].size(); ++k) {
      const collectives::round& own = all[r][k];
      const std::string where = "rank " + std::to_string(r) + ", round " + std::to_string(k);
      for (const auto* each : {&own.send, &own.receive}) {
        if (!each->has_value()) continue;
        const collectives::transfer& given = **each;
        if (given.peer >= all.size() || given.peer == r || given.elements.size() == 0 ||
            given.elements.end > elements || given.elements.begin > given.elements.end)
          return where + ": a transfer that cannot be";
        const collectives::round& theirs = all[given.peer][k];
        const auto& counterpart = each == &own.send ? theirs.receive : theirs.send;
        if (!counterpart || counterpart->peer != r) return where + ": nobody at the other end";
        if (counterpart->elements != given.elements && own.on_arrival != collectives::arrival::hold)
          return where + ": other elements at the other end";
        if (counterpart->elements.size() != given.elements.size()) return where + ": another length";
      }
      if (k == 0 && own.joins) return where + ": joins nothing";
      if (own.joins != all[0][k].joins) return where + ": joins where rank 0 does not";
      if (own.joins && own.on_arrival == collectives::arrival::add) return where + ": adds and joins";
      // Those that are under way together with it, from the first of them on.
      std::size_t other = k;
      while (all[r][other].joins) --other;
      do {
        if (own.on_arrival == collectives::arrival::put && all[r][other].send && own.receive &&
            all[r][other].send->elements.overlaps(own.receive->elements))
          return where + ": elements are sent while others are put in their place";
      } while (++other < all[r].size() && all[r][other].joins);
    }
  }
  return "";
}

// Runs the schedules on the vectors of the ranks.
void simulate(const rank_schedules& all, rank_vectors& vectors) {
  const std::size_t ranks = vectors.size();
  std::vector<rank_vectors> held(ranks, rank_vectors(ranks));
  for (std::size_t k = 0; k < all[0].size(); ++k) {
    const rank_vectors before = vectors;
    for (std::size_t r = 0; r < ranks; ++r) {
      const collectives::round& each = all[r][k];
      if (each.receive) {
        const std::size_t from = each.receive->peer;
        const collectives::element_range out = all[from][k].send->elements;
        for (std::size_t i = 0; i < out.size(); ++i) {
          const float arrived = before[from][out.begin + i];
          float& own = vectors[r][each.receive->elements.begin + i];
          if (each.on_arrival == collectives::arrival::add) own += arrived;
          if (each.on_arrival == collectives::arrival::put) own = arrived;
          if (each.on_arrival == collectives::arrival::hold) held[r][from].push_back(arrived);
        }
      }
      for (std::size_t i = each.fold.begin; i < each.fold.end; ++i) {
        const auto of = [&](std::size_t rank) {
          return rank == r ? before[r][i] : held[r][rank][i - each.fold.begin];
        };
        vectors[r][i] = chain_sum(of, 0, ranks);
      }
    }
  }
}

std::vector<std::size_t> reversed_order(std::size_t layers) {
  std::vector<std::size_t> order(layers);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

plan plan_of(const std::vector<std::size_t>& sizes, const collectives::plan_options& options = {},
             std::size_t ranks = 4) {
  return plan_for(model_of(sizes), ranks, options);
}

std::vector<std::vector<std::size_t>> layers_in(const plan& given) {
  std::vector<std::vector<std::size_t>> all;
  for (const auto& each : given.buckets()) all.push_back(each.layers);
  return all;
}

}  // namespace

TEST_CASE("schedule: every send has its receive, sums are the reference, bytes are the formula") {
  std::mt19937 random(1902);
  for (const std::size_t ranks : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 9U, 12U, 15U, 16U, 17U, 33U, 64U}) {
    for (const std::size_t elements : {std::size_t{0}, std::size_t{1}, ranks - 1, ranks, ranks + 1,
                                       std::size_t{100}, 1 + below(random, 900)}) {
      const rank_vectors inputs = random_ranks(random, ranks, elements);
      for (const algorithm how : collectives::all_algorithms) {
        INFO(collectives::name_of(how) << ", " << ranks << " ranks, " << elements << " elements");
        const std::vector<float> expected = reference_sum(how, inputs);
        const rank_schedules whole = schedules_of(operation::all_reduce, how, ranks, elements);
        const rank_schedules reduce = schedules_of(operation::reduce_scatter, how, ranks, elements);
        const rank_schedules gather = schedules_of(operation::all_gather, how, ranks, elements);
        for (const auto* each : {&whole, &reduce, &gather}) REQUIRE(mismatch_in(*each, elements) == "");
        rank_vectors vectors = inputs;
        simulate(whole, vectors);
        for (const auto& each : vectors) REQUIRE(same_bits(each, expected));
        // The halves give each rank what it owns, and then all of it.
        vectors = inputs;
        simulate(reduce, vectors);
        std::size_t owned_by_all = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
          const std::size_t formula = formula_of_sent(how, ranks, r, elements);
          REQUIRE(sent(whole[r]).elements == formula);
          REQUIRE(sent(reduce[r]).elements + sent(gather[r]).elements == formula);
          const collectives::element_range own = collectives::owned_elements(how, ranks, r, elements);
          owned_by_all += own.size();
          // What others own must come from them.
          for (std::size_t i = 0; i < elements; ++i) {
            if (i < own.begin || i >= own.end) vectors[r][i] = std::numeric_limits<float>::quiet_NaN();
          }
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
  CHECK(message_of<std::out_of_range>([] {
          std::ignore = rounds_of(operation::all_reduce, algorithm::ring, 4, 4, 10);
        }) == "rank 4 is out of range: there are 4 ranks");
}

TEST_CASE("schedule: the rounds of each half of a pairwise sum are under way together, eight at most") {
  for (const algorithm how : collectives::all_algorithms) {
    std::string together;
    for (const auto& each : rounds_of(operation::all_reduce, how, 12, 3, 1200))
      together += each.joins ? '+' : '|';
    CHECK((together.find('+') != std::string::npos) == (how == algorithm::pairwise));
    if (how == algorithm::pairwise) CHECK(together == "|+++++++|++|+++++++|++");
    if (how == algorithm::pairwise) continue;
    // Where they join in spite of what they change, the check above notices it.
    rank_schedules all = schedules_of(operation::all_reduce, how, 4, 100);
    for (auto& rounds : all) rounds.at(1).joins = true;
    CHECK(mismatch_in(all, 100) != "");
  }
}

TEST_CASE("schedule: the reference adds in the order that is documented, pairwise as the server") {
  std::mt19937 random(1906);
  const rank_vectors inputs = random_ranks(random, 4, 777);
  const std::vector<float> butterfly = reference_sum(algorithm::halving_doubling, inputs);
  for (std::size_t i = 0; i < 777; ++i) {
    const volatile float even = inputs[0][i] + inputs[2][i];
    const volatile float odd = inputs[1][i] + inputs[3][i];
    REQUIRE(butterfly[i] == even + odd);
  }
  CHECK_FALSE(same_bits(butterfly, reference_sum(algorithm::ring, inputs)));
  const lamina::layout model = model_of({777});
  lamina::server<float> server(model, {.workers = 4});
  lamina::frame_encoder<float> encoder(model);
  lamina::selection all(model);
  all.send_all();
  for (std::size_t r = 0; r < 4; ++r) {
    const auto& frame = encoder.encode({.sender = static_cast<std::uint32_t>(r)}, all,
                                       [&](std::size_t) { return std::span(inputs[r]); });
    REQUIRE_FALSE(server.add(frame.to_bytes()));
  }
  std::vector<float> mean(777);
  server.update([&](std::size_t, std::size_t begin, std::span<const float> block) {
    std::ranges::copy(block, mean.begin() + static_cast<std::ptrdiff_t>(begin));
  });
  std::vector<float> expected = reference_sum(algorithm::pairwise, inputs);
  for (float& each : expected) each /= 4;
  CHECK(same_bits(mean, expected));
}

TEST_CASE("plan: buckets are of consecutive layers of one class, in the order in which they become ready") {
  const std::vector<std::size_t> sizes = {100, 200, 300, 50, 50, 1000};
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 0})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4}, {3}, {2}, {1}, {0}});
  CHECK(layers_in(plan_of(sizes, {.bucket_bytes = 1200})) ==
        std::vector<std::vector<std::size_t>>{{5}, {4, 3, 2}, {1, 0}});
  // Without a size: 8·4·36 kB are 1.2 MB, and the power of two below.
  CHECK(layers_in(plan_of({200'000, 100'000, 200'000})) ==
        std::vector<std::vector<std::size_t>>{{2, 1}, {0}});

  std::vector<layer_class> classes(6, layer_class::convolutional);
  classes[5] = classes[4] = layer_class::fully_connected;
  const plan typed(model_of(sizes), 4, reversed_order(6), classes,
                   {.bucket_bytes = 1'000'000, .choice = algorithm_choice::by_type()});
  CHECK(layers_in(typed) == std::vector<std::vector<std::size_t>>{{5, 4}, {3, 2, 1, 0}});
  CHECK(typed.buckets()[0].how == algorithm::ring);
  CHECK(typed.buckets()[1].how == algorithm::halving_doubling);
  CHECK(typed.bucket_of(2) == 1);
  CHECK(typed.buckets()[1].elements == 650);
  CHECK(plan_of({10, 0, 3}, {.bucket_bytes = 0}).buckets()[1].elements == 0);

  for (const std::size_t ranks : {1U, 3U, 4U, 7U}) {
    const plan made = plan_of({10}, {.chunk_bytes = 10'000}, ranks);
    CHECK(made.chunk_elements() % (16 * ranks) == 0);
    CHECK(made.chunk_elements() <= 2500);
    CHECK(made.chunk_elements() + 16 * ranks > 2500);
  }
}

TEST_CASE("plan: whatever decides the order of additions changes the fingerprint") {
  const std::vector<std::size_t> sizes = {100, 200, 300};
  const auto pairwise = [](payload_type type) {
    return collectives::plan_options{.choice = algorithm_choice::always(algorithm::pairwise),
                                     .payload = type};
  };
  const plan first = plan_of(sizes, pairwise(payload_type::as_is));
  CHECK(plan_of(sizes, pairwise(payload_type::as_is)).fingerprint() == first.fingerprint());
  const std::vector<std::size_t> order = {2, 0, 1};
  const std::vector others = {
      plan_of(sizes, {.bucket_bytes = 0}),
      plan_of(sizes, {.chunk_bytes = 4096}),
      plan_of(sizes, {.choice = algorithm_choice::always(algorithm::ring)}),
      plan_of(sizes, pairwise(payload_type::as_is), 5),
      plan_of({100, 200, 301}, pairwise(payload_type::as_is)),
      plan(model_of(sizes), 4, order, std::vector<layer_class>(3), pairwise(payload_type::as_is)),
      plan_of(sizes, pairwise(payload_type::float16)),
      plan_of(sizes, pairwise(payload_type::bfloat16))};
  std::vector<std::uint64_t> fingerprints = {first.fingerprint()};
  for (const plan& each : others) {
    CHECK(std::ranges::find(fingerprints, each.fingerprint()) == fingerprints.end());
    fingerprints.push_back(each.fingerprint());
  }
  CHECK(others.back().payload_of(operation::all_reduce) == payload_type::bfloat16);
  CHECK(others.back().payload_of(operation::all_gather) == payload_type::as_is);
}

TEST_CASE("plan: what cannot be is refused by name") {
  const lamina::layout model = model_of({10, 20});
  const auto refusal = [&](const std::vector<std::size_t>& order, std::size_t ranks = 2,
                           const collectives::plan_options& options = {}, std::size_t classes = 2) {
    return message_of<std::exception>(
        [&] { plan(model, ranks, order, std::vector<layer_class>(classes), options); });
  };
  CHECK(refusal({1, 1}) == "layer 'layer1' stands twice in the order");
  CHECK(refusal({1}) == "layer 'layer0' is missing in the order");
  CHECK(refusal({1, 2}) == "the order has layer 2, which there is not");
  CHECK(refusal({1, 0}, 0) == "a plan for no ranks");
  CHECK(refusal({1, 0}, 2, {.chunk_bytes = 4095}) == "chunks of 4095 bytes: at least 4096 are needed");
  CHECK(refusal({1, 0}, 2, {}, 3) == "there are 3 classes for 2 layers");
  const auto payload_refusal = [&](payload_type type, algorithm_choice choice) {
    return refusal({1, 0}, 2, {.choice = choice, .payload = type});
  };
  for (const algorithm how : {algorithm::ring, algorithm::halving_doubling}) {
    CHECK(payload_refusal(payload_type::bfloat16, algorithm_choice::always(how)) ==
          std::string("sums travel as bfloat16 by pairwise alone, not by ") + collectives::name_of(how));
  }
  CHECK(payload_refusal(payload_type::int8, algorithm_choice::always(algorithm::pairwise)) ==
        "sums travel as_is, as float16 or as bfloat16, not as payload 3");
  CHECK(contains(payload_refusal(payload_type::float16, algorithm_choice::by_type()), "by pairwise alone"));
}

}  // namespace lamina_test::schedule_test
