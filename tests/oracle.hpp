// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/layout.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

/// Whole runs of W workers and a synchronous server in one process, through real bytes, and what docs/scheme/index.md says
/// can be asserted exactly as predicates on them, so that negative controls can ask for a violation.
namespace lamina_test {

template <class T>
using tensors = std::vector<std::vector<T>>;

template <class T>
tensors<T> zeros_like(const lamina::layout& model) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) values.emplace_back(size);
  return values;
}

template <class T>
tensors<T> random_gradients(std::mt19937& random, const lamina::layout& model, std::size_t magnitude = 8) {
  tensors<T> values;
  for (const std::size_t size : model.sizes()) {
    // Layers of different strength, so that some wait longer than others.
    values.push_back(random_integers<T>(random, size, 1 + below(random, magnitude)));
  }
  return values;
}

template <class T>
bool same_tensors(const tensors<T>& a, const tensors<T>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t l = 0; l < a.size(); ++l) {
    if (!same_bits(a[l], b[l])) return false;
  }
  return true;
}

/// Adds the layers of a gradient frame to `to`, or overwrites those of a parameter frame.
template <class T>
void receive(tensors<T>& to, std::span<const std::byte> bytes, const lamina::layout& model) {
  const auto frame = lamina::decode<T>(bytes, model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    const auto layer = frame.layer(l);
    for (std::size_t i = 0; i < layer.size(); ++i) {
      to[l][i] = (frame.kind() == lamina::frame_kind::gradients ? to[l][i] : T(0)) + layer[i];
    }
  }
}

/// W workers and a server with plain SGD. `Worker` is gradient_compressor or a broken variant of it.
template <class T, class Worker = lamina::gradient_compressor<T>>
struct cluster {
  /// make_worker(model, rank) gives a Worker.
  template <class MakeWorker>
  cluster(const lamina::layout& of_model, std::size_t workers, T rate, const MakeWorker& make_worker)
      : model(of_model),
        learning_rate(rate),
        aggregator(lamina::gradient_aggregator<T>::of_workers(model, workers)),
        publisher(model, workers),
        parameters(zeros_like<T>(model)),
        computed(workers, zeros_like<T>(model)),
        sent(workers, zeros_like<T>(model)),
        frames(workers) {
    for (std::size_t w = 0; w < workers; ++w) {
      worker.push_back(make_worker(model, static_cast<std::uint32_t>(w)));
      // Rubbish, so that the first frame has to bring everything.
      replica.push_back(zeros_like<T>(model));
      for (auto& layer : replica[w]) layer.assign(layer.size(), T(-777));
    }
    publish(0);
  }

  std::size_t workers() const { return worker.size(); }

  /// One synchronous step; gradients[w][l]. One that fails does so before the server has anything: all workers abandon it.
  void step(const std::vector<tensors<T>>& gradients, bool fails = false) {
    for (std::size_t w = 0; w < workers(); ++w) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        worker[w].accumulate(l, gradients[w][l]);
        for (std::size_t i = 0; i < gradients[w][l].size(); ++i) computed[w][l][i] += gradients[w][l][i];
      }
    }
    if constexpr (is_compressor) {
      if (plans_ahead) plan_next();
      if (fails) {
        for (auto& each : worker) each.abandon();
        aggregator.next_step();
        return;
      }
    }
    for (std::size_t w = 0; w < workers(); ++w) {
      frames[w] = worker[w].encode().to_bytes();
      receive<T>(sent[w], frames[w], model);
      worker[w].commit();
    }
    // The order of arrival differs from step to step.
    for (std::size_t k = 0; k < workers(); ++k) {
      aggregator.add(lamina::decode<T>(frames[(k + aggregator.step()) % workers()], model));
    }
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (aggregator.arrived().is_dropped(l)) {
        if (update_untouched) update_untouched(l);
        continue;
      }
      aggregator.mean(l, [&](std::size_t begin, std::span<const T> mean) {
        if (update) return update(l, begin, mean);
        for (std::size_t i = 0; i < mean.size(); ++i) {
          const volatile T change = learning_rate * mean[i];  // no contraction to FMA
          parameters[l][begin + i] -= change;
        }
      });
    }
    publisher.update(aggregator.arrived());
    const std::uint64_t done = aggregator.step();
    aggregator.next_step();
    publish(done);
  }

  /// What worker w sent in the last step.
  lamina::frame_view<T> frame(std::size_t w) const { return lamina::decode<T>(frames[w], model); }
  std::size_t dropped_elements(std::size_t w) const { return model.elements() - frame(w).sent_elements(); }

  const lamina::layout model;
  const T learning_rate;
  std::vector<Worker> worker;
  lamina::gradient_aggregator<T> aggregator;
  lamina::parameter_publisher<T> publisher;
  tensors<T> parameters;             // the server's
  std::vector<tensors<T>> replica;   // what each worker holds
  std::vector<tensors<T>> computed;  // sum of the gradients of each worker
  std::vector<tensors<T>> sent;      // sum of what each worker sent
  std::vector<std::vector<std::byte>> frames;
  /// The optimizer, if it is not plain SGD; and what a wrong one does to layers that nobody sent.
  std::function<void(std::size_t layer, std::size_t begin, std::span<const T> mean)> update;
  std::function<void(std::size_t layer)> update_untouched;
  /// The workers decide ahead: after each gradient they agree on the mean of their predicted values.
  bool plans_ahead = false;
  // A broken variant has no such calls.
  static constexpr bool is_compressor = requires(Worker & each) { each.plan_next(each.predicted_values()); };
  std::vector<double> agreed;  // what the next step is decided by

 private:
  void plan_next() {
    agreed.assign(model.layers(), 0);
    for (const auto& each : worker) {
      const auto predicted = each.predicted_values();
      for (std::size_t l = 0; l < agreed.size(); ++l) agreed[l] += predicted[l];
    }
    for (double& each : agreed) each /= static_cast<double>(workers());
    for (auto& each : worker) each.plan_next(agreed);
  }

  void publish(std::uint64_t step) {
    const auto bytes = publisher
                           .encode_for_all(
                               step, [this](std::size_t l) -> const auto& { return parameters[l]; })
                           .to_bytes();
    publisher.commit_all();
    for (auto& each : replica) receive<T>(each, bytes, model);
  }
};

