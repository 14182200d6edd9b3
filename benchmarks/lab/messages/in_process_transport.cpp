// SPDX-License-Identifier: MIT
#include "messages/in_process_transport.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "collectives/memory_channel.hpp"

namespace lab {
namespace {

class in_process_run {
 public:
  in_process_run(std::size_t ranks, const in_process_options& options)
      : options_(options), actors_(ranks), boxes_(ranks * ranks) {}
  void operator()(const std::function<void(transport&)>& body);

 private:
  class end;
  class sums_end;
  struct letter {
    message_kind kind = message_kind::sign_of_life;
    std::shared_ptr<const std::vector<std::byte>> bytes;
    std::shared_ptr<const arrived_frame> transfer = {};
  };
  using mailbox = std::deque<letter>;
  struct actor {
    std::function<bool()> can_go_on;  // empty: it is running or has not begun
    bool finished = false;
  };

  template <class Condition>
  void wait_until(std::size_t who, Condition condition);
  void give_way(std::size_t who);
  void hand_on(std::size_t who, std::function<bool()> can_go_on);
  void pass_turn(std::size_t from);
  void run(std::size_t who, const std::function<void()>& body);
  mailbox& box(std::size_t from, std::size_t to) { return boxes_[from * actors_.size() + to]; }
  lossy_way& way(std::size_t from, std::size_t to, message_kind kind,
                 const lamina::bounded::chunk_grid& grid);

  const in_process_options& options_;
  std::mutex mutex_;
  std::condition_variable turned_;
  std::size_t turn_ = 0;
  std::exception_ptr failure_;
  std::vector<actor> actors_;
  std::vector<mailbox> boxes_;                                     // from each rank to each
  std::map<std::pair<std::size_t, std::size_t>, lossy_way> ways_;  // made when first used
  std::optional<lamina_test::memory_network> sums_;                // likewise
};

// Ends a thread whose peer has failed; that peer's exception is the one that counts.
struct ended_by_peer {};

class in_process_run::sums_end : public lamina::collectives::channel {
 public:
  sums_end(in_process_run& run, lamina::collectives::channel& inner) : run_(run), inner_(inner) {}
  std::size_t rank() const override { return inner_.rank(); }
  std::size_t ranks() const override { return inner_.ranks(); }
  std::string name_of(std::size_t rank) const override { return run_.options_.name_of(rank); }
  lamina::collectives::ticket send(std::size_t to, std::uint32_t tag,
                                   lamina::collectives::two_parts<const std::byte> message) override {
    return inner_.send(to, tag, message);
  }
  lamina::collectives::ticket receive(std::size_t from, std::uint32_t tag,
                                      lamina::collectives::two_parts<std::byte> message) override {
    return inner_.receive(from, tag, message);
  }
  std::span<const lamina::collectives::completion> progress() override {
    const auto done = inner_.progress();
    if (done.empty()) run_.give_way(rank());
    return done;
  }
  void abandon(std::shared_ptr<const void> memory) override { inner_.abandon(std::move(memory)); }

 private:
  in_process_run& run_;
  lamina::collectives::channel& inner_;
};

class in_process_run::end : public transport {
 public:
  end(in_process_run& run, std::size_t rank) : run_(run), rank_(rank) {}
  std::size_t rank() const override { return rank_; }
  std::size_t ranks() const override { return run_.actors_.size(); }
  std::string name_of(std::size_t rank) const override { return run_.options_.name_of(rank); }

  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override {
    for (const std::size_t rank : to) post(rank, kind, what);
    lose_if_finished(to);
  }

  // Both ends of the transfer are here: nobody waits for the other.
  std::vector<sent_frame> send_frame(std::span<const std::size_t> to, message_kind kind,
                                     const outgoing_frame& what,
                                     std::span<const lamina::bounded::obligations> of_each) override {
    if (!run_.options_.losses || what.chunks == nullptr)
      return transport::send_frame(to, kind, what, of_each);
    std::vector<sent_frame> sent;
    for (std::size_t i = 0; i < to.size(); ++i) {
      lossy_way& way = run_.way(rank_, to[i], kind, what.chunks->grid());
      sent.push_back(
          way.transfer(*what.chunks, of_each.empty() ? lamina::bounded::obligations() : of_each[i]));
      std::vector<std::byte> bytes(way.frame().begin(), way.frame().end());
      for (const auto segment : what.behind.segments())
        bytes.insert(bytes.end(), segment.begin(), segment.end());
      run_.box(rank_, to[i])
          .push_back({kind, std::make_shared<const std::vector<std::byte>>(std::move(bytes)),
                      std::make_shared<const arrived_frame>(way.arrived())});
    }
    lose_if_finished(to);
    return sent;
  }

  // Mailboxes take whatever comes.
  void begin_send(std::size_t to, message_kind kind, const payload& what) override {
    send({&to, 1}, kind, what);
  }

  void flush(std::span<const std::size_t> to) override { lose_if_finished(to); }

  std::unique_ptr<lamina::collectives::channel> make_channel() override {
    if (!run_.sums_) run_.sums_.emplace(ranks());
    return std::make_unique<sums_end>(run_, run_.sums_->of(rank_));
  }

  std::optional<message> look_for(std::span<const std::size_t> from) override {
    for (std::size_t sender = 0; sender < from.size(); ++sender) {
      if (has_come(from[sender])) return take(from, sender);
    }
    return std::nullopt;
  }

  std::vector<message> receive_from_each(std::span<const std::size_t> from) override {
    run_.wait_until(rank_, [&] {
      return std::ranges::all_of(from, [&](std::size_t rank) { return has_come(rank) || is_over(rank); });
    });
    lose_if([&](std::size_t rank) { return !has_come(rank); }, from, "waiting for");
    std::vector<message> messages;
    for (std::size_t sender = 0; sender < from.size(); ++sender) messages.push_back(take(from, sender));
    return messages;
  }

