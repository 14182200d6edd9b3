// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// What the library computes of one gradient and another, built once with SIMD for the widest registers of this machine and
/// once without: kernels_built.cpp. No type of the library stands here, since the two builds have each their own.
namespace lamina_fuzz {

struct kernel_case {
  std::size_t offset = 0;  ///< elements before the layer in the residual
  bool skips = false;
  bool is_clear = false;  ///< the first gradient is not added
  double momentum = 0;
  unsigned payload = 0;
};

struct kernel_results {
  std::vector<double> values;         ///< of every functor and pass
  std::vector<double> elements;       ///< the residual after each pass, and at the end with the velocity
  std::vector<std::uint8_t> payload;  ///< the residual as it is sent, if it is finite
};

kernel_results with_registers(const kernel_case& of, std::span<const float> first,
                              std::span<const float> second);
kernel_results with_registers(const kernel_case& of, std::span<const double> first,
                              std::span<const double> second);
kernel_results without_registers(const kernel_case& of, std::span<const float> first,
                                 std::span<const float> second);
kernel_results without_registers(const kernel_case& of, std::span<const double> first,
                                 std::span<const double> second);

}  // namespace lamina_fuzz
