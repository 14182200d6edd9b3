// SPDX-License-Identifier: MIT
// Engines of eight ranks in one process, for the thread sanitizer and for a count of allocations. With --race two threads call one
// engine, which is not allowed: the sanitizer must say so.
#include "counted_allocations.hpp"
#include "ranks.hpp"

int main(int argc, char** argv) {
  using namespace lamina_test;
  using namespace std::chrono_literals;
  const bool races = argc > 1 && std::strcmp(argv[1], "--race") == 0;
  constexpr std::size_t ranks = 8;
  const lamina::layout model = model_of({3000, 5, 0, 20'000, 700});
  for (const variant& tried : all_variants()) {
    const collectives::plan plan = tried.plan(model, ranks, 5000, 16'384);
    std::mt19937 random(5);
    const all_gradients gradients = random_gradients(random, model, ranks);
    const auto expected = expected_means(plan, tried, gradients, std::vector<bool>(model.layers(), true));
    memory_network network(ranks, {.seed = 1, .most_delay = 2});
    auto engines =
        engines_over(network, plan, [&](std::size_t) { return with_owners(tried, {.piece_bytes = 4096}); });
    // A race is also told by the error that a layer is handed over twice, but not to the sanitizer, which may see it in another step.
    const auto ready = [&](std::size_t rank, std::size_t layer) {
      try {
        engines[rank]->ready(layer, gradients[rank][layer]);
      } catch (const std::logic_error&) {
        if (!races) throw;
      }
    };
    // All ranks are called by this thread: only the engines run with it.
    long before = 0;
    for (int step = 0; step < 6; ++step) {
      if (step == 1) before = allocations;
      for (auto& each : engines) each->begin_step();
      std::thread other;
      if (races) other = std::thread([&] { ready(0, 4); });
      for (std::size_t l = model.layers(); l-- > 0;) {
        for (std::size_t r = 0; r < ranks; ++r) ready(r, l);
      }
      if (races) other.join();
      for (auto& each : engines) each->drain();
      for (auto& each : engines) {
        if (has_means(*each, tried, expected)) continue;
        std::printf("other bits: %s\n", tried.name().c_str());
        return 1;
      }
    }
    if (allocations != before) {
      std::printf("%ld allocations after the first step: %s\n", allocations - before, tried.name().c_str());
      return 1;
    }
  }
  std::puts("bitwise identical, and no allocation");
}
