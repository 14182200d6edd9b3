// SPDX-License-Identifier: MIT
// A server and workers over MPI, as in benchmarks/lab but without torch, so that all that runs is ours: made for the
// sanitizers. Gradients are integers, hence sums are exact: nothing is lost, and every replica is the server's.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lamina/lamina.hpp"
#include "launch/topology.hpp"
#include "messages/mpi_transport.hpp"
#include "support.hpp"

namespace {

using namespace lab;
using numbers = std::vector<float>;

constexpr std::uint64_t steps = 30;
constexpr float learning_rate = 0.125F;

// Frames of several of the transport's pieces, of one, and layers of one element and of none.
const lamina::layout model = lamina_test::model_of({700'000, 0, 1, 4'096, 33'333, 5, 64'000, 9});

numbers gradient_of(std::size_t worker, std::uint64_t step) {
  std::mt19937 random(static_cast<unsigned>(step * 100 + worker));
  return lamina_test::random_integers<float>(random, model.elements());
}

std::span<float> layer(numbers& all, std::size_t l) {
  return std::span(all).subspan(model.offset(l), model.sizes()[l]);
}

void require(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// What the workers sent, and in the end their residuals: together all gradients there were.
void serve(transport& server) {
  const std::size_t workers = server.ranks() - 1;
  std::vector<std::size_t> ranks(workers);
  std::iota(ranks.begin(), ranks.end(), std::size_t{1});
  numbers parameters(model.elements());
  std::vector<numbers> arrived(workers, numbers(model.elements()));
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, workers);
  lamina::parameter_publisher<float> publisher(model, workers);
  for (std::uint64_t step = 0; step <= steps; ++step) {
    const auto& frame = publisher.encode_for_all(
        step + 1, [&](std::size_t l) { return std::span<const float>(layer(parameters, l)); });
    server.send(ranks, message_kind::parameters, {frame.segments(), nullptr});
    publisher.commit_all();
    if (step == steps) break;
    for (const message& each : server.receive_from_each(ranks)) {
      const auto view = lamina::decode<float>(each.bytes, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        if (view.is_dropped(l)) continue;
        const auto from = view.layer(l);
        for (std::size_t i = 0; i < from.size(); ++i) layer(arrived[each.sender], l)[i] += from[i];
      }
      aggregator.add(view);
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> mean) {
        for (std::size_t i = 0; i < mean.size(); ++i)
          layer(parameters, l)[begin + i] -= learning_rate * mean[i];
      });
    }
    publisher.update(aggregator.arrived());
    aggregator.next_step();
  }
  // Every worker's residual and replica.
  for (const message& each : server.receive_from_each(ranks)) {
    numbers theirs(2 * model.elements());
    require(each.bytes.size() == theirs.size() * sizeof(float), "the last word has another size");
    std::memcpy(theirs.data(), each.bytes.data(), each.bytes.size());
    numbers sum(model.elements());
    for (std::uint64_t step = 1; step <= steps; ++step) {
      const numbers gradient = gradient_of(each.sender, step);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
    }
    for (std::size_t i = 0; i < sum.size(); ++i) {
      require(arrived[each.sender][i] + theirs[i] == sum[i], "a gradient was lost");
    }
    require(lamina_test::same_bits(std::span(theirs).subspan(model.elements()), parameters),
            "a replica differs");
  }
}

void work(transport& worker) {
  constexpr std::array<std::size_t, 1> server = {0};
  numbers parameters(model.elements());
  lamina::gradient_compressor<float> compressor(
      model, {.drop_ratio = 0.5, .sender = static_cast<std::uint32_t>(worker.rank() - 1)});
  for (std::uint64_t step = 1; step <= steps + 1; ++step) {
    const std::vector<message> news = worker.receive_from_each(server);
    const auto frame = lamina::decode<float>(news[0].bytes, model);
    lamina::expect(frame, lamina::frame_kind::parameters, step);
    for (std::size_t l = 0; l < model.layers(); ++l) frame.apply_to(l, layer(parameters, l));
    if (step > steps) break;
    numbers gradient = gradient_of(worker.rank() - 1, step);
    for (std::size_t l = 0; l < model.layers(); ++l) compressor.accumulate(l, layer(gradient, l));
    worker.send(server, message_kind::gradients, {compressor.encode().segments(), nullptr});
    compressor.commit();
  }
  const std::array<std::span<const std::byte>, 2> last_word = {
      std::as_bytes(compressor.residual().elements()), std::as_bytes(std::span(std::as_const(parameters)))};
  worker.send(server, message_kind::finished, {last_word, nullptr});
}

}  // namespace

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const topology who = flat_topology(static_cast<std::size_t>(ranks) - 1);
  try {
    mpi_transport here(MPI_COMM_WORLD, {.max_message_bytes = std::size_t{1} << 30,
                                        .timeout_of = [](std::size_t) { return std::chrono::seconds(120); },
                                        .exchange_timeout = std::chrono::seconds(120),
                                        .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
    if (here.rank() == 0) {
      serve(here);
      std::printf("%d workers, %d steps: nothing lost, all replicas the same\n", ranks - 1,
                  static_cast<int>(steps));
    } else {
      work(here);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}
