// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <string>

namespace lab {

/// A network with parameters drawn from torch's default generator, which takes N x 3 x height x width and returns N x classes:
///   resnet50  v1 (He et al., arXiv:1512.03385), whose blocks halve the image in their first 1x1 convolution; of 1,000 classes 161 tensors of
///             25,557,032 elements, with the names that torchvision gives them
///   vgg16     of Simonyan and Zisserman, without dropout; of 1,000 classes 138,357,544 elements, most of them in fully connected layers
///   tiny      one convolution and nine fully connected layers, for tests
/// Every module that has parameters has a gate (lamina/collectives/torch_hooks.hpp), which is open unless somebody sets it. Throws
/// std::invalid_argument for another name.
torch::nn::AnyModule make_network(const std::string& name, std::int64_t classes);

}  // namespace lab
