// SPDX-License-Identifier: MIT
// EXPECT: my_tensor lies on another machine: call .fetch()

#include <span>
#include <vector>

#include "lamina/worker.hpp"

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
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const my_tensor t{};
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, t);
#else
  worker.begin().add(0, t.fetch());
#endif
}
