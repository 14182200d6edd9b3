// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>

#include "lamina/cuda/device_tensor.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// What is known of a worker's last step.
struct step_report {
  std::uint64_t step = 0;  ///< counted from 1
  double threshold = 0;
  std::uint64_t sent_elements = 0;
  std::uint64_t payload_bytes = 0;           ///< of the frame, which is prefix_bytes() longer
  unsigned long long left_out_elements = 0;  ///< so far, since their sums would not have been finite
  std::uint64_t refused_batches = 0;         ///< so far, by *found_inf
  bool is_refused = false;  ///< the last one, and no step has begun since the commit before it
};

/// What the kernels of a step share: how far it has come, and where the tables and the memory of a worker lie.
namespace detail {

using lamina::detail::block_elements;
using lamina::detail::lanes;
using lamina::detail::totals_per_run;

/// How far a step has come. The host's calls check it, and each launch, since those of a graph do not pass by the calls: one that is
/// out of order does nothing but set step_state::is_misused.
enum class step_phase : std::uint32_t {
  none,  ///< no step has begun
  refused,  ///< nor now, the gradients being refused: what is launched after them has nothing to do, which is no misuse
  adding,  ///< has gradients
  selected,
  encoded,    ///< there is a frame of the residual as it is,
  committed,  ///< or as it was before that frame was committed
};

LAMINA_HOST_DEVICE constexpr bool may_select(step_phase now) {
  return now == step_phase::adding || now == step_phase::selected || now == step_phase::encoded;
}
LAMINA_HOST_DEVICE constexpr bool may_encode(step_phase now) {
  return now == step_phase::selected || now == step_phase::encoded;
}
LAMINA_HOST_DEVICE constexpr bool has_frame(step_phase now) {
  return now == step_phase::encoded || now == step_phase::committed;
}

/// What is known between steps, and of the last one. Thread blocks of encode read the phase while one of them writes it, and both of
/// its values tell them to go on. add and commit write it when all have read it.
struct step_state : step_report {
  double allowance = 0;
  double threshold_before = 0, allowance_before = 0;  // the last decision
  std::uint32_t phase = static_cast<std::uint32_t>(step_phase::none);
  std::uint32_t is_misused = 0;

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
  /// The step was decided and not committed: the next one has its number.
  LAMINA_HOST_DEVICE void give_back() {
    --step;
    threshold = threshold_before;
    allowance = allowance_before;
  }
  /// By one thread of a launch that is out of order.
  LAMINA_HOST_DEVICE void set_misused() {
    if (load_phase() != step_phase::refused) is_misused = 1;
  }
};

struct tensor_view {
  void* data = nullptr;
  device_element type = device_element::float32;
};

struct block_place {
  std::uint32_t layer;
  std::uint32_t count;
  std::size_t begin;  // in the residual
};

/// A layer as a search sees it. Without elements it counts for nothing.
struct alignas(16) candidate {
  unsigned long long key;
  unsigned long long elements;
};

/// Passed to kernels by value; everything it points to is device memory. B blocks in L layers, which are fragments where they are cut.
template <class T>
struct model_view {
  std::size_t layers = 0;
  std::size_t blocks = 0;
  std::size_t elements = 0;
  std::size_t largest_layer = 0;
  std::size_t prefix_bytes = 0;
  const std::size_t* sizes = nullptr;        // L
  const std::size_t* offsets = nullptr;      // L: where a layer begins in the residual
  const std::size_t* first_block = nullptr;  // L + 1
  const block_place* places = nullptr;       // B
  const tensor_view* gradients = nullptr;    // L
  T* residual = nullptr;
  T* velocity = nullptr;              // none without momentum
  double* values = nullptr;           // L
  double* block_totals = nullptr;     // B
  std::uint32_t* arrivals = nullptr;  // B + 1: at runs of totals, and of thread blocks; 0 between launches
  std::uint8_t* is_clear = nullptr;   // L: the residual is zero, whatever its memory holds
  std::uint64_t* sent_in = nullptr;   // L: the step in which a layer was last sent
  const std::uint8_t* always_sent = nullptr;  // L: not 0 for layers sent in every step; or none
  const double* warm_up = nullptr;            // R of its steps but the last
  candidate* candidates = nullptr;            // 2 L
  std::size_t* payload_begin = nullptr;       // L: of the layers sent, in bytes
  std::byte* prefix = nullptr;                // header and bitmap of the frame
  std::uint8_t* bitmap = nullptr;             // in the prefix
  step_state* state = nullptr;

  LAMINA_HOST_DEVICE bool is_sent(std::size_t layer) const {
    return ((bitmap[layer / 8] >> (layer % 8)) & 1U) != 0;
  }
};

}  // namespace detail

}  // namespace lamina::inline LAMINA_ABI::cuda
