// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/execution.hpp"
#include "lamina/layout.hpp"

namespace lamina::inline LAMINA_ABI::detail {

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
    return {begin, (std::min)(block_elements, model_.sizes()[layer] - begin)};
  }

  /// Cuts the blocks of layers [first, last) into pieces that cross layers, so that small layers share a piece and a large
  /// one is shared: one for each thread where the execution says how many it has, of 131,072 elements otherwise. Calls
  /// work(layer, block, end) for each run of blocks of one layer.
  template <class Execution, class Work>
  void for_each_run(std::size_t first, std::size_t last, const Execution& execution, const Work& work) const {
    const auto bounds = std::span(first_).subspan(first, last - first + 1);
    const std::size_t blocks = bounds.back() - bounds.front();
    const std::size_t pieces = pieces_of(blocks, threads_of(execution));
    const auto piece = [&](std::size_t index) {
      std::size_t block = bounds.front() + share_of(blocks, pieces, index);
      const std::size_t stop = bounds.front() + share_of(blocks, pieces, index + 1);
      std::size_t layer =
          first +
          static_cast<std::size_t>(std::upper_bound(bounds.begin(), bounds.end(), block) - bounds.begin()) -
          1;
      for (; block < stop; ++layer) {
        const std::size_t end = (std::min)(stop, first_[layer + 1]);
        if (block < end) work(layer, block, end);
        block = end;
      }
    };
    if (pieces == 1) {
      piece(0);
    } else if (pieces > 1) {
      execution(pieces, piece);
    }
  }

 private:
  // Enough blocks to be worth handing to a thread.
  static constexpr std::size_t blocks_per_piece = 32;

  static std::size_t pieces_of(std::size_t blocks, std::size_t threads) noexcept {
    const std::size_t most = blocks / blocks_per_piece + (blocks % blocks_per_piece != 0);
    return threads == 0 ? most : (std::min)(most, threads);
  }
  // The blocks before piece `index` of equal ones; without a product that might overflow.
  static std::size_t share_of(std::size_t blocks, std::size_t pieces, std::size_t index) noexcept {
    return blocks / pieces * index + (std::min)(index, blocks % pieces);
  }

  layout model_;
  std::vector<std::size_t> first_;  // L + 1
};

}  // namespace lamina::inline LAMINA_ABI::detail
