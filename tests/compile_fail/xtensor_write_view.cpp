// SPDX-License-Identifier: MIT
// EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view

#include "../adapt/xtensor_headers.hpp"
#include "lamina/adapt/xtensor.hpp"
#include "lamina/codec.hpp"

int main() {
  const lamina::frame_view<float> frame;
  xt::xtensor<float, 2> a = {{1, 2, 3}, {4, 5, 6}};
  xt::xarray<float> row = {0, 0, 0};
#ifdef LAMINA_SHOULD_FAIL
  frame.restore(0, xt::view(a, 1, xt::all()));
#else
  frame.restore(0, row), xt::view(a, 1, xt::all()) = row;
#endif
}
