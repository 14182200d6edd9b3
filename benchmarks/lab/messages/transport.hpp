// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/bounded/duties.hpp>
#include <lamina/collectives/channel.hpp>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "messages/transfer.hpp"

/// What moves messages between the ranks of a run: MPI (mpi_transport.hpp) or memory of one process
/// (in_process_transport.hpp). A message is bytes and a kind; what the bytes mean is said above, once for both, so a run with
/// the same threads a worker is the same to the last bit over either.
namespace lab {

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

/// The same of a frame: what became of it where others were to get it as well.
class frame_lost : public peers_lost {
 public:
  frame_lost(const peers_lost& loss, std::vector<sent_frame> sent)
      : peers_lost(loss), sent_(std::move(sent)) {}
  /// As send_frame() would have said it; of the lost ones nothing.
  const std::vector<sent_frame>& sent() const noexcept { return sent_; }

 private:
  std::vector<sent_frame> sent_;
};

/// What a message is.
enum class message_kind : std::uint64_t {
  sign_of_life,  ///< the transport's own, see show_life(): nobody receives it
  introduction,  ///< what run a rank was started for
  welcome,       ///< the answer: the steps that are done
  parameters,    ///< a frame of parameters
  gradients,     ///< a frame of gradients, or in a node the gradients as they are; with a report
  part,    ///< a part of a step's gradients that is not the last, which goes as `gradients`: without a report
  report,  ///< what a worker tells beside its gradients, alone
  finished,  ///< a report, the last: training is over for the sender, which neither sends nor awaits more
  values,    ///< to be averaged over the workers
  mean,      ///< of such values
  slice,     ///< of a sum that the workers make among themselves
  state,     ///< what a worker keeps from step to step
  failure,   ///< why the sender ends
};
/// "parameters", "a mean".
const char* describe(message_kind kind);

using byte_segments = std::span<const std::span<const std::byte>>;

/// What arrived from a peer, in memory that this shares; without an owner it stands until the next message of this peer
/// is asked for, or a frame is sent to it: the peer's next may then come while others still get theirs.
struct message {
  std::size_t sender = 0;  ///< its place in the list of ranks that the message was asked of
  message_kind kind = message_kind::sign_of_life;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
  /// What is known of a frame that came over a way which loses some of it, where holes are zeros; nullptr: all of it is there.
  std::shared_ptr<const arrived_frame> transfer = {};
  /// What was sent behind a frame, where that comes apart from it.
  std::span<const std::byte> behind = {};
};

/// What is to be sent: segments anywhere in memory, and a share in that memory. A send to a rank that is lost may never end,
/// and MPI goes on reading, so the memory must live as long as the send and not as long as whoever called it.
class payload {
 public:
  /// No bytes.
  payload() = default;
  payload(byte_segments segments, std::shared_ptr<const void> owner)
      : segments_(segments.begin(), segments.end()), owners_{std::move(owner)} {}
  /// A copy, for what is small.
  explicit payload(std::span<const std::byte> bytes);
  /// Bytes that need no other owner.
  explicit payload(std::vector<std::byte> bytes);
  /// To hand on what arrived.
  explicit payload(const message& arrived) : segments_{arrived.bytes}, owners_{arrived.owner} {}

  /// The bytes of both, one behind the other.
  void append(payload more);

  byte_segments segments() const { return segments_; }
  std::size_t size_bytes() const;

 private:
  std::vector<std::span<const std::byte>> segments_;
  std::vector<std::shared_ptr<const void>> owners_;
};

/// A frame to send.
struct outgoing_frame {
  payload frame;
  payload behind = {};  ///< goes behind it in its message, and is never lost
  /// How it is cut, where some of it may be lost; nullptr: nothing may be.
  const lamina::bounded::frame_chunks* chunks = nullptr;
};

/// Gives "the server", "worker 3" for a rank.
using rank_names = std::function<std::string(std::size_t rank)>;
/// "the server", "worker 0 and worker 2".
std::string names_of(std::span<const std::size_t> ranks, const rank_names& name_of);

/// One rank's end. Between two ranks messages arrive in the order in which they were sent. Errors are link_error that
/// names the peer.
class transport {
 public:
  virtual ~transport() = default;
  virtual std::size_t rank() const = 0;
  virtual std::size_t ranks() const = 0;
  virtual std::string name_of(std::size_t rank) const = 0;

  /// The same to each; returns when all have been sent, after which only the sends to lost ranks still need the memory.
  virtual void send(std::span<const std::size_t> to, message_kind kind, const payload& what) = 0;
  /// The same frame to each; returns when each has as much of it as it must, and says what that is. Of a transport that loses
  /// nothing, as this one, it is send(), and all of it. A receiver that is lost ends its own transfer alone: frame_lost.
  ///
  /// \param of_each  what each receiver must get whatever the bound says: none, or one a receiver; without chunks of the frame all of
  ///                 them are empty, or it throws std::logic_error
  virtual std::vector<sent_frame> send_frame(std::span<const std::size_t> to, message_kind kind,
                                             const outgoing_frame& what,
                                             std::span<const lamina::bounded::obligations> of_each = {});
  /// Returns before the message has been sent, which goes on its way while this rank waits for others, or looks: a receiver that
  /// does not take it holds up nobody. Behind the messages before to the same rank.
  virtual void begin_send(std::size_t to, message_kind kind, const payload& what) = 0;
  /// Returns when all that has begun to go to these ranks has been sent. Throws std::logic_error where the transport does not know.
  virtual void flush(std::span<const std::size_t> to);
  /// The message of one of these, if one is there: moves on what is on its way, and does not wait. Throws as flush().
  virtual std::optional<message> look_for(std::span<const std::size_t> from);
  /// One message from each, in their order.
  virtual std::vector<message> receive_from_each(std::span<const std::size_t> from) = 0;
  /// The message of whichever comes first; nobody is kept waiting by a busier one.
  virtual message receive_from_any(std::span<const std::size_t> from) = 0;
  /// A message to one rank and one from another, or the same, both on their way at once: for ranks of which none could
  /// take what comes while it waits for its own to go.
  virtual message exchange(std::size_t to, message_kind kind, const payload& what, std::size_t from) = 0;
  /// What this end counted of its packets, by name, for the records; nothing where there are none.
  virtual std::vector<std::pair<std::string, std::uint64_t>> counters() { return {}; }
  /// For sums beside the messages, of all ranks: each makes one at the same time. Throws std::logic_error where the transport has none.
  virtual std::unique_ptr<lamina::collectives::channel> make_channel();
  /// For a rank that is long at work, to be called now and then: whoever waits for it does not take it for lost.
  virtual void show_life() {}
};

}  // namespace lab
