// SPDX-License-Identifier: MIT
#include "ways.hpp"

#include <ifaddrs.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <exception>
#include <lamina/adapt/mpi.hpp>
#include <map>
#include <sstream>
#include <type_traits>
#include <utility>

namespace lab {
namespace {

namespace bounded = lamina::bounded;
namespace udp = lamina::udp;
using lamina::detail::check_mpi;

// What a packet has room for: Ethernet's 1500 bytes without the headers of IPv4, UDP and the packet.
constexpr std::size_t packet_data_bytes = 1500 - 28 - bounded::packet_header_bytes;
constexpr unsigned most_losses = 3;  // of a chunk of gradients in a row

class mpi_way final : public way {
 public:
  mpi_way(MPI_Comm ranks, std::chrono::seconds timeout) : ranks_(ranks), timeout_(timeout) {}

  void send_parameters(std::span<const std::size_t> to, const lamina::encoded_frame& frame,
                       const lamina::selection&) override {
    // One after the other: who has all of it can begin to compute.
    for (const std::size_t rank : to) lamina::mpi::send(frame, static_cast<int>(rank), tag, ranks_, timeout_);
  }
  std::optional<lamina::delivery> send_gradients(const lamina::encoded_frame& frame,
                                                 const lamina::selection&) override {
    lamina::mpi::send(frame, 0, tag, ranks_, timeout_);
    return std::nullopt;
  }
  std::vector<arrival> receive(std::span<const std::size_t> from) override {
    for (std::size_t come = 0; come < from.size(); ++come) {
      const int rank = lamina::mpi::wait_for_message(
          from.size() == 1 ? static_cast<int>(from[0]) : MPI_ANY_SOURCE, tag, ranks_, timeout_);
      lamina::mpi::receive(buffers_[static_cast<std::size_t>(rank)], rank, tag, ranks_, timeout_);
    }
    std::vector<arrival> frames;
    for (const std::size_t rank : from) frames.push_back({.rank = rank, .bytes = buffers_[rank]});
    return frames;
  }

 private:
  static constexpr int tag = 1;
  MPI_Comm ranks_;
  std::chrono::seconds timeout_;
  std::map<std::size_t, std::vector<std::byte>> buffers_;  // of each rank, its last frame
};

class socket_way final : public way {
 public:
  socket_way(std::unique_ptr<udp::transport> sockets, bounded::chunk_grid grid, const link_options& how)
      : sockets_(std::move(sockets)),
        grid_(std::move(grid)),
        memory_(grid_),
        gradients_{.bound_ppm = how.bound_ppm(), .tags = how.has_tags} {}
  socket_way(const socket_way&) = delete;
  socket_way& operator=(const socket_way&) = delete;
  // Where the rank ends by an exception its connections stay open until the process ends: it has yet to say why.
  ~socket_way() override {
    if (std::uncaught_exceptions() > 0) static_cast<void>(sockets_.release());
  }

  void send_parameters(std::span<const std::size_t> to, const lamina::encoded_frame& frame,
                       const lamina::selection& sent) override {
    sockets_->send_frame(
        to, bounded::frame_chunks(frame, sent, grid_, {.bound_ppm = 0, .tags = gradients_.tags}));
  }
  std::optional<lamina::delivery> send_gradients(const lamina::encoded_frame& frame,
                                                 const lamina::selection& sent) override {
    const bounded::frame_chunks chunks(frame, sent, grid_, gradients_);
    const bounded::obligations owed{.required = memory_.required(sent, most_losses)};
    constexpr std::size_t server = 0;
    auto arrived = sockets_->send_frame({&server, 1}, chunks, {&owed, 1})[0];
    if (!arrived) return arrived;
    memory_.note(*arrived);
    for (const bounded::chunk& each : chunks.in_sending_order()) {
      if (!arrived->is_lost(each.fragment, each.index)) continue;
      ++missing_;
      missing_droppable_ += (each.tag & bounded::droppable_tag) != 0 ? 1 : 0;
    }
    return arrived;
  }
  std::vector<arrival> receive(std::span<const std::size_t> from) override {
    std::vector<arrival> frames;
    for (udp::arrival& each : sockets_->receive_from_each(from))
      frames.push_back({each.rank, each.bytes, std::move(each.arrived)});
    return frames;
  }
  packet_counts packets() override {
    using bounded::packet_fate;
    packet_counts all{.missing = missing_, .missing_droppable = missing_droppable_};
    for (const udp::peer_counters& each : sockets_->counters().peers) {
      all.sent += each.sent.packets;
      all.repeated += each.sent.repeated;
      // Those that come when the next transfer has begun are stale to it.
      all.late += each.taken.of(packet_fate::late) + each.taken.of(packet_fate::stale);
    }
    return all;
  }

