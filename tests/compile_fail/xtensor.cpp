// SPDX-License-Identifier: MIT
#include "adapt/xtensor_headers.hpp"

#include "cases.hpp"
#include "lamina/adapt/xtensor.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"

int main() {
  lamina::worker<float> worker(lamina::layout({{"a", {3}}}));
  const lamina::frame_view<float> frame;
  const xt::xtensor<float, 1> a = {1, 2, 3};
  xt::xtensor<float, 2> matrix = {{1, 2, 3}, {4, 5, 6}};
  const xt::xtensor<float, 2> constant = matrix;
  xt::xarray<float> row = {0, 0, 0};

  // clang-format off
  // EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view
  worker.begin().add(0, LAMINA_REFUSED(2 * a + a) LAMINA_WANTED(xt::eval(2 * a + a)));
  // EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view
  worker.begin().add(0, LAMINA_REFUSED(xt::view(constant, 1, xt::all())) LAMINA_WANTED(xt::eval(xt::view(constant, 1, xt::all()))));
  // EXPECT: lamina: an xtensor view or lazy expression has no elements in one piece of memory. Pass xt::eval(expression); to write into a view, write into an xt::xarray and assign that to the view
  frame.restore(0, LAMINA_REFUSED(xt::view(matrix, 1, xt::all())) LAMINA_WANTED(row));
  xt::view(matrix, 1, xt::all()) = row;
  // clang-format on
}
