// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/decision.hpp"
#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/drift/pairs.hpp"
#include "lamina/drift/values.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/frame.hpp"
#include "lamina/fwd.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/reduction.hpp"
#include "lamina/representative.hpp"
#include "lamina/selection.hpp"
#include "lamina/state/flights.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

namespace lamina::inline LAMINA_ABI {

/// A worker's side of local updates. Each worker goes on with the update of its own optimizer at once, whatever optimizer that
/// is, and what it did that the others have not seen is its *drift* a = x − y: x are the parameters that all share, the same
/// bits everywhere, y those that the worker computes with. The drift is to this class what the residual is to
/// worker, and is decided on in the same way, but nobody stores it. Each step:
///
///     optimizer.step();                                             // the worker's own, on y
///     compressor.observe_all(x, y);                                 // the values of x - y
///     const encoded_frame& frame = compressor.encode(x, y);         // selects; r = payload(x - y) of the parts sent
///     send frame.segments();
///     compressor.commit();                                          // r is under way
///     compressor.apply(decode<T>(bytes, compressor.fragments()), x, y); // what all subtract, d: x <- x - d, y <- y + r - d
///
/// What comes back is the outer step's (outer_step.hpp): with a rate of 1 and without momentum, d is the mean of all workers' r,
/// and y - x becomes what was not sent. As apply() shifts y and does not overwrite it, it may come steps later: whatever the
/// worker did meanwhile, and what the payload rounded away, stays in its drift. A part that is under way is not selected again.
///
/// Conserved, but for the rounding of single sums: what all workers did = what was sent of it + their drifts. What a step that
/// fails would have sent is still in the drift:
///
///                        of this worker alone     of all workers: there is no update
///     arrived in part    commit(delivery)
///     not committed yet  commit_lost()            abandon()
///     committed          forget(step)             abandon(step)
///
/// Each of these keeps agreed selection agreed. Where each worker selects for itself, abandon() will also do for one alone.
///
/// Not for concurrent use. Memory: O(parts), and r of the steps that are under way. Cost of a step: one read of x and y, and of
/// what is sent another, and what apply() writes.
///
/// Source: local SGD with an outer step, as in DiLoCo (Douillard et al. 2023) and Streaming DiLoCo (2025); choosing by value
/// what is brought together is this library's.
template <element T, class Representative>
class drift_compressor {
  static_assert(representative<Representative>,
                "lamina: the functor of a drift_compressor must have map, combine and finish as "
                "lamina/concepts.hpp says");

 public:
  /// \param model    what the parameters are, and what x and y have a tensor for each layer of
  /// \param options  as of a worker. Refused are a momentum, which is the optimizer's, and non_finite::skip,
  ///                 as nothing can be left out of what was done already.
  /// \param functor  takes the value of a part of x - y
  /// \throws std::invalid_argument  naming the option; a model without layers
  explicit drift_compressor(const layout& model, const worker_options& options = {},
                            Representative functor = {})
      : options_(checked(model, options)),
        cut_(model, options.fragment_elements),
        values_(fragments(), std::move(functor)),
        selector_(cut_, options_),
        encoder_(fragments(), options.run),
        is_observed_(model.layers()),
        held_(fragments().layers()) {}

  /// The values of the parts of one layer of x - y; gives that of the last. The first call after select(), encode(), pack(),
  /// commit() or abandon() begins the next step. Throws std::out_of_range, std::invalid_argument for another number of elements, and
  /// non_finite_gradient for a difference that is NaN or infinite; nothing has
  /// changed then.
  ///
  /// \param layer      index in model()
  /// \param shared     x of the layer: a tensor of n_l elements of T
  /// \param local      y of the layer: likewise
  /// \param execution  runs the blocks of the layer; see execution.hpp
  template <class Shared, class Local, execution Execution = sequential>
  double observe(std::size_t layer, const Shared& shared, const Local& local,
                 const Execution& execution = {}) {
    model().check_layer(layer);
    observe(
        layer, layer + 1, [&](std::size_t) { return detail::pair_of<T>(model(), layer, shared, local); },
        execution);
    return values()[cut_.first(layer + 1) - 1];
  }
  /// The same for all layers at once, `shared[l]` and `local[l]` being those of layer l. Throws std::invalid_argument also for
  /// another number of tensors than model().layers().
  template <detail::indexed Shared, detail::indexed Local, execution Execution = sequential>
  std::span<const double> observe_all(const Shared& shared, const Local& local,
                                      const Execution& execution = {}) {
    detail::check_pair_counts(model(), shared, local);
    observe(0, model().layers(), detail::pairs_of<T>(model(), shared, local), execution);
    return values();
  }

