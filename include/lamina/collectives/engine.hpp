// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/staging.hpp"

/// \file
/// The sums of a plan, overlapped with backward: what a program uses. Read it after executor.hpp and staging.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// Who moves messages on.
enum class progress_by : std::uint8_t {
  thread,  ///< one of the engine's own: communication goes on while the caller computes
  caller,  ///< ready(), wait(), drain() and poll(): for ranks that take turns in one thread, and where there is one core
};

/// Writes the new parameters of some elements of a layer over their mean gradient: those from `begin` on.
using owner_update = std::function<void(std::size_t layer, std::size_t begin, std::span<float> mean)>;

struct engine_options {
  std::size_t piece_bytes = default_piece_bytes;  ///< of a message at most; the same on all ranks
  progress_by progress = progress_by::thread;
  /// A rank that is not heard of for so long while a collective waits for it is an error; time in which it may compute counts. Time in
  /// which this rank does not look does not: between two looks 10 ms count at most.
  std::chrono::milliseconds timeout = std::chrono::minutes(2);
  /// Each layer is cut into a shard for each rank, its owner, which gets the mean of the shard and updates it; the new parameters go to
  /// all ranks in place of the means. Called by who moves messages on, with the shards of this rank of each bucket, in the order of the
  /// plan, once all of the bucket is summed; what it throws ends the engine. It must not call the engine, which is then refused with
  /// std::logic_error, and may read the parameters of its layer, but not those of others. Every rank has one, or none has.
  owner_update update = {};
};

/// What the steps so far took.
struct engine_totals {
  std::uint64_t sent_bytes = 0;   ///< headers and all
  double waited_seconds = 0;      ///< in wait() and drain(): exposed communication
  double collective_seconds = 0;  ///< from begin to end of each: exposed or not
};

/// The mean gradient of each layer over all ranks, computed during the backward pass: layers are handed over as their gradients become
/// ready, and the buckets of the plan are summed in its order, one collective at a time.
///
///     engine.begin_step();                                  // before backward
///     engine.ready(l, gradient);                            // in backward, as soon as the gradient of l is complete
///     engine.wait(l); update(l, engine.mean(l));            // where layer l is needed again, or after drain()
///
/// With options.update each rank updates its shards of all layers, and engine.parameters(l) is copied into the network in the last line.
///
/// One thread calls it. Every rank has the same plan, which the ranks compare before the first sum, and makes the same decisions. The
/// bits of a mean depend on the plan, on what is sent, and on nothing else: not on time, threads, channel or progress_by.
///
/// An error of any kind in a collective ends the engine: the next call throws it, and so do all later ones. No allocation after the
/// first step. The destructor joins the thread, also while messages are open. An engine that ends by an exception, in the middle of a
/// step or by an error of its own ends the channel with it (channel::abandon). Others may follow it on the channel, also where it has
/// begun no step: until then it sends nothing.
class engine {
 public:
  /// Needs memory for the gradients and one chunk more, with options.update two. Throws std::invalid_argument where the plan is for another
  /// number of ranks, its chunks are too many pieces, a timeout is not above 0, or owners would not get a shard each.
  engine(channel& over, plan given, const engine_options& options = {})
      : channel_(over),
        plan_(std::move(given)),
        options_(options),
        memory_(std::make_shared<memory>()),
        staging_(plan_, over.rank(), static_cast<bool>(options.update), memory_->of_staging),
        executor_(over, plan_.fingerprint(), staging_.most_elements(), memory_->of_executor,
                  options.piece_bytes, options.timeout),
        layers_(plan_.model().layers()),
        buckets_(plan_.buckets().size()),
        tasks_(plan_.tasks(static_cast<bool>(options.update))) {
    if (plan_.ranks() != over.ranks())
      detail::refuse("the plan is for ", plan_.ranks(), " ranks, the channel has ", over.ranks());
    for (std::size_t k = 0; k < tasks_.size(); ++k) buckets_[tasks_[k].bucket].last_task = k;
    now_ = tasks_.size();
    if (options_.progress == progress_by::thread) thread_ = std::thread([this] { run(); });
  }
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;

