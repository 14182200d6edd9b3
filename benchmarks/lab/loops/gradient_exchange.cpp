// SPDX-License-Identifier: MIT
#include "loops/gradient_exchange.hpp"

#include <fmt/format.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <lamina/error.hpp>
#include <stdexcept>
#include <utility>

#include "network/calibration.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;

void require_finite(const lamina::layout& model, std::size_t layer, std::span<const float> gradient) {
  if (std::ranges::all_of(gradient, [](float each) { return std::isfinite(each); })) return;
  throw lamina::non_finite_gradient(layer, layer, model[layer].name, "gradient holds NaN or infinity");
}

// Of each part of the model.
std::vector<collectives::layer_class> classes_of(replica& local) {
  const lamina::partition& cut = local.partition();
  const std::vector<torch::Tensor> parameters = local.network().ptr()->parameters();
  std::vector<collectives::layer_class> classes(cut.parts().layers());
  for (const auto& module : local.network().ptr()->modules()) {
    if (module->as<torch::nn::LinearImpl>() == nullptr) continue;
    for (const torch::Tensor& each : module->parameters(/*recurse=*/false)) {
      const auto found =
          std::ranges::find_if(parameters, [&](const torch::Tensor& one) { return one.is_same(each); });
      const auto l = static_cast<std::size_t>(found - parameters.begin());
      for (std::size_t p = cut.first(l); p < cut.first(l + 1); ++p)
        classes[p] = collectives::layer_class::fully_connected;
    }
  }
  return classes;
}

}  // namespace

gradient_exchange::gradient_exchange(worker_group& group, collectives::channel& over, replica& local,
                                     const sgd_options& optimizer, residual_compressor* held_back,
                                     const overlap_options& options)
    : group_(group),
      channel_(over),
      local_(local),
      parameters_(local.network().ptr()->parameters()),
      compressor_(held_back),
      options_(options),
      optimizer_options_(optimizer),
      is_open_(parameters_.size()),
      needed_seconds_(local.partition().parts().layers()),
      ready_seconds_(local.partition().parts().layers()) {}

void gradient_exchange::plan(const std::vector<std::size_t>& order) {
  const lamina::partition& cut = local_.partition();
  const auto agreed = collectives::agree_on_order(channel_, cut.model(), order, options_.timeout);
  const auto costs = options_.is_calibrated ? calibrate(channel_, {.timeout = options_.timeout})
                                            : collectives::gigabit_costs;
  std::vector<std::size_t> parts;
  for (const std::size_t l : agreed) {
    for (std::size_t p = cut.first(l); p < cut.first(l + 1); ++p) parts.push_back(p);
  }
  begin(collectives::plan(cut.parts(), channel_.ranks(), parts, classes_of(local_), options_.plan, costs));
}

void gradient_exchange::take_up_plan(const std::string& text, const std::string& from) {
  try {
    begin(collectives::plan::load(text, local_.partition().parts(), channel_.ranks()));
  } catch (const collectives::plan_error& error) {
    throw collectives::plan_error(from + ": " + error.what());
  }
}

void gradient_exchange::begin(collectives::plan with) {
  // The residual keeps what sums round away.
  if (const auto planned = with.payload_of(collectives::operation::all_reduce);
      planned != options_.plan.payload)
    throw collectives::plan_error(fmt::format("the plan sums as {}, --sum-payload is {}",
                                              collectives::name_of(planned),
                                              collectives::name_of(options_.plan.payload)));
  collectives::engine_options running;
  running.timeout = options_.timeout;
  running.record = options_.record;
  running.progress = options_.progress;
  if (options_.has_owners)
    running.update = [this](std::size_t part, std::size_t begin, std::span<float> mean) {
      update_slice(part, begin, mean);
    };
  engine_.emplace(channel_, std::move(with), running);
  const collectives::plan& used = engine_->used_plan();
  prediction_.emplace(used, options_.has_owners ? used.tasks_of_owners() : used.tasks());
  const owned_ranges own = ranges_of(group_.worker(), true);
  optimizer_.emplace(local_.model(), own, optimizer_options_);
  if (!saved_optimizer_.empty()) optimizer_->take_up(std::exchange(saved_optimizer_, {}));
  std::size_t most = 0;
  for (const auto& each : own) most = std::max(most, each.size());
  if (options_.has_owners) updated_.resize(most);
  if (group_.worker() == 0 && options_.planned) options_.planned(engine_->used_plan());
}

