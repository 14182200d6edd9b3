// SPDX-License-Identifier: MIT
#include "loops/losses.hpp"

namespace lab {

namespace bounded = lamina::bounded;

bounded::chunk_grid frame_grid(const lamina::layout& parts, lamina::payload_type payload,
                               std::size_t packet_data_bytes) {
  return bounded::chunk_grid::of<float>(parts, payload,
                                        bounded::chunk_elements<float>(payload, packet_data_bytes));
}

frame_cutter::frame_cutter(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload)
    : has_tags_(plan.has_tags) {
  if (!plan.is_lossy) return;
  grid_ = frame_grid(parts, payload, plan.packet_data_bytes);
}

std::optional<bounded::frame_chunks> frame_cutter::cut(const lamina::encoded_frame& frame,
                                                       const lamina::selection& layers,
                                                       std::uint32_t bound_ppm) const {
  if (!grid_) return std::nullopt;
  return bounded::frame_chunks(frame, layers, *grid_, {.bound_ppm = bound_ppm, .tags = has_tags_});
}

frame_way::frame_way(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload)
    : plan_(plan), cutter_(plan, parts, payload) {
  if (cutter_.grid()) memory_.emplace(*cutter_.grid());
}

lamina::part_slices slices_of(const loss_plan& plan, const lamina::layout& parts,
                              lamina::payload_type payload, std::size_t workers) {
  return {parts, workers,
          plan.is_lossy ? bounded::chunk_elements<float>(payload, plan.packet_data_bytes)
                        : lamina::payload_block_elements};
}

void commit(lamina::parameter_publisher<float>& frames, std::size_t client, const sent_frame& sent) {
  if (sent.arrived) {
    frames.commit(client, *sent.arrived);
  } else {
    frames.commit(client);
  }
}

}  // namespace lab
