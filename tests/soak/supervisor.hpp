// SPDX-License-Identifier: MIT
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server.hpp"
#include "worker.hpp"

namespace soak {

struct totals {
  std::uint64_t runs = 0, rounds = 0, kills = 0, server_kills = 0, resumes = 0;
  progress of_processes;

  void add(const totals& other) {
    runs += other.runs;
    rounds += other.rounds;
    kills += other.kills;
    server_kills += other.server_kills;
    resumes += other.resumes;
    of_processes.add(other.of_processes);
  }
};

/// One run to its end: server and workers as processes, killed now and then and resumed from the newest checkpoint.
class supervisor {
 public:
  /// \param kill_every  rounds between two kills, in the mean; 0: none
  supervisor(const setting& run, std::filesystem::path directory, std::uint64_t kill_every)
      : run_(run), checkpoints_(directory), kill_every_(kill_every), random_(run.seed) {
    std::filesystem::create_directories(directory);
  }
  /// No process outlives it.
  ~supervisor() { end_all(); }
  supervisor(const supervisor&) = delete;
  supervisor& operator=(const supervisor&) = delete;

  /// Throws std::runtime_error if a process fails other than by a kill, or if nothing happens until the deadline.
  void run(totals& sums) {
    for (bool is_first = true;; is_first = false) {
      sums.resumes += is_first ? 0 : 1;
      const std::uint64_t begin = checkpoints_.newest();
      start_all();
      // Not before a first round with packets: who waits for a rank to come does so for as long as for a message.
      const std::uint64_t first = begin + (run_.is_lossy ? 1 : 0);
      const std::uint64_t kill_in =
          kill_every_ == 0 ? run_.rounds + 1 : first + random_() % (2 * kill_every_);
      const bool is_due = wait_for_round(kill_in, begin);
      if (is_due) kill_some(sums);
      const bool is_finished = wait_for_all(is_due);
      read_progress();
      close(progress_pipe_);
      sums.of_processes.add(progress_);
      if (is_finished) break;
    }
    sums.rounds += run_.rounds;
    ++sums.runs;
  }

 private:
  static constexpr int lost_a_peer = 3;

  struct process {
    pid_t id = -1;
    std::string name;
    bool was_killed = false;
    bool is_running = false;
  };

  void start_all() {
    std::fflush(nullptr);
    std::vector<std::pair<int, int>> sockets(run_.workers);  // the server's end, the worker's
    for (auto& [server_end, worker_end] : sockets) {
      int pair[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) throw std::runtime_error("socketpair failed");
      server_end = pair[0];
      worker_end = pair[1];
    }
    int progress[2];
    if (pipe(progress) != 0) throw std::runtime_error("pipe failed");
    progress_pipe_ = progress[0];
    progress_ = {};
    processes_.clear();
    std::optional<opened_ranks> opened;
    if (run_.is_lossy) opened = open_ranks(run_);

    start("the server", [&](std::uint64_t& round) {
      close(progress[0]);
      std::vector<channel> workers;
      for (std::size_t w = 0; w < run_.workers; ++w) {
        close(sockets[w].second);
        workers.emplace_back(sockets[w].first, "worker " + std::to_string(w));
      }
      server(run_, std::move(workers), checkpoints_, progress[1], std::move(opened)).serve(round);
    });
    close(progress[1]);
    for (std::size_t w = 0; w < run_.workers; ++w) {
      start("worker " + std::to_string(w), [&](std::uint64_t& round) {
        close(progress[0]);
        for (std::size_t other = 0; other < run_.workers; ++other) {
          close(sockets[other].first);
          if (other != w) close(sockets[other].second);
        }
        worker(run_, w, channel(sockets[w].second, "the server"), checkpoints_, std::move(opened))
            .work(round);
      });
    }
    for (const auto& [server_end, worker_end] : sockets) {
      close(server_end);
      close(worker_end);
    }
  }