 private:
  std::unique_ptr<udp::transport> sockets_;
  bounded::chunk_grid grid_;  // by which frames are cut
  bounded::loss_memory memory_;
  bounded::sending_options gradients_;
  std::uint64_t missing_ = 0;
  std::uint64_t missing_droppable_ = 0;
};

// The first IPv4 address of each of these interfaces.
udp::rank_addresses local_paths(const std::string& interfaces) {
  ifaddrs* listed = nullptr;
  if (getifaddrs(&listed) != 0) throw std::runtime_error("getifaddrs failed");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(listed, &freeifaddrs);
  std::string paths;
  std::istringstream names(interfaces);
  for (std::string name; std::getline(names, name, ',');) {
    const ifaddrs* at = listed;
    while (at != nullptr &&
           (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET || name != at->ifa_name))
      at = at->ifa_next;
    if (at == nullptr) throw std::invalid_argument("--interface: '" + name + "' has no IPv4 address here");
    udp::endpoint found;
    std::memcpy(found.address.data(), &reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr, 4);
    paths += (paths.empty() ? "" : ",") + text_of(found) + ":0";
  }
  return udp::parse_addresses(paths);
}

}  // namespace

void add_link_options(CLI::App& app, const char* group, link_options& into) {
  const auto add = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->group(group);
  };
  add("--transport", into.transport, "with a server: mpi; or udp: frames as packets")
      ->check(CLI::IsMember({"mpi", "udp"}));
  add("--interface", into.interfaces, "with udp: a path each, with commas between them");
  add("--link-rate", into.rate_bits, "with udp: bits a second; 0: not known");
  add("--loss-bound", into.loss_bound, "with udp: share of each layer's gradients that may be missing")
      ->check(CLI::Range(0.0, 0.5));
  add("--inject-loss", into.inject_loss, "with udp: share of the packets that are lost on purpose")
      ->check(CLI::Range(0.0, 0.7));
}

std::string link_options::mistake() const {
  if (!is_lossy() &&
      (loss_bound > 0 || inject_loss > 0 || interfaces != "lo" || rate_bits > 0 || !controls_rate))
    return "--loss-bound, --inject-loss, --interface, --link-rate or --rate-control needs --transport udp";
  if (rate_bits > 0 && rate_bits < 1'000'000) return "--link-rate is 0 or at least 1000000";
  return "";
}

std::unique_ptr<way> open_way(MPI_Comm ranks, const lamina::layout& fragments, const link_options& how,
                              std::chrono::seconds timeout, const rank_names& name_of) {
  if (!how.is_lossy()) return std::make_unique<mpi_way>(ranks, timeout);
  int number = 0;
  int count = 0;
  check_mpi(MPI_Comm_rank(ranks, &number), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(ranks, &count), "MPI_Comm_size");
  const auto rank = static_cast<std::size_t>(number);
  const auto all = static_cast<std::size_t>(count);
  const bool is_server = rank == 0;

  udp::open_sockets here(local_paths(how.interfaces),
                         {.inject_loss = how.inject_loss, .inject_seed = how.inject_seed << 8U | rank});
  std::uint64_t secret = is_server ? udp::draw_secret() : 0;
  std::vector<udp::rank_addresses> addresses(all);
  static_assert(std::is_trivially_copyable_v<udp::rank_addresses>);
  check_mpi(MPI_Bcast(&secret, 1, MPI_UINT64_T, 0, ranks), "MPI_Bcast");
  check_mpi(MPI_Allgather(&here.addresses, sizeof here.addresses, MPI_BYTE, addresses.data(),
                          sizeof here.addresses, MPI_BYTE, ranks),
            "MPI_Allgather");

  udp::transport_options options{
      .rank = rank,
      .ranks = all,
      .secret = secret,
      .stop = how.stops_on_probe ? bounded::stop_policy::on_probe : bounded::stop_policy::eager,
      .has_classes = how.has_tags,
      // The clients send at the same time; the server sends to all of them over one link, which they share in turns.
      .rate = {.link_bits = how.rate_bits,
               .senders = static_cast<std::uint32_t>(is_server ? 1 : all - 1),
               .is_controlled = how.controls_rate},
      .meeting_timeout = 2 * timeout,
      .name_of = name_of};
  constexpr auto as_is = lamina::payload_type::as_is;
  const auto grid = bounded::chunk_grid::of<float>(fragments, as_is,
                                                   bounded::chunk_elements<float>(as_is, packet_data_bytes));
  for (std::size_t peer = is_server ? 1 : 0; peer < (is_server ? all : 1); ++peer)
    options.peers.push_back(
        {.rank = peer,
         .sends = grid,
         .takes = grid,
         .kind = is_server ? lamina::frame_kind::gradients : lamina::frame_kind::parameters,
         .most_bound_ppm = is_server ? how.bound_ppm() : 0,
         .timeout = timeout});
  return std::make_unique<socket_way>(std::make_unique<udp::transport>(std::move(here), addresses, options),
                                      grid, how);
}

}  // namespace lab
