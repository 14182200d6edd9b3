// SPDX-License-Identifier: MIT
#include "records/trace_file.hpp"

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <span>
#include <stdexcept>

namespace lab {
namespace {

namespace collectives = lamina::collectives;

constexpr std::size_t kept_steps = 20;

// Of a layer: ready, the begin and end of a wait, and, in a bucket by itself, of two collectives. Of a step: its computation.
std::size_t events_a_step(const lamina::layout& model) {
  return 7 * model.layers() + 4;
}

// A process a rank, one track for computation and what it waits for, one for collectives. Times are in microseconds.
void write_trace(std::ostream& to, std::span<const collectives::event> events, std::size_t rank) {
  constexpr std::array names = {"computation", "ready", "waiting", "collective"};
  constexpr std::array phases = {'B', 'E', 'i'};
  const char* separator = "";
  to << "{\"traceEvents\":[";
  for (const collectives::event& each : events) {
    std::array<char, 448> line{};
    std::snprintf(line.data(), line.size(),
                  "%s\n{\"name\":\"%s "
                  "%zu\",\"ph\":\"%c\",\"ts\":%lld.%03lld,\"pid\":%zu,\"tid\":%d,\"args\":{\"step\":%llu,"
                  "\"bytes\":%llu,\"operation\":\"%s\",\"algorithm\":\"%s\"}}",
                  separator, names[static_cast<std::size_t>(each.what)], each.index,
                  phases[static_cast<std::size_t>(each.kind)], static_cast<long long>(each.at.count() / 1000),
                  static_cast<long long>(each.at.count() % 1000), rank,
                  each.what == collectives::activity::collective ? 1 : 0,
                  static_cast<unsigned long long>(each.step), static_cast<unsigned long long>(each.bytes),
                  each.what == collectives::activity::collective ? name_of(each.moves) : "",
                  each.what == collectives::activity::collective ? name_of(each.how) : "");
    to << line.data();
    separator = ",";
  }
  to << "\n]}\n";
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
  write_trace(to, events_->events(), worker_);
  if (!to.flush()) throw std::runtime_error("cannot write " + path_);
}

}  // namespace lab
