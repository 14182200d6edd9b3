// SPDX-License-Identifier: MIT
#include "loops/local_updates.hpp"

#include <algorithm>
#include <deque>
#include <lamina/aggregator.hpp>
#include <lamina/codec.hpp>
#include <lamina/drift.hpp>
#include <memory>
#include <utility>

#include "loops/allreduce.hpp"
#include "loops/losses.hpp"
#include "loops/owned_slices.hpp"

namespace lab {
namespace {

void append(std::span<const std::byte> more, std::vector<std::byte>& to) {
  to.insert(to.end(), more.begin(), more.end());
}

template <class T>
std::vector<T> elements_in(std::span<const std::byte> bytes) {
  std::vector<T> elements(bytes.size() / sizeof(T));
  read_elements(bytes, std::as_writable_bytes(std::span(elements)));
  return elements;
}

std::vector<std::byte> state_of(const lamina::outer_step<float>& outer) {
  return pack(std::vector{bytes_of_elements(outer.momentum()), bytes_of_elements(outer.rounding())});
}

void take_up(std::span<const std::byte> state, lamina::outer_step<float>& outer) {
  const auto parts = unpack(state);
  if (parts.size() != 2) throw link_error("the state to resume from is that of another optimizer");
  outer.restore(elements_in<float>(parts[0]), elements_in<float>(parts[1]));
}

// One worker: y in the replica, and x beside it.
class drifting_worker {
 public:
  /// Both begin as what stands in the replica.
  drifting_worker(replica& local, const worker_options& worker, const server_options& server)
      : local_(local),
        plan_(worker.plan),
        optimizer_(local.model(), server.optimizer),
        learning_rate_(server.learning_rate),
        compressor_(local.model(), for_parts(worker.compression)) {
    for (std::size_t l = 0; l < local.model().layers(); ++l) {
      own_.push_back(local[l]);
      shared_.emplace_back(own_[l].begin(), own_[l].end());
    }
  }

  lamina::drift_compressor<float>& compressor() { return compressor_; }
  std::span<const double> values() const { return compressor_.values(); }

  /// A step of its own, by the gradients that stand in the replica.
  void move(std::uint64_t step) {
    optimizer_.set_learning_rate(learning_rate_.at(step));
    for (std::size_t l = 0; l < own_.size(); ++l) {
      optimizer_.begin(l, step);
      optimizer_.update(l, 0, local_.gradient(l), own_[l]);
    }
    local_.upload();
    compressor_.observe_all(shared_, own_);
  }
  const lamina::encoded_frame& encode() { return compressor_.encode(shared_, own_); }
  void pack_into(std::span<float> updates) { compressor_.pack(shared_, own_, updates); }

  /// What all subtract, in the order of the steps.
  template <class... Update>
  void apply(const Update&... update) {
    compressor_.apply(update..., shared_, own_);
    local_.upload();
  }
  std::uint64_t oldest_step() const { return compressor_.step() + 1 - compressor_.steps_under_way(); }

  /// Calls `look` while x stands in the replica.
  template <class Look>
  auto with_shared(Look look) {
    const exchanged both(*this);
    return look();
  }
  /// As examine(), of x.
  step_report examine_shared(std::uint64_t step, const worker_tasks& tasks, work_clock& clock,
                             const average_over_workers& average) {
    const auto look = [&] { return examine(local_, step, plan_, tasks, clock, average); };
    const bool is_looked_at = plan_.averages_statistics_before(step) || plan_.compares_replicas_before(step);
    return is_looked_at ? with_shared(look) : look();
  }

  /// With updates that have come and were not applied yet.
  std::vector<std::byte> save(const worker_tasks& tasks, std::span<const std::vector<std::byte>> updates) {
    std::vector<std::vector<std::byte>> states = {compressor_.save(),
                                                  tasks.save ? tasks.save() : std::vector<std::byte>(),
                                                  bytes_of_elements(std::as_const(optimizer_).velocity()),
                                                  {},
                                                  {},
                                                  pack(updates)};
    for (std::size_t l = 0; l < own_.size(); ++l) {
      append(std::as_bytes(std::span(shared_[l])), states[3]);
      append(std::as_bytes(own_[l]), states[4]);
    }
    return pack(states);
  }
  std::vector<std::vector<std::byte>> load(std::span<const std::byte> bytes, const worker_tasks& tasks) {
    const auto states = unpack(bytes);
    const std::size_t model_bytes = local_.model().elements() * sizeof(float);
    if (states.size() != 6 || states[3].size() != model_bytes || states[4].size() != model_bytes)
      throw link_error("the state to resume from is that of another kind of worker");
    compressor_.load(states[0]);
    if (tasks.load) tasks.load(states[1]);
    read_elements(states[2], std::as_writable_bytes(optimizer_.velocity()));
    std::ranges::fill(optimizer_.updated_in(), compressor_.step());
    for (std::size_t l = 0; l < own_.size(); ++l) {
      const std::size_t begin = local_.model().offset(l) * sizeof(float);
      const std::size_t size = own_[l].size_bytes();
      read_elements(std::span(states[3]).subspan(begin, size), std::as_writable_bytes(std::span(shared_[l])));
      read_elements(std::span(states[4]).subspan(begin, size), std::as_writable_bytes(own_[l]));
    }
    local_.upload();
    return unpack(states[5]);
  }

