// SPDX-License-Identifier: MIT
#include "metrics.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>
#include <utility>

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

nlohmann::ordered_json json_of(const step_metrics& step) {
  return {
      {"step", step.step},
      {"loss", step.loss},
      {"accuracy", step.accuracy},
      {"sent_up", step.sent_up},
      {"sent_down", step.sent_down},
      {"worker_seconds", step.worker_seconds},
      {"server_seconds", step.server_seconds},
      {"communication_seconds", step.communication_seconds},
      {"total_seconds", step.total_seconds},
      {"learning_rate", step.learning_rate},
      {"threshold", step.threshold},
      {"staleness", step.staleness},
      {"arrived", step.arrived},
  };
}

// What the table at the end needs.
step_metrics step_from(const nlohmann::json& line) {
  step_metrics step;
  step.step = line["step"];
  step.loss = line["loss"];
  step.accuracy = line["accuracy"];
  step.sent_up = line["sent_up"];
  step.sent_down = line["sent_down"];
  step.worker_seconds = line["worker_seconds"];
  step.server_seconds = line["server_seconds"];
  step.communication_seconds = line["communication_seconds"];
  step.total_seconds = line["total_seconds"];
  return step;
}

}  // namespace

void step_summary::add_frame(const message& frame, std::uint64_t staleness_frames) {
  ++frames_;
  metrics_.loss += frame.report.loss;
  metrics_.threshold += frame.report.threshold;
  metrics_.sent_up += share_of_model(frame.bytes.size());
  metrics_.staleness += static_cast<double>(staleness_frames);
  leave_out(frame.report.evaluation_seconds);
  metrics_.worker_seconds = std::max(metrics_.worker_seconds, frame.report.compute_seconds);
  correct_ += frame.report.correct;
  images_ += frame.report.images;
}

void step_summary::add_arrived(const lamina::selection& layers) {
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (layers.is_sent(l)) arrived_.send(l);
  }
}

void step_summary::add_published(std::size_t bytes, std::size_t workers) {
  metrics_.sent_down += share_of_model(bytes) * static_cast<double>(workers);
  published_frames_ += workers;
}

step_metrics step_summary::finish(std::uint64_t step, float learning_rate) {
  step_metrics metrics = std::exchange(metrics_, {});
  const auto frames = static_cast<double>(std::exchange(frames_, 0));
  metrics.step = step;
  metrics.learning_rate = learning_rate;
  metrics.loss /= frames;
  metrics.threshold /= frames;
  metrics.sent_up /= frames;
  metrics.staleness /= frames;
  metrics.sent_down /= static_cast<double>(std::exchange(published_frames_, 0));
  metrics.accuracy =
      static_cast<double>(std::exchange(correct_, 0)) / static_cast<double>(std::exchange(images_, 0));
  for (std::size_t l = 0; l < model_.layers(); ++l) {
    if (arrived_.is_sent(l)) metrics.arrived.push_back(l);
  }
  arrived_.clear();
  metrics.total_seconds =
      std::exchange(since_last_, stopwatch()).seconds() - std::exchange(evaluation_seconds_, 0.0);
  // The asynchronous server works while its workers do.
  metrics.communication_seconds =
      std::max(0.0, metrics.total_seconds - metrics.server_seconds - metrics.worker_seconds);
  return metrics;
}

std::optional<evaluation> evaluation_log::add(std::uint64_t step, const step_report& report) {
  if (report.test_images == 0) return std::nullopt;
  shares& so_far = open_[step];
  so_far.sum.images += report.test_images;
  so_far.sum.top1 += report.test_top1;
  so_far.sum.top5 += report.test_top5;
  if (++so_far.workers < workers_) return std::nullopt;
  const evaluation whole = so_far.sum;
  open_.erase(step);
  return whole;
}

run_log::run_log(run described, const lamina::layout& model) : run_(std::move(described)) {
  result_.name = run_.name;
  fmt::print("\n{}\n", run_.name);
  if (run_.steps_done > 0) fmt::print("resumed after step {}\n", run_.steps_done);
  if (run_.directory.empty()) return;
  std::error_code problem;
  std::filesystem::create_directories(run_.directory, problem);
  if (problem)
    throw std::runtime_error("cannot make the directory " + run_.directory + ": " + problem.message());
  write_config(model);
  take_up_metrics();
}

