// SPDX-License-Identifier: MIT
#include "records/run_log.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace lab {
namespace {

run_summary summary_of(const std::vector<step_metrics>& steps) {
  run_summary mean;
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
  const std::size_t last = std::min<std::size_t>(steps.size(), 10);
  for (auto step = steps.end() - static_cast<std::ptrdiff_t>(last); step != steps.end(); ++step) {
    mean.loss += step->loss / static_cast<double>(last);
    mean.accuracy += step->accuracy / static_cast<double>(last);
  }
  return mean;
}

// The median, for which one step that was held up does not count; of the last, since training gets faster and slower.
double recent_seconds_of(const std::vector<step_metrics>& steps) {
  std::vector<double> recent;
  for (auto step = steps.rbegin(); step != steps.rend() && recent.size() < 25; ++step) {
    recent.push_back(step->total_seconds);
  }
  const auto middle = recent.begin() + static_cast<std::ptrdiff_t>(recent.size() / 2);
  std::nth_element(recent.begin(), middle, recent.end());
  return *middle;
}

std::string change(double from, double to) {
  return from == 0 ? "" : fmt::format("{:+.1f} %", 100 * (to / from - 1));
}

nlohmann::ordered_json json_of(const step_metrics& step) {
  nlohmann::ordered_json line = {
      {"step", step.step},
      {"loss", step.loss},
      {"accuracy", step.accuracy},
      {"sent_up", step.sent_up},
      {"sent_down", step.sent_down},
      {"bytes_up", step.bytes_up},
      {"bytes_down", step.bytes_down},
      {"worker_seconds", step.worker_seconds},
      {"server_seconds", step.server_seconds},
      {"communication_seconds", step.communication_seconds},
      {"node_seconds", step.node_seconds},
      {"total_seconds", step.total_seconds},
      {"learning_rate", step.learning_rate},
      {"threshold", step.threshold},
      {"staleness", step.staleness},
      {"arrived", step.arrived},
  };
  if (step.transfers) {
    const auto& [up, down] = *step.transfers;
    transfer_cost both = up;
    both += down;
    line.update({
        {"lost_up", up.lost_share()},
        {"lost_down", down.lost_share()},
        {"packets", both.packets},
        {"repeated", both.repeated},
        {"duplicate", both.duplicate},
        {"late", both.late},
        {"wire_bytes_up", up.wire_bytes},
        {"wire_bytes_down", down.wire_bytes},
        {"rounds", both.rounds},
        {"rate", both.rate()},
    });
  }
  if (!step.overlap) return line;
  line["exposed_seconds"] = step.overlap->exposed_seconds;
  line["hidden_seconds"] = step.overlap->hidden_seconds;
  line["collectives"] = step.overlap->collectives;
  if (const auto predicted = step.overlap->predicted_exposed_seconds)
    line["predicted_exposed_seconds"] = *predicted;
  return line;
}

// Of communication, what the computation waited for and what it did not.
std::string overlap_text(const step_metrics& step) {
  if (!step.overlap) return "";
  return fmt::format("  exposed {:.3f}  hidden {:.3f}", step.overlap->exposed_seconds,
                     step.overlap->hidden_seconds);
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

run_log::run_log(run described, const lamina::layout& model)
    : run_(std::move(described)), progress_(run_.progress_columns) {
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

// Keeps the lines of the steps that are done; a run that was killed may have gone further, and left half a line. They
// go into a new file in the place of the old one, so that a kill in between leaves one or the other.
void run_log::take_up_metrics() {
  const std::string path = run_.directory + "/metrics.jsonl";
  std::vector<std::string> kept;
  if (run_.steps_done > 0) {
    std::ifstream before(path);
    for (std::string line; std::getline(before, line);) {
      const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
      if (json.is_discarded() || json.contains("counters")) continue;
      // The evaluation after the last of them is made anew.
      const bool is_step = json.contains("step");
      if (is_step ? json["step"] > run_.steps_done : json["evaluation_after_step"] >= run_.steps_done)
        continue;
      kept.push_back(line);
      if (is_step) {
        steps_.push_back(step_from(json));
        elapsed_seconds_ += steps_.back().total_seconds;
      }
    }
    if (before.bad()) throw std::runtime_error("cannot read " + path);
  }
  const std::string beside = path + ".tmp";
  json_.reset(std::fopen(beside.c_str(), "w"));
  if (!json_) throw std::runtime_error("cannot write " + beside);
  for (const std::string& line : kept) write_line(line);
  // Further lines go into the file that is open, under its new name.
  if (::fsync(::fileno(json_.get())) == -1) throw std::runtime_error("cannot write " + beside);
  std::error_code problem;
  std::filesystem::rename(beside, path, problem);
  if (problem) throw std::runtime_error("cannot write " + path + ": " + problem.message());
}

void run_log::write_line(const std::string& line) {
  if (!json_) return;
  fmt::print(json_.get(), "{}\n", line);
  if (std::fflush(json_.get()) != 0)
    throw std::runtime_error("cannot write " + run_.directory + "/metrics.jsonl");
}

void run_log::record(const step_metrics& step) {
  elapsed_seconds_ += step.total_seconds;
  steps_.push_back(step);
  if (step.step == 1 || step.step == run_.steps || step.step % run_.interval == 0) {
    progress_.print_above(fmt::format(
        "{} {:>{}}/{}  loss {:6.3f}  accuracy {:5.1f} %  sent up {:6.2f} %  down {:6.2f} %  "
        "seconds: worker {:.3f}  server {:.3f}  communication {:.3f}{}\n",
        progress_bar(step.step, run_.steps, 10), step.step, fmt::formatted_size("{}", run_.steps), run_.steps,
        step.loss, 100 * step.accuracy, 100 * step.sent_up, 100 * step.sent_down, step.worker_seconds,
        step.server_seconds, step.communication_seconds, overlap_text(step)));
  }
  progress_.draw({.step = step.step,
                  .steps = run_.steps,
                  .loss = step.loss,
                  .seconds_a_step = recent_seconds_of(steps_)});
  write_line(json_of(step).dump());
}

void run_log::record_evaluation(std::uint64_t step, const evaluation& seen) {
  last_evaluation_ = seen;
  if (step < run_.steps) {
    progress_.print_above(fmt::format("after step {}: test accuracy {:.1f} % (top 5: {:.1f} %)\n", step,
                                      100 * seen.top1_accuracy(), 100 * seen.top5_accuracy()));
  }
  const nlohmann::ordered_json line = {{"evaluation_after_step", step},
                                       {"top1", seen.top1_accuracy()},
                                       {"top5", seen.top5_accuracy()},
                                       {"elapsed_seconds", elapsed_seconds_}};
  write_line(line.dump());
}

void run_log::record_counters(const std::vector<std::pair<std::string, std::uint64_t>>& counters) {
  if (counters.empty()) return;
  nlohmann::ordered_json line;
  for (const auto& [name, count] : counters) line["counters"][name] = count;
  write_line(line.dump());
}

run_result run_log::result() const {
  run_result result = {run_.name, summary_of(steps_)};
  result.summary.last_evaluation = last_evaluation_;
  return result;
}

void print_table(const std::vector<run_result>& runs) {
  constexpr auto row = "{:<23}{:>10}{:>10}{:>15}{:>10}{:>10}{:>11}{:>8}{:>11}{:>10}\n";
  fmt::print(
      "\nSeconds a step (mean without the first), bytes sent against the whole model, end of training\n");
  fmt::print(row, "", "worker", "server", "communication", "total", "sent up", "sent down", "loss",
             "train acc.", "test acc.");
  const auto percent_of = [](const evaluation& seen) {
    return seen.images == 0 ? "-" : fmt::format("{:.2f} %", 100 * seen.top1_accuracy());
  };
  for (const run_result& run : runs) {
    const run_summary& mean = run.summary;
    const auto seconds = [](double value) { return fmt::format("{:.3f}", value); };
    const auto percent = [](double value) { return fmt::format("{:.2f} %", 100 * value); };
    fmt::print(row, run.name, seconds(mean.worker_seconds), seconds(mean.server_seconds),
               seconds(mean.communication_seconds), seconds(mean.total_seconds), percent(mean.sent_up),
               percent(mean.sent_down), seconds(mean.loss), percent(mean.accuracy),
               percent_of(mean.last_evaluation));
  }
  if (runs.size() > 1) {
    const run_summary& from = runs[runs.size() - 2].summary;
    const run_summary& to = runs.back().summary;
    fmt::print(row, "with, against without", change(from.worker_seconds, to.worker_seconds),
               change(from.server_seconds, to.server_seconds),
               change(from.communication_seconds, to.communication_seconds),
               change(from.total_seconds, to.total_seconds), change(from.sent_up, to.sent_up),
               change(from.sent_down, to.sent_down), "", "", "");
    if (to.last_evaluation.images == 0) return;
    fmt::print(
        "\nWith layer dropping {:.1f} % of the bytes went up and {:.1f} % came down; "
        "test accuracy is {} with and {} without.\n",
        100 * to.sent_up, 100 * to.sent_down, percent_of(to.last_evaluation),
        percent_of(from.last_evaluation));
  }
  std::fflush(stdout);
}

}  // namespace lab
