// SPDX-License-Identifier: MIT
#include "messages/udp/opened.hpp"

#include <sys/random.h>

namespace lab {

open_sockets open_paths(const std::vector<endpoint>& local, const udp_socket_options& options) {
  open_sockets all{{}, listener(local.at(0))};
  for (const endpoint& each : local) {
    udp_socket_options own = options;
    own.inject_seed += all.paths.size() << 40U;
    all.paths.emplace_back(each, own);
  }
  return all;
}

rank_addresses addresses_of(const open_sockets& here) {
  rank_addresses mine;
  mine.control = here.control.local();
  for (const udp_socket& each : here.paths) mine.data.at(mine.paths++) = each.local();
  return mine;
}

std::uint64_t make_secret() {
  std::uint64_t secret = 0;
  if (getrandom(&secret, sizeof secret, 0) != sizeof secret) throw_system_error("getrandom");
  return secret;
}

}  // namespace lab
