// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "lamina/state.hpp"

/// What a worker with local updates has sent and not seen applied, and its bytes. Read delta.hpp before.
namespace lamina::inline LAMINA_ABI::detail {

/// What one step took out of the local delta, and sent.
template <element T>
struct flight {
  std::uint64_t step = 0;
  std::vector<std::uint64_t> fragments;  // ascending
  std::vector<T> elements;               // of the fragments, one behind the other; none if it was lost
  std::vector<T>
      message;  // with error feedback, what was sent of them; otherwise none, and it is the elements

  std::vector<T>& sent() noexcept { return message.empty() ? elements : message; }
  /// Calls visit(fragment, what was sent of it).
  template <class Visit>
  void for_each(const layout& model, const Visit& visit) {
    std::span<T> left(sent());
    for (const std::size_t fragment : fragments) {
      visit(fragment, left.first(model.sizes()[fragment]));
      left = left.subspan(model.sizes()[fragment]);
    }
  }
  bool is_lost() const noexcept { return elements.empty(); }
  void lose() noexcept {
    elements.clear();
    message.clear();
  }
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
    if (step <= landed_)
      refuse<std::logic_error>("apply: the update of step ", step, " comes after that of step ", landed_);
    if (count_ == 0 || flights_[0].step > step) return nullptr;
    if (flights_[0].step < step) {
      refuse<std::logic_error>("apply: the update of step ", step, " comes while step ", flights_[0].step,
                               " is under way; apply that, or abandon() it");
    }
    return flights_.data();
  }
  /// The update of a step was applied.
  void land(std::uint64_t step) {
    landed_ = step;
    if (count_ > 0 && flights_[0].step == step) remove(0);
  }
  /// What was sent is lost: its update is to come all the same. Both throw std::logic_error if the step is not under way.
  void forget(std::uint64_t step) { flights_[index_of(step, "forget")].lose(); }
  void forget_all() {
    for (std::size_t i = 0; i < count_; ++i) flights_[i].lose();
  }
  /// There will be no update.
  void abandon(std::uint64_t step) { remove(index_of(step, "abandon")); }

  std::size_t count() const noexcept { return count_; }
  const flight<T>& operator[](std::size_t index) const { return flights_[index]; }
  bool has(std::size_t fragment) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (std::ranges::binary_search(flights_[i].fragments, fragment)) return true;
    return false;
  }
  /// The last step whose update was applied; 0: none.
  std::uint64_t landed() const noexcept { return landed_; }

 private:
  std::size_t index_of(std::uint64_t step, const char* call) const {
    for (std::size_t i = 0; i < count_; ++i)
      if (flights_[i].step == step) return i;
    refuse<std::logic_error>(call, ": step ", step, " is not under way");
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

/// A header as that of a state, with the elements under way in place of the model's; the ages; the last step applied; how many steps are
/// under way; how many elements wait outside, all or none, and they; and the steps under way, each as its number, how many fragments and
/// how many elements it has, their indices, the elements, of which a lost one has none, and where elements wait outside the message.
template <element T>
std::vector<std::byte> write_flights(const layout& fragments, const selector::memory& memory,
                                     std::uint64_t step, const flights<T>& all, std::span<const T> rest) {
  std::vector<std::byte> bytes(sizeof(state_header));
  state_header header;
  append(bytes, memory.sent_in);
  append(bytes, std::array<std::uint64_t, 3>{all.landed(), all.count(), rest.size()});
  append(bytes, rest);
  for (std::size_t i = 0; i < all.count(); ++i) {
    append(bytes, std::array<std::uint64_t, 3>{all[i].step, all[i].fragments.size(), all[i].elements.size()});
    append(bytes, all[i].fragments);
    append(bytes, all[i].elements);
    append(bytes, all[i].message);
    header.elements += all[i].elements.size();
  }
  header.magic = flights_magic;
  seal_state<T>(bytes, header, fragments, memory, step);
  return bytes;
}

template <element T>
struct saved_flights {
  selector::memory memory;
  flights<T> all;
  std::uint64_t step = 0;
  std::vector<T> rest;
};

/// Of one with error feedback or without. Throws decode_error with the errc, and std::invalid_argument for numbers that are not finite.
template <element T>
saved_flights<T> read_flights(std::span<const std::byte> bytes, const layout& fragments,
                              bool has_error_feedback) {
  state_reader from(bytes, flights_magic, element_code<T>, state_flag_checksum, fragments,
                    "saved local delta");
  const state_header& header = from.header;
  from.check_sum();
  saved_flights<T> saved{
      {header.threshold, header.allowance, from.numbers<std::uint64_t>(fragments.layers())},
      {},
      header.step,
      {}};
  for (const std::uint64_t sent_in : saved.memory.sent_in)
    from.refuse_if(sent_in > header.step, errc::impossible_age);
  const std::vector<std::uint64_t> counts = from.numbers<std::uint64_t>(3);
  from.refuse_if(counts[2] != (has_error_feedback ? fragments.elements() : 0), errc::wrong_layout);
  saved.rest = from.numbers<T>(counts[2]);
  std::uint64_t last_step = counts[0];
  from.refuse_if(last_step > header.step, errc::impossible_age);
  saved.all.land(last_step);
  std::uint64_t elements_under_way = 0;
  for (std::uint64_t i = 0; i < counts[1]; ++i) {
    const std::vector<std::uint64_t> begin = from.numbers<std::uint64_t>(3);
    from.refuse_if(begin[0] <= last_step || begin[0] > header.step, errc::impossible_age);
    flight<T>& next = saved.all.next();
    next.step = last_step = begin[0];
    std::uint64_t elements = 0;
    next.fragments = from.numbers<std::uint64_t>(begin[1]);
    for (std::size_t k = 0; k < next.fragments.size(); ++k) {
      from.refuse_if(
          next.fragments[k] >= fragments.layers() || (k > 0 && next.fragments[k] <= next.fragments[k - 1]),
          errc::wrong_layout);
      elements += fragments.sizes()[next.fragments[k]];
    }
    from.refuse_if(begin[2] != elements && begin[2] != 0, errc::wrong_layout);
    next.elements = from.numbers<T>(begin[2]);
    next.message = from.numbers<T>(has_error_feedback ? begin[2] : 0);
    elements_under_way += begin[2];
    if (!are_finite<T>(next.elements) || !are_finite<T>(next.message))
      refuse("the saved local delta holds NaN or infinity");
    saved.all.launch();
  }
  from.check_end();
  from.refuse_if(elements_under_way != header.elements, errc::wrong_layout);
  if (!are_finite<T>(saved.rest)) refuse("the saved local delta holds NaN or infinity");
  return saved;
}

}  // namespace lamina::inline LAMINA_ABI::detail
