// SPDX-License-Identifier: MIT
// lamina as one file, for an online compiler or a program without a build system: docs/cpp.md has the command that writes it.
//
//     cmake -DINCLUDE_DIR=include -DOUTPUT=build/lamina_single.hpp -P cmake/single_header.cmake
//     g++ -std=c++20 -O2 -Ibuild examples/single_header/main.cpp -o single && ./single

#include "lamina_single.hpp"

#include <cstdio>
#include <vector>

int main() {
  const lamina::layout model({{"embedding", {1000, 64}}, {"hidden", {64, 64}}, {"head", {10, 64}}});
  lamina::worker<float> worker(model, {.drop_ratio = 0.95});
  for (int k = 1; k <= 8; ++k) {
    auto step = worker.add({std::vector<float>(64'000, 0.005F), std::vector<float>(4'096, 0.02F),
                            std::vector<float>(640, 0.1F)});
    const std::vector<std::byte> bytes = step.frame().to_bytes();
    const auto frame = lamina::decode<float>(bytes, model);  // as the server does
    std::printf("step %d: %zu bytes instead of %zu;", k, bytes.size(), model.elements() * sizeof(float));
    for (std::size_t layer = 0; layer < model.layers(); ++layer) {
      std::printf(" %s %s", model[layer].name.c_str(), frame.is_dropped(layer) ? "dropped" : "sent");
    }
    std::printf("\n");
    step.commit();
  }
}
