// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/elements.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/cuda/detail/thread_block.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/payload.hpp"

/// The kernels that go over the blocks of the layers sent: into a frame, out of the residual, and back from a frame.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The blocks of a model as the work of groups, `groups_of_block` of which share one. Neighbours go to different thread blocks, since a
/// layer that is sent is many blocks one after the other. The first thread block has none.
struct blocks_of_launch {
  unsigned groups_of_block;

  /// With as many groups as run at once many blocks need no sharing, and few would leave a GPU without work.
  LAMINA_HOST_DEVICE static constexpr blocks_of_launch of(std::size_t blocks) {
    return {blocks <= 16'384 ? 8U : 1U};
  }
  constexpr std::size_t thread_blocks(std::size_t blocks, unsigned groups) const {
    return 1 + thread_blocks_for(blocks * groups_of_block, groups);
  }

  /// What a group has of a block: [begin, end), by whole rows but for the last.
  struct share {
    bool is_some;
    block_place place;
    std::size_t block;
    unsigned begin;
    unsigned end;
  };
  /// Reads what no launch writes.
  LAMINA_ANY_CALLER template <class T, class ThreadBlock, class Group>
  LAMINA_HOST_DEVICE share of_group(const model_view<T>& at, const ThreadBlock& cta,
                                    const Group& group) const {
    const std::size_t unit = group.index() * (cta.grid() - 1) + cta.index() - 1;
    const std::size_t block = unit / groups_of_block;
    if (cta.index() == 0 || block >= at.blocks) return {};
    const block_place place = at.places[block];
    const auto each = static_cast<unsigned>(block_elements) / groups_of_block;
    const auto begin = static_cast<unsigned>(unit % groups_of_block) * each;
    const unsigned end = begin + each < place.count ? begin + each : place.count;
    return {begin < end, place, block, begin, end};
  }
};

/// Header, bitmap and the layers sent, in one piece at `frame`: device memory, or host memory that the device can write.
/// Without a selection of this step what is at `frame` loses its magic number, so that nobody takes an old frame for it.
template <class T>
struct pack_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned thread_blocks_at_once = 2;
  struct shared_memory {};

  model_view<T> at;
  payload_type type;
  std::byte* frame;
  blocks_of_launch work = blocks_of_launch::of(at.blocks);

