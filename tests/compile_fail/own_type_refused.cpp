// SPDX-License-Identifier: MIT
// EXPECT: my_tensor lies on another machine: call .fetch()

#include <span>
#include <vector>

#include "lamina/residual.hpp"

struct my_tensor {
  std::vector<float> fetch() const { return {}; }
};
template <class T>
requires std::same_as<T, my_tensor>
struct lamina::tensor_traits<T> {
  struct refusal {
    static_assert(sizeof(T) == 0, "my_tensor lies on another machine: call .fetch()");
  };
};

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const my_tensor t{};
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, t);
#else
  residual.accumulate(0, t.fetch());
#endif
}
