// SPDX-License-Identifier: MIT
#include "messages/mpi_transport.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <lamina/collectives/mpi_channel.hpp>
#include <thread>

namespace lab {
namespace {

bool all_complete(const std::vector<MPI_Request>& requests) {
  return std::ranges::all_of(requests, [](MPI_Request each) { return each == MPI_REQUEST_NULL; });
}

}  // namespace

mpi_transport::mpi_transport(MPI_Comm communicator, mpi_transport_options options)
    : options_(std::move(options)) {
  check_mpi(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
  int count = 0;
  int rank = 0;
  check_mpi(MPI_Comm_size(communicator_, &count), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(communicator_, &rank), "MPI_Comm_rank");
  rank_ = static_cast<std::size_t>(rank);
  incoming_.resize(static_cast<std::size_t>(count));
  heard_at_.assign(incoming_.size(), std::chrono::steady_clock::now());
  begun_.resize(incoming_.size());
  for (std::size_t r = 0; r < incoming_.size(); ++r) incoming_[r].rank = r;
}

// What is still on its way, to or from a rank that was lost, MPI may look at until the process ends.
mpi_transport::~mpi_transport() {
  abandoned_.splice(abandoned_.end(), signs_);
  abandoned_.splice(abandoned_.end(), outgoing_);
  for (way_to& each : begun_) abandoned_.splice(abandoned_.end(), each.on_its_way);
  abandoned_.remove_if([](mpi_outgoing& each) { return !each.is_in_flight(); });
  const bool is_open =
      std::ranges::any_of(incoming_, [](const incoming& each) { return !all_complete(each.requests); });
  if (is_open) static_cast<void>(std::make_unique<std::vector<incoming>>(std::move(incoming_)).release());
  if (!abandoned_.empty())
    static_cast<void>(std::make_unique<std::list<mpi_outgoing>>(std::move(abandoned_)).release());
  else if (!is_open && std::uncaught_exceptions() == 0)
    MPI_Comm_free(&communicator_);  // in which all take part: not where one has failed
}

// `look` says how it stands; `lose` throws. MPI moves data on when it is called, so a wait does not sleep while
// they come. What has begun to go is progress as well: who is still taking it cannot answer yet.
template <class Look, class Lose>
void mpi_transport::wait_until(std::chrono::seconds timeout, Look look, Lose lose) {
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds longest_nap{200};
  constexpr std::chrono::milliseconds pause_between_pieces{20};
  std::chrono::microseconds nap{5};
  auto last_progress = clock::now();
  const auto look_at_all = [&] {
    const progress begun = move_begun_on();
    const progress seen = look();
    return seen == progress::done ? seen : std::max(seen, begun);
  };
  for (progress seen = look_at_all(); seen != progress::done; seen = look_at_all()) {
    const auto now = clock::now();
    if (seen == progress::advanced) last_progress = now;
    if (now > last_progress + timeout) lose();
    if (seen == progress::none || now > last_progress + pause_between_pieces) {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, longest_nap);
    } else {
      std::this_thread::yield();
    }
  }
}

void mpi_transport::lose(const std::vector<std::size_t>& ranks, const std::string& doing,
                         std::chrono::seconds after) const {
  throw peers_lost("nothing heard for " + std::to_string(after.count()) + " s while " + doing + " " +
                       names_of(ranks, options_.name_of),
                   ranks);
}

std::chrono::seconds mpi_transport::timeout_of(std::span<const std::size_t> ranks) const {
  std::chrono::seconds longest{0};
  for (const std::size_t rank : ranks) longest = std::max(longest, options_.timeout_of(rank));
  return longest;
}

std::unique_ptr<lamina::collectives::channel> mpi_transport::make_channel() {
  return std::make_unique<lamina::collectives::mpi_channel>(communicator_, options_.name_of);
}

void mpi_transport::post(std::list<mpi_outgoing>& among, std::span<const std::size_t> to, message_kind kind,
                         const payload& what, std::size_t piece_bytes) {
  // One behind the other: the pieces of two messages to the same rank would mix.
  wait_until(
      timeout_of(to), [&] { return finishing(to); },
      [&] {
        lose({to.begin(), to.end()}, "sending to", timeout_of(to));
      });
  for (const std::size_t rank : to) incoming_[rank].is_unanswered = false;
  among.emplace_back(communicator_, to, kind, what, piece_bytes);
}

void mpi_transport::post_sign_of_life(std::size_t to) {
  signs_.remove_if([](mpi_outgoing& each) { return each.advance() == progress::done; });
  signs_.emplace_back(communicator_, std::span(&to, 1), message_kind::sign_of_life, payload());
}

void mpi_transport::show_life() {
  const auto now = std::chrono::steady_clock::now();
  if (options_.above == rank_ || now < showed_life_at_ + options_.life_period) return;
  showed_life_at_ = now;
  post_sign_of_life(options_.above);
}

void mpi_transport::pass_on_life(std::size_t from) {
  const auto now = std::chrono::steady_clock::now();
  if (now < passed_life_on_at_ + options_.life_period) return;
  passed_life_on_at_ = now;
  if (options_.above != rank_ && options_.above != from) post_sign_of_life(options_.above);
  for (const incoming& each : incoming_) {
    const bool waits = each.at == incoming::phase::arrived || each.is_unanswered;
    if (waits && each.announced.kind != message_kind::finished && each.rank != options_.above &&
        each.rank != from)
      post_sign_of_life(each.rank);
  }
}

mpi_transport::progress mpi_transport::advance(incoming& from) {
  using phase = incoming::phase;
  const int rank = static_cast<int>(from.rank);
  if (from.at == phase::arrived) return progress::done;
  if (from.at == phase::idle) {
    from.requests.assign(1, MPI_REQUEST_NULL);
    check_mpi(MPI_Irecv(&from.announced, sizeof from.announced, MPI_BYTE, rank, mpi_announcement_tag,
                        communicator_, from.requests.data()),
              "MPI_Irecv");
    from.at = phase::announcing;
  }
  const bool advanced = complete_some(from.requests) > 0;
  if (!all_complete(from.requests)) {
    return advanced ? progress::advanced : from.at == phase::arriving ? progress::moving : progress::none;
  }
  if (from.at == phase::arriving) {
    from.at = phase::arrived;
    return progress::done;
  }

  if (from.announced.kind == message_kind::sign_of_life) {
    from.at = phase::idle;
    pass_on_life(from.rank);
    return progress::advanced;
  }
  const std::size_t total = from.announced.bytes;
  if (total > options_.max_message_bytes) {
    throw link_error(options_.name_of(from.rank) + " announces a message of " + std::to_string(total) +
                     " bytes, more than the " + std::to_string(options_.max_message_bytes) +
                     " that can be meant");
  }
  const std::size_t piece_bytes = from.announced.piece_bytes;
  // Each piece is a request.
  if (total > 0 && (piece_bytes < mpi_exchanged_piece_bytes || piece_bytes > mpi_piece_bytes)) {
    throw link_error(options_.name_of(from.rank) + " announces a message in pieces of " +
                     std::to_string(piece_bytes) + " bytes, which are " +
                     std::to_string(mpi_exchanged_piece_bytes) + " to " + std::to_string(mpi_piece_bytes));
  }
  // Not where somebody still has the last message.
  if (!from.bytes || from.bytes.use_count() > 1) from.bytes = std::make_shared<std::vector<std::byte>>();
  from.bytes->resize(total);
  from.requests.clear();
  for (std::size_t begin = 0; begin < total; begin += piece_bytes) {
    check_mpi(MPI_Irecv(from.bytes->data() + begin, static_cast<int>(std::min(piece_bytes, total - begin)),
                        MPI_BYTE, rank, mpi_piece_tag, communicator_,
                        &from.requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Irecv");
  }
  from.at = total == 0 ? phase::arrived : phase::arriving;
  return total == 0 ? progress::done : progress::advanced;
}

mpi_transport::progress mpi_transport::both(progress one, progress other) {
  if (one == progress::done) return other;
  return other == progress::done ? one : std::max(one, other);
}

// In every wait, whatever it is for. What ends is `advanced`: the wait itself is not done.
mpi_transport::progress mpi_transport::move_begun_on() {
  progress most = progress::none;
  for (std::size_t rank = 0; rank < begun_.size(); ++rank) {
    way_to& way = begun_[rank];
    if (way.on_its_way.empty()) continue;
    const progress seen = way.on_its_way.front().advance();
    if (seen >= progress::advanced) heard_at_[rank] = std::chrono::steady_clock::now();
    if (seen == progress::done) {
      way.on_its_way.clear();
      begin_next(rank);
    }
    most = std::max(most, std::min(seen, progress::advanced));
  }
  return most;
}

// What has begun to go to these ranks.
mpi_transport::progress mpi_transport::finishing(std::span<const std::size_t> to) const {
  const bool is_done = std::ranges::all_of(to, [&](std::size_t rank) { return begun_[rank].is_free(); });
  return is_done ? progress::done : progress::moving;
}

mpi_transport::progress mpi_transport::sending() {
  progress all = progress::done;
  for (mpi_outgoing& each : outgoing_) all = both(all, each.advance());
  return all;
}

mpi_transport::progress mpi_transport::receiving(std::span<const std::size_t> from) {
  progress all = progress::done;
  for (const std::size_t rank : from) all = both(all, advance(incoming_[rank]));
  return all;
}

// Gives up what is not yet sent, and says to whom.
std::vector<std::size_t> mpi_transport::abandon() {
  std::vector<std::size_t> lost;
  for (const mpi_outgoing& each : outgoing_) {
    for (const std::size_t rank : each.missing()) lost.push_back(rank);
  }
  abandoned_.splice(abandoned_.end(), outgoing_);
  return lost;
}

std::vector<std::size_t> mpi_transport::missing(std::span<const std::size_t> from) const {
  std::vector<std::size_t> lost;
  for (const std::size_t rank : from) {
    if (incoming_[rank].at != incoming::phase::arrived) lost.push_back(rank);
  }
  return lost;
}

message mpi_transport::take(std::span<const std::size_t> from, std::size_t sender) {
  incoming& arrived = incoming_[from[sender]];
  arrived.at = incoming::phase::idle;
  arrived.is_unanswered = true;
  return {sender, arrived.announced.kind, *arrived.bytes, arrived.bytes};
}

void mpi_transport::send(std::span<const std::size_t> to, message_kind kind, const payload& what) {
  post(outgoing_, to, kind, what);
  const auto look = [&] {
    const progress seen = sending();
    if (seen == progress::done) return seen;
    const mpi_outgoing& all = outgoing_.back();
    if (const auto now = std::chrono::steady_clock::now(); now >= told_waiting_at_ + options_.life_period) {
      told_waiting_at_ = now;
      for (const std::size_t rank : all.waiting()) post_sign_of_life(rank);
    }
    // What the first answer comes while others get theirs.
    for (const std::size_t rank : to) {
      if (all.is_sent_to(rank)) advance(incoming_[rank]);
    }
    return seen;
  };
  try {
    wait_until(timeout_of(to), look, [&] { lose(abandon(), "sending to", timeout_of(to)); });
  } catch (...) {
    abandoned_.splice(abandoned_.end(), outgoing_);  // as where what a receiver answers is too long
    throw;
  }
  outgoing_.clear();
  for (const std::size_t rank : to) heard_at_[rank] = std::chrono::steady_clock::now();
}

void mpi_transport::begin_send(std::size_t to, message_kind kind, const payload& what) {
  begun_[to].behind.emplace_back(kind, what);
  if (begun_[to].on_its_way.empty()) begin_next(to);
  heard_at_[to] = std::chrono::steady_clock::now();
}

void mpi_transport::begin_next(std::size_t to) {
  way_to& way = begun_[to];
  if (way.behind.empty()) return;
  incoming_[to].is_unanswered = false;
  way.on_its_way.emplace_back(communicator_, std::span(&to, 1), way.behind.front().first,
                              std::move(way.behind.front().second));
  way.behind.pop_front();
}

void mpi_transport::flush(std::span<const std::size_t> to) {
  wait_until(
      timeout_of(to), [&] { return finishing(to); },
      [&] {
        std::vector<std::size_t> deaf;
        std::ranges::copy_if(to, std::back_inserter(deaf),
                             [&](std::size_t rank) { return !begun_[rank].is_free(); });
        lose(deaf, "sending to", timeout_of(deaf));
      });
}

std::optional<message> mpi_transport::look_for(std::span<const std::size_t> from) {
  move_begun_on();
  for (std::size_t sender = 0; sender < from.size(); ++sender) {
    if (advance(incoming_[from[sender]]) == progress::done) return take(from, sender);
  }
  return std::nullopt;
}

std::vector<message> mpi_transport::receive_from_each(std::span<const std::size_t> from) {
  using clock = std::chrono::steady_clock;
  for (const std::size_t rank : from) heard_at_[rank] = clock::now();
  const auto look = [&] {
    progress all = progress::done;
    std::vector<std::size_t> silent;
    const auto now = clock::now();
    for (const std::size_t rank : from) {
      const progress seen = advance(incoming_[rank]);
      all = both(all, seen);
      // Each by a clock of its own: the others give signs of life when one is silent.
      if (seen >= progress::advanced) heard_at_[rank] = now;
      if (now > heard_at_[rank] + options_.timeout_of(rank)) silent.push_back(rank);
    }
    if (!silent.empty()) lose(silent, "waiting for", timeout_of(silent));
    return all;
  };
  wait_until(timeout_of(from), look, [&] { lose(missing(from), "waiting for", timeout_of(from)); });
  std::vector<message> messages;
  for (std::size_t sender = 0; sender < from.size(); ++sender) messages.push_back(take(from, sender));
  return messages;
}

message mpi_transport::receive_from_any(std::span<const std::size_t> from) {
  std::size_t arrived = 0;
  const auto look = [&] {
    progress best = progress::none;
    for (std::size_t k = 0; k < from.size(); ++k) {
      const std::size_t sender = (any_after_ + k) % from.size();
      const std::size_t rank = from[sender];
      const progress seen = advance(incoming_[rank]);
      if (seen == progress::done && best != progress::done) arrived = sender;
      best = std::max(best, seen);
      const auto now = std::chrono::steady_clock::now();
      // Each by a clock of its own: the others talk on when one is silent.
      if (seen >= progress::advanced) heard_at_[rank] = now;
      if (now > heard_at_[rank] + options_.timeout_of(rank))
        lose({rank}, "waiting for", options_.timeout_of(rank));
    }
    return best;
  };
  wait_until(timeout_of(from), look, [&] { lose(missing(from), "waiting for", timeout_of(from)); });
  any_after_ = arrived + 1;
  pass_on_life(from[arrived]);  // who is made to wait for a slower one hears that it moves
  return take(from, arrived);
}

message mpi_transport::exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) {
  const std::span<const std::size_t> sender(&from, 1);
  post(outgoing_, {&to, 1}, kind, what, to == from ? mpi_exchanged_piece_bytes : mpi_piece_bytes);
  wait_until(
      options_.exchange_timeout, [&] { return both(sending(), receiving(sender)); },
      [&] {
        const std::vector<std::size_t> silent = missing(sender);
        const std::vector<std::size_t> deaf = abandon();
        lose(silent.empty() ? deaf : silent, "exchanging with", options_.exchange_timeout);
      });
  outgoing_.clear();
  return take(sender, 0);
}

}  // namespace lab