  /// q of each part of x - y, as last observed. That of a part which is under way includes what is.
  [[nodiscard]] std::span<const double> values() const noexcept { return values_.all(); }

  /// Decides which parts go out, by this worker's values, as worker::select(); those that are under way do not.
  /// encode() does it where nobody has. Throws std::logic_error, naming the layer, if one was not observed in this step, and if
  /// the step was selected already.
  const selection& select() { return decide(values(), {}); }
  /// The same by values that all workers have agreed on, mostly the mean of their values(), and without the parts of which
  /// `held` is not 0. Workers choose the same as long as they hold the same parts, and have the same allowance and ages: when
  /// all end each step, by commit() or commit_lost(), or all by abandon(), and apply its update before the same step. Throws also
  /// std::invalid_argument for a number of values other than fragments().layers(), and of flags, unless there are none.
  const selection& select(std::span<const double> agreed_values, std::span<const char> held = {}) {
    return decide(agreed_values, held);
  }
  /// The last selection.
  [[nodiscard]] const selection& chosen() const noexcept { return selector_.sent(); }

  /// The frame of this step, of kind `updates`, with r of the parts chosen; valid until the next encode(), pack(), apply() or
  /// commit(delivery).
  /// x and y are those that were observed. Throws as select(), and std::invalid_argument for tensors that do not fit.
  template <detail::indexed Shared, detail::indexed Local>
  const encoded_frame& encode(const Shared& shared, const Local& local) {
    detail::flight<T>& next = take(shared, local);
    std::size_t offset = 0;
    encoder_.encode({.kind = frame_kind::updates,
                     .step = step_,
                     .sender = options_.sender,
                     .payload = options_.payload,
                     .checksum = options_.frame_checksum},
                    chosen(), [&](std::size_t part) {
                      const std::size_t elements = fragments().sizes()[part];
                      return std::span<const T>(next.elements)
                          .subspan(std::exchange(offset, offset + elements), elements);
                    });
    T* to = next.elements.data();
    for (std::size_t i = 0; i < next.parts.size(); ++i) {
      to = say(next.parts[i], encoder_.frame().segments()[i + 1].data(), to);
    }
    phase_ = detail::step_phase::encoded;
    return encoder_.frame();
  }
  /// r without a frame, for collectives that add T: of the parts chosen, one behind the other. What comes back, after the outer
  /// step, goes to apply(). Throws as encode(), and std::invalid_argument unless `to` has chosen().sent_elements() elements;
  /// select() comes before.
  template <detail::indexed Shared, detail::indexed Local>
  void pack(const Shared& shared, const Local& local, std::span<T> to) {
    if (!detail::may_encode(phase_))
      detail::raise(std::logic_error("pack: call select() of this step before"));
    if (to.size() != chosen().sent_elements()) {
      detail::raise(std::invalid_argument("pack: there is room for " + std::to_string(to.size()) +
                                          " elements, " + std::to_string(chosen().sent_elements()) +
                                          " are sent"));
    }
    detail::flight<T>& next = take(shared, local);
    encoder_.forget();
    T* said = next.elements.data();
    for (const std::size_t part : next.parts) {
      const std::size_t elements = fragments().sizes()[part];
      if (options_.payload != payload_type::as_is) {
        packed_.resize((std::max)(packed_.size(), payload_bytes<T>(options_.payload, elements)));
        detail::encode_payload<T>(options_.payload, std::span<const T>(said, elements), packed_.data());
      }
      said = say(part, packed_.data(), said);
    }
    std::copy(next.elements.begin(), next.elements.end(), to.begin());
    phase_ = detail::step_phase::encoded;
  }

