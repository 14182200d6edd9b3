// SPDX-License-Identifier: MIT
#include "model/network.hpp"

namespace resnet50_ps {

torch::nn::AnyModule make_network(model_options options) {
  return torch::nn::AnyModule(resnet50(options));
}

}  // namespace resnet50_ps
