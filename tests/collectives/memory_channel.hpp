// SPDX-License-Identifier: MIT
#pragma once

#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <vector>

#include "lamina/collectives/channel.hpp"

/// Ranks in one process, for tests: a channel each.
namespace lamina_test {

namespace collectives = lamina::collectives;
using collectives::channel_error;
using collectives::completion;
using collectives::ticket;
using collectives::two_parts;

/// A message as it arrives, for those who interfere with it.
struct seen_message {
  std::size_t from = 0;
  std::size_t to = 0;
  std::uint64_t index = 0;     ///< among all of the network, from 0 on
  two_parts<std::byte> bytes;  ///< at the receiver: what is written here it gets
};

/// What becomes of a message.
enum class fate : std::uint8_t { arrives, is_held_back, is_lost };

/// How ranks in one process are tried: with all at their defaults every message arrives as soon as both ends are there.
struct memory_options {
  /// Of the delays.
  std::uint64_t seed = 0;
  /// A message takes so many calls of progress() at most, drawn for each, at either end; those of one sender and receiver stay in
  /// order. It is copied as late as it can be.
  unsigned most_delay = 0;
  /// Called for each message with its bytes as they have arrived; asked again in a later progress() where it is withheld. Called under
  /// the network's lock.
  std::function<fate(const seen_message&)> interfere = {};
};

/// Ranks in one process, each with a channel of its own: in threads, or in turn. A message is copied from the sender's memory to the
/// receiver's when both ends are there, and not before: nothing lies between, so that an order of messages that only goes well where
/// somebody buffers them does not go well here. Nothing is allocated after
/// construction while no more than 64 messages a rank are under way.
class memory_network {
 public:
  explicit memory_network(std::size_t ranks, memory_options options = {})
      : options_(std::move(options)),
        random_(options_.seed),
        ranks_(ranks),
        sent_bytes_(ranks),
        has_left_(ranks) {
    sends_.reserve(usual_messages * ranks);
    receives_.reserve(usual_messages * ranks);
    for (std::size_t r = 0; r < ranks; ++r) channels_.push_back(std::make_unique<end>(*this, r));
  }

  [[nodiscard]] collectives::channel& of(std::size_t rank) { return *channels_.at(rank); }
  /// Bytes of all messages that the rank has sent and that have been received, headers and all.
  [[nodiscard]] std::uint64_t sent_bytes(std::size_t rank) const {
    const std::lock_guard lock(mutex_);
    return sent_bytes_.at(rank);
  }
  /// Messages that have been sent or are waited for.
  [[nodiscard]] std::size_t under_way() const {
    const std::lock_guard lock(mutex_);
    return sends_.size() + receives_.size();
  }

 private:
  static constexpr std::size_t usual_messages = 64;

  struct post {
    std::size_t from = 0;
    std::size_t to = 0;
    ticket which = 0;
    two_parts<std::byte> bytes;  // of a send: never written
    unsigned delay = 0;          // calls of progress() of the receiver before it is looked at
  };
  struct delayed {
    completion done;
    unsigned delay = 0;
  };

  class end final : public collectives::channel {
   public:
    end(memory_network& network, std::size_t rank) : network_(network), rank_(rank) {
      for (ticket each = most_tickets; each-- > 0;) free_.push_back(each);
      done_.reserve(most_tickets);
      arrived_.reserve(most_tickets);
    }

    [[nodiscard]] std::size_t rank() const override { return rank_; }
    [[nodiscard]] std::size_t ranks() const override { return network_.ranks_; }

    ticket send(std::size_t to, two_parts<const std::byte> message) override {
      const auto bytes = [](std::span<const std::byte> part) {
        return std::span(const_cast<std::byte*>(part.data()), part.size());
      };
      return network_.add(network_.sends_, *this,
                          {rank_, to, 0, {bytes(message.header), bytes(message.elements)}, 0});
    }
    ticket receive(std::size_t from, two_parts<std::byte> message) override {
      return network_.add(network_.receives_, *this, {from, rank_, 0, message, 0});
    }
    std::span<const completion> progress() override { return network_.progress(*this); }
    void abandon(std::shared_ptr<const void>) override { network_.leave(*this); }

   private:
    friend memory_network;
    memory_network& network_;
    std::size_t rank_;
    std::vector<ticket> free_;
    std::vector<delayed> done_;        // but for the delay
    std::vector<completion> arrived_;  // what progress() has given
  };

