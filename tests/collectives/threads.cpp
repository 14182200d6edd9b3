// SPDX-License-Identifier: MIT
// Engines of eight ranks in one process, for the thread sanitizer and for a count of allocations. With --race two threads call one
// engine, which is not allowed: the sanitizer must say so.
#include <cstdio>
#include <cstring>
#include <random>

#include "counted_allocations.hpp"
#include "memory_ranks.hpp"

int main(int argc, char** argv) {
  using namespace lamina_test;
  using namespace std::chrono_literals;
  const bool races = argc > 1 && std::strcmp(argv[1], "--race") == 0;
  constexpr std::size_t ranks = 8;
  const lamina::layout model = model_of({3000, 5, 0, 20'000, 700});
  const auto keep_mean = [](std::size_t, std::size_t, std::span<float>) {};
  struct variant {
    collectives::algorithm how = collectives::algorithm::pairwise;
    bool has_owners = false;
    lamina::payload_type payload = lamina::payload_type::as_is;
  };
  std::vector<variant> variants = {{.payload = lamina::payload_type::bfloat16},
                                   {.has_owners = true, .payload = lamina::payload_type::float16}};
  for (const auto how : collectives::all_algorithms) {
    variants.push_back({.how = how});
    variants.push_back({.how = how, .has_owners = true});
  }
  for (const variant& tried : variants) {
    const auto how = tried.how;
    const bool has_owners = tried.has_owners;
    const lamina::payload_type payload = tried.payload;
    const collectives::plan plan = plan_for(model, ranks,
                                            {.bucket_bytes = 5000,
                                             .chunk_bytes = 16'384,
                                             .choice = collectives::algorithm_choice::always(how),
                                             .payload = payload});
    std::mt19937 random(5);
    const all_gradients gradients = random_gradients(random, model, ranks);
    const auto expected = expected_means(plan, gradients, std::vector<bool>(model.layers(), true));
    memory_network network(ranks, {.seed = 1, .most_delay = 2});
    std::vector<std::unique_ptr<collectives::engine>> engines;
    for (std::size_t r = 0; r < ranks; ++r) {
      collectives::engine_options options = {.pieces = {.both_ways = 4096, .one_way = 8192}};
      if (has_owners) options.update = keep_mean;
      engines.push_back(std::make_unique<collectives::engine>(network.of(r), plan, options));
    }
    // All ranks are called by this thread: what runs beside it are the engines alone.
    long before = 0;
    for (int step = 0; step < 6; ++step) {
      if (step == 1) before = allocations;
      for (auto& each : engines) each->begin_step();
      std::thread other;
      if (races) other = std::thread([&] { engines[0]->ready(4, gradients[0][4]); });
      for (std::size_t l = model.layers(); l-- > 0;) {
        for (std::size_t r = 0; r < ranks; ++r) engines[r]->ready(l, gradients[r][l]);
      }
      if (races) other.join();
      for (auto& each : engines) each->drain();
      for (auto& each : engines) {
        for (std::size_t l = 0; l < model.layers(); ++l) {
          // Shards of owners begin elsewhere, and 16 bits are rounded: the bits are then those of rank 0.
          const bool is_known = payload == lamina::payload_type::as_is &&
                                (!has_owners || how == collectives::algorithm::pairwise);
          const auto found = [&](collectives::engine& of) {
            return has_owners ? of.parameters(l) : of.mean(l);
          };
          const bool is_expected =
              same_bits(found(*each), is_known ? std::span<const float>(expected[l]) : found(*engines[0]));
          if (!is_expected) {
            std::printf("other bits\n");
            return 1;
          }
        }
      }
    }
    if (allocations != before) {
      std::printf("%ld allocations after the first step, by %s%s, %s\n", allocations - before,
                  collectives::name_of(how), has_owners ? ", with owners" : "",
                  collectives::name_of(payload));
      return 1;
    }
  }
  std::puts("the same bits and no allocation");
}
