// SPDX-License-Identifier: MIT
#pragma once

#include "device_support.hpp"
#include "lamina/cuda/detail/add.hpp"
#include "lamina/cuda/detail/memory.hpp"

/// Totals of blocks by themselves, in any number.
namespace lamina_test {

/// The values of layers whose blocks have totals already.
template <class F>
struct combine_totals_kernel {
  static constexpr unsigned threads = 128;
  static constexpr unsigned thread_blocks_at_once = 1;
  struct shared_memory {};

  lamina::cuda::detail::model_view<float> at;
  const double* given;  // of each block
  double* values;

  std::size_t thread_blocks(unsigned groups) const {
    return lamina::cuda::detail::thread_blocks_for(at.blocks, groups);
  }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    const auto group = cta.group();
    cta.wait_for_launches();
    const std::size_t block = cta.index() * cta.groups() + group.index();
    if (block >= at.blocks) return;
    const std::size_t layer = at.places[block].layer;
    double total = given[block];
    const bool is_whole = lamina::cuda::detail::complete_layer(F{}, at, group, layer, block, total);
    if (is_whole && group.thread() == 0) values[layer] = F::finish(total, at.sizes[layer]);
  }
};

/// The values of layers whose blocks have any number of totals, without elements behind them; twice, since what counts
/// arrivals has to be as it was.
template <class F, class Execution>
void combines_totals_in_runs(const Execution& execution) {
  std::vector<std::size_t> sizes;
  for (const std::size_t blocks : telling_counts_of_totals()) sizes.push_back(4096 * blocks);
  const lamina::layout model = model_of(sizes);
  lamina::cuda::detail::device_memory memory(nullptr);
  const auto at = lamina::cuda::detail::tables_of<float>(model, memory);
  std::mt19937 random(43);
  const auto totals = random_fractions<double>(random, at.blocks);
  const on_device<double> given(totals);
  const on_device<double> values(model.layers());
  for (int time = 0; time < 2; ++time)
    execution.run(combine_totals_kernel<F>{at, given.data(), values.data()});
  execution.wait();
  const auto found = values.get();
  auto first = totals.begin();
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const auto last = first + static_cast<std::ptrdiff_t>(sizes[l] / 4096);
    const double total = literal_total_of_totals(std::vector<double>(first, last),
                                                 [](double a, double b) { return F::combine(a, b); });
    const double expected = sizes[l] == 0 ? 0.0 : F::finish(total, sizes[l]);
    require(same_bits(found[l], expected),
            "the value of " + std::to_string(sizes[l] / 4096) + " totals differs");
    first = last;
  }
}

}  // namespace lamina_test
