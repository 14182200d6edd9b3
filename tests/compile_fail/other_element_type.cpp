// SPDX-License-Identifier: MIT
// EXPECT: lamina: the tensor's element type is not the one asked for. Pass a converted copy, or use the class (decode<double>, worker<double>, ...) of the tensor's type

#include <vector>

#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  std::vector<double> doubles(3);
  std::vector<float> floats(3);
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, doubles);
#else
  frame.restore(0, floats);
#endif
}
