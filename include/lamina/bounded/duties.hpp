// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/bounded/chunks.hpp"
#include "lamina/bounded/control.hpp"
#include "lamina/bounded/grid.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/options.hpp"
#include "lamina/tensor.hpp"

/// What must arrive whatever the bound says, and what is still to be sent.
namespace lamina::inline LAMINA_ABI::bounded {

/// Elements of a layer that is not in the frame, which the receiver has lost: whole chunks, as they go out.
struct repair {
  std::size_t layer = 0;
  std::size_t begin = 0;  ///< in elements
  std::span<const std::byte> elements;
};

/// What one receiver must get, whatever the bound says.
struct obligations {
  std::span<const chunk> required = {};  ///< chunks of the frame, in any order; their tags are not looked at
  std::span<const repair> repairs = {};  ///< beside a frame of parameters as_is
};

/// What server::pending() says of one worker, as the next transfer to it brings it. Repairs point into the parameters.
struct owed_parameters {
  std::vector<chunk> required;  ///< of layers that are in the frame
  std::vector<repair> repairs;  ///< of the others

  [[nodiscard]] obligations all() const& noexcept { return {required, repairs}; }
  void all() const&& = delete;  // it would be gone
};

/// Splits what is pending by what is in the frame: ranges of its layers become chunks that must not be lost in it, all others go beside
/// it. A range that begins or ends within a chunk takes the whole chunk. Allocates.
///
/// \param frame       the next one to this worker, of parameters
/// \param pending     of this worker, in any order
/// \param parameters  `parameters(l)` gives layer l as a std::span<const T> of n_l elements, or as a reference to what one is made of;
///                    called for the layers that are repaired. They stay as they are until the transfer has ended.
/// \throws std::out_of_range      a range of a layer that is not there
/// \throws std::invalid_argument  a range that is empty or leaves its layer; a span of another size than its layer; T is not the
///                                element type of the grid
template <element T, class Parameters>
[[nodiscard]] owed_parameters owed(const frame_chunks& frame, std::span<const element_range> pending,
                                   Parameters&& parameters) {
  using lamina::detail::raise;
  const chunk_grid& grid = frame.grid();
  if (grid.element_bytes() != sizeof(T)) raise(std::invalid_argument("the grid is of other elements"));
  owed_parameters all;
  for (const element_range& each : pending) {
    grid.fragments().check_layer(each.layer);
    const std::size_t elements = grid.fragments().sizes()[each.layer];
    if (each.begin >= each.end || each.end > elements) {
      raise(std::invalid_argument(
          "elements [" + std::to_string(each.begin) + ", " + std::to_string(each.end) + ") of layer '" +
          grid.fragments()[each.layer].name + "', which has " + std::to_string(elements)));
    }
    const std::size_t first = each.begin / grid.chunk_elements();
    const std::size_t last = (each.end - 1) / grid.chunk_elements();
    if (frame.sent().is_sent(each.layer)) {
      for (std::size_t i = first; i <= last; ++i) {
        all.required.push_back({static_cast<std::uint32_t>(each.layer), static_cast<std::uint32_t>(i), 0});
      }
      continue;
    }
    const auto& layer = parameters(each.layer);
    const std::span<const T> whole = elements_of<T>(layer);
    if (whole.size() != elements) {
      raise(std::invalid_argument("layer '" + grid.fragments()[each.layer].name + "' has " +
                                  std::to_string(whole.size()) + " elements, not " +
                                  std::to_string(elements)));
    }
    const std::size_t begin = first * grid.chunk_elements();
    const std::size_t end = (std::min)(elements, (last + 1) * grid.chunk_elements());
    all.repairs.push_back({each.layer, begin, std::as_bytes(whole.subspan(begin, end - begin))});
  }
  return all;
}

/// A chunk that must arrive.
struct duty {
  chunk which;
  const std::byte* source = nullptr;  ///< of a repair; what is required lies in the frame
};

/// One duty for each chunk, as they lie in the layout, with tags that do not let them be dropped. Throws std::invalid_argument for a
/// required chunk that is not in the frame; for a repair of a layer that is, beside a frame that is not of parameters as_is, or that is
/// no whole chunks.
[[nodiscard]] inline std::vector<duty> duties_of(const frame_chunks& frame, const obligations& beside) {
  using lamina::detail::raise;
  const chunk_grid& grid = frame.grid();
  std::vector<duty> duties;
  for (const chunk& each : beside.required) {
    if (!grid.has(each.part, each.index) || frame.sent().is_dropped(each.part)) {
      raise(std::invalid_argument("chunk " + std::to_string(each.index) + " of layer " +
                                  std::to_string(each.part) + " is required, and not in the frame"));
    }
    duties.push_back({{each.part, each.index, frame.protected_tag(each.part)}, nullptr});
  }
  for (const repair& each : beside.repairs) {
    grid.fragments().check_layer(each.layer);
    const std::string name = "the repair of layer '" + grid.fragments()[each.layer].name + "'";
    const auto kind = static_cast<frame_kind>(lamina::detail::read_header(frame.prefix()).kind);
    if (kind != frame_kind::parameters || grid.type() != payload_type::as_is ||
        frame.sent().is_sent(each.layer)) {
      raise(std::invalid_argument(
          name + ": its layer is in the frame, is no parameter, or is not written as it is"));
    }
    const std::size_t elements = each.elements.size() / grid.element_bytes();
    const std::size_t size = grid.fragments().sizes()[each.layer];
    if (each.elements.size() % grid.element_bytes() != 0 || each.begin % grid.chunk_elements() != 0 ||
        each.begin > size || elements > size - each.begin ||
        (elements % grid.chunk_elements() != 0 && each.begin + elements != size)) {
      raise(std::invalid_argument(name + " does not consist of whole chunks"));
    }
    const auto part = static_cast<std::uint32_t>(each.layer);
    for (std::size_t at = 0; at < elements; at += grid.chunk_elements()) {
      const auto index = static_cast<std::uint32_t>((each.begin + at) / grid.chunk_elements());
      duties.push_back(
          {{part, index, frame.protected_tag(part)}, each.elements.data() + at * grid.element_bytes()});
    }
  }
  std::ranges::sort(duties, [](const duty& a, const duty& b) { return lies_before(a.which, b.which); });
  // Not std::ranges::unique, whose subrange clang 14 cannot compile.
  const auto twice = std::unique(duties.begin(), duties.end(),
                                 [](const duty& a, const duty& b) { return !lies_before(a.which, b.which); });
  duties.erase(twice, duties.end());
  return duties;
}

/// What a sender has still to send in a round, of one transfer after the other: what must arrive first, then the others in the order of
/// the frame. Allocates in assign() alone.
class todo_list {
 public:
  explicit todo_list(const chunk_grid& grid)
      : grid_(grid), todo_(grid.bitmap_bytes()), required_(grid.bitmap_bytes()) {}

