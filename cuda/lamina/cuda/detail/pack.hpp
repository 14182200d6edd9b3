// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/frame.hpp"
#include "lamina/payload.hpp"

/// The kernel that goes over the blocks of the layers sent: into a frame, out of the residual, and back from a frame.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// What a group has of a block: [begin, end), by whole rows but for the last.
struct block_share {
  block_place place;
  unsigned begin;
  unsigned end;
};

/// `groups_of_block` groups share a block. `Work` says in which phases it may be done; has a function for a share, and may have one for
/// the first thread block, which has no elements, and one for the end, when nobody reads the phase any more.
template <class T, class Work>
struct blocks_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned thread_blocks_at_once = 2;
  struct shared_memory {};

  model_view<T> at;
  unsigned groups_of_block;
  Work work;

  std::size_t thread_blocks(unsigned groups) const {
    return 1 + thread_blocks_for(at.blocks * groups_of_block, groups);
  }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    const auto group = cta.group();
    const block_share share = share_of(cta, group);
    cta.wait_for_launches();
    const step_phase phase = at.state->load_phase();
    const bool may = Work::may(phase);
    if (cta.index() == 0) {
      if constexpr (requires { work.begin(at, cta, may); }) work.begin(at, cta, may);
      if (!may && cta.thread() == 0) at.state->set_misused();
    } else if (may && share.begin < share.end) {
      work.do_share(at, group, share);
    }
    if constexpr (requires { work.end(*at.state); }) {
      if (cta.is_last_to_arrive(at.arrivals[at.blocks], static_cast<std::uint32_t>(cta.grid())) && may &&
          cta.thread() == 0)
        work.end(*at.state);
    }
  }

 private:
  // Reads what no launch writes. Neighbours go to different thread blocks, since a layer that is sent is many blocks in a row.
  LAMINA_ANY_CALLER template <class ThreadBlock, class Group>
  LAMINA_HOST_DEVICE block_share share_of(const ThreadBlock& cta, const Group& group) const {
    const std::size_t unit = group.index() * (cta.grid() - 1) + cta.index() - 1;
    const std::size_t block = unit / groups_of_block;
    if (cta.index() == 0 || block >= at.blocks) return {};
    const block_place place = at.places[block];
    const auto each = static_cast<unsigned>(block_elements) / groups_of_block;
    const auto begin = static_cast<unsigned>(unit % groups_of_block) * each;
    return {place, begin, begin + each < place.count ? begin + each : place.count};
  }
};

/// Writes header, bitmap and the layers sent, in one piece at `frame`: device memory, or host memory that the device can write.
/// Without a selection of this step what is at `frame` loses its magic number, so that nobody takes an old frame for it.
template <class T>
struct pack {
  payload_type type;
  std::byte* frame;

  LAMINA_HOST_DEVICE static bool may(step_phase phase) { return may_encode(phase); }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void begin(const model_view<T>& at, const ThreadBlock& cta, bool may) const {
    const std::size_t bytes = may ? at.prefix_bytes : sizeof lamina::detail::wire_magic;
    for (std::size_t i = cta.thread(); i < bytes; i += cta.threads())
      frame[i] = may ? at.prefix[i] : std::byte{0};
    if (may && cta.thread() == 0) at.state->store_phase(step_phase::encoded);
  }

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void do_share(const model_view<T>& at, const Group& group,
                                   const block_share& share) const {
    if (!at.is_sent(share.place.layer)) return;
    const T* const block = at.residual + share.place.begin;
    const std::size_t in_layer = share.place.begin - at.offsets[share.place.layer];
    std::byte* const layer = frame + at.prefix_bytes + at.payload_begin[share.place.layer];
    const auto rows = [&](const auto& visit) {
      for_each_row(group, block, true, share.begin, share.end, visit);
    };
    const auto convert = [&]<class Half>(Half* to) {
      rows([&](const auto& own, unsigned first, unsigned count) {
        unit_of<Half, Group> halves;
        for (unsigned k = 0; k < sizeof halves / sizeof(Half); ++k)
          halves.at[k] = lamina::detail::to_half<Half>(own.at[k]);
        store_some(to + first, halves, count);
      });
    };
    switch (type) {
      case payload_type::float16:
        return convert(reinterpret_cast<lamina::float16*>(layer) + in_layer);
      case payload_type::bfloat16:
        return convert(reinterpret_cast<lamina::bfloat16*>(layer) + in_layer);
      case payload_type::int8:
      case payload_type::int4:
        return write_integers(at, group, share, rows, reinterpret_cast<std::uint8_t*>(layer), in_layer);
      default: {
        T* const to = reinterpret_cast<T*>(layer) + in_layer;
        if (!is_aligned<unit_of<T, Group>>(to)) return copy_each(group, block, to, share.begin, share.end);
        rows([&](const auto& own, unsigned first, unsigned count) { store_some(to + first, own, count); });
      }
    }
  }

