// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "messages/link.hpp"
#include "messages/transport.hpp"

namespace lab {

/// All workers of a run without a server, as one of them sees it.
class worker_group {
 public:
  /// Every rank is a worker.
  explicit worker_group(transport& ranks);

  std::size_t workers() const { return transport_.ranks(); }
  std::size_t worker() const { return transport_.rank(); }
  std::string name_of(std::size_t worker) const { return transport_.name_of(worker); }
  /// Runs while no call of the group does.
  work_clock& clock() { return clock_; }

  /// Replaces the values by their sum over the workers, added in the order of the workers, so the same bits on all of them
  /// and at every run: each worker sums one slice of them and sends it to the others. Moves 2 (W-1)/W of the bytes in
  /// and out of each worker, as few as an allreduce can.
  void sum(const std::shared_ptr<std::vector<float>>& values);
  /// Each worker sends bytes to each other; gives what came, by worker, of this one nothing.
  std::vector<message> exchange(const std::function<payload(std::size_t to)>& outgoing);
  /// The same of frames, of which some may be lost. `send(to, way)` says how each goes: by `way(frame, owed)`, which gives what of it
  /// has arrived.
  using frame_sender =
      std::function<sent_frame(const outgoing_frame& what, const lamina::bounded::obligations& owed)>;
  std::vector<message> exchange_frames(
      const std::function<void(std::size_t to, const frame_sender& way)>& send);
  /// Replaces `values` by their mean over the workers, the same bits on all of them.
  void average(std::span<double> values);

  /// Worker 0 gets the bytes of every worker, its own first; the others get none.
  std::vector<message> gather(message_kind kind, const payload& mine);
  /// Worker 0 makes the bytes of each worker; all get theirs.
  std::vector<std::byte> scatter(message_kind kind,
                                 const std::function<std::vector<std::byte>(std::size_t worker)>& make);

 private:
  template <class Round>
  void in_rounds(Round round) const;
  template <class Outgoing, class Take>
  void exchange_with_all(Outgoing outgoing, Take take);
  message receive_from_first(message_kind kind);

  transport& transport_;
  std::vector<std::size_t> others_;
  work_clock clock_;
};

}  // namespace lab
