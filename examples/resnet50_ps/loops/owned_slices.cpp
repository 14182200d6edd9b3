// SPDX-License-Identifier: MIT
#include "loops/owned_slices.hpp"

#include <algorithm>
#include <lamina/codec.hpp>
#include <utility>

#include "messages/link.hpp"

namespace resnet50_ps {
namespace {

// Slices begin where the blocks of payloads do.
std::size_t slice_begin(std::size_t elements, std::size_t worker, std::size_t workers) {
  const std::size_t blocks =
      elements / lamina::payload_block_elements + (elements % lamina::payload_block_elements != 0);
  return std::min(elements, blocks * worker / workers * lamina::payload_block_elements);
}

std::vector<lamina::layout> slices_of(const lamina::layout& parts, std::size_t workers) {
  std::vector<lamina::layout> all;
  for (std::size_t w = 0; w < workers; ++w) {
    std::vector<lamina::layer> slices;
    for (std::size_t part = 0; part < parts.layers(); ++part) {
      const std::size_t elements = parts.sizes()[part];
      slices.push_back(
          {parts[part].name, {slice_begin(elements, w + 1, workers) - slice_begin(elements, w, workers)}});
    }
    all.emplace_back(std::move(slices));
  }
  return all;
}

}  // namespace

owned_slices::owned_slices(worker_group& group, const lamina::layout& parts, lamina::payload_type up,
                           const lamina::outer_options& options, std::uint64_t steps_done)
    : group_(group),
      slices_(slices_of(parts, group.workers())),
      up_(up),
      outer_(slices_[group.worker()], options),
      aggregator_(lamina::gradient_aggregator<float>::of_workers(
          slices_[group.worker()], group.workers(),
          {.first_step = steps_done + 1, .kind = lamina::frame_kind::updates})) {}

template <class Take>
void owned_slices::for_each_slice(std::size_t owner, const lamina::selection& chosen, std::span<float> update,
                                  Take take) const {
  std::size_t offset = 0;
  for (const std::size_t part : chosen.sent()) {
    const std::size_t elements = chosen.model().sizes()[part];
    const std::size_t begin = slice_begin(elements, owner, group_.workers());
    const std::span<float> slice = update.subspan(offset + begin, slices_[owner].sizes()[part]);
    if (!slice.empty()) take(part, slice);
    offset += elements;
  }
}

std::vector<std::byte> owned_slices::frame_of(std::size_t owner, const lamina::selection& chosen,
                                              std::span<float> update, lamina::payload_type type) const {
  lamina::selection sent(slices_[owner]);
  std::vector<std::span<const float>> elements(chosen.model().layers());
  for_each_slice(owner, chosen, update, [&](std::size_t part, std::span<float> slice) {
    sent.send(part);
    elements[part] = slice;
  });
  lamina::frame_encoder<float> encoder(slices_[owner]);
  return encoder
      .encode(
          lamina::frame_kind::updates, aggregator_.step(), static_cast<std::uint32_t>(group_.worker()), sent,
          [&](std::size_t part) { return elements[part]; }, type)
      .to_bytes();
}

lamina::frame_view<float> owned_slices::read(std::span<const std::byte> bytes, std::size_t owner,
                                             std::size_t sender, const lamina::selection& chosen) const {
  return read_from(group_.name_of(sender), [&] {
    auto frame = lamina::decode<float>(bytes, slices_[owner]);
    lamina::expect(frame, lamina::frame_kind::updates, aggregator_.step());
    for (std::size_t part = 0; part < frame.layers(); ++part) {
      if (slices_[owner].sizes()[part] == 0 || frame.is_dropped(part) == chosen.is_dropped(part)) continue;
      throw link_error(group_.name_of(sender) + " has chosen other parts than this worker: '" +
                       chosen.model()[part].name + "' is one of them");
    }
    return frame;
  });
}

std::size_t owned_slices::exchange(const lamina::selection& chosen, std::span<float> update) {
  const std::size_t me = group_.worker();
  const std::uint64_t step = aggregator_.step();
  std::size_t bytes = 0;
  const std::vector<message> updates = group_.exchange([&](std::size_t owner) {
    payload frame(frame_of(owner, chosen, update, up_));
    bytes += frame.size_bytes();
    return frame;
  });
  const std::vector<std::byte> own = frame_of(me, chosen, update, up_);
  for (std::size_t w = 0; w < group_.workers(); ++w) {
    aggregator_.add(read(w == me ? std::span(own) : updates[w].bytes, me, w, chosen));
  }
  for_each_slice(me, chosen, update, [&](std::size_t part, std::span<float> slice) {
    aggregator_.mean(part, [&](std::size_t begin, std::span<const float> mean) {
      std::ranges::copy(mean, slice.begin() + static_cast<std::ptrdiff_t>(begin));
    });
    outer_(part, 0, slice, step);
  });

  const payload result(frame_of(me, chosen, update, outer_.options().payload));
  const std::vector<message> results = group_.exchange([&](std::size_t) {
    bytes += result.size_bytes();
    return result;
  });
  for (std::size_t w = 0; w < group_.workers(); ++w) {
    if (w == me) continue;
    const auto frame = read(results[w].bytes, w, w, chosen);
    for_each_slice(w, chosen, update,
                   [&](std::size_t part, std::span<float> slice) { frame.restore(part, slice); });
  }
  aggregator_.next_step();
  return bytes;
}

}  // namespace resnet50_ps
