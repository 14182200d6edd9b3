// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/bounded/control.hpp"

/// What must arrive whatever the bound says.
namespace lamina::inline LAMINA_ABI::bounded {

/// What one receiver must get, whatever the bound says. Repairs point to their elements.
struct obligations {
  std::vector<chunk> required = {};  ///< chunks of the frame, in any order; their tags are not looked at
  std::vector<repair> repairs = {};  ///< with a frame of parameters as_is
};

/// What server::pending() says of one worker, as the next transfer to it brings it: ranges of layers in the frame become chunks that must
/// not be lost in it, all others repairs. A range that begins or ends within a chunk takes the whole chunk. Allocates.
///
/// \param frame       the next one to this worker, of parameters
/// \param pending     of this worker, in any order
/// \param parameters  `parameters(l)` gives layer l as a std::span<const T> of n_l elements, or as a reference to what one is made of;
///                    called for the layers that are repaired. They stay as they are until the transfer has ended.
/// \throws std::out_of_range      a range of a layer that is not there
/// \throws std::invalid_argument  a range that is empty or leaves its layer; a span of another size than its layer; T is not the
///                                element type of the grid
template <element T, class Parameters>
[[nodiscard]] obligations owed(const frame_chunks& frame, std::span<const element_range> pending,
                               Parameters&& parameters) {
  using lamina::detail::refuse;
  const chunk_grid& grid = frame.grid();
  if (grid.element_bytes() != sizeof(T)) refuse("the grid is of other elements");
  obligations all;
  for (const element_range& each : pending) {
    grid.fragments().check_layer(each.layer);
    const std::size_t elements = grid.fragments().sizes()[each.layer];
    if (each.begin >= each.end || each.end > elements) {
      refuse("elements [", each.begin, ", ", each.end, ") of layer '", grid.fragments()[each.layer].name,
             "'");
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
    grid.fragments().check_size(each.layer, whole.size());
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
/// required chunk that is not in the frame; for a repair of a layer that is, with a frame that is not of parameters as_is, or that is
/// no whole chunks.
[[nodiscard]] inline std::vector<duty> duties_of(const frame_chunks& frame, const obligations& owed) {
  using lamina::detail::refuse;
  const chunk_grid& grid = frame.grid();
  std::vector<duty> duties;
  for (const chunk& each : owed.required) {
    if (!grid.has(each.fragment, each.index) || frame.sent().is_dropped(each.fragment))
      refuse("chunk ", each.index, " of layer ", each.fragment, " is required, and not in the frame");
    duties.push_back({{each.fragment, each.index, frame.protected_tag(each.fragment)}, nullptr});
  }
  const auto kind = static_cast<frame_kind>(lamina::detail::read_header(frame.prefix()).kind);
  const bool may_be_repaired = kind == frame_kind::parameters && grid.type() == payload_type::as_is;
  for (const repair& each : owed.repairs) {
    grid.fragments().check_layer(each.layer);
    const std::string name = "the repair of layer '" + grid.fragments()[each.layer].name + "'";
    if (!may_be_repaired || frame.sent().is_sent(each.layer))
      refuse(name, ": its layer is in the frame, is no parameter, or is not written as it is");
    const std::size_t elements = each.elements.size() / grid.element_bytes();
    const std::size_t size = grid.fragments().sizes()[each.layer];
    if (each.elements.size() % grid.element_bytes() != 0 || each.begin % grid.chunk_elements() != 0 ||
        each.begin > size || elements > size - each.begin ||
        (elements % grid.chunk_elements() != 0 && each.begin + elements != size)) {
      refuse(name, " does not consist of whole chunks");
    }
    const auto fragment = static_cast<std::uint32_t>(each.layer);
    for (std::size_t at = 0; at < elements; at += grid.chunk_elements()) {
      const auto index = static_cast<std::uint32_t>((each.begin + at) / grid.chunk_elements());
      duties.push_back({{fragment, index, frame.protected_tag(fragment)},
                        each.elements.data() + at * grid.element_bytes()});
    }
  }
  std::ranges::sort(duties, {}, &duty::which);
  // Not std::ranges::unique, whose subrange clang 14 cannot compile.
  const auto twice = std::unique(duties.begin(), duties.end(),
                                 [](const duty& a, const duty& b) { return a.which == b.which; });
  duties.erase(twice, duties.end());
  return duties;
}

}  // namespace lamina::inline LAMINA_ABI::bounded
