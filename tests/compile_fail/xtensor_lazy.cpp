// SPDX-License-Identifier: MIT
// EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view

#include "../adapt/xtensor_headers.hpp"
#include "lamina/adapt/xtensor.hpp"
#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const xt::xtensor<float, 1> a = {1, 2, 3};
#ifdef LAMINA_SHOULD_FAIL
  worker.begin().add(0, 2 * a + a);
#else
  worker.begin().add(0, xt::eval(2 * a + a));
#endif
}
