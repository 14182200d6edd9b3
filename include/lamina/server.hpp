// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/mean_of_frames.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/selection.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

/// A parameter server: frames of gradients in, their mean, and to each worker the layers that were updated since its last reply.
namespace lamina::inline LAMINA_ABI {

/// A frame for one worker, and what the server needs to hear of when it has arrived.
class server_reply {
 public:
  /// Header and layers, where they lie: valid until this worker's next reply, or the next update.
  [[nodiscard]] std::span<const std::span<const std::byte>> segments() const noexcept {
    return frame_->segments();
  }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return frame_->size_bytes(); }
  [[nodiscard]] std::vector<std::byte> to_bytes() const { return frame_->to_bytes(); }
  [[nodiscard]] const encoded_frame& frame() const noexcept { return *frame_; }
  /// The fragments in it.
  [[nodiscard]] const selection& sent() const noexcept { return *sent_; }
  /// For server::commit().
  [[nodiscard]] std::uint64_t clock() const noexcept { return clock_; }

 private:
  template <element T>
  friend class server;
  server_reply(const encoded_frame& frame, const selection& sent, std::uint64_t clock) noexcept
      : frame_(&frame), sent_(&sent), clock_(clock) {}

  const encoded_frame* frame_;
  const selection* sent_;
  std::uint64_t clock_;
};

/// The parameter server of layer dropping, without the parameters: they are the caller's, and update() says what to add to them.
///
///     lamina::server<float> server(model, {.workers = 4});
///     if (auto error = server.add(receive())) { log(error); continue; }
///     if (!server.complete()) continue;
///     server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) { sgd(layer, begin, mean); });
///     for (std::size_t w : server.workers()) {
///       auto reply = server.reply(w, parameters);
///       if (send(w, reply)) server.commit(w, reply.clock());
///     }
///
/// Before the first step workers() are all senders, and their first reply holds every layer. One thread at a time. Mistakes throw
/// and change nothing; bytes from outside never do: add() returns an error.
template <element T>
class server {
 public:
  /// Throws std::invalid_argument, naming the option, for no workers, and for a sender that stands for none.
  explicit server(const layout& model, server_options options = {})
      : options_(std::move(options)),
        cut_(model, options_.fragment_elements),
        arrived_(fragments()),
        updated_(fragments()),
        updated_at_(fragments().layers(), 1),
        step_(options_.first_step) {
    if (options_.nodes.empty()) options_.nodes.assign(options_.workers, 1);
    if (options_.nodes.empty()) detail::raise(std::invalid_argument("a server needs at least one worker"));
    for (std::size_t s = 0; s < options_.nodes.size(); ++s) {
      if (options_.nodes[s] == 0)
        detail::raise(std::invalid_argument("nodes: sender " + std::to_string(s) + " stands for no worker"));
    }
    senders_.resize(options_.nodes.size());
    to_reply_.resize(senders_.size());
    std::iota(to_reply_.begin(), to_reply_.end(), std::size_t{0});
  }

  server(const server&) = delete;
  server& operator=(const server&) = delete;
  server(server&&) noexcept = default;
  server& operator=(server&&) noexcept = default;

  /// Takes the bytes of a frame of gradients, and owns them. On an error, an errc, the bytes are gone and nothing has changed.
  /// Synchronous, the frame is one of step(); asynchronous, of a later step than its sender's last. Never throws but for memory.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): it is moved from
  [[nodiscard]] std::error_code add(std::vector<std::byte> bytes) {
    std::unique_ptr<frame> to = unused_frame();
    to->bytes = std::move(bytes);
    const std::span<const std::byte> owned = to->bytes;
    return take(std::move(to), owned);
  }
  /// The same of bytes that stay the caller's, who leaves them as they are until update() has returned. A receive buffer that is
  /// used again before goes to add().
  [[nodiscard]] std::error_code add_view(std::span<const std::byte> bytes) {
    return take(unused_frame(), bytes);
  }

  /// Whether every sender has come; asynchronous, whether one has.
  [[nodiscard]] bool complete() const noexcept {
    const auto came = [](const sender& each) { return each.came; };
    return options_.asynchronous ? std::any_of(senders_.begin(), senders_.end(), came)
                                 : std::all_of(senders_.begin(), senders_.end(), came);
  }
  /// The senders whose frames of this step are not there yet.
  [[nodiscard]] std::vector<std::size_t> missing() const {
    std::vector<std::size_t> missing;
    for (std::size_t s = 0; s < senders_.size(); ++s) {
      if (!senders_[s].came) missing.push_back(s);
    }
    return missing;
  }
  /// The fragments that the frames hold which are there.
  [[nodiscard]] const selection& arrived() const noexcept { return arrived_; }

