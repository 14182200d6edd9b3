// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/local/flights.hpp"
#include "lamina/local/values.hpp"

/// Local updates: each worker's own steps, and what it sends of them. Read worker.hpp before, outer_optimizer.hpp after.
namespace lamina::inline LAMINA_ABI {

/// A worker's side of local updates. Each worker goes on with the update of its own optimizer at once, whatever optimizer that
/// is, and what it did that the others have not seen is its *local delta* a = x − y: x are the parameters that all share, the same
/// bits everywhere, y those that the worker computes with. The local delta is to this class what the residual is to
/// worker, and is decided on in the same way, but nobody stores it. Each step:
///
///     optimizer.step();                                             // the worker's own, on y
///     compressor.observe_all(x, y);                                 // the values of x - y
///     const encoded_frame& frame = compressor.encode(x, y);         // selects; r = payload(x - y) of the fragments sent
///     send frame.segments();
///     compressor.commit();                                          // r is under way
///     compressor.apply(decode<T>(bytes, compressor.fragments()), x, y); // what all subtract, d: x <- x - d, y <- y + r - d
///
/// What comes back is the outer optimizer's (outer_optimizer.hpp): with a rate of 1 and without momentum, d is the mean of all workers' r,
/// and y - x becomes what was not sent. As apply() shifts y and does not overwrite it, it may come steps later: whatever the
/// worker did meanwhile, and what the payload rounded away, stays in its local delta. A fragment that is under way is not selected again.
///
/// Conserved, but for the rounding of single sums: what all workers did = what was sent of it + their local deltas. What a step that
/// fails would have sent is still in the local delta: commit(delivery), commit_lost() and forget(step) are for one worker, abandon() and
/// abandon(step) for all together, and each keeps agreed selection agreed. Where each worker selects for itself, abandon() also does for
/// one.
///
/// With error feedback what a message leaves out, e, waits outside of the local delta, so that the worker computes as if all had gone:
/// r = payload(e + a); and what comes back brings y <- y + a - d and e <- e + a - r. What all workers did = what was sent of it + their
/// local deltas + their e, which rest() gives.
///
/// Not for concurrent use. Memory: O(fragments), r of the steps that are under way, and with error feedback a of them and e. Cost of a
/// step: one read of x and y, and of what is sent another, and what apply() writes.
///
/// Source: local SGD with an outer optimizer, as in DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025); selecting by score
/// what is brought together is this library's.
template <element T, class Representative>
class local_delta {
  static_assert(representative<Representative>,
                "lamina: the functor of a local_delta must have map, combine and finish as "
                "lamina/representative.hpp says");

 public:
  /// x and y have a tensor for each layer of the model; `functor` takes the value of a fragment of x - y. Throws std::invalid_argument,
  /// naming it, for an option that a worker refuses, for a momentum, which is the optimizer's, and for non_finite::skip, as nothing can be
  /// left out of what was done already; and for a model without layers.
  explicit local_delta(const layout& model, const worker_options& options = {}, Representative functor = {})
      : options_(checked(model, options)),
        cut_(model, options.fragment_elements),
        values_(fragments(), std::move(functor)),
        selector_(cut_, options_),
        encoder_(fragments(), options.run),
        held_(fragments().layers()),
        rest_(options.error_feedback ? fragments().elements() : 0) {}

  /// The values of the fragments of x - y. The first call after select(), encode(), pack(), commit() or abandon() begins the next step.
  /// Throws std::invalid_argument for another number of tensors or elements than the model has, and non_finite_gradient for a difference
  /// that is NaN or infinite; nothing has changed then.
  template <detail::indexed Shared, detail::indexed Local, execution Execution = sequential>
  std::span<const double> observe_all(const Shared& shared, const Local& local,
                                      const Execution& execution = {}) {
    detail::take_pairs(model(), shared, local, read_);
    const std::size_t bad = values_.read(cut_, read_, execution);
    if (bad < fragments().layers()) {
      detail::raise(non_finite_gradient(cut_.layer_of(bad), bad, model()[cut_.layer_of(bad)].name,
                                        "the worker's parameters less the shared ones are not finite"));
    }
    if (phase_ != phase::observed) ++step_;
    phase_ = phase::observed;
    return values();
  }

  /// q of each fragment of x - y, as last observed. That of a fragment which is under way includes what is.
  [[nodiscard]] std::span<const double> values() const noexcept { return values_.all(); }

