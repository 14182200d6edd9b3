// SPDX-License-Identifier: MIT
#include "in_process_link.hpp"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

namespace resnet50_ps {
namespace {

class in_process_run {
 public:
  explicit in_process_run(std::size_t workers)
      : actors_(workers + 1), to_server_(workers), to_worker_(workers), gathered_(workers) {}
  /// Runs both to their end. `serve` and `work` get the ends of their links. If one throws, the others are ended where they
  /// wait, and the first exception is thrown here.
  void operator()(const std::function<void(server_link&)>& serve,
                  const std::function<void(worker_link&)>& work);

 private:
  class server_end;
  class worker_end;
  struct letter {
    step_report report;
    std::vector<std::byte> bytes;
  };
  struct mailbox {
    std::optional<letter> arriving;
    letter taken;  // what the last message points into
  };
  struct actor {
    std::function<bool()> can_go_on;  // empty: it is running or has not begun
    bool finished = false;
  };

  template <class Condition>
  void wait_until(std::size_t who, Condition condition);
  void pass_turn(std::size_t from);
  void run(std::size_t who, const std::function<void()>& body);
  void post(mailbox& to, std::size_t sender, const step_report& report, byte_segments bytes);
  static message take(mailbox& from, std::size_t worker);

  std::mutex mutex_;
  std::condition_variable turned_;
  std::size_t turn_ = 0;
  std::exception_ptr failure_;
  std::vector<actor> actors_;  // the server, then the workers
  std::vector<mailbox> to_server_;
  std::vector<mailbox> to_worker_;
  std::vector<std::vector<double>> gathered_;
  std::size_t gathering_ = 0;  // how many have put their values in
  std::size_t gather_round_ = 0;
  std::vector<double> gather_result_;
};

// Ends a thread whose peer has failed; that peer's exception is the one that counts.
struct ended_by_peer {};

class in_process_run::server_end : public server_link {
 public:
  explicit server_end(in_process_run& run) : run_(run) {}
  std::size_t workers() const override { return run_.to_worker_.size(); }
  using server_link::send;
  void send(std::span<const std::size_t> workers, byte_segments bytes) override {
    for (const std::size_t w : workers) run_.post(run_.to_worker_[w], 0, {}, bytes);
  }
  std::vector<message> receive_from_all() override {
    std::vector<message> messages;
    for (std::size_t w = 0; w < workers(); ++w) {
      mailbox& box = run_.to_server_[w];
      run_.wait_until(0, [&box] { return box.arriving.has_value(); });
      messages.push_back(take(box, w));
    }
    return messages;
  }
  message receive_from_any() override {
    const auto next = [this] {
      for (std::size_t k = 0; k < workers(); ++k) {
        const std::size_t w = (after_ + k) % workers();
        if (run_.to_server_[w].arriving) return w;
      }
      return workers();
    };
    run_.wait_until(0, [&] { return next() < workers(); });
    const std::size_t w = next();
    after_ = w + 1;  // nobody is kept waiting by a busier one
    return take(run_.to_server_[w], w);
  }

 private:
  in_process_run& run_;
  std::size_t after_ = 0;
};

class in_process_run::worker_end : public worker_link {
 public:
  worker_end(in_process_run& run, std::size_t worker) : run_(run), worker_(worker) {}
  std::size_t workers() const override { return run_.to_worker_.size(); }
  std::size_t worker() const override { return worker_; }
  void send(const step_report& report, byte_segments bytes) override {
    run_.post(run_.to_server_[worker_], worker_ + 1, report, bytes);
  }
  message receive() override {
    mailbox& box = run_.to_worker_[worker_];
    run_.wait_until(worker_ + 1, [&box] { return box.arriving.has_value(); });
    return take(box, worker_);
  }
  std::vector<double> gather(std::span<const double> values) override {
    run_.gathered_[worker_].assign(values.begin(), values.end());
    const std::size_t round = run_.gather_round_;
    if (++run_.gathering_ == workers()) {
      run_.gather_result_.clear();
      for (const auto& each : run_.gathered_) {
        run_.gather_result_.insert(run_.gather_result_.end(), each.begin(), each.end());
      }
      run_.gathering_ = 0;
      ++run_.gather_round_;
    }
    run_.wait_until(worker_ + 1, [this, round] { return run_.gather_round_ > round; });
    return run_.gather_result_;
  }

 private:
  in_process_run& run_;
  std::size_t worker_;
};

void in_process_run::operator()(const std::function<void(server_link&)>& serve,
                                const std::function<void(worker_link&)>& work) {
  std::vector<std::thread> threads;
  server_end server(*this);
  std::vector<worker_end> workers;
  for (std::size_t w = 0; w + 1 < actors_.size(); ++w) workers.emplace_back(*this, w);
  for (std::size_t w = 0; w < workers.size(); ++w) {
    threads.emplace_back([&, w] { run(w + 1, [&] { work(workers[w]); }); });
  }
  run(0, [&] { serve(server); });
  for (std::thread& each : threads) each.join();
  if (failure_) std::rethrow_exception(failure_);
}

// The whole body runs under the mutex, which a wait gives up: one thread at a time.
void in_process_run::run(std::size_t who, const std::function<void()>& body) {
  std::unique_lock lock(mutex_);
  turned_.wait(lock, [&] { return turn_ == who || failure_; });
  try {
    if (!failure_) body();
  } catch (const ended_by_peer&) {
  } catch (...) {
    if (!failure_) failure_ = std::current_exception();
  }
  actors_[who].finished = true;
  pass_turn(who);
}

template <class Condition>
void in_process_run::wait_until(std::size_t who, Condition condition) {
  if (!condition()) {
    actors_[who].can_go_on = condition;
    pass_turn(who);
    std::unique_lock lock(mutex_, std::adopt_lock);
    turned_.wait(lock, [&] { return turn_ == who || failure_; });
    lock.release();  // run() holds it to its end
    actors_[who].can_go_on = nullptr;
  }
  if (failure_) throw ended_by_peer{};
}

void in_process_run::pass_turn(std::size_t from) {
  for (std::size_t k = 1; k <= actors_.size(); ++k) {
    const std::size_t next = (from + k) % actors_.size();
    if (actors_[next].finished || (actors_[next].can_go_on && !actors_[next].can_go_on())) continue;
    turn_ = next;
    turned_.notify_all();
    return;
  }
  bool all_finished = true;
  for (const actor& each : actors_) all_finished = all_finished && each.finished;
  if (!all_finished && !failure_) {
    failure_ = std::make_exception_ptr(link_error("the server and the workers wait for each other"));
  }
  turned_.notify_all();
}

void in_process_run::post(mailbox& to, std::size_t sender, const step_report& report, byte_segments bytes) {
  wait_until(sender, [&to] { return !to.arriving.has_value(); });
  letter& sent = to.arriving.emplace();
  sent.report = report;
  for (const auto segment : bytes) sent.bytes.insert(sent.bytes.end(), segment.begin(), segment.end());
}

message in_process_run::take(mailbox& from, std::size_t worker) {
  from.taken = std::move(*from.arriving);
  from.arriving.reset();
  return {worker, from.taken.report, from.taken.bytes};
}

}  // namespace

void run_in_process(std::size_t workers, const std::function<void(server_link&)>& serve,
                    const std::function<void(worker_link&)>& work) {
  in_process_run run(workers);
  run(serve, work);
}

}  // namespace resnet50_ps
