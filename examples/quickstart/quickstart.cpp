// SPDX-License-Identifier: MIT
// One worker and one server in one process: what goes over the wire, and what stays for later.
#include <cstdio>
#include <lamina/lamina.hpp>
#include <vector>

int main() {
  const lamina::layout model({{"embedding", {1000, 64}}, {"head.weight", {10, 64}}, {"head.bias", {10}}});
  lamina::worker<float> worker(model, {.drop_ratio = 0.995});
  lamina::server<float> server(model);

  auto step =
      worker.add(std::vector{std::vector(64000, 0.001f), std::vector(640, 0.1f), std::vector(10, 0.2f)});
  std::vector<std::byte> bytes = step.frame().to_bytes();  // or send its segments() without a copy
  step.commit();                                           // the send has completed

  std::printf("sent %zu of %zu bytes\n", bytes.size(), model.elements() * sizeof(float));
  if (const auto error = server.add(std::move(bytes))) return error.value();
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::printf("%-12s %s, residual %g\n", model[l].name.c_str(),
                server.arrived().is_sent(l) ? "sent whole" : "dropped   ", worker.residual()[l].front());
  }
}
