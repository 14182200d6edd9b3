// SPDX-License-Identifier: MIT
// A worker, the decoder and the server for LAMINA_TEST_ELEMENT, in the namespace LAMINA_TEST_UNIT: compiled in several
// configurations, two of which are linked into one program.
#include "unit.hpp"

#include <cstddef>
#include <lamina/lamina.hpp>
#include <span>
#include <string>
#include <system_error>
#include <vector>

namespace LAMINA_TEST_UNIT {

using element = LAMINA_TEST_ELEMENT;

// Of four layers with growing gradients the last two are sent in each step and the others wait. All is dyadic and so exact.
bool works() {
  const lamina::layout model({{"a", {5000}}, {"b", {5000}}, {"c", {9000}}, {"d", {9000}}});
  lamina::worker<element> worker(model, {.drop_ratio = 0.4});
  lamina::server<element> server(model);
  std::vector<std::vector<element>> gradients;
  for (std::size_t l = 0; l < model.layers(); ++l)
    gradients.emplace_back(model.sizes()[l], static_cast<element>(l * l) / 16);
  for (int t = 1; t <= 2; ++t) {
    auto step = worker.add(gradients);
    if (server.add(step.frame().to_bytes())) return false;
    step.commit();
    std::size_t right = 0;
    server.update([&](std::size_t l, std::size_t, std::span<const element> mean) {
      for (const element each : mean) right += each == gradients[l][0];
    });
    if (right != 18'000 || worker.residual()[1][4999] != gradients[1][0] * static_cast<element>(t))
      return false;
  }
  return true;
}

std::string own_sentence() {
  std::error_code error;
  (void)lamina::decode<element>(std::span<const std::byte>{}, lamina::layout({}), error);
  return error.message();
}

}  // namespace LAMINA_TEST_UNIT
