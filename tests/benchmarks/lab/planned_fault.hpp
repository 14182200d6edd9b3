// SPDX-License-Identifier: MIT
#pragma once

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

/// What a test wants one rank to do in one place of its training, said in the environment as LAMINA_TEST_FAULT="RANK PLACE STEP ACTION". The
/// place is forward, backward (of the first layer, when all other gradients are ready) or drain (while it waits for the gradients of
/// others, which it does since it does not sleep in that step); the action kill or throw.
class planned_fault {
 public:
  planned_fault() {
    const char* const planned = std::getenv("LAMINA_TEST_FAULT");
    const char* const rank = std::getenv("OMPI_COMM_WORLD_RANK");
    std::string who;
    if (planned == nullptr || rank == nullptr) return;
    std::istringstream(planned) >> who >> place_ >> step_ >> action_;
    if (who != rank) place_.clear();
  }

  /// A forward pass of a training step, which sleeps.
  void forward(std::chrono::milliseconds sleeps) {
    ++now_;
    if (is_due("forward")) act();
    if (!is_due("drain")) std::this_thread::sleep_for(sleeps);
  }
  void backward(std::chrono::milliseconds others_sleep) {
    if (is_due("backward")) act();
    if (!is_due("drain")) return;
    std::thread([this, others_sleep] {
      std::this_thread::sleep_for(others_sleep / 2);
      act();
    }).detach();
  }

 private:
  bool is_due(const char* place) const { return place_ == place && now_ == step_; }
  void act() const {
    std::fprintf(stderr, "planned fault in %s\n", place_.c_str());
    std::fflush(stderr);
    if (action_ == "throw") throw std::runtime_error("thrown in " + place_);
    std::raise(SIGKILL);
  }

  std::string place_;  // empty: none on this rank
  std::string action_;
  std::uint64_t step_ = 0;
  std::uint64_t now_ = 0;
};