  message receive_from_any(std::span<const std::size_t> from) override {
    const auto next = [&] {
      for (std::size_t k = 0; k < from.size(); ++k) {
        const std::size_t sender = (any_after_ + k) % from.size();
        if (has_come(from[sender])) return sender;
      }
      return from.size();
    };
    run_.wait_until(rank_, [&] {
      return next() < from.size() ||
             std::ranges::all_of(from, [&](std::size_t rank) { return is_over(rank); });
    });
    const std::size_t sender = next();
    if (sender == from.size()) lose_if([](std::size_t) { return true; }, from, "waiting for");
    any_after_ = sender + 1;
    return take(from, sender);
  }

  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override {
    post(to, kind, what);
    return receive_from_each({&from, 1})[0];
  }

 private:
  bool is_over(std::size_t rank) const { return run_.actors_[rank].finished; }
  bool has_come(std::size_t rank) const { return !run_.box(rank, rank_).empty(); }

  void post(std::size_t to, message_kind kind, const payload& what) {
    std::vector<std::byte> bytes;
    bytes.reserve(what.size_bytes());
    for (const auto segment : what.segments()) bytes.insert(bytes.end(), segment.begin(), segment.end());
    run_.box(rank_, to).push_back({kind, std::make_shared<const std::vector<std::byte>>(std::move(bytes))});
  }

  message take(std::span<const std::size_t> from, std::size_t sender) {
    mailbox& box = run_.box(from[sender], rank_);
    const letter taken = std::move(box.front());
    box.pop_front();
    return {sender, taken.kind, *taken.bytes, taken.bytes, taken.transfer};
  }

  void lose_if_finished(std::span<const std::size_t> to) const {
    lose_if([&](std::size_t rank) { return run_.actors_[rank].finished; }, to, "sending to");
  }

  template <class Lost>
  void lose_if(Lost is_lost, std::span<const std::size_t> ranks, const std::string& doing) const {
    std::vector<std::size_t> lost;
    std::ranges::copy_if(ranks, std::back_inserter(lost), is_lost);
    if (lost.empty()) return;
    throw peers_lost(doing + " " + names_of(lost, run_.options_.name_of) + ": gone before the end", lost);
  }

  in_process_run& run_;
  std::size_t rank_;
  std::size_t any_after_ = 0;
};

lossy_way& in_process_run::way(std::size_t from, std::size_t to, message_kind kind,
                               const lamina::bounded::chunk_grid& grid) {
  const auto found = ways_.find({from, to});
  if (found != ways_.end()) return found->second;
  const lamina::frame_kind frames =
      kind == message_kind::parameters ? lamina::frame_kind::parameters : options_.losses->up;
  return ways_
      .try_emplace({from, to}, grid, frames, *options_.losses,
                   lossy_way::ends{static_cast<std::uint16_t>(from), static_cast<std::uint16_t>(to),
                                   options_.name_of(to)})
      .first->second;
}

void in_process_run::operator()(const std::function<void(transport&)>& body) {
  std::vector<std::thread> threads;
  std::vector<end> ends;
  for (std::size_t r = 0; r < actors_.size(); ++r) ends.emplace_back(*this, r);
  for (std::size_t r = 1; r < ends.size(); ++r) {
    threads.emplace_back([&, r] { run(r, [&] { body(ends[r]); }); });
  }
  run(0, [&] { body(ends[0]); });
  for (std::thread& each : threads) each.join();
  if (failure_) std::rethrow_exception(failure_);
}

// The whole body runs under the mutex, which a wait gives up: one thread at a time.
void in_process_run::run(std::size_t who, const std::function<void()>& body) {
  std::unique_lock lock(mutex_);
  turned_.wait(lock, [&] { return turn_ == who || failure_; });
  try {
    if (!failure_) body();
  } catch (const ended_by_peer&) {
  } catch (const std::exception& error) {
    if (options_.on_death && who != 0) {
      options_.on_death(who, error);
    } else if (!failure_) {
      failure_ = std::current_exception();
    }
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  actors_[who].finished = true;
  pass_turn(who);
}

template <class Condition>
void in_process_run::wait_until(std::size_t who, Condition condition) {
  if (!condition()) hand_on(who, condition);
  if (failure_) throw ended_by_peer{};
}

// Lets all others run that can.
void in_process_run::give_way(std::size_t who) {
  hand_on(who, [] { return true; });
  if (failure_) throw ended_by_peer{};
}

void in_process_run::hand_on(std::size_t who, std::function<bool()> can_go_on) {
  actors_[who].can_go_on = std::move(can_go_on);
  pass_turn(who);
  std::unique_lock lock(mutex_, std::adopt_lock);
  turned_.wait(lock, [&] { return turn_ == who || failure_; });
  lock.release();  // run() holds it to its end
  actors_[who].can_go_on = nullptr;
}

void in_process_run::pass_turn(std::size_t from) {
  for (std::size_t k = 1; k <= actors_.size(); ++k) {
    const std::size_t next = (from + k) % actors_.size();
    if (actors_[next].finished || (actors_[next].can_go_on && !actors_[next].can_go_on())) continue;
    turn_ = next;
    turned_.notify_all();
    return;
  }
  const bool all_finished = std::ranges::all_of(actors_, [](const actor& each) { return each.finished; });
  if (!all_finished && !failure_) {
    failure_ = std::make_exception_ptr(link_error("the ranks wait for each other"));
  }
  turned_.notify_all();
}

}  // namespace

void run_in_process(std::size_t ranks, const std::function<void(transport&)>& body,
                    const in_process_options& options) {
  in_process_run run(ranks, options);
  run(body);
}

}  // namespace lab
