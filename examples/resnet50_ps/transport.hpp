// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <lamina/codec.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace resnet50_ps {

/// An MPI call that failed, with MPI's own words.
class mpi_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws mpi_error, naming `call`, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// MPI_Init and MPI_Finalize, with errors returned instead of fatal.
class mpi_session {
 public:
  mpi_session(int& argc, char**& argv);
  ~mpi_session();
  mpi_session(const mpi_session&) = delete;
  mpi_session& operator=(const mpi_session&) = delete;
};

/// What a worker tells the server beside its gradients.
struct step_report {
  double loss = 0;             ///< mean over its batch
  double compute_seconds = 0;  ///< from the parameters' arrival to the frame that is ready to send
  std::uint64_t correct = 0;   ///< images whose class was predicted
  std::uint64_t images = 0;    ///< images in its batch
};

/// A frame as it arrived, valid until the next receive from the same peer.
struct message {
  step_report report;
  std::span<const std::byte> frame;
};

/// Frames between one server, rank 0, and the workers, all other ranks; worker w is rank w + 1.
///
/// Messages of any length travel in pieces below 2 GiB, sent from where the layers lie. Every wait sleeps
/// between looks, since Open MPI's own waits spin and would take the cores from the workers on the same
/// machine, and gives up with an mpi_error that names the peer when nothing arrives for `timeout`.
class transport {
 public:
  /// `max_frame_bytes` bounds what a peer may announce.
  transport(MPI_Comm communicator, std::size_t max_frame_bytes, std::chrono::seconds timeout);
  ~transport();
  transport(const transport&) = delete;
  transport& operator=(const transport&) = delete;

  /// Server: one frame to every worker; returns when all have been sent.
  void send_to_workers(const lamina::encoded_frame& frame);
  /// Server: one message from every worker, in the order of the workers.
  std::vector<message> receive_from_workers();

  /// Worker: a frame to the server; returns when it has been sent.
  void send_to_server(const step_report& report, const lamina::encoded_frame& frame);
  message receive_from_server();

  /// Worker: replaces `values` by their mean over the workers. All workers call it with as many values.
  void mean_over_workers(std::span<float> values);
  /// All ranks: the sum over the ranks, known to all of them.
  std::uint64_t sum_over_ranks(std::uint64_t value);

  std::size_t workers() const { return receivers_.size(); }

 private:
  struct announcement {
    std::uint64_t frame_bytes = 0;
    step_report report;
  };
  static_assert(std::is_trivially_copyable_v<announcement>);

  struct receiver {
    int peer = 0;
    announcement announced;
    std::vector<std::byte> buffer;
    std::vector<MPI_Request> requests;
    bool announcement_arrived = false;
  };

  enum class progress { none, moving, done };

  void post(receiver& from);
  progress advance(receiver& from);
  std::vector<message> receive(std::span<receiver> from);
  void send(std::span<const int> peers, const step_report& report, const lamina::encoded_frame& frame);
  template <class Look>
  void wait_until(Look look, const std::string& what);

  MPI_Comm communicator_;
  MPI_Comm workers_communicator_ = MPI_COMM_NULL;
  std::size_t max_frame_bytes_;
  std::chrono::seconds timeout_;
  std::vector<receiver> receivers_;  // of the server: one a worker
  receiver from_server_;
};

}  // namespace resnet50_ps
