// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/sum.hpp"

/// \file
/// Runs one schedule over a channel, without blocking. Read it after channel.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// What stands before the elements of a round: which one they are of. 32 bytes, little endian, as the fields lie here.
struct round_header {
  static constexpr std::size_t size_bytes = 32;
  static constexpr std::uint32_t own_magic = 0x4d414cf5;  ///< the bytes F5 4C 41 4D

  std::uint32_t magic = own_magic;
  std::uint32_t number = 0;  ///< of the collective, since the beginning of the run
  std::uint64_t step = 0;
  std::uint32_t plan = 0;  ///< low 32 bits of its fingerprint
  operation what = operation::all_reduce;
  algorithm how = algorithm::pairwise;
  std::uint16_t round = 0;
  std::uint32_t elements = 0;  ///< in this round
  std::uint32_t decision =
      0;  ///< what all ranks must have chosen alike: a hash of bucket, chunk, and which layers are kept

  void write(std::span<std::byte, size_bytes> to) const noexcept { std::memcpy(to.data(), this, size_bytes); }

  /// In which field the header of another rank differs from this one, as a sentence without its subject; empty where in none. The first
  /// that differs is named: magic, plan, number, step, operation, algorithm, decision, round, elements. No allocation where none does.
  [[nodiscard]] std::string difference(std::span<const std::byte, size_bytes> from) const {
    using lamina::detail::sentence;
    round_header theirs;
    std::memcpy(&theirs, from.data(), size_bytes);
    if (theirs.magic != own_magic) return "sends something that is no round of a collective";
    if (theirs.plan != plan)
      return sentence("was started with another plan (", theirs.plan, ", this one has ", plan, ")");
    if (theirs.number != number) return sentence("is in ", theirs.place(), ", this one in ", number);
    if (theirs.step != step) return sentence("is in ", theirs.place(), ", this one in step ", step);
    if (theirs.what != what || theirs.how != how)
      return sentence("runs collective ", number, " as ", theirs.kind(), ", this one as ", kind());
    if (theirs.decision != decision)
      return sentence("has chosen other layers than this one for collective ", number, " of step ", step);
    if (theirs.round != round) return sentence("is in ", theirs.place(), ", this one in round ", round);
    if (theirs.elements == elements) return "";
    return sentence("sends ", theirs.elements, " elements in ", theirs.place(), ", where ", elements,
                    " are expected");
  }

  /// "collective 7 of step 3 (ring, round 2)"
  [[nodiscard]] std::string place() const {
    return lamina::detail::sentence("collective ", number, " of step ", step, " (", name_of(how), ", round ",
                                    round, ")");
  }

 private:
  [[nodiscard]] std::string kind() const { return std::string(name_of(what)) + " by " + name_of(how); }
};
// Its fields lie as they are sent.
static_assert(sizeof(round_header) == round_header::size_bytes && std::is_trivially_copyable_v<round_header>);
static_assert(std::endian::native == std::endian::little, "lamina needs a little-endian machine");

/// Bytes of a message at most; a round of more goes in several. Below 64 KiB Open MPI does not ask before it sends, which halves the rate of
/// two ranks that exchange.
inline constexpr std::size_t default_piece_bytes = 60'000;

/// One collective of a run.
struct collective {
  round_header header;  ///< of its rounds; the executor fills in plan, round and elements
  /// As what numbers travel; another than as_is by algorithm::pairwise alone.
  payload_type payload = payload_type::as_is;
  std::span<float> elements;  ///< of this rank at first, the result in the end
};

/// Runs one collective after another over a channel: posts the pieces of a round and of those that join it, adds what arrives as soon as it
/// is there, and goes on to the next. Nothing blocks, and no thread is made. What arrives is compared with what is due before it is added.
class executor {
 public:
  /// What messages are read from and written to besides the elements. It must outlive them.
  struct memory {
    std::vector<float> scratch;
    // Of the rounds that are under way together.
    std::array<std::array<std::byte, round_header::size_bytes>, most_joined> sent_headers{};
    std::array<std::array<std::byte, round_header::size_bytes>, most_joined> arrived_headers{};
  };

