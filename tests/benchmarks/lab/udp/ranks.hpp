// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <lamina/bounded/bounded.hpp>
#include <lamina/codec.hpp>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "messages/udp/meeting.hpp"
#include "messages/udp/opened.hpp"
#include "messages/udp/udp_transport.hpp"
#include "support.hpp"

/// What the tests over sockets share: ranks in threads of one process, over loopback, of which rank 0 is a server that takes gradients.
namespace lamina_test {

namespace bounded = lamina::bounded;
using namespace lab;
using namespace std::chrono_literals;

constexpr std::uint64_t run_secret = 0x0123456789abcdef;

inline endpoint loopback(const std::string& address = "127.0.0.1") {
  return parse_network(address).begin;
}

/// Parts of many chunks, of one, of less, and of none.
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
  std::size_t max_message_bytes = std::size_t{1} << 28U;
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

/// One rank before it meets the others.
struct rank_start {
  open_sockets sockets;
  rank_addresses addresses;
};
inline rank_start start_rank(const ranks_given& given, std::size_t rank) {
  open_sockets sockets =
      open_paths(given.paths, {.inject_loss = given.inject_loss, .inject_seed = given.seed << 8U | rank});
  const rank_addresses addresses = addresses_of(sockets);
  return {std::move(sockets), addresses};
}

inline std::vector<std::size_t> peers_of(std::size_t rank, std::size_t ranks) {
  if (rank > 0) return {0};
  std::vector<std::size_t> all;
  for (std::size_t r = 1; r < ranks; ++r) all.push_back(r);
  return all;
}

inline meeting_options meeting_of(const ranks_given& given, std::size_t rank, std::size_t ranks) {
  const bounded::chunk_grid grid = grid_of(given);
  return {.rank = rank,
          .hello = {.rank = static_cast<std::uint32_t>(rank),
                    .ranks = static_cast<std::uint32_t>(ranks),
                    .element_type = 1,
                    .fingerprint = given.model.fingerprint(),
                    .chunk_elements = static_cast<std::uint32_t>(grid.chunk_elements()),
                    .mtu = static_cast<std::uint32_t>(given.mtu)},
          .secret = run_secret,
          .name_of = name_of,
          .timeout = 20s};
}

/// The connections of a rank with its peers, whose addresses are in `all`.
inline std::vector<met_rank> meet_all(const rank_start& here, const std::vector<rank_addresses>& all,
                                      const meeting_options& options) {
  std::vector<endpoint> listeners;
  for (const rank_addresses& each : all) listeners.push_back(each.control);
  const std::vector<std::size_t> peers = peers_of(options.rank, all.size());
  std::vector<descriptor> connections = meet(here.sockets.control, peers, listeners, options);
  std::vector<met_rank> met;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const rank_addresses& theirs = all[peers[i]];
    set_control_options(connections[i].get(), 20'000);
    met.push_back({std::move(connections[i]), {theirs.data.begin(), theirs.data.begin() + theirs.paths}});
  }
  return met;
}

inline std::unique_ptr<udp_transport> join(rank_start here, const std::vector<rank_addresses>& all,
                                           std::size_t rank, const ranks_given& given) {
  std::vector<met_rank> met = meet_all(here, all, meeting_of(given, rank, all.size()));
  const bounded::chunk_grid grid = grid_of(given);
  udp_transport_options options{.rank = rank,
                                .ranks = all.size(),
                                .takes_gradients = rank == 0,
                                .peers = peers_of(rank, all.size()),
                                .frames = {.gradients = grid,
                                           .parameters = grid,
                                           .most_bound_up_ppm = given.most_bound_ppm,
                                           .most_bound_down_ppm = given.most_bound_ppm,
                                           .stop = given.stop,
                                           .has_tags = given.has_tags},
                                .secret = run_secret,
                                .link_bits = given.link_bits,
                                .senders = rank == 0 ? 1 : static_cast<std::uint32_t>(all.size() - 1),
                                .mtu = given.mtu,
                                .max_message_bytes = given.max_message_bytes,
                                .timeout_of = [timeout = given.timeout](std::size_t) { return timeout; },
                                .ping_every = 250ms,
                                .name_of = name_of};
  return std::make_unique<udp_transport>(std::move(options), std::move(here.sockets.paths), std::move(met));
}

/// Runs `body(rank, here, all)` for each rank in a thread of its own, with what it has opened and where all are. What each
/// threw, as text; empty if nothing.
template <class Body>
std::vector<std::string> run_started(std::size_t ranks, const ranks_given& given, Body body) {
  std::vector<rank_start> starts;
  std::vector<rank_addresses> all;
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
                                          const std::function<void(udp_transport&)>& body) {
  return run_started(ranks, given, [&](std::size_t r, rank_start here, const auto& all) {
    body(*join(std::move(here), all, r, given));
  });
}

/// A frame of small whole numbers, cut.
class test_frame {
 public:
  test_frame(const ranks_given& given, lamina::frame_kind kind, std::uint64_t step, std::uint64_t seed,
             std::uint32_t bound_ppm = 0, std::optional<lamina::selection> chosen = {})
      : sent_(chosen ? *chosen : all_of(given.model)), encoder_(given.model) {
    std::mt19937 random(static_cast<std::mt19937::result_type>(seed));
    for (const std::size_t size : given.model.sizes())
      values.push_back(random_integers<float>(random, size, 100));
    encoder_.encode(
        kind, step, 0, sent_, [this](std::size_t l) { return std::span<const float>(values[l]); },
        lamina::payload_type::as_is, lamina::frame_checksum::none);
    chunks_.emplace(encoder_.frame(), sent_, grid_of(given),
                    bounded::sending_options{.bound_ppm = bound_ppm});
  }
  test_frame(const test_frame&) = delete;
  test_frame& operator=(const test_frame&) = delete;
  ~test_frame() = default;

  std::vector<std::byte> bytes() const { return encoder_.frame().to_bytes(); }
  const bounded::frame_chunks& chunks() const { return *chunks_; }
  outgoing_frame outgoing(const std::string& behind = "") const {
    return {.frame = {encoder_.frame().segments(), nullptr},
            .behind = payload(std::as_bytes(std::span(behind))),
            .chunks = &*chunks_};
  }
  static lamina::selection all_of(const lamina::layout& model) {
    lamina::selection all(model);
    all.send_all();
    return all;
  }

  std::vector<std::vector<float>> values;

 private:
  lamina::selection sent_;
  lamina::frame_encoder<float> encoder_;
  std::optional<bounded::frame_chunks> chunks_;
};

inline std::string text_in(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline payload text(const std::string& what) {
  return payload(std::as_bytes(std::span(what)));
}
constexpr std::size_t server_rank = 0;

}  // namespace lamina_test
