// SPDX-License-Identifier: MIT
#pragma once

#include <memory_resource>
#include <optional>
#include <vector>

#include "lamina/detail/abi.hpp"

/// What a worker and a server can be told. Nothing here computes. Read decision.hpp after.
namespace lamina::inline LAMINA_ABI {

/// What a frame is of.
enum class frame_kind : std::uint8_t {
  gradients = 1,   ///< worker to server: what is dropped counts as zeros
  parameters = 2,  ///< server to worker: what is dropped is to be kept
  updates = 4,     ///< of parameters that all share: worker to server and back; see delta.hpp
};

/// How the elements of a layer that is sent are written. Of gradients, what rounding takes away stays in the residual; of parameters see
/// server_options. NaN and infinity of parameters go out as such in all but int8 and int4.
enum class payload_type : std::uint8_t {
  /// The layer's own type; nothing is copied. The paper's choice, and the default.
  as_is = 0,
  /// Half the bytes. Numbers beyond 65,504 are cut there and what remains follows later; from 2^29 (float) or 2^58 (double) on they are not
  /// sent, since what remains could not be written down.
  float16 = 1,
  /// Half the bytes, the range of float, 8 bits of precision.
  bfloat16 = 2,
  /// A quarter of the bytes and 1/64 of a byte: blocks of 64 integers share a power of two as scale. It cannot say NaN or infinity: of
  /// gradients, such an element is not sent and stays in the residual, where its layer goes out in every step; an infinity keeps
  /// all of its block in the residual, the scale being too large for it.
  int8 = 3,
  /// An eighth of the bytes and 1/64 of a byte: as int8, with integers from -7 to 7, two to a byte.
  int4 = 4,
  /// 1/18 of the bytes: each element is -1, 0 or 1 times a power of two that its block of 64 shares, five to a byte. Whoever
  /// sends in it has to keep what it leaves out: gradients and updates, no parameters.
  ternary = 5,
};

/// Whether a frame carries a checksum of itself.
enum class frame_checksum : std::uint8_t {
  /// For a transport that checks its own data, and wherever parts of a frame may be lost: one with holes has no checksum that holds.
  none = 0,
  /// 64 bits over the whole frame. The default.
  xxh3 = 1,
};

/// What happens to a gradient that holds NaN or infinity, or that would overflow the residual.
enum class non_finite : std::uint8_t {
  /// All that is given in one call is refused, and the layer is named. The default. The gradient is added and looked at in one pass, and
  /// what was added of a refused one is subtracted again. That leaves at most 2^-12 (float; double: 2^-41) of the mean magnitude which the
  /// element's block of 4,096 had after the last gradient, whatever the refused gradient was; layers that were clear stay clear.
  refuse,
  /// Elements that are not finite, or that would overflow, are left out and counted in left_out_elements(); the others are added. For
  /// training that would rather lose a few elements than a step.
  skip,
};

/// How a worker compresses. The defaults are what to begin with.
struct worker_options {
  /// R in [0, 1]: the share of the elements to drop in a step. Layers are not split, so at most this share is dropped. 0 turns
  /// dropping off; 1 sends everything, since Algorithm 1 then finds no threshold. Layers of value 0 are dropped on top of it.
  double drop_ratio = 0.95;
  /// Steps in which R grows to drop_ratio: in step t the share that is sent is (1 - R)^(t / warm_up_steps). 0: no warm-up.
  /// Source: Lin et al., Deep Gradient Compression (ICLR 2018).
  std::uint64_t warm_up_steps = 0;
  /// The threshold is searched in every so many steps, in every step of a warm-up, and after a search that has found 0 or
  /// infinity. 1: in every step; the paper has 100.
  std::uint64_t search_every = 1;
  /// A fixed threshold in place of a search; drop_ratio then only counts where it is 0.
  std::optional<double> threshold = std::nullopt;
  /// In place of drop_ratio: the share of the elements to send, in (0, 1], as a mean over the steps. Each step adds its share to
  /// an allowance; the fragments of the largest values are sent as far as it reaches, the first of those of equal value, and
  /// what is not used is saved, up to one step's share and the largest fragment.
  std::optional<double> send_budget = std::nullopt;
  /// A fragment is sent at least every so many steps, whatever its value; 0: no limit. It comes on top of R and counts in a budget.
  std::uint64_t at_least_every = 0;
  /// Selects by score, the representative value times the steps since the fragment was last sent, in place of the value.
  bool by_score = false;
  /// Of a local_delta alone, since a residual is nothing else: what a message leaves out waits in memory of its own, outside of what the
  /// worker computes with, and joins the next message of its fragment. For payloads of few bits. Source: error feedback, Seide et al. 2014.
  bool error_feedback = false;
  /// Layers of more elements are decided and sent in fragments of this size: a multiple of 4,096; 0: whole layers.
  std::size_t fragment_elements = 0;
  /// Momentum correction, in [0, 1): u <- m·u + g, a <- a + u, and u is cleared with what is sent; 0: off, and no memory for u. Of
  /// micro-batch gradients only the first of a step multiplies by m: u <- u + g, a <- a + g for the others. The server then
  /// uses plain SGD. Source: Lin et al., Deep Gradient Compression (ICLR 2018), eq. 4 and 5, with momentum factor masking.
  double momentum = 0;
  lamina::non_finite non_finite = lamina::non_finite::refuse;
  payload_type payload = payload_type::as_is;
  /// This worker's index among the senders, written into its frames.
  std::uint32_t sender = 0;
  /// Which run the frames are of; receivers refuse frames of another. 0: none.
  std::uint32_t run = 0;
  lamina::frame_checksum frame_checksum = lamina::frame_checksum::xxh3;
  /// Layers of the model that are sent in every step: biases and normalisation, mostly. They count first within R and a budget.
  std::vector<std::size_t> always_sent = {};
  /// Where the residual lies; null: operator new. Must outlive the worker.
  std::pmr::memory_resource* memory = nullptr;
};

/// How a server works.
struct server_options {
  /// Senders, each of which is one worker.
  std::size_t workers = 1;
  /// In place of `workers`: for each sender the workers of its node, whose summed gradients it sends.
  std::vector<std::size_t> nodes = {};
  /// Each frame is a step of its own, as it comes; false: a step is one frame of each sender.
  bool asynchronous = false;
  /// What the frames that come are of: gradients, or the updates of local steps.
  frame_kind kind = frame_kind::gradients;
  /// As worker_options::fragment_elements.
  std::size_t fragment_elements = 0;
  /// The step whose frames are accepted first: t + 1 after a resume at t.
  std::uint64_t first_step = 1;
  /// Frames of another run are refused; written into the replies. 0: none.
  std::uint32_t run = 0;
  /// How parameters are written. Another type than as_is rounds, and no residual makes up for it.
  payload_type payload = payload_type::as_is;
  lamina::frame_checksum frame_checksum = lamina::frame_checksum::xxh3;
};

}  // namespace lamina::inline LAMINA_ABI
