// SPDX-License-Identifier: MIT
#include "messages/transfer_ends.hpp"

namespace lab {

using lamina::bounded::packet_fate;

void sending_end::begin(const lamina::bounded::frame_chunks& frame, std::span<const std::byte> report,
                        const lamina::bounded::obligations& beside) {
  before_ = machine_.counters();
  machine_.begin(frame, report, beside);
}

sent_frame sending_end::result() const {
  const lamina::bounded::sender_counters& now = machine_.counters();
  const lamina::delivery& arrived = machine_.arrived();
  transfer_cost cost;
  cost.elements = arrived.sent().sent_elements();
  cost.lost_elements = arrived.lost_elements();
  cost.packets = now.packets - before_.packets;
  cost.repeated = now.repeated - before_.repeated;
  cost.wire_bytes = now.wire_bytes - before_.wire_bytes;
  cost.rounds = machine_.round() + std::uint64_t{1};
  cost.transfers = 1;
  cost.rate_bits = machine_.rate().bits();
  return {arrived, cost};
}

transfer_cost receiving_end::take_cost() {
  const lamina::bounded::receiver_counters now = machine_.counters();
  const auto since = [&](packet_fate fate) { return now.of(fate) - before_.of(fate); };
  transfer_cost cost;
  cost.elements = machine_.arrived().sent().sent_elements();
  cost.lost_elements = machine_.arrived().lost_elements();
  cost.duplicate = since(packet_fate::duplicate);
  // Those that come when the next transfer has begun are stale to it.
  cost.late = since(packet_fate::late) + since(packet_fate::stale);
  before_ = now;
  return cost;
}

arrived_frame receiving_end::result(const transfer_cost& cost) const {
  arrived_frame all{machine_.arrived(), {}, cost};
  machine_.for_each_repair([&](std::size_t layer, std::size_t begin, std::span<const std::byte> elements) {
    all.repairs.push_back({layer, begin, {elements.begin(), elements.end()}});
  });
  return all;
}

}  // namespace lab
