// SPDX-License-Identifier: MIT
#include "replay.hpp"

#include <fmt/format.h>
#include <torch/serialize.h>

#include <filesystem>
#include <stdexcept>

#include "records/stopwatch.hpp"

namespace resnet50_ps {
namespace {

std::string file_of(const std::string& directory, std::size_t worker, std::size_t index) {
  return fmt::format("{}/worker-{}-{}.pt", directory, worker, index);
}

}  // namespace

gradient_recorder::gradient_recorder(std::string directory, std::size_t worker, std::uint64_t steps,
                                     std::uint64_t count)
    : directory_(std::move(directory)), worker_(worker), first_step_(steps - std::min(count, steps) + 1) {
  std::error_code problem;
  std::filesystem::create_directories(directory_, problem);
  if (problem) throw std::runtime_error("cannot make the directory " + directory_ + ": " + problem.message());
}

void gradient_recorder::record(std::uint64_t step, const replica& local) const {
  if (step < first_step_) return;
  const std::string file = file_of(directory_, worker_, step - first_step_);
  try {
    torch::save(local.gradients(), file);
  } catch (const c10::Error& error) {
    throw std::runtime_error("cannot write " + file + ": " + error.what_without_backtrace());
  }
}

gradient_player::gradient_player(const std::string& directory, std::size_t worker, double compute_seconds,
                                 const lamina::layout& model)
    : compute_seconds_(compute_seconds) {
  std::size_t workers = 0;
  while (std::filesystem::exists(file_of(directory, workers, 0))) ++workers;
  if (workers == 0) throw std::runtime_error("there are no recorded gradients in " + directory);
  for (;;) {
    const std::string file = file_of(directory, worker % workers, recorded_.size());
    if (!std::filesystem::exists(file)) break;
    std::vector<torch::Tensor>& gradients = recorded_.emplace_back();
    try {
      torch::load(gradients, file);
    } catch (const c10::Error& error) {
      throw std::runtime_error("cannot read " + file + ": " + error.what_without_backtrace());
    }
    bool fits = gradients.size() == model.layers();
    for (std::size_t l = 0; fits && l < gradients.size(); ++l) {
      fits = static_cast<std::size_t>(gradients[l].numel()) == model.sizes()[l];
    }
    if (!fits) throw std::runtime_error(file + " holds gradients of another model");
  }
  next_ = worker / workers % recorded_.size();
}

void gradient_player::play(replica& local, step_report& report) {
  const stopwatch computing;
  local.set_gradients(recorded_[next_]);
  next_ = (next_ + 1) % recorded_.size();
  report.images = 1;
  computing.wait_for(compute_seconds_);
}

}  // namespace resnet50_ps