  /// For collectives of at most so many elements; of the plan's fingerprint the low 32 bits travel. Ranks must have the same `piece_bytes`.
  /// Throws std::invalid_argument where a piece would hold no element, a collective more than 2^32 - 1, a round would be more pieces
  /// than a channel has tickets, or the timeout is not above 0.
  executor(channel& over, std::uint64_t plan, std::size_t most_elements, memory& given,
           std::size_t piece_bytes = default_piece_bytes,
           std::chrono::milliseconds timeout = std::chrono::minutes(2))
      : channel_(over),
        plan_(static_cast<std::uint32_t>(plan)),
        piece_bytes_(piece_bytes),
        memory_(given),
        patience_(timeout) {
    const std::size_t least = piece_elements(sizeof(float));
    if (least == 0) detail::refuse("a piece of a round must have room for a header and an element");
    if (most_elements > (std::numeric_limits<std::uint32_t>::max)()) {
      detail::refuse("a collective of ", most_elements,
                     " elements is too long: a header counts them in 32 bits");
    }
    const std::size_t most_pieces = most_elements / least + most_joined;
    if (2 * most_pieces > channel::most_tickets) {
      detail::refuse("a collective of ", most_elements, " elements would go in ", most_pieces,
                     " pieces at once, of which a channel bears ", channel::most_tickets / 2);
    }
    memory_.scratch.resize(most_elements + channel_.ranks());
    incoming_.reserve(most_pieces);
    roles_.resize(channel::most_tickets);
    rounds_.reserve(2 * channel_.ranks() + 16);
  }

  /// Begins; it may be over at once, where there is nobody to talk to. std::logic_error while another runs, and for a payload that the
  /// algorithm has not.
  void start(const collective& what) {
    if (is_running()) throw std::logic_error("one collective at a time");
    const algorithm how = what.header.how;
    if (what.payload != payload_type::as_is && how != algorithm::pairwise)
      detail::refuse<std::logic_error>(name_of(how), " has no payload ", name_of(what.payload));
    now_ = what;
    patience_.renew();
    rounds_of(what.header.what, how, channel_.ranks(), channel_.rank(), what.elements.size(), rounds_);
    end_ = 0;
    round_ = 0;
    with_place([&] {
      post_next();
      if (is_running()) round_ = awaited();
    });
  }

  [[nodiscard]] bool is_running() const noexcept { return begin_ < rounds_.size(); }
  [[nodiscard]] const collective& current() const noexcept { return now_; }
  /// Whether the channel may still look at the memory.
  [[nodiscard]] bool has_open_messages() const noexcept { return open_sends_ > 0 || open_receives_ > 0; }
  /// Since the beginning, headers and all.
  [[nodiscard]] std::uint64_t sent_bytes() const noexcept { return sent_bytes_; }

  /// Goes on as far as it can without waiting; whether anything moved. Throws channel_error, naming rank, collective and round, also where
  /// nothing has moved for as long as the timeout; the collective cannot go on then, and its elements are unspecified.
  bool advance() {
    bool has_moved = false;
    with_place([&] {
      const std::span<const completion> done = channel_.progress();
      has_moved = !done.empty();
      for (const completion& each : done) take(each);
      if (!has_moved) return;
      settle();
      if (!has_open_messages()) {
        fold();
        post_next();
      }
      if (is_running()) round_ = awaited();
    });
    if (has_moved) {
      patience_.renew();
    } else if (is_running() && patience_.is_over()) {
      const round& now = rounds_[awaited()];
      const std::size_t silent = open_receives_ > 0 ? now.receive->peer : now.send->peer;
      throw channel_error(silent, "nothing heard for " + patience_.seconds() + " s while exchanging with " +
                                      channel_.name_of(silent) + " in " + header(round_).place());
    }
    return has_moved;
  }

 private:
  struct incoming_piece {
    std::size_t round = 0;
    element_range elements;  // of those that arrive in this round
    completion done;
    bool has_arrived = false;
    bool is_settled = false;
  };
  // What a ticket is of.
  struct role {
    enum type : std::uint8_t { nothing, sent, incoming };
    type what = nothing;
    std::size_t index = 0;  // of the round that is sent, or of the piece that comes in
  };

