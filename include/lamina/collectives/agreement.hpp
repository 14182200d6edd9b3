// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lamina/collectives/channel.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"

/// \file
/// What ranks must agree on before there is a plan. Read it after channel.hpp.
///
/// All of them call the same function at the same time, before an engine uses the channel; each waits until all are there.
namespace lamina::inline LAMINA_ABI::collectives {

namespace detail {

/// Messages that are waited for, one call at a time. Their memory is its own. What throws ends the channel, which keeps that memory for as
/// long as a message may still be written to it.
class conversation {
 public:
  /// Throws as patience.
  conversation(channel& over, std::chrono::milliseconds timeout)
      : channel_(over), timeout_(timeout), patience_(timeout), memory_(std::make_shared<memory>()) {}

  [[nodiscard]] std::size_t rank() const { return channel_.rank(); }
  [[nodiscard]] std::size_t ranks() const { return channel_.ranks(); }

  /// Sends to one rank while it receives from another; either may be left out by an empty span. Throws channel_error where nothing is
  /// heard, or another length arrives.
  void exchange(std::size_t to, std::span<const std::byte> out, std::size_t from, std::span<std::byte> in) {
    memory_->out.assign(out.begin(), out.end());
    memory_->in.resize(in.size());
    try {
      move(to, from);
    } catch (...) {
      channel_.abandon(memory_);
      throw;
    }
    std::ranges::copy(memory_->in, in.begin());
  }

  /// Rank 0's numbers to all.
  template <class Number>
  void broadcast(std::vector<Number>& numbers) {
    if (ranks() == 1) return;
    // Along a chain: once a run.
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(numbers));
    if (rank() > 0) exchange(0, {}, rank() - 1, bytes);
    if (rank() + 1 < ranks()) exchange(rank() + 1, bytes, 0, {});
  }

  /// join(of those before, own) over the ranks in order, to all of them.
  template <class Number, class Join>
  void combine(std::vector<Number>& numbers, const Join& join) {
    const std::span<std::byte> bytes = std::as_writable_bytes(std::span(numbers));
    if (rank() > 0) {
      std::vector<Number> before(numbers.size());
      exchange(0, {}, rank() - 1, std::as_writable_bytes(std::span(before)));
      join(before, numbers);
    }
    if (rank() + 1 < ranks()) {
      exchange(rank() + 1, bytes, 0, {});
      exchange(0, {}, rank() + 1, bytes);
    }
    if (rank() > 0) exchange(rank() - 1, bytes, 0, {});
  }

 private:
  struct memory {
    std::vector<std::byte> out;
    std::vector<std::byte> in;
  };
  static constexpr std::uint32_t tag = 1;  // an engine's rounds have 0

  void move(std::size_t to, std::size_t from) {
    bool is_due = !memory_->in.empty();
    bool is_leaving = !memory_->out.empty();
    const ticket incoming = is_due ? channel_.receive(from, tag, {{}, memory_->in}) : 0;
    const ticket outgoing = is_leaving ? channel_.send(to, tag, {{}, memory_->out}) : 0;
    patience_.renew(patience::clock::now());
    while (is_due || is_leaving) {
      for (const completion& each : channel_.progress()) {
        patience_.renew(patience::clock::now());
        if (each.which == outgoing) is_leaving = false;
        if (!is_due || each.which != incoming) continue;
        is_due = false;
        if (each.bytes != memory_->in.size() || each.is_truncated) {
          throw channel_error(from, channel_.name_of(from) + " sends " + std::to_string(each.bytes) +
                                        " bytes where " + std::to_string(memory_->in.size()) +
                                        " are expected, before the first step");
        }
      }
      if (!is_due && !is_leaving) return;
      if (patience_.is_over(patience::clock::now())) {
        const std::size_t silent = is_due ? from : to;
        throw channel_error(silent, "nothing heard for " + std::to_string(timeout_.count()) + " ms from " +
                                        channel_.name_of(silent) + ", before the first step");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
  }

  channel& channel_;
  std::chrono::milliseconds timeout_;
  patience patience_;
  std::shared_ptr<memory> memory_;
};

}  // namespace detail

/// The order in which gradients become ready, as rank 0 has seen it. Where a rank has seen another one, all ranks throw channel_error, naming
/// the first such rank and its first layer that differs; std::invalid_argument for another number of layers than the model has. Another
/// error than an order that differs ends the channel.
[[nodiscard]] inline std::vector<std::size_t> agree_on_order(
    channel& over, const layout& model, std::span<const std::size_t> own,
    std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  if (own.size() != model.layers()) {
    throw std::invalid_argument("the order has " + std::to_string(own.size()) + " layers, the model " +
                                std::to_string(model.layers()));
  }
  for (const std::size_t layer : own) model.check_layer(layer);
  detail::conversation all(over, timeout);
  std::vector<std::uint64_t> first(own.begin(), own.end());
  all.broadcast(first);
  const auto [theirs, ours] = std::ranges::mismatch(first, own);
  // Rank, its layer, and rank 0's; rank 0, which has its own order, where none differs.
  std::vector<std::uint64_t> verdict(3);
  if (ours != own.end()) verdict = {over.rank(), *ours, *theirs};
  all.combine(verdict, [](const auto& before, auto& found) {
    if (before[0] != 0) found = before;
  });
  if (verdict[0] != 0) {
    const auto name = [&](std::uint64_t layer) {
      return layer < model.layers() ? model[layer].name : "layer " + std::to_string(layer);
    };
    throw channel_error(verdict[0], over.name_of(verdict[0]) + " has its gradient of '" + name(verdict[1]) +
                                        "' where " + over.name_of(0) + " has that of '" + name(verdict[2]) +
                                        "'");
  }
  return {own.begin(), own.end()};
}

}  // namespace lamina::inline LAMINA_ABI::collectives
