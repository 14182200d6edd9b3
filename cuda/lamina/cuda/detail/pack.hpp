// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"
#include "lamina/detail/wire_header.hpp"
#include "lamina/payload.hpp"

/// The kernels that walk the blocks of the layers sent: into a frame, out of the residual, and back from a frame.
namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Elements of a layer and how they are written: where element i of a block stands in a payload.
template <class T>
struct payload_place {
  std::byte* layer;
  std::size_t elements;  // of the layer
  std::size_t begin;     // of the block

  template <class Written>
  LAMINA_HOST_DEVICE Written* at(unsigned i) const {
    return reinterpret_cast<Written*>(layer) + begin + i;
  }
  LAMINA_HOST_DEVICE std::uint8_t* scale(unsigned i) const {
    return reinterpret_cast<std::uint8_t*>(layer) + (begin + i) / payload_block_elements;
  }
  /// The byte of an int8, or of two elements of int4, the first of which is in its lower half.
  LAMINA_HOST_DEVICE std::uint8_t* integer(unsigned i) const {
    return reinterpret_cast<std::uint8_t*>(layer) + payload_blocks(elements) + begin + i;
  }
  LAMINA_HOST_DEVICE std::uint8_t* pair(unsigned i) const {
    return reinterpret_cast<std::uint8_t*>(layer) + payload_blocks(elements) + (begin + i) / 2;
  }
};

/// The scales of a block's elements, 64 of which share one.
using block_scales = std::uint8_t[block_elements / payload_block_elements];

/// All of the team calls it, and may read the scales then, until it is called again.
LAMINA_ANY_CALLER template <class T, class Team>
LAMINA_HOST_DEVICE void find_scales(const Team& team, payload_type type, const T* block, unsigned count,
                                    block_scales& scales) {
  constexpr auto group = static_cast<unsigned>(payload_block_elements);
  team.barrier();
  for (unsigned g = team.thread(); g * group < count; g += team.threads()) {
    T largest = 0;
    for (unsigned i = g * group; i < (g + 1) * group && i < count; ++i) {
      const T magnitude = block[i] < 0 ? -block[i] : block[i];
      if (magnitude > largest) largest = magnitude;
    }
    scales[g] = type == payload_type::int4 ? lamina::detail::block_scale<T, payload_type::int4>(largest)
                                           : lamina::detail::block_scale<T, payload_type::int8>(largest);
  }
  team.barrier();
}

/// The integer that is written of an element, whose block has this scale.
template <class T>
LAMINA_HOST_DEVICE std::int8_t integer_of(T element, payload_type type, std::uint8_t scale_byte) {
  const T inverse = T(1) / lamina::detail::scale_value<T>(scale_byte);
  return type == payload_type::int4 ? lamina::detail::to_integer<T, payload_type::int4>(element, inverse)
                                    : lamina::detail::to_integer<T, payload_type::int8>(element, inverse);
}

/// What a payload of this type says of an element.
template <class T>
LAMINA_HOST_DEVICE T said_of(T element, payload_type type, std::uint8_t scale_byte) {
  switch (type) {
    case payload_type::float16:
      return to_float(lamina::detail::to_half<lamina::float16>(element));
    case payload_type::bfloat16:
      return to_float(lamina::detail::to_half<lamina::bfloat16>(element));
    case payload_type::int8:
    case payload_type::int4:
      return static_cast<T>(integer_of(element, type, scale_byte)) *
             lamina::detail::scale_value<T>(scale_byte);
    default:
      return element;
  }
}

/// What rounding took away of an element. NaN and infinity leave nothing over.
template <class T>
LAMINA_HOST_DEVICE T left_over(T element, payload_type type, std::uint8_t scale_byte) {
  const T said = said_of(element, type, scale_byte);
  return is_finite(said) ? element - said : T(0);
}

/// What a byte of int4 holds.
template <class T>
LAMINA_HOST_DEVICE std::uint8_t pair_of(T first, T second, std::uint8_t scale_byte) {
  return static_cast<std::uint8_t>((integer_of(first, payload_type::int4, scale_byte) & 0x0f) |
                                   (integer_of(second, payload_type::int4, scale_byte) << 4));
}

/// What is loaded from a residual and stored to a payload at once.
inline constexpr unsigned piece_bytes = 16;
struct alignas(piece_bytes) payload_piece {
  std::uint32_t word[piece_bytes / 4];
};

/// Elements of a piece of payload, all of which have one scale.
template <class T, payload_type Type>
constexpr unsigned elements_of_piece = Type == payload_type::as_is  ? piece_bytes / sizeof(T)
                                       : Type == payload_type::int4 ? 2 * piece_bytes
                                       : Type == payload_type::int8 ? piece_bytes
                                                                    : piece_bytes / 2;