  /// Gives the mean gradient of each layer that arrived, and begins the next step. Layers that did not arrive are to be left as they
  /// are, optimizer state included.
  ///
  /// `consume(layer, begin, mean)` gets up to 4,096 elements of `layer` from element `begin` on, valid during the call; blocks of a
  /// fragment are consecutive, those of one thread too. With an execution of several threads it is called from these, and does not
  /// throw.
  ///
  /// Synchronous: G = (1/W) Σ_s a_s over the senders that are there, W the workers behind them, summed in the order of the senders,
  /// whatever the order of arrival. Asynchronous: each frame alone, in the order of arrival, G = a_s / W with the W workers of all
  /// senders. Called before complete(), the mean is over the senders that are there; of the others frames of this step are refused from
  /// then on, they do not commit, and what they hold comes later.
  ///
  /// What `consume` throws goes on to the caller, and the step is over all the same: no block is given twice, the blocks that were
  /// not given are lost, and replies hold every layer that arrived, as the parameters are.
  ///
  /// \throws std::logic_error  no frame is there
  template <class Consume, execution Execution = sequential>
  void update(Consume&& consume, const Execution& execution = {}) {
    if (std::none_of(senders_.begin(), senders_.end(), [](const sender& each) { return each.came; }))
      detail::raise(std::logic_error("update: no frame of step " + std::to_string(step_) + " is there"));
    const std::size_t workers = begin_update();
    const detail::frames_to_sum<T> all(summed_);
    if (options_.asynchronous) {
      for (std::size_t i = 0; i < all.size(); ++i)
        detail::mean_of_frames<T>(all.subspan(i, 1), workers, updated_, cut_, consume, execution);
    } else {
      detail::mean_of_frames<T>(all, workers, updated_, cut_, consume, execution);
    }
    release(applied_);
  }

  /// Who waits for a reply: after an update, in the synchronous case everybody.
  [[nodiscard]] std::span<const std::size_t> workers() const noexcept { return to_reply_; }

  /// A frame with the layers that were updated since the last reply to `worker` that was committed; the first holds every layer.
  /// Workers that have seen the same share one. Points into the parameters, unless options.payload rounds.
  ///
  /// \param worker      its index among the senders
  /// \param parameters  a range with a tensor for each layer of the model, the same for all workers and unchanged since the update
  /// \throws std::out_of_range      for the worker
  /// \throws std::invalid_argument  a tensor of another size or type; NaN or infinity to be written as int8 or int4
  template <detail::indexed Parameters>
  [[nodiscard]] server_reply reply(std::size_t worker, const Parameters& parameters) {
    sender& to = senders_.at(worker);
    cut_.model().check_count(std::size(parameters), "parameters");
    const std::uint64_t step = this->step(worker);
    const auto is_it = [&](const std::shared_ptr<outgoing>& out) {
      return out && out->since == to.seen && out->clock == clock_ && out->step == step;
    };
    if (!is_it(to.out)) {
      to.out.reset();
      const auto other = std::ranges::find_if(senders_, is_it, &sender::out);
      to.out = other != senders_.end() ? other->out : encoded(to.seen, step, parameters);
    }
    to.replied = clock_;
    return {to.out->encoder.frame(), to.out->sent, clock_};
  }
  /// The reply of this clock has reached the worker. Replies may be acknowledged in any order, or not at all: what a worker is not
  /// known to have is in its next reply. A reply from before forget(), or older than one that was committed, changes nothing.
  /// Throws std::out_of_range, and std::invalid_argument for a clock that no reply to this worker had.
  void commit(std::size_t worker, std::uint64_t clock) {
    sender& to = replied_to(worker, clock);
    if (clock < to.seen || clock < to.forgotten) return;
    to.seen = clock;
    to.pending.clear();
  }
  /// The last reply has reached the worker in part, together with all that was pending(). Throws also std::invalid_argument,
  /// changing nothing, for the clock of another reply, and for the delivery of another selection.
  void commit(std::size_t worker, std::uint64_t clock, const delivery& arrived) {
    sender& to = replied_to(worker, clock);
    if (clock < to.forgotten) return;
    if (!to.out || to.out->clock != clock)
      detail::raise(
          std::invalid_argument("commit: the last reply had another clock than " + std::to_string(clock)));
    detail::check_delivery("commit", arrived, to.out->sent, options_.payload);
    lost_.clear();
    for (const std::size_t f : arrived.sent().sent())
      arrived.for_each_lost(f, [&](std::size_t begin, std::size_t end) { lost_.push_back({f, begin, end}); });
    to.pending.swap(lost_);
    to.seen = clock;
  }
  /// What this worker has lost, ascending: the next transfer to it must bring it, whatever else it loses; what its next reply does
  /// not hold is to be sent with it, out of the parameters as they are. Stays until a commit. Throws std::out_of_range.
  [[nodiscard]] std::span<const element_range> pending(std::size_t worker) const {
    return senders_.at(worker).pending;
  }

