// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/error.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "messages/report.hpp"
#include "messages/transport.hpp"
#include "records/stopwatch.hpp"

/// What the server's and the worker's loop say to each other.
namespace lab {

/// Calls `read`, which decodes what `peer` sent; a bad frame is a link_error that names the peer.
template <class Read>
auto read_from(const std::string& peer, Read&& read) {
  try {
    return read();
  } catch (const lamina::decode_error& bad) {
    throw link_error(peer + " sent a bad frame: " + bad.what());
  }
}

/// The replica of `name` is not what it should be.
inline link_error other_replica(const std::string& name, std::uint64_t step) {
  return link_error(name + " began step " + std::to_string(step) + " with other parameters than it was sent");
}

/// Throws link_error, with the reason of a peer that has failed, for any other kind of message.
void expect(const message& arrived, message_kind kind, const std::string& sender);

/// Tells others, before this rank ends, why it fails: they then fail for the same reason.
void send_failure(transport& ranks, std::span<const std::size_t> to, const std::string& reason);

/// Several byte strings as one, each with its length before it; and back. Throws link_error for bytes that are none.
std::vector<std::byte> pack(std::span<const std::vector<std::byte>> strings);
std::vector<std::vector<std::byte>> unpack(std::span<const std::byte> bytes);

/// Elements as bytes; and back into as many. Throws link_error for another number.
template <class T>
std::vector<std::byte> bytes_of_elements(std::span<const T> elements) {
  const auto bytes = std::as_bytes(elements);
  return {bytes.begin(), bytes.end()};
}
void read_elements(std::span<const std::byte> from, std::span<std::byte> into);

/// Gradients and what their worker tells beside them; of its last message there are no gradients.
struct pushed {
  std::size_t sender = 0;
  step_report report;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;                   // of the bytes
  std::shared_ptr<const arrived_frame> transfer = {};  // as of a message
};
/// Throws link_error for bytes without a report.
pushed read_pushed(const message& arrived);

/// Values to be averaged over workers: their sum, and over how many.
struct value_sum {
  std::vector<double> values;
  double workers = 0;

  void add(std::span<const double> more, double of_workers);
  /// Throws link_error for another number of values.
  void add(const message& asking);
};

/// Who sends gradients to the server: a worker, or the leader of a node for all of it.
struct client {
  std::size_t rank = 0;
  std::size_t workers = 1;
};

/// The server's end; in a node, the leader's.
class server_link {
 public:
  /// With `on_loss`, told why, the server goes on with the clients that are left; without it the loss of one ends all.
  server_link(transport& ranks, std::vector<client> clients,
              std::function<void(const std::string&)> on_loss = {});

  std::size_t clients() const { return clients_.size(); }
  /// Those that are left.
  std::size_t clients_left() const { return ranks_left_.size(); }
  std::vector<std::size_t> workers_of_clients() const;
  std::string name_of(std::size_t client) const { return transport_.name_of(clients_[client].rank); }
  /// Runs while no call of this link does.
  work_clock& clock() { return clock_; }

  /// To one client, whose loss ends all.
  void send(std::size_t client, message_kind kind, const payload& what);
  /// The same, but returns before it has been sent, so that a client which does not take it holds up no other.
  void begin_send(std::size_t client, message_kind kind, const payload& what);
  /// Returns when all that has begun to go to clients has been sent.
  void flush();
  void send_to_all(message_kind kind, const payload& what);
  /// A frame to one client, or the same to all, with what each must get of it: one for each client, or none. Of all, what became of it
  /// for each client, lost ones included.
  sent_frame send_frame(std::size_t client, message_kind kind, const outgoing_frame& what,
                        const lamina::bounded::obligations& owed = {});
  std::vector<sent_frame> send_frame_to_all(message_kind kind, const outgoing_frame& what,
                                            std::span<const lamina::bounded::obligations> of_clients = {});
  /// One message from every client that is left, in their order. message::sender is the client's number.
  std::vector<message> receive_from_all(message_kind kind);
  /// The same of gradients, or of the last reports.
  std::vector<pushed> receive_gradients() { return receive_pushed(message_kind::gradients); }
  std::vector<pushed> receive_last_reports() { return receive_pushed(message_kind::finished); }
  /// Takes the values that each client which is left asks to be averaged, and answers all with their mean.
  void average();

  /// The message of whichever of these clients comes first, of any kind.
  message receive_from_any(std::span<const std::size_t> clients);
  /// Keeps what a client asks to be averaged, in place of what it asked for before.
  void take_values(const message& asking);
  /// Answers a client with the mean of what each has asked for last, so that nobody waits for the slowest. As begin_send().
  void answer_with_mean(std::size_t client);

 private:
  void lose(const peers_lost& loss);
  std::vector<pushed> receive_pushed(message_kind kind);

  transport& transport_;
  std::vector<client> clients_;
  std::function<void(const std::string&)> on_loss_;
  std::vector<std::size_t> ranks_left_;
  std::vector<std::size_t> numbers_left_;  // of the clients on those ranks
  std::vector<value_sum> latest_;          // what each client asked to be averaged last
  work_clock clock_;
};

/// A worker's end.
class worker_link {
 public:
  /// `hub` is the rank of the server, or of the leader of its node.
  worker_link(transport& ranks, std::size_t hub) : transport_(ranks), hub_(hub) {}

  std::string name_of_server() const { return transport_.name_of(hub_); }
  /// Runs while no call of this link does.
  work_clock& clock() { return clock_; }

  void send(message_kind kind, const payload& what);
  /// Returns before it has been sent, which goes on its way during later calls.
  void begin_send(message_kind kind, const payload& what);
  message receive(message_kind kind);
  /// The message if it has come; moves on what is on its way. Throws link_error for one of another kind.
  std::optional<message> look_for(message_kind kind);
  /// Returns when all that has begun to go has been sent.
  void flush();
  /// Parameters: from when they have come the clock counts.
  message receive_parameters();
  /// With the seconds that have passed on the clock, of which those in the node are no computing.
  void push(const step_report& report, payload gradients);
  /// The same, which goes on its way during later calls.
  void begin_push(const step_report& report, payload gradients);
  /// The same of a frame, of which some may be lost: what has arrived.
  sent_frame push(step_report report, outgoing_frame gradients, const lamina::bounded::obligations& owed);
  /// The last message.
  void finish(const step_report& report);
  /// What the server keeps of the workers that this one speaks for; and takes it back. Throws link_error for another number.
  void send_states(std::span<const std::vector<std::byte>> states);
  std::vector<std::vector<std::byte>> receive_states(std::size_t expected);
  /// Replaces `values`, a sum over `weight` workers, by their mean over all; each of the server's clients calls it with as many.
  void average(std::span<double> values, double weight = 1);

 private:
  payload with_report(step_report report, payload gradients);

  transport& transport_;
  std::size_t hub_;
  work_clock clock_;
};

}  // namespace lab
