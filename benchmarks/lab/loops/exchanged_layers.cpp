// SPDX-License-Identifier: MIT
#include "loops/exchanged_layers.hpp"

#include <algorithm>
#include <lamina/collectives/cost.hpp>
#include <string>
#include <utility>

namespace lab {
namespace {

namespace collectives = lamina::collectives;

std::size_t index_in(const std::vector<torch::Tensor>& all, const torch::Tensor& one) {
  const auto found = std::ranges::find_if(all, [&](const torch::Tensor& each) { return each.is_same(one); });
  return static_cast<std::size_t>(found - all.begin());
}

bool is_gathered(const exchanged_layers::linear& layer, std::size_t workers, fc_exchange how,
                 std::size_t rows) {
  if (how != fc_exchange::by_cost) return how == fc_exchange::activations;
  return collectives::gathers_less(rows, static_cast<std::size_t>(layer.options.in_features()),
                                   static_cast<std::size_t>(layer.options.out_features()), workers);
}

}  // namespace

exchanged_layers::exchanged_layers(replica& local, std::size_t workers, fc_exchange how, std::size_t rows)
    : gathered_of_(local.partition().model().layers()),
      numbers_of_(gathered_of_.size()),
      model_(std::vector<lamina::layer>()) {
  const lamina::partition& cut = local.partition();
  const std::vector<torch::Tensor> parameters = local.network().ptr()->parameters();
  std::vector<bool> is_fully_connected(parameters.size());
  for (const auto& module : local.network().ptr()->modules()) {
    if (module->as<torch::nn::LinearImpl>() == nullptr) continue;
    std::vector<std::size_t> own;
    for (const torch::Tensor& each : module->parameters(/*recurse=*/false)) {
      own.push_back(index_in(parameters, each));
      is_fully_connected[own.back()] = true;
    }
    auto* const layer = dynamic_cast<linear*>(module.get());
    if (layer == nullptr || !is_gathered(*layer, workers, how, rows)) continue;
    for (const std::size_t l : own) gathered_of_[l] = gathered_.size();
    gathered_.push_back({.module = layer, .weight = own[0]});
    if (own.size() > 1) gathered_.back().bias = own[1];
    layer->gather(rows);
  }

  std::vector<lamina::layer> exchanged;
  const auto add = [&](std::size_t parameter, lamina::layer one, collectives::layer_class kind) {
    numbers_of_[parameter].push_back(exchanged.size());
    exchanged.push_back(std::move(one));
    classes_.push_back(kind);
    parts_.emplace_back();
  };
  numbers_.resize(cut.parts().layers());
  for (std::size_t l = 0; l < parameters.size(); ++l) {
    if (gathered_of_[l]) {
      gathered_layer& of = gathered_[*gathered_of_[l]];
      if (of.weight != l) continue;
      of.input = exchanged.size();
      const std::string& weight = cut.model()[l].name;
      const std::string name = weight.substr(0, weight.rfind("weight"));
      const auto columns = [](std::int64_t count) { return static_cast<std::size_t>(count); };
      add(l, {name + "inputs", {workers * rows, columns(of.module->options.in_features())}},
          collectives::layer_class::gathered);
      add(l, {name + "errors", {workers * rows, columns(of.module->options.out_features())}},
          collectives::layer_class::gathered);
      continue;
    }
    for (std::size_t p = cut.first(l); p < cut.first(l + 1); ++p) {
      numbers_[p] = exchanged.size();
      add(l, cut.parts()[p],
          is_fully_connected[l] ? collectives::layer_class::fully_connected
                                : collectives::layer_class::convolutional);
      parts_.back() = p;
    }
  }
  model_ = lamina::layout(std::move(exchanged));
}

exchanged_layers::~exchanged_layers() {
  for (const gathered_layer& each : gathered_) each.module->gather(0);
}

const exchanged_layers::gathered_layer* exchanged_layers::gathered(std::size_t parameter) const {
  return gathered_of_[parameter] ? &gathered_[*gathered_of_[parameter]] : nullptr;
}

std::vector<std::size_t> exchanged_layers::order(const std::vector<std::size_t>& parameters) const {
  std::vector<std::size_t> numbers;
  for (const std::size_t l : parameters)
    numbers.insert(numbers.end(), numbers_of_[l].begin(), numbers_of_[l].end());
  return numbers;
}

}  // namespace lab
