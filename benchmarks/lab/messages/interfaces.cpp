// SPDX-License-Identifier: MIT
#include "messages/interfaces.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <vector>

namespace lab {
namespace {

using lamina::udp::endpoint;
using lamina::udp::text_of;

bool is_loopback(const endpoint& which) {
  return which.is_v6 != 0 ? parse_network("::1").has(which) : which.address[0] == 127;
}

// IPv4 first, otherwise as the system lists them. Link-local addresses of IPv6 mean something on one interface only.
std::vector<endpoint> own_addresses() {
  ifaddrs* listed = nullptr;
  if (getifaddrs(&listed) != 0) throw std::runtime_error("getifaddrs failed");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(listed, &freeifaddrs);
  std::vector<endpoint> found;
  for (const ifaddrs* each = listed; each != nullptr; each = each->ifa_next) {
    if (each->ifa_addr == nullptr || (each->ifa_flags & IFF_UP) == 0) continue;
    endpoint one;
    if (each->ifa_addr->sa_family == AF_INET) {
      std::memcpy(one.address.data(), &reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr, 4);
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      one.is_v6 = 1;
      std::memcpy(one.address.data(), &reinterpret_cast<const sockaddr_in6*>(each->ifa_addr)->sin6_addr, 16);
      if (parse_network("fe80::/10").has(one)) continue;
    } else {
      continue;
    }
    found.push_back(one);
  }
  std::ranges::stable_sort(found, {}, &endpoint::is_v6);
  return found;
}

std::string list_of(const std::vector<endpoint>& addresses) {
  std::string text;
  for (const endpoint& each : addresses) text += (text.empty() ? "" : ", ") + text_of(each);
  return text.empty() ? "none" : text;
}

lamina::udp::rank_addresses addresses_of(const std::vector<endpoint>& paths) {
  std::string text;
  for (const endpoint& each : paths)
    text += (text.empty() ? "" : ",") + (each.is_v6 != 0 ? "[" + text_of(each) + "]" : text_of(each)) + ":0";
  return lamina::udp::parse_addresses(text);
}

}  // namespace

bool network::has(const endpoint& address) const {
  if (address.is_v6 != begin.is_v6) return false;
  for (unsigned bit = 0; bit < bits; ++bit) {
    const auto differs = static_cast<unsigned>(address.address[bit / 8] ^ begin.address[bit / 8]);
    if ((differs & (0x80U >> (bit % 8))) != 0) return false;
  }
  return true;
}

network parse_network(const std::string& text) {
  try {
    const std::string address = text.substr(0, text.find('/'));
    const bool is_v6 = address.find(':') != std::string::npos;
    const unsigned most = is_v6 ? 128 : 32;
    network parsed{lamina::udp::parse_addresses(is_v6 ? "[" + address + "]:0" : address + ":0").control,
                   most};
    if (address.size() == text.size()) return parsed;
    const char* const end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data() + address.size() + 1, end, parsed.bits);
    if (error == std::errc() && last == end && parsed.bits <= most) return parsed;
  } catch (const std::invalid_argument&) {  // no address
  }
  throw std::invalid_argument("--interface: '" + text + "' is no network such as 10.77.0.0/24 or fd00::/64");
}

lamina::udp::rank_addresses local_paths(const std::string& interfaces, bool is_one_machine) {
  const std::vector<endpoint> own = own_addresses();
  if (interfaces.empty()) {
    const auto found =
        std::ranges::find_if(own, [&](const endpoint& each) { return is_loopback(each) == is_one_machine; });
    if (found == own.end())
      throw std::invalid_argument("this machine has no address for UDP; its own are: " + list_of(own));
    return addresses_of({*found});
  }
  std::vector<endpoint> paths;
  std::istringstream texts(interfaces +
                           (interfaces.ends_with(',') ? "," : ""));  // nothing after it is no network
  for (std::string text; std::getline(texts, text, ',');) {
    const network within = parse_network(text);
    const auto found = std::ranges::find_if(own, [&](const endpoint& each) { return within.has(each); });
    if (found == own.end()) {
      throw std::invalid_argument("--interface " + text +
                                  ": no address of this machine lies in it; its own are: " + list_of(own));
    }
    // Loopback has one address for any number of paths, to try them on one machine.
    if (!is_loopback(*found) && std::ranges::find(paths, *found) != paths.end()) {
      throw std::invalid_argument("--interface " + text + ": " + text_of(*found) +
                                  " is the address of a path already");
    }
    paths.push_back(*found);
  }
  return addresses_of(paths);
}

}  // namespace lab
