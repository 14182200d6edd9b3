// SPDX-License-Identifier: MIT
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"

/// DLPack, the struct in which frameworks hand tensors to each other (PyTorch, JAX, CuPy, TensorFlow, MXNet): a DLTensor, and
/// the managed forms, are tensors of lamina, read and written where they lie, without a copy.
///
///     auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
///     step.add(l, *managed);
///
/// Host memory alone (kDLCPU, kDLCUDAHost, kDLROCMHost), contiguous in row-major order, of float32, float64, float16 or
/// bfloat16: everything else throws std::invalid_argument that says what is wrong. A const one is read only, and so is a
/// DLManagedTensorVersioned with the flag for that. float16 and bfloat16 are for gradients: elements_of<float>, and what
/// writes, refuse them.
///
/// Nothing is owned: calling the deleter stays the caller's.
namespace lamina::inline LAMINA_ABI {

namespace detail {

template <bool IsConst>
struct dlpack_reader {
  template <class T>
  using span_of = std::span<std::conditional_t<IsConst, const T, T>>;
  using elements = std::variant<span_of<float>, span_of<double>, span_of<float16>, span_of<bfloat16>>;

  static elements read(const DLTensor& tensor) {
    const DLDeviceType device = tensor.device.device_type;
    if (device != kDLCPU && device != kDLCUDAHost && device != kDLROCMHost) {
      detail::raise(std::invalid_argument("the DLPack tensor is not in host memory (device type " +
                                          std::to_string(static_cast<int>(device)) +
                                          "): copy it to the CPU"));
    }
    const DLDataType type = tensor.dtype;
    if (type.lanes != 1) {
      detail::raise(std::invalid_argument("the DLPack tensor holds vectors of " + std::to_string(type.lanes) +
                                          " lanes, not numbers"));
    }
    if (type.code == kDLFloat && type.bits == 32) return elements_of_type<float>(tensor);
    if (type.code == kDLFloat && type.bits == 64) return elements_of_type<double>(tensor);
    if (type.code == kDLFloat && type.bits == 16) return elements_of_type<float16>(tensor);
    if (type.code == kDLBfloat && type.bits == 16) return elements_of_type<bfloat16>(tensor);
    detail::raise(std::invalid_argument("the DLPack tensor holds elements of " + std::to_string(type.bits) +
                                        " bits of the type code " + std::to_string(type.code) +
                                        ", not float32, float64, float16 or bfloat16: convert it"));
  }

 private:
  template <class T>
  static elements elements_of_type(const DLTensor& tensor) {
    if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
      detail::raise(std::invalid_argument("the DLPack tensor has " + std::to_string(tensor.ndim) +
                                          " dimensions, and no shape for them"));
    }
    const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
    const std::size_t count = checked_product(shape);
    if (count > 0 && !is_row_major(tensor, shape)) {
      detail::raise(std::invalid_argument(
          "the DLPack tensor is not contiguous in row-major order: pass a contiguous copy; to write into it, "
          "write into a contiguous one and copy that"));
    }
    if (tensor.data == nullptr) return span_of<T>(checked_view(static_cast<T*>(nullptr), shape));
    void* const begin = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    if (reinterpret_cast<std::uintptr_t>(begin) % alignof(T) != 0) {
      detail::raise(std::invalid_argument("the DLPack tensor does not begin at a multiple of the " +
                                          std::to_string(alignof(T)) + " bytes that its elements have"));
    }
    return span_of<T>(checked_view(static_cast<T*>(begin), shape));
  }

  // A dimension of 1 may have any stride.
  static bool is_row_major(const DLTensor& tensor, std::span<const std::int64_t> shape) {
    if (tensor.strides == nullptr) return true;
    // Of no dimension that is 0 or negative; the product of all fits in std::size_t, but not in std::int64_t.
    std::size_t expected = 1;
    for (std::size_t d = shape.size(); d > 0; --d) {
      if (shape[d - 1] != 1 && std::cmp_not_equal(tensor.strides[d - 1], expected)) return false;
      expected *= static_cast<std::size_t>(shape[d - 1]);
    }
    return true;
  }
};

}  // namespace detail

template <>
struct tensor_traits<DLTensor> {
  static auto elements(const DLTensor& tensor) { return detail::dlpack_reader<true>::read(tensor); }
  static auto elements(DLTensor& tensor) { return detail::dlpack_reader<false>::read(tensor); }
};

template <>
struct tensor_traits<DLManagedTensor> {
  static auto elements(const DLManagedTensor& managed) {
    return detail::dlpack_reader<true>::read(managed.dl_tensor);
  }
  static auto elements(DLManagedTensor& managed) {
    return detail::dlpack_reader<false>::read(managed.dl_tensor);
  }
};

#if defined(DLPACK_MAJOR_VERSION) && DLPACK_MAJOR_VERSION >= 1
template <>
struct tensor_traits<DLManagedTensorVersioned> {
  static auto elements(const DLManagedTensorVersioned& managed) {
    check_version(managed);
    return detail::dlpack_reader<true>::read(managed.dl_tensor);
  }
  static auto elements(DLManagedTensorVersioned& managed) {
    check_version(managed);
    if ((managed.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0) {
      detail::raise(std::invalid_argument("the DLPack tensor is read only: to read it, pass it as const"));
    }
    return detail::dlpack_reader<false>::read(managed.dl_tensor);
  }

 private:
  // Of another major version nothing but the version may be looked at.
  static void check_version(const DLManagedTensorVersioned& managed) {
    if (managed.version.major != DLPACK_MAJOR_VERSION) {
      detail::raise(std::invalid_argument("the DLPack tensor is of version " +
                                          std::to_string(managed.version.major) + ", not " +
                                          std::to_string(DLPACK_MAJOR_VERSION)));
    }
  }
};
#endif

/// The layer of a named DLPack tensor: its name and shape. Throws std::invalid_argument, naming it, for a negative
/// dimension, a negative number of them, or no shape.
[[nodiscard]] inline layer layer_of(std::string name, const DLTensor& tensor) {
  layer made{std::move(name), {}};
  if (tensor.ndim < 0) {
    detail::raise(std::invalid_argument("layer '" + made.name + "': the DLPack tensor has " +
                                        std::to_string(tensor.ndim) + " dimensions"));
  }
  for (int d = 0; d < tensor.ndim; ++d) {
    if (tensor.shape == nullptr || tensor.shape[d] < 0) {
      detail::raise(std::invalid_argument("layer '" + made.name + "': dimension " + std::to_string(d) +
                                          " of the DLPack tensor is missing or negative"));
    }
    made.shape.push_back(static_cast<std::size_t>(tensor.shape[d]));
  }
  return made;
}

}  // namespace lamina::inline LAMINA_ABI
