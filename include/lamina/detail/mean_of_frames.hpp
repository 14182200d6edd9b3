// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/frame.hpp"
#include "lamina/selection.hpp"
#include "lamina/tiling.hpp"

namespace lamina::inline LAMINA_ABI::detail {

template <class T>
using frames_to_sum = std::span<const frame_view<T>* const>;

// Block by block, so that a sum stays in cache until it is consumed. Blocks that no frame has are left out.
template <class T, class Consume>
void mean_of_blocks(frames_to_sum<T> frames, std::size_t workers, std::size_t fragment, std::size_t begin,
                    std::size_t end, const Consume& consume) {
  std::array<T, block_elements> sum;
  std::array<T, block_elements> buffer;
  for (; begin < end; begin += sum.size()) {
    const std::size_t count = (std::min)(sum.size(), end - begin);
    const std::span<T> block = std::span(sum).first(count);
    bool is_first = true;
    for (const frame_view<T>* each : frames) {
      if (each->is_dropped(fragment)) continue;
      if (is_first) {
        each->copy(fragment, begin, block);
        is_first = false;
      } else {
        const std::span<const T> addend = each->read(fragment, begin, std::span(buffer).first(count));
        add_elements(block.data(), addend.data(), count);
      }
    }
    if (is_first) return;
    divide_elements(block.data(), static_cast<T>(workers), count);
    consume(begin, std::span<const T>(block));
  }
}

// consume(layer, begin, mean) with what these frames have of these fragments, summed in their order and divided by `workers`.
template <class T, class Consume, class Execution>
void mean_of_frames(frames_to_sum<T> frames, std::size_t workers, const selection& fragments,
                    const tiling& tiles, Consume& consume, const Execution& execution) {
  // One task of an execution: enough blocks to be worth handing to a thread.
  constexpr std::size_t task_elements = 16 * block_elements;
  for (const std::size_t f : fragments.sent()) {
    const std::size_t elements = tiles.fragments().sizes()[f];
    const std::size_t layer = tiles.layer_of(f);
    const std::size_t offset = tiles.begin(f);
    const auto task = [&](std::size_t index) {
      const std::size_t begin = index * task_elements;
      const std::size_t end = begin + (std::min)(task_elements, elements - begin);
      mean_of_blocks<T>(frames, workers, f, begin, end,
                        [&](std::size_t at, std::span<const T> mean) { consume(layer, offset + at, mean); });
    };
    if (elements <= task_elements) {
      task(0);
    } else {
      execution(elements / task_elements + (elements % task_elements != 0), task);
    }
  }
}

}  // namespace lamina::inline LAMINA_ABI::detail