/// The piece of elements that begin where 16 bytes can be loaded at once.
template <class T, payload_type Type>
LAMINA_HOST_DEVICE payload_piece piece_of(const T* from, std::uint8_t scale_byte) {
  constexpr unsigned count = elements_of_piece<T, Type>;
  constexpr unsigned bits = 8 * piece_bytes / count;
  constexpr unsigned loaded_at_once = piece_bytes / sizeof(T);
  struct alignas(piece_bytes) loads {
    T at[loaded_at_once];
  };
  loads loaded[count / loaded_at_once];
  for (unsigned k = 0; k < count / loaded_at_once; ++k) loaded[k] = reinterpret_cast<const loads*>(from)[k];
  if constexpr (Type == payload_type::as_is) {
    return __builtin_bit_cast(payload_piece, loaded[0]);
  } else {
    payload_piece piece = {};
    for (unsigned i = 0; i < count; ++i) {
      const T element = loaded[i / loaded_at_once].at[i % loaded_at_once];
      std::uint32_t written = 0;
      if constexpr (Type == payload_type::float16) {
        written = lamina::detail::to_half<lamina::float16>(element).bits;
      } else if constexpr (Type == payload_type::bfloat16) {
        written = lamina::detail::to_half<lamina::bfloat16>(element).bits;
      } else {
        const auto integer = static_cast<std::uint8_t>(integer_of(element, Type, scale_byte));
        written = Type == payload_type::int4 ? integer & 0x0fU : integer;
      }
      piece.word[i * bits / 32] |= written << (i * bits % 32);
    }
    return piece;
  }
}

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
  static constexpr unsigned teams_at_once = sizeof(T) == 4 ? 2 : 1;
  struct shared_memory {
    block_scales scales;
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
      if (at.is_sent(place.layer)) pack(team, shared, place);
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
  LAMINA_HOST_DEVICE void pack(const Team& team, shared_memory& shared, const block_place& place) const {
    const T* from = at.residual + at.offsets[place.layer] + place.begin;
    const payload_place<T> to = {frame + at.prefix_bytes + at.payload_begin[place.layer],
                                 at.sizes[place.layer], place.begin};
    if (has_blocks(type)) find_scales(team, type, from, place.count, shared.scales);
    switch (type) {
      case payload_type::float16:
        return write<payload_type::float16>(team, shared, from, to, place.count);
      case payload_type::bfloat16:
        return write<payload_type::bfloat16>(team, shared, from, to, place.count);
      case payload_type::int8:
        return write<payload_type::int8>(team, shared, from, to, place.count);
      case payload_type::int4:
        return write<payload_type::int4>(team, shared, from, to, place.count);
      default:
        return write<payload_type::as_is>(team, shared, from, to, place.count);
    }
  }

  // Where the block's payload begins at a multiple of 16 bytes, each thread writes as many at once, and the rest by elements.
  LAMINA_ANY_CALLER template <payload_type Type, class Team>
  LAMINA_HOST_DEVICE static void write(const Team& team, const shared_memory& shared, const T* from,
                                       const payload_place<T>& to, unsigned count) {
    constexpr unsigned at_once = elements_of_piece<T, Type>;
    std::byte* const begin = place_of_block<Type>(to);
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(begin) % piece_bytes == 0;
    const unsigned pieces = is_aligned ? count / at_once : 0;
    for (unsigned piece = team.thread(); piece < pieces; piece += team.threads()) {
      const unsigned first = piece * at_once;
      const std::uint8_t scale = scale_of<Type>(shared, first);
      if (has_blocks(Type) && first % payload_block_elements == 0) *to.scale(first) = scale;
      reinterpret_cast<payload_piece*>(begin)[piece] = piece_of<T, Type>(from + first, scale);
    }
    constexpr unsigned step = Type == payload_type::int4 ? 2 : 1;  // elements of a byte stay together
    for (unsigned i = pieces * at_once + step * team.thread(); i < count; i += step * team.threads()) {
      const std::uint8_t scale = scale_of<Type>(shared, i);
      if (has_blocks(Type) && i % payload_block_elements == 0) *to.scale(i) = scale;
      if constexpr (Type == payload_type::float16) {
        *to.template at<lamina::float16>(i) = lamina::detail::to_half<lamina::float16>(from[i]);
      } else if constexpr (Type == payload_type::bfloat16) {
        *to.template at<lamina::bfloat16>(i) = lamina::detail::to_half<lamina::bfloat16>(from[i]);
      } else if constexpr (Type == payload_type::int8) {
        *to.integer(i) = static_cast<std::uint8_t>(integer_of(from[i], Type, scale));
      } else if constexpr (Type == payload_type::int4) {
        *to.pair(i) = pair_of(from[i], i + 1 < count ? from[i + 1] : T(0), scale);
      } else {
        *to.template at<T>(i) = from[i];
      }
    }
  }

  template <payload_type Type>
  LAMINA_HOST_DEVICE static std::byte* place_of_block(const payload_place<T>& to) {
    if constexpr (Type == payload_type::int8) {
      return reinterpret_cast<std::byte*>(to.integer(0));
    } else if constexpr (Type == payload_type::int4) {
      return reinterpret_cast<std::byte*>(to.pair(0));
    } else if constexpr (Type == payload_type::as_is) {
      return reinterpret_cast<std::byte*>(to.template at<T>(0));
    } else {
      return reinterpret_cast<std::byte*>(to.template at<std::uint16_t>(0));
    }
  }

  template <payload_type Type>
  LAMINA_HOST_DEVICE static std::uint8_t scale_of(const shared_memory& shared, unsigned i) {
    return has_blocks(Type) ? shared.scales[i / payload_block_elements] : std::uint8_t{0};
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
    block_scales scales;
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
    if (type != payload_type::as_is) subtract(team, shared, at.residual + offset, place.count);
    if (at.velocity == nullptr) return;
    for (unsigned i = team.thread(); i < place.count; i += team.threads()) at.velocity[offset + i] = T(0);
  }

  LAMINA_ANY_CALLER template <class Team>
  LAMINA_HOST_DEVICE void subtract(const Team& team, shared_memory& shared, T* block, unsigned count) const {
    if (has_blocks(type)) find_scales(team, type, block, count, shared.scales);
    for (unsigned i = team.thread(); i < count; i += team.threads()) {
      const std::uint8_t scale =
          has_blocks(type) ? shared.scales[i / payload_block_elements] : std::uint8_t{0};
      block[i] = left_over(block[i], type, scale);
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
