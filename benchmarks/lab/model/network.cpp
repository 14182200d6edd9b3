// SPDX-License-Identifier: MIT
#include "model/network.hpp"

#include <stdexcept>

#include "model/vgg.hpp"

namespace lab {

torch::nn::AnyModule make_network(const std::string& name, model_options options) {
  if (name == "resnet50") return torch::nn::AnyModule(resnet50(options));
  if (name == "vgg16") return torch::nn::AnyModule(vgg16(options.classes));
  throw std::invalid_argument("there is no network '" + name + "'");
}

}  // namespace lab