  [[nodiscard]] std::size_t piece_elements(std::size_t element_bytes) const noexcept {
    return ((std::max)(piece_bytes_, round_header::size_bytes) - round_header::size_bytes) / element_bytes;
  }
  [[nodiscard]] bool is_rounded() const noexcept { return now_.payload != payload_type::as_is; }
  [[nodiscard]] std::size_t element_bytes() const noexcept { return payload_bytes<float>(now_.payload, 1); }
  [[nodiscard]] round_header header(std::size_t round, std::size_t elements = 0) const {
    round_header made = now_.header;
    made.plan = plan_;
    made.round = static_cast<std::uint16_t>(round);
    made.elements = static_cast<std::uint32_t>(elements);
    return made;
  }
  // An error of the channel says in which round it was met.
  template <class Work>
  void with_place(const Work& work) {
    try {
      work();
    } catch (const channel_error& error) {
      throw channel_error(error.rank(), std::string(error.what()) + ", in " + header(round_).place());
    }
  }
  // Of numbers that travel rounded, half of the scratch memory has what comes, and half what goes out.
  [[nodiscard]] std::span<std::byte> arriving() const {
    return std::as_writable_bytes(std::span(memory_.scratch));
  }
  [[nodiscard]] std::span<std::byte> leaving() const {
    return std::as_writable_bytes(std::span(memory_.scratch).last(memory_.scratch.size() / 2));
  }
  // Where the elements of a round go that arrive, as they have travelled.
  [[nodiscard]] std::span<std::byte> target(const round& now) const {
    const element_range in = now.receive->elements;
    if (now.on_arrival == arrival::put && !is_rounded())
      return std::as_writable_bytes(now_.elements.subspan(in.begin, in.size()));
    std::size_t place = 0;
    if (now.on_arrival == arrival::hold) place = held_place(channel_.rank(), now.receive->peer) * in.size();
    if (now.on_arrival == arrival::put) place = in.begin;
    return arriving().subspan(place * element_bytes(), in.size() * element_bytes());
  }
  // The elements of a round that are sent, as they travel.
  [[nodiscard]] std::span<const std::byte> outgoing(std::size_t index) const {
    const element_range out = rounds_[index].send->elements;
    const std::span<float> elements = now_.elements.subspan(out.begin, out.size());
    if (!is_rounded()) return std::as_bytes(elements);
    const auto to = leaving().subspan(out.begin * element_bytes(), out.size() * element_bytes());
    // The own shard is the same for all, and may be on its way already.
    const bool is_there =
        rounds_[index].joins && rounds_[index - 1].send && rounds_[index - 1].send->elements == out;
    if (!is_there) detail::narrow(now_.payload, elements, to.data());
    return to;
  }

  // Posts the next round that has messages, and those that join it.
  void post_next() {
    incoming_.clear();
    do {
      begin_ = end_;
      if (begin_ == rounds_.size()) break;
      for (++end_; end_ < rounds_.size() && rounds_[end_].joins;) ++end_;
      for (std::size_t k = begin_; k < end_; ++k) post_receive(k);
      for (std::size_t k = begin_; k < end_; ++k) post_send(k);
    } while (!has_open_messages());
  }
  void post_receive(std::size_t index) {
    round_ = index;
    const round& now = rounds_[index];
    if (!now.receive) return;
    const std::size_t piece = piece_elements(element_bytes());
    const std::span<std::byte> to = target(now);
    const std::size_t count = now.receive->elements.size();
    for (std::size_t begin = 0; begin < count; begin += piece) {
      const element_range part = {begin, (std::min)(begin + piece, count)};
      const auto before =
          begin == 0 ? std::span<std::byte>(memory_.arrived_headers[index - begin_]) : std::span<std::byte>();
      const ticket posted =
          channel_.receive(now.receive->peer,
                           {before, to.subspan(part.begin * element_bytes(), part.size() * element_bytes())});
      roles_[posted] = {role::incoming, incoming_.size()};
      incoming_.push_back({index, part, {}, false, false});
      ++open_receives_;
    }
  }
  void post_send(std::size_t index) {
    round_ = index;
    const round& now = rounds_[index];
    if (!now.send) return;
    const std::size_t piece_bytes = piece_elements(element_bytes()) * element_bytes();
    const std::span<const std::byte> out = outgoing(index);
    auto& own_header = memory_.sent_headers[index - begin_];
    header(index, now.send->elements.size()).write(own_header);
    for (std::size_t begin = 0; begin < out.size(); begin += piece_bytes) {
      const auto part = out.subspan(begin, (std::min)(piece_bytes, out.size() - begin));
      const auto before = begin == 0 ? std::span<const std::byte>(own_header) : std::span<const std::byte>();
      roles_[channel_.send(now.send->peer, {before, part})] = {role::sent, index};
      ++open_sends_;
      sent_bytes_ += before.size() + part.size();
    }
  }

