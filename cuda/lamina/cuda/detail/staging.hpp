// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/copy.h>
#include <thrust/device_ptr.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <type_traits>

#include "lamina/cuda/detail/thrust.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// Host memory from which one copy to the device at a time is enqueued. What it holds the execution knows that has made it.
struct staging_slot {
  std::shared_ptr<void> memory;
  std::shared_ptr<void>
      copied;  // says when the last copy is done; none where copies are done when they return
};

/// An execution whose copies are done when they return, and which no graph captures.
class copies_at_once {
 public:
  staging_slot make_slot(std::size_t bytes) const {
    return {std::shared_ptr<std::byte[]>(new std::byte[bytes]), nullptr};
  }
  void wait_for(const staging_slot&) const {}
  void copy_from(const staging_slot& slot, void* to, std::size_t bytes) const {
    thrust::copy_n(static_cast<const std::byte*>(slot.memory.get()), bytes,
                   thrust::device_ptr<std::byte>(static_cast<std::byte*>(to)));
  }
  void require_no_capture(const char*) const {}
};

/// Slots that copies to the device take in turn. None is written before the copy from it is done.
class staging_ring {
 public:
  static constexpr std::size_t slots = 4;

  /// Enqueues a copy of `from`, which may go when this returns. Waits for a copy only where the last four are under way. The
  /// first call allocates, and so does one by another kind of execution than the call before.
  template <class Execution, class X>
  void copy(const Execution& execution, std::span<const X> from, X* to) {
    static_assert(std::is_trivially_copyable_v<X>);
    if (from.empty()) return;
    if (made_by_ != &kind_of<Execution> || slot_bytes_ < from.size_bytes())
      make(execution, from.size_bytes());
    const staging_slot& slot = slots_[next_];
    execution.wait_for(slot);
    std::memcpy(slot.memory.get(), from.data(), from.size_bytes());
    execution.copy_from(slot, to, from.size_bytes());
    next_ = (next_ + 1) % slots;
  }

 private:
  template <class Execution>
  static constexpr char kind_of = 0;  // its address says which

  template <class Execution>
  void make(const Execution& execution, std::size_t bytes) {
    std::array<staging_slot, slots> made;
    for (staging_slot& each : made) each = execution.make_slot(bytes);
    slots_.swap(made);
    slot_bytes_ = bytes;
    made_by_ = &kind_of<Execution>;
  }

  std::array<staging_slot, slots> slots_;
  std::size_t slot_bytes_ = 0;
  std::size_t next_ = 0;
  const char* made_by_ = nullptr;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
