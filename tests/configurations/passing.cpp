// SPDX-License-Identifier: MIT
// What a program may pass from one unit to another: as a parameter, as a result, as a variable.
#include <cstddef>
#include <lamina/layout.hpp>

std::size_t layers_of(const lamina::layout& model);
lamina::layout made_layout();
extern const lamina::layout a_layout;

#if defined(LAMINA_TEST_USER)
int main() {
  return layers_of(made_layout()) == 1 && a_layout.layers() == 1 ? 0 : 1;
}
#else
std::size_t layers_of(const lamina::layout& model) {
  return model.layers();
}
lamina::layout made_layout() {
  return lamina::layout({{"a", {1}}});
}
const lamina::layout a_layout = made_layout();
#endif
