// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"

/// What ranks must be of one mind about before there is a plan. All of them call the same function at the same time, before an engine uses
/// the channel; each waits until all are there.
namespace lamina::inline LAMINA_ABI::collectives {

namespace detail {

/// Messages that are waited for, one call at a time.
class conversation {
 public:
  conversation(channel& over, std::chrono::milliseconds timeout) : channel_(over), timeout_(timeout) {}

  [[nodiscard]] std::size_t rank() const { return channel_.rank(); }
  [[nodiscard]] std::size_t ranks() const { return channel_.ranks(); }

  /// Sends to one rank while it receives from another; either may be left out by an empty span. Throws channel_error where nothing is
  /// heard, or another length arrives.
  void exchange(std::size_t to, std::span<const std::byte> out, std::size_t from, std::span<std::byte> in) {
    std::size_t open = 0;
    std::optional<ticket> incoming;
    if (!in.empty()) {
      incoming = channel_.receive(from, tag, {{}, in});
      ++open;
    }
    if (!out.empty()) {
      channel_.send(to, tag, {{}, out});
      ++open;
    }
    auto moved_at = std::chrono::steady_clock::now();
    while (open > 0) {
      for (const completion& each : channel_.progress()) {
        --open;
        moved_at = std::chrono::steady_clock::now();
        if (each.which == incoming && (each.bytes != in.size() || each.is_truncated)) {
          throw channel_error(from, channel_.name_of(from) + " sends " + std::to_string(each.bytes) +
                                        " bytes where " + std::to_string(in.size()) +
                                        " are expected, before the first step");
        }
      }
      if (open == 0) return;
      if (std::chrono::steady_clock::now() > moved_at + timeout_) {
        throw channel_error(from, "nothing heard for " + std::to_string(timeout_.count()) + " ms from " +
                                      channel_.name_of(from) + ", before the first step");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(5));
    }
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

 private:
  static constexpr std::uint32_t tag = 1;  // an engine's rounds have 0

  channel& channel_;
  std::chrono::milliseconds timeout_;
};

}  // namespace detail

/// The order in which gradients become ready, as rank 0 has seen it. Throws channel_error on a rank that has seen another one, naming the
/// first layer that differs; std::invalid_argument for another number of layers than the model has.
[[nodiscard]] inline std::vector<std::size_t> agree_on_order(
    channel& over, const layout& model, std::span<const std::size_t> own,
    std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  if (own.size() != model.layers()) {
    throw std::invalid_argument("the order has " + std::to_string(own.size()) + " layers, the model " +
                                std::to_string(model.layers()));
  }
  for (const std::size_t layer : own) model.check_layer(layer);
  std::vector<std::uint64_t> first(own.begin(), own.end());
  detail::conversation(over, timeout).broadcast(first);
  const auto [theirs, ours] = std::ranges::mismatch(first, own);
  if (ours != own.end()) {
    const std::string other =
        *theirs < model.layers() ? model[*theirs].name : "layer " + std::to_string(*theirs);
    throw channel_error(0, over.name_of(over.rank()) + " has its gradient of '" + model[*ours].name +
                               "' where " + over.name_of(0) + " has that of '" + other + "'");
  }
  return {own.begin(), own.end()};
}

/// The largest of each constant over all ranks, with three digits. Throws channel_error.
[[nodiscard]] inline cost_table agree_on_costs(channel& over, const cost_table& own,
                                               std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  detail::conversation all(over, timeout);
  std::vector<double> most = {own.alpha, own.beta_one_way, own.beta_both_ways, own.gamma};
  std::vector<double> before(most.size());
  // Up the chain, and back.
  if (all.rank() > 0) {
    all.exchange(0, {}, all.rank() - 1, std::as_writable_bytes(std::span(before)));
    std::ranges::transform(most, before, most.begin(), [](double a, double b) { return std::max(a, b); });
  }
  if (all.rank() + 1 < all.ranks()) {
    all.exchange(all.rank() + 1, std::as_bytes(std::span(most)), 0, {});
    all.exchange(0, {}, all.rank() + 1, std::as_writable_bytes(std::span(most)));
  }
  if (all.rank() > 0) all.exchange(all.rank() - 1, std::as_bytes(std::span(most)), 0, {});
  return rounded({most[0], most[1], most[2], most[3]});
}

}  // namespace lamina::inline LAMINA_ABI::collectives