 private:
  // Neighbours by neighbouring threads, so that stores are of whole words of memory all the same.
  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE static void copy_each(const Group& group, const T* from, T* to, unsigned begin,
                                           unsigned end) {
    constexpr unsigned at_once = Group::threads == 1 ? 1 : 64 / static_cast<unsigned>(sizeof(T));
    for (; begin < end; begin += at_once * Group::threads) {
      T own[at_once];
      LAMINA_UNROLLED for (unsigned k = 0; k < at_once; ++k) {
        const unsigned i = begin + k * Group::threads + group.thread();
        own[k] = i < end ? from[i] : T(0);
      }
      LAMINA_UNROLLED for (unsigned k = 0; k < at_once; ++k) {
        const unsigned i = begin + k * Group::threads + group.thread();
        if (i < end) to[i] = own[k];
      }
    }
  }

  // The scales of all rows of the layer, then the integers; those of int4 two to a byte, the first in its lower half.
  LAMINA_ANY_CALLER template <class Group, class Rows>
  LAMINA_HOST_DEVICE void write_integers(const model_view<T>& at, const Group& group,
                                         const block_share& share, const Rows& rows, std::uint8_t* layer,
                                         std::size_t in_layer) const {
    constexpr auto row = static_cast<unsigned>(lanes);
    constexpr unsigned each = row / Group::threads;
    std::uint8_t* const scales = layer + in_layer / row;
    std::uint8_t* const integers = layer + payload_blocks(at.sizes[share.place.layer]);
    rows([&](const auto& own, unsigned first, unsigned count) {
      const std::uint8_t scale = scale_of_row(group, type, own);
      if (group.thread() == 0) scales[first / row] = scale;
      unit<std::uint8_t, each> bytes;
      for (unsigned k = 0; k < each; ++k)
        bytes.at[k] = static_cast<std::uint8_t>(integer_of(own.at[k], type, scale));
      if (type == payload_type::int8) return store_some(integers + in_layer + first, bytes, count);
      unit<std::uint8_t, each / 2> pairs;
      for (unsigned k = 0; k < each / 2; ++k)
        pairs.at[k] = static_cast<std::uint8_t>((bytes.at[2 * k] & 0x0fU) | (bytes.at[2 * k + 1] << 4U));
      store_some(integers + (in_layer + first) / 2, pairs, (count + 1) / 2);
    });
  }
};

/// What was sent leaves the residual: as_is by a mark, since the next gradient is written over it; else what rounding took away stays.
template <class T>
struct commit {
  payload_type type;

  LAMINA_HOST_DEVICE static bool may(step_phase phase) { return phase == step_phase::encoded; }

  LAMINA_HOST_DEVICE static void end(step_state& state) {
    state.allowance -= static_cast<double>(state.sent_elements);
    state.store_phase(step_phase::committed);
  }

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void do_share(const model_view<T>& at, const Group& group,
                                   const block_share& share) const {
    if (!at.is_sent(share.place.layer)) return;
    const block_place& place = share.place;
    if (group.thread() == 0 && place.begin == at.offsets[place.layer]) {
      at.sent_in[place.layer] = at.state->step;
      at.is_clear[place.layer] = type == payload_type::as_is;
    }
    if (type != payload_type::as_is) subtract_sent(group, type, at.residual + place.begin, place.count);
    if (at.velocity == nullptr) return;
    for (unsigned i = group.thread(); i < place.count; i += Group::threads)
      at.velocity[place.begin + i] = T(0);
  }
};

/// The layers of a frame over the tensors bound, zeros for those dropped.
template <class T>
struct restore {
  const T* payload;

  LAMINA_HOST_DEVICE static bool may(step_phase phase) { return has_frame(phase); }

  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void do_share(const model_view<T>& at, const Group& group,
                                   const block_share& share) const {
    constexpr unsigned each = static_cast<unsigned>(lanes) / Group::threads;
    const std::size_t layer = share.place.layer;
    const std::size_t in_layer = share.place.begin - at.offsets[layer];
    T* const to = static_cast<T*>(at.gradients[layer].data) + in_layer;
    const auto write = [&](const unit<T, each>& own, unsigned first, unsigned count) {
      store_some(to + first, own, count);
    };
    if (at.is_sent(layer)) {
      const T* const from = payload + at.payload_begin[layer] / sizeof(T) + in_layer;
      return for_each_row(group, from, is_aligned<unit<T, each>>(from), share.begin, share.end, write);
    }
    for (unsigned first = share.begin + group.thread() * each; first < share.end;
         first += static_cast<unsigned>(lanes))
      write({}, first, share.end - first < each ? share.end - first : each);
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
