// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

/// x, the parameters that all share, and y, those that a worker computes with, as the caller has them: a tensor of each for each layer.
namespace lamina::inline LAMINA_ABI::detail {

template <class U>
struct parameter_pair {
  std::span<U> shared;
  std::span<U> local;
};

/// x and y of a layer. Throws std::invalid_argument, naming the layer, for another number of elements.
template <element T, class Shared, class Local>
parameter_pair<const T> pair_of(const layout& model, std::size_t layer, const Shared& shared,
                                const Local& local) {
  const parameter_pair<const T> both{elements_of<T>(shared), elements_of<T>(local)};
  model.check_size(layer, both.shared.size());
  model.check_size(layer, both.local.size());
  return both;
}

/// The same as a function of the layer.
template <element T, class Shared, class Local>
auto pairs_of(const layout& model, const Shared& shared, const Local& local) {
  return [&](std::size_t layer) {
    return pair_of<T>(model, layer, std::begin(shared)[static_cast<std::ptrdiff_t>(layer)],
                      std::begin(local)[static_cast<std::ptrdiff_t>(layer)]);
  };
}

/// Throws std::invalid_argument for another number of tensors than layers.
template <class Shared, class Local>
void check_pair_counts(const layout& model, const Shared& shared, const Local& local) {
  if (std::size(shared) == model.layers() && std::size(local) == model.layers()) return;
  raise(std::invalid_argument("the model has " + std::to_string(model.layers()) + " layers, got " +
                              std::to_string(std::size(shared)) + " and " + std::to_string(std::size(local)) +
                              " tensors"));
}

/// x and y of a part, to be written. Throws as pair_of().
template <element T, class Shared, class Local>
parameter_pair<T> writable_pair_of(const tiling& cut, std::size_t part, Shared& shared, Local& local) {
  const std::size_t layer = cut.layer_of(part);
  const auto index = static_cast<std::ptrdiff_t>(layer);
  const std::span<T> x = writable_elements_of<T>(std::begin(shared)[index]);
  const std::span<T> y = writable_elements_of<T>(std::begin(local)[index]);
  cut.model().check_size(layer, x.size());
  cut.model().check_size(layer, y.size());
  const std::size_t begin = cut.begin(part);
  const std::size_t elements = cut.fragments().sizes()[part];
  return {x.subspan(begin, elements), y.subspan(begin, elements)};
}

/// Throws what writable_pair_of() would throw of any part.
template <element T, class Shared, class Local>
void check_writable_pairs(const tiling& cut, Shared& shared, Local& local) {
  check_pair_counts(cut.model(), shared, local);
  for (std::size_t part = 0; part < cut.fragments().layers(); ++part)
    writable_pair_of<T>(cut, part, shared, local);
}

}  // namespace lamina::inline LAMINA_ABI::detail
