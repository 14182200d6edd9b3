// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/detail/payload.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/payload.hpp"

/// The kernels that walk the blocks of the layers sent: into a frame, out of the residual, and back from a frame.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// A team takes this many blocks one after the other; most are of layers that stay behind and cost it one bit each.
inline constexpr unsigned packed_blocks_per_team = 4;

constexpr std::size_t teams_for(std::size_t blocks) {
  return (blocks + packed_blocks_per_team - 1) / packed_blocks_per_team;
}

/// Calls visit(place) for the blocks of team `index` among those that share all blocks.
LAMINA_ANY_CALLER template <class T, class Visit>
LAMINA_HOST_DEVICE void for_each_block(const model_view<T>& at, std::size_t index, const Visit& visit) {
  const std::size_t first = index * packed_blocks_per_team;
  for (std::size_t block = first; block < first + packed_blocks_per_team && block < at.blocks; ++block) {
    visit(place_of(at, block));
  }
}

/// Header, bitmap and the layers sent, in one piece at `frame`: device memory, or host memory that the device can write.
/// Without a selection of this step what is at `frame` loses its magic number, so that nobody takes an old frame for it.
template <class T>
struct pack_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned teams_at_once = 1;
  struct shared_memory {
    staged_block<T> staged;
  };

  model_view<T> at;
  payload_type type;
  std::byte* frame;

  // One more for the prefix.
  std::size_t teams() const { return 1 + teams_for(at.blocks); }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    const bool may_encode = lamina::detail::may_encode(at.state->load_phase());
    if (team.index() == 0) {
      const std::size_t bytes = may_encode ? at.prefix_bytes : sizeof lamina::detail::wire_magic;
      for (std::size_t i = team.thread(); i < bytes; i += team.threads())
        frame[i] = may_encode ? at.prefix[i] : std::byte{0};
      if (team.thread() == 0) note_phase(may_encode);
      return;
    }
    if (!may_encode) return;
    for_each_block(at, team.index() - 1, [&](const block_place& place) {
      if (at.is_sent(place.layer)) pack(team, shared.staged, place);
    });
  }

 private:
  // The other teams may read either phase: both let them encode.
  LAMINA_HOST_DEVICE void note_phase(bool has_encoded) const {
    if (has_encoded) {
      at.state->store_phase(step_phase::encoded);
      at.state->has_frame = 1;
    } else {
      at.state->raise(misuse::encode_without_selection);
    }
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void pack(const Team& team, staged_block<T>& staged, const block_place& place) const {
    const T* from = at.residual + at.offsets[place.layer] + place.begin;
    std::byte* layer = frame + at.prefix_bytes + at.payload_begin[place.layer];
    stage(team, type, from, place.count, staged);
    switch (type) {
      case payload_type::float16:
        return write_halves<lamina::float16>(team, layer, staged, place);
      case payload_type::bfloat16:
        return write_halves<lamina::bfloat16>(team, layer, staged, place);
      case payload_type::int8:
      case payload_type::int4:
        return write_integers(team, reinterpret_cast<std::uint8_t*>(layer), staged, place);
      default:
        write_units(team, reinterpret_cast<T*>(layer) + place.begin, place.count,
                    [&](unsigned i) { return staged[i]; });
    }
  }

  LAMINA_ANY_CALLER template <class Half, class Team>
  LAMINA_HOST_DEVICE void write_halves(const Team& team, std::byte* layer, const staged_block<T>& staged,
                                       const block_place& place) const {
    write_units(team, reinterpret_cast<Half*>(layer) + place.begin, place.count,
                [&](unsigned i) { return lamina::detail::to_half<Half>(staged[i]); });
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void write_integers(const Team& team, std::uint8_t* layer, const staged_block<T>& staged,
                                         const block_place& place) const {
    constexpr auto group = static_cast<unsigned>(payload_block_elements);
    write_units(team, layer + place.begin / group, (place.count + group - 1) / group,
                [&](unsigned g) { return staged.scale[g]; });
    std::uint8_t* integers = layer + payload_blocks(at.sizes[place.layer]);
    const auto integer = [&](unsigned i) {
      return static_cast<std::uint8_t>(integer_of(staged[i], type, staged.scale[i / group]));
    };
    if (type == payload_type::int8) {
      write_units(team, integers + place.begin, place.count, integer);
      return;
    }
    // Two to a byte, the first of which is in its lower half.
    write_units(team, integers + place.begin / 2, (place.count + 1) / 2, [&](unsigned pair) {
      const unsigned second = 2 * pair + 1 < place.count ? integer(2 * pair + 1) : 0U;
      return static_cast<std::uint8_t>((integer(2 * pair) & 0x0fU) | (second << 4U));
    });
  }
};

/// What was sent leaves the residual: as_is by a mark for the layer, since the next gradient is written over what is
/// there; otherwise what rounding took away stays. Does nothing if gradients came since the frame was written, and nothing
/// the second time: marks are the same then, and what is subtracted has the step beside it.
template <class T>
struct commit_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned teams_at_once = 1;
  struct shared_memory {
    staged_block<T> staged;
  };

  model_view<T> at;
  payload_type type;

  std::size_t teams() const { return 1 + teams_for(at.blocks); }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory& shared) const {
    if (team.index() == 0) {
      if (team.thread() == 0) note_phase(*at.state);
      return;
    }
    if (at.state->has_frame == 0) return;
    if (at.rounded_in != nullptr) {
      std::uint64_t& rounded_in = at.rounded_in[team.index() - 1];
      const bool is_done = rounded_in == at.state->step;
      team.barrier();
      if (is_done) return;
      if (team.thread() == 0) rounded_in = at.state->step;
    }
    for_each_block(at, team.index() - 1, [&](const block_place& place) {
      if (at.is_sent(place.layer)) commit(team, shared, place);
    });
  }

 private:
  LAMINA_HOST_DEVICE static void note_phase(step_state& state) {
    if (state.has_frame == 0) {
      state.raise(misuse::commit_without_frame);
    } else if (!lamina::detail::may_commit(state.load_phase())) {
      state.raise(misuse::commit_twice);
    } else {
      state.allowance -= static_cast<double>(state.sent_elements);
      state.store_phase(step_phase::committed);
    }
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void commit(const Team& team, shared_memory& shared, const block_place& place) const {
    if (place.begin == 0 && team.thread() == 0) {
      at.cleared_in[place.layer] = at.state->step;
      at.is_clear[place.layer] = type == payload_type::as_is;
    }
    const std::size_t offset = at.offsets[place.layer] + place.begin;
    if (type != payload_type::as_is) subtract(team, shared.staged, at.residual + offset, place.count);
    if (at.velocity == nullptr) return;
    for (unsigned i = team.thread(); i < place.count; i += team.threads()) at.velocity[offset + i] = T(0);
  }

  // Each thread what it has staged itself, 16 bytes of residual at a time.
  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void subtract(const Team& team, staged_block<T>& staged, T* block,
                                   unsigned count) const {
    stage(team, type, block, count, staged);
    for (unsigned q = team.thread(); 4 * q < count; q += team.threads()) {
      quad<T> four = staged.four[q];
      const std::uint8_t scale =
          has_blocks(type) ? staged.scale[4 * q / payload_block_elements] : std::uint8_t{0};
      for (unsigned k = 0; k < 4; ++k) {
        if (4 * q + k < count) four.at[k] = left_over(four.at[k], type, scale);
      }
      store_words(block + 4 * q, four);
    }
  }
};

/// The layers of a frame over the tensors bound, zeros for those held back.
template <class T>
struct restore_kernel {
  static constexpr unsigned threads = 256;
  static constexpr unsigned teams_at_once = 1;
  struct shared_memory {};

  model_view<T> at;
  const T* payload;

  std::size_t teams() const { return teams_for(at.blocks); }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void operator()(const Team& team, shared_memory&) const {
    if (at.state->has_frame == 0) {
      if (team.index() == 0 && team.thread() == 0) at.state->raise(misuse::restore_without_frame);
      return;
    }
    for_each_block(at, team.index(), [&](const block_place& place) {
      T* to = static_cast<T*>(at.gradients[place.layer].data) + place.begin;
      const bool is_sent = at.is_sent(place.layer);
      const T* from = is_sent ? payload + at.payload_begin[place.layer] / sizeof(T) + place.begin : nullptr;
      for (unsigned i = team.thread(); i < place.count; i += team.threads()) to[i] = is_sent ? from[i] : T(0);
    });
  }
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
