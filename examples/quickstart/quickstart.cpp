// SPDX-License-Identifier: MIT
// Two workers and a parameter server in one process, over ten layers, both directions: examples/method.py by the library. It prints the
// same table. With a network, bytes go where a function is called here.
#include <cmath>
#include <cstdio>
#include <lamina/lamina.hpp>
#include <span>
#include <string>
#include <vector>

using tensors = std::vector<std::vector<float>>;

// The toy: worker w wants the parameters t_w, so that its gradient is x - t_w.
float optimum(std::size_t layer, std::size_t element, std::size_t worker) {
  const auto i = static_cast<long>(element);
  const auto l = static_cast<long>(layer);
  const double common = static_cast<double>((i * 7919 + l * 104729) % 1021 - 510) / 512 / std::exp2(l % 4);
  const double own = static_cast<double>((i * 31 + l) % 17 - 8) / 128;
  return static_cast<float>(worker == 0 ? common + own : common - own);
}

int main() {
  const lamina::layout model({{"embedding", {6144}},
                              {"hidden1.weight", {64, 64}},
                              {"hidden1.bias", {64}},
                              {"hidden2.weight", {64, 64}},
                              {"hidden2.bias", {64}},
                              {"hidden3.weight", {64, 64}},
                              {"hidden3.bias", {64}},
                              {"norm", {64}},
                              {"head.weight", {10, 64}},
                              {"head.bias", {10}}});
  constexpr std::size_t steps = 12;
  tensors zeros;
  for (const std::size_t elements : model.sizes()) zeros.emplace_back(elements);

  lamina::server<float> server(model, {.workers = 2});
  tensors parameters = zeros;
  std::vector<lamina::worker<float>> workers;
  workers.emplace_back(model, lamina::worker_options{.drop_ratio = 0.8, .sender = 0});
  workers.emplace_back(model, lamina::worker_options{.drop_ratio = 0.8, .sender = 1});
  std::vector<tensors> replicas(2, zeros);
  std::vector<std::size_t> times_sent(model.layers());

  std::printf("step  threshold  layers sent  bytes up  bytes down  distance\n");
  for (std::size_t t = 0; t <= steps; ++t) {
    std::size_t up = 0;
    std::string sent = "-";
    if (t > 0) {  // before the first step the server replies with all of its parameters
      for (std::size_t w = 0; w < 2; ++w) {
        tensors gradients = replicas[w];
        for (std::size_t l = 0; l < model.layers(); ++l) {
          for (std::size_t i = 0; i < gradients[l].size(); ++i) gradients[l][i] -= optimum(l, i, w);
        }
        auto step = workers[w].add(gradients);
        if (!step) return 1;  // a gradient was not finite: the residual is as it was
        std::vector<std::byte> bytes = step.frame().to_bytes();  // or its segments(), without a copy
        up += bytes.size();
        if (const auto error = server.add(std::move(bytes)))
          return error.value();  // it reads any bytes safely
        for (const std::size_t l : step.sent().sent()) ++times_sent[l];
        const std::string count = std::to_string(step.sent().sent_layers());
        sent = (w == 0 ? "" : sent + " and ") + std::string(3 - count.size(), ' ') + count;
        step.commit();  // it has arrived: what was sent leaves the residual
      }
      server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
        for (std::size_t i = 0; i < mean.size(); ++i) parameters[layer][begin + i] -= 0.25F * mean[i];
      });
    }
    std::size_t down = 0;
    for (const std::size_t w : server.workers()) {
      const auto reply = server.reply(w, parameters);
      const std::vector<std::byte> bytes = reply.to_bytes();
      down += bytes.size();
      const auto frame = lamina::decode<float>(bytes, model);
      for (std::size_t l = 0; l < model.layers(); ++l) frame.apply_to(l, replicas[w][l]);
      server.commit(w, reply.clock());
    }
    double distance = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      std::vector<float> apart = parameters[l];
      for (std::size_t i = 0; i < apart.size(); ++i) apart[i] -= (optimum(l, i, 0) + optimum(l, i, 1)) / 2;
      distance += lamina::mean_abs()(apart) * static_cast<double>(apart.size());
    }
    std::printf("%4zu  %9.6f  %11s  %8zu  %10zu  %.6f\n", t, t == 0 ? 0 : workers[0].threshold(),
                sent.c_str(), up, down, distance / static_cast<double>(model.elements()));
  }
  if (replicas[0] != parameters || replicas[1] != parameters) return 1;  // bitwise identical

  std::printf("dense: %zu bytes a step and direction\n", 2 * lamina::largest_frame_bytes<float>(model));
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::printf("%-15ssent %2zu times in %zu, residual of worker 0 %.9g\n", model[l].name.c_str(),
                times_sent[l], 2 * steps, lamina::mean_abs()(workers[0].residual()[l]));
  }
}