  /// What was encoded, or packed, has left: its parts are under way until apply() or forget() of this step(). Throws
  /// std::logic_error unless there is something encoded that was not committed yet.
  void commit() {
    check_encoded();
    launch();
  }
  /// It has reached the outer step in part, which takes zeros for what was lost: that is not under way, and so stays in the
  /// drift. Ages, allowance and the parts that are held until the update are as after commit(), so that agreed selection stays
  /// agreed whatever each worker lost. Of a complete delivery it is commit(); else the frame is gone with it, as its segments may point
  /// to what was lost.
  ///
  /// Throws std::logic_error as commit(), and std::invalid_argument, changing nothing, unless `arrived` is of chosen() and,
  /// with payload_type::int8 and int4, in chunks of a multiple of payload_block_elements. Cost: one write of what was lost.
  void commit(const delivery& arrived) {
    check_encoded();
    detail::check_delivery("commit", arrived, chosen(), options_.payload);
    if (arrived.is_complete()) return commit();
    encoder_.forget();
    detail::flight<T>& next = flights_.next();
    T* r = next.elements.data();
    for (const std::size_t part : next.parts) {
      arrived.for_each_lost(part,
                            [r](std::size_t begin, std::size_t end) { std::fill(r + begin, r + end, T(0)); });
      r += fragments().sizes()[part];
    }
    launch();
  }
  /// Ends a step that this worker alone could not send: what was chosen stays in its drift, while ages, allowance and the parts
  /// that are held until the update of this step() is applied are as on the workers that sent it. Throws std::logic_error unless
  /// a step was selected that has not ended.
  void commit_lost() {
    if (!detail::may_encode(phase_)) {
      detail::raise(std::logic_error(
          "commit_lost: step " + std::to_string(step_) +
          (phase_ == detail::step_phase::committed ? " has ended" : " was not selected yet")));
    }
    detail::flight<T>& next = flights_.next();
    next.step = step_;
    next.parts.assign(chosen().sent().begin(), chosen().sent().end());
    next.elements.clear();
    encoder_.forget();
    launch();
  }
  /// Ends a step that cannot be carried out: nothing counts as sent, no part is held, and its drift stays. After agreed selection
  /// it is for all workers together, or they choose different parts from then on; of one alone the step is commit_lost(). Does
  /// nothing between steps.
  void abandon() noexcept {
    encoder_.forget();
    phase_ = detail::step_phase::committed;
  }

