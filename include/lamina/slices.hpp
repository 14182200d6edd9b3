// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/layout.hpp"
#include "lamina/selection.hpp"

/// Parts shared out among owners, as in an all-reduce whose ranks each add up a slice of everything.
namespace lamina::inline LAMINA_ABI {

/// A slice of every part for each owner. A slice is whole units, but for the end of its part: of u units of part l, owner w of W has
/// [u·s/W, u·(s+1)/W), rounded down, with s = (w + l) mod W. A part of fewer units than owners leaves some with an empty slice, and by s
/// these are not the same owners in every part.
///
/// The slices of one owner are a layout of their own, with a layer for each part: what goes to it is a frame of that layout, and what
/// of such a frame was lost is a delivery of it. Layers have the owner in their names, so that nothing of one owner is taken for
/// another's. A unit is a chunk where chunks may be lost, so that chunks of slices are
/// chunks of parts; else payload_block_elements, so that the blocks of a payload are those of the parts.
///
///     delivery arrived(chosen, chunk_elements);                     // of all parts; the own slice is here and stays
///     for each other owner o:  slices.lose(o, delivery of what went to o, arrived);
///     step.commit(arrived);                                   // what was lost stays in the residual
class part_slices {
 public:
  /// \param parts          what is cut: worker::fragments()
  /// \param owners         W
  /// \param unit_elements  slices begin at multiples of it
  /// \throws std::invalid_argument  no owners, or units of no elements
  part_slices(const layout& parts, std::size_t owners, std::size_t unit_elements)
      : parts_(parts), owners_(owners), unit_elements_(unit_elements) {
    if (owners == 0) detail::raise(std::invalid_argument("slices need at least one owner"));
    if (unit_elements == 0)
      detail::raise(std::invalid_argument("the units of a slice must have at least one element"));
    slices_.reserve(owners);
    for (std::size_t owner = 0; owner < owners; ++owner) {
      std::vector<layer> slices;
      slices.reserve(parts.layers());
      for (std::size_t part = 0; part < parts.layers(); ++part) {
        const std::size_t slot = slot_of(owner, part);
        slices.push_back({parts[part].name + "@" + std::to_string(owner),
                          {begin_of_slot(slot + 1, part) - begin_of_slot(slot, part)}});
      }
      slices_.emplace_back(std::move(slices));
    }
  }

  [[nodiscard]] const layout& fragments() const noexcept { return parts_; }
  [[nodiscard]] std::size_t owners() const noexcept { return owners_; }
  [[nodiscard]] std::size_t unit_elements() const noexcept { return unit_elements_; }
  /// The slices of one owner: layer i, "name@owner", is its slice of part i. Throws std::out_of_range.
  [[nodiscard]] const layout& of(std::size_t owner) const {
    check_owner(owner);
    return slices_[owner];
  }
  /// Where an owner's slice begins in its part, in elements. Throws std::out_of_range.
  [[nodiscard]] std::size_t begin(std::size_t owner, std::size_t part) const {
    parts_.check_layer(part);
    check_owner(owner);
    return begin_of_slot(slot_of(owner, part), part);
  }

  /// What goes to an owner of the parts that are sent: its slices of them, without empty ones. Throws std::out_of_range, and
  /// std::invalid_argument for a selection of another layout.
  [[nodiscard]] selection cut(const selection& sent, std::size_t owner) const {
    selection slices(of(owner));
    if (sent.model().fingerprint() != parts_.fingerprint())
      detail::raise(std::invalid_argument("cut: the selection is of another layout"));
    for (const std::size_t part : sent.sent()) slices.send(part);
    return slices;
  }

  /// What of the slices that went to `owner` has not arrived has not arrived of the parts. Of several owners, in any order, each
  /// adds its own. Throws std::out_of_range; std::invalid_argument, changing nothing, unless `of_slices` is of
  /// cut(of_parts.sent(), owner) and both have the same chunks, of which a unit is a multiple. Cost: one step for each chunk lost and
  /// for each 64 chunks.
  void lose(std::size_t owner, const delivery& of_slices, delivery& of_parts) const {
    const selection sent = cut(of_parts.sent(), owner);
    detail::check_delivery("lose", of_slices, sent, payload_type::as_is);
    const std::size_t chunk = of_parts.chunk_elements();
    if (of_slices.chunk_elements() != chunk || unit_elements_ % chunk != 0) {
      detail::raise(std::invalid_argument("lose: chunks of " + std::to_string(of_slices.chunk_elements()) +
                                          " elements of slices, and of " + std::to_string(chunk) +
                                          " of parts, in units of " + std::to_string(unit_elements_)));
    }
    for (const std::size_t part : sent.sent()) {
      const std::size_t first = begin(owner, part);
      of_slices.for_each_lost(part, [&](std::size_t begin, std::size_t end) {
        for (std::size_t at = first + begin; at < first + end; at += chunk) of_parts.lose(part, at / chunk);
      });
    }
  }

 private:
  void check_owner(std::size_t owner) const {
    if (owner < owners_) return;
    detail::raise(std::out_of_range("owner " + std::to_string(owner) + " is out of range: there are " +
                                    std::to_string(owners_)));
  }
  std::size_t slot_of(std::size_t owner, std::size_t part) const noexcept {
    return (owner + part % owners_) % owners_;
  }
  // units · slot / owners, of any number of units; of the slot behind the last, where the part ends.
  std::size_t begin_of_slot(std::size_t slot, std::size_t part) const noexcept {
    const std::size_t elements = parts_.sizes()[part];
    const std::size_t units = elements / unit_elements_ + (elements % unit_elements_ != 0);
    const std::size_t before = units / owners_ * slot + units % owners_ * slot / owners_;
    return (std::min)(elements, before * unit_elements_);
  }

  layout parts_;
  std::size_t owners_;
  std::size_t unit_elements_;
  std::vector<layout> slices_;  // of each owner
};

}  // namespace lamina::inline LAMINA_ABI
