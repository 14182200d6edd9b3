// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lamina/delivery.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/failure.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/execution.hpp"
#include "lamina/frame.hpp"
#include "lamina/fwd.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/partition.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/residual/decider.hpp"
#include "lamina/residual/departure.hpp"
#include "lamina/residual/inspect.hpp"
#include "lamina/residual/intake.hpp"
#include "lamina/selection.hpp"
#include "lamina/selector.hpp"
#include "lamina/state.hpp"

namespace lamina::inline LAMINA_ABI {

/// A worker's side: residual, threshold and codec together. Each step:
///
///     for each layer l:  compressor.accumulate(l, gradient of l);   // in any order, also in pieces
///     const encoded_frame& frame = compressor.encode();             // selects, writes the header, copies nothing
///     send frame.segments();
///     compressor.commit();                                          // once the send has completed
///
/// Only commit() clears what was sent; of a frame that arrived in part, commit(delivery) clears what did. If a send fails, do
/// not commit: go on with the next step, or encode again, and no gradient is lost. Not for concurrent use. Allocates nothing
/// after the first step, if the payload goes as_is.
///
/// Decides by layer, or by part of a layer where options.part_elements says so: values, selection, residual and frames
/// are over parts().
///
/// Where options.decide is not at_end, a part can be sent while gradients of others are still computed:
///
///     compressor.accumulate(l, gradient of l);          // when it is there, in the order in which they come
///     for each part p of l:  if (compressor.is_sent(p))  begin to send a copy of residual()[p];
///     ahead:  compressor.plan_next(mean over the workers of predicted_values());   // any time before the next step
///     compressor.encode();                              // ends the step; writes a header, copies nothing
///     compressor.commit();                              // once all sends have completed: one commit a step
///
/// as_ready, frames can go out meanwhile: encode_ready() gives what was decided since the last, encode_rest() what is left.
///
/// accumulate, accumulate_all, skip, select and encode also come with a std::error_code, which is set to an errc, or to
/// std::errc::not_enough_memory, and then nothing has changed, but that an encode() without memory for its frame may have
/// selected the step: call it again, which sends what it would have. They are for programs without exceptions; an exception
/// says more. Whatever else a tensor's own library throws becomes errc::bad_tensor. What an execution of your own throws goes
/// through, once all is added.
///
/// Representative is mean_abs unless something else is said (fwd.hpp).
template <element T, class Representative>
class gradient_compressor {
  static_assert(representative<Representative>,
                "lamina: the functor of a gradient_compressor must have map, combine and finish as "
                "lamina/concepts.hpp says");

 public:
  /// Throws std::invalid_argument, naming the option, for one outside its range, and for a model without layers.
  explicit gradient_compressor(const layout& model, const compressor_options& options = {},
                               Representative functor = {})
      : options_(options),
        intake_(model, options, std::move(functor)),
        decider_(parts(), detail::options_by_part(options, cut())),
        departure_(parts(), options),
        decided_(parts()) {
    if (model.layers() == 0) {
      detail::raise(std::invalid_argument("a model without layers has nothing to compress"));
    }
  }

