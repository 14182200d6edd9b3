// SPDX-License-Identifier: MIT
#include <cstddef>
#include <span>
#include <vector>

#include "adapted.hpp"
#include "lamina/tensor.hpp"

// The example in the comment of tensor.hpp, word for word: CMakeLists.txt takes it from there.
#include "documented_tensor.inc"

TEST_CASE("own tensor: the specialisation that tensor.hpp documents works as it stands there") {
  auto memory = lamina_test::adapted_values<float>();
  const auto values = memory;
  my_tensor tensor{memory.data(), memory.size()};
  lamina_test::require_tensor(tensor, memory.data(), values);
}
