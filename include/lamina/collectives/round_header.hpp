// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>

#include "lamina/collectives/schedule.hpp"
#include "lamina/detail/abi.hpp"

/// \file
/// The 32 bytes before the elements of a round, which the receiver compares with what is due. Read it after channel.hpp.
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
  static constexpr std::uint32_t own_magic = 0x4d414cf5;

  std::uint32_t magic = own_magic;
  std::uint32_t number = 0;
  std::uint64_t step = 0;
  std::uint32_t plan = 0;
  operation what = operation::all_reduce;
  algorithm how = algorithm::pairwise;
  std::uint16_t round = 0;
  std::uint32_t elements = 0;
  std::uint32_t decision = 0;

  void write(std::span<std::byte, size_bytes> to) const noexcept { std::memcpy(to.data(), this, size_bytes); }

  /// In which field the header of another rank differs from this one, as a sentence without its subject; empty where in none. The
  /// first that differs is named: magic, plan, number, step, operation, algorithm, decision, round, elements. No allocation where
  /// none does.
  [[nodiscard]] std::string difference(std::span<const std::byte, size_bytes> from) const {
    round_header theirs;
    std::memcpy(&theirs, from.data(), size_bytes);
    if (theirs.magic != own_magic) return "sends something that is no round of a collective";
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
};
// Its fields lie as they are sent.
static_assert(sizeof(round_header) == round_header::size_bytes && std::is_trivially_copyable_v<round_header>);
static_assert(std::endian::native == std::endian::little, "lamina needs a little-endian machine");

}  // namespace lamina::inline LAMINA_ABI::collectives
