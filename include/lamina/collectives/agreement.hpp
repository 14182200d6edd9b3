// SPDX-License-Identifier: MIT
#pragma once

#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lamina/collectives/executor.hpp"

/// \file
/// What ranks must agree on before there is a plan. Read it after executor.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// The order in which gradients become ready, as rank 0 has seen it. All ranks call it at the same time, before an engine uses the channel;
/// each waits until all are there. Where a rank has seen another order, all ranks throw channel_error, naming the first such rank and its
/// first layer that differs; std::invalid_argument for another number of layers than the model has. Another error than an order that
/// differs ends the channel. Memory: 4 bytes a layer and rank.
[[nodiscard]] inline std::vector<std::size_t> agree_on_order(
    channel& over, const layout& model, std::span<const std::size_t> own,
    std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  const std::size_t layers = model.layers();
  if (own.size() != layers) detail::refuse("the order has ", own.size(), " layers, the model ", layers);
  for (const std::size_t layer : own) model.check_layer(layer);
  struct memory {
    executor::memory of_executor;
    std::vector<float> orders;  // of all ranks, one behind the other: indices, which nobody adds
  };
  const auto shared = std::make_shared<memory>();
  shared->orders.resize(over.ranks() * layers);
  const auto of = [&](std::size_t rank, std::size_t place) -> float& {
    return shared->orders[rank * layers + place];
  };
  for (std::size_t k = 0; k < layers; ++k)
    of(over.rank(), k) = std::bit_cast<float>(static_cast<std::uint32_t>(own[k]));
  executor exchange(over, model.fingerprint(), shared->orders.size(), shared->of_executor,
                    default_piece_bytes, timeout);
  try {
    exchange.start({.header = {.what = operation::all_gather}, .elements = shared->orders});
    while (exchange.is_running()) {
      if (!exchange.advance()) std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
  } catch (...) {
    over.abandon(shared);
    throw;
  }
  const auto name = [&](float index) {
    const auto layer = std::bit_cast<std::uint32_t>(index);
    return layer < layers ? model[layer].name : "layer " + std::to_string(layer);
  };
  for (std::size_t rank = 1; rank < over.ranks(); ++rank) {
    for (std::size_t k = 0; k < layers; ++k) {
      if (std::bit_cast<std::uint32_t>(of(rank, k)) == std::bit_cast<std::uint32_t>(of(0, k))) continue;
      throw channel_error(rank, over.name_of(rank) + " has its gradient of '" + name(of(rank, k)) +
                                    "' where " + over.name_of(0) + " has that of '" + name(of(0, k)) + "'");
    }
  }
  return {own.begin(), own.end()};
}

}  // namespace lamina::inline LAMINA_ABI::collectives
