// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/half.hpp"
#include "lamina/detail/gradient.hpp"
#include "lamina/selection.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

namespace lamina::inline LAMINA_ABI {

/// The other half of worker::step::pack(): writes what came back from a collective over the gradients, and zeros over
/// the parts that were not sent.
///
/// \param chosen     what was packed
/// \param cut        worker::tiles(): which part is of which layer
/// \param packed     the elements of the parts sent, one behind the other
/// \param gradients  a tensor to write for each layer of the model, also for those without a gradient in this step, since
///                   another worker may have sent them; of T, float16 or bfloat16: into half-width ones numbers are
///                   rounded to the nearest, and those beyond their range to the largest
/// \throws std::invalid_argument  before anything is written: another number of tensors or elements, a selection of another
///                                layout, a tensor that is missing, or of another size or type
template <element T, class Tensors>
void scatter(const selection& chosen, const tiling& cut, std::span<const T> packed, Tensors&& gradients) {
  const layout& model = cut.model();
  if (chosen.model().fingerprint() != cut.fragments().fingerprint()) {
    detail::raise(std::invalid_argument("scatter: the selection is of other parts than the tiling's"));
  }
  if (packed.size() != chosen.sent_elements()) {
    detail::raise(std::invalid_argument("scatter: " + std::to_string(packed.size()) + " elements where " +
                                        std::to_string(chosen.sent_elements()) + " were sent"));
  }
  if (std::size(gradients) != model.layers()) {
    detail::raise(std::invalid_argument("the model has " + std::to_string(model.layers()) + " layers, got " +
                                        std::to_string(std::size(gradients)) + " gradients"));
  }
  const auto visit = [&](std::size_t layer, const auto& visitor) {
    detail::visit_writable<T>(std::begin(gradients)[static_cast<std::ptrdiff_t>(layer)], [&](auto to) {
      model.check_size(layer, to.size());
      visitor(to);
    });
  };
  for (std::size_t layer = 0; layer < model.layers(); ++layer) visit(layer, [](auto) {});

  const T* from = packed.data();
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    visit(layer, [&]<class G>(std::span<G> all) {
      for (std::size_t part = cut.first(layer); part < cut.first(layer + 1); ++part) {
        const std::span<G> to = all.subspan(cut.begin(part), cut.fragments().sizes()[part]);
        if (chosen.is_dropped(part)) {
          for (G& each : to) each = G{};
          continue;
        }
        for (std::size_t i = 0; i < to.size(); ++i) {
          if constexpr (half_element<G>) {
            to[i] = detail::to_nearest<G>(from[i]);
          } else {
            to[i] = from[i];
          }
        }
        from += to.size();
      }
    });
  }
}

}  // namespace lamina::inline LAMINA_ABI
