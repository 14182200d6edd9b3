// SPDX-License-Identifier: MIT
#include "loops/losses.hpp"

namespace resnet50_ps {

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

gradient_way::gradient_way(const loss_plan& plan, const lamina::layout& parts, lamina::payload_type payload)
    : plan_(plan), cutter_(plan, parts, payload) {
  if (cutter_.grid()) memory_.emplace(*cutter_.grid());
}

void gradient_way::send(worker_link& server,
                        const std::shared_ptr<lamina::gradient_compressor<float>>& compressor,
                        const lamina::encoded_frame& frame, std::uint64_t step, const step_report& report) {
  const auto chunks = cutter_.cut(frame, compressor->chosen(), plan_.bound_up(step));
  std::vector<bounded::chunk> required;
  // What was lost is not in the residual where it is gone: others stand in its place.
  if (chunks && plan_.returns_lost) required = memory_->required(compressor->chosen(), plan_.max_losses);
  const sent_frame sent =
      server.push(report, {.frame = {frame.segments(), compressor}, .chunks = chunks ? &*chunks : nullptr},
                  {.required = required});
  if (sent.arrived && plan_.returns_lost) {
    memory_->note(*sent.arrived);
    compressor->commit(*sent.arrived);
  } else {
    compressor->commit();
  }
}

void commit(lamina::parameter_publisher<float>& frames, std::size_t client, const sent_frame& sent) {
  if (sent.arrived) {
    frames.commit(client, *sent.arrived);
  } else {
    frames.commit(client);
  }
}

}  // namespace resnet50_ps
