// SPDX-License-Identifier: MIT
#include "messages/over_udp.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "messages/mpi_session.hpp"

namespace lab {
namespace {

namespace bounded = lamina::bounded;
namespace udp = lamina::udp;
using bounded::packet_fate;

// Errors of the sockets, as those of every transport here.
template <class Call>
auto translated(Call call) {
  try {
    return call();
  } catch (const udp::peers_lost& loss) {
    throw peers_lost(loss.what(), loss.ranks());
  } catch (const udp::error& wrong) {
    throw link_error(wrong.what());
  }
}

// What only the other end knows of a transfer comes with the next frame, after the caller's report.
struct told_cost {
  std::uint64_t packets = 0;
  std::uint64_t repeated = 0;
  std::uint64_t wire_bytes = 0;
  std::uint64_t rounds = 0;
  std::uint64_t transfers = 0;
  double rate_bits = 0;
  std::uint64_t duplicate = 0;  // of the frames of who is told
  std::uint64_t late = 0;
};
static_assert(std::is_trivially_copyable_v<told_cost>);

// The frames that a rank takes, this one or another.
const bounded::chunk_grid& taken_by(const udp_options& how, std::size_t rank) {
  if (!how.frames.slices.empty()) return how.frames.slices.at(rank);
  return how.takes_gradients == (rank == how.rank) ? how.frames.gradients : how.frames.parameters;
}

udp::transport_options options_of(const udp_options& how, std::uint64_t secret) {
  udp::transport_options options{
      .rank = how.rank,
      .ranks = how.ranks,
      .secret = secret,
      .mtu = how.mtu,
      .stop = how.frames.stop,
      .has_classes = how.frames.has_tags,
      .rate = {.link_bits = how.link_bits, .senders = how.senders, .is_controlled = how.controls_rate},
      .most_message_bytes = how.max_message_bytes,
      .meeting_timeout = std::chrono::milliseconds(0),
      .name_of = how.name_of};
  for (const std::size_t rank : how.peers) {
    const std::chrono::milliseconds timeout = how.timeout_of(rank);
    options.meeting_timeout = std::max(options.meeting_timeout, 2 * timeout);
    options.peers.push_back({.rank = rank,
                             .sends = taken_by(how, rank),
                             .takes = taken_by(how, how.rank),
                             .kind = how.takes_gradients ? how.frames.up : lamina::frame_kind::parameters,
                             .most_bound_ppm = how.takes_gradients ? how.frames.most_bound_up_ppm
                                                                   : how.frames.most_bound_down_ppm,
                             .timeout = timeout});
  }
  return options;
}

class over_udp : public transport {
 public:
  over_udp(udp::open_sockets here, std::span<const udp::rank_addresses> all, const udp_options& how,
           std::uint64_t secret)
      : how_(how), ways_(translated([&] {
          return std::make_unique<udp::transport>(std::move(here), all, options_of(how, secret));
        })) {}
  over_udp(const over_udp&) = delete;
  over_udp& operator=(const over_udp&) = delete;
  // Where the rank ends by an exception its connections stay open until the process ends: it has yet to say why.
  ~over_udp() override {
    if (std::uncaught_exceptions() > 0) static_cast<void>(ways_.release());
  }

