// SPDX-License-Identifier: MIT
// EXPECT: lamina: the tensor is const, or a view of const elements, and would be written to. Pass one that may be written

#include <span>
#include <vector>

#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  std::vector<float> t(3);
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, std::span<const float>(t));
#else
  frame.restore(0, std::span<float>(t));
#endif
}
