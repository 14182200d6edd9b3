// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "lamina/collectives/plan.hpp"

/// \file
/// Where the gradients of a step lie in memory, and what of them a collective takes. Read it after plan.hpp.
namespace lamina::inline LAMINA_ABI::collectives::detail {

/// Where the gradients of a step wait, and how the layers that are sent of a bucket lie for its collectives.
///
/// For sums they lie one behind the other, where they wait. With owners each layer of n elements is P shards of ⌈n/P⌉, of which the last
/// may be shorter, or empty; a collective then has a row of P for each shard, with the same columns of all layers: whatever is sent of a
/// bucket, and in whatever chunks, an element has the same owner. What is missing in a shard is sent as 0: less than P elements a layer.
class staging {
 public:
  /// What messages are read from and written to.
  struct memory {
    std::vector<float> gradients;  // bucket behind bucket
    std::vector<float> rows;       // of one collective of shards
  };

  /// Throws std::invalid_argument where owners are wanted and the algorithm of a bucket leaves other sums than one shard to each rank.
  staging(const plan& of, std::size_t rank, bool has_owners, memory& given)
      : plan_(of),
        rank_(rank),
        ranks_(of.ranks()),
        has_owners_(has_owners),
        memory_(given),
        waits_(of.model().layers()),
        begins_(of.model().layers()) {
    kept_.reserve(of.model().layers());
    std::size_t begin = 0;
    for (const bucket& each : of.buckets()) {
      if (has_owners_) check_shards(each.how);
      std::size_t elements = 0;
      for (const std::size_t layer : each.layers) {
        waits_[layer] = begin;
        begin += size_of(layer);
        elements += travelling(layer);
      }
      most_elements_ = (std::max)(most_elements_, (std::min)(elements, of.chunk_elements()));
    }
    memory_.gradients.resize(of.model().elements());
    memory_.rows.resize(has_owners_ ? most_elements_ : 0);
  }

  /// Elements of a collective at most.
  [[nodiscard]] std::size_t most_elements() const noexcept { return most_elements_; }
  /// Where the gradient of a layer waits.
  [[nodiscard]] std::span<float> place(std::size_t layer) const {
    return std::span(memory_.gradients).subspan(waits_[layer], size_of(layer));
  }
  /// Where the layer is after its collectives.
  [[nodiscard]] std::span<float> whole(std::size_t layer) const {
    if (has_owners_) return place(layer);
    return std::span(memory_.gradients).subspan(begins_[layer], size_of(layer));
  }

  /// Turns to a bucket of which the layers are sent that `is_kept`.
  template <class IsKept>
  void open(std::size_t bucket, const IsKept& is_kept) {
    const auto& of = plan_.buckets()[bucket];
    own_ = has_owners_ ? owned_elements(of.how, ranks_, rank_, ranks_).begin : 0;
    kept_.clear();
    hash_ = lamina::detail::fnv_basis;
    elements_ = 0;
    first_element_ = waits_[of.layers.front()];
    for (const std::size_t layer : of.layers) {
      const bool is_sent = is_kept(layer);
      hash_ = lamina::detail::fnv(hash_, is_sent ? 1 : 0);
      if (!is_sent) continue;
      kept_.push_back(layer);
      if (!has_owners_) pack(layer);
      elements_ += travelling(layer);
    }
  }
  /// Elements of the bucket's collectives together.
  [[nodiscard]] std::size_t elements() const noexcept { return elements_; }
  /// Of which layers of the bucket are sent.
  [[nodiscard]] std::uint64_t hash() const noexcept { return hash_; }

