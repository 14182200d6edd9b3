// SPDX-License-Identifier: MIT
#pragma once

#include "lamina/codec.hpp"
#include "lamina/decision.hpp"
#include "lamina/residual.hpp"
#include "lamina/state.hpp"

/// What a worker and its open step share. Read worker.hpp before.
namespace lamina::inline LAMINA_ABI::detail {

// It checks the order of calls; that its handle is of this step, the handle checks.
template <element T, class Representative>
struct worker_state {
  worker_state(const layout& model, const worker_options& given, Representative of_values)
      : options(given),
        functor(std::move(of_values)),
        cut(model, given.fragment_elements),
        residual(cut.fragments(), given),
        decisions(cut, given),
        in_frames(cut.fragments()),
        in_next(cut.fragments()),
        values(cut.fragments().layers()),
        decision_values(cut.fragments().layers()),
        expected(cut.fragments().layers(), infinite_value),
        has_come(cut.fragments().layers()),
        is_stale(cut.fragments().layers(), char{1}) {
    if (model.layers() == 0) refuse("a model without layers has nothing to compress");
    check_payload_type(given.payload);
    if (given.error_feedback) refuse("error_feedback is of local_delta: a residual is nothing else");
  }

  enum class left : char { nothing, rounded, exact };

  void require_closed(const char* call) const {
    if (!is_open) return;
    refuse<std::logic_error>(call, ": step ", number, " is open: commit() it, or let its handle go");
  }
  void require_gradient(const char* call, std::size_t f) const {
    cut.fragments().check_layer(f);
    if (has_come[f] != 0 || cut.fragments().sizes()[f] == 0) return;
    refuse<std::logic_error>(call, ": layer '", cut.model()[cut.layer_of(f)].name,
                             "' has no gradient in step ", number, "; add() or skip() it");
  }
  // A frame points into the residual, which must not change under it.
  void require_here(const char* call, std::size_t layer) const {
    cut.model().check_layer(layer);
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) {
      if (!in_frames.is_sent(f)) continue;
      refuse<std::logic_error>(call, ": layer '", cut.model()[layer].name, "' was in a frame of step ",
                               number, " already");
    }
  }
  void require_all(const char* call) const {
    for (std::size_t f = 0; f < has_come.size(); ++f) require_gradient(call, f);
  }

  void begin(const char* call) {
    require_closed(call);
    residual.begin_step();
    open();
  }
  void open() noexcept {
    ++number;
    ++opening;
    std::fill(has_come.begin(), has_come.end(), char{0});
    is_open = true;
    is_selected = is_given = has_decision_values = false;
    has_left = left::nothing;
    in_frames.clear();
    sequence = 0;
  }
  void close() noexcept { is_open = has_decision_values = false; }
  // Its number is that of the next step: whoever has got a frame of it refuses another.
  void abandon() noexcept {
    close();
    is_selected = false;
    decisions.undo(number--);
  }

