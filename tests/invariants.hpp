// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/layout.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"
#include "steps.hpp"
#include "support.hpp"

/// Whole runs of W workers and a server in one process, through real bytes, and what docs/algorithm.md says can be
/// asserted exactly as predicates on them, so that negative controls can ask for a violation.
namespace lamina_test {

/// By whose values a cluster's workers select.
enum class selects {
  alone,    ///< each by its own
  agreed,   ///< all by the mean, once all gradients are there
  planned,  ///< all by the mean of what their residuals hold before the first gradient
};

/// W workers and a server with plain SGD. `Worker` is lamina::worker, or a broken variant of it that has send() and residual().
template <class T, class Worker = lamina::worker<T>>
struct cluster {
  /// make_worker(model, rank) gives a Worker.
  template <class MakeWorker>
  cluster(const lamina::layout& of_model, std::size_t workers, T rate, const MakeWorker& make_worker)
      : model(of_model),
        learning_rate(rate),
        server(model, {.workers = workers}),
        parameters(zeros_like<T>(model)),
        computed(workers, zeros_like<T>(model)),
        sent(workers, zeros_like<T>(model)),
        frames(workers),
        decided(workers) {
    for (std::size_t w = 0; w < workers; ++w) {
      worker.push_back(make_worker(model, static_cast<std::uint32_t>(w)));
      // Rubbish, so that the first reply has to bring everything.
      replica.push_back(zeros_like<T>(model));
      for (auto& layer : replica[w]) layer.assign(layer.size(), T(-777));
    }
    reply_to_all();
  }

  std::size_t workers() const { return worker.size(); }

  /// One step; gradients[w][l].
  void step(const std::vector<tensors<T>>& gradients) {
    for (std::size_t w = 0; w < workers(); ++w) add_to(computed[w], gradients[w]);
    send_all(gradients);
    for (std::size_t k = 0; k < workers(); ++k) {
      const std::size_t w = (k + steps_) % workers();  // the order of arrival differs from step to step
      receive<T>(sent[w], frames[w], model);
      if (const auto error = server.add(frames[w])) throw std::system_error(error);
    }
    ++steps_;
    const lamina::selection arrived = server.arrived();
    server.update([&](std::size_t l, std::size_t begin, std::span<const T> mean) {
      if (update) return update(l, begin, mean);
      for (std::size_t i = 0; i < mean.size(); ++i) {
        const volatile T change = learning_rate * mean[i];  // no contraction to FMA
        parameters[l][begin + i] -= change;
      }
    });
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (arrived.is_dropped(l) && update_untouched) update_untouched(l);
    }
    reply_to_all();
  }

  /// What worker w sent in the last step.
  lamina::frame_view<T> frame(std::size_t w) const { return lamina::decode<T>(frames[w], model); }
  std::size_t dropped_elements(std::size_t w) const { return model.elements() - frame(w).sent_elements(); }

  const lamina::layout model;
  const T learning_rate;
  std::vector<Worker> worker;
  lamina::server<T> server;
  tensors<T> parameters;             // the server's
  std::vector<tensors<T>> replica;   // what each worker holds
  std::vector<tensors<T>> computed;  // sum of the gradients of each worker
  std::vector<tensors<T>> sent;      // sum of what each worker sent
  std::vector<bytes> frames;
  std::vector<std::vector<double>> decided;  // the values that each worker's last selection was made by
  std::size_t published = 0;                 // elements of the last reply
  /// The optimizer, if it is not plain SGD; and what a wrong one does to layers that nobody sent.
  std::function<void(std::size_t layer, std::size_t begin, std::span<const T> mean)> update;
  std::function<void(std::size_t layer)> update_untouched;
  selects how = selects::alone;

 private:
  void send_all(const std::vector<tensors<T>>& gradients) {
    if constexpr (!std::same_as<Worker, lamina::worker<T>>) {
      for (std::size_t w = 0; w < workers(); ++w) frames[w] = worker[w].send(gradients[w]);
    } else {
      std::vector<typename Worker::step> steps;
      if (how == selects::planned) {
        average([this](std::size_t w) { return worker[w].values(); });
        for (std::size_t w = 0; w < workers(); ++w) {
          steps.push_back(worker[w].begin(worker[w].plan()));
          for (std::size_t l = 0; l < model.layers(); ++l) steps[w].add(l, gradients[w][l]);
        }
      } else {
        for (std::size_t w = 0; w < workers(); ++w) {
          steps.push_back(worker[w].add(gradients[w]));
          decided[w] = copy_of(steps[w].values());
        }
        if (how == selects::agreed) average([&](std::size_t w) { return steps[w].values(); });
      }
      for (std::size_t w = 0; w < workers(); ++w) {
        frames[w] = steps[w].frame().to_bytes();
        steps[w].commit();
      }
    }
  }

