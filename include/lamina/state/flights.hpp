// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"
#include "lamina/layout.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"

/// What a worker with local updates has sent and not seen applied, and its bytes.
namespace lamina::inline LAMINA_ABI::detail {

/// What one step sent.
template <element T>
struct flight {
  std::uint64_t step = 0;
  std::vector<std::size_t> parts;  // ascending
  std::vector<T> elements;         // of the parts, one behind the other; none if it was lost

  bool is_lost() const noexcept { return elements.empty(); }
};

/// The steps whose update is to come, the oldest first. A flight that has landed lends its memory to a later one.
template <element T>
class flights {
 public:
  /// The one that launch() adds, to be filled.
  flight<T>& next() {
    if (count_ == flights_.size()) flights_.emplace_back();
    return flights_[count_];
  }
  void launch() { ++count_; }

  /// That of a step whose update has come, or null. Throws std::logic_error for a step out of order.
  const flight<T>* due(std::uint64_t step) const {
    if (step <= landed_) {
      raise(std::logic_error("apply: the update of step " + std::to_string(step) +
                             " comes after that of step " + std::to_string(landed_)));
    }
    if (count_ == 0 || flights_[0].step > step) return nullptr;
    if (flights_[0].step < step) {
      raise(std::logic_error("apply: the update of step " + std::to_string(step) + " comes while step " +
                             std::to_string(flights_[0].step) +
                             " is under way; apply that, or abandon() it"));
    }
    return flights_.data();
  }
  /// The update of a step was applied.
  void land(std::uint64_t step) {
    landed_ = step;
    if (count_ > 0 && flights_[0].step == step) remove(0);
  }
  /// What was sent is lost: its update is to come all the same. Both throw std::logic_error if the step is not under way.
  void forget(std::uint64_t step) { flights_[index_of(step, "forget")].elements.clear(); }
  void forget_all() {
    for (std::size_t i = 0; i < count_; ++i) flights_[i].elements.clear();
  }
  /// There will be no update.
  void abandon(std::uint64_t step) { remove(index_of(step, "abandon")); }

  std::size_t count() const noexcept { return count_; }
  const flight<T>& operator[](std::size_t index) const { return flights_[index]; }
  bool has(std::size_t part) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (std::ranges::binary_search(flights_[i].parts, part)) return true;
    }
    return false;
  }
  /// The last step whose update was applied; 0: none.
  std::uint64_t landed() const noexcept { return landed_; }

 private:
  std::size_t index_of(std::uint64_t step, const char* call) const {
    for (std::size_t i = 0; i < count_; ++i) {
      if (flights_[i].step == step) return i;
    }
    raise(std::logic_error(std::string(call) + ": step " + std::to_string(step) + " is not under way"));
  }
  void remove(std::size_t index) {
    const auto from = flights_.begin() + static_cast<std::ptrdiff_t>(index);
    std::rotate(from, from + 1, flights_.end());
    --count_;
  }

  std::vector<flight<T>> flights_;
  std::size_t count_ = 0;  // of those, under way
  std::uint64_t landed_ = 0;
};

inline constexpr std::uint32_t flights_magic = 0x444d4cf5;  // the bytes F5 'L' 'M' 'D'

/// A header as that of a state, with the elements under way in place of the model's; the ages; the last step applied; and the
/// steps under way, each as its number, how many parts and how many elements it has, their indices, and the elements, of which a
/// lost one has none.
template <element T>
std::vector<std::byte> write_flights(const layout& parts, const selector::memory& memory, std::uint64_t step,
                                     const flights<T>& all) {
  std::vector<std::byte> bytes(sizeof(state_header));
  state_header header;
  append(bytes, std::span<const std::uint64_t>(memory.sent_in));
  const std::uint64_t counts[] = {all.landed(), all.count()};
  append(bytes, std::span<const std::uint64_t>(counts));
  for (std::size_t i = 0; i < all.count(); ++i) {
    const std::uint64_t begin[] = {all[i].step, all[i].parts.size(), all[i].elements.size()};
    append(bytes, std::span<const std::uint64_t>(begin));
    append(bytes, std::span<const std::uint64_t>(
                      std::vector<std::uint64_t>(all[i].parts.begin(), all[i].parts.end())));
    append(bytes, std::span<const T>(all[i].elements));
    header.elements += all[i].elements.size();
  }
  header.magic = flights_magic;
  seal_state<T>(bytes, header, parts, memory, step);
  return bytes;
}

template <element T>
struct saved_flights {
  selector::memory memory;
  flights<T> all;
  std::uint64_t step = 0;
};

/// Throws decode_error with the errc, and std::invalid_argument for numbers that are not finite.
template <element T>
saved_flights<T> read_flights(std::span<const std::byte> bytes, const layout& parts) {
  const std::string name = "saved drift";
  const state_header header =
      read_state_header(bytes, flights_magic, element_code<T>, state_flag_checksum, parts, name);
  std::span<const std::byte> rest = bytes.subspan(sizeof header);
  check_state(header, rest, name);
  const auto take_numbers = [&](std::uint64_t count) {
    return values_of<std::uint64_t>(take_bytes<std::uint64_t>(rest, count, name));
  };
  saved_flights<T> saved{{header.threshold, header.allowance, take_numbers(parts.layers())}, {}, header.step};
  for (const std::uint64_t sent_in : saved.memory.sent_in)
    refuse_if(sent_in > header.step, errc::impossible_age, name);
  const std::vector<std::uint64_t> counts = take_numbers(2);
  refuse_if(counts[0] > header.step, errc::impossible_age, name);
  saved.all.land(counts[0]);
  std::uint64_t last_step = counts[0];
  std::uint64_t elements_under_way = 0;
  for (std::uint64_t i = 0; i < counts[1]; ++i) {
    const std::vector<std::uint64_t> begin = take_numbers(3);
    refuse_if(begin[0] <= last_step || begin[0] > header.step, errc::impossible_age, name);
    last_step = begin[0];
    std::size_t elements = 0;
    flight<T>& next = saved.all.next();
    next.step = begin[0];
    for (const std::uint64_t part : take_numbers(begin[1])) {
      refuse_if(part >= parts.layers() || (!next.parts.empty() && part <= next.parts.back()),
                errc::wrong_layout, name);
      next.parts.push_back(static_cast<std::size_t>(part));
      elements += parts.sizes()[next.parts.back()];
    }
    refuse_if(begin[2] != elements && begin[2] != 0, errc::wrong_layout, name);
    elements = static_cast<std::size_t>(begin[2]);
    next.elements = values_of<T>(take_bytes<T>(rest, elements, name));
    elements_under_way += elements;
    if (!are_finite<T>(next.elements)) raise(std::invalid_argument("the saved drift holds NaN or infinity"));
    saved.all.launch();
  }
  refuse_if(!rest.empty(), errc::trailing_bytes, name);
  refuse_if(elements_under_way != header.elements, errc::wrong_layout, name);
  return saved;
}

}  // namespace lamina::inline LAMINA_ABI::detail