template <class T>
auto compressors(lamina::compressor_options options) {
  return [options](const lamina::layout& model, std::uint32_t rank) {
    lamina::compressor_options own = options;
    own.sender = rank;
    return lamina::gradient_compressor<T>(model, own);
  };
}

template <class T, class Worker>
std::vector<tensors<T>> random_gradients_of_all(std::mt19937& random, const cluster<T, Worker>& run) {
  std::vector<tensors<T>> gradients;
  for (std::size_t w = 0; w < run.workers(); ++w) {
    gradients.push_back(random_gradients<T>(random, run.model));
  }
  return gradients;
}

/// Oracle 1: everything sent plus the residual is the sum of the gradients.
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

/// Oracle 2: the parameters less what the residuals hold back are those of dense SGD. Exact with integer
/// gradients and powers of two for the learning rate and W.
template <class T, class Worker>
bool follows_dense_iterate(const cluster<T, Worker>& run) {
  const T scale = run.learning_rate / static_cast<T>(run.workers());
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    for (std::size_t i = 0; i < run.model.sizes()[l]; ++i) {
      T held_back = 0;
      T computed = 0;
      for (std::size_t w = 0; w < run.workers(); ++w) {
        held_back += run.worker[w].residual()[l][i];
        computed += run.computed[w][l][i];
      }
      if (run.parameters[l][i] - scale * held_back != -scale * computed) return false;
    }
  }
  return true;
}

/// Oracle 3: R·N − (elements tied at λ) < dropped ≤ R·N, and at least one layer is sent; with λ = 0 all are sent but those of
/// value 0. For a threshold that was searched in this step.
template <class Cluster>
bool drops_as_asked(const Cluster& run, std::size_t w, double ratio) {
  const auto& worker = run.worker[w];
  const double limit = ratio * static_cast<double>(run.model.elements());
  const auto dropped = static_cast<double>(run.dropped_elements(w));
  double tied = 0;
  double zeros = 0;
  std::size_t layers_sent = 0;
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    if (worker.values()[l] == worker.threshold()) tied += static_cast<double>(run.model.sizes()[l]);
    if (worker.values()[l] == 0) zeros += static_cast<double>(run.model.sizes()[l]);
    layers_sent += run.frame(w).is_dropped(l) ? 0 : 1;
  }
  if (worker.threshold() == 0) return dropped == zeros && zeros > limit;
  return limit - tied < dropped && dropped <= limit && layers_sent > 0;
}

/// Oracle 4: what stays behind has a value below the threshold, or of 0; a budget that parts layers of equal value leaves some
/// that are at it.
template <class Cluster>
bool leaves_only_small_layers(const Cluster& run, std::size_t w, bool may_part_ties = false) {
  for (std::size_t l = 0; l < run.model.layers(); ++l) {
    if (run.model.sizes()[l] == 0 || !run.frame(w).is_dropped(l)) continue;
    const double value = literal_mean_abs(run.worker[w].residual()[l]);
    const double threshold = run.worker[w].threshold();
    if (value != 0 && (may_part_ties ? value > threshold : value >= threshold)) return false;
  }
  return true;
}

/// Oracle 6: every worker's model is the server's, bit for bit.
template <class Cluster>
bool replicas_agree(const Cluster& run) {
  for (const auto& replica : run.replica) {
    if (!same_tensors(replica, run.parameters)) return false;
  }
  return true;
}

/// Oracle 8: max_w sent_w <= published <= min(N, Σ_w sent_w).
template <class Cluster>
bool publishes_the_union(const Cluster& run) {
  std::size_t most = 0;
  std::size_t sum = 0;
  for (std::size_t w = 0; w < run.workers(); ++w) {
    const std::size_t elements = run.frame(w).sent_elements();
    most = std::max(most, elements);
    sum += elements;
  }
  const std::size_t published = run.publisher.published_to_all().sent_elements();
  return most <= published && published <= std::min(run.model.elements(), sum);
}

}  // namespace lamina_test
