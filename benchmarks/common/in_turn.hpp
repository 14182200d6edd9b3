// SPDX-License-Identifier: MIT
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

#include "limits.hpp"

/// Memory that the caches do not hold when it is its turn, as in training, where much else comes in between.
namespace lamina_benchmark {

/// Of the machine; 64 MiB where it is not known, and at most so much where only what takes seconds is wanted.
inline std::size_t last_level_cache_bytes() {
  const std::size_t usual = std::size_t{64} << 20U;
  const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (found <= 0) return usual;
  return is_quick() ? std::min(usual, static_cast<std::size_t>(found)) : static_cast<std::size_t>(found);
}

/// Counts sets of memory that are used in turn until they are so many that the last-level cache has none of one when its turn
/// comes: two at least, and one and a half times that cache besides the one that is used, whichever it is.
class sets_in_turn {
 public:
  /// No further set is asked for that would make them more than `most_bytes`, if it is as large as the largest.
  explicit sets_in_turn(std::size_t cache_bytes = last_level_cache_bytes(),
                        std::size_t most_bytes = std::numeric_limits<std::size_t>::max())
      : cache_bytes_(cache_bytes), most_bytes_(most_bytes) {}

  void add(std::size_t bytes) {
    ++count_;
    bytes_ += bytes;
    largest_ = std::max(largest_, bytes);
  }
  bool are_enough() const {
    if (most_bytes_ < largest_ || bytes_ > most_bytes_ - largest_) return true;
    return count_ >= 2 && bytes_ - largest_ >= cache_bytes_ + cache_bytes_ / 2;
  }

  std::size_t count() const { return count_; }
  std::size_t bytes() const { return bytes_; }

 private:
  std::size_t cache_bytes_;
  std::size_t most_bytes_;
  std::size_t count_ = 0;
  std::size_t bytes_ = 0;
  std::size_t largest_ = 0;
};

/// How many sets of so many bytes each have to take turns.
inline std::size_t count_in_turn(std::size_t bytes, std::size_t cache_bytes = last_level_cache_bytes()) {
  sets_in_turn sets(cache_bytes);
  while (!sets.are_enough()) sets.add(bytes);
  return sets.count();
}

/// Numbers of which each piece lies behind the one before and comes again after all others: where only some layers of a model are
/// used in a step, copies of the model that take turns would need far more memory to be as cold.
class numbers_in_turn {
 public:
  /// For pieces of up to `most` numbers each.
  explicit numbers_in_turn(std::size_t most, std::size_t cache_bytes = last_level_cache_bytes())
      : numbers_(most * count_in_turn(most * sizeof(float), cache_bytes)) {}

  std::size_t size_bytes() const { return numbers_.size() * sizeof(float); }

  float* next(std::size_t count) {
    if (count > numbers_.size() - at_) at_ = 0;
    float* const piece = numbers_.data() + at_;
    at_ += count;
    return piece;
  }

 private:
  std::vector<float> numbers_;
  std::size_t at_ = 0;
};

}  // namespace lamina_benchmark
