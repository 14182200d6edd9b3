// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/error.hpp>
#include <span>
#include <string>
#include <vector>

#include "messages/transport.hpp"

/// What the server's and the worker's loop know of each other.
namespace resnet50_ps {

/// After which steps something is done that is done every so many of them; a period of 0: never.
inline bool is_due(std::uint64_t period_steps, std::uint64_t steps_done) {
  return period_steps > 0 && steps_done > 0 && steps_done % period_steps == 0;
}
/// Checkpoints are due at the end as well. Server and workers must agree on it: states follow the frames of that step.
inline bool is_checkpoint_due(std::uint64_t period_steps, std::uint64_t steps_done, std::uint64_t steps) {
  return is_due(period_steps, steps_done) || (period_steps > 0 && steps_done == steps);
}

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

/// Tells others, before this rank ends, why it fails: they then fail for the same reason.
void send_last_word(transport& ranks, std::span<const std::size_t> to, const std::string& reason);

/// Several byte strings as one, each with its length before it; and back. Throws link_error for bytes that are none.
std::vector<std::byte> pack(std::span<const std::vector<std::byte>> strings);
std::vector<std::vector<std::byte>> unpack(std::span<const std::byte> bytes);

/// Values to be averaged over workers: their sum, and over how many.
struct value_sum {
  std::vector<double> values;
  double workers = 0;

  void add(std::span<const double> more, double of_workers);
  /// Throws link_error for another number of values.
  void add(const message& asking);
};

/// The workers of a run among themselves, as one of them sees it.
class worker_peers {
 public:
  worker_peers(std::size_t workers, std::size_t worker) : workers_(workers), worker_(worker) {}
  virtual ~worker_peers() = default;
  std::size_t workers() const { return workers_; }
  std::size_t worker() const { return worker_; }

  /// Replaces `values` by their mean over the workers, the same bits on all of them. All call it with as many.
  virtual void average(std::span<double> values) = 0;
  void average(std::span<float> values);
  /// As transport::show_life().
  virtual void show_life() = 0;

 private:
  std::size_t workers_;
  std::size_t worker_;
};

/// Who sends gradients to the server: a worker, or the leader of a node for all of it.
struct client {
  std::size_t rank = 0;
  std::size_t workers = 1;
};

/// The server's end. Answers what workers ask to be averaged on the way; the loops do not see it.
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

  /// To one client, whose loss ends all.
  void send(std::size_t to, byte_segments bytes);
  void send(std::size_t to, std::span<const std::byte> bytes) { send(to, byte_segments(&bytes, 1)); }
  void send_to_all(byte_segments bytes);
  void send_to_all(std::span<const std::byte> bytes) { send_to_all(byte_segments(&bytes, 1)); }
  /// One message from every client that is left, in their order. message::sender is the client's number.
  std::vector<message> receive_from_all();
  /// The message of whoever comes first, but for clients whose last one has come. A mean is then over what each has
  /// asked for last, so that nobody waits for the slowest.
  message receive_from_any();

  /// As receive_from_all, but what asks for a mean is left to the caller.
  std::vector<message> collect();

 private:
  void lose(const peers_lost& loss);
  void answer(const std::vector<message>& asking);

  transport& transport_;
  std::vector<client> clients_;
  std::function<void(const std::string&)> on_loss_;
  std::vector<std::size_t> ranks_left_;
  std::vector<std::size_t> numbers_left_;  // of the clients on those ranks
  std::vector<value_sum> latest_;          // what each client asked to be averaged last
};

/// For each layer, where the elements of its gradient lie.
using gradient_store = std::function<std::span<float>(std::size_t layer)>;

/// A worker's end.
class worker_link : public worker_peers {
 public:
  /// `hub` is the rank of the server, or of the leader of its node. This is worker `worker` of `workers`.
  worker_link(transport& ranks, std::size_t hub, std::size_t workers, std::size_t worker)
      : worker_peers(workers, worker), transport_(ranks), hub_(hub) {}

  /// Returns when it has been sent. No segments: the report alone.
  void send(const step_report& report, byte_segments bytes) {
    transport_.send(std::span(&hub_, 1), report, bytes);
  }
  /// What the server sent.
  virtual std::span<const std::byte> receive();
  std::string name_of_server() const { return transport_.name_of(hub_); }

  using worker_peers::average;
  void average(std::span<double> values) override { average_over_clients(values, 1); }
  void show_life() override { transport_.show_life(); }
  /// The same over those who send gradients to the server; others do not call it.
  void agree(std::span<double> values) { average_over_clients(values, 1); }

  /// Adds the gradients of `step` and the reports of those that this worker sends for: the others of its node.
  /// `gradients(l)` are those of layer l, which are written; at the end there are none.
  virtual void add_node(std::uint64_t /*step*/, const gradient_store& /*gradients*/,
                        step_report& /*report*/) {}

  /// The worker's part of a checkpoint; and back when a run resumes.
  virtual void send_state(const std::vector<std::byte>& state);
  virtual std::vector<std::byte> receive_state();

 protected:
  /// `values` are a sum over `weight` workers.
  void average_over_clients(std::span<double> values, double weight);

 private:
  transport& transport_;
  std::size_t hub_;
};

}  // namespace resnet50_ps