  /// Decides which fragments go out, by this worker's values, as worker::select(); those that are under way do not.
  /// encode() does it where nobody has. Throws std::logic_error unless the step was observed, and if it was selected already.
  const selection& select() { return select(values()); }
  /// The same by values that all workers have agreed on, mostly the mean of their values(), and without the fragments of which
  /// `held` is not 0. Workers choose the same as long as they hold the same fragments, and have the same allowance and ages: when
  /// all end each step, by commit() or commit_lost(), or all by abandon(), and apply its update before the same step. Throws also
  /// std::invalid_argument for a number of values other than fragments().layers(), and of flags, unless there are none.
  const selection& select(std::span<const double> agreed_values, std::span<const char> held = {}) {
    if (phase_ != phase::observed) {
      detail::refuse<std::logic_error>(
          "select: step ", step_,
          (phase_ == phase::ended ? " has ended; observe the next one first" : " was selected already"));
    }
    const std::size_t count = fragments().layers();
    if (agreed_values.size() != count || (!held.empty() && held.size() != count)) {
      detail::refuse("select: there are ", count, " fragments, got ", agreed_values.size(), " values and ",
                     held.size(), " flags");
    }
    for (std::size_t fragment = 0; fragment < count; ++fragment)
      held_[fragment] = static_cast<char>((!held.empty() && held[fragment] != 0) || flights_.has(fragment));
    selector_.decide(step_, agreed_values, held_);
    phase_ = phase::selected;
    return chosen();
  }
  /// The last selection.
  [[nodiscard]] const selection& chosen() const noexcept { return selector_.sent(); }

  /// The frame of this step, of kind `updates`, with r of the fragments chosen; valid until the next encode(), pack(), apply() or
  /// commit(delivery). x and y are those that were observed. Throws as select(), and std::invalid_argument for tensors that do not fit.
  template <detail::indexed Shared, detail::indexed Local>
  const encoded_frame& encode(const Shared& shared, const Local& local) {
    detail::flight<T>& next = take(shared, local);
    std::size_t offset = 0;
    encoder_.encode(
        {.kind = frame_kind::updates,
         .step = step_,
         .sender = options_.sender,
         .payload = options_.payload,
         .checksum = options_.frame_checksum},
        chosen(), [&](std::size_t fragment) {
          const std::size_t elements = fragments().sizes()[fragment];
          return std::span<const T>(next.sent()).subspan(std::exchange(offset, offset + elements), elements);
        });
    std::size_t segment = 0;
    next.for_each(fragments(), [&](std::size_t, std::span<T> r) {
      replace(r, encoder_.frame().segments()[++segment].data());
    });
    phase_ = phase::encoded;
    return encoder_.frame();
  }
  /// r without a frame, for collectives that add T: of the fragments chosen, one behind the other. What comes back, after the outer
  /// step, goes to apply(). Throws as encode(), and std::invalid_argument unless `to` has chosen().sent_elements() elements;
  /// select() comes before.
  template <detail::indexed Shared, detail::indexed Local>
  void pack(const Shared& shared, const Local& local, std::span<T> to) {
    if (!is_selected()) detail::refuse<std::logic_error>("pack: call select() of this step before");
    if (to.size() != chosen().sent_elements()) {
      detail::refuse("pack: there is room for ", to.size(), " elements, ", chosen().sent_elements(),
                     " are sent");
    }
    detail::flight<T>& next = take(shared, local);
    encoder_.forget();
    next.for_each(fragments(), [&](std::size_t, std::span<T> r) {
      if (options_.payload == payload_type::as_is) return;
      packed_.resize((std::max)(packed_.size(), payload_bytes<T>(options_.payload, r.size())));
      detail::encode_payload<T>(options_.payload, std::span<const T>(r), packed_.data());
      replace(r, packed_.data());
    });
    std::ranges::copy(next.sent(), to.begin());
    phase_ = phase::encoded;
  }

