// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

#include "bounded/simulated_transfer.hpp"

namespace lamina_test {

using bounded::control_type;

/// Messages of a peer, as it may send them.
class peer {
 public:
  template <class... Fields>
  bounded::control_message operator()(control_type type, std::uint32_t transfer, std::uint32_t round,
                                      const Fields&... fields) {
    writer_.clear();
    (writer_.put(fields), ...);
    return finished(type, transfer, round);
  }
  /// WANTED or STOP: for each fragment listed its bits.
  bounded::control_message list(control_type type, std::uint32_t transfer, std::uint32_t round,
                                const std::map<std::uint32_t, std::vector<std::byte>>& fragments,
                                std::uint32_t seen = 0) {
    writer_.clear();
    bounded::write_report(writer_, {.seen = seen, .open_transfers = 1});
    writer_.put(static_cast<std::uint32_t>(fragments.size()));
    for (const auto& [fragment, bits] : fragments) {
      writer_.put(fragment);
      writer_.put(bits);
    }
    return finished(type, transfer, round);
  }

 private:
  bounded::control_message finished(control_type type, std::uint32_t transfer, std::uint32_t round) {
    const auto all = writer_.finish(type, transfer, round);
    bounded::control_message message;
    std::memcpy(&message.header, all.data(), sizeof message.header);
    message.body = all.subspan(bounded::control_header_bytes);
    return message;
  }

  bounded::control_writer writer_{test_secret, 1000};
};

/// All bits of so many chunks but these.
inline std::vector<std::byte> all_but(std::uint32_t chunks, const std::vector<std::uint32_t>& missing) {
  std::vector<std::byte> bits((chunks + 7) / 8);
  for (std::uint32_t i = 0; i < chunks; ++i) {
    if (std::ranges::find(missing, i) == missing.end()) bits[i / 8] |= std::byte{1} << (i % 8);
  }
  return bits;
}

}  // namespace lamina_test
