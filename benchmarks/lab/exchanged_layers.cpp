// SPDX-License-Identifier: MIT
#include "exchanged_layers.hpp"

#include <algorithm>
#include <lamina/collectives/cost.hpp>
#include <utility>

namespace lab {
namespace {

namespace collectives = lamina::collectives;

bool is_gathered(const exchanged_layers::linear& layer, std::size_t workers, const std::string& how,
                 std::size_t rows) {
  if (how != "by_cost") return how == "activations";
  return collectives::gathers_less(rows, static_cast<std::size_t>(layer.options.in_features()),
                                   static_cast<std::size_t>(layer.options.out_features()), workers);
}

}  // namespace

exchanged_layers::exchanged_layers(replica& local, std::size_t workers, const std::string& how,
                                   std::size_t rows)
    : gathered_of_(local.parameters().size()),
      numbers_(local.model().layers()),
      numbers_of_(gathered_of_.size()),
      model_(std::vector<lamina::layer>()) {
  const lamina::partition& cut = local.partition();
  std::vector<bool> is_fully_connected(gathered_of_.size());
  for (const auto& module : local.network().ptr()->modules()) {
    auto* const layer = dynamic_cast<linear*>(module.get());
    if (layer == nullptr) continue;
    std::vector<std::size_t> own;
    for (const torch::Tensor& each : module->parameters(/*recurse=*/false)) {
      const auto found =
          std::ranges::find_if(local.parameters(), [&](const auto& one) { return one.is_same(each); });
      own.push_back(static_cast<std::size_t>(found - local.parameters().begin()));
      is_fully_connected[own.back()] = true;
    }
    if (!is_gathered(*layer, workers, how, rows)) continue;
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
    fragments_.emplace_back();
  };
  for (std::size_t l = 0; l < gathered_of_.size(); ++l) {
    if (gathered_of_[l]) {
      gathered_layer& of = gathered_[*gathered_of_[l]];
      if (of.weight != l) continue;
      of.input = exchanged.size();
      const auto columns = [](std::int64_t count) { return static_cast<std::size_t>(count); };
      const std::string& name = cut.model()[l].name;
      add(l, {name + " inputs", {workers * rows, columns(of.module->options.in_features())}},
          collectives::layer_class::gathered);
      add(l, {name + " errors", {workers * rows, columns(of.module->options.out_features())}},
          collectives::layer_class::gathered);
      continue;
    }
    for (std::size_t f = cut.first(l); f < cut.first(l + 1); ++f) {
      numbers_[f] = exchanged.size();
      add(l, cut.parts()[f],
          is_fully_connected[l] ? collectives::layer_class::fully_connected
                                : collectives::layer_class::convolutional);
      fragments_.back() = f;
    }
  }
  model_ = lamina::layout(std::move(exchanged));
}

}  // namespace lab