  /// What was encoded, or packed, has left: its fragments are under way until apply() or forget() of this step(). Throws
  /// std::logic_error unless something was encoded and not committed.
  void commit() {
    check_encoded();
    launch();
  }
  /// It has reached the outer optimizer in part, which takes zeros for what was lost: that stays in the local delta. Ages, allowance and
  /// the fragments that are held until the update are as after commit(), so that agreed selection stays agreed whatever each worker lost.
  /// The frame is gone unless all has arrived, as its segments may point to what was lost.
  ///
  /// Throws std::logic_error as commit(), and std::invalid_argument, changing nothing, unless `arrived` is of chosen() and,
  /// with payload_type::int8, int4 and ternary, in chunks of a multiple of payload_block_elements. Cost: one write of what was lost.
  void commit(const delivery& arrived) {
    check_encoded();
    detail::check_delivery("commit", arrived, chosen(), options_.payload);
    if (arrived.is_complete()) return commit();
    encoder_.forget();
    flights_.next().for_each(fragments(), [&](std::size_t fragment, std::span<T> r) {
      arrived.for_each_lost(fragment, [r](std::size_t begin, std::size_t end) {
        std::ranges::fill(r.subspan(begin, end - begin), T(0));
      });
    });
    launch();
  }
  /// Ends a step that this worker alone could not send: what was chosen stays in its local delta, and all else is as on the workers that
  /// sent it. Throws std::logic_error unless a step was selected that has not ended.
  void commit_lost() {
    if (!is_selected()) {
      detail::refuse<std::logic_error>("commit_lost: step ", step_,
                                       (phase_ == phase::ended ? " has ended" : " was not selected yet"));
    }
    next_flight().lose();
    encoder_.forget();
    launch();
  }
  /// Ends a step that cannot be carried out: nothing counts as sent, no fragment is held, and its local delta stays. After agreed selection
  /// it is for all workers together, or they choose different fragments from then on. Does nothing between steps.
  void abandon() noexcept {
    encoder_.forget();
    phase_ = phase::ended;
  }

  /// Takes what all subtract in one step: x <- x - d for the fragments of the frame, and y <- y + r - d, r being what this worker
  /// sent of the fragment in that step; 0 of what it did not. Every worker applies the frames of all steps, in their order, its own
  /// failed ones included: then x is bitwise identical everywhere. A frame that is left out is noticed by who has its step under way;
  /// nothing notices it of a step that was abandoned.
  ///
  /// Not between observe_all() and encode(): x and y stay as they were observed, so that it does not matter when an update comes. Throws
  /// decode_error for a frame of another kind or run; std::invalid_argument for one of another layout, for one that lacks a fragment which
  /// was sent, and for tensors that do not fit; non_finite_gradient for d that holds NaN or infinity; std::logic_error in a step that was
  /// observed and not encoded, for a step that was not committed yet, and for one out of order: not later than the last applied, or while
  /// an earlier one is under way. Nothing has changed then. Cost: for the check, another read of d.
  template <detail::indexed Shared, detail::indexed Local>
  void apply(const frame_view<T>& update, Shared&& shared, Local&& local) {
    if (!update.is_of(fragments()))
      detail::refuse("apply: the frame was decoded for another layout than the fragments");
    detail::require_expected(update, frame_kind::updates, update.step(), options_.run);
    check_may_apply(update.step());
    const detail::flight<T>* sent = flights_.due(update.step());
    if (sent != nullptr && !sent->is_lost()) {
      for (const std::size_t fragment : sent->fragments) {
        if (!update.is_dropped(fragment)) continue;
        detail::refuse("apply: the update of step ", update.step(), " lacks '", fragments()[fragment].name,
                       "', which was sent in it");
      }
    }
    subtract(
        update.step(), sent,
        [&](const auto& visit) {
          for (std::size_t fragment = 0; fragment < fragments().layers(); ++fragment) {
            if (update.is_dropped(fragment)) continue;
            update.for_each_block(
                fragment, [&](std::size_t begin, std::span<const T> d) { visit(fragment, begin, d); });
          }
        },
        shared, local);
  }
  /// The same of d without a frame: of the fragments that were chosen in `step`, one behind the other, be it that this worker's were
  /// lost. Throws std::logic_error also if that step is not under way, and std::invalid_argument for another number of elements.
  template <detail::indexed Shared, detail::indexed Local>
  void apply(std::uint64_t step, std::span<const T> update, Shared&& shared, Local&& local) {
    check_may_apply(step);
    const detail::flight<T>* sent = flights_.due(step);
    if (sent == nullptr) detail::refuse<std::logic_error>("apply: step ", step, " is not under way");
    std::size_t elements = 0;
    for (const std::size_t fragment : sent->fragments) elements += fragments().sizes()[fragment];
    if (update.size() != elements)
      detail::refuse("apply: ", update.size(), " elements where ", elements, " were sent in step ", step);
    subtract(
        step, sent,
        [&](const auto& visit) {
          std::size_t offset = 0;
          for (const std::size_t fragment : sent->fragments) {
            visit(fragment, 0, update.subspan(offset, fragments().sizes()[fragment]));
            offset += fragments().sizes()[fragment];
          }
        },
        shared, local);
  }
  /// A step that was committed did not reach the outer optimizer, as when a server went on without this worker: what was sent is in the
  /// local delta again. Its update is still to be applied, and its fragments are held until then. Throws std::logic_error if the step is
  /// not under way.
  void forget(std::uint64_t step) { flights_.forget(step); }
  /// A step that was committed will have no update, as when a collective has failed: what was sent is in the local delta again, and its
  /// fragments may be chosen. For all workers together, as abandon(). Throws as forget().
  void abandon(std::uint64_t step) { flights_.abandon(step); }

