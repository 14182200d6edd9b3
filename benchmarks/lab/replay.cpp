// SPDX-License-Identifier: MIT
#include "replay.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <lamina/collectives/torch_hooks.hpp>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "clock.hpp"
#include "training.hpp"

namespace lab {
namespace {

std::string file_of(const std::string& directory, std::size_t worker, std::size_t index) {
  return directory + "/worker-" + std::to_string(worker) + "-" + std::to_string(index) + ".f32";
}

void write(const std::string& file, const std::vector<std::span<float>>& gradients) {
  std::ofstream to(file, std::ios::binary);
  for (const auto each : gradients)
    to.write(reinterpret_cast<const char*>(each.data()), static_cast<std::streamsize>(each.size_bytes()));
  if (!to.flush()) throw std::runtime_error("cannot write " + file);
}

// To the kernel all pages that were never written are one.
torch::Tensor unwritten_zeros(std::size_t elements) {
  void* const memory = std::calloc(elements, sizeof(float));
  if (memory == nullptr) throw std::bad_alloc();
  return torch::from_blob(memory, {static_cast<std::int64_t>(elements)}, [](void* each) { std::free(each); });
}

}  // namespace

gradient_source gradients_of(const options& how, std::size_t worker, const lamina::layout& model,
                             replica& local, gradient_source compute) {
  if (!how.replay.empty() && how.by_layer) {
    const auto player =
        std::make_shared<paced_player>(how.replay, worker, how.compute_seconds, model, !how.drops_layers());
    return [player, &local](std::uint64_t, step_report& report) {
      player->play(local);
      report.images = 1;
    };
  }
  if (!how.replay.empty()) {
    const auto recorded = std::make_shared<recorded_gradients>(how.replay, worker, model);
    return [recorded, &local, seconds = how.compute_seconds](std::uint64_t, step_report& report) {
      const stopwatch computing;
      local.set_gradients(recorded->next());
      report.images = 1;
      computing.wait_for(seconds);
    };
  }
  if (how.record.empty()) return compute;
  std::error_code problem;
  std::filesystem::create_directories(how.record, problem);
  if (problem) throw std::runtime_error("cannot make the directory " + how.record + ": " + problem.message());
  const std::uint64_t first = how.steps - std::min(how.recorded_steps, how.steps) + 1;
  return [compute = std::move(compute), &local, directory = how.record, worker, first, last = how.steps](
             std::uint64_t step, step_report& report) {
    if (step == last && worker == 0) {
      step_profile::of(local, [&] { compute(step, report); }).write(directory);
    } else {
      compute(step, report);
    }
    if (step >= first) write(file_of(directory, worker, step - first), local.gradient_elements());
  };
}

bool recorded_gradients::are_in(const std::string& directory) {
  return std::filesystem::exists(file_of(directory, 0, 0));
}

recorded_gradients::recorded_gradients(const std::string& directory, std::size_t worker,
                                       const lamina::layout& model) {
  std::size_t workers = 0;
  while (std::filesystem::exists(file_of(directory, workers, 0))) ++workers;
  if (workers == 0) throw std::runtime_error("there are no recorded gradients in " + directory);
  for (;;) {
    const std::string file = file_of(directory, worker % workers, recorded_.size());
    if (!std::filesystem::exists(file)) break;
    if (std::filesystem::file_size(file) != model.elements() * sizeof(float)) {
      throw std::runtime_error(file + " holds gradients of another model");
    }
    std::ifstream from(file, std::ios::binary);
    std::vector<torch::Tensor>& gradients = recorded_.emplace_back();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::vector<std::int64_t> shape(model[l].shape.begin(), model[l].shape.end());
      const torch::Tensor& gradient = gradients.emplace_back(torch::empty(shape));
      from.read(static_cast<char*>(gradient.data_ptr()), static_cast<std::streamsize>(gradient.nbytes()));
    }
    if (!from) throw std::runtime_error("cannot read " + file);
  }
  next_ = worker / workers % recorded_.size();
}

const std::vector<torch::Tensor>& recorded_gradients::next() {
  const std::vector<torch::Tensor>& now = recorded_[next_];
  next_ = (next_ + 1) % recorded_.size();
  return now;
}

step_profile step_profile::of(replica& local, const std::function<void()>& compute) {
  torch::nn::Module& network = *local.network().ptr();
  const std::size_t layers = network.parameters().size();
  step_profile seen{.needed = std::vector<double>(layers), .ready = std::vector<double>(layers)};
  const stopwatch step;
  const lamina::collectives::gradient_hooks hooks(network,
                                                  [&](std::size_t l) { seen.ready[l] = step.seconds(); });
  lamina::collectives::set_gates(network, [&](std::size_t l) { seen.needed[l] = step.seconds(); });
  compute();
  lamina::collectives::set_gates(network, {});
  const double whole = step.seconds();
  // The gradient of the last layer that forward reaches is ready first: half of what lies between is taken for its forward.
  const double last_needed = *std::ranges::max_element(seen.needed);
  const double forward = (last_needed + *std::ranges::min_element(seen.ready)) / 2;
  seen.forward_share = forward / whole;
  for (double& each : seen.needed) each /= forward;
  for (double& each : seen.ready) each = (each - forward) / (whole - forward);
  return seen;
}

