// SPDX-License-Identifier: MIT
// EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view

#include "../adapt/xtensor_headers.hpp"
#include "lamina/adapt/xtensor.hpp"
#include "lamina/residual.hpp"

int main() {
  lamina::residual_accumulator<float> residual(lamina::layout({{"a", {3}}}));
  const xt::xtensor<float, 1> a = {1, 2, 3};
#ifdef LAMINA_SHOULD_FAIL
  residual.accumulate(0, 2 * a + a);
#else
  residual.accumulate(0, xt::eval(2 * a + a));
#endif
}