  template <class ValuesOf>
  void average(const ValuesOf& values_of) {
    std::vector<double> mean(model.layers());
    for (std::size_t w = 0; w < workers(); ++w) {
      const auto values = values_of(w);
      for (std::size_t l = 0; l < mean.size(); ++l) mean[l] += values[l] / static_cast<double>(workers());
    }
    for (std::size_t w = 0; w < workers(); ++w) {
      const auto values = values_of(w);
      std::ranges::copy(mean, values.begin());
      decided[w] = mean;
    }
  }

  void reply_to_all() {
    for (std::size_t w = 0; w < workers(); ++w) {
      const auto reply = server.reply(w, parameters);
      receive<T>(replica[w], reply.to_bytes(), model);
      published = reply.sent().sent_elements();
      server.commit(w, reply.clock());
    }
  }

  std::size_t steps_ = 0;
};

template <class T>
auto workers_of(lamina::worker_options options) {
  return [options](const lamina::layout& model, std::uint32_t rank) {
    lamina::worker_options own = options;
    own.sender = rank;
    return lamina::worker<T>(model, own);
  };
}

template <class T, class Worker>
std::vector<tensors<T>> random_gradients_of_all(std::mt19937& random, const cluster<T, Worker>& run) {
  std::vector<tensors<T>> gradients;
  for (std::size_t w = 0; w < run.workers(); ++w) gradients.push_back(random_gradients<T>(random, run.model));
  return gradients;
}

/// Invariant 1: everything sent plus the residual is the sum of the gradients.
template <class Cluster>
bool conserves(const Cluster& run) {
  for (std::size_t w = 0; w < run.workers(); ++w) {
    for (std::size_t l = 0; l < run.model.layers(); ++l) {
      const auto residual = run.worker[w].residual()[l];
      for (std::size_t i = 0; i < residual.size(); ++i) {
        if (run.sent[w][l][i] + residual[i] != run.computed[w][l][i]) return false;
      }
    }
  }
  return true;
}

/// Invariant 2: the parameters less what the residuals hold are those of dense SGD. Exact with integer gradients and powers of
/// two for the learning rate and W.
template <class T, class Worker>
bool follows_dense_iterate(const cluster<T, Worker>& run) {
  const T scale = run.learning_rate / static_cast<T>(run.workers());
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    for (std::size_t i = 0; i < run.model.sizes()[l]; ++i) {
      T residuals = 0;
      T computed = 0;
      for (std::size_t w = 0; w < run.workers(); ++w) {
        residuals += run.worker[w].residual()[l][i];
        computed += run.computed[w][l][i];
      }
      if (run.parameters[l][i] - scale * residuals != -scale * computed) return false;
    }
  }
  return true;
}

/// Invariant 3: R·N − (elements tied at λ) < dropped ≤ R·N, and at least one layer is sent; with λ = 0 all are sent but those of
/// value 0. For a threshold that was searched in this step.
template <class Cluster>
bool drops_as_asked(const Cluster& run, std::size_t w, double ratio) {
  const double threshold = run.worker[w].threshold();
  const double limit = ratio * static_cast<double>(run.model.elements());
  const auto dropped = static_cast<double>(run.dropped_elements(w));
  double tied = 0;
  double zeros = 0;
  std::size_t layers_sent = 0;
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    if (run.decided[w][l] == threshold) tied += static_cast<double>(run.model.sizes()[l]);
    if (run.decided[w][l] == 0) zeros += static_cast<double>(run.model.sizes()[l]);
    layers_sent += run.frame(w).is_dropped(l) ? 0 : 1;
  }
  if (threshold == 0) return dropped == zeros && zeros > limit;
  return limit - tied < dropped && dropped <= limit && layers_sent > 0;
}

/// Invariant 4: what is dropped has a value below the threshold, or of 0; a budget that parts layers of equal value drops some
/// that are at it.
template <class Cluster>
bool drops_only_small_layers(const Cluster& run, std::size_t w, bool may_part_ties = false) {
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    if (run.model.sizes()[l] == 0 || !run.frame(w).is_dropped(l)) continue;
    const double value = literal_mean_abs(run.worker[w].residual()[l]);
    const double threshold = run.worker[w].threshold();
    if (value != 0 && (may_part_ties ? value > threshold : value >= threshold)) return false;
  }
  return true;
}

/// Invariant 6: every worker's model is the server's, bitwise.
template <class Cluster>
bool replicas_agree(const Cluster& run) {
  return std::ranges::all_of(run.replica,
                             [&](const auto& each) { return same_tensors(each, run.parameters); });
}

/// Invariant 8: max_w sent_w <= published <= min(N, Σ_w sent_w). Of a synchronous server.
template <class Cluster>
bool publishes_the_union(const Cluster& run) {
  std::size_t most = 0;
  std::size_t sum = 0;
  for (std::size_t w = 0; w < run.workers(); ++w) {
    const std::size_t elements = run.frame(w).sent_elements();
    most = std::max(most, elements);
    sum += elements;
  }
  return most <= run.published && run.published <= std::min(run.model.elements(), sum);
}

}  // namespace lamina_test
