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
#include <utility>
#include <vector>

#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/patience.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"

/// What ranks must be of one mind about before there is a plan. All of them call the same function at the same time, before an engine uses
/// the channel; each waits until all are there.
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
    make_room((std::max)(out.size(), in.size()));
    std::ranges::copy(out, memory_->out.begin());
    exchange(to, {out.size(), 1}, from, {in.size(), 1});
    std::ranges::copy(std::span(memory_->in).first(in.size()), in.begin());
  }

  /// Messages of one length, all under way at once: none where they have no bytes.
  struct messages {
    std::size_t bytes = 0;  // of each
    std::size_t count = 1;
  };
  /// The same with bytes that nobody reads, after make_room() for all messages together.
  void exchange(std::size_t to, messages out, std::size_t from, messages in) {
    try {
      move(to, out, from, in);
    } catch (...) {
      channel_.abandon(memory_);
      throw;
    }
  }
  void make_room(std::size_t bytes) {
    if (bytes <= memory_->out.size()) return;
    memory_->out.resize(bytes);
    memory_->in.resize(bytes);
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
  enum way : unsigned char { of_nobody, comes_in, goes_out };
  static constexpr std::uint32_t tag = 1;  // an engine's rounds have 0

  void move(std::size_t to, messages out, std::size_t from, messages in) {
    under_way_.assign(channel::most_tickets, of_nobody);
    std::size_t incoming = in.bytes > 0 ? in.count : 0;
    std::size_t outgoing = out.bytes > 0 ? out.count : 0;
    for (std::size_t k = 0; k < incoming; ++k)
      under_way_[channel_.receive(from, tag, {{}, std::span(memory_->in).subspan(k * in.bytes, in.bytes)})] =
          comes_in;
    for (std::size_t k = 0; k < outgoing; ++k)
      under_way_[channel_.send(to, tag, {{}, std::span(memory_->out).subspan(k * out.bytes, out.bytes)})] =
          goes_out;
    patience_.renew(patience::clock::now());
    while (incoming + outgoing > 0) {
      for (const completion& each : channel_.progress()) {
        patience_.renew(patience::clock::now());
        const way taken = std::exchange(under_way_[each.which], of_nobody);
        if (taken == goes_out) --outgoing;
        if (taken != comes_in) continue;
        --incoming;
        if (each.bytes != in.bytes || each.is_truncated) {
          throw channel_error(from, channel_.name_of(from) + " sends " + std::to_string(each.bytes) +
                                        " bytes where " + std::to_string(in.bytes) +
                                        " are expected, before the first step");
        }
      }
      if (incoming + outgoing == 0) return;
      if (patience_.is_over(patience::clock::now())) {
        const std::size_t silent = incoming > 0 ? from : to;
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
  std::vector<way> under_way_;  // of a ticket
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

/// The largest of each constant over all ranks, with three digits. Throws channel_error, which ends the channel; and on all ranks
/// calibration_error where a constant of one cannot be.
[[nodiscard]] inline cost_table agree_on_costs(channel& over, const cost_table& own,
                                               std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  std::vector<double> most = {own.alpha, own.beta_one_way, own.beta_both_ways, own.gamma};
  detail::conversation(over, timeout).combine(most, [](const auto& before, auto& here) {
    // A number that cannot be is kept: the largest would hide it.
    const auto larger = [](double a, double b) { return !can_be(a) || (can_be(b) && a > b) ? a : b; };
    std::ranges::transform(before, here, here.begin(), larger);
  });
  const cost_table agreed = {most[0], most[1], most[2], most[3]};
  check_costs(agreed);
  return rounded(agreed);
}

}  // namespace lamina::inline LAMINA_ABI::collectives
