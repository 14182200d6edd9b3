// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "messages/mpi_outgoing.hpp"
#include "messages/mpi_session.hpp"
#include "messages/transport.hpp"

namespace lab {

struct mpi_transport_options {
  std::size_t max_message_bytes = 0;  ///< bounds what a peer may announce
  /// Without a sign of progress from a rank, after which it counts as lost.
  std::function<std::chrono::seconds(std::size_t rank)> timeout_of;
  /// In an exchange. The same on all ranks, who wait for one another in a chain: the first whose time is over is then the one
  /// who waits for the silent rank itself.
  std::chrono::seconds exchange_timeout;
  rank_names name_of;
  /// Whom this rank answers to, who hears its signs of life; itself: nobody.
  std::size_t above = 0;
  /// How often it gives one, at most: a fraction of the timeouts.
  std::chrono::milliseconds life_period = std::chrono::seconds(1);
};

/// Messages of any length between the ranks of a communicator, of which it makes a duplicate, so that nobody else's messages are taken for
/// its own. They go in pieces of 1 MiB, in an exchange with one rank of 60,000 bytes, sent from where the segments lie, at least eight at a
/// time to each receiver. A piece that arrives or has gone is a sign of progress, so a slow network does not look like a lost peer, and so is
/// a sign of life. That goes to the rank above, which passes it on upwards and to those below that wait for its answer meanwhile; a message
/// that receive_from_any() takes is passed on as one. Several receivers get a message one after the other, and signs of life until their turn.
/// Every wait sleeps between looks, since Open MPI's own waits spin and would take the cores from the workers on the same machine.
class mpi_transport : public transport {
 public:
  /// All ranks of the communicator make one.
  mpi_transport(MPI_Comm communicator, mpi_transport_options options);
  ~mpi_transport() override;

  std::size_t rank() const override { return rank_; }
  std::size_t ranks() const override { return incoming_.size(); }
  std::unique_ptr<lamina::collectives::channel> make_channel() override;
  std::string name_of(std::size_t rank) const override { return options_.name_of(rank); }
  void send(std::span<const std::size_t> to, message_kind kind, const payload& what) override;
  void begin_send(std::size_t to, message_kind kind, const payload& what) override;
  void flush(std::span<const std::size_t> to) override;
  std::optional<message> look_for(std::span<const std::size_t> from) override;
  std::vector<message> receive_from_each(std::span<const std::size_t> from) override;
  message receive_from_any(std::span<const std::size_t> from) override;
  message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) override;
  void show_life() override;

 private:
  /// The next message from one rank.
  struct incoming {
    std::size_t rank = 0;
    mpi_announcement announced;
    std::shared_ptr<std::vector<std::byte>> bytes;
    std::vector<MPI_Request> requests;
    bool is_unanswered = false;  // since the last message that was taken, none was sent there
    enum class phase { idle, announcing, arriving, arrived } at = phase::idle;
  };
  using progress = mpi_progress;
  /// What has begun to go to one rank. One message at a time, since the pieces of two would mix.
  struct way_to {
    std::list<mpi_outgoing> on_its_way;  // at most one
    std::list<std::pair<message_kind, payload>> behind;

    bool is_free() const { return on_its_way.empty() && behind.empty(); }
  };

  void post(std::list<mpi_outgoing>& among, std::span<const std::size_t> to, message_kind kind,
            const payload& what, std::size_t piece_bytes = mpi_piece_bytes);
  void post_sign_of_life(std::size_t to);
  void pass_on_life(std::size_t from);
  progress advance(incoming& from);
  static progress both(progress one, progress other);
  void begin_next(std::size_t to);
  progress move_begun_on();
  progress finishing(std::span<const std::size_t> to) const;
  progress sending();
  progress receiving(std::span<const std::size_t> from);
  std::vector<std::size_t> abandon();
  std::vector<std::size_t> missing(std::span<const std::size_t> from) const;
  message take(std::span<const std::size_t> from, std::size_t sender);
  template <class Look, class Lose>
  void wait_until(std::chrono::seconds timeout, Look look, Lose lose);
  std::chrono::seconds timeout_of(std::span<const std::size_t> ranks) const;
  [[noreturn]] void lose(const std::vector<std::size_t>& ranks, const std::string& doing,
                         std::chrono::seconds after) const;

  MPI_Comm communicator_ = MPI_COMM_NULL;
  mpi_transport_options options_;
  std::size_t rank_ = 0;
  std::size_t any_after_ = 0;
  std::vector<std::chrono::steady_clock::time_point> heard_at_;  // of each rank, or sent to
  std::vector<incoming> incoming_;                               // of every rank
  std::list<mpi_outgoing> outgoing_;                             // on their way, waited for
  std::vector<way_to> begun_;                                    // to each rank
  std::list<mpi_outgoing> abandoned_;  // to ranks that are lost: MPI may still look at them
  std::list<mpi_outgoing> signs_;      // of life, on their way
  std::chrono::steady_clock::time_point showed_life_at_;
  std::chrono::steady_clock::time_point told_waiting_at_;
  std::chrono::steady_clock::time_point passed_life_on_at_;
};

}  // namespace lab
