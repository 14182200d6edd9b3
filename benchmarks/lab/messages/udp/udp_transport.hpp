// SPDX-License-Identifier: MIT
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <lamina/bounded/bounded.hpp>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "messages/transport.hpp"
#include "messages/udp/udp_peer.hpp"
#include "messages/udp/udp_socket.hpp"

namespace lab {

/// The frames of a run: how they are cut, and what of them may be lost.
struct frame_options {
  lamina::bounded::chunk_grid gradients;
  lamina::bounded::chunk_grid parameters;
  /// What each rank takes of gradients, if each takes a slice of them and nobody sends parameters; empty: one takes all.
  std::vector<lamina::bounded::chunk_grid> slices = {};
  lamina::frame_kind up = lamina::frame_kind::gradients;  ///< what goes to the server: gradients or updates
  std::uint32_t most_bound_up_ppm = 0;                    ///< of that
  std::uint32_t most_bound_down_ppm = 0;                  ///< of parameters
  lamina::bounded::stop_policy stop = lamina::bounded::stop_policy::eager;
  bool has_tags = true;  ///< packets have their class and precedence (DSCP); false: all are alike
};

struct udp_transport_options {
  std::size_t rank = 0;
  std::size_t ranks = 0;
  bool takes_gradients = false;  ///< as the server does, or every rank its slices; all others take parameters
  std::vector<std::size_t> peers;  ///< the ranks that this one talks to
  frame_options frames;
  std::uint64_t secret = 0;
  std::uint64_t link_bits = 0;  ///< a second, of each rank's link; 0: not known
  std::uint32_t senders = 1;    ///< ranks that send to the same one at the same time
  bool controls_rate = true;    ///< false: sends at the link's rate, whatever is lost
  std::size_t mtu = 1500;
  std::size_t max_message_bytes = 0;  ///< bounds what a peer may announce, and what waits of each
  std::function<std::chrono::seconds(std::size_t rank)> timeout_of;
  std::chrono::milliseconds ping_every{1000};  ///< a fraction of the timeouts
  rank_names name_of;
};

/// A rank that has been met: its connection, and where it takes packets, a path each.
struct met_rank {
  descriptor control;
  std::vector<endpoint> paths;
};

/// Frames as packets over UDP, of which some may be lost, and all other messages over a TCP connection a pair: docs/bounded-loss/sockets.md.
///
/// One thread does all input and output, so that packets are taken and questions answered while the rank computes. The rank hands over
/// what is to be sent and sleeps until it has gone or was lost. A frame lies where its packets were put until the rank asks for
/// the next message of its sender. Memory is bounded: of each peer one frame, and MESSAGEs of max_message_bytes.
class udp_transport : public transport {
 public:
  /// `met` are the peers, in their order. The paths' packets are of this run alone.
  udp_transport(udp_transport_options options, std::vector<udp_socket> paths, std::vector<met_rank> met);
  /// Says BYE and waits for that of the others, which are not longer in coming than a timeout. Where the rank ends by an exception its
  /// connections stay open until the process ends: it has yet to say why.
  ~udp_transport() override;

  std::size_t rank() const override { return options_.rank; }
  std::size_t ranks() const override { return options_.ranks; }
  std::string name_of(std::size_t rank) const override { return options_.name_of(rank); }
  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override;
  std::vector<sent_frame> send_frame(std::span<const std::size_t> to, message_kind kind,
                                     const outgoing_frame& what,
                                     std::span<const lamina::bounded::obligations> of_each) override;
  void begin_send(std::size_t to, message_kind kind, const payload& what) override;
  std::vector<message> receive_from_each(std::span<const std::size_t> from) override;
  message receive_from_any(std::span<const std::size_t> from) override;
  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override;
  std::vector<std::pair<std::string, std::uint64_t>> counters() override;

 private:
  using lock = std::unique_lock<std::mutex>;
  enum class end : std::uint8_t { none, saying_bye, at_once };
  enum class until : std::uint8_t { all_settled, first_loss };

  // The rank's.
  udp_peer& peer(std::size_t rank);
  template <class IsDone>
  void wait(lock& held, std::span<const std::size_t> ranks, const std::string& doing, until when,
            IsDone is_done);
  template <class IsDone>
  [[nodiscard]] bool is_settled(std::span<const std::size_t> ranks, until when, IsDone is_done);
  template <class IsDone>
  void throw_lost(std::span<const std::size_t> ranks, const std::string& doing, IsDone is_done);
  void post(lock& held, std::span<const std::size_t> to, message_kind kind, const payload& what);
  void wait_sent(lock& held, std::span<const std::size_t> to);
  message take(std::span<const std::size_t> from, std::size_t sender);
  void wake();

  // The thread's: udp_thread.cpp.
  void prepare_thread();
  void run();
  void turn();
  void read(std::span<const epoll_event> ready, lamina::bounded::instant now);
  void read_path(udp_socket& path);
  void say_and_send(lamina::bounded::instant now);
  bool send_packets(lamina::bounded::instant now);
  void tell_load();
  void watch();
  void watch(int number, std::uint32_t& now, std::uint32_t wanted, std::size_t key);
  lamina::bounded::instant next_deadline() const;
  void set_timer(lamina::bounded::instant at);
  bool packets_have_gone() const;
  bool is_over();

  udp_transport_options options_;
  std::vector<udp_socket> paths_;
  std::deque<udp_peer> peers_;                             // in the order of the options'
  std::vector<std::size_t> place_of_;                      // of each rank among the peers
  std::vector<std::pair<endpoint, std::size_t>> senders_;  // addresses that packets come from, sorted; places
  descriptor epoll_;
  descriptor timer_;
  descriptor event_;
  std::vector<std::uint32_t> watched_;  // events of each peer's connection, then of each path
  std::vector<epoll_event> ready_;

  std::mutex mutex_;  // of all below and above, but for what does not change
  std::condition_variable settled_;
  std::function<bool()> is_waited_for_;  // what the rank sleeps until; empty: it does not
  std::exception_ptr failure_;
  end end_ = end::none;
  lamina::bounded::instant end_at_{};
  bool has_said_bye_ = false;
  std::size_t any_after_ = 0;
  std::vector<std::size_t> sending_order_;  // places of the peers, who began a frame last at the end
  std::vector<std::size_t> next_path_;      // of each peer
  std::size_t largest_bits_;                // of a packet, on the wire
  lamina::bounded::pacer link_;             // that all transfers share
  lamina::bounded::instant link_at_{};      // when it has room again
  std::uint64_t foreign_ = 0;
  std::thread thread_;
};

}  // namespace lab
