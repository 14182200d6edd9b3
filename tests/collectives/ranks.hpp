// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/collectives/collectives.hpp"
#include "memory_channel.hpp"
#include "support.hpp"

/// All ranks of a collective in one process: schedules as data, what sums must be, and engines in turn or in threads.
namespace lamina_test {

using collectives::algorithm;
using collectives::operation;
using lamina::payload_type;

using rank_vectors = std::vector<std::vector<float>>;
/// Of each rank and layer.
using all_gradients = std::vector<rank_vectors>;

inline std::vector<collectives::round> rounds_of(operation what, algorithm how, std::size_t ranks,
                                                 std::size_t rank, std::size_t elements) {
  std::vector<collectives::round> rounds;
  collectives::rounds_of(what, how, ranks, rank, elements, rounds);
  return rounds;
}

/// What one rank sends; a round with a transfer is one message.
struct traffic {
  std::size_t messages = 0;
  std::size_t elements = 0;
};
inline traffic sent(std::span<const collectives::round> rounds) {
  traffic total;
  for (const collectives::round& each : rounds) {
    if (!each.send) continue;
    ++total.messages;
    total.elements += each.send->elements.size();
  }
  return total;
}

/// Elements that a rank sends in an all_reduce, by the closed formula.
inline std::size_t formula_of_sent(algorithm how, std::size_t ranks, std::size_t rank, std::size_t elements) {
  const auto shard = [&](std::size_t r) {
    return elements * (r % ranks + 1) / ranks - elements * (r % ranks) / ranks;
  };
  if (how == algorithm::pairwise) return elements - shard(rank) + (ranks - 1) * shard(rank);
  if (how == algorithm::ring) return 2 * elements - shard(rank + 1) - shard(rank + 2);
  const std::size_t doubled = std::bit_floor(ranks);
  if (rank >= doubled) return elements;
  std::size_t begin = 0;
  std::size_t end = elements;
  std::size_t owned = 0;
  for (std::size_t d = doubled / 2; d > 0; d /= 2) {
    const std::size_t middle = begin + (end - begin) / 2;
    ((rank & d) != 0 ? begin : end) = middle;
    owned += end - begin;
  }
  return elements - (end - begin) + owned + (rank < ranks - doubled ? elements : 0);
}

// One element of a sum, in plain recursion.
template <class Input>
float halves_sum(const Input& x, std::size_t first, std::size_t stride, std::size_t count) {
  if (count == 1) return x(first);
  return lamina::detail::rounded(halves_sum(x, first, 2 * stride, count / 2) +
                                 halves_sum(x, first + stride, 2 * stride, count / 2));
}
template <class Input>
float chain_sum(const Input& x, std::size_t first, std::size_t ranks) {
  float total = x(first);
  for (std::size_t i = 1; i < ranks; ++i) total = lamina::detail::rounded(total + x((first + i) % ranks));
  return total;
}

/// The sum of the inputs of all ranks in the algorithm's order, independent of schedules and kernels.
inline std::vector<float> reference_sum(algorithm how, std::span<const std::vector<float>> inputs) {
  const std::size_t ranks = inputs.size();
  const std::size_t elements = inputs[0].size();
  const std::size_t doubled = std::bit_floor(ranks);
  std::vector<float> sum(elements);
  std::size_t shard = 0;
  for (std::size_t i = 0; i < elements; ++i) {
    const auto x = [&](std::size_t r) { return inputs[r][i]; };
    const auto folded = [&](std::size_t r) {
      return r + doubled < ranks ? lamina::detail::rounded(x(r) + x(r + doubled)) : x(r);
    };
    while (i >= elements * (shard + 1) / ranks) ++shard;
    sum[i] = how == algorithm::pairwise ? chain_sum(x, 0, ranks)
             : how == algorithm::ring   ? chain_sum(x, shard, ranks)
                                        : halves_sum(folded, 0, 1, doubled);
  }
  return sum;
}

/// The nearest number of the type, ties to even; beyond its range the largest.
inline float rounded_to(payload_type type, float value) {
  if (type == payload_type::as_is) return value;
  if (type == payload_type::float16)
    return lamina::to_float(lamina::saturating_round<lamina::float16>(value));
  return lamina::to_float(lamina::saturating_round<lamina::bfloat16>(value));
}

/// Gradients of all magnitudes that floats have, some beyond the range of float16.
inline all_gradients random_gradients(std::mt19937& random, const lamina::layout& model, std::size_t ranks) {
  all_gradients made(ranks);
  for (auto& of_rank : made) {
    for (const std::size_t size : model.sizes()) {
      std::vector<float>& layer = of_rank.emplace_back(random_fractions<float>(random, size));
      const int exponent = static_cast<int>(below(random, 60)) - 40;
      for (float& each : layer) each = std::ldexp(each, exponent);
    }
  }
  return made;
}

inline collectives::plan plan_for(const lamina::layout& model, std::size_t ranks,
                                  const collectives::plan_options& options) {
  std::vector<std::size_t> order(model.layers());
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return {model, ranks, order, std::vector<collectives::layer_class>(model.layers()), options};
}

/// How the gradients of a step become means.
struct variant {
  algorithm how = algorithm::pairwise;
  payload_type payload = payload_type::as_is;
  bool has_owners = false;  // of shards: each updates its own, and hands the parameters round

