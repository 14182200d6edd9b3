// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <optional>
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
#include "lamina/detail/raise.hpp"
#include "lamina/execution.hpp"
#include "lamina/frame.hpp"
#include "lamina/fwd.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/residual/gradient.hpp"
#include "lamina/scatter.hpp"
#include "lamina/selection.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"
#include "lamina/tiling.hpp"

/// A worker and its step: gradients in, a frame out, the rest in the residual. Read residual.hpp and decision.hpp before.
namespace lamina::inline LAMINA_ABI {

/// The worker's side of layer dropping. Each gradient is added to a residual; the layers whose representative value reaches the
/// threshold are sent whole, and once they have arrived their residual is cleared. The others stay, and nothing is lost.
///
///     lamina::worker<float> worker(model, {.drop_ratio = 0.95});
///     auto step = worker.add(gradients);         // all layers or, where one is refused, none
///     if (!step) { log(step.refused_layer()); continue; }
///     send(step.frame().segments());             // points into the residual: nothing is copied
///     step.commit();                             // a step that is not committed stays in the residual
///
/// Layers larger than options.fragment_elements are cut into fragments; values, selections and frames are of fragments().
/// One thread at a time. Allocates nothing after the first step with payload_type::as_is.
///
/// Mistakes throw, and then nothing has changed: std::out_of_range for an index, std::invalid_argument for a tensor of another
/// size, type or device and for a number outside its range, std::logic_error for a call whose step is over.
template <element T, class Representative>
class worker {
  static_assert(
      representative<Representative>,
      "lamina: the functor of a worker must have map, combine and finish as lamina/concepts.hpp says");
  struct state;

 public:
  class step;

  /// Throws std::invalid_argument, naming the option, for one outside its range, and for a model without layers.
  explicit worker(const layout& model, const worker_options& options = {}, Representative functor = {})
      : state_(std::make_unique<state>(model, options, std::move(functor))) {}

  /// Begins a step with the gradients of all layers, and decides nothing yet. All are added or, where one holds NaN or infinity
  /// or would overflow the residual, none: the step is then empty and names the layer. The gradients are read once, so that what
  /// was added of a refused batch is subtracted again: non_finite::refuse says how little of it is left.
  ///
  /// \param gradients  a range with a tensor for each layer, of T, float16 or bfloat16. An empty std::optional, or a framework's
  ///                   tensor that is not defined, is a layer without a gradient
  /// \param scale      multiplies each element, as a T, before it is added: 1 / loss scale, 1 / micro-batches
  /// \param execution  runs the blocks of the layers: execution.hpp
  ///
  /// Cost: one pass over gradients and residual. Throws std::logic_error while another step is open.
  template <detail::indexed Tensors, execution Execution = sequential>
  [[nodiscard]] step add(const Tensors& gradients, double scale = 1, const Execution& execution = {}) {
    state_->require_closed("add");
    const std::optional<std::size_t> refused = state_->add_all(gradients, scale, execution);
    step begun(*state_, refused);
    state_->rethrow();
    return begun;
  }
  /// The same of tensors of several types: worker.add({xt::xarray<float>{...}, Eigen::MatrixXf{...}, torch_tensor}).
  template <execution Execution = sequential>
  [[nodiscard]] step add(std::initializer_list<tensor_ref<T>> gradients, double scale = 1,
                         const Execution& execution = {}) {
    return add(std::span(gradients.begin(), gradients.size()), scale, execution);
  }
  /// Begins a step whose gradients come one by one: step::add.
  [[nodiscard]] step begin() {
    state_->begin("begin");
    return step(*state_, std::nullopt);
  }
  /// The same with the selection known, so that each fragment can be sent as soon as it has its gradient.
  ///
  ///     auto step = worker.begin(worker.plan());
  ///     for each layer, as backward yields it:  step.add(layer, gradient);  if (step.is_sent(fragment)) send(step.fragment(fragment));
  ///     step.commit();
  [[nodiscard]] step begin(const selection& sent) {
    state_->require_closed("begin");
    state_->decisions.take(state_->number + 1, sent);
    state_->begin("begin");
    state_->is_selected = state_->is_given = true;
    return step(*state_, std::nullopt);
  }

