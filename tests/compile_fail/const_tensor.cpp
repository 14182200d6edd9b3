// SPDX-License-Identifier: MIT
// EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written

#include <vector>

#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  std::vector<float> writable(3);
  const std::vector<float> constant(3);
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, constant);
#else
  frame.restore(0, writable);
#endif
}
