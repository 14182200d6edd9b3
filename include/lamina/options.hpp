// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <stdexcept>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"

/// What a worker can be told. Nothing here computes.
namespace lamina::inline LAMINA_ABI {

/// When the threshold is searched again.
class refresh_schedule {
 public:
  /// Every `steps` steps, beginning with the first; 1 is the default of the library, 100 is what the paper does.
  /// Throws std::invalid_argument for 0.
  [[nodiscard]] static refresh_schedule every(std::uint64_t steps) {
    if (steps == 0) detail::raise(std::invalid_argument("the refresh period must be at least one step"));
    return refresh_schedule(steps, std::nullopt);
  }
  /// Never: `threshold` is used throughout. Throws std::invalid_argument for NaN.
  [[nodiscard]] static refresh_schedule fixed(double threshold) {
    if (detail::is_nan(threshold)) detail::raise(std::invalid_argument("the threshold must not be NaN"));
    return refresh_schedule(1, threshold);
  }

  /// Whether a search is due in `step`, counted from 1.
  [[nodiscard]] constexpr bool due(std::uint64_t step) const noexcept {
    return !fixed_threshold_ && (step - 1) % period_ == 0;
  }
  /// The threshold of fixed(), if this is one.
  [[nodiscard]] constexpr std::optional<double> fixed_threshold() const noexcept { return fixed_threshold_; }

 private:
  refresh_schedule(std::uint64_t period, std::optional<double> fixed_threshold)
      : period_(period), fixed_threshold_(fixed_threshold) {}