  /// Between steps: the representative values to expect in the next step, as selector::forecast() has them after a commit; infinite
  /// before the first. Writable: agreed values, the mean over the workers, take the place of a worker's own, and plan() decides by them.
  [[nodiscard]] std::span<double> values() {
    state_->require_closed("values");
    return state_->expected;
  }
  /// Between steps: selects what the next step sends, by values(). Before the first step everything is sent. The selection is valid until
  /// the worker decides again.
  [[nodiscard]] const selection& plan() {
    state_->require_closed("plan");
    state_->is_selected = false;
    return state_->decisions.decide(state_->number + 1, state_->expected);
  }

  /// Everything a later step depends on, as bytes with a checksum: residual, velocity, threshold, ages, allowance, values(). Throws
  /// std::logic_error while a step is open.
  [[nodiscard]] std::vector<std::byte> save() const {
    state_->require_closed("save");
    const state& s = *state_;
    return save_state<T>(fragments(), s.decisions.remember(s.number), s.residual.elements(),
                         s.residual.velocity(), s.number, s.expected);
  }
  /// Goes on where a worker of the same model and options was saved; both then do the same, bitwise. Bytes that are damaged or
  /// of another model throw decode_error, and change nothing.
  void load(std::span<const std::byte> bytes) {
    state_->require_closed("load");
    state_->load(bytes);
  }

  /// The next step is number `next`: for a worker that a server went on without. Throws std::invalid_argument for one that is over.
  void skip_to(std::uint64_t next) {
    state_->require_closed("skip_to");
    if (next <= state_->number) {
      detail::raise(std::invalid_argument("skip_to: step " + std::to_string(next) +
                                          " is over: the last was " + std::to_string(state_->number)));
    }
    state_->number = next - 1;
  }

  /// The steps that were committed, or skipped, and the one that is open.
  [[nodiscard]] std::uint64_t steps() const noexcept { return state_->number; }
  /// λ of the last decision.
  [[nodiscard]] double threshold() const noexcept { return state_->decisions.threshold(); }
  [[nodiscard]] const worker_options& options() const noexcept { return state_->options; }
  /// a_l of each fragment; see residual.hpp.
  [[nodiscard]] const residual_accumulator<T>& residual() const noexcept { return state_->residual; }
  [[nodiscard]] const layout& model() const noexcept { return state_->cut.model(); }
  /// What is decided and sent: the layers, or their fragments; and which of them are of which layer.
  [[nodiscard]] const layout& fragments() const noexcept { return state_->cut.fragments(); }
  [[nodiscard]] const tiling& tiles() const noexcept { return state_->cut; }

 private:
  std::unique_ptr<state> state_;  // so that a step outlives a move of its worker
};

/// One step of a worker. Moves, and does not copy; as long as it is open the worker begins no other. Ends with commit(), or,
/// uncommitted, with its lifetime: what was added then stays in the residual, and the next step has the same number, so that a receiver which
/// has got a frame of it after all refuses a second one. After commit() what was selected can be read, and
/// unpack() called, until the next step begins or is planned. Must not outlive the worker.
template <element T, class Representative>
class worker<T, Representative>::step {
 public:
  step(step&& other) noexcept
      : state_(std::exchange(other.state_, nullptr)),
        number_(other.number_),
        opening_(other.opening_),
        refused_(other.refused_) {}
  step& operator=(step&& other) noexcept {
    if (this == &other) return *this;
    end();
    state_ = std::exchange(other.state_, nullptr);
    number_ = other.number_;
    opening_ = other.opening_;
    refused_ = other.refused_;
    return *this;
  }
  ~step() { end(); }

  /// False where the last add() was refused.
  [[nodiscard]] explicit operator bool() const noexcept { return !refused_; }
  /// The layer whose gradient the last add() refused. Throws std::logic_error if it was taken.
  [[nodiscard]] std::size_t refused_layer() const {
    if (!refused_) detail::raise(std::logic_error("refused_layer: no gradient was refused"));
    return *refused_;
  }
  /// t, counted from 1.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

