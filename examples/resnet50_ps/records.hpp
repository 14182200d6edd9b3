// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "ranks.hpp"

/// A step as the server saw it; of an asynchronous server, as many frames as there are senders.
struct step_record {
  std::uint64_t step = 0;
  report told = {};           // by all workers
  double up_bytes = 0;        // of gradients from a sender, a mean over them
  double down_bytes = 0;      // of the parameters that the sender computed with
  double server_seconds = 0;  // decoding, means, update
  double seconds = 0;         // of all
};

/// Prints a line a step, keeps them in DIRECTORY/metrics.csv, and has the means for the table.
class records {
 public:
  /// A run that goes on after step `done` adds to the file: of a step that is there twice, the last line counts.
  records(const std::string& title, const std::string& directory, std::uint64_t steps, std::uint64_t done, int workers,
          std::size_t model_elements)
      : title_(title), steps_(steps), workers_(workers), model_bytes_(static_cast<double>(sizeof(float) * model_elements)) {
    std::printf("\n%s%s\n", title.c_str(), done > 0 ? (", after step " + std::to_string(done)).c_str() : "");
    if (directory.empty()) return;
    path_ = directory + "/metrics.csv";
    std::filesystem::create_directories(directory);
    file_.open(path_, done > 0 ? std::ios::app : std::ios::trunc);
    if (done == 0) write("step,loss,up_bytes,down_bytes,compute_seconds,server_seconds,seconds,test_loss,test_accuracy");
  }

  void add(step_record s) {
    add_test(s.step - 1, s.told);
    s.seconds -= s.told.test_seconds;
    s.told.loss /= workers_;
    std::ostringstream line;
    line.precision(17);
    line << s.step << ',' << s.told.loss << ',' << s.up_bytes << ',' << s.down_bytes << ',' << s.told.compute_seconds << ','
         << s.server_seconds << ',' << s.seconds << ",,";
    write(line.str());
    const double up = 100 * s.up_bytes / model_bytes_;
    const double down = 100 * s.down_bytes / model_bytes_;
    std::printf("  %4llu/%llu  loss %6.4f  up %6.2f MB (%5.1f %%)  down %6.2f MB (%5.1f %%)  %5.2f s\n",
                static_cast<unsigned long long>(s.step), static_cast<unsigned long long>(steps_), s.told.loss, s.up_bytes / 1e6, up,
                s.down_bytes / 1e6, down, s.seconds);
    lines_.push_back({s.told.compute_seconds, s.server_seconds, s.seconds, up, down, s.told.loss});
  }

  /// What all workers have told after the last step.
  void finish(const report& told) {
    add_test(steps_, told);
    std::printf("  %d replicas equal, checksum %016llx\n", workers_, static_cast<unsigned long long>(told.checksum));
  }

  /// In the shape of the paper's Table 1.
  static void print_head() {
    std::printf(
        "\nMeans of all steps but the first, which sends the whole model: seconds, and shares of the model; loss of the last ten\n");
    std::printf("%31s%9s%9s%9s%9s%9s%9s%11s\n", "compute", "server", "network", "total", "up", "down", "loss", "test acc.");
  }
  /// \param has_network  whether what a step does not compute is communication; an asynchronous server's has no such rest
  void print_row(bool has_network) const {
    std::array<double, 6> mean{};  // compute, server, all, up, down; loss
    const std::size_t first = lines_.size() > 1 ? 1 : 0, last = std::min<std::size_t>(10, lines_.size());
    for (std::size_t k = 0; k < mean.size(); ++k) {
      const std::size_t begin = k < 5 ? first : lines_.size() - last;
      for (std::size_t i = begin; i < lines_.size(); ++i) mean[k] += lines_[i][k] / static_cast<double>(lines_.size() - begin);
    }
    std::printf("%-22s%9.3f%9.3f", title_.c_str(), mean[0], mean[1]);
    has_network ? std::printf("%9.3f", std::max(0.0, mean[2] - mean[0] - mean[1])) : std::printf("%9s", "-");
    std::printf("%9.3f%7.2f %%%7.2f %%%9.4f%8.2f %%\n", mean[2], mean[3], mean[4], mean[5], 100 * test_accuracy_);
  }

 private:
  void add_test(std::uint64_t done, const report& told) {
    if (told.tested == 0) return;
    test_accuracy_ = told.test_right / told.tested;
    const double loss = told.test_loss / told.tested;
    std::printf("  test after step %llu: loss %.4f, %.2f %% right\n", static_cast<unsigned long long>(done), loss, 100 * test_accuracy_);
    std::ostringstream line;
    line.precision(17);
    line << done << ",,,,,,," << loss << ',' << test_accuracy_;
    write(line.str());
  }
  void write(const std::string& line) {
    if (!path_.empty() && !(file_ << line << std::endl)) throw std::runtime_error("cannot write " + path_ + ": is the disk full?");
  }

  std::string title_;
  std::uint64_t steps_;
  int workers_;
  double model_bytes_;  // what shares are of
  std::string path_;    // empty: nothing is kept
  std::ofstream file_;
  std::vector<std::array<double, 6>> lines_;  // as the means of print_row()
  double test_accuracy_ = 0;
};
