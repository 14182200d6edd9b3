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
  lamina::compressor_options options;
  options.drop_ratio = 0.4;
  lamina::gradient_compressor<element> worker(model, options);
  auto server = lamina::gradient_aggregator<element>::of_workers(model, 1);
  for (int step = 1; step <= 2; ++step) {
    const auto gradient = [](std::size_t l) { return static_cast<element>(l * l) / 16; };
    for (std::size_t l = 0; l < model.layers(); ++l) {
      worker.accumulate(l, std::vector<element>(model.sizes()[l], gradient(l)));
    }
    const std::vector<std::byte> bytes = worker.encode().to_bytes();
    worker.commit();
    server.add(lamina::decode<element>(bytes, model));
    std::size_t right = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      server.mean(l, [&](std::size_t, std::span<const element> mean) {
        for (const element each : mean) right += each == gradient(l);
      });
    }
    if (right != 18'000 || worker.residual()[1][4999] != gradient(1) * static_cast<element>(step))
      return false;
    server.next_step();
  }
  return true;
}

std::string own_sentence() {
  std::error_code error;
  (void)lamina::decode<element>(std::span<const std::byte>{}, lamina::layout({}), error);
  return error.message();
}

}  // namespace LAMINA_TEST_UNIT
