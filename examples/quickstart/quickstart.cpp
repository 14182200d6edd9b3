// SPDX-License-Identifier: MIT
// One worker and one server in one process: what goes over the wire, and what stays for later.
#include <cstdio>
#include <lamina/lamina.hpp>
#include <vector>

int main() {
  const lamina::layout model({{"embedding", {1000, 64}}, {"head.weight", {10, 64}}, {"head.bias", {10}}});
  lamina::gradient_compressor<float> worker(model, {.drop_ratio = 0.995});
  auto server = lamina::gradient_aggregator<float>::of_workers(model, 1);

  const std::vector<std::vector<float>> gradients = {
      std::vector<float>(64000, 0.001f), std::vector<float>(640, 0.1f), std::vector<float>(10, 0.2f)};
  for (std::size_t l = 0; l < model.layers(); ++l) worker.accumulate(l, gradients[l]);

  const std::vector<std::byte> bytes = worker.encode().to_bytes();  // or send its segments() without a copy
  worker.commit();                                                  // the send has completed

  server.add(lamina::decode<float>(bytes, model));
  std::printf("sent %zu of %zu bytes\n", bytes.size(), model.elements() * sizeof(float));
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::printf("%-12s %s, residual %g\n", model[l].name.c_str(),
                server.arrived().is_sent(l) ? "sent whole" : "held back ",
                lamina::mean_abs{}(worker.residual()[l]));
  }
}
