// SPDX-License-Identifier: MIT
#include "records/trace_file.hpp"

#include <filesystem>
#include <fstream>
#include <stdexcept>

namespace lab {
namespace {

constexpr std::size_t kept_steps = 20;

// Of a layer: ready, the begin and end of a wait, and, in a bucket by itself, of two collectives. Of a step: its computation.
std::size_t events_a_step(const lamina::layout& model) {
  return 7 * model.layers() + 4;
}

}  // namespace

trace_file::trace_file(const std::string& name, std::size_t worker, const lamina::layout& model)
    : worker_(worker) {
  if (name.empty()) return;
  std::filesystem::path path(name);
  path.replace_filename(path.stem().string() + "-" + std::to_string(worker) + path.extension().string());
  path_ = path.string();
  if (!std::ofstream(path_)) throw std::runtime_error("cannot make the file " + path_);
  events_ = std::make_unique<lamina::collectives::timeline>(kept_steps * events_a_step(model));
}

void trace_file::write() const {
  if (!events_) return;
  std::ofstream to(path_);
  lamina::collectives::write_trace(to, events_->events(), worker_);
  if (!to.flush()) throw std::runtime_error("cannot write " + path_);
}

}  // namespace lab
