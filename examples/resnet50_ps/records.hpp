// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// A step as the server saw it; of an asynchronous server, as many frames as there are senders.
struct step_record {
  std::uint64_t step = 0;
  double loss = 0;
  double up_bytes = 0;         // of gradients from a sender, a mean over them
  double down_bytes = 0;       // of the parameters that the sender computed with
  double compute_seconds = 0;  // of the slowest worker
  double server_seconds = 0;   // decoding, means, update
  double seconds = 0;          // of the whole step, without a test
};

/// Prints a line a step, keeps them in DIRECTORY/metrics.csv, and has the means for the table.
class records {
 public:
  /// Of a run that goes on after step `done`, what the file has of later steps is taken out.
  records(std::string title, const std::string& directory, std::uint64_t steps, std::uint64_t done)
      : title_(std::move(title)), steps_(steps) {
    std::printf("\n%s%s\n", title_.c_str(), done > 0 ? (", after step " + std::to_string(done)).c_str() : "");
    if (directory.empty()) return;
    path_ = directory + "/metrics.csv";
    std::filesystem::create_directories(directory);
    std::ostringstream kept;
    kept << "step,loss,up_bytes,down_bytes,compute_seconds,server_seconds,seconds,test_loss,test_accuracy\n";
    std::ifstream before(path_);
    std::string line;
    for (std::getline(before, line); done > 0 && std::getline(before, line);) {
      const std::uint64_t step = std::strtoull(line.c_str(), nullptr, 10);
      const bool is_test = line.find(",,") != std::string::npos && !line.ends_with(",,");
      if (step < done || (step == done && !is_test)) kept << line << '\n';
    }
    before.close();
    file_.open(path_ + ".part");
    file_ << kept.str();
    check_file();
    std::filesystem::rename(path_ + ".part", path_);
  }

  /// \param model_bytes  what shares are of
  void add(const step_record& s, std::size_t model_bytes) {
    if (!path_.empty()) {
      std::ostringstream line;
      line.precision(17);
      line << s.step << ',' << s.loss << ',' << s.up_bytes << ',' << s.down_bytes << ',' << s.compute_seconds
           << ',' << s.server_seconds << ',' << s.seconds << ",,\n";
      file_ << line.str();
      check_file();
    }
    const auto all = static_cast<double>(model_bytes);
    std::printf("%*llu/%llu  loss %6.4f  up %6.2f MB (%5.1f %%)  down %6.2f MB (%5.1f %%)  %5.2f s\n",
                static_cast<int>(2 + std::to_string(steps_).size()), static_cast<unsigned long long>(s.step),
                static_cast<unsigned long long>(steps_), s.loss, s.up_bytes / 1e6, 100 * s.up_bytes / all,
                s.down_bytes / 1e6, 100 * s.down_bytes / all, s.seconds);
    std::fflush(stdout);
    up_share_.push_back(s.up_bytes / all);
    down_share_.push_back(s.down_bytes / all);
    all_.push_back(s);
  }

  /// What the parameters after step `done` did with the test images.
  void add_test(std::uint64_t done, double loss, double accuracy) {
    test_accuracy_ = accuracy;
    std::printf("  test after step %llu: loss %.4f, %.2f %% right\n", static_cast<unsigned long long>(done),
                loss, 100 * accuracy);
    std::fflush(stdout);
    if (path_.empty()) return;
    std::ostringstream line;
    line.precision(17);
    line << done << ",,,,,,," << loss << ',' << accuracy << '\n';
    file_ << line.str();
    check_file();
  }

  /// In the shape of the paper's Table 1.
  static void print_head() {
    std::printf(
        "\nSeconds a step and shares of the model, without the first step, which sends all of it; loss of "
        "the last ten\n"
        "%-22s%9s%9s%9s%9s%9s%9s%9s%10s\n",
        "", "compute", "server", "network", "total", "up", "down", "loss", "test acc.");
  }
  /// \param has_network  whether what a step does not compute is communication; no step of an asynchronous server has such a rest
  void print_row(bool has_network) const {
    const std::size_t first = all_.size() > 1 ? 1 : 0;
    const auto mean = [&](auto value) {
      double sum = 0;
      for (std::size_t i = first; i < all_.size(); ++i) sum += value(i);
      return sum / static_cast<double>(all_.size() - first);
    };
    if (all_.empty()) return std::printf("%-22s  nothing was left to do\n", title_.c_str()), void();
    const double compute = mean([&](std::size_t i) { return all_[i].compute_seconds; });
    const double server = mean([&](std::size_t i) { return all_[i].server_seconds; });
    const double total = mean([&](std::size_t i) { return all_[i].seconds; });
    const std::size_t last = std::min<std::size_t>(10, all_.size());
    double loss = 0;
    for (std::size_t i = all_.size() - last; i < all_.size(); ++i)
      loss += all_[i].loss / static_cast<double>(last);
    std::ostringstream network;
    network.precision(3);
    if (has_network) network << std::fixed << std::max(0.0, total - compute - server);
    std::printf("%-22s%9.3f%9.3f%9s%9.3f%7.2f %%%7.2f %%%9.4f%8.2f %%\n", title_.c_str(), compute, server,
                has_network ? network.str().c_str() : "-", total,
                100 * mean([&](std::size_t i) { return up_share_[i]; }),
                100 * mean([&](std::size_t i) { return down_share_[i]; }), loss, 100 * test_accuracy_);
  }

 private:
  void check_file() {
    if (!file_.flush()) throw std::runtime_error("cannot write " + path_ + ": is the disk full?");
  }
  std::string title_;
  std::uint64_t steps_;
  std::string path_;  // empty: nothing is kept
  std::ofstream file_;
  std::vector<step_record> all_;
  std::vector<double> up_share_, down_share_;
  double test_accuracy_ = 0;
};
