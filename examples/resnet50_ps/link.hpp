// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/encoder.hpp>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

/// What the server's and the worker's loop know of each other, whatever carries it: MPI (mpi_link.hpp) or memory of one
/// process (in_process_link.hpp). Both carry the same bytes, and a run with the same threads a
/// worker is the same to the last bit over either.
namespace resnet50_ps {

/// A peer is gone, silent for too long, or broke the protocol.
class link_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What a worker tells the server beside its gradients.
struct step_report {
  double loss = 0;                 ///< mean over its batch
  double compute_seconds = 0;      ///< from the parameters' arrival to the frame that is ready to send
  double threshold = 0;            ///< λ of this step
  std::uint64_t correct = 0;       ///< images whose class was predicted
  std::uint64_t images = 0;        ///< images in its batch
  std::uint64_t replica_hash = 0;  ///< of the parameters that this step began with; 0 where it was not taken

  // Of an evaluation before this step; 0 test images where there was none.
  std::uint64_t test_images = 0;
  std::uint64_t test_top1 = 0;  ///< images whose class came first
  std::uint64_t test_top5 = 0;  ///< among the first five
  double evaluation_seconds = 0;

  bool is_last = false;  ///< training is over for this worker: it sends nothing after this
};
static_assert(std::is_trivially_copyable_v<step_report>);

/// After which steps something is done that is done every so many of them; a period of 0: never.
inline bool is_due(std::uint64_t period_steps, std::uint64_t steps_done) {
  return period_steps > 0 && steps_done > 0 && steps_done % period_steps == 0;
}
/// Checkpoints are due at the end as well. Server and workers must agree on it: states follow the frames of that step.
inline bool is_checkpoint_due(std::uint64_t period_steps, std::uint64_t steps_done, std::uint64_t steps) {
  return is_due(period_steps, steps_done) || (period_steps > 0 && steps_done == steps);
}

using byte_segments = std::span<const std::span<const std::byte>>;

/// What arrived from a peer: mostly a frame. `bytes` is valid until the next receive from the same peer.
struct message {
  std::size_t worker = 0;  ///< the sender, or the receiver where the server sent it
  step_report report;
  std::span<const std::byte> bytes;
};

/// The server's end. Errors are link_error, which names the peer.
class server_link {
 public:
  virtual ~server_link() = default;
  virtual std::size_t workers() const = 0;
  /// The same bytes to each of these workers; returns when all have been sent.
  virtual void send(std::span<const std::size_t> workers, byte_segments bytes) = 0;
  /// One message from every worker, in the order of the workers.
  virtual std::vector<message> receive_from_all() = 0;
  /// The message of whoever comes first, but for workers whose last one has come.
  virtual message receive_from_any() = 0;

  void send(std::size_t worker, byte_segments bytes) { send(std::span(&worker, 1), bytes); }
  void send_to_all(byte_segments bytes) {
    std::vector<std::size_t> all(workers());
    for (std::size_t w = 0; w < all.size(); ++w) all[w] = w;
    send(all, bytes);
  }
};

/// A worker's end. Errors are link_error, which names the peer.
class worker_link {
 public:
  virtual ~worker_link() = default;
  virtual std::size_t workers() const = 0;
  virtual std::size_t worker() const = 0;
  /// To the server; returns when it has been sent. No segments: the report alone.
  virtual void send(const step_report& report, byte_segments bytes) = 0;
  virtual message receive() = 0;
  /// The values of every worker, one behind the other in the order of the workers. All workers call it with as many.
  virtual std::vector<double> gather(std::span<const double> values) = 0;

  /// Replaces `values` by their mean over the workers, the same bits on all of them.
  template <class T>
  void mean_over_workers(std::span<T> values) {
    const std::vector<double> all = gather(std::vector<double>(values.begin(), values.end()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      double sum = 0;
      for (std::size_t w = 0; w < workers(); ++w) sum += all[w * values.size() + i];
      values[i] = static_cast<T>(sum / static_cast<double>(workers()));
    }
  }
};

}  // namespace resnet50_ps