  std::uint64_t period_;
  std::optional<double> fixed_threshold_;
};

/// How the elements of a layer that is sent are written. What is said here of what follows later is said of gradients, whose
/// residual keeps what was not sent; of parameters see publisher_options. NaN and infinity, which come into a residual by
/// finite_check::caller alone, go out as such in all but int8 and int4.
enum class payload_type : std::uint8_t {
  as_is = 0,  ///< the layer's own type; nothing is copied. The paper's choice, and the default.
  float16 =
      1,  ///< half the bytes; numbers beyond 65,504 are cut there and the rest follows later; from 2^29 (float)
          ///< or 2^58 (double) on they are not sent, since what is left over could not be written down
  bfloat16 = 2,  ///< half the bytes, the range of float, 8 bits of precision
  int8 =
      3,  ///< a quarter of the bytes and 1/64 of a byte: blocks of 64 integers share a power of two as scale. It cannot say
  ///< NaN or infinity: of gradients, such an element is not sent and stays in the residual, where its layer goes
  ///< out in every step; an infinity keeps back what else is in its block, the scale being too large for it.
  int4 =
      4,  ///< an eighth of the bytes and 1/64 of a byte: as int8, with integers from -7 to 7, two to a byte
};

/// Whether a frame carries a checksum of itself.
enum class frame_checksum : std::uint8_t {
  none =
      0,  ///< for a transport that checks its own data, and wherever parts of a frame may be lost: one with holes has no
          ///< checksum that holds
  xxh3 = 1,  ///< 64 bits over the whole frame. The default.
};

/// What happens to a gradient that holds NaN or infinity, or that would overflow the residual.
enum class finite_check {
  /// All that is given in one call is looked through first and refused whole: accumulate throws and the residual is as it was.
  /// The default; costs one more read of the gradient, from cache where that holds it.
  whole_layer,
  /// Looked at within the one pass, so that the check costs next to nothing. Elements that are not finite, or that would
  /// overflow, are left out and counted in left_out_elements(); the others are added. For training that would rather lose
  /// a few elements than a layer.
  each_element,
  /// Not looked at: the caller knows already that the gradients are finite and that no sum overflows, as with loss scaling,
  /// which looks for infinity itself, or after clipping. NaN or infinity that comes all the same goes into the residual and,
  /// as the largest of values, out to the others, which clears it here; but for payload_type::int8 and int4, which cannot say it. A
  /// residual that holds it is not saved.
  caller,
};

/// When it is known whether a layer goes out. Collectives that run while gradients are still computed want to know it of a layer
/// as soon as its gradient is there.
enum class decision_timing : std::uint8_t {
  /// After the last gradient of the step, by select() or encode(). The paper's order, and the default.
  at_end,
  /// When a layer's gradient is there, by this worker's own values, against the threshold of the last search: that of a step
  /// serves the next. For a parameter server. Within a byte_budget, a layer that passes and does not fit any more waits, and
  /// comes before the others in the steps that follow. R then does not bound what is dropped in a step.
  as_ready,
  /// Before the first gradient of the step, for all layers, by values that all workers have agreed on in the step before:
  /// gradient_compressor::predicted_values() and plan_next(). For collectives in which all send the same layers.
  ahead,
};

/// What is compared with the threshold, and ordered within a budget.
enum class priority_rule : std::uint8_t {
  value,  ///< q_l. The paper's, and the default.
  /// q_l times the steps since the layer was last sent, t of them in step t where it never was: the order in which what the
  /// workers lack of each other is least in the mean over layers and steps, where q_l grows as a power of these steps. By q_l alone no layer
  /// lacks much, and those that change slowly starve. Rounded once. For decisions at_end.
  /// With agreed values the steps are not averaged: each worker takes its own ages, which agreed selection wants to be the same. Negative
  /// values sink with waiting.
  value_times_waiting,
};

/// How a residual takes gradients.
struct residual_options {
  finite_check check = finite_check::whole_layer;
  /// Momentum correction: u <- m·u + g, a <- a + u, and u is cleared with what is sent. 0: off, and no memory for u.
  /// Of the pieces that a gradient comes in, only the first of a step multiplies by m: u <- u + g, a <- a + g for the others.
  /// Source: Lin et al., Deep Gradient Compression (ICLR 2018), eq. 4 and 5, with momentum factor masking.
  double momentum = 0;
  /// Where the residual lies: pinned memory, huge pages, a node of a NUMA machine; null: in memory of operator new. Must outlive the residual.
  std::pmr::memory_resource* memory = nullptr;
};

/// How a worker compresses. The defaults are what to begin with.
struct compressor_options {
  /// R in [0, 1]: the share of the elements to hold back in a step. 0 turns layer dropping off; 1 sends everything, as
  /// Algorithm 1 finds no threshold then. Layers of value 0, in which nothing is to be sent, are held back beside that.
  double drop_ratio = 0.95;
  /// Steps in which R grows to drop_ratio, so that the first gradients, which change fast, go out more often: in step t
  /// the share that is *sent* is (1 - R)^(t / warm_up_steps). 0: R from the first step on. Worth having at R beyond
  /// 0.95. Source: the warm-up of Lin et al., Deep Gradient Compression (ICLR 2018).
  std::uint64_t warm_up_steps = 0;
  /// When the threshold is searched again. Every step by default: the search is cheap and a threshold that is not
  /// renewed goes stale as gradients shrink. The paper renews it every 100 steps.
  refresh_schedule refresh = refresh_schedule::every(1);
  /// A promise on bytes in place of R: the share of the elements to send, as a mean over the steps, in (0, 1]. Each step
  /// adds that share to an allowance; the layers with the largest values go out as far as it reaches, and what is left
  /// over is saved for a layer that did not fit: up to one step's share and the largest layer. Of layers of
  /// equal value those that come first in the model do, and those of value 0 stay. By step t no more than
  /// budget·N·t elements have been sent, but for what max_age and always_sent force out. Use it when the network has a price;
  /// drop_ratio, warm_up_steps and refresh then do not count.
  std::optional<double> byte_budget = std::nullopt;
  /// A layer goes out at least every so many steps, whatever its value; 0: it may wait for ever. Use it where a layer with small
  /// gradients must not wait for ever. Such layers come on top of R and count in the budget.
  std::uint64_t max_age = 0;
  /// By what layers are chosen. Of local updates see docs/learning/local-updates.md; with gradients value_times_waiting was not tried.
  priority_rule priority = priority_rule::value;
  /// When a layer is decided on. The first step of as_ready and of ahead has no values to go by: everything is sent, as far as
  /// a byte_budget reaches. `ahead` wants each gradient in one piece.
  decision_timing decide = decision_timing::at_end;
  /// Layers larger than this are decided, and sent, in parts of so many elements: a multiple of 4,096; 0: whole layers.
  /// Use it when a few huge layers, such as embeddings, would decide alone or come in bursts. See partition.hpp.
  std::size_t part_elements = 0;
  /// Momentum correction in the residual, in [0, 1): see residual_options. The server then uses plain SGD.
  double momentum = 0;
  finite_check check = finite_check::whole_layer;
  /// How the elements sent are written; what rounding takes away stays in the residual.
  payload_type payload = payload_type::as_is;
  /// This worker's index in [0, W), written into its frames.
  std::uint32_t sender = 0;
  /// Which run the frames are of, any number but 0: a receiver that resumes under another tells frames that were still
  /// under way from its own. 0: not told apart.
  std::uint32_t run = 0;
  /// Whether frames carry a checksum.
  lamina::frame_checksum frame_checksum = lamina::frame_checksum::xxh3;
  /// Layers of the model that are sent in every step, whatever their value: biases and normalisation layers, mostly, which
  /// have few elements and do not bear delay. They come first within R and within a budget, of which they must leave some:
  /// less of the elements than byte_budget. See layers_where().
  std::vector<std::size_t> always_sent = {};
  /// Where the residual lies: pinned memory, huge pages, a node of a NUMA machine; null: in memory of operator new. Must outlive the compressor.
  std::pmr::memory_resource* memory = nullptr;
};

}  // namespace lamina::inline LAMINA_ABI
