// SPDX-License-Identifier: MIT
#include "model/replica.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <utility>

namespace lab {
namespace {

lamina::layout layout_of(const torch::nn::Module& module) {
  std::vector<lamina::layer> layers;
  for (const auto& item : module.named_parameters()) {
    layers.push_back(lamina::layer_of(item.key(), item.value()));
  }
  return lamina::layout(std::move(layers));
}

}  // namespace

replica::replica(torch::nn::AnyModule trained, std::size_t part_elements, torch::Device device, bool mirrored)
    : network_(std::move(trained)),
      partition_(layout_of(*network_.ptr()), part_elements),
      device_(device),
      mirrored_(mirrored || !device.is_cpu()) {
  network_.ptr()->to(device_);
  for (const torch::Tensor& each : network_.ptr()->parameters()) {
    parameters_.push_back(mirrored_ ? each.detach().to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true)
                                    : each);
  }
  gradients_.resize(parameters_.size());
}

void replica::upload() {
  if (!mirrored_) return;
  const torch::NoGradGuard no_gradients;
  std::size_t i = 0;
  for (torch::Tensor& each : network_.ptr()->parameters()) each.copy_(parameters_[i++]);
}

void replica::download() {
  std::size_t i = 0;
  for (const torch::Tensor& each : network_.ptr()->parameters()) {
    gradients_[i++] =
        mirrored_ ? each.grad().to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true) : each.grad();
  }
}

void replica::set_gradients(const std::vector<torch::Tensor>& gradients) {
  for (std::size_t i = 0; i < gradients_.size(); ++i) {
    if (gradients_[i].defined()) {
      gradients_[i].copy_(gradients[i]);
    } else {
      gradients_[i] = gradients[i].clone();
    }
  }
}

std::vector<torch::Tensor> replica::statistics() const {
  std::vector<torch::Tensor> all;
  for (const torch::Tensor& each : network_.ptr()->buffers()) {
    all.push_back(mirrored_ ? each.to(torch::kCPU, /*non_blocking=*/false, /*copy=*/true) : each);
  }
  return all;
}

void replica::set_statistics(const std::vector<torch::Tensor>& statistics) {
  if (!mirrored_) return;  // they are the network's
  const torch::NoGradGuard no_gradients;
  std::size_t i = 0;
  for (torch::Tensor& each : network_.ptr()->buffers()) each.copy_(statistics[i++]);
}

std::span<float> replica::part_of(const std::vector<torch::Tensor>& layers, std::size_t l) const {
  const auto whole = lamina::writable_elements_of<float>(layers[partition_.layer_of(l)]);
  return whole.subspan(partition_.begin(l), model().sizes()[l]);
}

std::uint64_t hash_of(const replica& local) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    const auto bytes = std::as_bytes(local[l]);
    XXH3_64bits_update(&state, bytes.data(), bytes.size());
  }
  return std::max<std::uint64_t>(1, XXH3_64bits_digest(&state));
}

}  // namespace lab