  /// The worker was restarted and has nothing: its next reply holds every layer, its frames that are not in an update yet are gone, and
  /// asynchronous its next frame may be of any step. Throws std::out_of_range.
  void forget(std::size_t worker) {
    sender& of = senders_.at(worker);
    of.forgotten = ++clock_;  // so that its replies from now on have other clocks
    of.seen = 0;
    of.pending.clear();
    of.out.reset();
    of.taken = 0;
    of.in_progress = of.came = false;
    keep_frames([&](const frame& each) { return each.view.sender() != worker; });
  }

  /// The step whose frames are accepted, counted from 1.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// The same of one sender: asynchronous, the step after its last.
  [[nodiscard]] std::uint64_t step(std::size_t of_sender) const {
    const sender& from = senders_.at(of_sender);
    if (!options_.asynchronous) return step_;
    return from.taken == 0 ? options_.first_step : from.taken + 1;
  }
  [[nodiscard]] std::size_t senders() const noexcept { return senders_.size(); }
  [[nodiscard]] const server_options& options() const noexcept { return options_; }
  [[nodiscard]] const layout& model() const noexcept { return cut_.model(); }
  /// What frames are of: the layers, or their fragments.
  [[nodiscard]] const layout& fragments() const noexcept { return cut_.fragments(); }

 private:
  struct frame {
    std::vector<std::byte> bytes;  // empty for those of add_view()
    frame_view<T> view;
  };
  struct outgoing {
    outgoing(const layout& fragments, std::uint32_t run) : encoder(fragments, run), sent(fragments) {}
    frame_encoder<T> encoder;
    selection sent;
    std::uint64_t since = 0;
    std::uint64_t clock = 0;
    std::uint64_t step = 0;
  };
  struct sender {
    std::uint64_t taken = 0;      // the step of the last frame that was taken; 0: none
    std::uint64_t before = 0;     // the same before that step
    std::uint16_t sequence = 0;   // of the next frame of that step
    bool in_progress = false;     // more frames of it are to come
    bool came = false;            // all of it is there and not in an update yet
    std::uint64_t replied = 0;    // the clock of the last reply to it,
    std::uint64_t seen = 0;       // of the last that it is known to have,
    std::uint64_t forgotten = 0;  // and of the first since it was forgotten
    std::vector<element_range> pending;
    std::shared_ptr<outgoing> out;  // its last reply, which others may share
  };

  std::unique_ptr<frame> unused_frame() {
    if (unused_.empty()) {
      unused_.reserve(++frames_made_);  // so that release() allocates nothing
      return std::make_unique<frame>();
    }
    std::unique_ptr<frame> last = std::move(unused_.back());
    unused_.pop_back();
    return last;
  }
  void release(std::unique_ptr<frame> used) noexcept {
    used->bytes = {};
    unused_.push_back(std::move(used));
  }
  void release(std::vector<std::unique_ptr<frame>>& used) noexcept {
    for (auto& each : used) release(std::move(each));
    used.clear();
  }

  std::error_code refusal_of(const frame_view<T>& view) const noexcept {
    if (view.kind() != options_.kind) return errc::unexpected_kind;
    if (view.run() != options_.run) return errc::other_run;
    if (view.sender() >= senders_.size()) return errc::unknown_sender;
    const sender& from = senders_[view.sender()];
    if (from.in_progress && view.step() == from.taken) {
      if (view.sequence() != from.sequence)
        return view.sequence() < from.sequence ? errc::duplicate_frame : errc::unexpected_sequence;
      return repeats_a_layer(view) ? make_error_code(errc::duplicate_layer) : std::error_code{};
    }
    if (from.taken != 0 && view.step() == from.taken) return errc::duplicate_frame;
    const std::uint64_t next = step(view.sender());
    const bool is_expected = options_.asynchronous ? view.step() >= next : view.step() == next;
    if (!is_expected || from.in_progress) return errc::unexpected_step;
    if (view.sequence() != 0) return errc::unexpected_sequence;
    return {};
  }
  bool repeats_a_layer(const frame_view<T>& view) const noexcept {
    for (const auto& each : frames_) {
      if (each->view.sender() != view.sender() || each->view.step() != view.step()) continue;
      for (std::size_t f = 0; f < updated_at_.size(); ++f) {
        if (!view.is_dropped(f) && !each->view.is_dropped(f)) return true;
      }
    }
    return false;
  }

  std::error_code take(std::unique_ptr<frame> given, std::span<const std::byte> bytes) {
    std::error_code error = detail::frame_decoder::decode_into(bytes, fragments(), given->view);
    if (!error) error = refusal_of(given->view);
    if (error) {
      release(std::move(given));
      return error;
    }
    const frame_view<T>& view = given->view;
    sender& from = senders_[view.sender()];
    if (!from.in_progress) {
      from.before = from.taken;
      from.taken = view.step();
      from.sequence = 0;
    }
    ++from.sequence;
    from.in_progress = !view.is_last();
    from.came = from.came || view.is_last();
    send_layers_of(view, arrived_);
    frames_.push_back(std::move(given));
    return {};
  }