 private:
  class exchanged {
   public:
    explicit exchanged(drifting_worker& of) : of_(of) { of_.exchange(); }
    ~exchanged() { of_.exchange(); }
    exchanged(const exchanged&) = delete;
    exchanged& operator=(const exchanged&) = delete;

   private:
    drifting_worker& of_;
  };

  // The replica's model is of parts already.
  static lamina::compressor_options for_parts(lamina::compressor_options options) {
    options.part_elements = 0;
    return options;
  }

  void exchange() {
    for (std::size_t l = 0; l < own_.size(); ++l) std::ranges::swap_ranges(own_[l], shared_[l]);
    local_.upload();
  }

  replica& local_;
  training_plan plan_;
  sgd optimizer_;
  learning_rate_schedule learning_rate_;
  lamina::drift_compressor<float> compressor_;
  std::vector<std::span<float>> own_;       // y, in the replica
  std::vector<std::vector<float>> shared_;  // x
};

// Updates as they come from the server: applied in their order, D steps later.
class updates_from_server {
 public:
  updates_from_server(worker_link& server, drifting_worker& own) : server_(server), own_(own) {}

  /// Takes those that are on their way. The clock of the step goes on.
  void take() {
    while (arrived_.size() < own_.compressor().steps_under_way())
      arrived_.push_back(server_.receive(message_kind::parameters));
  }
  /// Applies all but the last so many.
  void apply(std::uint64_t but) {
    while (own_.compressor().steps_under_way() > but) {
      if (arrived_.empty()) arrived_.push_back(server_.receive_parameters());
      read_from(server_.name_of_server(), [&] {
        own_.apply(lamina::decode<float>(arrived_.front().bytes, own_.compressor().parts()));
      });
      arrived_.pop_front();
    }
  }

  std::vector<std::vector<std::byte>> save() const {
    std::vector<std::vector<std::byte>> all;
    for (const message& each : arrived_) all.emplace_back(each.bytes.begin(), each.bytes.end());
    return all;
  }
  void load(std::vector<std::vector<std::byte>> all) {
    for (auto& each : all) {
      const auto bytes = std::make_shared<std::vector<std::byte>>(std::move(each));
      arrived_.push_back({.sender = 0, .kind = message_kind::parameters, .bytes = *bytes, .owner = bytes});
    }
  }

 private:
  worker_link& server_;
  drifting_worker& own_;
  std::deque<message> arrived_;
};

}  // namespace

void work_on_local_updates(worker_link& server, replica& local, const worker_tasks& tasks,
                           const worker_options& options, const server_options& serving,
                           const local_options& how) {
  const training_plan& plan = options.plan;
  apply_parameters(server.receive_parameters(), server.name_of_server(), local, plan.steps_done + 1);
  // Shared with the frames on their way.
  const auto own = std::make_shared<drifting_worker>(local, options, serving);
  const std::shared_ptr<lamina::drift_compressor<float>> compressor(own, &own->compressor());
  gradient_way way(plan.losses, local.model(), options.compression.payload);
  updates_from_server updates(server, *own);
  if (plan.steps_done > 0) updates.load(own->load(server.receive_states(1)[0], tasks));
  const auto average = [&](std::span<double> values) { server.average(values); };
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    if (plan.is_over(step)) updates.apply(0);
    // Before anything else is said: messages come in their order.
    if (plan.averages_statistics_before(step)) updates.take();
    step_report report = own->examine_shared(step, tasks, server.clock(), average);
    if (plan.is_over(step)) return server.finish(report);

    tasks.compute(step, report);
    updates.take();
    own->move(step);
    if (plan.agrees_on_selection) {
      std::vector<double> values(own->values().begin(), own->values().end());
      server.average(values);
      compressor->select(values);
    }
    const lamina::encoded_frame& frame = own->encode();
    report.threshold = compressor->threshold();
    way.send(server, compressor, frame, step, report);
    updates.apply(how.delay_steps);

    if (plan.makes_checkpoint_after(step)) {
      updates.take();
      server.send_states({{own->save(tasks, updates.save())}});
    }
  }
}

