// SPDX-License-Identifier: MIT
#include "loops/allreduce.hpp"

#include <algorithm>
#include <cstring>
#include <lamina/worker.hpp>
#include <memory>
#include <optional>
#include <utility>

#include "loops/owned_slices.hpp"

namespace lab {
namespace {

// Bounds the memory for layers on their way: 16 MiB.
constexpr std::size_t chunk_elements = std::size_t{1} << 22;

// Applies the mean of the layers that all have selected.
class kept_layers {
 public:
  kept_layers(worker_group& group, const replica& local, sgd& optimizer)
      : group_(group), local_(local), optimizer_(optimizer) {}

  void begin(std::uint64_t step) { step_ = step; }

  void add(std::size_t layer, std::span<const float> gradient) {
    for (std::size_t begin = 0; begin < gradient.size();) {
      const std::size_t count = std::min(chunk_elements - chunk_->size(), gradient.size() - begin);
      const auto part = gradient.subspan(begin, count);
      chunk_->insert(chunk_->end(), part.begin(), part.end());
      pieces_.push_back({layer, begin, count});
      begin += count;
      if (chunk_->size() == chunk_elements) flush();
    }
  }

  void flush() {
    group_.sum(chunk_);
    for (float& each : *chunk_) each /= static_cast<float>(group_.workers());
    std::span<const float> rest = *chunk_;
    for (const piece& each : pieces_) {
      if (each.begin == 0) optimizer_.begin(each.layer, step_);
      optimizer_.update(each.layer, each.begin, rest.first(each.count), local_[each.layer]);
      rest = rest.subspan(each.count);
    }
    chunk_->clear();
    pieces_.clear();
  }

 private:
  struct piece {
    std::size_t layer;
    std::size_t begin;
    std::size_t count;
  };
  worker_group& group_;
  const replica& local_;
  sgd& optimizer_;
  std::shared_ptr<std::vector<float>> chunk_ =
      std::make_shared<std::vector<float>>();  // with what is sent of it
  std::vector<piece> pieces_;
  std::uint64_t step_ = 0;
};

// The same by the owners of slices: in any payload, and where some of what goes to them may be lost.
class owned_layers {
 public:
  owned_layers(worker_group& group, const replica& local, sgd& optimizer, const worker_options& worker)
      : slices_(group, local.model(), {.up = worker.compression.payload}, worker.plan.losses,
                worker.plan.steps_done),
        local_(local),
        optimizer_(optimizer) {}

  /// Of what the compressor has encoded for `step`, which is then committed as far as it has arrived.
  step_traffic apply(lamina::gradient_compressor<float>& compressor, std::uint64_t step) {
    const lamina::selection& chosen = compressor.chosen();
    sums_.clear();
    for (const std::size_t l : chosen.sent())
      sums_.insert(sums_.end(), compressor.residual()[l].begin(), compressor.residual()[l].end());
    const slices_exchanged done = slices_.exchange(chosen, sums_);
    std::span<const float> rest = sums_;
    for (const std::size_t l : chosen.sent()) {
      optimizer_.begin(l, step);
      optimizer_.update(l, 0, rest.first(local_[l].size()), local_[l]);
      rest = rest.subspan(local_[l].size());
    }
    commit(compressor, done);
    return {done.bytes / 2, done.cost};
  }

 private:
  owned_slices slices_;
  const replica& local_;
  sgd& optimizer_;
  std::vector<float> sums_;  // of the parts chosen, one behind the other
};

// All reports of a step, to worker 0: of replicas that are the same. What the transfers took stands before each.
std::vector<pushed> gather_reports(worker_group& group, message_kind kind, const step_report& report,
                                   std::uint64_t step, const std::optional<transfer_cost>& cost = {}) {
  payload mine;
  if (cost) mine.append(payload(std::as_bytes(std::span(&*cost, 1))));
  mine.append(payload(encode_report(report)));
  std::vector<pushed> all;
  for (const message& each : group.gather(kind, mine)) {
    const pushed& theirs = all.emplace_back(read_pushed(each));
    if (theirs.report.replica_hash != report.replica_hash)
      throw other_replica(group.name_of(each.sender), step);
  }
  return all;
}

// The layers that all send: by the mean of what each would.
const lamina::selection& select_together(worker_group& group,
                                         lamina::gradient_compressor<float>& compressor) {
  const bool is_ahead = compressor.options().decide == lamina::decision_timing::ahead;
  const auto own = is_ahead ? compressor.predicted_values() : compressor.values();
  std::vector<double> agreed(own.begin(), own.end());
  group.average(agreed);
  if (!is_ahead) return compressor.select(agreed);
  compressor.plan_next(agreed);
  return compressor.select();  // as the step before has planned it
}

}  // namespace

beginning begin_alike(worker_group& group, replica& local, server_state from) {
  const std::vector<std::byte> bytes = group.scatter(message_kind::state, [&](std::size_t w) {
    std::vector<std::vector<std::byte>> parts(3);
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      const auto layer = std::as_bytes(local[l]);
      parts[0].insert(parts[0].end(), layer.begin(), layer.end());
    }
    parts[1] = from.optimizer;
    if (from.step > 0) parts[2] = std::move(from.workers.at(w));
    return pack(parts);
  });
  std::vector<std::vector<std::byte>> parts = unpack(bytes);
  if (parts.size() != 3 || parts[0].size() != local.model().elements() * sizeof(float))
    throw link_error("worker 0 sent the beginning of another run");
  const std::byte* next = parts[0].data();
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    std::memcpy(local[l].data(), next, local[l].size_bytes());
    next += local[l].size_bytes();
  }
  local.upload();
  return {std::move(parts[1]), std::move(parts[2])};
}

