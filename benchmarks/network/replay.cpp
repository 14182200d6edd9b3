// SPDX-License-Identifier: MIT
#include "replay.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "records/stopwatch.hpp"

namespace resnet50_ps {
namespace {

std::string file_of(const std::string& directory, std::size_t worker, std::size_t index) {
  return fmt::format("{}/worker-{}-{}.f32", directory, worker, index);
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
  std::ofstream to(file, std::ios::binary);
  for (const torch::Tensor& gradient : local.gradients()) {
    const torch::Tensor plain = gradient.contiguous();
    to.write(static_cast<const char*>(plain.data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
  }
  if (!to.flush()) throw std::runtime_error("cannot write " + file);
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
    if (std::filesystem::file_size(file) != model.elements() * sizeof(float)) {
      throw std::runtime_error(file + " holds gradients of another model");
    }
    std::ifstream from(file, std::ios::binary);
    std::vector<torch::Tensor>& gradients = recorded_.emplace_back();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const std::vector<std::int64_t> shape(model[l].shape.begin(), model[l].shape.end());
      const torch::Tensor& gradient = gradients.emplace_back(torch::empty(shape));
      from.read(static_cast<char*>(gradient.data_ptr()), static_cast<std::streamsize>(gradient.nbytes()));
    }
    if (!from) throw std::runtime_error("cannot read " + file);
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