  /// Adds the gradient of one layer, or of one micro-batch more. Returns whether it was taken; other layers keep theirs.
  template <class Tensor, execution Execution = sequential>
  bool add(std::size_t layer, const Tensor& gradient, double scale = 1, const Execution& execution = {}) {
    state& s = open_to_gradients("add");
    s.require_here("add", layer);
    refused_ = s.add_one(layer, gradient, scale, execution);
    s.rethrow();
    return !refused_;
  }
  /// The same of all layers: worker::add.
  template <detail::indexed Tensors, execution Execution = sequential>
  bool add(const Tensors& gradients, double scale = 1, const Execution& execution = {}) {
    state& s = open_to_gradients("add");
    for (std::size_t layer = 0; layer < s.cut.model().layers(); ++layer) s.require_here("add", layer);
    refused_ = s.add_all(gradients, scale, execution);
    s.rethrow();
    return !refused_;
  }
  /// A layer has no gradient in this step: an expert without input. It may be sent all the same.
  void skip(std::size_t layer) { open_to_gradients("skip").skip(layer); }

  /// The representative value of each fragment. Writable: agreed values, the mean over the workers, take the place of this
  /// worker's own, and all workers then select the same. Throws std::logic_error, naming the layer, before all layers have a gradient.
  [[nodiscard]] std::span<double> values() {
    state& s = open("values");
    s.require_all("values");
    s.use_own_values();
    return s.decision_values;
  }
  /// Decides by values() what is sent; again, or with the selection given, changes nothing.
  ///
  /// \param held  a flag for each fragment, or none: those of which it is not 0 are not sent
  const selection& select(std::span<const char> held = {}) {
    state& s = open("select");
    if (!s.is_selected) {
      s.require_all("select");
      s.use_own_values();
      s.decisions.decide(number_, s.decision_values, held);
      s.is_selected = true;
    }
    return s.decisions.sent();
  }
  /// What the step sends. Throws std::logic_error before it is selected.
  [[nodiscard]] const selection& sent() const { return selected("sent").decisions.sent(); }
  [[nodiscard]] bool is_sent(std::size_t fragment) const { return sent().is_sent(fragment); }

  /// The residual of a fragment that has its gradient, as long as the step is open.
  [[nodiscard]] std::span<const T> fragment(std::size_t fragment) const {
    state& s = open("fragment");
    s.require_gradient("fragment", fragment);
    return s.residual[fragment];
  }

  /// The frame of the step: a header, and the fragments where they lie. Selects if nothing was selected. Valid until the step ends;
  /// called again, for a send that is tried again, gives the same bytes.
  ///
  /// \param user  up to 64 bytes that travel in the frame: frame_view::user()
  const encoded_frame& frame(std::span<const std::byte> user = {}) {
    state& s = open("frame");
    s.require_all("frame");
    select();
    s.sequence = 0;
    return s.encode(s.decisions.sent(), true, user);
  }
  /// One of several frames of the step: those of `fragments` that are selected, all of which have their gradient and were in no frame
  /// before. The last, which may be empty, is flagged: what was in none is dropped. All stay valid until the step ends. Throws
  /// std::logic_error before the step is selected, and for a fragment that was in a frame.
  const encoded_frame& frame(const selection& fragments, bool is_last, std::span<const std::byte> user = {}) {
    state& s = selected("frame");
    require_open("frame");
    return s.encode_some(fragments, is_last, user);
  }

