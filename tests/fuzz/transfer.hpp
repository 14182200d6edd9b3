// SPDX-License-Identifier: MIT
#pragma once

// A sender and a receiver over a network of the fuzzer's, which loses, delays and doubles packets: bounds hold, both ends agree, and
// delivered plus residual is the sum of the gradients.
#include "bounded/simulated_transfer.hpp"
#include "fuzz.hpp"
#include "steps.hpp"

namespace lamina_fuzz::of_transfer {

using namespace lamina_test;

void fuzz_one(input in) {
  const lamina::layout model = lamina_fuzz::model_of(in);
  const auto type = static_cast<payload_type>(in.below(6));
  const auto bound_ppm = static_cast<std::uint32_t>(in.below(6) * 100'000);
  const stop_policy stop = in.flag() ? stop_policy::eager : stop_policy::on_probe;
  std::mt19937 random = in.random();
  lamina::worker<float> worker(
      model,
      {.drop_ratio = in.flag() ? 0.5 : 0, .payload = type, .frame_checksum = lamina::frame_checksum::none});
  const auto grid = bounded::chunk_grid::of<float>(model, type, 64);
  bounded::loss_memory memory(grid);
  simulated_link link(grid, {.most_bound_ppm = bound_ppm, .stop = stop, .begins_at = 1s});
  link.delays = [&](const bounded::outgoing_packet&) -> std::vector<instant> {
    const std::size_t fate = in.below(16);  // 0, when there are no more choices
    if (fate >= 12) return {};
    if (fate == 11) return {static_cast<int>(in.below(256)) * 1ms};
    if (fate == 10) return {50us, static_cast<int>(in.below(256)) * 100us};
    return {50us};
  };
  tensors<float> computed = zeros_like<float>(model), delivered = computed;
  for (int step = 0; step < 4; ++step) {
    const tensors<float> gradients = random_gradients<float>(random, model);
    add_to(computed, gradients);
    auto of_worker = worker.add(gradients);
    const auto& frame = of_worker.frame();
    const bounded::frame_chunks chunks(frame, of_worker.sent(), grid, {.bound_ppm = bound_ppm});
    const auto required = memory.required(of_worker.sent(), 2);
    link.transfer(chunks, {.required = required});
    const std::error_code why = link.sender.failure();
    check(!link.sender.is_under_way() && (!why || why == errc::no_progress || why == errc::aborted),
          "a transfer ends well");
    if (why) return;
    const lamina::delivery& arrived = link.sender.arrived();
    check(same_delivery(arrived, link.receiver.arrived()), "both ends agree");
    check(holds_what_arrived(link.receiver, frame, grid), "what arrived is what was sent");
    check(keeps_bound(arrived, grid, bound_ppm), "no fragment is beyond its bound");
    for (const auto& each : required)
      check(!arrived.is_lost(each.fragment, each.index), "what is required arrives");
    receive<float>(delivered, link.receiver.frame(), model);
    memory.note(arrived);
    of_worker.commit(arrived);
    check(conserves(worker, delivered, computed), "delivered and residual are the sum of the gradients");
  }
}

}  // namespace lamina_fuzz::of_transfer
