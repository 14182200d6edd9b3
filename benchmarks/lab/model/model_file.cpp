// SPDX-License-Identifier: MIT
#include "model/model_file.hpp"

#include <torch/serialize/archive.h>

#include <filesystem>
#include <sstream>
#include <stdexcept>

namespace lab {
namespace {

void write(torch::serialize::OutputArchive& to, const torch::nn::Module& network) {
  for (const auto& each : network.named_parameters(/*recurse=*/false))
    to.write(each.key(), each.value().detach().cpu());
  for (const auto& each : network.named_buffers(/*recurse=*/false))
    to.write(each.key(), each.value().cpu(), /*is_buffer=*/true);
  for (const auto& each : network.named_children()) {
    torch::serialize::OutputArchive child(to.compilation_unit());
    write(child, *each.value());
    to.write(each.key(), child);
  }
}

void read(torch::serialize::InputArchive& from, torch::nn::Module& network, const std::string& path) {
  const auto take = [&](const std::string& key, torch::Tensor to, bool is_buffer) {
    torch::Tensor found;
    if (!from.try_read(key, found, is_buffer)) throw std::runtime_error("it has no tensor " + path + key);
    if (found.sizes() != to.sizes()) {
      std::ostringstream shapes;
      shapes << path << key << " is of " << found.sizes() << ", not of " << to.sizes();
      throw std::runtime_error(shapes.str());
    }
    to.copy_(found);
  };
  for (const auto& each : network.named_parameters(/*recurse=*/false)) take(each.key(), each.value(), false);
  for (const auto& each : network.named_buffers(/*recurse=*/false)) take(each.key(), each.value(), true);
  for (const auto& each : network.named_children()) {
    torch::serialize::InputArchive child;
    if (!from.try_read(each.key(), child)) throw std::runtime_error("it has no module " + path + each.key());
    read(child, *each.value(), path + each.key() + ".");
  }
}

}  // namespace

void save_model(const torch::nn::Module& network, const std::string& file) {
  const std::string part = file + ".part";
  try {
    torch::serialize::OutputArchive archive;
    write(archive, network);
    archive.save_to(part);
    std::filesystem::rename(part, file);
  } catch (const std::exception& error) {
    throw std::runtime_error("cannot save the model as " + file + ": " + error.what());
  }
}

void load_model(torch::nn::Module& network, const std::string& file) {
  if (!std::filesystem::is_regular_file(file)) throw std::runtime_error("there is no model " + file);
  const torch::NoGradGuard no_gradients;
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(file);
    read(archive, network, "");
  } catch (const c10::Error& error) {
    throw std::runtime_error("cannot load the model " + file + ": " + error.what_without_backtrace());
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("cannot load the model " + file + ": " + error.what());
  }
}

}  // namespace lab