  std::size_t rank() const override { return how_.rank; }
  std::size_t ranks() const override { return how_.ranks; }
  std::string name_of(std::size_t rank) const override { return how_.name_of(rank); }

  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override {
    translated([&] { ways_->send(to, static_cast<std::uint64_t>(kind), bytes_of(what)); });
  }
  void begin_send(std::size_t to, message_kind kind, const payload& what) override {
    translated([&] { ways_->begin_send({&to, 1}, static_cast<std::uint64_t>(kind), bytes_of(what)); });
  }
  std::vector<sent_frame> send_frame(std::span<const std::size_t> to, message_kind kind,
                                     const outgoing_frame& what,
                                     std::span<const bounded::obligations> of_each) override {
    if (what.chunks == nullptr) return transport::send_frame(to, kind, what, of_each);
    std::vector<std::byte> report = bytes_of(what.behind);
    // One frame for several has one report: what each is to be told waits for a frame of its own.
    const told_cost told = to.size() == 1 ? std::exchange(books_[to[0]].to_tell, {}) : told_cost();
    const auto told_bytes = std::as_bytes(std::span(&told, 1));
    report.insert(report.end(), told_bytes.begin(), told_bytes.end());
    const udp::transport_counters before = ways_->counters();
    return translated([&] {
      try {
        return costs(to, before, ways_->send_frame(to, *what.chunks, report, of_each));
      } catch (const udp::frame_lost& loss) {
        throw frame_lost(peers_lost(loss.what(), loss.ranks()), costs(to, before, loss.sent()));
      }
    });
  }
  std::vector<message> receive_from_each(std::span<const std::size_t> from) override {
    std::vector<message> all;
    for (udp::arrival& each : translated([&] { return ways_->receive_from_each(from); }))
      all.push_back(message_of(std::move(each), from));
    return all;
  }
  message receive_from_any(std::span<const std::size_t> from) override {
    return message_of(translated([&] { return ways_->receive_from_any(from); }), from);
  }
  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override {
    begin_send(to, kind, what);
    message theirs = receive_from_each({&from, 1})[0];
    translated([&] { ways_->flush({&to, 1}); });
    return theirs;
  }
  std::vector<std::pair<std::string, std::uint64_t>> counters() override {
    const udp::transport_counters all = ways_->counters();
    const auto of = [&](packet_fate fate) {
      std::uint64_t sum = 0;
      for (const udp::peer_counters& each : all.peers) sum += each.taken.of(fate);
      return sum;
    };
    udp::socket_counters paths;
    for (const udp::socket_counters& each : all.paths) {
      paths.sent += each.sent;
      paths.injected += each.injected;
      paths.unsent += each.unsent;
      paths.overrun += each.overrun;
    }
    return {{"sent", paths.sent},
            {"injected_loss", paths.injected},
            {"unsent", paths.unsent},
            {"overrun", paths.overrun},
            {"placed", of(packet_fate::placed)},
            {"duplicate", of(packet_fate::duplicate)},
            {"late", of(packet_fate::late)},
            {"stale", of(packet_fate::stale)},
            {"malformed", of(packet_fate::malformed)},
            {"foreign", all.foreign + of(packet_fate::foreign)},
            {"bad_check", of(packet_fate::bad_check)},
            {"inconsistent", of(packet_fate::inconsistent)}};
  }

 private:
  struct book {
    told_cost told;  // by the other, and not yet in a cost
    told_cost to_tell;
    bounded::receiver_counters taken;  // when its last frame came
  };

  static std::vector<std::byte> bytes_of(const payload& what) {
    std::vector<std::byte> bytes;
    bytes.reserve(what.size_bytes());
    for (const auto segment : what.segments()) bytes.insert(bytes.end(), segment.begin(), segment.end());
    return bytes;
  }
  const udp::peer_counters& of_rank(const udp::transport_counters& all, std::size_t rank) const {
    const auto place = std::ranges::find(how_.peers, rank) - how_.peers.begin();
    return all.peers.at(static_cast<std::size_t>(place));
  }