  static void send_layers_of(const frame_view<T>& view, selection& to) {
    for (std::size_t f = 0; f < view.layers(); ++f) {
      if (!view.is_dropped(f)) to.send(f);
    }
  }

  // The others are gone.
  template <class Predicate>
  void keep_frames(const Predicate& is_kept) {
    std::size_t kept = 0;
    arrived_.clear();
    for (auto& each : frames_) {
      if (!each) continue;
      if (is_kept(*each)) {
        send_layers_of(each->view, arrived_);
        std::swap(frames_[kept++], each);
      } else {
        release(std::move(each));
      }
    }
    frames_.resize(kept);
  }

  // Begins the next step, so that it has begun whatever the caller throws, with what is to be summed in `applied_`: frames of steps that
  // are complete. Others stay where each step stands alone, and go where the step is over for all. Gives W.
  std::size_t begin_update() {
    release(applied_);
    summed_.clear();
    updated_.clear();
    for (auto& each : frames_) {
      const sender& from = senders_[each->view.sender()];
      if (from.in_progress && each->view.step() == from.taken) continue;
      summed_.push_back(&each->view);
      send_layers_of(each->view, updated_);
      applied_.push_back(std::move(each));
    }
    keep_frames([&](const frame&) { return options_.asynchronous; });
    to_reply_.clear();
    std::size_t workers = 0;
    for (std::size_t s = 0; s < senders_.size(); ++s) {
      sender& each = senders_[s];
      if (each.came || options_.asynchronous) workers += options_.nodes[s];
      if (std::exchange(each.came, false) || !options_.asynchronous) to_reply_.push_back(s);
      if (!options_.asynchronous && std::exchange(each.in_progress, false)) each.taken = each.before;
    }
    ++clock_;
    for (const std::size_t f : updated_.sent()) updated_at_[f] = clock_;
    if (!options_.asynchronous) {
      ++step_;
      std::ranges::sort(summed_, {}, [](const frame_view<T>* each) { return each->sender(); });
    }
    return workers;
  }

  sender& replied_to(std::size_t worker, std::uint64_t clock) {
    sender& to = senders_.at(worker);
    if (clock == 0 || clock > to.replied)
      detail::raise(
          std::invalid_argument("commit: no reply to this worker had the clock " + std::to_string(clock)));
    return to;
  }

  template <class Parameters>
  std::shared_ptr<outgoing> encoded(std::uint64_t since, std::uint64_t step, const Parameters& parameters) {
    auto unused = std::ranges::find_if(replies_, [](const auto& each) { return each.use_count() == 1; });
    if (unused == replies_.end())
      unused = replies_.insert(unused, std::make_shared<outgoing>(fragments(), options_.run));
    outgoing& out = **unused;
    out.sent.clear();
    for (std::size_t f = 0; f < updated_at_.size(); ++f) {
      if (updated_at_[f] > since) out.sent.send(f);
    }
    out.encoder.encode({.kind = frame_kind::parameters,
                        .step = step,
                        .payload = options_.payload,
                        .checksum = options_.frame_checksum},
                       out.sent, [&](std::size_t f) {
                         const std::size_t layer = cut_.layer_of(f);
                         const std::span<const T> all =
                             elements_of<T>(std::begin(parameters)[static_cast<std::ptrdiff_t>(layer)]);
                         cut_.model().check_size(layer, all.size());
                         return all.subspan(cut_.begin(f), fragments().sizes()[f]);
                       });
    out.since = since;
    out.step = step;
    out.clock = clock_;
    return *unused;
  }

  server_options options_;
  tiling cut_;
  std::vector<sender> senders_;
  std::vector<std::shared_ptr<outgoing>> replies_;  // all that were ever needed at a time
  std::vector<std::unique_ptr<frame>> frames_;      // in the order of arrival
  std::vector<std::unique_ptr<frame>> applied_;     // by an update
  std::vector<std::unique_ptr<frame>> unused_;      // for their memory
  std::size_t frames_made_ = 0;
  selection arrived_;                         // of frames_
  selection updated_;                         // of applied_
  std::vector<const frame_view<T>*> summed_;  // applied_ in the order of the sum
  std::vector<element_range> lost_;           // by a commit
  std::vector<std::size_t> to_reply_;
  std::uint64_t clock_ = 1;                // of updates; 1: the parameters as they were at first
  std::vector<std::uint64_t> updated_at_;  // of each fragment, its clock
  std::uint64_t step_;
};

}  // namespace lamina::inline LAMINA_ABI