  /// Writes the fragments that are sent one behind the other, each element times `scale`, for a sum over the workers that have
  /// agreed on the selection. Throws std::logic_error before the step is selected, and std::invalid_argument unless `to` has
  /// sent().sent_elements() elements; a std::vector is resized.
  std::span<T> pack(std::span<T> to, T scale = T(1)) {
    state& s = packable(to.size());
    if (!detail::is_finite(static_cast<double>(scale)))
      detail::raise(std::invalid_argument("pack: the scale must be finite"));
    T* out = to.data();
    for (const std::size_t f : s.decisions.sent().sent()) {
      const std::span<const T> from = s.residual[f];
      for (std::size_t i = 0; i < from.size(); ++i) out[i] = scale == T(1) ? from[i] : from[i] * scale;
      out += from.size();
    }
    s.leave(true);
    return to;
  }
  std::span<T> pack(std::vector<T>& to, T scale = T(1)) {
    to.resize(sent().sent_elements());
    return pack(std::span(to), scale);
  }
  /// The same in half the bytes, rounded as options.payload says, which must be that type; commit() leaves in the residual what
  /// this rounding took away. Divide by the number of workers after the sum.
  template <half_element Half>
  std::span<Half> pack(std::span<Half> to) {
    state& s = packable(to.size());
    constexpr payload_type written =
        std::same_as<Half, bfloat16> ? payload_type::bfloat16 : payload_type::float16;
    if (s.options.payload != written)
      detail::raise(
          std::invalid_argument("pack: options.payload is another type than the elements to write"));
    auto* out = reinterpret_cast<std::byte*>(to.data());
    for (const std::size_t f : s.decisions.sent().sent()) {
      detail::encode_payload<T>(written, s.residual[f], out);
      out += s.residual[f].size() * sizeof(Half);
    }
    s.leave(false);
    return to;
  }
  template <half_element Half>
  std::span<Half> pack(std::vector<Half>& to) {
    to.resize(sent().sent_elements());
    return pack(std::span(to));
  }
  /// Writes what came back in place of pack()'s elements over the gradients, and zeros where nothing was sent. `gradients` has a
  /// tensor to write for each layer. Also after commit().
  template <class Tensors>
  void unpack(std::span<const T> packed, Tensors&& gradients) const {
    const state& s = selected("unpack");
    scatter<T>(s.decisions.sent(), s.cut, packed, gradients);
  }

  /// What was selected has arrived: its residual is cleared, but for what a rounded payload took away. Ends the step. Throws
  /// std::logic_error before it is selected, and with a rounded payload before frame() or pack(), unless the selection was given to
  /// begin(): what fragment() gave is then taken for written in that payload.
  void commit() {
    state& s = committable();
    s.make_room_for_written();
    for (const std::size_t f : s.decisions.sent().sent()) {
      s.write(f);
      s.take_out(f, 0, s.cut.fragments().sizes()[f]);
    }
    s.expect_after_commit();
    s.decisions.commit(number_);
    s.close();
  }
  /// It has arrived in part: what was lost stays in the residual and is sent with the next gradients. Throws also
  /// std::invalid_argument for the delivery of another selection. Cost: one write of what has arrived of a damaged fragment.
  void commit(const delivery& arrived) {
    state& s = committable();
    detail::check_delivery("commit", arrived, s.decisions.sent(),
                           s.is_exact ? payload_type::as_is : s.options.payload);
    s.make_room_for_written();
    for (const std::size_t f : s.decisions.sent().sent()) {
      if (arrived.lost_chunks(f) == arrived.chunks(f)) continue;
      s.write(f);
      arrived.for_each_delivered(f, [&](std::size_t begin, std::size_t end) { s.take_out(f, begin, end); });
    }
    s.expect_after_commit();
    s.decisions.commit(number_, arrived);
    s.close();
  }

 private:
  friend class worker;
  step(state& of, std::optional<std::size_t> refused) noexcept
      : state_(&of), number_(of.number), opening_(of.opening), refused_(refused) {
    if (refused && !of.is_open) state_ = nullptr;  // it has not begun
  }

  void end() noexcept {
    if (state_ != nullptr && state_->is_open && state_->opening == opening_) state_->abandon();
    state_ = nullptr;
  }
  state& open(const char* call) const {
    if (state_ == nullptr) detail::raise(std::logic_error(std::string(call) + ": this handle has no step"));
    require_open(call);
    return *state_;
  }
  void require_open(const char* call) const {
    if (state_->is_open && state_->opening == opening_) return;
    detail::raise(std::logic_error(std::string(call) + ": step " + std::to_string(number_) + " is over"));
  }
  state& open_to_gradients(const char* call) const {
    state& s = open(call);
    if (s.is_selected && !s.is_given) {
      detail::raise(std::logic_error(std::string(call) + ": step " + std::to_string(number_) +
                                     " is selected already: its gradients come before"));
    }
    return s;
  }
  state& selected(const char* call) const {
    if (state_ == nullptr || state_->opening != opening_ || !state_->is_selected) {
      detail::raise(std::logic_error(std::string(call) + ": step " + std::to_string(number_) +
                                     " is not selected, or is over: call select() first"));
    }
    return *state_;
  }
  state& packable(std::size_t room) const {
    state& s = selected("pack");
    require_open("pack");
    s.require_all("pack");
    if (room != s.decisions.sent().sent_elements()) {
      detail::raise(std::invalid_argument("pack: there is room for " + std::to_string(room) +
                                          " elements, and " +
                                          std::to_string(s.decisions.sent().sent_elements()) + " are sent"));
    }
    return s;
  }
  state& committable() const {
    state& s = open("commit");
    (void)selected("commit");
    s.require_all("commit");
    if (s.options.payload != payload_type::as_is && !s.has_left && !s.is_given)
      detail::raise(std::logic_error("commit: nothing was written yet: call frame() or pack() first"));
    return s;
  }

