// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include "model/resnet50.hpp"

namespace resnet50_ps {

/// What is trained: ResNet-50, its parameters drawn from torch's default generator. In a file of its own, so that a program
/// that defines it itself trains another network.
torch::nn::AnyModule make_network(model_options options);

}  // namespace resnet50_ps
