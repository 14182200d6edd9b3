// SPDX-License-Identifier: MIT
#include "metrics.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace resnet50_ps {
namespace {

std::string bar(std::uint64_t done, std::uint64_t all) {
  constexpr std::size_t width = 10;
  const auto filled = static_cast<std::size_t>(done * width / all);
  return fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", width - filled);
}

step_metrics mean_of(const std::vector<step_metrics>& steps) {
  step_metrics mean;
  const std::size_t warm_up = steps.size() > 1 ? 1 : 0;
  const auto count = static_cast<double>(steps.size() - warm_up);
  for (auto step = steps.begin() + static_cast<std::ptrdiff_t>(warm_up); step != steps.end(); ++step) {
    mean.sent_up += step->sent_up / count;
    mean.sent_down += step->sent_down / count;
    mean.worker_seconds += step->worker_seconds / count;
    mean.server_seconds += step->server_seconds / count;
    mean.communication_seconds += step->communication_seconds / count;
    mean.total_seconds += step->total_seconds / count;
  }
  // The last steps say where training stands; one batch alone is noisy.
  const std::size_t last = std::min<std::size_t>(steps.size(), 10);
  for (auto step = steps.end() - static_cast<std::ptrdiff_t>(last); step != steps.end(); ++step) {
    mean.loss += step->loss / static_cast<double>(last);
    mean.accuracy += step->accuracy / static_cast<double>(last);
  }
  return mean;
}

std::string change(double from, double to) {
  return from == 0 ? "" : fmt::format("{:+.1f} %", 100 * (to / from - 1));
}

}  // namespace

step_metrics summarize(std::uint64_t step, const std::vector<message>& messages, std::size_t published_bytes,
                       const lamina::layout& model, double server_seconds, double total_seconds) {
  const auto workers = static_cast<double>(messages.size());
  const double model_bytes = static_cast<double>(model.elements()) * sizeof(float);
  step_metrics metrics;
  metrics.step = step;
  std::uint64_t correct = 0;
  std::uint64_t images = 0;
  for (const message& each : messages) {
    metrics.loss += each.report.loss / workers;
    metrics.sent_up += static_cast<double>(each.frame.size()) / (model_bytes * workers);
    metrics.worker_seconds = std::max(metrics.worker_seconds, each.report.compute_seconds);
    correct += each.report.correct;
    images += each.report.images;
  }
  metrics.accuracy = static_cast<double>(correct) / static_cast<double>(images);
  metrics.sent_down = static_cast<double>(published_bytes) / model_bytes;
  metrics.server_seconds = server_seconds;
  metrics.total_seconds = total_seconds;
  metrics.communication_seconds = total_seconds - server_seconds - metrics.worker_seconds;
  return metrics;
}

step_log::step_log(std::uint64_t steps, std::uint64_t interval, const std::string& json_path)
    : steps_(steps), interval_(interval), json_path_(json_path) {
  if (json_path.empty()) return;
  json_.reset(std::fopen(json_path.c_str(), "w"));
  if (!json_) throw std::runtime_error("cannot write the log file " + json_path);
}

void step_log::begin_run(const std::string& name) {
  run_name_ = name;
  fmt::print("\n{} layer dropping\n", name);
}

void step_log::record(const step_metrics& step) {
  if (step.step == 1 || step.step == steps_ || step.step % interval_ == 0) {
    fmt::print(
        "{} {:>{}}/{}  loss {:6.3f}  accuracy {:5.1f} %  sent up {:6.2f} %  down {:6.2f} %  "
        "seconds: worker {:.3f}  server {:.3f}  communication {:.3f}\n",
        bar(step.step, steps_), step.step, fmt::formatted_size("{}", steps_), steps_, step.loss,
        100 * step.accuracy, 100 * step.sent_up, 100 * step.sent_down, step.worker_seconds,
        step.server_seconds, step.communication_seconds);
    std::fflush(stdout);
  }
  if (!json_) return;
  const nlohmann::ordered_json line = {
      {"run", run_name_},
      {"step", step.step},
      {"loss", step.loss},
      {"accuracy", step.accuracy},
      {"sent_up", step.sent_up},
      {"sent_down", step.sent_down},
      {"worker_seconds", step.worker_seconds},
      {"server_seconds", step.server_seconds},
      {"communication_seconds", step.communication_seconds},
      {"total_seconds", step.total_seconds},
  };
  fmt::print(json_.get(), "{}\n", line.dump());
  if (std::fflush(json_.get()) != 0) throw std::runtime_error("cannot write the log file " + json_path_);
}

void print_table(const std::vector<run_result>& runs) {
  constexpr auto row = "{:<17}{:>10}{:>10}{:>15}{:>10}{:>10}{:>11}{:>8}{:>11}{:>10}\n";
  fmt::print(
      "\nSeconds a step (mean without the first), bytes sent against the whole model, end of training\n");
  fmt::print(row, "layer dropping", "worker", "server", "communication", "total", "sent up", "sent down",
             "loss", "train acc.", "test acc.");
  std::vector<step_metrics> means;
  for (const run_result& run : runs) {
    const step_metrics& mean = means.emplace_back(mean_of(run.steps));
    const auto seconds = [](double value) { return fmt::format("{:.3f}", value); };
    const auto percent = [](double value) { return fmt::format("{:.2f} %", 100 * value); };
    fmt::print(row, run.name, seconds(mean.worker_seconds), seconds(mean.server_seconds),
               seconds(mean.communication_seconds), seconds(mean.total_seconds), percent(mean.sent_up),
               percent(mean.sent_down), seconds(mean.loss), percent(mean.accuracy),
               percent(run.test_accuracy));
  }
  if (means.size() == 2) {
    const auto& [from, to] = std::tie(means[0], means[1]);
    fmt::print(row, "change", change(from.worker_seconds, to.worker_seconds),
               change(from.server_seconds, to.server_seconds),
               change(from.communication_seconds, to.communication_seconds),
               change(from.total_seconds, to.total_seconds), change(from.sent_up, to.sent_up),
               change(from.sent_down, to.sent_down), "", "", "");
    fmt::print(
        "\nWith layer dropping {:.1f} % of the bytes went up and {:.1f} % came down; "
        "test accuracy is {:.1f} % with and {:.1f} % without.\n",
        100 * to.sent_up, 100 * to.sent_down, 100 * runs[1].test_accuracy, 100 * runs[0].test_accuracy);
  }
  std::fflush(stdout);
}

}  // namespace resnet50_ps
