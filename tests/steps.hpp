// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/codec.hpp"
#include "lamina/selection.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

/// What the tests of a worker share: gradients of all layers, whole steps, and what is left after them.
namespace lamina_test {

using bytes = std::vector<std::byte>;

template <class T>
using tensors = std::vector<std::vector<T>>;

template <class T>
tensors<T> zeros_like(const lamina::layout& model) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) values.emplace_back(size);
  return values;
}

/// Integers, so that sums are exact.
template <class T>
tensors<T> random_gradients(std::mt19937& random, const lamina::layout& model, std::size_t magnitude = 8) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) {
    // Layers of different strength, so that some are dropped for longer than others.
    values.push_back(random_integers<T>(random, size, 1 + below(random, magnitude)));
  }
  return values;
}

/// Fractions, so that sums round.
template <class T>
tensors<T> rounding_gradients(std::mt19937& random, const lamina::layout& model) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) values.push_back(random_fractions<T>(random, size));
  return values;
}

template <class T>
void add_to(tensors<T>& sum, const tensors<T>& addend, T scale = 1) {
  for (std::size_t l = 0; l < sum.size(); ++l) {
    for (std::size_t i = 0; i < sum[l].size(); ++i) sum[l][i] += scale * addend[l][i];
  }
}

template <class T>
bool same_tensors(const tensors<T>& a, const tensors<T>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t l = 0; l < a.size(); ++l) {
    if (!same_bits(a[l], b[l])) return false;
  }
  return true;
}

/// Adds the layers of a gradient frame to `to`, or overwrites those of a parameter frame.
template <class T>
void receive(tensors<T>& to, std::span<const std::byte> from, const lamina::layout& model) {
  const auto frame = lamina::decode<T>(from, model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (frame.kind() == lamina::frame_kind::parameters) {
      frame.apply_to(l, to[l]);
      continue;
    }
    std::vector<T> layer(model.sizes()[l]);
    frame.restore(l, layer);
    for (std::size_t i = 0; i < layer.size(); ++i) to[l][i] += layer[i];
  }
}

/// One step of a worker. Gives its frame.
template <class T, class Representative>
bytes send(lamina::worker<T, Representative>& worker, const tensors<T>& gradients, bool commits = true) {
  auto step = worker.add(gradients);
  bytes frame = step.frame().to_bytes();
  if (commits) step.commit();
  return frame;
}

/// "0110": the second and the third fragment are sent.
inline std::string sent_of(const lamina::selection& sent) {
  std::string all;
  for (std::size_t f = 0; f < sent.model().layers(); ++f) all += sent.is_sent(f) ? '1' : '0';
  return all;
}

auto copy_of(const auto& range) {
  return std::vector(range.begin(), range.end());
}

template <class T, class Representative>
std::vector<T> residual_of(const lamina::worker<T, Representative>& worker) {
  return copy_of(worker.residual().elements());
}

/// Whether what was received of a worker and its residual are, element by element, what was added to it.
template <class T, class Representative>
bool conserves(const lamina::worker<T, Representative>& worker, const tensors<T>& received,
               const tensors<T>& added) {
  for (std::size_t l = 0; l < added.size(); ++l) {
    const auto residual = worker.residual()[l];
    for (std::size_t i = 0; i < residual.size(); ++i) {
      if (received[l][i] + residual[i] != added[l][i]) return false;
    }
  }
  return true;
}

}  // namespace lamina_test
