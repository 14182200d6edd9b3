// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// What moves messages between the ranks of a run: MPI (mpi_transport.hpp) or memory of one process
/// (in_process_transport.hpp). Who talks to whom, and about what, is said above it, once for both, so a run with the same
/// threads a worker is the same to the last bit over either.
namespace resnet50_ps {

/// A peer is gone, silent for too long, or broke the protocol.
class link_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// These ranks did not take or send what was waited for; messages of the others are kept for the next call.
class peers_lost : public link_error {
 public:
  peers_lost(const std::string& what, std::vector<std::size_t> ranks)
      : link_error(what), ranks_(std::move(ranks)) {}
  const std::vector<std::size_t>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<std::size_t> ranks_;
};

/// What a worker tells beside its gradients; everything else that is sent carries an empty one.
struct step_report {
  double loss = 0;                 ///< mean over its batch
  double compute_seconds = 0;      ///< from the parameters' arrival to the frame that is ready to send
  double node_seconds = 0;         ///< sums within its node, and handing parameters on
  double threshold = 0;            ///< λ of this step
  std::uint64_t correct = 0;       ///< images whose class was predicted
  std::uint64_t images = 0;        ///< images in its batch
  std::uint64_t replica_hash = 0;  ///< of the parameters that this step began with; 0 where it was not taken

  // Of an evaluation before this step; 0 test images where there was none.
  std::uint64_t test_images = 0;
  std::uint64_t test_top1 = 0;  ///< images whose class came first
  std::uint64_t test_top5 = 0;  ///< among the first five
  double evaluation_seconds = 0;

  bool asks_for_mean = false;    ///< the bytes are values to be averaged, see worker_link
  bool is_last_word = false;     ///< the sender has failed; the bytes are its reason
  bool is_last = false;          ///< training is over for this worker: it sends nothing after this
  bool is_sign_of_life = false;  ///< nothing else: the transport's own, see show_life()
};
static_assert(std::is_trivially_copyable_v<step_report>);

using byte_segments = std::span<const std::span<const std::byte>>;

/// What arrived from a peer. `bytes` is valid until the next message from the same rank is asked for.
struct message {
  std::size_t sender = 0;  ///< its place in the list of ranks that the message was asked of
  step_report report;
  std::span<const std::byte> bytes;
};

/// Gives "the server", "worker 3" for a rank.
using rank_names = std::function<std::string(std::size_t rank)>;

/// One rank's end. Between two ranks messages arrive in the order in which they were sent. Errors are link_error that
/// names the peer.
class transport {
 public:
  virtual ~transport() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t ranks() const = 0;
  virtual std::string name_of(std::size_t rank) const = 0;

  /// The same bytes to each; returns when all have been sent. No segments: the report alone.
  virtual void send(std::span<const std::size_t> to, const step_report& report, byte_segments bytes) = 0;
  /// One message from each, in their order.
  virtual std::vector<message> receive_from_each(std::span<const std::size_t> from) = 0;
  /// The message of whichever comes first; nobody is kept waiting by a busier one.
  virtual message receive_from_any(std::span<const std::size_t> from) = 0;
  /// Bytes to one rank and a message from another, or the same, both on their way at once: for ranks of which none could
  /// take what comes while it waits for its own to go.
  virtual message exchange(std::size_t to, std::span<const std::byte> bytes, std::size_t from) = 0;
  /// For a rank that is long at work, to be called now and then: whoever waits for it does not take it for lost.
  virtual void show_life() {}
};

/// One report for two of them, but for the hash of the replica, which is a's.
inline step_report merged(const step_report& a, const step_report& b) {
  step_report both = a;
  both.images += b.images;
  both.correct += b.correct;
  if (both.images > 0) {
    both.loss = (a.loss * static_cast<double>(a.images) + b.loss * static_cast<double>(b.images)) /
                static_cast<double>(both.images);
  }
  // What the slower one did before is what the others waited for.
  if (b.evaluation_seconds + b.compute_seconds > a.evaluation_seconds + a.compute_seconds) {
    both.evaluation_seconds = b.evaluation_seconds;
  }
  both.compute_seconds = std::max(a.compute_seconds, b.compute_seconds);
  both.node_seconds = std::max(a.node_seconds, b.node_seconds);
  both.test_images += b.test_images;
  both.test_top1 += b.test_top1;
  both.test_top5 += b.test_top5;
  return both;
}

/// "the server", "worker 0 and worker 2".
inline std::string names_of(std::span<const std::size_t> ranks, const rank_names& name_of) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 < ranks.size() ? ", " : " and ";
    text += name_of(ranks[i]);
  }
  return text;
}

}  // namespace resnet50_ps
