// SPDX-License-Identifier: MIT
// Makes every public class and calls every member template once, for clang-tidy and cppcheck, which see templates only as
// far as they are instantiated. It is compiled, and never run.
#include <array>
#include <cstddef>
#include <lamina/collectives/collectives.hpp>
#include <lamina/lamina.hpp>
#include <lamina/local/local.hpp>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

template class lamina::residual_accumulator<float>;
template class lamina::residual_accumulator<double>;
template class lamina::worker<float>;
template class lamina::worker<double, lamina::max_abs>;
template class lamina::server<float>;
template class lamina::server<double>;
template class lamina::frame_view<float>;
template class lamina::frame_view<double>;
template class lamina::frame_encoder<float>;
template class lamina::local_delta<float>;
template class lamina::outer_optimizer<float>;

namespace {

using gradient = std::vector<float>;

[[maybe_unused]] void work(lamina::worker<float>& worker) {
  std::vector<gradient> writable = {gradient(4), gradient(2)};
  const std::vector<std::optional<gradient>> gradients = {gradient(4), std::nullopt};
  const std::vector<lamina::bfloat16> halves(4);
  std::vector<float> packed;
  std::vector<lamina::bfloat16> packed_halves;
  {
    auto step = worker.add(gradients, 0.5, lamina::sequential());
    if (!step) return;
    step.values()[0] = 1;
    const std::array<char, 2> held = {0, 1};
    step.select(held);
    step.pack(packed, 2);
    step.pack(packed_halves);
    step.commit();
    step.unpack(packed, writable);
  }
  auto step = worker.begin(worker.plan());
  step.add(0, halves, 0.5);
  step.add(gradients);
  step.skip(1);
  lamina::delivery arrived(step.sent(), 4);
  arrived.lose(0, 0);
  step.commit(arrived);
  worker.load(worker.save());
  worker.apply(worker.save(), writable);
}

[[maybe_unused]] void serve(lamina::server<float>& server, std::vector<std::byte> bytes,
                            std::vector<gradient>& parameters, std::error_code& error) {
  if (lamina::peek(bytes, error).size_bytes > lamina::largest_frame_bytes<float>(server.model())) return;
  error = server.add(std::move(bytes));
  if (error || !server.complete()) return;
  server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
    parameters[l][begin] -= mean[0];
  });
  for (const std::size_t w : server.workers()) {
    const auto reply = server.reply(w, parameters);
    const std::vector<std::byte> sent = reply.to_bytes();
    const auto frame = lamina::decode<float>(sent, server.model());
    lamina::apply<float>(sent, lamina::tiling(server.model()), server.step(), parameters);
    const lamina::delivery arrived(reply.sent(), 4);
    frame.restore(0, parameters[0], arrived);
    server.commit(w, reply.clock(), arrived);
    if (!server.pending(w).empty()) server.commit(w, reply.clock());
  }
}

}  // namespace
