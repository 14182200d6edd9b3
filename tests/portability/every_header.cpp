// SPDX-License-Identifier: MIT
// All of include/, but for the adapters of other libraries.
#include <lamina/bounded/bounded.hpp>
#include <lamina/collectives/collectives.hpp>
#include <lamina/lamina.hpp>
#include <lamina/local/local.hpp>
#if defined(__linux__)
#include <lamina/udp/udp.hpp>
#endif

// A worker and its server, so that their templates are compiled, too.
template class lamina::worker<float, lamina::mean_abs>;
template class lamina::server<double>;
template class lamina::local_delta<float, lamina::mean_abs>;

bool replies(const lamina::layout& model, const std::vector<std::vector<float>>& gradients) {
  lamina::worker<float> worker(model);
  lamina::server<float> server(model);
  auto step = worker.add(gradients);
  if (!step || server.add(step.frame().to_bytes())) return false;
  step.commit();
  server.update([](std::size_t, std::size_t, std::span<const float>) {});
  return server.reply(0, gradients).size_bytes() > 0;
}
