// SPDX-License-Identifier: MIT
// Agreed selection in an all-reduce: the workers average their representative values and then send the same layers.
#include <lamina/worker.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "catch.hpp"
#include "group.hpp"
#include "training.hpp"

namespace lamina_test::agreed_selection {

namespace {

constexpr std::size_t ranks = 4;

}  // namespace

TEST_CASE("program: agreed selection, after which all ranks hold the same mean gradients") {
  const lamina::layout model = small_model();
  std::vector<tensors> means(ranks);
  std::vector<std::size_t> sent(ranks);
  group mpi(ranks);
  mpi.run([&](std::size_t rank) {
    lamina::worker<float> worker(model, {.drop_ratio = 0.95});
    std::vector<float> packed;
    for (std::uint64_t t = 1; t <= 10; ++t) {
      tensors gradients = gradients_of(model, rank, t);

      auto step = worker.add(gradients);
      mpi.average(rank, step.values());
      step.select();
      mpi.sum(rank, step.pack(packed, 1.0F / ranks));
      step.commit();
      step.unpack(packed, gradients);

      add_to(means[rank].empty() ? means[rank] = zeros(model) : means[rank], gradients);
      sent[rank] = step.sent().sent_elements();
    }
    // What this rank has not sent waits for it alone.
    for (std::size_t l = 0; l < model.layers(); ++l) {
      REQUIRE(worker.residual()[l].size() == model.sizes()[l]);
    }
  });
  for (std::size_t rank = 1; rank < ranks; ++rank) {
    REQUIRE(means[rank] == means[0]);
    REQUIRE(sent[rank] == sent[0]);
  }
  REQUIRE(sent[0] < model.elements());
}

TEST_CASE("program: overlapped with backward, a fragment is sent as soon as it has its gradient") {
  const lamina::layout model = small_model();
  std::vector<tensors> means(ranks);
  group mpi(ranks);
  mpi.run([&](std::size_t rank) {
    lamina::worker<float> worker(model, {.drop_ratio = 0.9, .fragment_elements = 4096});
    means[rank] = zeros(model);
    tensors added = zeros(model);
    tensors went = zeros(model);
    for (std::uint64_t t = 1; t <= 10; ++t) {
      const tensors gradients = gradients_of(model, rank, t);
      add_to(added, gradients);

      mpi.average(rank, worker.values());
      auto step = worker.begin(worker.plan());  // known before the first gradient
      for (std::size_t layer = model.layers(); layer-- > 0;) {
        REQUIRE(step.add(layer, gradients[layer]));
        for (std::size_t fragment = worker.tiles().first(layer); fragment < worker.tiles().first(layer + 1);
             ++fragment) {
          if (!step.is_sent(fragment)) continue;
          const std::span<const float> own = step.fragment(fragment);
          std::vector<float> sum(own.begin(), own.end());
          mpi.sum(rank, std::span(sum));
          for (std::size_t i = 0; i < sum.size(); ++i) {
            means[rank][layer][worker.tiles().begin(fragment) + i] += sum[i] / ranks;
            went[layer][worker.tiles().begin(fragment) + i] += own[i];
          }
        }
      }
      if (t == 1) REQUIRE(step.sent().sent_elements() == model.elements());
      if (t > 2) REQUIRE(step.sent().sent_elements() < model.elements());
      step.commit();
    }
    // Conservation: what was sent and the residual are all that was added.
    for (std::size_t f = 0; f < worker.fragments().layers(); ++f) {
      const std::size_t layer = worker.tiles().layer_of(f);
      for (std::size_t i = 0; i < worker.fragments().sizes()[f]; ++i) {
        const std::size_t at = worker.tiles().begin(f) + i;
        REQUIRE(went[layer][at] + worker.residual()[f][i] == added[layer][at]);
      }
    }
  });
  for (std::size_t rank = 1; rank < ranks; ++rank) REQUIRE(means[rank] == means[0]);
}

}  // namespace lamina_test::agreed_selection