  state* state_;
  std::uint64_t number_;
  std::uint64_t opening_;
  std::optional<std::size_t> refused_;
};

template <element T, class Representative>
struct worker<T, Representative>::state {
  state(const layout& model, const worker_options& given, Representative of_values)
      : options(given),
        functor(std::move(of_values)),
        cut(model, given.fragment_elements),
        residual(cut.fragments(),
                 {.non_finite = given.non_finite, .momentum = given.momentum, .memory = given.memory}),
        decisions(cut, given),
        in_frames(cut.fragments()),
        in_next(cut.fragments()),
        values(cut.fragments().layers()),
        decision_values(cut.fragments().layers()),
        expected(cut.fragments().layers(), detail::infinite_value),
        marks(cut.fragments().layers()),
        is_stale(cut.fragments().layers(), char{1}) {
    if (model.layers() == 0)
      detail::raise(std::invalid_argument("a model without layers has nothing to compress"));
    detail::check_payload_type(given.payload);
  }

  enum class mark : char { none, skipped, gradient };

  void require_closed(const char* call) const {
    if (!is_open) return;
    detail::raise(std::logic_error(std::string(call) + ": step " + std::to_string(number) +
                                   " is open: commit() it, or let its handle go"));
  }
  void require_gradient(const char* call, std::size_t f) const {
    cut.fragments().check_layer(f);
    if (marks[f] != mark::none || cut.fragments().sizes()[f] == 0) return;
    detail::raise(std::logic_error(std::string(call) + ": layer '" + cut.model()[cut.layer_of(f)].name +
                                   "' has no gradient in step " + std::to_string(number) +
                                   "; add() or skip() it"));
  }
  // A frame points into the residual, which must not change under it.
  void require_here(const char* call, std::size_t layer) const {
    cut.model().check_layer(layer);
    if (!has_left) return;
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) {
      if (!(sequence == 0 ? decisions.sent() : in_frames).is_sent(f)) continue;
      detail::raise(std::logic_error(std::string(call) + ": layer '" + cut.model()[layer].name +
                                     "' was in a frame of step " + std::to_string(number) + " already"));
    }
  }
  void require_all(const char* call) const {
    for (std::size_t f = 0; f < marks.size(); ++f) require_gradient(call, f);
  }

  void begin(const char* call) {
    require_closed(call);
    residual.begin_step();
    open();
  }
  void open() noexcept {
    ++number;
    ++opening;
    std::fill(marks.begin(), marks.end(), mark::none);
    is_open = true;
    is_selected = is_given = has_left = is_exact = has_decision_values = false;
    sequence = 0;
  }
  void close() noexcept { is_open = has_decision_values = false; }
  // Its number is that of the next step: whoever has got a frame of it refuses another.
  void abandon() noexcept {
    close();
    is_selected = false;
    --number;
  }
  void leave(bool exactly) noexcept {
    has_left = true;
    is_exact = exactly;
  }