  /// Takes what all subtract in one step: x <- x - d for the parts of the frame, and y <- y + r - d, r being what this worker
  /// sent of the part in that step; 0 of what it did not. Every worker applies the frames of all steps, in their order, its own
  /// failed ones included: then x is the same bits everywhere. A frame that is left out is noticed by who has its step under way;
  /// nothing notices it of a step that was abandoned.
  ///
  /// Not between the first observe() of a step and its encode(): x and y stay as they were observed, so that it does not matter
  /// when between them an update comes. Throws decode_error for a frame of another kind or run; std::invalid_argument for one of
  /// another layout, for one that lacks a part which was sent, and for tensors that do not fit; non_finite_gradient for d that
  /// holds NaN or infinity; std::logic_error in a step that was observed and not
  /// encoded, for a step that was not committed yet, and for one out of order: not later than the last applied, or while an
  /// earlier one is under way. Nothing has changed then. Cost: for the check, another read of d.
  template <detail::indexed Shared, detail::indexed Local>
  void apply(const frame_view<T>& update, Shared&& shared, Local&& local) {
    if (!update.is_of(fragments())) {
      detail::raise(std::invalid_argument("apply: the frame was decoded for another layout than the parts"));
    }
    detail::require_expected(update, frame_kind::updates, update.step(), options_.run);
    check_may_apply(update.step());
    const detail::flight<T>* sent = flights_.due(update.step());
    if (sent != nullptr && sent->is_lost()) sent = nullptr;
    if (sent != nullptr) {
      for (const std::size_t part : sent->parts) {
        if (!update.is_dropped(part)) continue;
        detail::raise(std::invalid_argument("apply: the update of step " + std::to_string(update.step()) +
                                            " lacks '" + fragments()[part].name + "', which was sent in it"));
      }
    }
    detail::check_writable_pairs<T>(cut_, shared, local);
    for (std::size_t part = 0; part < fragments().layers(); ++part) {
      update.for_each_block(part, [&](std::size_t, std::span<const T> d) { check_update(part, d); });
    }
    const T* said = sent == nullptr ? nullptr : sent->elements.data();
    std::size_t next = 0;
    for (std::size_t part = 0; part < fragments().layers(); ++part) {
      if (update.is_dropped(part)) continue;
      const bool was_sent = sent != nullptr && next < sent->parts.size() && sent->parts[next] == part;
      const auto [x, y] = detail::writable_pair_of<T>(cut_, part, shared, local);
      update.for_each_block(part, [&, x = x, y = y](std::size_t begin, std::span<const T> d) {
        shift(x.data() + begin, y.data() + begin, was_sent ? said + begin : nullptr, d);
      });
      if (!was_sent) continue;
      said += fragments().sizes()[part];
      ++next;
    }
    flights_.land(update.step());
  }
  /// The same of d without a frame: of the parts that were chosen in `step`, one behind the other, be it that this worker's were
  /// lost. Throws std::logic_error also if that step is not under way, and std::invalid_argument for another number of elements.
  template <detail::indexed Shared, detail::indexed Local>
  void apply(std::uint64_t step, std::span<const T> update, Shared&& shared, Local&& local) {
    check_may_apply(step);
    const detail::flight<T>* sent = flights_.due(step);
    if (sent == nullptr) {
      detail::raise(std::logic_error("apply: step " + std::to_string(step) + " is not under way"));
    }
    std::size_t elements = 0;
    for (const std::size_t part : sent->parts) elements += fragments().sizes()[part];
    if (update.size() != elements) {
      detail::raise(std::invalid_argument("apply: " + std::to_string(update.size()) + " elements where " +
                                          std::to_string(elements) + " were sent in step " +
                                          std::to_string(step)));
    }
    detail::check_writable_pairs<T>(cut_, shared, local);
    const T* d = update.data();
    for (const std::size_t part : sent->parts) {
      check_update(part, {d, fragments().sizes()[part]});
      d += fragments().sizes()[part];
    }
    const T* said = sent->is_lost() ? nullptr : sent->elements.data();
    d = update.data();
    for (const std::size_t part : sent->parts) {
      const auto [x, y] = detail::writable_pair_of<T>(cut_, part, shared, local);
      shift(x.data(), y.data(), said, {d, x.size()});
      if (said != nullptr) said += x.size();
      d += x.size();
    }
    flights_.land(step);
  }
  /// A step that was committed did not reach the outer step, as when a server went on without this worker: what was sent is in
  /// the drift again. The update of that step is still to be applied, and its parts are held until then, as on the workers whose
  /// updates it has. Throws std::logic_error if the step is not under way.
  void forget(std::uint64_t step) { flights_.forget(step); }
  /// A step that was committed has no update and will have none, as when a collective has failed: what was sent is in the drift
  /// again, and its parts may be chosen. For all workers together, as abandon(). Throws std::logic_error if the step is not under
  /// way.
  void abandon(std::uint64_t step) { flights_.abandon(step); }

  /// Steps that were committed, also as lost, and whose update is to come.
  [[nodiscard]] std::size_t steps_under_way() const noexcept { return flights_.count(); }
  /// Whether a part was chosen in one of them; throws std::out_of_range.
  [[nodiscard]] bool is_under_way(std::size_t part) const {
    fragments().check_layer(part);
    return flights_.has(part);
  }

