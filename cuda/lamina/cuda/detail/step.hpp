// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "lamina/cuda/detail/arithmetic.hpp"
#include "lamina/cuda/device_tensor.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/host_device.hpp"

/// What the kernels of a step share: where the tables and the memory of a model lie on the device, and how a block of
/// reduction.hpp is found.
namespace lamina::inline LAMINA_ABI::cuda::detail {

using lamina::detail::block_elements;
using lamina::detail::lanes;
using lamina::detail::totals_per_run;

using lamina::detail::step_phase;

/// Launches that came out of order where the host could not see it, since they were parts of graphs. A kernel that finds one
/// changes nothing that was not sent, and leaves a bit for the next last_step().
enum class misuse : std::uint32_t {
  select_without_gradients = 1U << 0U,
  other_selection = 1U << 1U,
  encode_without_selection = 1U << 2U,
  commit_without_frame = 1U << 3U,
  commit_twice = 1U << 4U,
  restore_without_frame = 1U << 5U,
};

inline constexpr const char* other_selection_sentence =
    "select: this step was decided before in another way; own values, agreed ones, and agreed ones with "
    "these or "
    "those layers held do not mix within a step";

/// A sentence for each bit.
inline std::string described(std::uint32_t misuses) {
  static constexpr std::pair<misuse, const char*> sentences[] = {
      {misuse::select_without_gradients,
       "select: was launched without gradients since the last commit, and did nothing"},
      {misuse::other_selection, other_selection_sentence},
      {misuse::encode_without_selection,
       "encode: was launched without a selection since the last gradients or commit, and wrote no frame"},
      {misuse::commit_without_frame,
       "commit: was launched without a frame of the residual as it is; it did nothing, or it would have "
       "discarded gradients "
       "that came later"},
      {misuse::commit_twice, "commit: was launched twice for one frame; the second did nothing"},
      {misuse::restore_without_frame,
       "restore: was launched without a frame since the last gradients, and did nothing"},
  };
  std::string all = "launched out of order:";
  for (const auto& [bit, sentence] : sentences) {
    if ((misuses & static_cast<std::uint32_t>(bit)) == 0) continue;
    if (all.back() != ':') all += ';';
    all += ' ';
    all += sentence;
  }
  return all;
}

/// What a step is decided by.
enum class selection_kind : std::uint32_t { own_values, agreed_values, agreed_but_for_held };

/// What is known between steps, and of the last one. How far a step has come is known here as well as on the host, since
/// the launches of a graph do not pass by the host's checks. Several teams of a launch read a word that one of them writes
/// only where both of its values tell them the same, hence two words: `phase` is written by commit and read by encode,
/// `has_frame` the other way round. An accumulation writes both when all of its teams have read them.
struct step_state {
  std::uint64_t step = 0;
  double threshold = 0;
  double allowance = 0;
  std::uint64_t sent_elements = 0;
  std::uint64_t payload_bytes = 0;
  unsigned long long left_out_elements = 0;
  std::uint64_t refused_batches = 0;
  std::uint32_t phase = static_cast<std::uint32_t>(step_phase::committed);
  std::uint32_t has_frame = 0;  // 1: of the residual as it is, or as it was before that frame was committed
  selection_kind selected_by = selection_kind::own_values;
  std::uint32_t misuse = 0;      // bits
  std::uint32_t is_refused = 0;  // 1: the last gradients, so that no step has begun since the last commit

  // Relaxed: a word of its own, ordered by the launches alone.
  LAMINA_HOST_DEVICE step_phase load_phase() const {
#if defined(__CUDA_ARCH__)
    return static_cast<step_phase>(*static_cast<const volatile std::uint32_t*>(&phase));
#else
    return static_cast<step_phase>(__atomic_load_n(&phase, __ATOMIC_RELAXED));
#endif
  }
  LAMINA_HOST_DEVICE void store_phase(step_phase now) {
#if defined(__CUDA_ARCH__)
    *static_cast<volatile std::uint32_t*>(&phase) = static_cast<std::uint32_t>(now);
#else
    __atomic_store_n(&phase, static_cast<std::uint32_t>(now), __ATOMIC_RELAXED);
#endif
  }
  /// By one thread of a launch. Where gradients were refused, what comes in their step has nothing to do, which is no misuse.
  LAMINA_HOST_DEVICE void raise(detail::misuse what) {
    if (is_refused != 0) return;
    misuse |= static_cast<std::uint32_t>(what);
  }
};

/// A tensor as kernels see it.
struct tensor_view {
  void* data = nullptr;
  device_element type = device_element::float32;
};

/// Where a block of elements lies.
struct block_place {
  std::uint32_t layer;
  std::uint32_t count;
  std::size_t begin;  // in the residual
};

/// Passed to kernels by value; everything it points to is device memory. L layers (or parts), B blocks.
template <class T>
struct model_view {
  std::size_t layers = 0;
  std::size_t blocks = 0;
  std::size_t elements = 0;
  const std::size_t* sizes = nullptr;        // L
  const std::size_t* offsets = nullptr;      // L: where a layer begins in the residual
  const std::size_t* first_block = nullptr;  // L + 1
  const block_place* places = nullptr;       // B
  const tensor_view* gradients = nullptr;    // L
  T* residual = nullptr;
  T* velocity = nullptr;           // none without momentum
  double* block_totals = nullptr;  // B
  std::uint32_t* arrivals =
      nullptr;  // B + 1, zero between launches: at runs of totals, and of the teams of a launch
  unsigned long long* left_out = nullptr;  // L: elements so far
  std::uint8_t* is_clear = nullptr;        // L: the residual is zero, whatever its memory holds
  std::uint64_t* cleared_in = nullptr;     // L: the step in which a layer was last sent
  std::uint8_t* bitmap = nullptr;          // as on the wire; part of the prefix
  std::size_t* payload_begin = nullptr;    // L: of the layers sent, in bytes
  std::uint64_t* rounded_in =
      nullptr;                  // B: the step that commit took out of a block; none where payloads are as_is
  std::byte* prefix = nullptr;  // header and bitmap of the frame
  std::size_t prefix_bytes = 0;
  step_state* state = nullptr;

  LAMINA_HOST_DEVICE bool is_sent(std::size_t layer) const {
    return ((bitmap[layer / 8] >> (layer % 8)) & 1U) != 0;
  }
};

/// A number of the gradient as a T.
template <class T, class G>
LAMINA_HOST_DEVICE T widened(G from) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<G, lamina::float16>) {  // the same number, by one instruction
    float number;
    asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(from.bits));
    return static_cast<T>(number);
  }
#endif
  if constexpr (lamina::half_element<G>) {
    return static_cast<T>(to_float(from));
  } else {
    return from;
  }
}

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
