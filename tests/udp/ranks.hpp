// SPDX-License-Identifier: MIT
#pragma once

#include <future>

#include "bounded/simulated_transfer.hpp"
#include "lamina/udp/udp.hpp"

/// What the tests over sockets share: ranks in threads of one process, over loopback, of which rank 0 is a server that takes gradients.
namespace lamina_test {

namespace udp = lamina::udp;
using udp::endpoint;
using udp::detail::clock_now;
using udp::detail::control_channel;
using udp::detail::descriptor;

/// Hands all that an end of transfers has to say now to `say(bytes)`.
template <class End, class Say>
void say_all(End& end, bounded::instant now, Say&& say) {
  for (auto said = end.poll_control(now); !said.empty(); said = end.poll_control(now)) say(said);
}

constexpr std::uint64_t run_secret = test_secret;

inline endpoint loopback(const std::string& address = "127.0.0.1") {
  return udp::parse_addresses((address.find(':') < address.size() ? "[" + address + "]" : address) + ":0")
      .control;
}

/// As where the system knows no UDP_GRO: packets come one by one, which joined ones need not where all have one class.
inline void take_one_by_one(const udp::packet_socket& at) {
  const int no = 0;
  if (setsockopt(at.descriptor_number(), SOL_UDP, UDP_GRO, &no, sizeof no) != 0)
    throw std::runtime_error("no UDP_GRO to switch off");
}

/// Fragments of many chunks, of one, of less, and of none.
inline lamina::layout small_model() {
  return lamina::layout(
      {{"wide", {40'000}}, {"one", {352}}, {"short", {7}}, {"none", {0}}, {"tail", {5'000}}});
}

struct ranks_given {
  lamina::layout model = small_model();
  std::vector<endpoint> paths = {loopback()};
  double inject_loss = 0;
  std::uint64_t seed = 1;
  std::uint32_t most_bound_ppm = 0;
  bounded::stop_policy stop = bounded::stop_policy::eager;
  std::chrono::seconds timeout{20};
  std::uint64_t link_bits = 10'000'000'000;
  std::size_t mtu = 1500;
  bool has_tags = true;
};

inline bounded::chunk_grid grid_of(const ranks_given& given) {
  const std::size_t headers = given.paths[0].is_v6 != 0 ? 48 : 28;
  const std::size_t data_bytes = given.mtu - headers - bounded::packet_header_bytes;
  constexpr auto type = lamina::payload_type::as_is;
  return bounded::chunk_grid::of<float>(given.model, type, bounded::chunk_elements<float>(type, data_bytes));
}

inline std::string name_of(std::size_t rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

inline udp::rank_addresses at(const std::vector<endpoint>& paths) {
  udp::rank_addresses all{.control = paths.at(0), .paths = static_cast<std::uint32_t>(paths.size())};
  std::ranges::copy(paths, all.data.begin());
  return all;
}
inline udp::open_sockets start_rank(const ranks_given& given, std::size_t rank) {
  return udp::open_sockets(at(given.paths),
                           {.inject_loss = given.inject_loss, .inject_seed = given.seed << 8U | rank});
}

inline std::vector<std::size_t> peers_of(std::size_t rank, std::size_t ranks) {
  if (rank > 0) return {0};
  std::vector<std::size_t> all;
  for (std::size_t r = 1; r < ranks; ++r) all.push_back(r);
  return all;
}

inline udp::transport_options options_of(const ranks_given& given, std::size_t rank, std::size_t ranks) {
  const bounded::chunk_grid grid = grid_of(given);
  udp::transport_options options{.rank = rank,
                                 .ranks = ranks,
                                 .secret = run_secret,
                                 .mtu = given.mtu,
                                 .stop = given.stop,
                                 .has_classes = given.has_tags,
                                 .rate = {.link_bits = given.link_bits,
                                          .senders = rank == 0 ? 1 : static_cast<std::uint32_t>(ranks - 1)},
                                 .meeting_timeout = 20s,
                                 .name_of = name_of};
  for (const std::size_t peer : peers_of(rank, ranks)) {
    options.peers.push_back(
        {.rank = peer,
         .sends = grid,
         .takes = grid,
         .kind = rank == 0 ? lamina::frame_kind::gradients : lamina::frame_kind::parameters,
         .most_bound_ppm = given.most_bound_ppm,
         .timeout = given.timeout});
  }
  return options;
}

/// The connections of a rank with its peers.
inline std::vector<descriptor> meet_all(const udp::open_sockets& here,
                                        const std::vector<udp::rank_addresses>& all,
                                        const udp::transport_options& options) {
  return udp::detail::meeting(here.listener.get(), all, options).run();
}

/// Runs `body(rank, here, all)` for each rank in a thread of its own, with what it has opened and where all are. What each
/// threw, as text; empty if nothing.
template <class Body>
std::vector<std::string> run_started(std::size_t ranks, const ranks_given& given, Body body) {
  std::vector<udp::open_sockets> starts;
  std::vector<udp::rank_addresses> all;
  for (std::size_t r = 0; r < ranks; ++r) {
    starts.push_back(start_rank(given, r));
    all.push_back(starts.back().addresses);
  }
  std::vector<std::future<std::string>> ends;
  for (std::size_t r = 0; r < ranks; ++r) {
    ends.push_back(std::async(std::launch::async, [&, r, here = std::move(starts[r])]() mutable {
      try {
        body(r, std::move(here), all);
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string();
    }));
  }
  std::vector<std::string> said;
  for (auto& each : ends) said.push_back(each.get());
  return said;
}

/// The same with a transport of each.
inline std::vector<std::string> run_ranks(std::size_t ranks, const ranks_given& given,
                                          const std::function<void(udp::transport&)>& body) {
  return run_started(ranks, given, [&](std::size_t r, udp::open_sockets here, const auto& all) {
    udp::transport over(std::move(here), all, options_of(given, r, ranks));
    body(over);
  });
}

/// A frame of small whole numbers, cut.
class test_frame : public made_frame<float> {
 public:
  test_frame(const ranks_given& given, lamina::frame_kind kind, std::uint64_t step, std::uint64_t seed,
             std::uint32_t bound_ppm = 0)
      : test_frame(given, kind, step, std::mt19937(static_cast<std::uint32_t>(seed)), bound_ppm) {}

  std::vector<std::byte> bytes() const { return frame().to_bytes(); }
  const bounded::frame_chunks& chunks() const { return chunks_; }

 private:
  test_frame(const ranks_given& given, lamina::frame_kind kind, std::uint64_t step, std::mt19937 random,
             std::uint32_t bound_ppm)
      : made_frame<float>(random, given.model, everything(given.model), payload_type::as_is, kind, step),
        chunks_(cut(grid_of(given), bound_ppm)) {}

  bounded::frame_chunks chunks_;
};

constexpr std::size_t server_rank = 0;

/// A frame to each of these ranks: of parameters from the server, of gradients from a worker.
inline void send_one(udp::transport& ranks, const ranks_given& given, const std::vector<std::size_t>& to,
                     bounded::instant within = bounded::never) {
  const auto kind =
      ranks.rank() == server_rank ? lamina::frame_kind::parameters : lamina::frame_kind::gradients;
  const test_frame one(given, kind, 1, 1);
  ranks.send_frame(to, one.chunks(), {}, within);
}

}  // namespace lamina_test