  ticket add(std::vector<post>& posts, end& by, post added) {
    const std::lock_guard lock(mutex_);
    if (has_left_[by.rank_]) end::throw_abandoned();
    const std::size_t other = by.rank_ == added.from ? added.to : added.from;
    if (other >= ranks_) {
      throw std::out_of_range("rank " + std::to_string(other) + " is out of range: there are " +
                              std::to_string(ranks_) + " ranks");
    }
    if (by.free_.empty()) throw std::logic_error("more messages are under way than there are tickets");
    added.which = by.free_.back();
    by.free_.pop_back();
    added.delay = drawn_delay();
    posts.push_back(added);
    return added.which;
  }

  unsigned drawn_delay() {
    return options_.most_delay == 0 ? 0 : static_cast<unsigned>(random_() % (options_.most_delay + 1));
  }

  std::span<const completion> progress(end& by) {
    const std::lock_guard lock(mutex_);
    if (has_left_[by.rank_]) return {};
    for (std::size_t s = 0; s < sends_.size();) {
      if (sends_[s].to != by.rank_ || !is_first(s) || !deliver(s)) ++s;
    }
    by.arrived_.clear();
    std::erase_if(by.done_, [&](delayed& each) {
      if (each.delay-- > 0) return false;
      by.arrived_.push_back(each.done);
      by.free_.push_back(each.done.which);
      return true;
    });
    if (by.arrived_.empty()) check_peers(by);
    return by.arrived_;
  }

  // Of those of its sender and receiver.
  bool is_first(std::size_t send) const {
    return std::none_of(
        sends_.begin(), sends_.begin() + static_cast<std::ptrdiff_t>(send),
        [&](const post& each) { return each.from == sends_[send].from && each.to == sends_[send].to; });
  }

  // Whether the message is gone from the list: it has arrived, or it is lost.
  bool deliver(std::size_t which) {
    post& out = sends_[which];
    if (out.delay > 0) {
      --out.delay;
      return false;
    }
    const auto in = std::ranges::find_if(
        receives_, [&](const post& each) { return each.from == out.from && each.to == out.to; });
    if (in == receives_.end()) return false;
    const std::size_t copied = copy(out.bytes, in->bytes);
    fate decided = fate::arrives;
    if (options_.interfere) decided = options_.interfere({out.from, out.to, index_, in->bytes});
    if (decided == fate::is_held_back) return false;
    ++index_;
    sent_bytes_[out.from] += out.bytes.size();
    channels_[out.from]->done_.push_back({{out.which, out.bytes.size(), false}, drawn_delay()});
    if (decided == fate::arrives) {
      channels_[out.to]->done_.push_back(
          {{in->which, copied, out.bytes.size() > in->bytes.size()}, drawn_delay()});
      receives_.erase(in);
    }
    sends_.erase(sends_.begin() + static_cast<std::ptrdiff_t>(which));
    return true;
  }

  // Parts may be cut elsewhere at the two ends.
  static std::size_t copy(two_parts<std::byte> from, two_parts<std::byte> to) {
    const std::array sources = {from.header, from.elements};
    std::size_t copied = 0;
    for (std::span<std::byte> target : {to.header, to.elements}) {
      std::size_t begin = copied;  // in the message
      for (const auto source : sources) {
        const std::size_t skipped = (std::min)(begin, source.size());
        const std::size_t count = (std::min)(source.size() - skipped, target.size());
        if (count > 0) std::memcpy(target.data(), source.data() + skipped, count);
        target = target.subspan(count);
        copied += count;
        begin -= skipped;
      }
    }
    return copied;
  }

  void check_peers(const end& by) const {
    for (const auto* posts : {&sends_, &receives_}) {
      for (const post& each : *posts) {
        const bool is_own = posts == &sends_ ? each.from == by.rank_ : each.to == by.rank_;
        const std::size_t other = each.from == by.rank_ ? each.to : each.from;
        if (is_own && has_left_[other]) throw channel_error(other, by.name_of(other) + " has left");
      }
    }
  }

  void leave(end& by) {
    const std::lock_guard lock(mutex_);
    has_left_[by.rank_] = true;
    std::erase_if(sends_, [&](const post& each) { return each.from == by.rank_; });
    std::erase_if(receives_, [&](const post& each) { return each.to == by.rank_; });
  }

  mutable std::mutex mutex_;  // of all below
  memory_options options_;
  std::mt19937_64 random_;
  std::size_t ranks_;
  std::vector<std::uint64_t> sent_bytes_;
  std::vector<bool> has_left_;
  std::vector<post> sends_;
  std::vector<post> receives_;
  std::uint64_t index_ = 0;
  std::vector<std::unique_ptr<end>> channels_;
};

}  // namespace lamina_test
