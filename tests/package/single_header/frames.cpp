// SPDX-License-Identifier: MIT
// Takes gradients from a worker to a server and prints the bytes in between.
#ifdef SINGLE_HEADER
#include <lamina_single.hpp>
#else
#include <lamina/lamina.hpp>
#endif

#include <cstdio>
#include <vector>

int main() {
  const lamina::layout model({{"embedding", {100, 8}}, {"head.weight", {10, 8}}, {"head.bias", {10}}});
  lamina::worker<float> worker(model, {.drop_ratio = 0.9});
  const std::vector<std::vector<float>> gradients = {
      std::vector<float>(800, 0.001f), std::vector<float>(80, 0.25f), std::vector<float>(10, 0.5f)};
  auto step = worker.add(gradients);
  const std::vector<std::byte> bytes = step.frame().to_bytes();
  step.commit();

  lamina::server<float> server(model);
  if (server.add(bytes)) return 1;
  if (server.arrived().is_sent(0) || !server.arrived().is_sent(1) || worker.residual()[0][799] != 0.001f)
    return 1;
  for (const std::byte byte : bytes) std::printf("%02x", std::to_integer<unsigned>(byte));
  std::printf("\n");
}