void step_profile::write(const std::string& directory) const {
  const std::string file = directory + "/profile.txt";
  std::ofstream to(file);
  to << "forward_share " << forward_share << "\n";
  for (std::size_t l = 0; l < needed.size(); ++l) to << needed[l] << " " << ready[l] << "\n";
  if (!to.flush()) throw std::runtime_error("cannot write " + file);
}

step_profile step_profile::read(const std::string& directory, std::size_t layers) {
  const std::string file = directory + "/profile.txt";
  std::ifstream from(file);
  step_profile read{.needed = std::vector<double>(layers), .ready = std::vector<double>(layers)};
  std::string word;
  from >> word >> read.forward_share;
  for (std::size_t l = 0; l < layers; ++l) from >> read.needed[l] >> read.ready[l];
  if (!from) throw std::runtime_error(file + " is no profile of " + std::to_string(layers) + " layers");
  return read;
}

// One layer of the backward pass, in time alone.
class paced_layer : public torch::autograd::Function<paced_layer> {
 public:
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const torch::Tensor& parameter, std::int64_t layer, std::int64_t player) {
    context->save_for_backward({parameter});
    context->saved_data["layer"] = layer;
    context->saved_data["player"] = player;
    return x + 1;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list of_output) {
    const auto layer = static_cast<std::size_t>(context->saved_data["layer"].toInt());
    auto& player = *reinterpret_cast<paced_player*>(context->saved_data["player"].toInt());
    const double forward = player.profile_.forward_share;
    torch::Tensor gradient;
    player.spend_until((forward + (1 - forward) * player.profile_.ready[layer]) * player.compute_seconds_,
                       [&] { gradient = player.gradient_of(layer, context->get_saved_variables()[0]); });
    return {of_output[0], std::move(gradient), torch::Tensor(), torch::Tensor()};
  }
};

paced_player::paced_player(const std::string& directory, std::size_t worker, double compute_seconds,
                           const lamina::layout& model, bool may_be_zeros)
    : profile_(step_profile::read(directory, model.layers())),
      forward_(model.layers()),
      backward_(model.layers()),
      compute_seconds_(compute_seconds) {
  std::iota(forward_.begin(), forward_.end(), std::size_t{0});
  std::iota(backward_.begin(), backward_.end(), std::size_t{0});
  std::ranges::stable_sort(forward_, {}, [&](std::size_t l) { return profile_.needed[l]; });
  std::ranges::stable_sort(backward_, {}, [&](std::size_t l) { return profile_.ready[l]; });
  if (!may_be_zeros || recorded_gradients::are_in(directory)) recorded_.emplace(directory, worker, model);
}

torch::Tensor paced_player::gradient_of(std::size_t layer, const torch::Tensor& parameter) {
  return recorded_ ? (*gradients_)[layer].clone() : zeros(parameter.sizes());
}

torch::Tensor paced_player::zeros(torch::IntArrayRef shape) {
  const std::int64_t elements = c10::multiply_integers(shape);
  if (!zeros_.defined() || zeros_.numel() < elements)
    zeros_ = unwritten_zeros(static_cast<std::size_t>(elements));
  return zeros_.narrow(0, 0, elements).view(shape);
}

void paced_player::play(replica& local) {
  torch::nn::Module& network = *local.network().ptr();
  network.zero_grad(/*set_to_none=*/true);
  if (recorded_) gradients_ = &recorded_->next();
  spent_ = 0;
  woke_ = due_ = std::chrono::steady_clock::now();
  const std::vector<torch::Tensor>& parameters = local.parameters();
  // The gate of each layer's module, where it has not been passed.
  std::vector<const lamina::collectives::gated_module*> gates(parameters.size());
  for (const auto& module : network.modules()) {
    const auto* const gate = dynamic_cast<const lamina::collectives::gated_module*>(module.get());
    for (const torch::Tensor& own : module->parameters(/*recurse=*/false)) {
      for (std::size_t l = 0; l < parameters.size(); ++l) {
        if (parameters[l].is_same(own)) gates[l] = gate;
      }
    }
  }
  for (const std::size_t l : forward_) {
    spend_until(profile_.forward_share * profile_.needed[l] * compute_seconds_);
    if (gates[l] != nullptr) gates[l]->wait_at_gate();
  }
  spend_until(profile_.forward_share * compute_seconds_);
  torch::Tensor x = torch::zeros({1}, torch::requires_grad());
  for (auto l = backward_.rbegin(); l != backward_.rend(); ++l) {
    x = paced_layer::apply(x, parameters[*l], static_cast<std::int64_t>(*l),
                           static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(this)));
  }
  x.sum().backward();
  spend_until(compute_seconds_);
}

// Until so much of the step is computed. What others have taken since the last time comes on top; oversleeping does not.
void paced_player::spend_until(double seconds, const std::function<void()>& work) {
  using duration = std::chrono::steady_clock::duration;
  due_ += std::chrono::steady_clock::now() - woke_;
  if (work) work();
  due_ +=
      std::chrono::duration_cast<duration>(std::chrono::duration<double>(std::max(0.0, seconds - spent_)));
  spent_ = std::max(spent_, seconds);
  std::this_thread::sleep_until(due_);
  woke_ = std::chrono::steady_clock::now();
}

}  // namespace lab
