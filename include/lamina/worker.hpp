// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/detail/worker_state.hpp"

/// A worker and its step: gradients in, a frame out, and what was not sent in the residual. Read residual.hpp and decision.hpp before.
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
/// Mistakes throw, and then nothing has changed: std::out_of_range for an index, std::invalid_argument for a tensor of another size, type
/// or device and for a number outside its range, std::logic_error for a call that comes too early, or too late.
template <element T, class Representative>
class worker {
  static_assert(
      representative<Representative>,
      "lamina: the functor of a worker must have map, combine and finish as lamina/representative.hpp says");
  using state = detail::worker_state<T, Representative>;

 public:
  class step;

  /// Throws std::invalid_argument, naming the option, for one outside its range, and for a model without layers.
  explicit worker(const layout& model, const worker_options& options = {}, Representative functor = {})
      : state_(std::make_unique<state>(model, options, std::move(functor))) {}

  /// Begins a step with the gradients of all layers, and decides nothing yet. All are added or, where one holds NaN or infinity or would
  /// overflow the residual, none, to within the rounding that non_finite::refuse says: the step is then empty and names the layer. A
  /// synchronous server goes on without this worker by update(), and the worker by skip_to().
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
    step begun(*state_, state_->add_all(gradients, scale, execution));
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

  /// Between steps: the values to expect in the next step, as selector::forecast() has them; infinite before the first. Writable: agreed
  /// values, the mean over the workers, take the place of a worker's own, and plan() decides by them.
  [[nodiscard]] std::span<double> values() {
    state_->require_closed("values");
    return state_->expected;
  }
  /// Between steps: selects what the next step sends, by values(). The selection is valid until the worker decides again.
  [[nodiscard]] const selection& plan() {
    state_->require_closed("plan");
    state_->is_selected = false;
    return state_->decisions.decide(state_->number + 1, state_->expected);
  }

  /// Between steps: writes a server's reply over the parameters of this worker, as lamina::apply() of codec.hpp does. The reply must be of
  /// the step that comes next. Returns the elements that were overwritten. Throws decode_error for any other bytes.
  template <class Tensors>
  std::size_t apply(std::span<const std::byte> reply, Tensors&& parameters) const {
    state_->require_closed("apply");
    return lamina::apply<T>(reply, tiles(), steps() + 1, parameters, options().run);
  }

  /// Between steps: everything a later step depends on, as bytes with a checksum: residual, velocity, threshold, ages, allowance, values().
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