  // A child that ends: 0, done; lost_a_peer; 1, after its name, its round and what broke on stderr.
  template <class Work>
  void start(const std::string& name, const Work& work) {
    const pid_t id = fork();
    if (id < 0) throw std::runtime_error("fork failed");
    if (id > 0) {
      processes_.push_back({id, name, false, true});
      return;
    }
#if defined(__linux__)
    prctl(PR_SET_PDEATHSIG, SIGKILL);
#endif
    int status = 0;
    std::uint64_t round = 0;
    try {
      work(round);
    } catch (const peer_lost&) {
      status = lost_a_peer;
    } catch (const udp::peers_lost&) {
      status = lost_a_peer;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "soak: %s, round %llu: %s\n", name.c_str(), static_cast<unsigned long long>(round),
                   error.what());
      status = 1;
    }
    _exit(status);
  }

  // Whether the run got to this round; false if the server ended before.
  bool wait_for_round(std::uint64_t round, std::uint64_t begin) {
    progress_.round = begin;
    while (progress_.round < round) {
      pollfd pipe{progress_pipe_, POLLIN, 0};
      const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(2 * deadline).count();
      if (poll(&pipe, 1, static_cast<int>(milliseconds)) <= 0) {
        throw std::runtime_error("no progress since round " + std::to_string(progress_.round));
      }
      if (!read_one()) return false;
    }
    return true;
  }

  bool read_one() {
    return ::read(progress_pipe_, &progress_, sizeof progress_) == sizeof progress_;
  }
  // What is left in the pipe, whose writer has ended.
  void read_progress() {
    while (read_one()) {
    }
  }

  // One process, now and then two, in the middle of whatever they do: up to some rounds after the one waited for.
  void kill_some(totals& sums) {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 4000));
    const std::size_t victims = random_() % 4 == 0 ? 2 : 1;
    for (std::size_t v = 0; v < victims; ++v) {
      process& victim = processes_[random_() % processes_.size()];
      if (victim.was_killed) continue;
      kill(victim.id, SIGKILL);
      victim.was_killed = true;
      ++sums.kills;
      if (&victim == &processes_[0]) ++sums.server_kills;
    }
  }

  // Whether all have done their work. Those that lost a peer must end by themselves, and only after a kill.
  bool wait_for_all(bool after_kill) {
    const auto last = std::chrono::steady_clock::now() + 2 * deadline;
    bool all_done = true;
    std::string failure;
    for (process& each : processes_) {
      int status = 0;
      while (waitpid(each.id, &status, WNOHANG) == 0) {
        if (std::chrono::steady_clock::now() > last) throw std::runtime_error(each.name + " does not end");
        read_progress_if_any();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      each.is_running = false;
      const bool is_done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
      const bool has_lost = WIFEXITED(status) && WEXITSTATUS(status) == lost_a_peer;
      const bool is_killed = each.was_killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
      all_done &= is_done;
      if (is_done || is_killed || (has_lost && after_kill)) continue;
      // Who lost a peer is not who broke.
      if (failure.empty() || !has_lost)
        failure = each.name + (has_lost ? " lost a peer that nobody killed" : " failed");
    }
    if (!failure.empty()) throw std::runtime_error(failure);
    return all_done;
  }

  void read_progress_if_any() {
    pollfd pipe{progress_pipe_, POLLIN, 0};
    while (poll(&pipe, 1, 0) > 0 && (pipe.revents & POLLIN) != 0 && read_one()) {
    }
  }

  void end_all() {
    for (process& each : processes_) {
      if (!each.is_running) continue;
      kill(each.id, SIGKILL);
      waitpid(each.id, nullptr, 0);
    }
  }

  setting run_;
  checkpoint_directory checkpoints_;
  std::uint64_t kill_every_;
  std::mt19937_64 random_;
  int progress_pipe_ = -1;
  progress progress_;
  std::vector<process> processes_;
};

}  // namespace soak