  void take(const completion& done) {
    const role of = std::exchange(roles_[done.which], role());
    if (of.what == role::sent) {
      --open_sends_;
      return;
    }
    --open_receives_;
    incoming_[of.index].done = done;
    incoming_[of.index].has_arrived = true;
  }
  // The round that is waited for: of those under way the first of which something is to come, else to leave.
  [[nodiscard]] std::size_t awaited() const {
    const auto piece = std::ranges::find(incoming_, false, &incoming_piece::has_arrived);
    if (piece != incoming_.end()) return piece->round;
    std::size_t first = end_ - 1;
    for (const role& each : roles_)
      if (each.what == role::sent) first = (std::min)(first, each.index);
    return first;
  }

  // Makes the sum of what was held, where a round ends with one.
  void fold() {
    const element_range fold = rounds_[end_ - 1].fold;
    if (fold.size() == 0) return;
    const std::span<float> own = now_.elements.subspan(fold.begin, fold.size());
    fold_in_rank_order(now_.payload, channel_.rank(), channel_.ranks(), own, arriving());
    if (!is_rounded() || now_.header.what != operation::all_reduce) return;
    // As all others will have it.
    detail::narrow(now_.payload, own, leaving().data());
    detail::widen(now_.payload, leaving().data(), own);
  }

  // Checks and adds what has arrived: the header first, and nothing before the piece that carries it.
  void settle() {
    bool is_known = false;  // whether the header of the piece's round is there
    for (incoming_piece& each : incoming_) {
      const bool has_header = each.elements.begin == 0;
      if (has_header) is_known = each.has_arrived;
      if (!is_known || !each.has_arrived || each.is_settled) continue;
      round_ = each.round;
      const round& now = rounds_[round_];
      check_piece(each, has_header);
      // Where a whole vector is sent and added to at once, it must have left first.
      const bool adds = now.on_arrival == arrival::add;
      if (adds && open_sends_ > 0 && now.send && now.send->elements.overlaps(now.receive->elements)) continue;
      const std::span<float> place =
          now_.elements.subspan(now.receive->elements.begin + each.elements.begin, each.elements.size());
      if (adds) {
        lamina::detail::add_elements(place.data(), &memory_.scratch[each.elements.begin], place.size());
      } else if (now.on_arrival == arrival::put && is_rounded()) {
        detail::widen(now_.payload, target(now).data() + each.elements.begin * element_bytes(), place);
      }
      each.is_settled = true;
    }
  }

  void check_piece(const incoming_piece& piece, bool has_header) const {
    const transfer& due = *rounds_[piece.round].receive;
    const std::size_t header_bytes = has_header ? round_header::size_bytes : 0;
    const std::size_t expected = header_bytes + piece.elements.size() * element_bytes();
    const std::size_t bytes = piece.done.bytes;
    std::string fault;
    if (has_header && bytes >= header_bytes) {
      fault =
          header(piece.round, due.elements.size()).difference(memory_.arrived_headers[piece.round - begin_]);
    }
    if (fault.empty() && piece.done.is_truncated) {
      fault = lamina::detail::sentence("sends more than the ", expected, " bytes that are expected");
    } else if (fault.empty() && bytes != expected) {
      fault = lamina::detail::sentence("sends ", bytes, " bytes where ", expected, " are expected");
    }
    if (!fault.empty()) throw channel_error(due.peer, channel_.name_of(due.peer) + " " + fault);
  }

  channel& channel_;
  std::uint32_t plan_;
  std::size_t piece_bytes_;
  memory& memory_;
  detail::patience patience_;
  collective now_;
  std::vector<round> rounds_;
  std::size_t begin_ = 0;  // of the rounds that are under way
  std::size_t end_ = 0;
  std::size_t round_ = 0;  // of which an error speaks
  std::vector<incoming_piece> incoming_;
  std::vector<role> roles_;  // of a ticket
  std::size_t open_sends_ = 0;
  std::size_t open_receives_ = 0;
  std::uint64_t sent_bytes_ = 0;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
