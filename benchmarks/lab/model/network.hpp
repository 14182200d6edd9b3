// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include <string>

#include "model/resnet50.hpp"

namespace lab {

/// What is trained: the network of that name, "resnet50" or "vgg16", its parameters drawn from torch's default generator. Every module
/// that has parameters has a gate. In a file of its own, so that a program that defines it itself trains another network. Throws
/// std::invalid_argument for another name.
torch::nn::AnyModule make_network(const std::string& name, model_options options);

}  // namespace lab
