// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "link.hpp"

namespace resnet50_ps {

/// Throws link_error with MPI's own words, naming `call`, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// MPI_Init and MPI_Finalize, with errors returned instead of fatal.
class mpi_session {
 public:
  mpi_session(int& argc, char**& argv);
  ~mpi_session();
  mpi_session(const mpi_session&) = delete;
  mpi_session& operator=(const mpi_session&) = delete;
};

struct mpi_link_options {
  std::size_t max_message_bytes = 0;  ///< bounds what a peer may announce
  std::chrono::seconds timeout{600};  ///< of a whole wait, after which a peer counts as lost
};

/// Messages of any length between ranks, in pieces below 2 GiB, sent from where the segments lie. Every wait sleeps
/// between looks, since Open MPI's own waits spin and would take the cores from the workers on the same machine, and
/// gives up with a link_error that names the peer.
class mpi_messenger {
 public:
  mpi_messenger(MPI_Comm communicator, mpi_link_options options)
      : communicator_(communicator), options_(options) {}

  /// One peer's messages, of which the next is on its way into `bytes`.
  struct receiver {
    int rank = 0;
    struct announcement {
      std::uint64_t bytes = 0;
      step_report report;
    } announced;
    std::vector<std::byte> bytes;
    std::vector<MPI_Request> requests;
    enum class phase { idle, announcing, arriving, closed } at = phase::idle;
  };

  void send(std::span<const int> ranks, const step_report& report, byte_segments bytes);
  /// Waits for a message of `awaited`, or of any if there is none; `from` are moved on together. Returns who sent it.
  receiver& receive(std::span<receiver> from, const receiver* awaited);
  void wait_for(MPI_Request request, const std::string& what);

 private:
  enum class progress { none, moving, done };

  progress advance(receiver& from);
  template <class Look, class What>
  void wait_until(Look look, What what);

  MPI_Comm communicator_;
  mpi_link_options options_;
};

/// Rank 0 of the communicator; worker w is rank w + 1.
class mpi_server_link : public server_link {
 public:
  mpi_server_link(MPI_Comm communicator, mpi_link_options options);
  std::size_t workers() const override { return receivers_.size(); }
  using server_link::send;
  void send(std::span<const std::size_t> workers, byte_segments bytes) override;
  std::vector<message> receive_from_all() override;
  message receive_from_any() override;

 private:
  message message_of(const mpi_messenger::receiver& from) const;
  mpi_messenger messenger_;
  std::vector<mpi_messenger::receiver> receivers_;
};

/// Any other rank. `workers` is a communicator of the workers alone, in their order.
class mpi_worker_link : public worker_link {
 public:
  mpi_worker_link(MPI_Comm communicator, MPI_Comm workers, mpi_link_options options);
  std::size_t workers() const override { return workers_; }
  std::size_t worker() const override { return worker_; }
  void send(const step_report& report, byte_segments bytes) override;
  message receive() override;
  std::vector<double> gather(std::span<const double> values) override;

 private:
  mpi_messenger messenger_;
  MPI_Comm workers_communicator_;
  std::size_t workers_ = 0;
  std::size_t worker_ = 0;
  mpi_messenger::receiver from_server_;
};

}  // namespace resnet50_ps
