// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/bounded/chunks.hpp"
#include "lamina/bounded/grid.hpp"
#include "lamina/bounded/todo.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/tensor.hpp"

/// What a server owes a worker that has lost parameters.
namespace lamina::inline LAMINA_ABI::bounded {

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
/// \param frame       the next reply to this worker
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
    grid.parts().check_layer(each.layer);
    const std::size_t elements = grid.parts().sizes()[each.layer];
    if (each.begin >= each.end || each.end > elements) {
      raise(std::invalid_argument("elements [" + std::to_string(each.begin) + ", " +
                                  std::to_string(each.end) + ") of layer '" + grid.parts()[each.layer].name +
                                  "', which has " + std::to_string(elements)));
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
      raise(std::invalid_argument("layer '" + grid.parts()[each.layer].name + "' has " +
                                  std::to_string(whole.size()) + " elements, not " +
                                  std::to_string(elements)));
    }
    const std::size_t begin = first * grid.chunk_elements();
    const std::size_t end = (std::min)(elements, (last + 1) * grid.chunk_elements());
    all.repairs.push_back({each.layer, begin, std::as_bytes(whole.subspan(begin, end - begin))});
  }
  return all;
}

}  // namespace lamina::inline LAMINA_ABI::bounded
