// SPDX-License-Identifier: MIT
#pragma once

#include <atomic>
#include <memory_resource>

#include "lamina/representative.hpp"

/// The memory of a residual, and how gradients are added to a block of it.
namespace lamina::inline LAMINA_ABI::detail {

/// Elements that are not initialised, from a cache line on: a page is touched first by the thread that first writes to it, and lies in that
/// thread's part of the memory; blocks share no lines, and registers load aligned. The resource outlives it; null: operator new. Throws
/// std::length_error for more bytes than there are addresses, std::bad_alloc, or what the resource throws.
template <class T>
requires std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>
class buffer {
 public:
  explicit buffer(std::size_t count, std::pmr::memory_resource* resource = nullptr)
      : resource_(resource != nullptr ? resource : std::pmr::new_delete_resource()), count_(count) {
    if (count > static_cast<std::size_t>(-1) / sizeof(T))
      refuse<std::length_error>("no room for ", count, " elements");
    if (count > 0) elements_ = static_cast<T*>(resource_->allocate(count * sizeof(T), alignment_bytes));
  }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  ~buffer() {
    if (count_ > 0) resource_->deallocate(elements_, count_ * sizeof(T), alignment_bytes);
  }
  T* data() const noexcept { return elements_; }
  std::size_t size() const noexcept { return count_; }
  T* begin() const noexcept { return elements_; }
  T* end() const noexcept { return elements_ + count_; }

 private:
  static constexpr std::size_t alignment_bytes = alignof(T) > 64 ? alignof(T) : 64;

  std::pmr::memory_resource* resource_;
  std::size_t count_;
  T* elements_ = nullptr;
};

/// Elements of all layers, zero at first, in one flat buffer.
///
/// A layer that is cleared is not written, nor is one that is new: the next gradient goes over what is there, in the threads that will
/// use it, whose memory it then is. Zeros are written when a layer is read before, once, whichever thread reads first: const members may
/// be called from several threads at a time.
template <element T>
class residual_memory {
 public:
  /// With `is_used` false: of no elements.
  residual_memory(const layout& model, bool is_used, std::pmr::memory_resource* memory)
      : model_(model), all_(is_used ? model.elements() : 0, memory), holds_(is_used ? model.layers() : 0) {}

  /// Element `begin` of a layer, to write; it and those behind it are anything where the layer is clear.
  T* at(std::size_t layer, std::size_t begin) noexcept { return all_.data() + model_.offset(layer) + begin; }
  std::size_t size() const noexcept { return all_.size(); }
  bool is_clear(std::size_t layer) const noexcept {
    return holds_[layer].load(std::memory_order_relaxed) != content::numbers;
  }
  /// All elements of the layer were written.
  void set_written(std::size_t layer) noexcept {
    holds_[layer].store(content::numbers, std::memory_order_relaxed);
  }

  void clear(std::size_t layer, std::size_t begin, std::size_t end) {
    if (begin == 0 && end == model_.sizes()[layer]) {
      holds_[layer].store(content::anything, std::memory_order_relaxed);
    } else if (!is_clear(layer)) {
      std::fill_n(at(layer, begin), end - begin, T(0));
    }
  }

  /// One layer, its zeros written.
  std::span<T> read(std::size_t layer) const {
    const std::span<T> elements(all_.data() + model_.offset(layer), model_.sizes()[layer]);
    content holds = holds_[layer].load(std::memory_order_acquire);
    if (holds == content::anything && holds_[layer].compare_exchange_strong(holds, content::becomes_zeros)) {
      std::fill(elements.begin(), elements.end(), T(0));
      holds_[layer].store(content::zeros, std::memory_order_release);
      holds_[layer].notify_all();
    } else if (holds == content::becomes_zeros) {
      holds_[layer].wait(content::becomes_zeros, std::memory_order_acquire);
    }
    return elements;
  }
  std::span<const T> read() const {
    for (std::size_t layer = 0; layer < holds_.size(); ++layer) read(layer);
    return {all_.data(), all_.size()};
  }
  void write(std::span<const T> saved) {
    std::copy(saved.begin(), saved.end(), all_.begin());
    for (std::size_t layer = 0; layer < holds_.size(); ++layer) set_written(layer);
  }

