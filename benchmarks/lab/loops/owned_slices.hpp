// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <lamina/aggregator.hpp>
#include <lamina/delivery.hpp>
#include <lamina/frame.hpp>
#include <lamina/layout.hpp>
#include <lamina/options.hpp>
#include <lamina/selection.hpp>
#include <lamina/slices.hpp>
#include <optional>
#include <span>
#include <vector>

#include "loops/losses.hpp"
#include "messages/transfer.hpp"
#include "messages/worker_group.hpp"

namespace lab {

/// What goes to the owners of slices, and comes back from them.
struct slice_traffic {
  lamina::frame_kind kind = lamina::frame_kind::gradients;
  lamina::payload_type up = lamina::payload_type::as_is;
  lamina::payload_type down = lamina::payload_type::as_is;
};

/// What an exchange took of this worker.
struct slices_exchanged {
  std::size_t bytes = 0;                    ///< that it sent, of which each way has half
  std::optional<lamina::delivery> arrived;  ///< what to commit; none: all
  std::optional<transfer_cost> cost;        ///< of what went to owners; none: nothing can be lost
};

/// Takes out of the residual, or of the drift, what has arrived.
template <class Compressor>
void commit(Compressor& compressor, const slices_exchanged& done) {
  if (done.arrived) {
    compressor.commit(*done.arrived);
  } else {
    compressor.commit();
  }
}

/// Sums of workers without a server: each owns a slice of every part. What the others have for it comes as frames, of which some may be
/// lost, and is added up in the order of the workers, what was lost being 0. What the owner makes of the mean goes to all as messages,
/// of which nothing is lost. So all hold the same bits: where nothing is lost those that a server would have made. 2 (W - 1) / W of a
/// frame moves in and out of each worker. Memory: the frames of one step.
class owned_slices {
 public:
  /// `parts` is the compressor's, and `traffic.up` its payload. The next step is `steps_done` + 1.
  owned_slices(worker_group& group, const lamina::layout& parts, const slice_traffic& traffic,
               const loss_plan& losses, std::uint64_t steps_done);

  /// What this worker sends of the parts chosen, one behind the other, becomes what all have made of its mean: `finish(part, mean)` does
  /// so to each slice that this worker owns, in numbers that `traffic.down` can write. The same parts are chosen by all: throws link_error that names a worker which has others.
  using finish_slice = std::function<void(std::size_t part, std::span<float> mean)>;
  slices_exchanged exchange(const lamina::selection& chosen, std::span<float> update,
                            const finish_slice& finish = {});

  /// The slices that this worker owns.
  const lamina::layout& own() const { return slices_.of(group_.worker()); }

 private:
  // Calls `take(part, elements)` with the slice that a worker owns of each part chosen, unless it is empty.
  template <class Take>
  void for_each_slice(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                      Take take) const;
  // Calls `use(frame, sent)` with the slices of an owner as a frame.
  template <class Use>
  void with_frame(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                  lamina::payload_type type, Use use) const;
  std::vector<std::byte> bytes_for(std::size_t owner, const lamina::selection& chosen,
                                   std::span<float> update, lamina::payload_type type) const;
  lamina::frame_view<float> read(std::span<const std::byte> bytes, std::size_t owner, std::size_t sender,
                                 const lamina::selection& chosen) const;
  std::vector<message> send_to_owners(const lamina::selection& chosen, std::span<float> update,
                                      slices_exchanged& done);
  void hand_on(const lamina::selection& chosen, std::span<float> update, slices_exchanged& done);

  worker_group& group_;
  slice_traffic traffic_;
  loss_plan losses_;
  lamina::part_slices slices_;
  std::vector<frame_way> ways_;  // to each owner
  lamina::gradient_aggregator<float> aggregator_;
};

}  // namespace lab
