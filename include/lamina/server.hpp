// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/codec.hpp"
#include "lamina/execution.hpp"

/// A parameter server: frames of gradients in, their mean, and to each worker the layers that were updated since its last reply. Read
/// codec.hpp before.
namespace lamina::inline LAMINA_ABI {

/// A frame for one worker.
class server_reply {
 public:
  /// Header and layers, where they lie: valid until this worker's next reply, or the next update.
  [[nodiscard]] const encoded_frame& frame() const noexcept { return *frame_; }
  [[nodiscard]] std::span<const std::span<const std::byte>> segments() const noexcept {
    return frame_->segments();
  }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return frame_->size_bytes(); }
  [[nodiscard]] std::vector<std::byte> to_bytes() const { return frame_->to_bytes(); }
  /// The fragments in it.
  [[nodiscard]] const selection& sent() const noexcept { return *sent_; }
  /// What server::commit() hears of when it has arrived.
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
/// Before the first step workers() are all senders, and their first reply holds every layer. One thread at a time. Mistakes throw and
/// change nothing, std::out_of_range for a worker that is none; bytes from outside never throw: add() returns an error.
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
    detail::check_parameters_type(options_.payload);
    if (options_.nodes.empty()) options_.nodes.assign(options_.workers, 1);
    if (options_.nodes.empty()) detail::refuse("a server needs at least one worker");
    for (std::size_t s = 0; s < options_.nodes.size(); ++s) {
      if (options_.nodes[s] == 0) detail::refuse("nodes: sender ", s, " stands for no worker");
      to_reply_.push_back(s);
    }
    senders_.resize(options_.nodes.size());
  }

  server(server&&) noexcept = default;
  server& operator=(server&&) noexcept = default;

  /// Takes the bytes of a frame of gradients, and owns them. On an error, an errc, the bytes are gone and nothing has changed.
  /// Synchronous, the frame is one of step(); asynchronous, of a later step than its sender's last. errc::duplicate_frame
  /// tells the sender that its frame had arrived, and that it may commit. Never throws but for memory.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): it is moved from
  [[nodiscard]] std::error_code add(std::vector<std::byte> bytes) {
    const std::span<const std::byte> all = bytes;
    return take(all, std::move(bytes));
  }
  /// The same of bytes that stay the caller's, who leaves them as they are until update() has returned.
  [[nodiscard]] std::error_code add_view(std::span<const std::byte> bytes) { return take(bytes, {}); }

  /// Whether every sender has come; asynchronous, whether one has.
  [[nodiscard]] bool complete() const noexcept {
    return options_.asynchronous ? std::ranges::any_of(senders_, &sender::came)
                                 : std::ranges::all_of(senders_, &sender::came);
  }
  /// The senders whose frames of this step are not there yet.
  [[nodiscard]] std::vector<std::size_t> missing() const {
    std::vector<std::size_t> missing;
    for (std::size_t s = 0; s < senders_.size(); ++s)
      if (!senders_[s].came) missing.push_back(s);
    return missing;
  }
  /// The fragments that the frames hold which are there.
  [[nodiscard]] const selection& arrived() const noexcept { return arrived_; }

  /// Gives the mean gradient of each layer that arrived, and begins the next step. Layers that did not arrive are to be left as they are,
  /// optimizer state included. Throws std::logic_error if no frame is there.
  ///
  /// `consume(layer, begin, mean)` gets up to 4,096 elements of `layer` from element `begin` on, valid during the call; blocks of a
  /// fragment are consecutive, those of one thread too. With an execution of several threads it is called from these, and does not throw.
  /// What it throws otherwise goes on to the caller, and the step is over all the same: the blocks that were not given are lost, and
  /// replies hold every layer that arrived, as the parameters are.
  ///
  /// Synchronous: G = (1/W) Σ_s a_s over the senders that are there, W the workers behind them, summed in the order of the senders.
  /// Asynchronous: each frame alone, in the order of arrival, G = a_s / W with the W workers of all senders. Called before complete(),
  /// frames of this step from the other senders are refused from then on; their workers do not commit() that step but skip_to(step()), and
  /// what they hold is sent in a later frame.
  template <class Consume, execution Execution = sequential>
  void update(Consume&& consume, const Execution& execution = {}) {
    if (std::ranges::none_of(senders_, &sender::came))
      detail::refuse<std::logic_error>("update: no frame of step ", step_, " is there");
    const std::size_t workers = begin_update();
    const std::span<const frame_view<T>* const> all = summed_;
    // Asynchronous, each frame alone.
    const std::size_t together = options_.asynchronous ? 1 : all.size();
    for (std::size_t i = 0; i < all.size(); i += together) {
      for (const std::size_t f : updated_.sent())
        give_mean(f, all.subspan(i, together), static_cast<T>(workers), consume, execution);
    }
    release();
  }

  /// Who waits for a reply: after an update, in the synchronous case everybody.
  [[nodiscard]] std::span<const std::size_t> workers() const noexcept { return to_reply_; }

  /// A frame with the layers that were updated since the last reply to `worker` that was committed; the first holds every layer. It is of
  /// step(worker), the step whose gradients are next: after update() of step t, of t + 1. Workers that have seen the same share one. Points
  /// into the parameters, unless options.payload rounds.
  ///
  /// `parameters` is a range with a tensor for each layer of the model, the same for all workers and unchanged since the update. Throws
  /// std::invalid_argument for a tensor of another size or type, and for NaN or infinity as int8 or int4.
  template <detail::indexed Parameters>
  [[nodiscard]] server_reply reply(std::size_t worker, const Parameters& parameters) {
    sender& to = senders_[known(worker)];
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
  /// The reply of this clock has reached the worker. Replies may be acknowledged in any order, or not at all: what a worker is not known to
  /// have is in its next reply. A reply from before forget(), or older than one that was committed, changes nothing. Throws
  /// std::invalid_argument for a clock that no reply to this worker had.
  void commit(std::size_t worker, std::uint64_t clock) {
    sender& to = replied_to(worker, clock);
    if (clock < to.seen || clock < to.forgotten) return;
    to.seen = clock;
    to.pending.clear();
  }
  /// The last reply has reached the worker in part, together with all that was pending(). Throws std::invalid_argument also for the clock
  /// of another reply, and for the delivery of another selection.
  void commit(std::size_t worker, std::uint64_t clock, const delivery& arrived) {
    sender& to = replied_to(worker, clock);
    if (clock < to.forgotten) return;
    if (!to.out || to.out->clock != clock) detail::refuse("commit: the last reply had not the clock ", clock);
    detail::check_delivery("commit", arrived, to.out->sent, options_.payload);
    std::vector<element_range> lost;
    for (const std::size_t f : arrived.sent().sent())
      arrived.for_each_lost(f, [&](std::size_t begin, std::size_t end) { lost.push_back({f, begin, end}); });
    to.pending = std::move(lost);
    to.seen = clock;
  }
  /// What this worker has lost, ascending: the next transfer to it must bring it, whatever else it loses; what its next reply does not hold
  /// is to be sent with it, out of the parameters as they are. Stays until a commit.
  [[nodiscard]] std::span<const element_range> pending(std::size_t worker) const {
    return senders_[known(worker)].pending;
  }

  /// The worker was restarted and has no parameters, be it with a saved residual or without: its next reply holds every layer, its frames
  /// that are not in an update yet are gone, and asynchronous its next frame may be of any step.
  void forget(std::size_t worker) {
    sender& of = senders_[known(worker)];
    of.forgotten = ++clock_;  // so that its replies from now on have other clocks
    of.seen = 0;
    of.pending.clear();
    of.out.reset();
    of.taken = 0;
    of.in_progress = of.came = false;
    keep([&](const frame_view<T>& each) { return each.sender() != worker; });
    release();
  }

  /// The step whose frames are accepted, counted from 1.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// The same of one sender: asynchronous, the step after its last.
  [[nodiscard]] std::uint64_t step(std::size_t of_sender) const {
    const sender& from = senders_[known(of_sender)];
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
    std::uint16_t sequence = 0;   // of the next frame of that step
    bool in_progress = false;     // more frames of it are to come
    bool came = false;            // all of it is there and not in an update yet
    std::uint64_t replied = 0;    // the clock of the last reply to it,
    std::uint64_t seen = 0;       // of the last that it is known to have,
    std::uint64_t forgotten = 0;  // and of the first since it was forgotten
    std::vector<element_range> pending;
    std::shared_ptr<outgoing> out;  // its last reply, which others may share
  };

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
    const bool is_later = options_.asynchronous && view.step() > next;
    if (from.in_progress || (view.step() != next && !is_later)) return errc::unexpected_step;
    if (view.sequence() != 0) return errc::unexpected_sequence;
    return {};
  }
  bool repeats_a_layer(const frame_view<T>& view) const noexcept {
    for (std::size_t i = 0; i < count_; ++i) {
      const frame_view<T>& other = frames_[i]->view;
      if (other.sender() != view.sender() || other.step() != view.step()) continue;
      for (std::size_t f = 0; f < view.layers(); ++f)
        if (!view.is_dropped(f) && !other.is_dropped(f)) return true;
    }
    return false;
  }

  std::error_code take(std::span<const std::byte> bytes, std::vector<std::byte>&& owned) {
    if (count_ == frames_.size()) frames_.push_back(std::make_unique<frame>());
    frame_view<T>& view = frames_[count_]->view;
    std::error_code error = detail::frame_decoder::decode(bytes, fragments(), view);
    if (!error) error = refusal_of(view);
    if (error) return error;
    frames_[count_++]->bytes = std::move(owned);
    sender& from = senders_[view.sender()];
    if (!from.in_progress) {
      from.taken = view.step();
      from.sequence = 0;
    }
    ++from.sequence;
    from.in_progress = !view.is_last();
    from.came = from.came || view.is_last();
    send_layers_of(view, arrived_);
    return {};
  }

  static void send_layers_of(const frame_view<T>& view, selection& to) {
    for (std::size_t f = 0; f < view.layers(); ++f)
      if (!view.is_dropped(f)) to.send(f);
  }

  // Of the frames that are there those of which it holds stay. The others lie behind them until release() or the next frame; both in the
  // order of arrival.
  template <class Predicate>
  void keep(const Predicate& holds) {
    std::size_t kept = 0;
    arrived_.clear();
    for (std::size_t i = 0; i < count_; ++i) {
      if (!holds(frames_[i]->view)) continue;
      send_layers_of(frames_[i]->view, arrived_);
      const auto at = frames_.begin() + static_cast<std::ptrdiff_t>(i);
      std::rotate(frames_.begin() + static_cast<std::ptrdiff_t>(kept++), at, at + 1);
    }
    count_ = kept;
  }
  void release() noexcept {
    for (std::size_t i = count_; i < frames_.size(); ++i) frames_[i]->bytes = {};
  }

  // Begins the next step, so that it has begun whatever the caller throws, with what is to be summed in `summed_`: frames of steps that
  // are complete. Others stay where each step stands alone, and go where the step is over for all. What is summed lies beyond those
  // that stay. Gives W.
  std::size_t begin_update() {
    const auto is_complete = [&](const frame_view<T>& each) {
      const sender& from = senders_[each.sender()];
      return !from.in_progress || each.step() != from.taken;
    };
    const std::size_t came = count_;
    keep([&](const frame_view<T>& each) { return options_.asynchronous && !is_complete(each); });
    summed_.clear();
    updated_.clear();
    for (std::size_t i = count_; i < came; ++i) {
      if (!is_complete(frames_[i]->view)) continue;
      summed_.push_back(&frames_[i]->view);
      send_layers_of(frames_[i]->view, updated_);
    }
    to_reply_.clear();
    std::size_t workers = 0;
    for (std::size_t s = 0; s < senders_.size(); ++s) {
      sender& each = senders_[s];
      if (each.came || options_.asynchronous) workers += options_.nodes[s];
      if (std::exchange(each.came, false) || !options_.asynchronous) to_reply_.push_back(s);
      if (!options_.asynchronous && std::exchange(each.in_progress, false)) each.taken = 0;
    }
    ++clock_;
    for (const std::size_t f : updated_.sent()) updated_at_[f] = clock_;
    if (!options_.asynchronous) {
      ++step_;
      std::ranges::sort(summed_, {}, [](const frame_view<T>* each) { return each->sender(); });
    }
    return workers;
  }

  // The mean of what these frames have of a fragment, summed in their order. In tasks of enough blocks to be worth handing to a thread,
  // and block by block, so that a sum stays in cache until it is consumed.
  template <class Consume, class Execution>
  void give_mean(std::size_t fragment, std::span<const frame_view<T>* const> frames, T workers,
                 Consume& consume, const Execution& execution) const {
    constexpr std::size_t task_elements = 16 * detail::block_elements;
    const std::size_t elements = fragments().sizes()[fragment];
    const std::size_t layer = cut_.layer_of(fragment);
    const std::size_t offset = cut_.begin(fragment);
    const auto task = [&](std::size_t index) {
      std::array<T, detail::block_elements> sum;
      std::array<T, detail::block_elements> buffer;
      std::size_t begin = index * task_elements;
      const std::size_t end = begin + (std::min)(task_elements, elements - begin);
      for (; begin < end; begin += sum.size()) {
        const std::span<T> block = std::span(sum).first((std::min)(sum.size(), end - begin));
        bool is_first = true;
        for (const frame_view<T>* each : frames) {
          if (each->is_dropped(fragment)) continue;
          if (std::exchange(is_first, false)) {
            each->copy(fragment, begin, block);
          } else {
            const auto addend = each->read(fragment, begin, std::span(buffer).first(block.size()));
            detail::add_elements(block.data(), addend.data(), block.size());
          }
        }
        if (is_first) return;  // asynchronous, another frame has it
        detail::divide_elements(block.data(), workers, block.size());
        consume(layer, offset + begin, std::span<const T>(block));
      }
    };
    if (elements <= task_elements) return task(0);
    execution(elements / task_elements + (elements % task_elements != 0), task);
  }

  std::size_t known(std::size_t worker) const {
    if (worker >= senders_.size())
      detail::refuse<std::out_of_range>("worker ", worker, " is none of the ", senders_.size(), " senders");
    return worker;
  }
  sender& replied_to(std::size_t worker, std::uint64_t clock) {
    sender& to = senders_[known(worker)];
    if (clock == 0 || clock > to.replied) detail::refuse("commit: no reply had the clock ", clock);
    return to;
  }

  template <class Parameters>
  std::shared_ptr<outgoing> encoded(std::uint64_t since, std::uint64_t step, const Parameters& parameters) {
    auto unused = std::ranges::find_if(replies_, [](const auto& each) { return each.use_count() == 1; });
    if (unused == replies_.end())
      unused = replies_.insert(unused, std::make_shared<outgoing>(fragments(), options_.run));
    outgoing& out = **unused;
    out.sent.clear();
    for (std::size_t f = 0; f < updated_at_.size(); ++f)
      if (updated_at_[f] > since) out.sent.send(f);
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
  std::vector<std::unique_ptr<frame>> frames_;      // in the order of arrival,
  std::size_t count_ = 0;                           // as many of them; the others lend their memory
  selection arrived_;                               // of what is there
  selection updated_;                               // of summed_
  std::vector<const frame_view<T>*> summed_;        // by the last update, in the order of the sum
  std::vector<std::size_t> to_reply_;
  std::uint64_t clock_ = 1;                // of updates; 1: the parameters as they were at first
  std::vector<std::uint64_t> updated_at_;  // of each fragment, its clock
  std::uint64_t step_;
};

}  // namespace lamina::inline LAMINA_ABI