  const encoded_frame& encode(const selection& sent, bool is_last, std::span<const std::byte> user) {
    if (sequence == encoders.size())
      encoders.push_back(std::make_unique<frame_encoder<T>>(cut.fragments(), options.run));
    const encoded_frame& frame =
        encoders[sequence]->encode({.kind = frame_kind::gradients,
                                    .step = number,
                                    .sender = options.sender,
                                    .payload = options.payload,
                                    .checksum = options.frame_checksum,
                                    .sequence = sequence,
                                    .is_last = is_last,
                                    .user = user},
                                   sent, [this](std::size_t f) { return residual[f]; });
    leave(options.payload == payload_type::as_is);
    return frame;
  }
  const encoded_frame& encode_some(const selection& fragments, bool is_last,
                                   std::span<const std::byte> user) {
    if (fragments.model().fingerprint() != cut.fragments().fingerprint())
      detail::raise(std::invalid_argument("frame: the selection is of another layout than the worker's"));
    if (sequence == 0xffff) detail::raise(std::length_error("frame: a step has at most 65,535 frames"));
    if (sequence == 0) in_frames.clear();
    if (is_last) require_all("frame");
    in_next.clear();
    for (const std::size_t f : fragments.sent()) {
      if (!decisions.sent().is_sent(f)) continue;
      require_gradient("frame", f);
      if (in_frames.is_sent(f)) {
        detail::raise(std::logic_error("frame: '" + cut.fragments()[f].name + "' was in a frame of step " +
                                       std::to_string(number) + " already"));
      }
      in_next.send(f);
    }
    const encoded_frame& frame = encode(in_next, is_last, user);
    for (const std::size_t f : in_next.sent()) in_frames.send(f);
    ++sequence;
    return frame;
  }