  /// Everything a later step depends on beside x and y, as bytes with a checksum: threshold, ages, allowance, and what is under
  /// way. Between steps alone: throws std::logic_error while a step waits to be encoded; one that was encoded and not committed
  /// counts as abandoned.
  [[nodiscard]] std::vector<std::byte> save() const {
    if (phase_ == detail::step_phase::accumulating || phase_ == detail::step_phase::selected) {
      detail::raise(
          std::logic_error("save: step " + std::to_string(step_) + " was observed and not encoded yet"));
    }
    return detail::write_flights<T>(fragments(), selector_.remember(step_), step_, flights_);
  }
  /// Takes up where a compressor of the same model and options was saved. With x and y as they were then, both go on alike, bit
  /// for bit. Changes nothing and throws decode_error, with a errc, for bytes that are damaged or of another model, and
  /// std::invalid_argument if they hold NaN or infinity.
  void load(std::span<const std::byte> bytes) { take_up(detail::read_flights<T>(bytes, fragments())); }
  /// Joins the workers of which one has saved these bytes, between two steps of theirs: the next step here is the next of theirs,
  /// and is decided alike. What is under way was sent by others: its parts are held, its updates are to be applied, and nothing
  /// of it is in the drift. Begin with x as they have it and y = x. Errors as load().
  void join(std::span<const std::byte> saved_by_another) {
    detail::saved_flights<T> saved = detail::read_flights<T>(saved_by_another, fragments());
    saved.all.forget_all();
    take_up(std::move(saved));
  }

  /// t, counted from 1; 0 before the first observe().
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// λ as of the last selection.
  [[nodiscard]] double threshold() const noexcept { return selector_.threshold(); }
  /// The model given, what is decided on, and which part is of which layer. Frames are of fragments().
  [[nodiscard]] const layout& model() const noexcept { return cut_.model(); }
  [[nodiscard]] const layout& fragments() const noexcept { return cut_.fragments(); }
  [[nodiscard]] const tiling& tiles() const noexcept { return cut_; }

 private:
  static const worker_options& checked(const layout& model, const worker_options& options) {
    const char* refused = model.layers() == 0     ? "a model without layers has nothing to compress"
                          : options.momentum != 0 ? "momentum: a drift has none, the worker's optimizer may"
                          : options.non_finite == non_finite::skip
                              ? "non_finite: nothing can be left out of a drift, so refuse"
                              : nullptr;
    if (refused != nullptr) detail::raise(std::invalid_argument(refused));
    return options;
  }

  void check_may_apply(std::uint64_t step) const {
    if (phase_ == detail::step_phase::accumulating || phase_ == detail::step_phase::selected) {
      detail::raise(
          std::logic_error("apply: step " + std::to_string(step_) +
                           " was observed and not encoded yet; apply before the one or after the other"));
    }
    if (step < step_ || (step == step_ && phase_ == detail::step_phase::committed)) return;
    detail::raise(std::logic_error("apply: the update of step " + std::to_string(step) +
                                   " comes before that step was committed"));
  }
  void check_update(std::size_t part, std::span<const T> d) const {
    if (detail::is_finite_magnitude(detail::largest_magnitude<T>(d.size(), detail::read_only<T>{d.data()})))
      return;
    const std::size_t layer = cut_.layer_of(part);
    detail::raise(non_finite_gradient(layer, part, model()[layer].name, "the update is not finite"));
  }

  void check_encoded() const {
    if (detail::may_commit(phase_)) return;
    detail::raise(std::logic_error("commit: nothing to commit in step " + std::to_string(step_) +
                                   "; call encode() before, and commit() once for it"));
  }
  void launch() {
    selector_.commit(step_);
    flights_.launch();
    phase_ = detail::step_phase::committed;
  }
  void take_up(detail::saved_flights<T> saved) {
    selector_.restore(std::move(saved.memory));
    flights_ = std::move(saved.all);
    step_ = saved.step;
    abandon();
  }

  // `pairs(layer)` gives x and y of a layer.
  template <class Pairs, class Execution>
  void observe(std::size_t first, std::size_t last, const Pairs& pairs, const Execution& execution) {
    for (std::size_t layer = first; layer < last; ++layer) pairs(layer);
    const std::size_t bad = values_.read(cut_, first, last, pairs, execution);
    if (bad < fragments().layers()) {
      detail::raise(non_finite_gradient(cut_.layer_of(bad), bad, model()[cut_.layer_of(bad)].name,
                                        "the worker's parameters less the shared ones are not finite"));
    }
    if (detail::begins_step(phase_)) begin();
    values_.take_up(cut_, first, last);
    std::fill(is_observed_.begin() + static_cast<std::ptrdiff_t>(first),
              is_observed_.begin() + static_cast<std::ptrdiff_t>(last), char{1});
  }

