// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/bounded/bounded.hpp>
#include <span>
#include <string>

#include "messages/transfer_ends.hpp"
#include "tests/bounded/lossy_channel.hpp"

namespace lab {

/// A network that loses packets, and what its receivers agree to.
struct lossy_options {
  double loss = 0;         ///< share of the packets, at random; control messages all arrive
  std::uint64_t seed = 1;  ///< of which ones
  lamina::bounded::stop_policy stop = lamina::bounded::stop_policy::eager;
  lamina::frame_kind up = lamina::frame_kind::gradients;  ///< what goes to the server: gradients or updates
  std::uint32_t most_bound_up_ppm = 0;                    ///< of that
  std::uint32_t most_bound_down_ppm = 0;                  ///< of parameters
};

/// The way of frames from one rank to another: both ends of bounded transfers, one after the other, over a network in simulated
/// time. Which packets are lost depends on the options and on the two ranks alone, so runs repeat to the bit. Nothing here waits:
/// a transfer takes the processor's time of both ends.
class lossy_way {
 public:
  struct ends {
    std::uint16_t from = 0;
    std::uint16_t to = 0;
    std::string name;  ///< of the receiver, for errors
  };

  lossy_way(const lamina::bounded::chunk_grid& grid, lamina::frame_kind kind, const lossy_options& options,
            ends ranks);

  /// One transfer from its beginning to its end; the frame before is gone. Throws link_error, naming the receiver, for one that
  /// fails; std::invalid_argument for a frame of another grid, and what is no chunk of it.
  sent_frame transfer(const lamina::bounded::frame_chunks& frame, const lamina::bounded::obligations& beside);

  /// What has arrived by it: the frame, holes being zeros, and what is known of it.
  std::span<const std::byte> frame() const { return receiver_.machine().frame(); }
  arrived_frame arrived() const { return receiver_.result(last_); }

 private:
  void send();
  void take();
  lamina::bounded::control_message read(std::span<const std::byte> bytes);

  ends ranks_;
  sending_end sender_;
  receiving_end receiver_;
  lamina_test::lossy_channel packets_;
  lamina_test::lossy_channel forth_;  // control messages
  lamina_test::lossy_channel back_;
  lamina::bounded::control_limits limits_;
  lamina::bounded::keyed_check check_;
  lamina::bounded::instant now_{};
  transfer_cost last_;
};

}  // namespace lab