  /// Steps that were committed, also as lost, and whose update is to come.
  [[nodiscard]] std::size_t steps_under_way() const noexcept { return flights_.count(); }
  /// Everything a later step depends on besides x and y, as bytes with a checksum. Throws std::logic_error while a step waits to be
  /// encoded; one that was encoded and not committed counts as abandoned.
  [[nodiscard]] std::vector<std::byte> save() const {
    check_not_open("save");
    return detail::write_flights<T>(fragments(), selector_.remember(step_), step_, flights_, rest());
  }
  /// Takes up where a compressor of the same model and options was saved. With x and y as they were then, both go on alike, bit
  /// for bit. Changes nothing and throws decode_error, with a errc, for bytes that are damaged or of another model, and
  /// std::invalid_argument if they hold NaN or infinity.
  void load(std::span<const std::byte> bytes) { resume(bytes, /*is_own=*/true); }
  /// Joins the workers of which one has saved these bytes, between two steps of theirs: the next step here is the next of theirs, and is
  /// decided alike. The updates of what is under way are to be applied, and nothing of it is in the local delta. Begin with x as they have
  /// it and y = x. Errors as load().
  void join(std::span<const std::byte> saved_by_another) { resume(saved_by_another, /*is_own=*/false); }

  /// With error feedback what waits outside, in the order of the fragments; otherwise none.
  [[nodiscard]] std::span<const T> rest() const noexcept { return rest_; }
  /// It was brought together in another way, as by an all-reduce of everything.
  void clear_rest() noexcept { std::ranges::fill(rest_, T(0)); }

  /// t, counted from 1; 0 before the first observe_all().
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// λ as of the last selection.
  [[nodiscard]] double threshold() const noexcept { return selector_.threshold(); }
  /// The model given, and what is decided on: frames are of fragments().
  [[nodiscard]] const layout& model() const noexcept { return cut_.model(); }
  [[nodiscard]] const layout& fragments() const noexcept { return cut_.fragments(); }

 private:
  enum class phase : std::uint8_t { ended, observed, selected, encoded };

  static const worker_options& checked(const layout& model, const worker_options& options) {
    const char* refused = model.layers() == 0 ? "a model without layers has nothing to compress"
                          : options.momentum != 0
                              ? "momentum: a local delta has none, the worker's optimizer may"
                          : options.non_finite == non_finite::skip
                              ? "non_finite: nothing can be left out of a local delta, so refuse"
                              : nullptr;
    if (refused != nullptr) detail::refuse(refused);
    return options;
  }

  [[nodiscard]] bool is_selected() const { return phase_ == phase::selected || phase_ == phase::encoded; }
  void check_not_open(const char* call) const {
    if (phase_ != phase::observed && phase_ != phase::selected) return;
    detail::refuse<std::logic_error>(call, ": step ", step_, " was observed and not encoded yet");
  }
  void check_may_apply(std::uint64_t step) const {
    check_not_open("apply");
    if (step < step_ || (step == step_ && phase_ == phase::ended)) return;
    detail::refuse<std::logic_error>("apply: the update of step ", step,
                                     " comes before that step was committed");
  }
  void check_encoded() const {
    if (phase_ == phase::encoded) return;
    detail::refuse<std::logic_error>("commit: nothing to commit in step ", step_,
                                     "; call encode() before, and commit() once for it");
  }
  void launch() {
    selector_.commit(step_);
    flights_.launch();
    phase_ = phase::ended;
  }
  void resume(std::span<const std::byte> bytes, bool is_own) {
    detail::saved_flights<T> saved = detail::read_flights<T>(bytes, fragments(), options_.error_feedback);
    if (!is_own) {
      saved.all.forget_all();
      std::ranges::fill(saved.rest, T(0));
    }
    rest_ = std::move(saved.rest);
    selector_.restore(std::move(saved.memory));
    flights_ = std::move(saved.all);
    step_ = saved.step;
    abandon();
  }