// What a worker updates of each part. What all update alike is worker 0's where each part has one owner.
owned_ranges gradient_exchange::ranges_of(std::size_t worker, bool has_what_all_have) const {
  owned_ranges ranges;
  const lamina::partition& cut = local_.partition();
  for (std::size_t p = 0; p < cut.parts().layers(); ++p) {
    if (options_.has_owners) {
      ranges.push_back(engine_->used_plan().owned_by(worker, p));
    } else {
      ranges.push_back({0, has_what_all_have ? cut.parts().sizes()[p] : 0});
    }
  }
  return ranges;
}

void gradient_exchange::begin_step(std::uint64_t step, float learning_rate) {
  step_ = step;
  before_ = engine_->totals();
  optimizer_->set_learning_rate(learning_rate);
  engine_->begin_step();
}

void gradient_exchange::hand_over(std::size_t layer) {
  is_open_[layer] = true;
  const lamina::partition& cut = local_.partition();
  const torch::Tensor gradient = parameters_[layer].grad();
  const auto elements = lamina::elements_of<float>(gradient);
  if (compressor_ == nullptr) {
    require_finite(cut.model(), layer, elements);
  } else {
    compressor_->accumulate(layer, gradient);
  }
  for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
    ready_seconds_[p] = computed_seconds();
    if (compressor_ == nullptr) {
      engine_->ready(p, elements.subspan(cut.begin(p), cut.parts().sizes()[p]));
    } else if (compressor_->is_sent(p)) {
      engine_->ready(p, compressor_->residual()[p]);
    } else {
      engine_->hold_back(p);
    }
  }
}

void gradient_exchange::take(std::size_t layer) {
  if (!is_open_[layer]) return;
  is_open_[layer] = false;
  const lamina::partition& cut = local_.partition();
  for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
    needed_seconds_[p] = computed_seconds();
    engine_->wait(p);
    if (options_.has_owners) {
      std::ranges::copy(engine_->parameters(p), local_[p].begin());
    } else if (const auto mean = engine_->mean(p); !mean.empty()) {
      optimizer_->update(p, step_, mean, local_[p]);
    }
  }
}

void gradient_exchange::finish() {
  engine_->drain();
  for (std::size_t l = 0; l < local_.partition().model().layers(); ++l) take(l);
}

// In the engine's thread. Not in the network, whose parameters the backward pass may still read: beside it.
void gradient_exchange::update_slice(std::size_t p, std::size_t begin, std::span<float> mean) {
  const std::span<float> slice = std::span(updated_).first(mean.size());
  std::ranges::copy(local_[p].subspan(begin, mean.size()), slice.begin());
  optimizer_->update(p, step_, mean, slice);
  std::ranges::copy(slice, mean.begin());
}

overlap_metrics gradient_exchange::metrics() const {
  const collectives::engine_totals now = engine_->totals();
  overlap_metrics seen;
  seen.exposed_seconds = now.waited_seconds - before_.waited_seconds;
  seen.hidden_seconds =
      std::max(0.0, now.collective_seconds - before_.collective_seconds - seen.exposed_seconds);
  seen.collectives = now.collectives - before_.collectives;
  if (compressor_ == nullptr) seen.predicted_exposed_seconds = predicted_exposed();
  return seen;
}

// Where everything is sent: what is needed is known of the step that begins, all else of the one that has ended.
double gradient_exchange::predicted_exposed() const {
  step_times alone = {needed_seconds_, ready_seconds_, step_seconds_};
  for (auto* times : {&alone.needed, &alone.ready})
    std::ranges::transform(*times, times->begin(),
                           [&](double each) { return std::min(each, step_seconds_); });
  return prediction_->exposed(alone, options_.reaches_forward ? waits::in_the_forward : waits::at_the_end);
}

std::vector<std::byte> gradient_exchange::gather_optimizer() const {
  return optimizer_->gather(group_, [this](std::size_t worker) { return ranges_of(worker, worker == 0); });
}

}  // namespace lab