 private:
  /// What the memory of a layer holds.
  enum class content : std::uint8_t {
    anything,  // and counts as zero
    becomes_zeros,
    zeros,
    numbers,
  };

  layout model_;
  buffer<T> all_;
  mutable std::vector<std::atomic<content>> holds_;
};

/// One block of a residual, and how gradients are added to it; each block in any thread.
template <element T>
struct residual_block {
  T* residual;
  T* velocity;        // null without momentum
  std::size_t begin;  // in the layer
  std::size_t count;  // of elements
  bool is_clear;      // its elements are anything, and count as zero; as those of the velocity below
  bool velocity_is_clear;
  bool decays;
  T momentum;
  T scale;

  /// Adds up to the first element whose sum, or velocity, is not below `limit`. `gradient` is that of the layer. Gives the total of the
  /// residual, once the whole block was added, and the elements from the first on that were.
  template <class G, class Representative>
  block_result add(std::span<const G> gradient, const Representative& representative, T limit) const {
    if constexpr (chosen_at_run_time<Representative>) {
      if (representative.is_common()) return add(gradient, typename Representative::common(), limit);
    }
    if constexpr (chosen_at_run_time<Representative> || !takes_registers<Representative, T>) {
      // There is one loop that adds, over registers. What it has added is read once more, from cache.
      block_result sums = add(gradient, sum_of_magnitudes(), limit);
      if (sums.taken == count) sums.total = total_of(representative, count);
      return sums;
    } else {
      if (velocity != nullptr && is_clear) std::fill_n(residual, count, T(0));
      if (velocity != nullptr && velocity_is_clear) std::fill_n(velocity, count, T(0));
      return with_source(gradient, limit,
                         [&](const auto& source) { return add_below(representative, source); });
    }
  }

  /// Adds the rest where the first elements were added, but for elements whose sum, or velocity, would not be finite; gives the block's
  /// total, and how many these are.
  template <class G, class Representative>
  std::pair<double, std::uint16_t> add_rest(std::span<const G> gradient, std::size_t taken,
                                            const Representative& representative) const {
    std::uint16_t left_out = 0;
    with_source(gradient, no_limit, [&](const auto& source) {
      for (std::size_t i = taken; i < count; ++i) {
        const std::array sum{source.at(i)};
        if (may_take<T>(sum, source)) {
          source.put(i, sum[0]);
        } else {
          source.leave(i);
          ++left_out;
        }
      }
    });
    return {total_of(representative, count), left_out};
  }

  /// Whether the rest, where the first elements were added, leads to finite sums and velocities.
  template <class G>
  bool rest_is_finite(std::span<const G> gradient, std::size_t taken) const {
    return with_source(gradient, no_limit, [&](const auto& source) {
      while (taken < count && may_take<T>(std::array{source.at(taken)}, source)) ++taken;
      return taken == count;
    });
  }

  /// Subtracts the first elements again, of a layer that was not clear; gives the limit then.
  template <class G>
  T undo(std::span<const G> gradient, std::size_t taken) const {
    with_source(gradient, no_limit, [&](const auto& source) {
      for (std::size_t i = 0; i < taken; ++i) source.undo(i);
    });
    return limit();
  }

  /// What add() may take next time: a sum of this magnitude or a larger one is not written before all gradients of the call are known to
  /// be finite. Adding g to a and subtracting it again changes a by at most 2^-23 |a + g| in float, hence by at most 2^-12 of the block's
  /// mean magnitude. `total` is of the functor; it may tell the sum of the magnitudes.
  template <class Representative>
  T limit(const Representative& representative, double total) const {
    return limit_of(magnitudes(representative, total));
  }
  T limit() const { return limit_of(total_of(sum_of_magnitudes(), count)); }