void run_log::write_config(const lamina::layout& model) const {
  nlohmann::ordered_json layers = nlohmann::json::array();
  for (std::size_t l = 0; l < model.layers(); ++l) {
    layers.push_back({{"name", model[l].name}, {"elements", model.sizes()[l]}});
  }
  const nlohmann::ordered_json config = {
      {"name", run_.name},
      {"options", {{"command_line", run_.command_line}}},
      {"workers", run_.workers},
      {"steps", run_.steps},
      {"model", {{"elements", model.elements()}, {"layers", layers}}},
  };
  std::ofstream file(run_.directory + "/config.json");
  file << config.dump(2) << "\n";
  if (!file.flush()) throw std::runtime_error("cannot write " + run_.directory + "/config.json");
}

// Keeps the lines of the steps that are done; a run that was killed may have gone further, and left half a line.
void run_log::take_up_metrics() {
  const std::string path = run_.directory + "/metrics.jsonl";
  std::vector<std::string> kept;
  if (run_.steps_done > 0) {
    std::ifstream before(path);
    for (std::string line; std::getline(before, line);) {
      const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (json.is_discarded()) continue;
      // The evaluation after the last of them is made anew.
      const bool is_step = json.contains("step");
      if (is_step ? json["step"] > run_.steps_done : json["evaluation_after_step"] >= run_.steps_done)
        continue;
      kept.push_back(line);
      if (is_step) {
        result_.steps.push_back(step_from(json));
        elapsed_seconds_ += result_.steps.back().total_seconds;
      }
    }
  }
  json_.reset(std::fopen(path.c_str(), "w"));
  if (!json_) throw std::runtime_error("cannot write " + path);
  for (const std::string& line : kept) write_line(line);
}

void run_log::write_line(const std::string& line) {
  if (!json_) return;
  fmt::print(json_.get(), "{}\n", line);
  if (std::fflush(json_.get()) != 0)
    throw std::runtime_error("cannot write " + run_.directory + "/metrics.jsonl");
}

void run_log::record(const step_metrics& step) {
  elapsed_seconds_ += step.total_seconds;
  result_.steps.push_back(step);
  if (step.step == 1 || step.step == run_.steps || step.step % run_.interval == 0) {
    fmt::print(
        "{} {:>{}}/{}  loss {:6.3f}  accuracy {:5.1f} %  sent up {:6.2f} %  down {:6.2f} %  "
        "seconds: worker {:.3f}  server {:.3f}  communication {:.3f}\n",
        bar(step.step, run_.steps), step.step, fmt::formatted_size("{}", run_.steps), run_.steps, step.loss,
        100 * step.accuracy, 100 * step.sent_up, 100 * step.sent_down, step.worker_seconds,
        step.server_seconds, step.communication_seconds);
    std::fflush(stdout);
  }
  write_line(json_of(step).dump());
}

void run_log::record_evaluation(std::uint64_t step, const evaluation& seen) {
  result_.last_evaluation = seen;
  if (step < run_.steps) {
    fmt::print("after step {}: test accuracy {:.1f} % (top 5: {:.1f} %)\n", step, 100 * seen.top1_accuracy(),
               100 * seen.top5_accuracy());
    std::fflush(stdout);
  }
  const nlohmann::ordered_json line = {{"evaluation_after_step", step},
                                       {"top1", seen.top1_accuracy()},
                                       {"top5", seen.top5_accuracy()},
                                       {"elapsed_seconds", elapsed_seconds_}};
  write_line(line.dump());
}

void print_table(const std::vector<run_result>& runs) {
  constexpr auto row = "{:<23}{:>10}{:>10}{:>15}{:>10}{:>10}{:>11}{:>8}{:>11}{:>10}\n";
  fmt::print(
      "\nSeconds a step (mean without the first), bytes sent against the whole model, end of training\n");
  fmt::print(row, "", "worker", "server", "communication", "total", "sent up", "sent down", "loss",
             "train acc.", "test acc.");
  std::vector<step_metrics> means;
  for (const run_result& run : runs) {
    const step_metrics& mean = means.emplace_back(mean_of(run.steps));
    const auto seconds = [](double value) { return fmt::format("{:.3f}", value); };
    const auto percent = [](double value) { return fmt::format("{:.2f} %", 100 * value); };
    fmt::print(row, run.name, seconds(mean.worker_seconds), seconds(mean.server_seconds),
               seconds(mean.communication_seconds), seconds(mean.total_seconds), percent(mean.sent_up),
               percent(mean.sent_down), seconds(mean.loss), percent(mean.accuracy),
               percent(run.last_evaluation.top1_accuracy()));
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
        100 * to.sent_up, 100 * to.sent_down, 100 * runs[1].last_evaluation.top1_accuracy(),
        100 * runs[0].last_evaluation.top1_accuracy());
  }
  std::fflush(stdout);
}

}  // namespace resnet50_ps
