// SPDX-License-Identifier: MIT
#pragma once

#include <cuda_runtime_api.h>

#include <source_location>
#include <stdexcept>
#include <string>

#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::cuda {

/// A call of CUDA failed: what() names the error and the line of the call.
class cuda_error : public std::runtime_error {
 public:
  cuda_error(cudaError_t code, const std::source_location& place)
      : std::runtime_error(std::string(cudaGetErrorName(code)) + ": " + cudaGetErrorString(code) + ", at " +
                           place.file_name() + ":" + std::to_string(place.line())),
        code_(code) {}
  cudaError_t code() const noexcept { return code_; }

 private:
  cudaError_t code_;
};

/// Throws cuda_error, with the place of this call, unless `code` is cudaSuccess.
inline void check_error(cudaError_t code,
                        const std::source_location& place = std::source_location::current()) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next check would find it again
  throw cuda_error(code, place);
}

}  // namespace lamina::inline LAMINA_ABI::cuda
