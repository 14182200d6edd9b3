// SPDX-License-Identifier: MIT
// A parameter server and its workers as processes, killed at random and resumed from checkpoints, for as many rounds as
// wanted: see usage. Every setting runs twice, once without kills.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "setting.hpp"
#include "supervisor.hpp"

namespace {

constexpr const char* usage =
    R"(usage: soak [--rounds N] [--workers W] [--seed S] [--minutes M] [--kill-every N] [--inject-loss S] [--loss-bound P]
            [--fault NAME]

A server and W worker processes over socket pairs, with the library's classes on both sides. At random times one or two
of them are killed; the others must notice and end, and the run resumes from its last checkpoint. Options come from the
seed. Checked, all of it exactly: what the server received and the residuals are the sum of the gradients, at every
checkpoint and resume; every replica is the server's model, after every reply; the final model is that of the same run
without kills; the memory of no process grows.

  --rounds N      rounds of a run (1000)
  --workers W     a power of two (8)
  --seed S        of the first two runs, one synchronous, one asynchronous (1)
  --minutes M     go on with the next seeds for so long
  --kill-every N  rounds between kills, in the mean (64)
  --inject-loss S gradients go as packets over UDP on loopback, of which this share is lost on purpose, from 0 to 0.7. What is
                  missing depends on times, so the final model is compared with that of no other run unless the bound is 0
  --loss-bound P  then: of each layer this share of the gradients may be missing, from 0 to 0.5 (0.1)
  --fault NAME    break it, to see it noticed: commit-lost, skip-save, server-wide; with packets: commit-whole
)";

struct arguments {
  std::uint64_t rounds = 1000;
  std::uint64_t workers = 8;
  std::uint64_t seed = 1;
  std::uint64_t minutes = 0;
  std::uint64_t kill_every = 64;
  std::optional<double> inject_loss;
  std::optional<double> loss_bound;
  std::string fault;
};

arguments parse(const std::vector<std::string>& words) {
  arguments given;
  const auto number = [](std::uint64_t& to) {
    return [&to](const std::string& value) { to = std::stoull(value); };
  };
  const auto share = [](std::optional<double>& to, double most) {
    return [&to, most](const std::string& value) {
      to = std::stod(value);
      if (!(*to >= 0 && *to <= most))
        throw std::invalid_argument("a share must lie in [0, " + std::to_string(most) + "], got " + value);
    };
  };
  const std::map<std::string, std::function<void(const std::string&)>> options = {
      {"--rounds", number(given.rounds)},
      {"--workers", number(given.workers)},
      {"--seed", number(given.seed)},
      {"--minutes", number(given.minutes)},
      {"--kill-every", number(given.kill_every)},
      {"--inject-loss", share(given.inject_loss, 0.7)},
      {"--loss-bound", share(given.loss_bound, 0.5)},
      {"--fault", [&](const std::string& value) { given.fault = value; }}};
  for (std::size_t i = 0; i < words.size(); i += 2) {
    if (!options.contains(words[i]) || i + 1 == words.size())
      throw std::invalid_argument(words[i] + " is no option, or wants a value");
    options.at(words[i])(words[i + 1]);
  }
  if (!std::has_single_bit(given.workers) || given.workers > 64) {
    throw std::invalid_argument("--workers must be a power of two up to 64, so that their mean is exact");
  }
  if (!given.inject_loss && (given.loss_bound || given.fault == "commit-whole"))
    throw std::invalid_argument("--loss-bound and --fault commit-whole want --inject-loss");
  if (given.rounds == 0 || given.kill_every == 0)
    throw std::invalid_argument("--rounds and --kill-every begin at 1");
  return given;
}

std::vector<float> final_model(const std::filesystem::path& directory, const soak::setting& run) {
  std::ifstream in = soak::checkpoint_directory(directory).load("server", run.rounds);
  std::vector<float> parameters;
  soak::read(in, parameters);
  return parameters;
}

void run_setting(const soak::setting& run, const std::filesystem::path& directory, std::uint64_t kill_every,
                 soak::totals& all) {
  soak::totals sums;
  if (run.fault.empty()) soak::supervisor(run, directory / "without", 0).run(sums);
  const soak::totals without = sums;
  soak::supervisor(run, directory / "with", kill_every).run(sums);
  // What is lost, and so what a model has by then, depends on times.
  if (run.fault.empty() && run.bound_ppm == 0 &&
      final_model(directory / "with", run) != final_model(directory / "without", run)) {
    throw std::runtime_error("the final model is not that of the run without kills");
  }
  std::printf("%s: %llu + %llu rounds, %llu kills, %llu of them the server, %llu frames, %.1f MB\n",
              soak::described(run).c_str(), static_cast<unsigned long long>(without.rounds),
              static_cast<unsigned long long>(sums.rounds - without.rounds),
              static_cast<unsigned long long>(sums.kills), static_cast<unsigned long long>(sums.server_kills),
              static_cast<unsigned long long>(sums.of_processes.frames),
              static_cast<double>(sums.of_processes.bytes) / 1e6);
  std::fflush(stdout);
  all.add(sums);
  std::filesystem::remove_all(directory);
}

void print(const soak::totals& all) {
  const std::pair<const char*, std::uint64_t> lines[] = {
      {"runs", all.runs},
      {"rounds", all.rounds},
      {"checkpoints checked", all.of_processes.checkpoints},
      {"kills", all.kills},
      {"kills of the server", all.server_kills},
      {"resumes", all.resumes},
      {"frames", all.of_processes.frames},
      {"bytes", all.of_processes.bytes},
      {"missing at an end", all.of_processes.missing_elements},  // of a transfer; their workers keep them
      {"lost elements", 0},                                      // one would have ended the run
      {"largest RSS in KiB", all.of_processes.peak_bytes / 1024},
      {"RSS growth in KiB", all.of_processes.growth_bytes / 1024}};
  for (const auto& [name, value] : lines)
    std::printf("%-24s %llu\n", name, static_cast<unsigned long long>(value));
}

}  // namespace

int main(int count, char** words) {
  try {
    const std::vector<std::string> given(words + 1, words + count);
    if (std::ranges::find(given, "--help") != given.end()) {
      std::fputs(usage, stdout);
      return 0;
    }
    const arguments options = parse(given);
    std::string pattern = (std::filesystem::temp_directory_path() / "lamina_soak.XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make " + pattern);
    const std::filesystem::path directory = pattern;

    soak::totals all;
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(options.minutes);
    for (std::uint64_t k = 0; k < 2 || std::chrono::steady_clock::now() < end; ++k) {
      soak::setting run = soak::setting_of(options.seed + k / 2, k % 2 == 0);
      run.workers = options.workers;
      run.rounds = options.rounds;
      run.fault = options.fault;
      run.sends_fail |= !run.fault.empty();
      if (options.inject_loss)
        run = soak::lossy(run, *options.inject_loss,
                          static_cast<std::uint32_t>(options.loss_bound.value_or(0.1) * 1e6));
      try {
        run_setting(run, directory / std::to_string(k), options.kill_every, all);
      } catch (const std::exception& error) {
        // What was broken on purpose needs no looking at.
        if (!run.fault.empty()) std::filesystem::remove_all(directory);
        throw std::runtime_error(soak::described(run) + ": " + error.what() +
                                 "\nsoak: its checkpoints were in " + directory.string());
      }
    }
    print(all);
    std::filesystem::remove_all(directory);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "soak: %s\n%s", error.what(), usage);
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "soak: %s\n", error.what());
    return 1;
  }
  return 0;
}
