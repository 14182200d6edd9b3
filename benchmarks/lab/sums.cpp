// SPDX-License-Identifier: MIT
// The loops of workers without a server.
#include <algorithm>
#include <cmath>
#include <lamina/collectives/collectives.hpp>
#include <lamina/collectives/mpi_channel.hpp>
#include <lamina/collectives/torch_hooks.hpp>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "sgd.hpp"
#include "training.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;

collectives::algorithm_choice choice_of(const std::string& name) {
  if (name == "by_type") return collectives::algorithm_choice::by_type();
  for (const collectives::algorithm each : collectives::all_algorithms) {
    if (name == collectives::name_of(each)) return collectives::algorithm_choice::always(each);
  }
  throw std::invalid_argument("there is no algorithm " + name);
}

// Of each fragment: what its parameter belongs to.
std::vector<collectives::layer_class> classes_of(replica& local) {
  const lamina::tiling& cut = local.tiling();
  std::vector<collectives::layer_class> classes(cut.fragments().layers(),
                                                collectives::layer_class::convolutional);
  for (const auto& module : local.network().ptr()->modules()) {
    if (dynamic_cast<torch::nn::LinearImpl*>(module.get()) == nullptr) continue;
    for (const torch::Tensor& own : module->parameters(/*recurse=*/false)) {
      for (std::size_t l = 0; l < local.parameters().size(); ++l) {
        if (!local.parameters()[l].is_same(own)) continue;
        for (std::size_t f = cut.first(l); f < cut.first(l + 1); ++f)
          classes[f] = collectives::layer_class::fully_connected;
      }
    }
  }
  return classes;
}

void require_finite(const lamina::layout& model, std::size_t layer, std::span<const float> gradient) {
  if (!std::ranges::all_of(gradient, [](float each) { return std::isfinite(each); }))
    refuse_gradient(model, layer);
}

// Hooks hand each layer over as soon as its gradient is complete, unless there is no overlap. The first step records in which order that is,
// and overlaps with nothing. The mean of a layer is applied where the next forward pass needs the layer, through the gates of the network,
// or at the end of the step. With layer dropping a worker says which layers are summed, and its residual keeps the others.
class summed_training {
 public:
  explicit summed_training(training& run)
      : run_(run),
        how_(run.how),
        local_(run.local),
        reaches_forward_(how_.overlap == "step"),
        has_owners_(how_.exchange == "owners"),
        is_ahead_(how_.decide == "ahead"),
        channel_(run.all.communicator(), [&run](std::size_t rank) { return run.name_of(rank); }),
        optimizer_(local_.model().elements(), how_.momentum),
        is_open_(local_.parameters().size()) {
    if (how_.drops_layers()) worker_.emplace(local_.tiling().model(), run.compression());
    if (how_.overlaps()) {
      hooks_.emplace(*local_.network().ptr(), [this](std::size_t l) { gradient_is_ready(l); });
    } else {
      order_.resize(local_.parameters().size());
      std::iota(order_.rbegin(), order_.rend(), std::size_t{0});
    }
    if (reaches_forward_)
      collectives::set_gates(*local_.network().ptr(), [this](std::size_t l) {
        const work_clock::pause waiting(run_.clock);
        take(l);
      });
  }
  summed_training(const summed_training&) = delete;
  summed_training& operator=(const summed_training&) = delete;
  ~summed_training() {
    if (reaches_forward_) collectives::set_gates(*local_.network().ptr(), {});
  }

  void train() {
    for (std::uint64_t step = 1;; ++step) {
      if (run_.is_over(step)) return run_.examine();
      compute(step);
      if (!reaches_forward_ || run_.is_over(step + 1)) finish_step();
    }
  }

