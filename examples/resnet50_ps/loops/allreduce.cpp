// SPDX-License-Identifier: MIT
#include "loops/allreduce.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <lamina/worker.hpp>
#include <utility>

#include "loops/worker_step.hpp"
#include "records/metrics.hpp"

namespace resnet50_ps {
namespace {

// Bounds the memory for layers on their way: 16 MiB.
constexpr std::size_t chunk_elements = std::size_t{1} << 22;

template <class T>
std::span<const T> values_in(const message& from, std::size_t count) {
  if (from.bytes.size() != count * sizeof(T)) throw link_error("a worker sums other values than the others");
  return {reinterpret_cast<const T*>(from.bytes.data()), count};
}

// Applies the mean of the layers that all have selected.
class kept_layers {
 public:
  kept_layers(worker_group& group, const replica& local, sgd& optimizer)
      : group_(group), local_(local), optimizer_(optimizer) {}

  void begin(std::uint64_t step) { step_ = step; }

  void add(std::size_t layer, std::span<const float> gradient) {
    for (std::size_t begin = 0; begin < gradient.size();) {
      const std::size_t count = std::min(chunk_elements - chunk_.size(), gradient.size() - begin);
      const auto part = gradient.subspan(begin, count);
      chunk_.insert(chunk_.end(), part.begin(), part.end());
      pieces_.push_back({layer, begin, count});
      begin += count;
      if (chunk_.size() == chunk_elements) flush();
    }
  }

  void flush() {
    group_.sum(std::span(chunk_));
    const stopwatch updating;
    for (float& each : chunk_) each /= static_cast<float>(group_.workers());
    std::span<const float> rest = chunk_;
    for (const piece& each : pieces_) {
      if (each.begin == 0) optimizer_.begin(each.layer, step_);
      optimizer_.update(each.layer, each.begin, rest.first(each.count), local_[each.layer]);
      rest = rest.subspan(each.count);
    }
    update_seconds_ += updating.seconds();
    chunk_.clear();
    pieces_.clear();
  }

  double take_update_seconds() { return std::exchange(update_seconds_, 0); }

 private:
  struct piece {
    std::size_t layer;
    std::size_t begin;
    std::size_t count;
  };
  worker_group& group_;
  const replica& local_;
  sgd& optimizer_;
  std::vector<float> chunk_;
  std::vector<piece> pieces_;
  double update_seconds_ = 0;
  std::uint64_t step_ = 0;
};

}  // namespace

worker_group::worker_group(transport& ranks) : worker_peers(ranks.ranks(), ranks.rank()), transport_(ranks) {
  for (std::size_t rank = 0; rank < ranks.ranks(); ++rank) {
    if (rank != ranks.rank()) others_.push_back(rank);
  }
}

// To one and from one at a time, each round at another distance: all at once would meet in the queues of the links.
template <class Outgoing, class Take>
void worker_group::exchange_with_all(Outgoing outgoing, Take take) {
  for (std::size_t distance = 1; distance < workers(); ++distance) {
    const std::size_t to = (worker() + distance) % workers();
    const std::size_t from = (worker() + workers() - distance) % workers();
    take(from, transport_.exchange(to, std::as_bytes(outgoing(to)), from));
  }
}

void worker_group::sum(std::span<float> values) {
  const auto slice = [&](std::size_t w) {
    const std::size_t begin = values.size() * w / workers();
    return values.subspan(begin, values.size() * (w + 1) / workers() - begin);
  };
  const std::span<float> mine = slice(worker());
  std::vector<std::span<const float>> parts(workers());
  parts[worker()] = mine;
  exchange_with_all(slice, [&](std::size_t other, const message& theirs) {
    parts[other] = values_in<float>(theirs, mine.size());
  });
  std::vector<float> total(parts[0].begin(), parts[0].end());
  for (std::size_t w = 1; w < workers(); ++w) {
    std::ranges::transform(total, parts[w], total.begin(), std::plus());
  }
  std::ranges::copy(total, mine.begin());

  exchange_with_all([&](std::size_t) { return mine; },
                    [&](std::size_t other, const message& theirs) {
                      const std::span<float> to = slice(other);
                      std::ranges::copy(values_in<float>(theirs, to.size()), to.begin());
                    });
}

// By worker 0, who hears all of them: few values, and it knows at once who is silent.
void worker_group::average(std::span<double> values) {
  const std::vector<message> asking = gather({}, std::as_bytes(values));
  if (worker() > 0) {
    constexpr std::size_t first = 0;
    const std::span<const double> mean =
        values_in<double>(transport_.receive_from_each({&first, 1})[0], values.size());
    std::ranges::copy(mean, values.begin());
    return;
  }
  for (std::size_t w = 1; w < workers(); ++w) {
    std::ranges::transform(values, values_in<double>(asking[w], values.size()), values.begin(), std::plus());
  }
  for (double& each : values) each /= static_cast<double>(workers());
  const std::span<const std::byte> mean = std::as_bytes(values);
  transport_.send(others_, {}, {&mean, 1});
}

std::vector<message> worker_group::gather(const step_report& report, std::span<const std::byte> bytes) {
  if (worker() > 0) {
    constexpr std::size_t first = 0;
    transport_.send({&first, 1}, report, {&bytes, 1});
    return {};
  }
  own_.assign(bytes.begin(), bytes.end());
  std::vector<message> messages = {{.sender = 0, .report = report, .bytes = own_}};
  for (message each : transport_.receive_from_each(others_)) {
    ++each.sender;
    messages.push_back(each);
  }
  return messages;
}

std::vector<std::byte> worker_group::scatter(const std::function<std::vector<std::byte>(std::size_t)>& make) {
  if (worker() > 0) {
    constexpr std::size_t first = 0;
    const std::span<const std::byte> bytes = transport_.receive_from_each({&first, 1})[0].bytes;
    return {bytes.begin(), bytes.end()};
  }
  for (const std::size_t w : others_) {
    const std::vector<std::byte> made = make(w);
    const std::span<const std::byte> bytes = made;
    transport_.send({&w, 1}, {}, {&bytes, 1});
  }
  return make(0);
}

namespace {

// All begin with the parameters and the velocity of worker 0, and each with its own state where a run resumes.
void begin(worker_group& group, replica& local, sgd& optimizer,
           lamina::gradient_compressor<float>& compressor, const worker_tasks& tasks, server_state from) {
  const std::vector<std::byte> bytes = group.scatter([&](std::size_t w) {
    std::vector<std::vector<std::byte>> parts(4);
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      const auto layer = std::as_bytes(local[l]);
      parts[0].insert(parts[0].end(), layer.begin(), layer.end());
    }
    const auto velocity = std::as_bytes(std::span(from.velocity));
    parts[1].assign(velocity.begin(), velocity.end());
    if (from.step > 0) parts[2] = std::move(from.workers.at(w));
    const auto updated_in = std::as_bytes(std::span(from.updated_in));
    parts[3].assign(updated_in.begin(), updated_in.end());
    return pack(parts);
  });
  const std::vector<std::vector<std::byte>> parts = unpack(bytes);
  if (parts.size() != 4 || parts[0].size() != local.model().elements() * sizeof(float) ||
      (!parts[1].empty() && parts[1].size() != optimizer.velocity().size_bytes()) ||
      (!parts[3].empty() && parts[3].size() != optimizer.updated_in().size_bytes())) {
    throw link_error("worker 0 sent the beginning of another run");
  }
  const std::byte* next = parts[0].data();
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    std::memcpy(local[l].data(), next, local[l].size_bytes());
    next += local[l].size_bytes();
  }
  local.upload();
  if (!parts[1].empty()) std::memcpy(optimizer.velocity().data(), parts[1].data(), parts[1].size());
  if (!parts[3].empty()) std::memcpy(optimizer.updated_in().data(), parts[3].data(), parts[3].size());
  if (!parts[2].empty()) load_state(parts[2], &compressor, tasks);
}

}  // namespace