  /// The frame is used until the next call. Throws as duties_of(), and changes nothing then.
  void assign(const frame_chunks& frame, const obligations& beside) {
    duties_ = duties_of(frame, beside);
    frame_ = &frame;
    std::ranges::fill(required_, std::byte{0});
    for (const duty& each : duties_) {
      detail::set_bit(bits_of(required_, grid_, each.which.part), each.which.index);
    }
    clear();
  }
  /// Chunks of the transfer, repairs included.
  [[nodiscard]] bool has_chunks() const noexcept {
    return frame_->sent().sent_layers() > 0 || !duties_.empty();
  }
  [[nodiscard]] const std::vector<duty>& duties() const noexcept { return duties_; }

  void clear() noexcept {
    std::ranges::fill(todo_, std::byte{0});
    left_ = next_ = 0;
  }
  void add_all() noexcept {
    for (const chunk& each : frame_->in_sending_order()) add(each);
    for (const duty& each : duties_) add(each.which);
  }
  /// Chunks of one part, of which none is to be sent yet.
  void add(std::uint32_t part, std::span<const std::byte> bits) noexcept {
    std::ranges::copy(bits, bits_of(todo_, grid_, part).begin());
    left_ += count_bits(bits);
  }
  [[nodiscard]] std::size_t left() const noexcept { return left_; }

  /// The next one, of those that are left.
  [[nodiscard]] duty front() noexcept {
    const auto order = frame_->in_sending_order();
    for (;; ++next_) {
      const duty each =
          next_ < duties_.size() ? duties_[next_] : duty{order[next_ - duties_.size()], nullptr};
      if (detail::has_bit(bits_of(todo_, grid_, each.which.part), each.which.index)) return each;
    }
  }
  void pop() noexcept {
    const chunk which = front().which;
    detail::clear_bit(bits_of(todo_, grid_, which.part), which.index);
    --left_;
  }

  /// Whether the chunks of a part that is not in the frame are all repairs.
  [[nodiscard]] bool are_repairs(std::uint32_t part, std::span<const std::byte> bits) const noexcept {
    return !misses(bits_of(required_, grid_, part), bits);
  }
  /// Whether all of a part that must arrive is among these.
  [[nodiscard]] bool has_required(std::uint32_t part, std::span<const std::byte> bits) const noexcept {
    return !misses(bits, bits_of(required_, grid_, part));
  }

 private:
  void add(const chunk& which) noexcept {
    const auto bits = bits_of(todo_, grid_, which.part);
    left_ += detail::has_bit(bits, which.index) ? 0 : 1;
    detail::set_bit(bits, which.index);
  }
  // Whether some of `wanted` are not among `all`.
  static bool misses(std::span<const std::byte> all, std::span<const std::byte> wanted) noexcept {
    for (std::size_t i = 0; i < all.size(); ++i) {
      if ((wanted[i] & ~all[i]) != std::byte{0}) return true;
    }
    return false;
  }

  chunk_grid grid_;
  const frame_chunks* frame_ = nullptr;
  std::vector<duty> duties_;     // as they lie in the layout
  std::vector<std::byte> todo_;  // bitmaps of the grid
  std::vector<std::byte> required_;
  std::size_t left_ = 0;
  std::size_t next_ = 0;  // among the duties, and behind them the frame's order
};

}  // namespace lamina::inline LAMINA_ABI::bounded