  // With what each of these took since `before`.
  std::vector<sent_frame> costs(std::span<const std::size_t> to, const udp::transport_counters& before,
                                const std::vector<std::optional<lamina::delivery>>& arrived) {
    const udp::transport_counters now = ways_->counters();
    std::vector<sent_frame> sent(to.size());
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (!arrived[i]) continue;
      const udp::peer_counters& then = of_rank(before, to[i]);
      const udp::peer_counters& each = of_rank(now, to[i]);
      book& its = books_[to[i]];
      transfer_cost cost;
      cost.elements = arrived[i]->sent().sent_elements();
      cost.lost_elements = arrived[i]->lost_elements();
      its.to_tell.packets = cost.packets = each.sent.packets - then.sent.packets;
      its.to_tell.repeated = cost.repeated = each.sent.repeated - then.sent.repeated;
      its.to_tell.wire_bytes = cost.wire_bytes = each.sent.wire_bytes - then.sent.wire_bytes;
      its.to_tell.rounds = cost.rounds = each.rounds;
      its.to_tell.transfers = cost.transfers = 1;
      its.to_tell.rate_bits = cost.rate_bits = each.rate_bits;
      cost.duplicate = std::exchange(its.told.duplicate, 0);
      cost.late = std::exchange(its.told.late, 0);
      sent[i] = {arrived[i], cost};
    }
    return sent;
  }

  message message_of(udp::arrival&& come, std::span<const std::size_t> from) {
    message made{.sender = static_cast<std::size_t>(std::ranges::find(from, come.rank) - from.begin()),
                 .kind = static_cast<message_kind>(come.tag),
                 .bytes = come.bytes,
                 .owner = std::move(come.owner)};
    if (!come.frame) return made;
    if (come.report.size() < sizeof(told_cost))
      throw link_error(name_of(come.rank) + " sent a frame without what the one before took");
    made.kind = how_.takes_gradients ? message_kind::gradients : message_kind::parameters;
    made.behind = come.report.first(come.report.size() - sizeof(told_cost));
    told_cost told;
    std::memcpy(&told, come.report.data() + made.behind.size(), sizeof told);

    book& its = books_[come.rank];
    const bounded::receiver_counters taken = of_rank(ways_->counters(), come.rank).taken;
    const auto since = [&](packet_fate fate) { return taken.of(fate) - its.taken.of(fate); };
    transfer_cost cost;
    cost.elements = come.frame->arrived.sent().sent_elements();
    cost.lost_elements = come.frame->arrived.lost_elements();
    cost.packets = told.packets;
    cost.repeated = told.repeated;
    cost.wire_bytes = told.wire_bytes;
    cost.rounds = told.rounds;
    cost.transfers = told.transfers;
    cost.rate_bits = told.rate_bits;
    cost.duplicate = since(packet_fate::duplicate);
    // Those that come when the next transfer has begun are stale to it.
    cost.late = since(packet_fate::late) + since(packet_fate::stale);
    its.taken = taken;
    its.to_tell.duplicate += cost.duplicate;
    its.to_tell.late += cost.late;
    its.told.duplicate += told.duplicate;
    its.told.late += told.late;

    arrived_frame arrived{come.frame->arrived, {}, cost};
    for (const bounded::repair& each : come.frame->repairs)
      arrived.repairs.push_back({each.layer, each.begin, {each.elements.begin(), each.elements.end()}});
    made.transfer = std::make_shared<const arrived_frame>(std::move(arrived));
    return made;
  }

  udp_options how_;
  std::unique_ptr<udp::transport> ways_;
  std::map<std::size_t, book> books_;  // of each peer
};

}  // namespace

std::unique_ptr<transport> meet_over_udp(MPI_Comm ranks, const udp_options& how,
                                         const udp::rank_addresses& paths,
                                         const udp::socket_options& sockets) {
  static_assert(std::is_trivially_copyable_v<udp::rank_addresses>);
  return translated([&] {
    udp::open_sockets here(paths, sockets);
    std::uint64_t secret = how.rank == 0 ? udp::draw_secret() : 0;
    std::vector<udp::rank_addresses> all(how.ranks);
    check_mpi(MPI_Bcast(&secret, 1, MPI_UINT64_T, 0, ranks), "MPI_Bcast");
    check_mpi(MPI_Allgather(&here.addresses, sizeof here.addresses, MPI_BYTE, all.data(),
                            sizeof here.addresses, MPI_BYTE, ranks),
              "MPI_Allgather");
    return std::make_unique<over_udp>(std::move(here), all, how, secret);
  });
}

}  // namespace lab
