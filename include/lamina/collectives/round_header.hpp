// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

#include "lamina/collectives/algorithm.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::collectives {

/// What stands before the elements of a round: which one they are of. 32 bytes, little endian:
///
/// | offset | bytes | field |
/// |---:|---:|---|
/// | 0 | 4 | magic F5 4C 41 4D |
/// | 4 | 4 | number of the collective since the beginning of the run |
/// | 8 | 8 | step |
/// | 16 | 4 | the plan's fingerprint, low 32 bits |
/// | 20 | 1 | operation |
/// | 21 | 1 | algorithm |
/// | 22 | 2 | round |
/// | 24 | 4 | elements in this round |
/// | 28 | 4 | decision: a hash of bucket, chunk, and which layers are kept |
struct round_header {
  static constexpr std::size_t size_bytes = 32;
  static constexpr std::uint32_t magic = 0x4d414cf5;

  std::uint32_t number = 0;
  std::uint64_t step = 0;
  std::uint32_t plan = 0;
  operation what = operation::all_reduce;
  algorithm how = algorithm::pairwise;
  std::uint16_t round = 0;
  std::uint32_t elements = 0;
  std::uint32_t decision = 0;

  void write(std::span<std::byte, size_bytes> to) const noexcept {
    put(to, 0, magic);
    put(to, 4, number);
    put(to, 8, step);
    put(to, 16, plan);
    put(to, 20, static_cast<std::uint8_t>(what));
    put(to, 21, static_cast<std::uint8_t>(how));
    put(to, 22, round);
    put(to, 24, elements);
    put(to, 28, decision);
  }

  /// In which field the header of another rank differs from this one, as a sentence without its subject; empty where in none. The
  /// first that differs is named: magic, plan, number, step, operation, algorithm, decision, round, elements. No allocation where
  /// none does.
  [[nodiscard]] std::string difference(std::span<const std::byte, size_bytes> from) const {
    round_header theirs;
    const auto their_magic = get<std::uint32_t>(from, 0);
    theirs.number = get<std::uint32_t>(from, 4);
    theirs.step = get<std::uint64_t>(from, 8);
    theirs.plan = get<std::uint32_t>(from, 16);
    theirs.what = static_cast<operation>(get<std::uint8_t>(from, 20));
    theirs.how = static_cast<algorithm>(get<std::uint8_t>(from, 21));
    theirs.round = get<std::uint16_t>(from, 22);
    theirs.elements = get<std::uint32_t>(from, 24);
    theirs.decision = get<std::uint32_t>(from, 28);
    if (their_magic != magic) return "sends something that is no round of a collective";
    if (theirs.plan != plan) {
      return "was started with another plan (" + std::to_string(theirs.plan) + ", this one has " +
             std::to_string(plan) + ")";
    }
    if (theirs.number != number) return "is in " + theirs.place() + ", this one in " + std::to_string(number);
    if (theirs.step != step) return "is in " + theirs.place() + ", this one in step " + std::to_string(step);
    if (theirs.what != what || theirs.how != how) {
      return "runs collective " + std::to_string(number) + " as " + theirs.kind() + ", this one as " + kind();
    }
    if (theirs.decision != decision) {
      return "has chosen other layers than this one for collective " + std::to_string(number) + " of step " +
             std::to_string(step);
    }
    if (theirs.round != round)
      return "is in " + theirs.place() + ", this one in round " + std::to_string(round);
    if (theirs.elements != elements) {
      return "sends " + std::to_string(theirs.elements) + " elements in " + theirs.place() + ", where " +
             std::to_string(elements) + " are expected";
    }
    return "";
  }

  /// "collective 7 of step 3 (ring, round 2)"
  [[nodiscard]] std::string place() const {
    return "collective " + std::to_string(number) + " of step " + std::to_string(step) + " (" + name_of(how) +
           ", round " + std::to_string(round) + ")";
  }

 private:
  [[nodiscard]] std::string kind() const { return std::string(name_of(what)) + " by " + name_of(how); }

  template <class Value>
  static void put(std::span<std::byte, size_bytes> to, std::size_t at, Value value) noexcept {
    static_assert(std::endian::native == std::endian::little, "lamina needs a little-endian machine");
    std::memcpy(to.data() + at, &value, sizeof value);
  }
  template <class Value>
  static Value get(std::span<const std::byte, size_bytes> from, std::size_t at) noexcept {
    Value value{};
    std::memcpy(&value, from.data() + at, sizeof value);
    return value;
  }
};

}  // namespace lamina::inline LAMINA_ABI::collectives
