// SPDX-License-Identifier: MIT
#include "loops/owned_slices.hpp"

#include <algorithm>
#include <lamina/codec.hpp>
#include <utility>

#include "messages/link.hpp"

namespace lab {

owned_slices::owned_slices(worker_group& group, const lamina::layout& parts, const slice_traffic& traffic,
                           const loss_plan& losses, std::uint64_t steps_done)
    : group_(group),
      traffic_(traffic),
      losses_(losses),
      slices_(slices_of(losses, parts, traffic.up, group.workers())),
      aggregator_(lamina::gradient_aggregator<float>::of_workers(
          own(), group.workers(), {.first_step = steps_done + 1, .kind = traffic.kind})) {
  for (std::size_t owner = 0; owner < group.workers(); ++owner)
    ways_.emplace_back(losses, slices_.of(owner), traffic.up);
}

template <class Take>
void owned_slices::for_each_slice(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                                  Take take) const {
  std::size_t offset = 0;
  for (const std::size_t part : chosen.sent()) {
    const std::span<float> slice =
        update.subspan(offset + slices_.begin(owner, part), slices_.of(owner).sizes()[part]);
    if (!slice.empty()) take(part, slice);
    offset += chosen.model().sizes()[part];
  }
}

template <class Use>
void owned_slices::with_frame(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                              lamina::payload_type type, Use use) const {
  std::vector<std::span<const float>> elements(chosen.model().layers());
  for_each_slice(owner, chosen, update,
                 [&](std::size_t part, std::span<float> slice) { elements[part] = slice; });
  const lamina::selection sent = slices_.cut(chosen, owner);
  lamina::frame_encoder<float> encoder(slices_.of(owner));
  use(encoder.encode(
          traffic_.kind, aggregator_.step(), static_cast<std::uint32_t>(group_.worker()), sent,
          [&](std::size_t part) { return elements[part]; }, type, checksum_of(losses_)),
      sent);
}

std::vector<std::byte> owned_slices::bytes_for(std::size_t owner, const lamina::selection& chosen,
                                               std::span<float> update, lamina::payload_type type) const {
  std::vector<std::byte> bytes;
  with_frame(owner, chosen, update, type,
             [&](const lamina::encoded_frame& frame, const lamina::selection&) { bytes = frame.to_bytes(); });
  return bytes;
}

lamina::frame_view<float> owned_slices::read(std::span<const std::byte> bytes, std::size_t owner,
                                             std::size_t sender, const lamina::selection& chosen) const {
  return read_from(group_.name_of(sender), [&] {
    auto frame = lamina::decode<float>(bytes, slices_.of(owner));
    lamina::expect(frame, traffic_.kind, aggregator_.step());
    for (std::size_t part = 0; part < frame.layers(); ++part) {
      if (slices_.of(owner).sizes()[part] == 0 || frame.is_dropped(part) == chosen.is_dropped(part)) continue;
      throw link_error(group_.name_of(sender) + " has chosen other parts than this worker: '" +
                       chosen.model()[part].name + "' is one of them");
    }
    return frame;
  });
}

slices_exchanged owned_slices::exchange(const lamina::selection& chosen, std::span<float> update,
                                        const finish_slice& finish) {
  const std::size_t me = group_.worker();
  slices_exchanged done;
  const std::vector<message> updates = send_to_owners(chosen, update, done);
  const std::vector<std::byte> own = bytes_for(me, chosen, update, traffic_.up);
  for (std::size_t w = 0; w < group_.workers(); ++w)
    aggregator_.add(read(w == me ? std::span(own) : updates[w].bytes, me, w, chosen));
  for_each_slice(me, chosen, update, [&](std::size_t part, std::span<float> slice) {
    aggregator_.mean(part, [&](std::size_t begin, std::span<const float> mean) {
      std::ranges::copy(mean, slice.begin() + static_cast<std::ptrdiff_t>(begin));
    });
    if (finish) finish(part, slice);
  });
  hand_on(chosen, update, done);
  aggregator_.next_step();
  return done;
}

std::vector<message> owned_slices::send_to_owners(const lamina::selection& chosen, std::span<float> update,
                                                  slices_exchanged& done) {
  if (losses_.is_lossy) done.cost.emplace();
  // The own slice is here.
  if (losses_.is_lossy && losses_.returns_lost) done.arrived.emplace(chosen, slices_.unit_elements());
  return group_.exchange_frames([&](std::size_t owner, const worker_group::frame_sender& send) {
    with_frame(owner, chosen, update, traffic_.up, [&](const auto& frame, const lamina::selection& parts) {
      done.bytes += frame.size_bytes();
      const auto send_it = [&](const auto* chunks, const auto& owed) {
        payload bytes = chunks == nullptr ? payload(frame.to_bytes()) : payload(frame.segments(), nullptr);
        return send({.frame = std::move(bytes), .chunks = chunks}, owed);
      };
      const sent_frame sent = ways_[owner].send(frame, parts, aggregator_.step(), send_it);
      if (done.cost) *done.cost += sent.cost;
      if (done.arrived && sent.arrived) slices_.lose(owner, *sent.arrived, *done.arrived);
    });
  });
}

void owned_slices::hand_on(const lamina::selection& chosen, std::span<float> update, slices_exchanged& done) {
  const payload result(bytes_for(group_.worker(), chosen, update, traffic_.down));
  const std::vector<message> results = group_.exchange([&](std::size_t) {
    done.bytes += result.size_bytes();
    return result;
  });
  for (std::size_t w = 0; w < group_.workers(); ++w) {
    if (w == group_.worker()) continue;
    const auto frame = read(results[w].bytes, w, w, chosen);
    for_each_slice(w, chosen, update,
                   [&](std::size_t part, std::span<float> slice) { frame.restore(part, slice); });
  }
}

}  // namespace lab
