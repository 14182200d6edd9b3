// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <tuple>

#include "device_support.hpp"
#include "lamina/cuda/detail/select.hpp"
#include "lamina/threshold.hpp"

/// The search by itself, over values and sizes that are hard for it: few kernels, so that also thread blocks of 1,024 threads can run it
/// in a test.
namespace lamina_test {

struct search_kernel {
  static constexpr unsigned threads = 1024;
  static constexpr unsigned thread_blocks_at_once = 1;
  using shared_memory = lamina::cuda::detail::crossing_search::shared_memory;

  const lamina::cuda::detail::candidate* entries;
  std::size_t count;
  const double* limits;
  std::size_t searches;
  lamina::cuda::detail::candidate* kept;
  lamina::cuda::detail::crossing* found;  // of each search, by each thread

  std::size_t thread_blocks(unsigned) const { return 1; }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory& shared) const {
    cta.wait_for_launches();
    for (std::size_t k = 0; k < searches; ++k) {
      const auto each = lamina::cuda::detail::crossing_search::find(
          cta, shared, kept, count, limits[k], [this](std::size_t i) { return entries[i]; });
      if (cta.thread() == cta.threads() - 1) found[k] = each;
    }
  }
};

/// Values and sizes of `count` layers, by name.
inline std::vector<std::pair<std::string, std::function<std::pair<double, std::size_t>(std::size_t i)>>>
searched_layers(std::mt19937& random, std::size_t count) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const auto fraction = [&random] { return random_fractions<double>(random, 1)[0]; };
  using layer = std::pair<double, std::size_t>;
  return {
      {"of every exponent",
       [&random, fraction](std::size_t) {
         return layer(std::ldexp(fraction(), static_cast<int>(below(random, 2000)) - 1000), below(random, 9));
       }},
      {"tied in three",
       [&random](std::size_t) { return layer(static_cast<double>(below(random, 3)), 1 + below(random, 4)); }},
      {"all tied", [](std::size_t) { return layer(1.5, 7); }},
      {"tied with their neighbours, and some infinite",
       [&random, infinity](std::size_t) {
         const std::size_t kind = below(random, 10);
         const double tied = kind < 5 ? 1.0 : std::nextafter(1.0, kind < 8 ? 2.0 : 0.0);
         return layer(kind == 9 ? infinity : tied, 1 + below(random, 4096));
       }},
      {"mostly empty",
       [&random, fraction](std::size_t) { return layer(fraction(), below(random, 50) == 0 ? 3 : 0); }},
      {"the largest as large as all others",
       [count](std::size_t i) {
         return layer(static_cast<double>(i * 7919 % count), i * 7919 % count == count - 1 ? count : 1);
       }},
  };
}

/// Of the first `kinds` of them: what is found is what lamina::threshold_search finds, for limits that lie between layers, on them, and beyond all.
template <class Execution>
void finds_the_crossing(const Execution& execution, std::size_t count, std::size_t kinds) {
  namespace detail = lamina::cuda::detail;
  std::mt19937 random(static_cast<unsigned>(count));
  auto layers = searched_layers(random, count);
  layers.resize(std::min(kinds, layers.size()));
  for (const auto& [name, layer_of] : layers) {
    std::vector<detail::candidate> entries(count);
    std::vector<std::size_t> sizes(count);
    std::vector<double> values(count);
    std::size_t elements = 0;
    for (std::size_t i = 0; i < count; ++i) {
      std::tie(values[i], sizes[i]) = layer_of(i);
      entries[i] = {detail::key_of(values[i]), sizes[i]};
      elements += sizes[i];
    }
    const auto all = static_cast<double>(elements);
    const std::vector<double> limits = {0, std::floor(all * 0.3), all * 0.95, std::max(all - 1, 0.0), all};
    const on_device<detail::candidate> device_entries(entries);
    const on_device<double> device_limits(limits);
    const on_device<detail::candidate> kept(2 * count);
    const on_device<detail::crossing> device_found(limits.size());
    execution.run(search_kernel{device_entries.data(), count, device_limits.data(), limits.size(),
                                kept.data(), device_found.data()});
    execution.wait();
    const auto all_found = device_found.get();
    for (std::size_t k = 0; k < limits.size(); ++k) {
      const detail::crossing& found = all_found[k];
      const std::string where = " among " + std::to_string(count) + " layers " + name + " at " +
                                std::to_string(limits[k]) + " of " + std::to_string(elements);
      lamina::threshold_search cpu;
      cpu.begin();
      for (std::size_t i = 0; i < count; ++i) {
        if (sizes[i] > 0) cpu.add(values[i], sizes[i]);
      }
      const double expected = cpu.beyond(limits[k]);
      require(found.is_found == (limits[k] < all), "a crossing was found, or none," + where);
      if (!found.is_found) continue;
      require(same_bits(detail::value_of(found.key), expected), "another crossing was found" + where);
      std::size_t before = 0;
      for (std::size_t i = 0; i < count; ++i) before += values[i] < expected ? sizes[i] : 0;
      require(found.before == before, "another sum was found" + where);
    }
  }
}

template <class Execution>
void for_each_search_case(const Execution& execution, const visitor& visit) {
  for (const std::size_t layers : {1U, 256U, 257U, 1025U, 5000U, 100'000U}) {
    visit("a crossing among " + std::to_string(layers) + " layers",
          [&, layers] { finds_the_crossing(execution, layers, layers < 100'000 ? 6 : 2); });
  }
}

}  // namespace lamina_test
