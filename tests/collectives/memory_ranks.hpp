// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "lamina/collectives/collectives.hpp"
#include "memory_channel.hpp"
#include "simulated_ranks.hpp"

/// Engines of ranks in one process, in threads or in turn.
namespace lamina_test {

inline collectives::plan plan_for(const lamina::layout& model, std::size_t ranks,
                                  const collectives::plan_options& options) {
  std::vector<std::size_t> order(model.layers());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return {model, ranks, order, std::vector<collectives::layer_class>(model.layers()), options};
}

/// Gradients of each rank and layer.
using all_gradients = std::vector<std::vector<std::vector<float>>>;

inline all_gradients random_gradients(std::mt19937& random, const lamina::layout& model, std::size_t ranks) {
  all_gradients made(ranks);
  for (auto& of_rank : made) {
    for (const std::size_t size : model.sizes()) of_rank.push_back(random_fractions<float>(random, size));
  }
  return made;
}

/// What engines are to give: the sum of each chunk of each bucket in the algorithm's order, divided once.
inline std::vector<std::vector<float>> expected_means(const collectives::plan& plan,
                                                      const all_gradients& gradients,
                                                      const std::vector<bool>& is_sent) {
  std::vector<std::vector<float>> means(plan.model().layers());
  for (const collectives::bucket& bucket : plan.buckets()) {
    rank_vectors packed(gradients.size());
    for (std::size_t r = 0; r < gradients.size(); ++r) {
      for (const std::size_t l : bucket.layers) {
        if (is_sent[l]) packed[r].insert(packed[r].end(), gradients[r][l].begin(), gradients[r][l].end());
      }
    }
    std::vector<float> mean;
    for (std::size_t begin = 0; begin < packed[0].size(); begin += plan.chunk_elements()) {
      const std::size_t end = std::min(begin + plan.chunk_elements(), packed[0].size());
      rank_vectors chunk;
      for (const auto& each : packed) {
        chunk.emplace_back(each.begin() + static_cast<std::ptrdiff_t>(begin),
                           each.begin() + static_cast<std::ptrdiff_t>(end));
      }
      for (const float each : reference_sum(bucket.how, chunk))
        mean.push_back(each / static_cast<float>(gradients.size()));
    }
    auto next = mean.begin();
    for (const std::size_t l : bucket.layers) {
      if (!is_sent[l]) continue;
      means[l].assign(next, next + static_cast<std::ptrdiff_t>(gradients[0][l].size()));
      next += static_cast<std::ptrdiff_t>(gradients[0][l].size());
    }
  }
  return means;
}

/// The mean of a layer in the order in which its shards are added: shards of ⌈n/P⌉.
inline std::vector<float> mean_by_shards(collectives::algorithm how, const all_gradients& gradients,
                                         std::size_t layer) {
  const std::size_t ranks = gradients.size();
  const std::size_t size = gradients[0][layer].size();
  rank_vectors padded;
  for (const auto& each : gradients) {
    padded.push_back(each[layer]);
    padded.back().resize((size + ranks - 1) / ranks * ranks);
  }
  std::vector<float> mean = reference_sum(how, padded);
  for (float& each : mean) each /= static_cast<float>(ranks);
  mean.resize(size);
  return mean;
}

/// Small pieces, so that a round goes in many.
inline collectives::engine_options in_turn() {
  return {.pieces = {.both_ways = 132, .one_way = 232},
          .progress = collectives::progress_by::caller,
          .timeout = std::chrono::seconds(5)};
}

/// Engines in one thread: whichever rank is drawn hands over its next layer or moves its messages on.
inline void run_step(std::vector<std::unique_ptr<collectives::engine>>& engines,
                     const all_gradients& gradients, const std::vector<bool>& is_sent, std::mt19937& random) {
  const std::size_t ranks = engines.size();
  const std::size_t layers = gradients[0].size();
  std::vector<std::size_t> handed(ranks);
  for (auto& each : engines) each->begin_step();
  std::size_t idle = 0;
  const auto is_over = [&] {
    return std::ranges::all_of(engines, [&](auto& each) {
      for (std::size_t l = 0; l < layers; ++l) {
        if (!each->is_done(l)) return false;
      }
      return true;
    });
  };
  while (!is_over()) {
    const std::size_t r = below(random, ranks);
    bool has_moved = false;
    if (handed[r] < layers && below(random, 3) == 0) {
      const std::size_t l = layers - ++handed[r];
      is_sent[l] ? engines[r]->ready(l, gradients[r][l]) : engines[r]->hold_back(l);
      has_moved = true;
    } else {
      has_moved = engines[r]->poll();
    }
    idle = has_moved ? 0 : idle + 1;
    if (idle == 100'000) throw std::runtime_error("a deadlock");
  }
}

inline std::vector<std::unique_ptr<collectives::engine>> engines_over(
    memory_network& network, const collectives::plan& plan, const collectives::engine_options& options) {
  std::vector<std::unique_ptr<collectives::engine>> engines;
  for (std::size_t r = 0; r < plan.ranks(); ++r)
    engines.push_back(std::make_unique<collectives::engine>(network.of(r), plan, options));
  return engines;
}

inline bool has_means(collectives::engine& engine, const std::vector<std::vector<float>>& means) {
  for (std::size_t l = 0; l < means.size(); ++l) {
    if (!same_bits(engine.mean(l), means[l])) return false;
  }
  return true;
}

/// Calls work(rank) in a thread for each; what each has thrown, or an empty text.
template <class Work>
std::vector<std::string> in_threads(std::size_t ranks, const Work& work) {
  std::vector<std::string> errors(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        work(r);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& each : threads) each.join();
  return errors;
}

}  // namespace lamina_test