  ~engine() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    work_.notify_one();
    if (thread_.joinable()) thread_.join();
    // What is under way may still be written to and read from; and those who wait for this rank wait in vain.
    const bool is_unwinding = std::uncaught_exceptions() > exceptions_;
    if (executor_.has_open_messages() || error_ || now_ < tasks_.size() || is_unwinding)
      channel_.abandon(memory_);
  }

  [[nodiscard]] const plan& used_plan() const noexcept { return plan_; }
  /// 0 before the first.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }

  /// Begins the next step; waits for what is left of the last. std::logic_error, naming a layer, where one was not handed over in
  /// the last step.
  void begin_step() {
    check_usable();
    for (std::size_t l = 0; step_ > 0 && l < layers_.size(); ++l)
      if (layers_[l] == phase::open) throw std::logic_error(sentence(l, " was not ready"));
    drain();
    {
      const std::lock_guard lock(mutex_);
      ++step_;
      std::ranges::fill(layers_, phase::open);
      for (std::size_t b = 0; b < buckets_.size(); ++b)
        buckets_[b].missing = plan_.buckets()[b].layers.size();
      now_ = 0;
      summed_ = 0;
    }
    work_.notify_one();  // the first step has the opening sum to make
  }

  /// Hands over the gradient of a layer, which is copied. std::out_of_range for the layer, std::invalid_argument for its size, and
  /// std::logic_error before begin_step(), or where the layer was handed over in this step.
  void ready(std::size_t layer, std::span<const float> gradient) {
    plan_.model().check_size(layer, gradient.size());
    check_open(layer);
    std::ranges::copy(gradient, staging_.place(layer).begin());
    hand_over(layer, phase::sent);
  }

  /// Says that a layer is not sent in this step, on no rank. Throws as ready().
  void hold_back(std::size_t layer) {
    plan_.model().check_layer(layer);
    check_open(layer);
    hand_over(layer, phase::held);
  }

  /// Whether the mean of the layer, or with owners its parameters, are there, or nothing is to come: no step has begun.
  [[nodiscard]] bool is_done(std::size_t layer) {
    const std::size_t last = buckets_[plan_.bucket_of(layer)].last_task;
    const std::lock_guard lock(mutex_);
    check_usable();
    return step_ == 0 || now_ > last;
  }

  /// Waits until is_done(layer). std::logic_error where that cannot be: a layer that is summed before was not ready.
  void wait(std::size_t layer) { wait_for(buckets_[plan_.bucket_of(layer)].last_task + 1); }

  /// Waits for all layers of the step. Throws as wait().
  void drain() { wait_for(tasks_.size()); }

  /// The mean over all ranks after wait(layer), until the next begin_step(); empty where it was dropped. The caller may write it.
  /// std::logic_error where it is not there yet, or belongs to owners.
  [[nodiscard]] std::span<float> mean(std::size_t layer) {
    if (options_.update) throw std::logic_error(sentence(layer, " has its mean with its owners alone"));
    return whole(layer);
  }
  /// With owners, the new parameters: otherwise as mean().
  [[nodiscard]] std::span<float> parameters(std::size_t layer) {
    if (!options_.update) throw std::logic_error(sentence(layer, " has no owners: options.update is empty"));
    return whole(layer);
  }

  /// Moves messages on with progress_by::caller; whether anything moved. std::logic_error with a thread.
  bool poll() {
    check_usable();
    if (thread_.joinable()) throw std::logic_error("the engine's thread moves messages on");
    return advance_or_fail();
  }

  [[nodiscard]] engine_totals totals() const {
    const std::lock_guard lock(mutex_);
    return totals_;
  }

 private:
  using clock = std::chrono::steady_clock;
  enum class phase : std::uint8_t { open, sent, held };
  struct memory {
    detail::staging::memory of_staging;
    executor::memory of_executor;
    float opening = 0;
  };
  struct bucket_state {
    std::size_t last_task = 0;
    std::size_t missing = 0;  // layers that were not handed over
  };

  [[nodiscard]] std::string sentence(std::size_t layer, const char* what) const {
    return lamina::detail::sentence("layer ", layer, " '", plan_.model()[layer].name, "'", what, " in step ",
                                    step_);
  }
  [[nodiscard]] std::span<float> whole(std::size_t layer) {
    if (step_ == 0 || !is_done(layer)) throw std::logic_error(sentence(layer, " is not summed yet"));
    if (layers_[layer] == phase::held) return {};
    return staging_.whole(layer);
  }
  // The error is written once, before has_failed_ is set.
  void check_usable() const {
    if (has_failed_.load(std::memory_order_acquire)) std::rethrow_exception(error_);
    if (updater_.load(std::memory_order_relaxed) == std::this_thread::get_id())
      throw std::logic_error("options.update calls the engine that has called it");
  }
  bool advance_or_fail() {
    try {
      return advance();
    } catch (...) {
      {
        const std::lock_guard lock(mutex_);
        error_ = std::current_exception();
        has_failed_.store(true, std::memory_order_release);
      }
      done_.notify_all();
      throw;
    }
  }

  void check_open(std::size_t layer) const {
    check_usable();
    if (step_ == 0) throw std::logic_error("a layer is handed over before the first step has begun");
    if (layers_[layer] != phase::open) throw std::logic_error(sentence(layer, " is handed over twice"));
  }
  void hand_over(std::size_t layer, phase as) {
    {
      const std::lock_guard lock(mutex_);
      layers_[layer] = as;
      --buckets_[plan_.bucket_of(layer)].missing;
    }
    if (thread_.joinable())
      work_.notify_one();
    else
      poll();
  }

  void wait_for(std::size_t count) {
    std::unique_lock lock(mutex_);
    check_usable();
    if (step_ == 0) return;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t b = tasks_[k].bucket;
      if (buckets_[b].missing == 0) continue;
      const auto& layers = plan_.buckets()[b].layers;
      const auto open = std::ranges::find(layers, phase::open, [&](std::size_t l) { return layers_[l]; });
      throw std::logic_error(sentence(*open, " was not ready when it was waited for"));
    }
    const auto is_over = [&] { return now_ >= count || has_failed_.load(std::memory_order_acquire); };
    if (!is_over()) {
      const auto begin = clock::now();
      if (thread_.joinable()) {
        done_.wait(lock, is_over);
      } else {
        lock.unlock();
        work_until([&] {
          const std::lock_guard own(mutex_);
          return is_over();
        });
        lock.lock();
      }
      totals_.waited_seconds += std::chrono::duration<double>(clock::now() - begin).count();
    }
    check_usable();
  }

  // Looks again and again, and sleeps longer from time to time while nothing moves: a rank that computes
  // then keeps its core, and a message is found within 200 µs.
  template <class Until>
  void work_until(const Until& is_over) {
    constexpr std::chrono::microseconds shortest_nap{5};
    constexpr std::chrono::microseconds longest_nap{200};
    auto nap = shortest_nap;
    while (!is_over()) {
      if (advance_or_fail()) {
        nap = shortest_nap;
      } else {
        std::this_thread::sleep_for(nap);
        nap = (std::min)(2 * nap, longest_nap);
      }
    }
  }

  void run() noexcept {
    try {
      while (true) {
        {
          std::unique_lock lock(mutex_);
          work_.wait(lock, [&] { return is_stopping_ || has_work(); });
          if (is_stopping_) return;
        }
        work_until([&] {
          const std::lock_guard lock(mutex_);
          return is_stopping_ || !has_work();
        });
      }
    } catch (...) {  // kept for the caller
    }
  }

  [[nodiscard]] bool has_work() const {
    return executor_.is_running() || (!is_opened_ && step_ > 0) ||
           (now_ < tasks_.size() && buckets_[tasks_[now_].bucket].missing == 0);
  }

  // By the one who moves messages on, alone. Whether anything moved.
  bool advance() {
    if (!executor_.is_running()) return begin_next();
    const bool has_moved = executor_.advance();
    if (!executor_.is_running()) end_collective();
    return has_moved;
  }

  bool begin_next() {
    collective next;
    {
      const std::lock_guard lock(mutex_);
      if (!is_opened_) {
        if (step_ == 0) return false;
        // All ranks meet in a sum of one element, whatever their plans: what its headers say is compared.
        next.elements = {&memory_->opening, 1};
      } else {
        if (now_ == tasks_.size() || buckets_[tasks_[now_].bucket].missing > 0) return false;
        const auto [bucket, what] = tasks_[now_];
        next.header = {.number = number_, .step = step_, .what = what, .how = plan_.buckets()[bucket].how};
        next.payload = plan_.payload_of(what);
      }
    }
    // Without the mutex, for which ready() would wait as long as the copies take: nobody writes a layer of a complete bucket.
    if (is_opened_) {
      if (summed_ == 0)
        staging_.open(tasks_[now_].bucket, [&](std::size_t l) { return layers_[l] == phase::sent; });
      next.elements = staging_.chunk(summed_, next.header.what);
      // Sizes alone do not tell that ranks have kept different layers: two may be equally large.
      const std::uint64_t hash =
          lamina::detail::fnv_number(lamina::detail::fnv_number(staging_.hash(), now_), summed_);
      next.header.decision = static_cast<std::uint32_t>(hash ^ hash >> 32U);
    }
    begun_at_ = clock::now();
    executor_.start(next);
    if (!executor_.is_running()) end_collective();
    return true;
  }

  void end_collective() {
    const auto now = clock::now();
    const collective& ended = executor_.current();
    const std::span<float> summed = ended.elements;
    const bool is_last = is_opened_ && summed_ + summed.size() == staging_.elements();
    if (is_opened_) finish_chunk(ended);
    if (is_last && ended.header.what == operation::reduce_scatter) {
      updater_.store(std::this_thread::get_id(), std::memory_order_relaxed);
      staging_.for_each_own_shard(options_.update);
      updater_.store({}, std::memory_order_relaxed);  // not where it throws: the engine has ended
    }
    {
      const std::lock_guard lock(mutex_);
      totals_.sent_bytes = executor_.sent_bytes();
      totals_.collective_seconds += std::chrono::duration<double>(now - begun_at_).count();
      ++number_;  // also of a bucket of which nothing is sent: ranks that do not agree on that are then in different collectives
      summed_ += summed.size();
      if (is_last) ++now_;
      if (is_last || !is_opened_) summed_ = 0;
      is_opened_ = true;
    }
    if (is_last) done_.notify_all();
  }
  void finish_chunk(const collective& ended) {
    const operation what = ended.header.what;
    if (what != operation::all_gather) {
      const bool is_whole = what == operation::all_reduce;
      const std::span<float> sums = is_whole ? ended.elements : staging_.own_of(ended.elements);
      lamina::detail::divide_elements(sums.data(), static_cast<float>(channel_.ranks()), sums.size());
    }
    if (what != operation::all_reduce) staging_.settle(summed_, ended.elements.size(), what);
  }

  channel& channel_;
  plan plan_;
  engine_options options_;
  std::shared_ptr<memory> memory_;
  detail::staging staging_;  // of the one who moves messages on, but for the places of layers
  executor executor_;
  const int exceptions_ = std::uncaught_exceptions();
  // Of both threads, under the mutex.
  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable done_;
  std::vector<phase> layers_;
  std::vector<bucket_state> buckets_;
  std::vector<task> tasks_;  // of a step, in the order in which all ranks do them
  std::uint64_t step_ = 0;
  std::size_t now_ = 0;     // task that is under way, or comes next
  std::size_t summed_ = 0;  // elements of it
  engine_totals totals_;
  std::exception_ptr error_;
  std::atomic<bool> has_failed_ = false;
  std::atomic<std::thread::id> updater_{};  // who is in options.update
  bool is_stopping_ = false;
  bool is_opened_ = false;
  // Of the one who moves messages on.
  std::uint32_t number_ = 0;
  clock::time_point begun_at_;
  std::thread thread_;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