  // The flight that the end of this step launches, without its elements.
  detail::flight<T>& next_flight() {
    detail::flight<T>& next = flights_.next();
    next.step = step_;
    next.fragments.assign(chosen().sent().begin(), chosen().sent().end());
    return next;
  }
  // x - y of the fragments chosen.
  template <class Shared, class Local>
  detail::flight<T>& take(const Shared& shared, const Local& local) {
    detail::take_pairs(model(), shared, local, read_);
    if (!is_selected()) select();
    detail::flight<T>& next = next_flight();
    next.elements.resize(chosen().sent_elements());
    detail::copy_differences<T>(cut_, read_, next.fragments, next.elements.data());
    if (rest_.empty()) return next;
    next.message = next.elements;  // becomes e + a
    next.for_each(fragments(), [&](std::size_t fragment, std::span<T> message) {
      detail::add_elements(message.data(), rest_.data() + fragments().offset(fragment), message.size());
    });
    return next;
  }
  // What the payload says of a fragment takes the place of the fragment.
  void replace(std::span<T> fragment, const std::byte* payload) const {
    if (options_.payload != payload_type::as_is)
      detail::decode_payload<T>(options_.payload, payload, fragment.size(), 0, fragment);
  }

  // x <- x - d; y <- y + r - d, r being what was sent in the flight, if there is one that was not lost. `blocks(visit)` calls visit(fragment, begin, d) for
  // what an update has, in the order of the fragments.
  template <class Blocks, class Shared, class Local>
  void subtract(std::uint64_t step, const detail::flight<T>* sent, const Blocks& blocks, Shared& shared,
                Local& local) {
    detail::take_pairs(model(), shared, local, written_);
    blocks([&](std::size_t fragment, std::size_t, std::span<const T> d) {
      if (detail::are_finite(d)) return;
      const std::size_t layer = cut_.layer_of(fragment);
      detail::raise(non_finite_gradient(layer, fragment, model()[layer].name, "the update is not finite"));
    });
    if (sent != nullptr && sent->is_lost()) sent = nullptr;
    const T* r = sent == nullptr ? nullptr : sent->elements.data();
    std::size_t next = 0;  // among the fragments sent: r is its
    blocks([&](std::size_t fragment, std::size_t begin, std::span<const T> d) {
      while (sent != nullptr && next < sent->fragments.size() && sent->fragments[next] < fragment)
        r += fragments().sizes()[sent->fragments[next++]];
      const detail::parameter_pair<T>& both = written_[cut_.layer_of(fragment)];
      T* const x = both.shared.data() + cut_.begin(fragment) + begin;
      T* const y = both.local.data() + cut_.begin(fragment) + begin;
      if (sent != nullptr && next < sent->fragments.size() && sent->fragments[next] == fragment)
        detail::add_elements(y, r + begin, d.size());
      detail::subtract_elements(y, d.data(), d.size());
      detail::subtract_elements(x, d.data(), d.size());
    });
    if (sent != nullptr && !rest_.empty()) {  // the message has arrived: e <- e + a - r
      std::size_t at = 0;
      for (const std::size_t fragment : sent->fragments) {
        const std::size_t count = fragments().sizes()[fragment];
        T* const e = rest_.data() + fragments().offset(fragment);
        detail::add_elements(e, sent->elements.data() + at, count);
        detail::subtract_elements(e, sent->message.data() + at, count);
        at += count;
      }
    }
    flights_.land(step);
  }

  worker_options options_;
  tiling cut_;
  detail::delta_values<T, Representative> values_;
  selector selector_;
  frame_encoder<T> encoder_;
  std::vector<char> held_;                             // of a fragment, in the last selection
  std::vector<T> rest_;                                // with error feedback: e
  std::vector<detail::parameter_pair<const T>> read_;  // of the call
  std::vector<detail::parameter_pair<T>> written_;     // likewise
  detail::flights<T> flights_;
  std::vector<std::byte> packed_;
  std::uint64_t step_ = 0;
  phase phase_ = phase::ended;
};

}  // namespace lamina::inline LAMINA_ABI
