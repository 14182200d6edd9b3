// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/execution.hpp"
#include "lamina/representative.hpp"

/// The two sets of parameters that a local delta lies between, and the values of its fragments. Read delta.hpp before.
namespace lamina::inline LAMINA_ABI::detail {

/// Of a layer, x, the parameters that all share, and y, those that a worker computes with; of const elements to be read.
template <class U>
struct parameter_pair {
  std::span<U> shared;
  std::span<U> local;
};

/// The pair of each layer, of the tensors that the caller has. Throws std::invalid_argument for another number of tensors than layers, and,
/// naming the layer, for another number of elements.
template <class U, class Shared, class Local>
void take_pairs(const layout& model, Shared& shared, Local& local, std::vector<parameter_pair<U>>& pairs) {
  if (std::size(shared) != model.layers() || std::size(local) != model.layers()) {
    refuse("the model has ", model.layers(), " layers, got ", std::size(shared), " and ", std::size(local),
           " tensors");
  }
  const auto elements = [](auto&& tensor) -> std::span<U> {
    if constexpr (std::is_const_v<U>)
      return elements_of<std::remove_const_t<U>>(tensor);
    else
      return writable_elements_of<U>(std::forward<decltype(tensor)>(tensor));
  };
  pairs.clear();
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    const auto index = static_cast<std::ptrdiff_t>(layer);
    pairs.push_back({elements(std::begin(shared)[index]), elements(std::begin(local)[index])});
    model.check_size(layer, pairs.back().shared.size());
    model.check_size(layer, pairs.back().local.size());
  }
}

/// x - y of these fragments, one behind the other.
template <element T>
void copy_differences(const tiling& cut, std::span<const parameter_pair<const T>> pairs,
                      std::span<const std::uint64_t> fragments, T* to) {
  for (const std::size_t fragment : fragments) {
    const parameter_pair<const T>& both = pairs[cut.layer_of(fragment)];
    const std::size_t begin = cut.begin(fragment);
    const std::size_t elements = cut.fragments().sizes()[fragment];
    copy_elements(to, elements, difference_of<T>{both.shared.data() + begin, both.local.data() + begin});
    to += elements;
  }
}

/// The value of each fragment of x - y.
template <element T, representative Representative>
class delta_values {
 public:
  delta_values(const layout& fragments, Representative functor)
      : functor_(std::move(functor)),
        blocks_(fragments),
        values_(fragments.layers()),
        totals_(blocks_.count()) {}

  [[nodiscard]] std::span<const double> all() const noexcept { return values_; }

  /// Gives the first fragment of which a difference is NaN or infinite, and changes no value then, or the number of fragments where none
  /// is. Cost: one read of x and y.
  template <class Execution>
  std::size_t read(const tiling& cut, std::span<const parameter_pair<const T>> pairs,
                   const Execution& execution) {
    const std::size_t all = values_.size();
    blocks_.for_each_run(0, all, execution, [&](std::size_t fragment, std::size_t block, std::size_t end) {
      const parameter_pair<const T>& both = pairs[cut.layer_of(fragment)];
      const std::size_t offset = cut.begin(fragment);
      for (; block < end; ++block) {
        const auto [begin, count] = blocks_.extent_of(fragment, block);
        const T* x = both.shared.data() + offset + begin;
        const T* y = both.local.data() + offset + begin;
        const block_result sum = reduce_block<T>(functor_, count, difference_of<T>{x, y});
        totals_[block] = {sum.total, sum.taken == count};
      }
    });
    for (std::size_t fragment = 0; fragment < all; ++fragment) {
      for (const block_total& each : totals_of(fragment))
        if (!each.is_finite) return fragment;
    }
    for (std::size_t fragment = 0; fragment < all; ++fragment) {
      totals_in_runs totals(functor_);
      for (const block_total& each : totals_of(fragment)) totals.add(each.sum);
      values_[fragment] = totals.value(cut.fragments().sizes()[fragment]);
    }
    return all;
  }

 private:
  struct block_total {
    double sum;
    bool is_finite;
  };
  std::span<const block_total> totals_of(std::size_t fragment) const {
    return std::span(totals_).subspan(blocks_.first(fragment),
                                      blocks_.first(fragment + 1) - blocks_.first(fragment));
  }

  Representative functor_;
  layer_blocks blocks_;
  std::vector<double> values_;
  std::vector<block_total> totals_;
};

}  // namespace lamina::inline LAMINA_ABI::detail
