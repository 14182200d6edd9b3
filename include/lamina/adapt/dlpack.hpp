// SPDX-License-Identifier: MIT
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <variant>

#include "lamina/tensor.hpp"

/// DLPack, the struct in which frameworks hand tensors to each other (PyTorch, JAX, CuPy, TensorFlow, MXNet): a DLTensor, and the managed
/// forms, are read and written where they lie, without a copy.
///
///     auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
///     step.add(l, *managed);
///
/// In host memory, contiguous in row-major order, of float32, float64, or, for gradients, float16 or bfloat16: everything else throws
/// std::invalid_argument that says what is wrong. A const one is read only, and so is a DLManagedTensorVersioned with the flag for that.
/// Nothing is owned: calling the deleter stays the caller's.
namespace lamina::inline LAMINA_ABI {

namespace detail {

inline const DLTensor& described(const DLTensor& tensor, bool) {
  return tensor;
}
inline const DLTensor& described(const DLManagedTensor& managed, bool) {
  return managed.dl_tensor;
}
#if defined(DLPACK_MAJOR_VERSION) && DLPACK_MAJOR_VERSION >= 1
inline const DLTensor& described(const DLManagedTensorVersioned& managed, bool is_read) {
  // Of another major version nothing but the version may be looked at.
  if (managed.version.major != DLPACK_MAJOR_VERSION)
    refuse_tensor("the DLPack tensor is of version ", managed.version.major, ", not ", DLPACK_MAJOR_VERSION);
  if (!is_read && (managed.flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0)
    refuse_tensor("the DLPack tensor is read only: to read it, pass it as const");
  return managed.dl_tensor;
}
#endif

template <class T>
concept dlpack_tensor = requires(const T& each) {
  described(each, true);
};

}  // namespace detail

template <detail::dlpack_tensor Tensor>
struct tensor_traits<Tensor> {
  template <class Self>
  static auto elements(Self& given) {
    return read<std::is_const_v<Self>>(detail::described(given, std::is_const_v<Self>));
  }

 private:
  template <bool IsConst, class... T>
  using spans = std::variant<std::span<std::conditional_t<IsConst, const T, T>>...>;

  template <bool IsConst>
  static spans<IsConst, float, double, float16, bfloat16> read(const DLTensor& tensor) {
    const DLDeviceType device = tensor.device.device_type;
    if (device != kDLCPU && device != kDLCUDAHost && device != kDLROCMHost) {
      detail::refuse_tensor("the DLPack tensor is not in host memory (device type ", static_cast<int>(device),
                            "): copy it to the CPU");
    }
    const DLDataType type = tensor.dtype;
    if (type.lanes != 1)
      detail::refuse_tensor("the DLPack tensor holds vectors of ", type.lanes, " lanes, not numbers");
    if (type.code == kDLFloat && type.bits == 32) return elements_of_type<float>(tensor);
    if (type.code == kDLFloat && type.bits == 64) return elements_of_type<double>(tensor);
    if (type.code == kDLFloat && type.bits == 16) return elements_of_type<float16>(tensor);
    if (type.code == kDLBfloat && type.bits == 16) return elements_of_type<bfloat16>(tensor);
    detail::refuse_tensor("the DLPack tensor holds elements of ", type.bits, " bits of the type code ",
                          type.code, ", not float32, float64, float16 or bfloat16: convert it");
  }

  template <class T>
  static std::span<T> elements_of_type(const DLTensor& tensor) {
    if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr))
      detail::refuse_tensor("the DLPack tensor has ", tensor.ndim, " dimensions, and no shape for them");
    const std::span<const std::int64_t> shape(tensor.shape, static_cast<std::size_t>(tensor.ndim));
    const auto extent_of = [&](std::size_t d) { return shape[d]; };
    const auto stride_of = [&](std::size_t d) { return tensor.strides[d]; };
    if (detail::product_of(shape) > 0 && tensor.strides != nullptr &&
        !detail::is_dense(shape.size(), extent_of, stride_of))
      detail::refuse_tensor("the DLPack tensor is not contiguous in row-major order: pass a contiguous copy");
    auto* const begin = static_cast<std::byte*>(tensor.data);
    if (begin == nullptr) return view(static_cast<T*>(nullptr), shape);
    if (reinterpret_cast<std::uintptr_t>(begin + tensor.byte_offset) % alignof(T) != 0) {
      detail::refuse_tensor("the DLPack tensor does not begin at a multiple of the ", alignof(T),
                            " bytes that its elements have");
    }
    return view(reinterpret_cast<T*>(begin + tensor.byte_offset), shape);
  }
};

}  // namespace lamina::inline LAMINA_ABI
