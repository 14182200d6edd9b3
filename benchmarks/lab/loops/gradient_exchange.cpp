// SPDX-License-Identifier: MIT
#include "loops/gradient_exchange.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <lamina/error.hpp>
#include <stdexcept>
#include <utility>

#include "messages/link.hpp"

namespace lab {
namespace {

namespace collectives = lamina::collectives;

void require_finite(const lamina::layout& model, std::size_t layer, std::span<const float> gradient) {
  if (std::ranges::all_of(gradient, [](float each) { return std::isfinite(each); })) return;
  throw lamina::non_finite_gradient(layer, layer, model[layer].name, "gradient holds NaN or infinity");
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
      layers_(local, group.workers(), options.fully_connected, options.batch_images),
      is_open_(parameters_.size()),
      needed_seconds_(layers_.model().layers()),
      ready_seconds_(layers_.model().layers()) {
  if (layers_.gathers_any() && held_back != nullptr)
    throw std::invalid_argument("a gradient that exists on no worker cannot be held back");
}

void gradient_exchange::plan(const std::vector<std::size_t>& order,
                             const std::vector<double>& ready_seconds) {
  const auto agreed =
      collectives::agree_on_order(channel_, local_.partition().model(), order, options_.timeout);
  const auto costs = options_.is_calibrated ? collectives::calibrate(channel_, {.timeout = options_.timeout})
                                            : collectives::gigabit_costs;
  collectives::plan_options planned = options_.plan;
  if (options_.interleaves_gathers) planned.ready_seconds = seconds_of_first_worker(ready_seconds);
  begin(collectives::plan(layers_.model(), channel_.ranks(), layers_.order(agreed), layers_.classes(),
                          planned, costs));
}

void gradient_exchange::take_up_plan(const std::string& text, const std::string& from) {
  try {
    begin(collectives::plan::load(text, layers_.model(), channel_.ranks()));
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
    running.update = [this](std::size_t number, std::size_t begin, std::span<float> mean) {
      update_slice(*layers_.part_of(number), begin, mean);
    };
  engine_.emplace(channel_, std::move(with), running);
  const collectives::plan& used = engine_->used_plan();
  const std::vector<collectives::task> sums = used.tasks();
  prediction_.emplace(used, options_.has_owners ? used.tasks_of_owners() : sums);
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
    const bool has_owner = options_.has_owners && layers_.gathered(cut.layer_of(p)) == nullptr;
    if (has_owner) {
      ranges.push_back(engine_->used_plan().owned_by(worker, layers_.number_of(p)));
    } else {
      ranges.push_back({0, has_what_all_have ? cut.parts().sizes()[p] : 0});
    }
  }
  return ranges;
}

// Of what is exchanged, by its number; the same on all workers.
std::vector<double> gradient_exchange::seconds_of_first_worker(const std::vector<double>& own) const {
  const std::vector<std::byte> bytes = group_.scatter(message_kind::values, [&](std::size_t) {
    const auto mine = std::as_bytes(std::span(own));
    return std::vector<std::byte>(mine.begin(), mine.end());
  });
  if (bytes.size() != own.size() * sizeof(double)) throw link_error("worker 0 sent times of another model");
  std::vector<double> first(own.size());
  std::memcpy(first.data(), bytes.data(), bytes.size());
  std::vector<double> seconds(layers_.model().layers());
  for (std::size_t l = 0; l < first.size(); ++l) {
    for (const std::size_t number : layers_.order({l})) seconds[number] = first[l];
  }
  return seconds;
}

void gradient_exchange::begin_step(std::uint64_t step, float learning_rate) {
  step_ = step;
  before_ = engine_->totals();
  optimizer_->set_learning_rate(learning_rate);
  engine_->begin_step();
}

void gradient_exchange::hand_over(std::size_t layer) {
  is_open_[layer] = true;
  if (const auto* gathered = layers_.gathered(layer)) {
    if (layer == gathered->weight) hand_over_activations(*gathered);
    return;
  }
  const lamina::partition& cut = local_.partition();
  const torch::Tensor gradient = parameters_[layer].grad();
  const auto elements = lamina::elements_of<float>(gradient);
  if (compressor_ == nullptr) {
    require_finite(cut.model(), layer, elements);
  } else {
    compressor_->accumulate(layer, gradient);
  }
  for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
    const std::size_t number = layers_.number_of(p);
    ready_seconds_[number] = computed_seconds();
    if (compressor_ == nullptr) {
      engine_->ready(number, elements.subspan(cut.begin(p), cut.parts().sizes()[p]));
    } else if (compressor_->is_sent(p)) {
      engine_->ready(number, compressor_->residual()[p]);
    } else {
      engine_->hold_back(number);
    }
  }
}

void gradient_exchange::hand_over_activations(const exchanged_layers::gathered_layer& of) {
  const lamina::layout& model = local_.partition().model();
  for (const auto& [number, elements] :
       {std::pair(of.input, of.module->inputs()), std::pair(of.input + 1, of.module->errors())}) {
    require_finite(model, of.weight, elements);
    ready_seconds_[number] = computed_seconds();
    engine_->ready(number, elements);
  }
}

void gradient_exchange::take(std::size_t layer) {
  if (!is_open_[layer]) return;
  is_open_[layer] = false;
  if (const auto* gathered = layers_.gathered(layer)) return take_activations(*gathered, layer);
  const lamina::partition& cut = local_.partition();
  for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p) {
    const std::size_t number = layers_.number_of(p);
    needed_seconds_[number] = computed_seconds();
    engine_->wait(number);
    if (options_.has_owners) {
      std::ranges::copy(engine_->parameters(number), local_[p].begin());
    } else if (const auto mean = engine_->mean(number); !mean.empty()) {
      optimizer_->update(p, step_, mean, local_[p]);
    }
  }
}

// Of weight and bias, the one that comes first has both gradients made.
void gradient_exchange::take_activations(const exchanged_layers::gathered_layer& of, std::size_t layer) {
  const bool is_first = layer == of.weight ? !of.bias || is_open_[*of.bias] : is_open_[of.weight];
  if (is_first) {
    needed_seconds_[of.input] = needed_seconds_[of.input + 1] = computed_seconds();
    engine_->wait(of.input);
    engine_->wait(of.input + 1);
    of.module->set_gradients(engine_->gathered(of.input), engine_->gathered(of.input + 1), channel_.ranks());
  }
  const lamina::partition& cut = local_.partition();
  const torch::Tensor gradient = parameters_[layer].grad();
  const auto elements = lamina::elements_of<float>(gradient);
  for (std::size_t p = cut.first(layer); p < cut.first(layer + 1); ++p)
    optimizer_->update(p, step_, elements.subspan(cut.begin(p), cut.parts().sizes()[p]), local_[p]);
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
  collectives::step_times alone = {needed_seconds_, ready_seconds_, step_seconds_};
  for (auto* times : {&alone.needed, &alone.ready})
    std::ranges::transform(*times, times->begin(),
                           [&](double each) { return std::min(each, step_seconds_); });
  return prediction_->exposed(
      alone, options_.reaches_forward ? collectives::waits::in_the_forward : collectives::waits::at_the_end);
}

std::vector<std::byte> gradient_exchange::gather_optimizer() const {
  return optimizer_->gather(group_, [this](std::size_t worker) { return ranges_of(worker, worker == 0); });
}

}  // namespace lab