  template <class Tensors, class Execution>
  std::optional<std::size_t> add_all(const Tensors& gradients, double scale, const Execution& execution) {
    if (std::size(gradients) != cut.model().layers()) {
      detail::raise(std::invalid_argument("the model has " + std::to_string(cut.model().layers()) +
                                          " layers, got " + std::to_string(std::size(gradients)) +
                                          " gradients"));
    }
    return add(
        0, cut.model().layers(),
        [&](std::size_t layer, const auto& visitor) {
          const auto& tensor = std::begin(gradients)[static_cast<std::ptrdiff_t>(layer)];
          if (detail::has_value(tensor)) detail::visit_gradient<T>(tensor, visitor);
        },
        scale, execution, true);
  }
  template <class Tensor, class Execution>
  std::optional<std::size_t> add_one(std::size_t layer, const Tensor& gradient, double scale,
                                     const Execution& execution) {
    cut.model().check_layer(layer);
    if (!detail::has_value(gradient)) {
      detail::raise(std::invalid_argument("layer '" + cut.model()[layer].name +
                                          "': there is no tensor to add; skip() it"));
    }
    return add(
        layer, layer + 1,
        [&](std::size_t, const auto& visitor) { detail::visit_gradient<T>(gradient, visitor); }, scale,
        execution, false);
  }
  template <class Gradients, class Execution>
  std::optional<std::size_t> add(std::size_t first, std::size_t last, const Gradients& gradients,
                                 double scale, const Execution& execution, bool may_lack_gradients) {
    for (std::size_t layer = first; layer < last; ++layer)
      gradients(layer, [&](auto from) { cut.model().check_size(layer, from.size()); });
    const auto by_fragment = [&](std::size_t f, const auto& visitor) {
      gradients(cut.layer_of(f),
                [&](auto from) { visitor(from.subspan(cut.begin(f), cut.fragments().sizes()[f])); });
    };
    const std::size_t begin = cut.first(first);
    const std::size_t end = cut.first(last);
    if (!is_open) residual.begin_step();
    const std::optional<std::size_t> refused =
        residual.try_add(begin, end, by_fragment, std::span(values).subspan(begin, end - begin), functor,
                         execution, scale, may_lack_gradients, thrown);
    if (refused) {
      // What rounding leaves of a refused gradient is of the residual, and so of its value.
      for (std::size_t f = begin; f < end; ++f) {
        if (residual.was_given(f)) is_stale[f] = 1;
        if (is_open && marks[f] != mark::none) refresh(f);
      }
      return cut.layer_of(*refused);
    }
    if (!is_open) open();
    has_decision_values = false;
    for (std::size_t f = begin; f < end; ++f) {
      if (!residual.was_given(f)) {
        skip_fragment(f);
      } else {
        marks[f] = mark::gradient;
        is_stale[f] = 0;
      }
    }
    return std::nullopt;
  }
  // What an execution of the caller's threw, all being added.
  void rethrow() {
#if LAMINA_HAS_EXCEPTIONS
    if (thrown) std::rethrow_exception(std::exchange(thrown, nullptr));
#endif
  }
  void skip(std::size_t layer) {
    cut.model().check_layer(layer);
    has_decision_values = false;
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) skip_fragment(f);
  }
  void skip_fragment(std::size_t f) {
    if (marks[f] == mark::none) marks[f] = mark::skipped;
    refresh(f);
  }
  // The value of a fragment whose residual has changed since its value was computed.
  void refresh(std::size_t f) {
    if (is_stale[f] == 0) return;
    is_stale[f] = 0;
    values[f] = residual.is_clear(f) ? detail::value_of_zeros<T>(functor, cut.fragments().sizes()[f])
                                     : representative_value(functor, residual[f]);
  }
  void use_own_values() {
    if (has_decision_values) return;
    std::copy(values.begin(), values.end(), decision_values.begin());
    has_decision_values = true;
  }
  // With values that are this worker's own, whatever was agreed for the step that ends.
  void expect_after_commit() {
    decisions.forecast(number, values, expected);
  }

  bool is_rounded() const noexcept {
    return !is_exact && options.payload != payload_type::as_is;
  }
  // Before the first fragment is taken out: a commit that runs out of memory changes nothing.
  void make_room_for_written() {
    if (!is_rounded()) return;
    std::size_t most = written.size();
    for (const std::size_t f : decisions.sent().sent())
      most = (std::max)(most, payload_bytes<T>(options.payload, cut.fragments().sizes()[f]));
    written.resize(most);
  }
  // What a rounded payload says of a fragment, computed anew, so that a frame need not live until commit().
  void write(std::size_t f) {
    if (is_rounded()) detail::encode_payload<T>(options.payload, residual[f], written.data());
  }
  void take_out(std::size_t f, std::size_t begin, std::size_t end) {
    is_stale[f] = 1;
    const bool is_whole = begin == 0 && end == cut.fragments().sizes()[f];
    if (!is_rounded()) return is_whole ? residual.clear(f) : residual.clear(f, begin, end);
    if (is_whole) return residual.subtract(f, options.payload, written.data());
    residual.subtract(f, options.payload, written.data(), begin, end);
  }

  void load(std::span<const std::byte> bytes) {
    // Of no elements there is no velocity to save.
    const bool has_velocity = residual.has_velocity() && cut.model().elements() > 0;
    saved_state<T> saved = read_state<T>(bytes, cut.fragments(), has_velocity);
    residual.restore(saved.residual, saved.velocity);
    decisions.restore(std::move(saved.memory));
    number = saved.step;
    if (saved.expected.empty()) saved.expected.assign(expected.size(), detail::infinite_value);
    expected = std::move(saved.expected);
    std::fill(is_stale.begin(), is_stale.end(), char{1});
    is_selected = has_decision_values = false;
  }

  worker_options options;
  Representative functor;
  tiling cut;
  residual_accumulator<T> residual;
  selector decisions;
  std::vector<std::unique_ptr<frame_encoder<T>>> encoders;  // of the frames of a step
  selection in_frames;  // what has left in frames of which the last is to come
  selection in_next;
  std::uint16_t sequence = 0;           // of the next frame
  std::vector<double> values;           // of the residual, where it is not stale
  std::vector<double> decision_values;  // what is decided by: a copy, which agreed values may replace
  std::vector<double> expected;         // of the next step
  std::vector<mark> marks;
  std::vector<char> is_stale;
  std::vector<std::byte> written;  // of a fragment that is committed
  std::uint64_t number = 0;        // of the step that is open, or was last
  std::uint64_t opening = 0;       // tells handles apart, since load() can make a number come again
  bool is_open = false;
  bool is_selected = false;
  bool is_given = false;  // selected before the first gradient
  bool has_left = false;  // as a frame, or packed
  bool is_exact = false;  // without rounding
  bool has_decision_values = false;
  std::exception_ptr thrown;
};

}  // namespace lamina::inline LAMINA_ABI