  void begin() {
    ++step_;
    std::fill(is_observed_.begin(), is_observed_.end(), char{0});
    phase_ = detail::step_phase::accumulating;
  }

  const selection& decide(std::span<const double> values, std::span<const char> held) {
    if (phase_ != detail::step_phase::accumulating) {
      detail::raise(
          std::logic_error("select: step " + std::to_string(step_) +
                           (phase_ == detail::step_phase::committed ? " has ended; observe the next one first"
                                                                    : " was selected already")));
    }
    for (std::size_t layer = 0; layer < model().layers(); ++layer) {
      if (is_observed_[layer] != 0 || model().sizes()[layer] == 0) continue;
      detail::raise(std::logic_error("select: layer '" + model()[layer].name + "' was not observed in step " +
                                     std::to_string(step_)));
    }
    if (values.size() != fragments().layers() || (!held.empty() && held.size() != fragments().layers())) {
      detail::raise(std::invalid_argument("select: there are " + std::to_string(fragments().layers()) +
                                          " parts, got " + std::to_string(values.size()) + " values and " +
                                          std::to_string(held.size()) + " flags"));
    }
    for (std::size_t part = 0; part < held_.size(); ++part) {
      held_[part] = static_cast<char>((!held.empty() && held[part] != 0) || flights_.has(part));
    }
    selector_.decide(step_, values, held_);
    phase_ = detail::step_phase::selected;
    return chosen();
  }

  // x - y of the parts chosen, into the flight that commit() launches.
  template <class Shared, class Local>
  detail::flight<T>& take(const Shared& shared, const Local& local) {
    detail::check_pair_counts(model(), shared, local);
    const auto pairs = detail::pairs_of<T>(model(), shared, local);
    for (std::size_t layer = 0; layer < model().layers(); ++layer) pairs(layer);
    if (!detail::may_encode(phase_)) select();
    detail::flight<T>& next = flights_.next();
    next.step = step_;
    next.parts.assign(chosen().sent().begin(), chosen().sent().end());
    next.elements.resize(chosen().sent_elements());
    T* to = next.elements.data();
    for (const std::size_t part : next.parts) {
      const detail::parameter_pair<const T> both = pairs(cut_.layer_of(part));
      const std::size_t elements = fragments().sizes()[part];
      const std::size_t begin = cut_.begin(part);
      detail::copy_elements(to, elements,
                            detail::difference_of<T>{both.shared.data() + begin, both.local.data() + begin});
      to += elements;
    }
    return next;
  }

  // What the payload says of a part takes the place of the part; gives where the next one begins.
  T* say(std::size_t part, const std::byte* payload, T* to) const {
    const std::size_t elements = fragments().sizes()[part];
    if (options_.payload != payload_type::as_is) {
      detail::decode_payload<T>(options_.payload, payload, elements, 0, std::span<T>(to, elements));
    }
    return to + elements;
  }

  // x <- x - d; y <- y + r - d, where something was sent.
  static void shift(T* x, T* y, const T* r, std::span<const T> d) {
    if (r != nullptr) detail::add_elements(y, r, d.size());
    detail::subtract_elements(y, d.data(), d.size());
    detail::subtract_elements(x, d.data(), d.size());
  }

  worker_options options_;
  tiling cut_;
  detail::drift_values<T, Representative> values_;
  selector selector_;
  frame_encoder<T> encoder_;
  std::vector<char> is_observed_;  // of a layer, in this step
  std::vector<char> held_;         // of a part, in the last selection
  detail::flights<T> flights_;
  std::vector<std::byte> packed_;
  std::uint64_t step_ = 0;
  detail::step_phase phase_ = detail::step_phase::committed;
};

}  // namespace lamina::inline LAMINA_ABI
