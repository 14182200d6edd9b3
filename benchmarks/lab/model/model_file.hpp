// SPDX-License-Identifier: MIT
#pragma once

#include <torch/nn/module.h>

#include <string>

namespace lab {

/// Writes parameters and running statistics, on the CPU, as a TorchScript archive: `torch.jit.load(file).state_dict()` in
/// Python is what torchvision's model of that name takes. The file is there whole or not at all. Throws std::runtime_error that names it.
void save_model(const torch::nn::Module& network, const std::string& file);
/// Reads them back, or what `torch.jit.script(network).save(file)` wrote. Throws std::runtime_error that names the file, and
/// the tensor if one is missing or of another shape; the network is then partly overwritten.
void load_model(torch::nn::Module& network, const std::string& file);

}  // namespace lab
