// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lamina/detail/kernels.hpp"
#include "lamina/layout.hpp"

namespace lamina::detail {

/// The blocks of reduction.hpp in all layers of a model, numbered through, and how they are cut into tasks for threads.
class layer_blocks {
 public:
  explicit layer_blocks(const layout& model) : model_(model) {
    first_.reserve(model.layers() + 1);
    first_.push_back(0);
    for (const std::size_t elements : model.sizes()) {
      first_.push_back(first_.back() + elements / block_elements + (elements % block_elements != 0));
    }
  }

  std::size_t count() const noexcept { return first_.back(); }
  /// The blocks of `layer` are [first(layer), first(layer + 1)).
  std::size_t first(std::size_t layer) const noexcept { return first_[layer]; }
  /// Where a block begins in its layer, and its elements.
  std::pair<std::size_t, std::size_t> extent_of(std::size_t layer, std::size_t block) const noexcept {
    const std::size_t begin = (block - first_[layer]) * block_elements;
    return {begin, std::min(block_elements, model_.sizes()[layer] - begin)};
  }

  /// Cuts the blocks of layers [first, last) into pieces that cross layers, so that small layers share a piece and a large
  /// one is shared. Calls work(layer, block, end) for each run of blocks of one layer.
  template <class Execution, class Work>
  void for_each_run(std::size_t first, std::size_t last, const Execution& execution, const Work& work) const {
    const auto bounds = std::span(first_).subspan(first, last - first + 1);
    const auto piece = [&](std::size_t index) {
      std::size_t block = bounds.front() + index * blocks_per_piece;
      const std::size_t stop = std::min(bounds.back(), block + blocks_per_piece);
      std::size_t layer =
          first + static_cast<std::size_t>(std::ranges::upper_bound(bounds, block) - bounds.begin()) - 1;
      for (; block < stop; ++layer) {
        const std::size_t end = std::min(stop, first_[layer + 1]);
        if (block < end) work(layer, block, end);
        block = end;
      }
    };
    const std::size_t blocks = bounds.back() - bounds.front();
    if (blocks <= blocks_per_piece) {
      if (blocks > 0) piece(0);
    } else {
      execution((blocks + blocks_per_piece - 1) / blocks_per_piece, piece);
    }
  }

 private:
  // One task of an execution: enough blocks to be worth handing to a thread.
  static constexpr std::size_t blocks_per_piece = 32;

  layout model_;
  std::vector<std::size_t> first_;  // L + 1
};

}  // namespace lamina::detail
