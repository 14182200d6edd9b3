// SPDX-License-Identifier: MIT
// EXPECT: lamina: the elements of the expression are neither float nor double. Pass xt::cast<float>(expression)

#include "../adapt/xtensor_headers.hpp"
#include "lamina/adapt/xtensor.hpp"
#include "lamina/representative.hpp"

int main() {
  const xt::xtensor<int, 1> a = {1, 2, 3};
#ifdef LAMINA_SHOULD_FAIL
  lamina::mean_abs{}(2 * a);
#else
  lamina::mean_abs{}(xt::cast<float>(2 * a));
#endif
}