void train_by_allreduce(worker_group& group, replica& local, const worker_tasks& tasks,
                        const worker_options& worker, const server_options& server,
                        const server_tasks& records, server_state from) {
  const lamina::layout& model = local.model();
  lamina::gradient_compressor<float> compressor(local.partition().model(), worker.compression);
  sgd optimizer(model, server.optimizer);
  kept_layers kept(group, local, optimizer);
  step_summary summary(model);
  evaluation_log evaluations;

  begin(group, local, optimizer, compressor, tasks, std::move(from));
  for (std::uint64_t step = worker.steps_done + 1;; ++step) {
    if (tasks.pulled) tasks.pulled(step);
    step_report report = report_on_replica(local, step, tasks, worker);
    const std::vector<message> replicas = group.gather(report, {});
    if (group.worker() == 0) {
      take_reports(
          replicas, step, [&] { return report.replica_hash; },
          [&](std::size_t w) { return group.name_of(w); }, evaluations, records);
    }
    if (report.is_last) return;

    const stopwatch compute;
    tasks.compute(step, report);
    compressor.accumulate_all(local.gradients());
    report.compute_seconds = compute.seconds();

    std::vector<double> agreed(compressor.values().begin(), compressor.values().end());
    group.average(agreed);
    const lamina::selection& chosen = compressor.select(agreed);
    const std::size_t frame_bytes = compressor.encode().size_bytes();
    const float learning_rate = server.learning_rate.at(step);
    optimizer.set_learning_rate(learning_rate);
    kept.begin(step);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (chosen.is_sent(l)) kept.add(l, compressor.residual()[l]);
    }
    kept.flush();
    local.upload();
    compressor.commit();

    report.threshold = compressor.threshold();
    const std::vector<message> reports = group.gather(report, {});
    if (group.worker() == 0) {
      // Each worker sends all slices but its own, and then its own to all others.
      const std::size_t moved_bytes = frame_bytes * (group.workers() - 1) / group.workers();
      for (const message& each : reports) summary.add_report(each.report, moved_bytes);
      summary.add_published(moved_bytes, group.workers());
      summary.add_arrived(chosen);
      summary.add_server_seconds(kept.take_update_seconds());
      const step_metrics metrics = summary.finish(step, learning_rate);
      if (records.record) records.record(metrics);
    }
    if (is_checkpoint_due(worker.checkpoint_period_steps, step, worker.steps)) {
      const std::vector<message> states = group.gather({}, save_state(&compressor, tasks));
      if (group.worker() == 0 && records.save) {
        server_state state{.step = step, .velocity = {}, .updated_in = {}, .workers = {}};
        state.velocity.assign(optimizer.velocity().begin(), optimizer.velocity().end());
        state.updated_in.assign(optimizer.updated_in().begin(), optimizer.updated_in().end());
        for (const message& each : states) state.workers.emplace_back(each.bytes.begin(), each.bytes.end());
        records.save(state);
      }
      summary.begin();
    }
  }
}

}  // namespace resnet50_ps