 private:
  // Forward, whose gates take the layers of the last step, and backward, whose hooks hand over those of this one.
  void compute(std::uint64_t step) {
    computing_ = step;
    is_begun_ = false;
    seconds_before_ = 0;
    step_report report{.is_sender = 1};
    run_.clock.take();
    run_.compute(step, report);
    if (hooks_) hooks_->check_all_called();
    if (worker_ && !is_ahead_) choose_at_end();
    report.compute_seconds = seconds_before_ + run_.clock.take();
    const bool is_planned = engine_.has_value();
    if (!is_planned) plan();
    if (!is_planned || !how_.overlaps()) {
      begin_step();
      for (const std::size_t l : order_) hand_over(l);
    }
    open_ = {step, report};
  }

  void choose_at_end() {
    step_.emplace(worker_->add(local_.gradients()));
    if (!*step_) refuse_gradient(worker_->model(), step_->refused_layer());
    run_.all.average(step_->values());
    step_->select();
  }

  void gradient_is_ready(std::size_t layer) {
    if (!engine_) {
      order_.push_back(layer);
      return;
    }
    if (!is_begun_) begin_step();
    hand_over(layer);
  }

  void plan() {
    const auto timeout = std::chrono::seconds(how_.timeout_seconds);
    const lamina::tiling& cut = local_.tiling();
    std::vector<std::size_t> fragments;
    for (const std::size_t l : collectives::agree_on_order(channel_, cut.model(), order_, timeout)) {
      for (std::size_t f = cut.first(l); f < cut.first(l + 1); ++f) fragments.push_back(f);
    }
    collectives::plan_options options;
    options.bucket_bytes = how_.bucket_bytes;
    options.choice = choice_of(how_.collectives);
    options.payload = run_.compression().payload;
    collectives::engine_options running;
    running.timeout = timeout;
    if (has_owners_)
      running.update = [this](std::size_t fragment, std::size_t begin, std::span<float> mean) {
        update_shard(fragment, begin, mean);
      };
    engine_.emplace(
        channel_,
        collectives::plan(cut.fragments(), channel_.ranks(), fragments, classes_of(local_), options),
        running);
  }

  // With the first gradient, when the forward pass has taken all of the last step.
  void begin_step() {
    seconds_before_ += run_.clock.take();
    finish_step();
    before_ = engine_->totals();
    rate_ = run_.learning_rate(computing_);
    if (worker_ && is_ahead_) step_.emplace(worker_->begin(worker_->plan()));
    engine_->begin_step();
    is_begun_ = true;
    run_.clock.take();
  }