  const encoded_frame& encode(const selection& fragments, bool is_last, std::span<const std::byte> user) {
    if (fragments.model().fingerprint() != cut.fragments().fingerprint())
      refuse("frame: the selection is of another layout than the worker's");
    if (sequence == 0xffff) refuse<std::length_error>("frame: a step has at most 65,535 frames");
    if (sequence == 0) in_frames.clear();
    if (is_last) require_all("frame");
    in_next.clear();
    for (const std::size_t f : fragments.sent()) {
      if (!decisions.sent().is_sent(f)) continue;
      require_gradient("frame", f);
      if (in_frames.is_sent(f)) {
        refuse<std::logic_error>("frame: '", cut.fragments()[f].name, "' was in a frame of step ", number,
                                 " already");
      }
      in_next.send(f);
    }
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
                                   in_next, [this](std::size_t f) { return residual[f]; });
    has_left = options.payload == payload_type::as_is ? left::exact : left::rounded;
    for (const std::size_t f : in_next.sent()) in_frames.send(f);
    ++sequence;
    return frame;
  }

  template <class Tensors, class Execution>
  std::optional<std::size_t> add_all(const Tensors& gradients, double scale, const Execution& execution) {
    cut.model().check_count(std::size(gradients), "gradients");
    return add(
        0, cut.model().layers(),
        [&](std::size_t layer, const auto& visitor) {
          const auto& tensor = std::begin(gradients)[static_cast<std::ptrdiff_t>(layer)];
          if (has_value(tensor)) visit_gradient<T>(tensor, visitor);
        },
        scale, execution);
  }
  template <class Tensor, class Execution>
  std::optional<std::size_t> add_one(std::size_t layer, const Tensor& gradient, double scale,
                                     const Execution& execution) {
    cut.model().check_layer(layer);
    if (!has_value(gradient))
      refuse("layer '", cut.model()[layer].name, "': there is no tensor to add; skip() it");
    return add(
        layer, layer + 1, [&](std::size_t, const auto& visitor) { visit_gradient<T>(gradient, visitor); },
        scale, execution);
  }
  template <class Gradients, class Execution>
  std::optional<std::size_t> add(std::size_t first, std::size_t last, const Gradients& gradients,
                                 double scale, const Execution& execution) {
    const auto by_fragment = [&](std::size_t f, const auto& visitor) {
      const std::size_t layer = cut.layer_of(f);
      gradients(layer, [&](auto from) {
        cut.model().check_size(layer, from.size());
        visitor(from.subspan(cut.begin(f), cut.fragments().sizes()[f]));
      });
    };
    const std::size_t begin = cut.first(first);
    const std::size_t end = cut.first(last);
    if (!is_open) residual.begin_step();
    const std::optional<std::size_t> refused =
        residual.accumulate(begin, end, by_fragment, std::span(values).subspan(begin, end - begin), functor,
                            execution, scale, &thrown);
    if (refused) {
      // What rounding leaves of a refused gradient is of the residual, and so of its value.
      for (std::size_t f = begin; f < end; ++f) {
        if (residual.was_given(f)) is_stale[f] = 1;
        if (is_open && has_come[f] != 0) refresh(f);
      }
      return cut.layer_of(*refused);
    }
    if (!is_open) open();
    has_decision_values = false;
    for (std::size_t f = begin; f < end; ++f) {
      if (residual.was_given(f)) is_stale[f] = 0;
      count_in(f);
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
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) count_in(f);
  }
  void count_in(std::size_t f) {
    has_come[f] = 1;
    refresh(f);
  }
  // The value of a fragment whose residual has changed since its value was computed.
  void refresh(std::size_t f) {
    if (is_stale[f] == 0) return;
    is_stale[f] = 0;
    values[f] = residual.is_clear(f) ? value_of_zeros<T>(functor, cut.fragments().sizes()[f])
                                     : representative_value(functor, residual[f]);
  }
  // What was not sent becomes zeros. Halves get the nearest number, and the largest where it is beyond their range.
  template <class Tensors>
  void unpack(std::span<const T> packed, Tensors& gradients) const {
    const selection& sent = decisions.sent();
    if (packed.size() != sent.sent_elements())
      refuse("unpack: ", packed.size(), " elements where ", sent.sent_elements(), " were sent");
    cut.model().check_count(std::size(gradients), "gradients");
    const auto visit = [&](std::size_t layer, const auto& visitor) {
      visit_elements<T, true>(std::begin(gradients)[static_cast<std::ptrdiff_t>(layer)], [&](auto to) {
        cut.model().check_size(layer, to.size());
        visitor(to);
      });
    };
    for (std::size_t layer = 0; layer < cut.model().layers(); ++layer) visit(layer, [](auto) {});
    const T* from = packed.data();
    for (std::size_t f = 0; f < cut.fragments().layers(); ++f) {
      visit(cut.layer_of(f), [&]<class G>(std::span<G> all) {
        const std::span<G> to = all.subspan(cut.begin(f), cut.fragments().sizes()[f]);
        if (sent.is_dropped(f)) return std::fill(to.begin(), to.end(), G{});
        for (std::size_t i = 0; i < to.size(); ++i) {
          if constexpr (half_element<G>) {
            to[i] = to_nearest<G>(from[i]);
          } else {
            to[i] = from[i];
          }
        }
        from += to.size();
      });
    }
  }
  // What was lost is in the residual again: as much of the value, if elements are alike.
  void expect_lost(const delivery& arrived) {
    for (const std::size_t f : decisions.sent().sent()) {
      const auto lost = static_cast<double>(arrived.lost_chunks(f));
      if (lost > 0) expected[f] += values[f] * lost / static_cast<double>(arrived.chunks(f));
    }
  }

  void leave_packed(left how) {
    has_left = how;
    in_frames = decisions.sent();
  }
  bool is_rounded() const noexcept {
    return has_left != left::exact && options.payload != payload_type::as_is;
  }
  // Takes out of the residual what has arrived of the fragments that are sent, all of them if nothing is said.
  void take_out(const delivery* arrived) {
    for (const std::size_t f : decisions.sent().sent()) {
      is_stale[f] = 1;
      const auto take = [&](std::size_t begin, std::size_t end) {
        residual.subtract(f, is_rounded() ? options.payload : payload_type::as_is, begin, end);
      };
      if (arrived != nullptr && arrived->lost_chunks(f) > 0) {
        arrived->for_each_delivered(f, take);
      } else {
        take(0, cut.fragments().sizes()[f]);
      }
    }
  }

  void load(std::span<const std::byte> bytes) {
    // Of no elements there is no velocity to save.
    const bool has_velocity = residual.has_velocity() && cut.model().elements() > 0;
    saved_state<T> saved = read_state<T>(bytes, cut.fragments(), has_velocity);
    residual.restore(saved.residual, saved.velocity);
    decisions.restore(std::move(saved.memory));
    number = saved.step;
    if (saved.expected.empty()) saved.expected.assign(expected.size(), infinite_value);
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
  selection in_frames;                                      // what has left, in frames or packed
  selection in_next;
  std::uint16_t sequence = 0;           // of the next frame
  std::vector<double> values;           // of the residual, where it is not stale
  std::vector<double> decision_values;  // what is decided by: a copy, which agreed values may replace
  std::vector<double> expected;         // of the next step
  std::vector<char> has_come;           // the gradient of the step, or that there is none
  std::vector<char> is_stale;
  std::uint64_t number = 0;   // of the step that is open, or was last
  std::uint64_t opening = 0;  // tells handles apart, since load() can make a number come again
  bool is_open = false;
  bool is_selected = false;
  bool is_given = false;  // selected before the first gradient
  bool has_decision_values = false;
  left has_left = left::nothing;  // as a frame, or packed
  std::exception_ptr thrown;
};

}  // namespace lamina::inline LAMINA_ABI::detail