  /// The elements of the next collective, from the element `begin` of all on, as it is to begin with them.
  [[nodiscard]] std::span<float> chunk(std::size_t begin, operation what) {
    const std::size_t count = (std::min)(plan_.chunk_elements(), elements_ - begin);
    if (!has_owners_) return std::span(memory_.gradients).subspan(first_element_ + begin, count);
    const std::span<float> rows = std::span(memory_.rows).first(count);
    for_each_run(begin, count, what == operation::reduce_scatter,
                 [](std::span<float> layer, std::span<float> in_row) {
                   std::ranges::copy(layer, in_row.begin());
                   std::ranges::fill(in_row.subspan(layer.size()), 0.0F);
                 });
    return rows;
  }
  /// Of shards: this rank's sums in a collective.
  [[nodiscard]] std::span<float> own_of(std::span<float> rows) const {
    const std::size_t columns = rows.size() / ranks_;
    return rows.subspan(own_ * columns, columns);
  }
  /// Of shards: a collective is done. Puts this rank's sums, or all shards, where the layers wait.
  void settle(std::size_t begin, std::size_t count, operation what) {
    for_each_run(begin, count, what == operation::all_gather,
                 [](std::span<float> layer, std::span<float> in_row) {
                   std::ranges::copy(in_row.first(layer.size()), layer.begin());
                 });
  }
  /// Calls visit(layer, begin, elements) with this rank's shard of each layer that is sent of the bucket, unless it is empty.
  template <class Visit>
  void for_each_own_shard(const Visit& visit) const {
    for (const std::size_t layer : kept_) {
      const element_range own = shard(layer, own_);
      if (own.size() > 0) visit(layer, own.begin, place(layer).subspan(own.begin, own.size()));
    }
  }

 private:
  [[nodiscard]] std::size_t size_of(std::size_t layer) const { return plan_.model().sizes()[layer]; }
  // Of the shards of a layer, all but the last ones.
  [[nodiscard]] std::size_t shard_elements(std::size_t layer) const {
    return size_of(layer) / ranks_ + (size_of(layer) % ranks_ != 0 ? 1 : 0);
  }
  [[nodiscard]] element_range shard(std::size_t layer, std::size_t index) const {
    const std::size_t width = shard_elements(layer);
    return {(std::min)(size_of(layer), index * width), (std::min)(size_of(layer), (index + 1) * width)};
  }
  // Elements of a layer in the collectives of its bucket.
  [[nodiscard]] std::size_t travelling(std::size_t layer) const {
    return has_owners_ ? ranks_ * shard_elements(layer) : size_of(layer);
  }
  void check_shards(algorithm how) const {
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (owned_elements(how, ranks_, rank, ranks_).size() == 1) continue;
      refuse(name_of(how), " over ", ranks_,
             " ranks does not leave a shard to each of them: owners need pairwise or ring, or "
             "halving_doubling over a power of two, as algorithm_choice::always() sets it");
    }
  }

  // For sums: layers that are sent move together; those that follow one that was dropped, to the front.
  void pack(std::size_t layer) {
    begins_[layer] = first_element_ + elements_;
    if (begins_[layer] != waits_[layer])
      std::ranges::copy(place(layer),
                        memory_.gradients.begin() + static_cast<std::ptrdiff_t>(begins_[layer]));
  }

  // Calls work(elements of a layer, the same in the row) for what a collective has of this rank's row, or of all: `count` elements of all
  // rows from `begin` on. The row's span is as long or longer, where the shard has no elements any more.
  template <class Work>
  void for_each_run(std::size_t begin, std::size_t count, bool of_all_rows, const Work& work) {
    const std::size_t first = begin / ranks_;  // column
    const std::size_t columns = count / ranks_;
    for (std::size_t row = of_all_rows ? 0 : own_; row < (of_all_rows ? ranks_ : own_ + 1); ++row) {
      const std::span<float> of_row = std::span(memory_.rows).subspan(row * columns, columns);
      std::size_t column = 0;  // where the layer begins
      for (const std::size_t layer : kept_) {
        const std::size_t width = shard_elements(layer);
        const std::size_t from = (std::max)(column, first);
        const std::size_t to = (std::min)(column + width, first + columns);
        if (from < to) {
          const element_range of_layer = shard(layer, row);
          const std::size_t skipped = (std::min)(from - column, of_layer.size());
          const std::size_t taken = (std::min)(to - from, of_layer.size() - skipped);
          work(place(layer).subspan(of_layer.begin + skipped, taken),
               of_row.subspan(from - first, to - from));
        }
        column += width;
      }
    }
  }

  const plan& plan_;
  std::size_t rank_;
  std::size_t ranks_;
  bool has_owners_;
  memory& memory_;
  std::vector<std::size_t> waits_;   // where each layer waits
  std::vector<std::size_t> begins_;  // of each layer after open(), for sums
  std::size_t most_elements_ = 1;
  // Of the bucket that is open.
  std::vector<std::size_t> kept_;
  std::size_t own_ = 0;  // the row whose sums are this rank's
  std::size_t first_element_ = 0;
  std::size_t elements_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::collectives::detail