 private:
  using buffer_type = std::array<T, block_elements>;
  static constexpr T no_limit = std::numeric_limits<T>::infinity();

  // Of the first elements.
  template <class Representative>
  double total_of(const Representative& representative, std::size_t some) const {
    return reduce_block<T>(representative, some, read_only<T>(residual)).total;
  }
  // No more than the sum of the magnitudes, nor much less, and the same on every instruction set. Totals of magnitudes and of squares
  // tell it. For other functors the first quarter is read once more, from cache, or all where that is zero.
  template <class F>
  double magnitudes(const F& functor, double total) const {
    if constexpr (chosen_at_run_time<F>) {
      return functor.visit([&](const auto& each) { return magnitudes(each, total); });
    } else if constexpr (requires { F::least_magnitudes(total); }) {
      const double least = F::least_magnitudes(total);
      if (is_finite(least)) return least;
    }
    const double sum = total_of(sum_of_magnitudes(), (count + 3) / 4);
    return sum > 0 ? sum : total_of(sum_of_magnitudes(), count);
  }
  T limit_of(double magnitudes) const {
    constexpr double most = static_cast<double>((std::numeric_limits<T>::max)()) / 2;
    const double limit = magnitudes / static_cast<double>(count) * 2048;
    return static_cast<T>(limit < most ? limit : most);
  }

  // The elements of a block as they are added: where they lie if they are T and stay as they are.
  template <class G>
  const T* scaled(const G* from, buffer_type& buffer) const {
    if (scale != T(1)) {
      copy_elements(buffer.data(), count, read_only<T, G, true>(from, scale));
    } else if constexpr (std::same_as<G, T>) {
      return from;
    } else {
      copy_elements(buffer.data(), count, read_only<T, G>(from));
    }
    return buffer.data();
  }

  // Each calls the visitor with the source of the block.
  template <class G, class Visitor>
  auto with_source(std::span<const G> gradient, T limit, const Visitor& visitor) const {
    const G* from = gradient.data() + begin;
    if (velocity != nullptr) {
      buffer_type buffer;
      const read_only<T> addends(scaled(from, buffer));
      const pattern_of<T> carry = is_clear ? infinity_carry<T> : carry_of(limit);
      return decays ? visitor(add_with_velocity<T, true>{residual, velocity, addends, momentum, carry})
                    : visitor(add_with_velocity<T, false>{residual, velocity, addends, momentum, carry});
    }
    return scale == T(1) ? without_velocity<G, false>(from, limit, visitor)
                         : without_velocity<G, true>(from, limit, visitor);
  }
  template <class G, bool Scaled, class Visitor>
  auto without_velocity(const G* from, T limit, const Visitor& visitor) const {
    const read_only<T, G, Scaled> addends(from, scale);
    return is_clear ? visitor(add_to<T, G, Scaled, true>{residual, addends, infinity_carry<T>})
                    : visitor(add_to<T, G, Scaled, false>{residual, addends, carry_of(limit)});
  }
  // Zeros are below every limit.
  static pattern_of<T> carry_of(T limit) {
    return carry_from((std::max)(std::bit_cast<pattern_of<T>>(limit), pattern_of<T>{1}));
  }

  template <class Representative, class Source>
  block_result add_below(const Representative& representative, const Source& source) const {
    block_result sums = reduce_block<T>(representative, count, source);
    if (sums.taken < count) [[unlikely]] {
      // To the very element, so that what was added does not depend on the instruction set.
      for (std::array sum{source.at(sums.taken)}; may_take<T>(sum, source); sum = {source.at(sums.taken)}) {
        source.put(sums.taken, sum[0]);
        if (++sums.taken == count) break;
      }
    }
    return sums;
  }
};

}  // namespace lamina::inline LAMINA_ABI::detail