  std::size_t thread_blocks(unsigned groups) const { return work.thread_blocks(at.blocks, groups); }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    const auto group = cta.group();
    const auto share = work.of_group(at, cta, group);
    cta.wait_for_launches();
    const bool has_selection = may_encode(at.state->load_phase());
    if (cta.index() == 0) {
      const std::size_t bytes = has_selection ? at.prefix_bytes : sizeof lamina::detail::wire_magic;
      for (std::size_t i = cta.thread(); i < bytes; i += cta.threads())
        frame[i] = has_selection ? at.prefix[i] : std::byte{0};
      if (cta.thread() != 0) return;
      if (!has_selection) return at.state->set_misused();
      at.state->store_phase(step_phase::encoded);
    } else if (has_selection && share.is_some && at.is_sent(share.place.layer)) {
      pack(group, share);
    }
  }

 private:
  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void pack(const Group& group, const blocks_of_launch::share& share) const {
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
        return write_integers(group, share, rows, reinterpret_cast<std::uint8_t*>(layer), in_layer);
      default: {
        T* const to = reinterpret_cast<T*>(layer) + in_layer;
        if (!is_aligned<unit_of<T, Group>>(to)) return copy_each(group, block, to, share.begin, share.end);
        rows([&](const auto& own, unsigned first, unsigned count) { store_some(to + first, own, count); });
      }
    }
  }

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

  // The scales of all rows of the layer, and behind them the integers; those of int4 two to a byte, the first of which is in its
  // lower half.
  LAMINA_ANY_CALLER template <class Group, class Rows>
  LAMINA_HOST_DEVICE void write_integers(const Group& group, const blocks_of_launch::share& share,
                                         const Rows& rows, std::uint8_t* layer, std::size_t in_layer) const {
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

/// What was sent leaves the residual: as_is by a mark for the layer, since the next gradient is written over what is there; otherwise
/// what rounding took away stays. The second time it changes nothing: marks are the same then, and what is subtracted has the step
/// with it.
template <class T>
struct commit_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned thread_blocks_at_once = 2;
  struct shared_memory {};

  model_view<T> at;
  payload_type type;
  blocks_of_launch work = {1};

  std::size_t thread_blocks(unsigned groups) const { return work.thread_blocks(at.blocks, groups); }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    const auto group = cta.group();
    const auto share = work.of_group(at, cta, group);
    cta.wait_for_launches();
    const step_phase phase = at.state->load_phase();
    if (cta.index() == 0) {
      if (cta.thread() != 0) return;
      if (!may_commit(phase)) return at.state->set_misused();
      at.state->allowance -= static_cast<double>(at.state->sent_elements);
      at.state->store_phase(step_phase::committed);
    } else if (has_frame(phase) && share.is_some && at.is_sent(share.place.layer)) {
      commit(group, share);
    }
  }

 private:
  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void commit(const Group& group, const blocks_of_launch::share& share) const {
    const block_place& place = share.place;
    if (group.thread() == 0 && place.begin == at.offsets[place.layer]) {
      at.sent_in[place.layer] = at.state->step;
      at.is_clear[place.layer] = type == payload_type::as_is;
    }
    if (at.rounded_in != nullptr) {
      std::uint64_t& rounded_in = at.rounded_in[share.block];
      const bool is_done = rounded_in == at.state->step;
      group.barrier();
      if (is_done) return;
      if (group.thread() == 0) rounded_in = at.state->step;
      subtract_sent(group, type, at.residual + place.begin, place.count);
    }
    if (at.velocity == nullptr) return;
    for (unsigned i = group.thread(); i < place.count; i += Group::threads)
      at.velocity[place.begin + i] = T(0);
  }
};

/// The layers of a frame over the tensors bound, zeros for those dropped.
template <class T>
struct restore_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned thread_blocks_at_once = 2;
  struct shared_memory {};

  model_view<T> at;
  const T* payload;
  blocks_of_launch work = blocks_of_launch::of(at.blocks);

  std::size_t thread_blocks(unsigned groups) const { return work.thread_blocks(at.blocks, groups); }

  LAMINA_ANY_CALLER template <class ThreadBlock>
  LAMINA_HOST_DEVICE void operator()(const ThreadBlock& cta, shared_memory&) const {
    const auto group = cta.group();
    const auto share = work.of_group(at, cta, group);
    cta.wait_for_launches();
    if (!has_frame(at.state->load_phase())) {
      if (cta.index() == 0 && cta.thread() == 0) at.state->set_misused();
    } else if (share.is_some) {
      restore(group, share);
    }
  }

 private:
  LAMINA_ANY_CALLER template <class Group>
  LAMINA_HOST_DEVICE void restore(const Group& group, const blocks_of_launch::share& share) const {
    constexpr unsigned each = static_cast<unsigned>(lanes) / Group::threads;
    const std::size_t layer = share.place.layer;
    const std::size_t in_layer = share.place.begin - at.offsets[layer];
    T* const to = static_cast<T*>(at.gradients[layer].data) + in_layer;
    const auto write = [&](const unit<T, each>& own, unsigned first, unsigned count) {
      store_some(to + first, own, count);
    };
    if (at.is_sent(layer)) {
      const T* const from = payload + at.payload_begin[layer] / sizeof(T) + in_layer;
      for_each_row(group, from, is_aligned<unit<T, each>>(from), share.begin, share.end, write);
      return;
    }
    for (unsigned first = share.begin + group.thread() * each; first < share.end;
         first += static_cast<unsigned>(lanes))
      write({}, first, share.end - first < each ? share.end - first : each);
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
