// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lamina/payload.hpp"
#include "lamina/residual.hpp"
#include "lamina/threshold.hpp"

namespace lamina {

/// What the threshold is searched over.
enum class threshold_source {
  accumulated,  ///< the residual's values, which the decision compares too: only then does R bound what is dropped
  fresh,  ///< the values of this step's gradients, a literal reading of the paper; sends more than 1 - R. One more
          ///< read of each gradient in the steps that search.
};

/// How a worker compresses. The defaults are what to begin with.
struct compressor_options {
  /// R in [0, 1]: the share of the elements to hold back in a step. 0 turns layer dropping off; 1 sends everything, as
  /// Algorithm 1 finds no threshold then.
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
  /// over is saved for a layer that did not fit: up to one step's share and the largest layer. By step t no more than
  /// budget·N·t elements have been sent, but for what max_age forces out. Use it when the network has a price;
  /// drop_ratio, warm_up_steps and refresh then do not count.
  std::optional<double> byte_budget = std::nullopt;
  /// A layer that was held back for so many steps is sent whatever its value; 0: never. Use it where a layer with small
  /// gradients must not wait for ever. Such layers come on top of R and count in the budget.
  std::uint64_t max_age = 0;
  threshold_source source = threshold_source::accumulated;
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
};

}  // namespace lamina
