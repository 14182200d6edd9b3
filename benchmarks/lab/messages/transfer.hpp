// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <lamina/delivery.hpp>
#include <optional>
#include <vector>

/// What becomes of a frame on a way that may lose some of it.
namespace lab {

/// What one transfer of a frame took, or several together.
struct transfer_cost {
  std::uint64_t elements = 0;       ///< of the frame
  std::uint64_t lost_elements = 0;  ///< of these: did not arrive
  std::uint64_t packets = 0;
  std::uint64_t repeated = 0;    ///< of these: sent before in the same transfer
  std::uint64_t duplicate = 0;   ///< arrived, and had arrived before
  std::uint64_t late = 0;        ///< arrived when the transfer had ended
  std::uint64_t wire_bytes = 0;  ///< of all packets, with all headers
  std::uint64_t rounds = 0;      ///< of the transfer that had the most
  std::uint64_t transfers = 0;   ///< of which the rates are
  double rate_bits = 0;          ///< bits a second at which each was sent at its end: their sum

  transfer_cost& operator+=(const transfer_cost& more) {
    elements += more.elements;
    lost_elements += more.lost_elements;
    packets += more.packets;
    repeated += more.repeated;
    duplicate += more.duplicate;
    late += more.late;
    wire_bytes += more.wire_bytes;
    rounds = std::max(rounds, more.rounds);
    transfers += more.transfers;
    rate_bits += more.rate_bits;
    return *this;
  }
  double lost_share() const {
    return elements == 0 ? 0 : static_cast<double>(lost_elements) / static_cast<double>(elements);
  }
  /// Bits a second, mean over the transfers.
  double rate() const { return transfers == 0 ? 0 : rate_bits / static_cast<double>(transfers); }
};

/// What its sender knows of a frame that was sent. Over a way that loses nothing there is nothing to know.
struct sent_frame {
  std::optional<lamina::delivery> arrived;  ///< none: all of it
  transfer_cost cost;
};

/// What its receiver knows of a frame that has come over a way which loses some of it.
struct arrived_frame {
  /// Elements of a layer, from `begin` on, that is not in the frame.
  struct repair {
    std::size_t layer = 0;
    std::size_t begin = 0;
    std::vector<std::byte> elements;
  };

  lamina::delivery arrived;
  std::vector<repair> repairs;
  transfer_cost cost;
};

}  // namespace lab