void serve_local_updates(server_link& workers, const replica& local, const server_options& options,
                         const local_options& how, const server_tasks& tasks, server_state from) {
  const training_plan& plan = options.plan;
  const lamina::layout& model = local.model();
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(
      model, workers.clients(), {.first_step = from.step + 1, .kind = lamina::frame_kind::updates});
  lamina::outer_step<float> outer(model, how.outer);
  lamina::frame_encoder<float> frames(model);
  std::vector<float> changes(model.elements());
  const auto change_of = [&](std::size_t l) {
    return std::span<const float>(changes).subspan(model.offset(l), model.sizes()[l]);
  };
  step_log log(model, tasks.records, workers.clock());

  {
    lamina::parameter_publisher<float> beginning(model, workers.clients());
    const auto& frame = beginning.encode_for_all(from.step + 1, [&](std::size_t l) { return local[l]; });
    workers.send_to_all(message_kind::parameters, payload(frame.to_bytes()));
  }
  if (from.step > 0) {
    take_up(from.optimizer, outer);
    send_states(workers, from);
    from.workers.clear();
  }
  for (std::uint64_t step = from.step + 1;; ++step) {
    if (plan.averages_statistics_before(step)) workers.average();
    if (plan.is_over(step)) return finish(workers, local, step, log);
    if (plan.agrees_on_selection) workers.average();

    const std::vector<pushed> updates = take_frames(workers, local, step, log, aggregator);
    for (const std::size_t l : aggregator.arrived().sent()) {
      const std::span<float> mean = std::span(changes).subspan(model.offset(l), model.sizes()[l]);
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> block) {
        std::ranges::copy(block, mean.begin() + static_cast<std::ptrdiff_t>(begin));
      });
      outer(l, 0, mean);
      const std::span<float> x = local[l];
      for (std::size_t i = 0; i < x.size(); ++i) x[i] -= mean[i];
    }
    const lamina::encoded_frame& frame = frames.encode(lamina::frame_kind::updates, step, 0,
                                                       aggregator.arrived(), change_of, how.outer.payload);
    if (tasks.updated) tasks.updated(workers.clock().seconds());
    // It may still be on its way when the next is made.
    const payload answer(frame.to_bytes());
    if (how.delay_steps == 0) {
      workers.send_to_all(message_kind::parameters, answer);
    } else {
      for (std::size_t c = 0; c < workers.clients(); ++c)
        workers.begin_send(c, message_kind::parameters, answer);
    }
    log.published(frame.size_bytes(), workers.clients());
    log.finish_step(step, options.learning_rate.at(step), aggregator.arrived());
    aggregator.next_step();

    if (plan.makes_checkpoint_after(step)) {
      const server_state state{
          .step = step, .optimizer = state_of(outer), .workers = receive_states(workers)};
      if (tasks.save) tasks.save(state);
      log.restart();
    }
  }
}

void train_on_local_updates(worker_group& group, replica& local, const worker_tasks& tasks,
                            const worker_options& worker, const server_options& server,
                            const local_options& how, const server_tasks& records, server_state from) {
  const training_plan& plan = worker.plan;
  owned_slices slices(
      group, local.model(),
      {.kind = lamina::frame_kind::updates, .up = worker.compression.payload, .down = how.outer.payload},
      plan.losses, plan.steps_done);
  lamina::outer_step<float> outer(slices.own(), how.outer);
  step_log log(local.model(), records.records, group.clock());

  const beginning begun = begin_alike(group, local, std::move(from));
  drifting_worker own(local, worker, server);
  std::deque<std::vector<float>> updates;  // of the steps under way
  if (plan.steps_done > 0) {
    const auto states = unpack(begun.own);
    if (states.size() != 2) throw link_error("the state to resume from is that of another kind of worker");
    take_up(states[0], outer);
    for (const auto& each : own.load(states[1], tasks)) updates.push_back(elements_in<float>(each));
  }
  const auto apply_but = [&](std::uint64_t steps) {
    for (; updates.size() > steps; updates.pop_front())
      own.apply(own.oldest_step(), std::span<const float>(updates.front()));
  };
  const auto average = [&](std::span<double> values) { group.average(values); };
  for (std::uint64_t step = plan.steps_done + 1;; ++step) {
    if (plan.is_over(step)) apply_but(0);
    step_report report = own.examine_shared(step, tasks, group.clock(), average);
    if (plan.is_over(step)) return log_end(group, report, step, log);

    group.clock().take();
    tasks.compute(step, report);
    own.move(step);
    report.compute_seconds = group.clock().take();

    std::vector<double> values(own.values().begin(), own.values().end());
    group.average(values);
    const lamina::selection& chosen = own.compressor().select(values);
    report.threshold = own.compressor().threshold();
    std::vector<float>& update = updates.emplace_back(chosen.sent_elements());
    own.pack_into(update);
    const slices_exchanged done = slices.exchange(
        chosen, update, [&](std::size_t part, std::span<float> mean) { outer(part, 0, mean); });
    commit(own.compressor(), done);
    apply_but(how.delay_steps);

    // Half of what a worker sends goes to the owners of slices.
    log_step(group, report, step, {done.bytes / 2, done.cost}, log);
    log.finish_step(step, server.learning_rate.at(step), chosen);

    if (plan.makes_checkpoint_after(step)) {
      std::vector<std::vector<std::byte>> waiting;
      for (const auto& each : updates) waiting.push_back(bytes_of_elements(std::span<const float>(each)));
      const std::vector states = {state_of(outer), own.save(tasks, waiting)};
      own.with_shared([&] { save_together(group, step, {}, pack(states), records); });
      log.restart();
    }
  }
}

}  // namespace lab