void train_by_allreduce(worker_group& group, replica& local, const worker_tasks& tasks,
                        const worker_options& worker, const server_options& server,
                        const server_tasks& records, server_state from) {
  const training_plan& plan = worker.plan;
  const lamina::layout& model = local.model();
  lamina::gradient_compressor<float> compressor(local.partition().model(), worker.compression);
  sgd optimizer(model, server.optimizer);
  // Numbers are added up on the way where they can be; else their owners read them out of frames.
  std::optional<owned_layers> owned;
  if (plan.losses.is_lossy || worker.compression.payload != lamina::payload_type::as_is)
    owned.emplace(group, local, optimizer, worker);
  kept_layers kept(group, local, optimizer);
  step_log log(model, records.records, group.clock());

  const beginning begun = begin_alike(group, local, std::move(from));
  if (!begun.optimizer.empty()) take_up(begun.optimizer, optimizer);
  if (!begun.own.empty()) load_state(begun.own, &compressor, tasks);
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    step_report report = examine(local, step, plan, tasks, group.clock(),
                                 [&](std::span<double> statistics) { group.average(statistics); });
    if (plan.is_over(step)) return log_end(group, report, step, log);

    group.clock().take();
    tasks.compute(step, report);
    compressor.accumulate_all(local.gradients());
    report.compute_seconds = group.clock().take();

    const lamina::selection& chosen = select_together(group, compressor);
    const std::size_t frame_bytes = compressor.encode().size_bytes();
    report.threshold = compressor.threshold();
    optimizer.set_learning_rate(server.learning_rate.at(step));
    // Each worker sends all slices but its own, and then its own to all others.
    step_traffic traffic{.moved_bytes = frame_bytes * (group.workers() - 1) / group.workers()};
    if (owned) {
      traffic = owned->apply(compressor, step);
    } else {
      kept.begin(step);
      for (const std::size_t l : chosen.sent()) kept.add(l, compressor.residual()[l]);
      kept.flush();
      compressor.commit();
    }
    local.upload();

    log_step(group, report, step, traffic, log);
    log.finish_step(step, optimizer.learning_rate(), chosen);

    if (plan.makes_checkpoint_after(step)) {
      save_together(group, step, state_of(optimizer), save_state(&compressor, tasks), records);
      log.restart();
    }
  }
}

void save_together(worker_group& group, std::uint64_t step, std::vector<std::byte> optimizer,
                   std::vector<std::byte> own, const server_tasks& records, std::string plan) {
  const std::vector<message> states = group.gather(message_kind::state, payload(std::move(own)));
  server_state state{.step = step, .optimizer = std::move(optimizer), .workers = {}, .plan = std::move(plan)};
  for (const message& each : states) state.workers.emplace_back(each.bytes.begin(), each.bytes.end());
  if (records.save) records.save(state);
}

void log_step(worker_group& group, const step_report& report, std::uint64_t step, const step_traffic& traffic,
              step_log& log) {
  for (const pushed& each : gather_reports(group, message_kind::report, report, step, traffic.transfers)) {
    log.evaluated(each.report, step, group.workers());
    log.add_report(each.report, traffic.moved_bytes);
    if (!traffic.transfers) continue;
    transfer_cost theirs;
    read_elements(each.bytes, std::as_writable_bytes(std::span(&theirs, 1)));
    log.add_transfers(theirs);
  }
  log.published(traffic.moved_bytes, group.workers());
}

void log_end(worker_group& group, const step_report& report, std::uint64_t step, step_log& log) {
  log.finished(gather_reports(group, message_kind::finished, report, step), step);
}

}  // namespace lab