  /// The next step is number `next`: for a worker that a server went on without, after a refused gradient or a late frame. The residual
  /// stays, and is sent later. Throws std::invalid_argument for one that is over.
  void skip_to(std::uint64_t next) {
    state_->require_closed("skip_to");
    if (next <= state_->number)
      detail::refuse("skip_to: step ", next, " is over: the last was ", state_->number);
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

/// One step of a worker. Moves, and does not copy; as long as it is open the worker begins no other. Ends with commit(), or, uncommitted,
/// with its lifetime: what was added then stays in the residual, and the next step has the same number, so that a receiver which has got a
/// frame of it after all refuses a second one. A frame whose fate is not known is sent again before the next add(): errc::duplicate_frame
/// then means that it had arrived, and that the step is to be committed. After commit() what was selected can be read, and unpack() called,
/// until the next step begins or is planned. Must not outlive the worker. A call that needs a gradient which is missing throws, and
/// names the layer.
template <element T, class Representative>
class worker<T, Representative>::step {
 public:
  /// False where the last add() was refused.
  [[nodiscard]] explicit operator bool() const noexcept { return !refused_; }
  /// The layer whose gradient the last add() refused.
  [[nodiscard]] std::size_t refused_layer() const {
    if (!refused_) detail::refuse<std::logic_error>("refused_layer: no gradient was refused");
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

  /// The representative value of each fragment, once all layers have a gradient. Writable: agreed values, the mean over the workers, take
  /// the place of this worker's own, and all workers then select the same.
  [[nodiscard]] std::span<double> values() { return open_with_values("values").decision_values; }
  /// Decides by values() what is sent; again, or with the selection given, changes nothing.
  ///
  /// \param held  a flag for each fragment, or none: those of which it is not 0 are not sent
  const selection& select(std::span<const char> held = {}) {
    if (!open("select").is_selected) {
      state& s = open_with_values("select");
      s.decisions.decide(number_, s.decision_values, held);
      s.is_selected = true;
    }
    return state_->decisions.sent();
  }
  /// What the step sends, once it is selected.
  [[nodiscard]] const selection& sent() const { return selected("sent").decisions.sent(); }
  [[nodiscard]] bool is_sent(std::size_t fragment) const { return sent().is_sent(fragment); }

  /// The residual of a fragment that has its gradient, as long as the step is open.
  [[nodiscard]] std::span<const T> fragment(std::size_t fragment) const {
    state& s = open("fragment");
    s.require_gradient("fragment", fragment);
    return s.residual[fragment];
  }

  /// The frame of the step: a header, and the fragments where they lie. Selects if nothing was selected. Valid until the step ends; called
  /// again gives the same bytes.
  ///
  /// \param user  up to 64 bytes that travel in the frame: frame_view::user()
  const encoded_frame& frame(std::span<const std::byte> user = {}) {
    state& s = open("frame");
    s.require_all("frame");
    select();
    s.sequence = 0;
    return s.encode(s.decisions.sent(), true, user);
  }
  /// One of several frames of a step that is selected: those of `fragments` that are sent, all of which have their gradient and were in no
  /// frame before. The last, which may be empty, is flagged: what was in none is dropped. All stay valid until the step ends.
  const encoded_frame& frame(const selection& fragments, bool is_last, std::span<const std::byte> user = {}) {
    open("frame");
    return selected("frame").encode(fragments, is_last, user);
  }

  /// Writes the fragments that are sent one behind the other, each element times `scale`, for a sum over the workers that have agreed on
  /// the selection; returns the span. `to` is a span of sent().sent_elements() elements of T, or a std::vector<T>, which is resized.
  template <class Elements>
  requires std::convertible_to<Elements&, std::span<T>> std::span<T> pack(Elements&& to, T scale = T(1)) {
    if (!detail::is_finite(static_cast<double>(scale))) detail::refuse("pack: the scale must be finite");
    const std::span<T> all = packable(to);
    T* out = all.data();
    for (const std::size_t f : sent().sent())
      for (const T each : state_->residual[f]) *out++ = scale == T(1) ? each : each * scale;
    state_->leave_packed(state::left::exact);
    return all;
  }
  /// The same in half the bytes, to lamina::float16 or bfloat16, which options.payload must be; commit() leaves in the residual what this
  /// rounding took away. Divide by the number of workers after the sum.
  template <class Elements, half_element Half = typename std::remove_cvref_t<Elements>::value_type>
  std::span<Half> pack(Elements&& to) {
    constexpr payload_type written =
        std::same_as<Half, bfloat16> ? payload_type::bfloat16 : payload_type::float16;
    const std::span<Half> all = packable(to);
    if (state_->options.payload != written)
      detail::refuse("pack: options.payload is another type than the elements to write");
    auto* out = reinterpret_cast<std::byte*>(all.data());
    for (const std::size_t f : sent().sent()) {
      detail::encode_payload<T>(written, state_->residual[f], out);
      out += state_->residual[f].size() * sizeof(Half);
    }
    state_->leave_packed(state::left::rounded);
    return all;
  }
  /// Writes what came back in place of pack()'s elements over the gradients, and zeros where nothing was sent. Also after commit().
  ///
  /// \param packed     sent().sent_elements() elements
  /// \param gradients  a tensor to write for each layer of the model, also for those without a gradient in this step, since another
  ///                   worker may have sent them; of T, float16 or bfloat16: into half-width ones numbers are rounded to the nearest,
  ///                   and those beyond their range to the largest. One that does not fit throws before anything is written
  template <class Tensors>
  void unpack(std::span<const T> packed, Tensors&& gradients) const {
    selected("unpack").unpack(packed, gradients);
  }

  /// What was selected has arrived: its residual is cleared, but for what a rounded payload took away. Ends the step. With a rounded
  /// payload frame() or pack() comes before, unless the selection was given to begin(): what fragment() gave is then taken for written so.
  void commit() { commit_what_arrived(nullptr); }
  /// It has arrived in part: what was lost stays in the residual and is sent with the next gradients. Throws std::invalid_argument for the
  /// delivery of another selection. Cost: one write of what has arrived of a damaged fragment.
  void commit(const delivery& arrived) { commit_what_arrived(&arrived); }

 private:
  friend class worker;
  // The end of a handle: a step that was not committed is abandoned.
  struct end {
    std::uint64_t opening;
    void operator()(state* of) const noexcept {
      if (of->is_open && of->opening == opening) of->abandon();
    }
  };
  // One whose first gradients are refused has not begun.
  step(state& of, std::optional<std::size_t> refused) noexcept
      : state_(refused && !of.is_open ? nullptr : &of, {of.opening}), number_(of.number), refused_(refused) {}

  bool is_latest() const noexcept {
    return state_ != nullptr && state_->opening == state_.get_deleter().opening;
  }
  state& open(const char* call) const {
    if (state_ == nullptr) detail::refuse<std::logic_error>(call, ": this handle has no step");
    if (!is_latest() || !state_->is_open)
      detail::refuse<std::logic_error>(call, ": step ", number_, " is over");
    return *state_;
  }
  state& open_with_values(const char* call) const {
    state& s = open(call);
    s.require_all(call);
    if (!std::exchange(s.has_decision_values, true)) s.decision_values = s.values;
    return s;
  }
  state& open_to_gradients(const char* call) const {
    state& s = open(call);
    if (s.is_selected && !s.is_given) {
      detail::refuse<std::logic_error>(call, ": step ", number_,
                                       " is selected already: its gradients come before");
    }
    return s;
  }
  state& selected(const char* call) const {
    if (!is_latest() || !state_->is_selected) {
      detail::refuse<std::logic_error>(call, ": step ", number_,
                                       " is not selected, or is over: call frame() or select() first");
    }
    return *state_;
  }
  template <class Elements>
  auto packable(Elements& to) const {
    open("pack");
    const state& s = selected("pack");
    s.require_all("pack");
    const std::size_t elements = s.decisions.sent().sent_elements();
    if constexpr (requires { to.resize(elements); }) to.resize(elements);
    const std::span all(to);
    if (all.size() != elements)
      detail::refuse("pack: there is room for ", all.size(), " elements, and ", elements, " are sent");
    return all;
  }
  void commit_what_arrived(const delivery* arrived) {
    open("commit");
    state& s = selected("commit");
    s.require_all("commit");
    if (s.options.payload != payload_type::as_is && s.has_left == state::left::nothing && !s.is_given)
      detail::refuse<std::logic_error>("commit: nothing was written yet: call frame() or pack() first");
    if (arrived != nullptr) {
      detail::check_delivery("commit", *arrived, s.decisions.sent(),
                             s.is_rounded() ? s.options.payload : payload_type::as_is);
      if (arrived->is_complete()) arrived = nullptr;
    }
    s.take_out(arrived);
    s.decisions.forecast(number_, s.values, s.expected);
    if (arrived != nullptr) s.expect_lost(*arrived);
    s.decisions.commit(number_, arrived);
    s.close();
  }

  std::unique_ptr<state, end> state_;
  std::uint64_t number_;
  std::optional<std::size_t> refused_;
};

}  // namespace lamina::inline LAMINA_ABI