  /// Adds the gradient of one layer to its residual and gives the value of the layer, or of its last part. The first
  /// call after select(), encode(), pack() or commit() begins the next step; a layer's gradient may come in pieces, which add
  /// up. Errors as residual_accumulator::accumulate; other layers keep what they have, so after a refused gradient go on
  /// with the next batch in the same step. Throws std::logic_error for a second piece in a step that is decided ahead; as_ready, for one of a layer that is decided already; ahead, if
  /// it begins a step that nothing was agreed for.
  ///
  /// \param layer      index in model()
  /// \param gradient   a tensor of n_l elements of T, lamina::float16 or lamina::bfloat16
  /// \param scale      multiplies each element, as a T, before it is added: 1 / (loss scale), 1 / micro-batches, a clipping
  ///                   factor; costs no pass
  /// \param execution  runs the blocks of the layer; see execution.hpp
  template <class Tensor, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, double scale,
                    const Execution& execution = {}) {
    const double value =
        intake_.add_one(layer, gradient, scale, execution, decider_.selector(), detail::throws());
    decider_.take_up(intake_, layer, layer + 1);
    intake_.rethrow();
    return value;
  }
  template <class Tensor, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, const Execution& execution = {}) {
    return accumulate(layer, gradient, 1.0, execution);
  }
  template <class Tensor, execution Execution = sequential>
  double accumulate(std::size_t layer, const Tensor& gradient, std::error_code& error, double scale = 1,
                    const Execution& execution = {}) {
    const double value = reported(error, [&] {
      return intake_.add_one(layer, gradient, scale, execution, decider_.selector(), detail::reports(error));
    });
    if (!error) decider_.take_up(intake_, layer, layer + 1);
    intake_.rethrow();
    return value;
  }

  /// The same for all layers at once, `gradients[l]` being the tensor of layer l: all are added or, on an error, none, so
  /// a batch with NaN in one layer is skipped whole. A std::optional without a tensor, or a tensor of a framework that is
  /// not defined, is a layer without a gradient: see skip(). Where an execution starts threads, this is much quicker than
  /// layer by layer. as_ready, they are decided in the order of the model. Throws std::invalid_argument also for a number of
  /// tensors other than model().layers().
  template <detail::indexed Tensors, execution Execution = sequential>
  std::span<const double> accumulate_all(const Tensors& gradients, double scale,
                                         const Execution& execution = {}) {
    intake_.add_all(gradients, scale, execution, decider_.selector(), detail::throws());
    decider_.take_up(intake_, 0, model().layers());
    intake_.rethrow();
    return intake_.values();
  }
  template <detail::indexed Tensors, execution Execution = sequential>
  std::span<const double> accumulate_all(const Tensors& gradients, const Execution& execution = {}) {
    return accumulate_all(gradients, 1.0, execution);
  }
  template <detail::indexed Tensors, execution Execution = sequential>
  std::span<const double> accumulate_all(const Tensors& gradients, std::error_code& error, double scale = 1,
                                         const Execution& execution = {}) {
    reported(error, [&] {
      intake_.add_all(gradients, scale, execution, decider_.selector(), detail::reports(error));
      return 0;
    });
    if (!error) decider_.take_up(intake_, 0, model().layers());
    intake_.rethrow();
    return intake_.values();
  }

  /// A layer has no gradient in this step: an expert that got no input, a branch that was not taken. Its residual and its
  /// velocity stay as they are, and it may be sent all the same. Begins a step as accumulate() does. Throws
  /// std::out_of_range, and std::logic_error where no step may begin.
  void skip(std::size_t layer) {
    intake_.skip(layer, decider_.selector(), detail::throws());
    decider_.take_up(intake_, layer, layer + 1);
  }
  void skip(std::size_t layer, std::error_code& error) {
    intake_.skip(layer, decider_.selector(), detail::reports(error));
    if (!error) decider_.take_up(intake_, layer, layer + 1);
  }

  /// Begins the next step, as its first accumulate() or skip() does otherwise. as_ready, its threshold and its allowance are
  /// fixed from here on; ahead, its selection. Throws std::logic_error if a step has begun and was not selected, and ahead,
  /// after a step that was committed, unless plan_next() came before.
  void begin_step() {
    if (intake_.phase() == detail::step_phase::accumulating) {
      detail::raise(std::logic_error("begin_step: step " + std::to_string(step()) +
                                     " has begun already; select(), encode() or abandon() it before"));
    }
    if (!intake_.may_begin(decider_.selector(), detail::throws())) return;
    intake_.begin();
    decider_.selector().begin(step());
  }

  /// as_ready: whether further pieces will follow of the gradients that come from here on, as in all passes of gradient
  /// accumulation but the last. Meanwhile no layer is decided; its next gradient, or skip(), after `false` decides it, or else
  /// select(). Other timings do not look at it.
  void expect_more_pieces(bool expected) noexcept { decider_.expect_more_pieces(expected); }

  /// Whether it is known of a part if it goes out in this step: at_end, once select() was called; as_ready, once its gradient
  /// is there, and of empty parts from the beginning of the step; ahead, from there on of all. Of the last step, until the next
  /// begins. Throws std::out_of_range.
  [[nodiscard]] bool is_decided(std::size_t part) const {
    parts().check_layer(part);
    return decider_.selector().is_decided(step(), part);
  }
  /// Whether a part goes out in this step. Throws std::logic_error, naming it, unless it is decided, and std::out_of_range.
  [[nodiscard]] bool is_sent(std::size_t part) const {
    if (!is_decided(part)) {
      detail::raise(std::logic_error("is_sent: '" + parts()[part].name + "' is not decided in step " +
                                     std::to_string(step()) + " yet"));
    }
    return chosen().is_sent(part);
  }

  /// ahead: what the values of the next step would be if its gradients were as large as those of this one. Of a part that is
  /// sent in this step it is the value of its gradient, of the others q and that. To be averaged over the workers, in one
  /// order, and given to plan_next(). After abandon() nothing counts as sent. Throws std::logic_error for another
  /// options.decide, and before all layers have a gradient in this step or were skipped.
  [[nodiscard]] std::span<const double> predicted_values() const {
    decider_.require_prediction("predicted_values", intake_);
    return decider_.predicted_values();
  }

  /// ahead: the next step is decided by these values, as select(agreed_values) would decide it: the mean of
  /// predicted_values() over the workers, the same bits on all of them. Called between the last gradient of a step and the
  /// first of the next; of two calls the second counts. A step that is not committed leaves the values that it was decided by
  /// to the next, if that has none of its own. Throws as predicted_values(), and std::invalid_argument for a number of values
  /// other than parts().layers().
  void plan_next(std::span<const double> agreed_values) {
    decider_.require_prediction("plan_next", intake_);
    decider_.selector().plan(step(), agreed_values);
  }

  /// q of each part after the last accumulate. A part that was sent since counts until it is accumulated, or skipped, again.
  [[nodiscard]] std::span<const double> values() const noexcept { return intake_.values(); }

  /// Decides which parts go out; called again in the same step, gives the same. A value that is NaN counts as infinity: the
  /// part goes out first. What was decided before, as_ready or ahead, stays. Throws std::logic_error, naming the layer, if one
  /// has no gradient yet in this step (empty layers need none), if the step was committed already, or if it was selected by
  /// agreed values.
  const selection& select() { return decider_.decide_own(intake_, detail::throws()); }
  const selection& select(std::error_code& error) {
    reported(error, [&] { return &decider_.decide_own(intake_, detail::reports(error)); });
    return chosen();
  }

  /// The same by values that all workers have agreed on, mostly the mean of their values(): they then choose the same
  /// parts, and what one sends is what the server publishes. The library does not communicate; average with one small
  /// allreduce. Throws std::invalid_argument for a number of values other than parts().layers(), and std::logic_error if the
  /// step was selected by this worker's own values, or unless options.decide is at_end.
  const selection& select(std::span<const double> agreed_values) { return select(agreed_values, {}); }
  const selection& select(std::span<const double> agreed_values, std::error_code& error) {
    return select(agreed_values, {}, error);
  }
  /// The same without the parts of which `held` is not 0: they are not sent, whatever R, budget, max_age or always_sent say.
  /// Their elements count as held back first in the search, where N and R·N are those of the whole model; they take nothing
  /// from a budget; their age goes on; and their values are not looked at. Throws also for a number of flags other than
  /// parts().layers(), unless there are none, and for other flags than those that the step was selected with. Flags of the
  /// model's layers, such as find_zero() gives, become flags of parts by cut().by_part(flags).
  const selection& select(std::span<const double> agreed_values, std::span<const char> held) {
    return decider_.decide_agreed(intake_, agreed_values, held, detail::throws());
  }
  const selection& select(std::span<const double> agreed_values, std::span<const char> held,
                          std::error_code& error) {
    reported(error,
             [&] { return &decider_.decide_agreed(intake_, agreed_values, held, detail::reports(error)); });
    return chosen();
  }
  /// The last selection; as_ready, of the parts that are decided.
  [[nodiscard]] const selection& chosen() const noexcept { return decider_.chosen(); }

  /// The frame of this step, pointing into the residual: valid until the next accumulate, commit or encode. Selects by this
  /// worker's values if nothing was selected. Holds all that the step sends, also what went out in parts: for a receiver that has
  /// none of these. Throws as select(). Without memory for the frame there is none, and the step may
  /// be selected: call encode() again.
  const encoded_frame& encode() { return encode(detail::throws()); }
  /// The frame has no bytes on an error.
  const encoded_frame& encode(std::error_code& error) {
    reported(error, [&] { return &encode(detail::reports(error)); });
    if (error) departure_.forget_frame();
    return departure_.frame();
  }

  /// as_ready: a part of the step, before its end: a frame with the parts() sent that were decided since the last call. Points into
  /// the residual and stays valid, as those before it, until commit() or the next step: several may be under way. It holds what
  /// was decided, be that nothing; is_sent() says whether one is worth its 128 bytes and more. Once encode_rest() has ended the
  /// step, begins with all of it again: for a step whose send failed. Throws std::logic_error for another options.decide, and
  /// before the step has a gradient; std::length_error for part 65,536.
  ///
  ///     for each layer l, as its gradient comes:
  ///       compressor.accumulate(l, gradient);
  ///       if (enough was decided to be sent)  send compressor.encode_ready();
  ///     send compressor.encode_rest();
  ///     compressor.commit();   // once all of them have arrived: one commit a step
  const encoded_frame& encode_ready() { return encode_part("encode_ready", false, detail::throws()); }
  /// The frame has no bytes on an error.
  const encoded_frame& encode_ready(std::error_code& error) {
    return encode_part("encode_ready", false, error);
  }
  /// The last part of the step, with all that no part has yet; ends the step as encode() does. Without an encode_ready() before it,
  /// the step in one part. Throws as encode_ready(), and as select().
  const encoded_frame& encode_rest() { return encode_part("encode_rest", true, detail::throws()); }
  const encoded_frame& encode_rest(std::error_code& error) { return encode_part("encode_rest", true, error); }

  /// What encode() would send, without a frame, for collectives: writes the parts sent to `to`, one behind the other, each
  /// element divided by `divisor`. Counts as encode() for commit(). What was received in its place, summed over the workers,
  /// scatter() writes over the gradients. Throws std::logic_error unless select() came before, and std::invalid_argument
  /// unless `to` has chosen().sent_elements() elements and `divisor` and 1 / `divisor` are finite. Cost: one read and one
  /// write of what is sent.
  void pack(std::span<T> to, T divisor = T(1)) {
    if (!detail::may_encode(intake_.phase()))
      detail::raise(std::logic_error("pack: call select() of this step before"));
    check_room(to.size());
    check_divisor("pack", divisor);
    for (const std::size_t part : chosen().sent()) {
      const std::span<const T> from = residual()[part];
      std::copy(from.begin(), from.end(), to.begin());
      if (divisor != T(1)) detail::divide_elements(to.data(), divisor, from.size());
      to = to.subspan(from.size());
    }
    departure_.set_packed();
    intake_.set_phase(detail::step_phase::encoded);
  }

  /// The same in half the bytes: rounded as options.payload says, which must be that type, for a collective that adds such
  /// numbers. As with a frame, commit() leaves in the residual what rounding took away here; what the collective rounds is not
  /// made up for. Divide by the number of workers after it. Throws as above, and std::invalid_argument for another payload.
  template <half_element Half>
  void pack(std::span<Half> to) {
    if (!detail::may_encode(intake_.phase()))
      detail::raise(std::logic_error("pack: call select() of this step before"));
    check_payload("pack", payload_of<Half>);
    check_room(to.size());
    for (const std::size_t part : chosen().sent()) {
      const std::span<const T> from = residual()[part];
      detail::encode_payload<T>(options_.payload, from, std::as_writable_bytes(to).data());
      to = to.subspan(from.size());
    }
    departure_.set_packed(false);
    intake_.set_phase(detail::step_phase::encoded);
  }

  /// ahead: what pack() would write of one layer once this gradient is accumulated, to the last bit: the layer's parts that are
  /// sent, one behind the other. A collective can so begin while the backward pass goes on, and if one of the batch's gradients
  /// turns out bad on any worker, none of it was added: abandon() the step, and throw away what was received. Else go on with
  /// accumulate_all(), plan_next(), encode() and commit(). Reads the residual, and changes nothing; between begin_step() and the
  /// layer's accumulate(). Elements that finite_check::each_element would leave out are left out; other checks write
  /// what comes out. Throws std::logic_error for another options.decide, before begin_step(), or if the layer has its gradient
  /// already; std::invalid_argument for a gradient of another size or type, for a payload other than as_is, and unless `to`
  /// has as many elements as are sent of the layer, the scale is finite, and divisor as for pack(). Cost: one read of the
  /// gradient and of the residual where they are sent, one or two writes.
  ///
  /// \return the elements written: those of `to`
  template <class Tensor>
  std::size_t pack_ahead(std::size_t layer, const Tensor& gradient, std::span<T> to, T divisor = T(1),
                         double scale = 1) {
    check_divisor("pack_ahead", divisor);
    check_payload("pack_ahead", payload_type::as_is);
    const std::size_t written = foresee(layer, gradient, to, scale);
    if (divisor != T(1)) detail::divide_elements(to.data(), divisor, written);
    return written;
  }
  /// The same in half the bytes, rounded as pack() rounds; options.payload must be that type.
  template <class Tensor, half_element Half>
  std::size_t pack_ahead(std::size_t layer, const Tensor& gradient, std::span<Half> to, double scale = 1) {
    check_payload("pack_ahead", payload_of<Half>);
    foreseen_.resize(to.size());
    const std::size_t written = foresee(layer, gradient, foreseen_, scale);
    detail::encode_payload<T>(options_.payload, foreseen_, std::as_writable_bytes(to).data());
    return written;
  }

  /// The frame, or what was packed, has reached its receiver: takes what was sent out of the residual. Throws
  /// std::logic_error unless there is something encoded that was not committed yet.
  void commit() {
    check_encoded();
    commit_parts([this](std::size_t part, const std::byte* bytes) { take_out(part, bytes); });
  }

  /// It has reached its receiver in part: takes out of residual and velocity what has arrived. What was lost stays, and is sent
  /// with the next gradients: delayed, not lost. To be called once no more of the frame can arrive, and once a frame. Of a
  /// complete delivery it is commit(), to the last bit.
  ///
  /// A budget is charged for all that was chosen, which has used the network. A part of which something has arrived was sent,
  /// for max_age; one of which nothing has keeps its age, its place in the queue of a budget as_ready, and its value in
  /// predicted_values(). Ages are then this worker's own: where all are to choose the same parts by agreed values, all need to have
  /// delivered something of the same parts, or max_age = 0.
  ///
  /// Throws std::logic_error as commit(), and std::invalid_argument, changing nothing, unless `arrived` is of chosen() and,
  /// with payload_type::int8 and int4, in chunks of a multiple of payload_block_elements. Cost: one write of what has arrived of parts that
  /// were lost in part; other parts cost what they cost in commit(). Allocates nothing.
  void commit(const delivery& arrived) {
    check_encoded();
    detail::check_delivery("commit", arrived, chosen(),
                           departure_.is_exact() ? payload_type::as_is : options_.payload);
    if (arrived.is_complete()) return commit();
    commit_parts(
        [&](std::size_t part, const std::byte* bytes) {
          const std::size_t lost = arrived.lost_chunks(part);
          if (lost == 0) return take_out(part, bytes);
          if (lost == arrived.chunks(part)) return decider_.take_back(intake_, part);
          take_out(part, bytes, arrived);
        },
        arrived);
  }

  /// Ends a step that cannot be carried out, as when a collective has failed: nothing counts as sent, what was accumulated waits
  /// in the residual, and save() is allowed. Threshold, allowance and ages are as before, or as select() has left them if it
  /// was called; the allowance of a step that is not decided at its end has grown with its beginning. A step in which no layer
  /// got a gradient or was skipped has not begun: number, threshold and what save() gives are those of before. What was chosen and
  /// predicted in the step before that is no longer told. Does nothing between steps, that is, after commit() or abandon().
  void abandon() noexcept {
    if (intake_.phase() == detail::step_phase::committed) return;
    departure_.forget();
    if (intake_.has_nothing()) {
      decider_.selector().take_back(step());
      intake_.take_back();
      return;
    }
    intake_.set_phase(detail::step_phase::committed);
    decider_.abandon(intake_);
  }

  /// The first layer of model() whose gradient holds NaN or infinity, if there is one: what all ranks ask before they add
  /// anything where one bad rank stops all. Changes nothing. Errors as accumulate_all; cost: one read of each gradient.
  template <detail::indexed Tensors, execution Execution = sequential>
  [[nodiscard]] std::optional<std::size_t> first_non_finite(const Tensors& gradients,
                                                            const Execution& execution = {}) const {
    intake_.check_count(std::size(gradients), "gradients", detail::throws());
    return detail::first_non_finite<T>(model(), gradients, execution);
  }
  /// Sets is_zero[l] to 1 for each layer of model() whose gradient is zero throughout, or that has none, and to 0 for the
  /// others. Throws std::invalid_argument also for a number of flags other than model().layers(). select() wants flags of
  /// parts: cut().by_part(is_zero) gives them. Cost: a layer is read up to its first element that is not zero.
  template <detail::indexed Tensors>
  void find_zero(const Tensors& gradients, std::span<char> is_zero) const {
    intake_.check_count(std::size(gradients), "gradients", detail::throws());
    intake_.check_count(is_zero.size(), "flags", detail::throws());
    detail::find_zero<T>(model(), gradients, is_zero);
  }

  /// Everything a later step depends on, as bytes with a checksum; see state.hpp. Between steps alone: throws
  /// std::logic_error while gradients of a step wait to be encoded. A frame that was encoded and not committed counts as
  /// lost. Throws std::domain_error, naming the part, for a residual that holds NaN or infinity, as it may with
  /// finite_check::caller: load() would refuse it. Ahead, throws std::logic_error also while nothing is agreed on for the next
  /// step.
  [[nodiscard]] std::vector<std::byte> save() const {
    detail::check_between_steps(intake_.phase(), step());
    if (!decider_.selector().has_plan()) {
      detail::raise(std::logic_error("save: nothing is agreed on for step " + std::to_string(step() + 1) +
                                     ": call plan_next() before"));
    }
    return save_state<T>(residual(), decider_.selector().remember(), step());
  }

  /// Takes up where a compressor of the same model and options was saved; from then on both do the same, bit for bit. Options that
  /// are not named here are not compared.
  /// Changes nothing and throws decode_error, with a state_errc, for bytes that are damaged, of another model, saved with
  /// momentum where there is none, or with another options.decide; std::invalid_argument if they hold NaN or infinity.
  void load(std::span<const std::byte> bytes) {
    intake_.resume_after(load_state<T>(bytes, intake_.residual(), decider_.selector()));
  }

  /// As given.
  [[nodiscard]] const compressor_options& options() const noexcept { return options_; }
  /// t, counted from 1; 0 before the first accumulate.
  [[nodiscard]] std::uint64_t step() const noexcept { return intake_.step(); }
  /// λ as of the last select(). as_ready it decides the next step, and is minus infinity before one was searched; ahead it is
  /// found when a step begins.
  [[nodiscard]] double threshold() const noexcept { return decider_.selector().threshold(); }
  [[nodiscard]] const residual_accumulator<T>& residual() const noexcept { return intake_.residual(); }
  /// The model given, and what is decided on: the layers themselves, or their parts. Frames are of parts().
  [[nodiscard]] const layout& model() const noexcept { return intake_.model(); }
  [[nodiscard]] const layout& parts() const noexcept { return intake_.parts(); }
  /// Which part is of which layer.
  [[nodiscard]] const partition& cut() const noexcept { return intake_.cut(); }

 private:
  template <half_element Half>
  static constexpr payload_type payload_of =
      std::same_as<Half, bfloat16> ? payload_type::bfloat16 : payload_type::float16;

  void check_room(std::size_t elements) const {
    if (elements == chosen().sent_elements()) return;
    detail::raise(std::invalid_argument("pack: there is room for " + std::to_string(elements) +
                                        " elements, " + std::to_string(chosen().sent_elements()) +
                                        " are sent"));
  }

  template <class Tensor>
  std::size_t foresee(std::size_t layer, const Tensor& gradient, std::span<T> to, double scale) {
    model().check_layer(layer);
    if (options_.decide != decision_timing::ahead) {
      detail::raise(
          std::logic_error("pack_ahead: options.decide is not ahead: it is not known yet what is sent"));
    }
    if (intake_.phase() != detail::step_phase::accumulating) {
      detail::raise(std::logic_error(
          "pack_ahead: call begin_step() before, and pack_ahead() before the step is selected"));
    }
    return intake_.foresee(layer, gradient, scale, to, [this](std::size_t part) { return is_sent(part); });
  }

  void check_encoded() const {
    if (detail::may_commit(intake_.phase()) && departure_.is_complete()) return;
    detail::raise(std::logic_error("commit: no frame to commit in step " + std::to_string(step()) +
                                   "; call encode() before, and commit() once for it"));
  }

  // Calls `take` for each part that was sent, with its bytes on the wire unless it was packed, and ends the step.
  template <class Take, class... Arrived>
  void commit_parts(const Take& take, const Arrived&... arrived) {
    departure_.for_each(chosen(), take);
    decider_.selector().commit(step(), arrived...);
    intake_.set_phase(detail::step_phase::committed);
  }
  void take_out(std::size_t part, const std::byte* bytes) {
    if (departure_.is_exact()) {
      intake_.residual().clear(part);
    } else {
      intake_.residual().subtract(part, options_.payload, bytes);
    }
    intake_.set_sent(part);
  }
  void take_out(std::size_t part, const std::byte* bytes, const delivery& arrived) {
    arrived.for_each_delivered(part, [&](std::size_t begin, std::size_t end) {
      if (departure_.is_exact()) return intake_.residual().clear(part, begin, end);
      intake_.residual().subtract(part, options_.payload, bytes, begin, end);
    });
    intake_.set_sent(part);
  }

  void check_payload(const char* call, payload_type written) const {
    if (options_.payload == written) return;
    detail::raise(std::invalid_argument(std::string(call) +
                                        ": options.payload is another type than the elements to write"));
  }
  static void check_divisor(const char* call, T divisor) {
    if (divisor != T(0) && detail::is_finite(static_cast<double>(divisor)) &&
        detail::is_finite(static_cast<double>(T(1) / divisor))) {
      return;
    }
    detail::raise(
        std::invalid_argument(std::string(call) + ": the divisor must be finite, and 1 / divisor, too"));
  }

  // What a tensor's own library throws, as a code.
  template <class Call>
  static auto reported([[maybe_unused]] std::error_code& error, const Call& call) -> decltype(call()) {
#if LAMINA_HAS_EXCEPTIONS
    try {
      return call();
    } catch (const std::bad_alloc&) {
      error = std::make_error_code(std::errc::not_enough_memory);
    } catch (const std::exception&) {
      error = make_error_code(errc::bad_tensor);
    }
    return {};
#else
    return call();
#endif
  }

  template <class Fail>
  const encoded_frame& encode(const Fail& fail) {
    if (intake_.require_open_step("encode", fail) && intake_.phase() == detail::step_phase::accumulating)
      decider_.decide_own(intake_, fail);
    if (fail.has_failed()) {
      departure_.forget_frame();
      return departure_.frame();
    }
    const encoded_frame& frame = departure_.encode(step(), chosen(), residual());
    intake_.set_phase(detail::step_phase::encoded);
    return frame;
  }

  template <class Fail>
  const encoded_frame& encode_part(const char* call, bool is_last, const Fail& fail) {
    departure_.forget_frame();  // what is given back on an error
    if (options_.decide != decision_timing::as_ready) {
      fail(errc::out_of_order, [&] {
        return std::logic_error(std::string(call) +
                                ": options.decide is not as_ready: call encode() at the end of the step");
      });
    } else if (intake_.require_open_step(call, fail) && is_last &&
               intake_.phase() == detail::step_phase::accumulating) {
      decider_.decide_own(intake_, fail);
    }
    if (fail.has_failed()) return departure_.frame();
    decided_.clear();
    for (std::size_t part = 0; part < parts().layers(); ++part) {
      if (is_decided(part)) decided_.send(part);
    }
    const encoded_frame& frame = departure_.encode_part(step(), chosen(), decided_, is_last, residual());
    if (is_last) intake_.set_phase(detail::step_phase::encoded);
    return frame;
  }
  const encoded_frame& encode_part(const char* call, bool is_last, std::error_code& error) {
    const encoded_frame* frame =
        reported(error, [&] { return &encode_part(call, is_last, detail::reports(error)); });
    return error ? departure_.frame() : *frame;
  }

  compressor_options options_;
  detail::gradient_intake<T, Representative> intake_;
  detail::step_decider decider_;
  detail::departure<T> departure_;
  selection decided_;        // by the end of the part that is encoded
  std::vector<T> foreseen_;  // what pack_ahead() rounds
};

}  // namespace lamina::inline LAMINA_ABI
