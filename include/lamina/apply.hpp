// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>

#include "lamina/codec.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

namespace lamina::inline LAMINA_ABI {

/// Writes the server's frame of parameters into a worker's: what was sent is overwritten, what was not is kept.
///
/// \param bytes       of one frame, aligned as for decode()
/// \param cut         the model and what its layers are cut into, as in the server
/// \param step        the step that the frame must be of
/// \param parameters  a tensor to write for each layer of the model
/// \param run         the run that the frame must be of; 0: of none
/// \return            the elements that were overwritten
/// \throws decode_error           the bytes are no such frame
/// \throws std::invalid_argument  another number of tensors, or one of another size or type; nothing is written then
///
/// Cost: as decode(), and a copy of what was sent.
template <element T, class Tensors>
std::size_t apply(std::span<const std::byte> bytes, const tiling& cut, std::uint64_t step,
                  Tensors&& parameters, std::uint32_t run = 0) {
  const layout& model = cut.model();
  const frame_view<T> frame = decode<T>(bytes, cut.fragments());
  expect(frame, frame_kind::parameters, step, run);
  if (std::size(parameters) != model.layers()) {
    detail::raise(std::invalid_argument("the model has " + std::to_string(model.layers()) + " layers, got " +
                                        std::to_string(std::size(parameters)) + " parameters"));
  }
  const auto elements_of_layer = [&](std::size_t layer) {
    auto&& tensor = std::begin(parameters)[static_cast<std::ptrdiff_t>(layer)];
    const std::span<T> elements = writable_elements_of<T>(tensor);
    model.check_size(layer, elements.size());
    return elements;
  };
  for (std::size_t layer = 0; layer < model.layers(); ++layer) static_cast<void>(elements_of_layer(layer));
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    const std::span<T> to = elements_of_layer(layer);
    for (std::size_t part = cut.first(layer); part < cut.first(layer + 1); ++part)
      frame.apply_to(part, to.subspan(cut.begin(part), cut.fragments().sizes()[part]));
  }
  return frame.sent_elements();
}
/// The same of whole layers.
template <element T, class Tensors>
std::size_t apply(std::span<const std::byte> bytes, const layout& model, std::uint64_t step,
                  Tensors&& parameters, std::uint32_t run = 0) {
  return apply<T>(bytes, tiling(model), step, parameters, run);
}

}  // namespace lamina::inline LAMINA_ABI