  // The gradient of a parameter is complete: what is exchanged of it goes on its way, or is dropped.
  void hand_over(std::size_t layer) {
    is_open_[layer] = true;
    const lamina::tiling& cut = local_.tiling();
    const torch::Tensor gradient = local_.parameters()[layer].grad();
    const auto elements = lamina::elements_of<float>(gradient);
    if (!worker_) {
      require_finite(cut.model(), layer, elements);
    } else if (is_ahead_ && !step_->add(layer, gradient)) {
      refuse_gradient(cut.model(), layer);
    }
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) {
      if (!worker_) {
        engine_->ready(f, elements.subspan(cut.begin(f), cut.fragments().sizes()[f]));
      } else if (step_->is_sent(f)) {
        engine_->ready(f, step_->fragment(f));
      } else {
        engine_->hold_back(f);
      }
    }
  }

  // Waits for a parameter of the open step, unless it was taken: it is then the new one.
  void take(std::size_t layer) {
    if (!is_open_[layer]) return;
    is_open_[layer] = false;
    const lamina::tiling& cut = local_.tiling();
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) {
      engine_->wait(f);
      if (has_owners_) {
        std::ranges::copy(engine_->parameters(f), local_[f].begin());
      } else if (const auto mean = engine_->mean(f); !mean.empty()) {
        update(f, mean);
      }
    }
  }

  void update(std::size_t fragment, std::span<const float> gradient) {
    optimizer_.update(local_.model().offset(fragment), gradient, local_[fragment], rate_);
  }

  // In the engine's thread. Not in the network, whose parameters the backward pass may still read, but in a copy.
  void update_shard(std::size_t fragment, std::size_t begin, std::span<float> mean) {
    const auto old = local_[fragment].subspan(begin, mean.size());
    shard_.assign(old.begin(), old.end());
    optimizer_.update(local_.model().offset(fragment) + begin, mean, shard_, rate_);
    std::ranges::copy(shard_, mean.begin());
  }

  // The step that was computed last, if it is open: its parameters, the choice for the next one, the records.
  void finish_step() {
    if (!open_) return;
    {
      const work_clock::pause waiting(run_.clock);
      engine_->drain();
      for (std::size_t l = 0; l < is_open_.size(); ++l) take(l);
    }
    auto [step, report] = *std::exchange(open_, std::nullopt);
    if (step_) {
      if (!is_ahead_) step_->frame();  // a rounded payload is committed as it was written
      step_->commit();
      step_.reset();
      if (is_ahead_) run_.all.average(worker_->values());
    }
    const collectives::engine_totals now = engine_->totals();
    const double exposed = now.waited_seconds - before_.waited_seconds;
    // Half of what a worker sends are sums on their way to where they are made.
    report.sent_bytes = static_cast<double>(now.sent_bytes - before_.sent_bytes) / 2;
    run_.log(
        step, report,
        {.exposed_seconds = exposed,
         .hidden_seconds = std::max(0.0, now.collective_seconds - before_.collective_seconds - exposed)});
  }

  struct computed_step {
    std::uint64_t step = 0;
    step_report report;
  };

  training& run_;
  const options& how_;
  replica& local_;
  bool reaches_forward_;
  bool has_owners_;
  bool is_ahead_;
  collectives::mpi_channel channel_;
  std::optional<lamina::worker<float>> worker_;
  std::optional<lamina::worker<float>::step> step_;  // from its choice to the end of its sums
  sgd optimizer_;  // of the engine's thread while a step is open, but for parameters that have no owner
  std::vector<float> shard_;
  std::optional<collectives::gradient_hooks> hooks_;
  std::vector<std::size_t> order_;  // of layers, as the first step has seen them
  std::vector<bool> is_open_;       // parameters that were handed over and not taken
  std::uint64_t computing_ = 0;
  bool is_begun_ = false;      // the step that is computed has handed over a layer
  double seconds_before_ = 0;  // of its computation, before that
  float rate_ = 0;             // of the step that is summed
  std::optional<computed_step> open_;
  collectives::engine_totals before_;
  std::optional<collectives::engine> engine_;  // the last: its thread uses the others
};

}  // namespace

void train_by_sums(training& run) {
  summed_training(run).train();
}

void train_plainly(training& run) {
  constexpr std::size_t bucket_elements = (std::size_t{25} << 20) / sizeof(float);
  replica& local = run.local;
  const lamina::layout& model = local.model();
  sgd optimizer(model.elements(), run.how.momentum);
  std::vector<float> gradients(model.elements());
  for (std::uint64_t step = 1;; ++step) {
    if (run.is_over(step)) return run.examine();
    step_report report{.is_sender = 1};
    run.clock.take();
    run.compute(step, report);
    report.compute_seconds = run.clock.take();
    {
      const work_clock::pause summing(run.clock);
      auto to = gradients.begin();
      for (const auto gradient : local.gradient_elements()) to = std::ranges::copy(gradient, to).out;
      for (std::size_t begin = 0; begin < gradients.size(); begin += bucket_elements)
        check_mpi(MPI_Allreduce(MPI_IN_PLACE, gradients.data() + begin,
                                static_cast<int>(std::min(bucket_elements, gradients.size() - begin)),
                                MPI_FLOAT, MPI_SUM, run.all.communicator()),
                  "MPI_Allreduce");
    }
    for (float& each : gradients) each /= static_cast<float>(run.all.size());
    for (std::size_t l = 0; l < model.layers(); ++l)
      optimizer.update(model.offset(l), std::span(gradients).subspan(model.offset(l), model.sizes()[l]),
                       local[l], run.learning_rate(step));
    // As few as an all-reduce can move in and out of each.
    const auto workers = static_cast<double>(run.all.size());
    report.sent_bytes = static_cast<double>(gradients.size() * sizeof(float)) * (workers - 1) / workers;
    run.log(step, report);
  }
}

}  // namespace lab
