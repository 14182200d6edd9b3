// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/reduce.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/drift/pairs.hpp"
#include "lamina/execution.hpp"
#include "lamina/representative.hpp"
#include "lamina/detail/layer_blocks.hpp"
#include "lamina/tiling.hpp"

namespace lamina::inline LAMINA_ABI::detail {

/// The value of each part of x - y. A reading has two steps, so that one which is refused changes no value: read() reduces the blocks,
/// and take_up() makes values of them.
template <element T, representative Representative>
class drift_values {
 public:
  drift_values(const layout& parts, Representative functor)
      : functor_(std::move(functor)), blocks_(parts), values_(parts.layers()), totals_(blocks_.count()) {}

  [[nodiscard]] std::span<const double> all() const noexcept { return values_; }

  /// Reads layers [first, last), of which `pairs(layer)` gives x and y. Gives the first part of which a difference is NaN or infinite,
  /// or the number of parts where none is. Cost: one read of x and y.
  template <class Pairs, class Execution>
  std::size_t read(const tiling& cut, std::size_t first, std::size_t last, const Pairs& pairs,
                   const Execution& execution) {
    const std::size_t first_part = cut.first(first);
    const std::size_t last_part = cut.first(last);
    blocks_.for_each_run(
        first_part, last_part, execution, [&](std::size_t part, std::size_t block, std::size_t end) {
          const parameter_pair<const T> both = pairs(cut.layer_of(part));
          const std::size_t offset = cut.begin(part);
          for (; block < end; ++block) {
            const auto [begin, count] = blocks_.extent_of(part, block);
            const T* x = both.shared.data() + offset + begin;
            const T* y = both.local.data() + offset + begin;
            const block_result sum = reduce_block<T>(functor_, count, difference_of<T>{x, y});
            totals_[block] = {sum.total, sum.taken == count};
          }
        });
    for (std::size_t part = first_part; part < last_part; ++part) {
      for (const block_total& each : totals_of(part))
        if (!each.is_finite) return part;
    }
    return cut.fragments().layers();
  }

  /// The parts of layers [first, last) have the values that were read.
  void take_up(const tiling& cut, std::size_t first, std::size_t last) {
    for (std::size_t part = cut.first(first); part < cut.first(last); ++part) {
      totals_in_runs totals(functor_);
      for (const block_total& each : totals_of(part)) totals.add(each.sum);
      values_[part] = totals.value(cut.fragments().sizes()[part]);
    }
  }

 private:
  struct block_total {
    double sum;
    bool is_finite;
  };
  std::span<const block_total> totals_of(std::size_t part) const {
    return std::span(totals_).subspan(blocks_.first(part), blocks_.first(part + 1) - blocks_.first(part));
  }

  Representative functor_;
  layer_blocks blocks_;
  std::vector<double> values_;
  std::vector<block_total> totals_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