  bool exists(std::size_t ranks) const {
    return how != algorithm::halving_doubling || !has_owners || std::has_single_bit(ranks);
  }
  std::string name() const {
    return std::string(collectives::name_of(how)) + ", " + collectives::name_of(payload) +
           (has_owners ? ", owners" : "");
  }
  collectives::plan plan(const lamina::layout& model, std::size_t ranks, std::size_t bucket_bytes,
                         std::size_t chunk_bytes = 4096) const {
    return plan_for(model, ranks,
                    {.bucket_bytes = bucket_bytes,
                     .chunk_bytes = chunk_bytes,
                     .choice = collectives::algorithm_choice::always(how),
                     .payload = payload});
  }
};

inline std::vector<variant> all_variants() {
  std::vector<variant> all;
  for (const bool has_owners : {false, true}) {
    for (const algorithm how : collectives::all_algorithms)
      all.push_back({.how = how, .has_owners = has_owners});
    for (const payload_type payload : {payload_type::float16, payload_type::bfloat16})
      all.push_back({.payload = payload, .has_owners = has_owners});
  }
  return all;
}

/// Sums are added bucket by bucket, and owners' layer by layer in shards of ceil(n / P) elements; of 16 bits they are rounded where
/// they leave a rank, and as means where they do not go to owners.
inline rank_vectors expected_means(const collectives::plan& plan, const variant& tried,
                                   const all_gradients& gradients, const std::vector<bool>& is_sent) {
  const std::size_t ranks = gradients.size();
  rank_vectors means(plan.model().layers());
  std::vector<std::vector<std::size_t>> together;
  for (const collectives::bucket& bucket : plan.buckets()) together.push_back(bucket.layers);
  if (tried.has_owners) {
    together.clear();
    for (std::size_t l = 0; l < means.size(); ++l) together.push_back({l});
  }
  for (const auto& layers : together) {
    rank_vectors packed(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      for (const std::size_t l : layers) {
        if (is_sent[l]) packed[r].insert(packed[r].end(), gradients[r][l].begin(), gradients[r][l].end());
      }
      if (tried.has_owners) packed[r].resize((packed[r].size() + ranks - 1) / ranks * ranks);
      for (float& each : packed[r]) each = ranks == 1 ? each : rounded_to(tried.payload, each);
    }
    std::vector<float> mean;
    // A chunk of owners has a part of each shard.
    const std::size_t chunk = tried.has_owners ? packed[0].size() + 1 : plan.chunk_elements();
    for (std::size_t begin = 0; begin < packed[0].size(); begin += chunk) {
      const std::size_t count = std::min(chunk, packed[0].size() - begin);
      rank_vectors some;
      for (const auto& each : packed) {
        const auto from = std::span(each).subspan(begin, count);
        some.emplace_back(from.begin(), from.end());
      }
      for (float sum : reference_sum(tried.how, some)) {
        if (ranks > 1 && !tried.has_owners) sum = rounded_to(tried.payload, sum);
        mean.push_back(sum / static_cast<float>(ranks));
      }
    }
    auto next = mean.begin();
    for (const std::size_t l : layers) {
      if (!is_sent[l]) continue;
      const auto end = next + static_cast<std::ptrdiff_t>(gradients[0][l].size());
      means[l].assign(next, end);
      next = end;
    }
  }
  return means;
}

/// Bytes that a rank sends: of the opening sum, in which plans are compared, or of a step.
inline std::size_t opening_bytes(std::size_t ranks, std::size_t rank) {
  const traffic out = sent(rounds_of(operation::all_reduce, algorithm::pairwise, ranks, rank, 1));
  return 4 * out.elements + 32 * out.messages;
}
inline std::size_t step_bytes(const collectives::plan& plan, const variant& tried, std::size_t rank,
                              const std::vector<bool>& is_sent) {
  const std::size_t ranks = plan.ranks();
  const std::size_t width = tried.payload == payload_type::as_is ? 4 : 2;
  std::size_t bytes = 0;
  for (const collectives::bucket& bucket : plan.buckets()) {
    std::size_t elements = 0;
    for (const std::size_t l : bucket.layers) {
      const std::size_t size = is_sent[l] ? plan.model().sizes()[l] : 0;
      // All shards of a layer have one length.
      elements += tried.has_owners ? (size + ranks - 1) / ranks * ranks : size;
    }
    for (std::size_t begin = 0; begin < elements; begin += plan.chunk_elements()) {
      const std::size_t chunk = std::min(plan.chunk_elements(), elements - begin);
      const std::size_t out = formula_of_sent(tried.how, ranks, rank, chunk);
      // Owners hand parameters round as they are, as many elements as come to them.
      bytes += tried.has_owners ? out / 2 * (width + 4) : out * width;
      bytes += 32 * sent(rounds_of(operation::all_reduce, tried.how, ranks, rank, chunk)).messages;
    }
  }
  return bytes;
}

/// Small segments, so that a round goes in many.
inline collectives::engine_options in_turn() {
  return {
      .piece_bytes = 132, .progress = collectives::progress_by::caller, .timeout = std::chrono::seconds(5)};
}

using all_engines = std::vector<std::unique_ptr<collectives::engine>>;

/// Engines in one thread: whichever rank is drawn hands over its next layer or moves its messages on.
inline void run_step(all_engines& engines, const all_gradients& gradients, const std::vector<bool>& is_sent,
                     std::mt19937& random) {
  const std::size_t layers = gradients[0].size();
  std::vector<std::size_t> handed(engines.size());
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
    const std::size_t r = below(random, engines.size());
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

/// `options_of(rank)` gives an engine's.
template <class OptionsOf>
all_engines engines_over(memory_network& network, const collectives::plan& plan,
                         const OptionsOf& options_of) {
  all_engines engines;
  for (std::size_t r = 0; r < plan.ranks(); ++r)
    engines.push_back(std::make_unique<collectives::engine>(network.of(r), plan, options_of(r)));
  return engines;
}

/// Owners that leave the mean as it is: then it is what all ranks get.
inline void keep_mean(std::size_t, std::size_t, std::span<float>) {}
inline collectives::engine_options with_owners(const variant& tried, collectives::engine_options options) {
  if (tried.has_owners) options.update = keep_mean;
  return options;
}

inline bool has_means(collectives::engine& engine, const variant& tried, const rank_vectors& means) {
  for (std::size_t l = 0; l < means.size(); ++l) {
    if (!same_bits(tried.has_owners ? engine.parameters(l) : engine.mean(l), means[l])) return false;
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
