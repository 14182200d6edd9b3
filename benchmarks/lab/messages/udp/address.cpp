// SPDX-License-Identifier: MIT
#include "messages/udp/address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "messages/udp/descriptor.hpp"

namespace lab {
namespace {

bool is_loopback(const endpoint& which) {
  return which.is_v6 != 0 ? which == parse_network("::1").begin : which.address[0] == 127;
}

// Link-local addresses of IPv6 mean something on one interface alone.
bool is_link_local(const endpoint& which) {
  return which.is_v6 != 0 && which.address[0] == 0xfe && (which.address[1] & 0xc0) == 0x80;
}

std::vector<endpoint> own_addresses() {
  ifaddrs* listed = nullptr;
  if (getifaddrs(&listed) != 0) throw_system_error("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(listed, &freeifaddrs);
  std::vector<endpoint> found;
  for (const ifaddrs* each = listed; each != nullptr; each = each->ifa_next) {
    const bool is_ip = each->ifa_addr != nullptr &&
                       (each->ifa_addr->sa_family == AF_INET || each->ifa_addr->sa_family == AF_INET6);
    if (!is_ip || (each->ifa_flags & IFF_UP) == 0) continue;
    socket_address address;
    address.length = each->ifa_addr->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    std::memcpy(&address.bytes, each->ifa_addr, address.length);
    endpoint one = address.to_endpoint();
    one.port = 0;
    if (!is_link_local(one)) found.push_back(one);
  }
  // IPv4 first, otherwise as the system lists them.
  std::ranges::stable_sort(found, {}, &endpoint::is_v6);
  return found;
}

std::string list_of(const std::vector<endpoint>& addresses) {
  std::string text;
  for (const endpoint& each : addresses) text += (text.empty() ? "" : ", ") + text_of(each);
  return text.empty() ? "none" : text;
}

}  // namespace

socket_address::socket_address(const endpoint& from) {
  if (from.is_v6 != 0) {
    sockaddr_in6 v6{};
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(from.port);
    std::memcpy(&v6.sin6_addr, from.address.data(), sizeof v6.sin6_addr);
    length = sizeof v6;
    std::memcpy(&bytes, &v6, sizeof v6);
  } else {
    sockaddr_in v4{};
    v4.sin_family = AF_INET;
    v4.sin_port = htons(from.port);
    std::memcpy(&v4.sin_addr, from.address.data(), sizeof v4.sin_addr);
    length = sizeof v4;
    std::memcpy(&bytes, &v4, sizeof v4);
  }
}

endpoint socket_address::to_endpoint() const {
  endpoint to;
  if (bytes.ss_family == AF_INET6) {
    sockaddr_in6 v6{};
    std::memcpy(&v6, &bytes, sizeof v6);
    to.is_v6 = 1;
    to.port = ntohs(v6.sin6_port);
    std::memcpy(to.address.data(), &v6.sin6_addr, sizeof v6.sin6_addr);
  } else if (bytes.ss_family == AF_INET) {
    sockaddr_in v4{};
    std::memcpy(&v4, &bytes, sizeof v4);
    to.port = ntohs(v4.sin_port);
    std::memcpy(to.address.data(), &v4.sin_addr, sizeof v4.sin_addr);
  }
  return to;
}

std::string text_of(const endpoint& what) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  inet_ntop(what.is_v6 != 0 ? AF_INET6 : AF_INET, what.address.data(), text.data(), text.size());
  if (what.port == 0) return text.data();
  const std::string address = what.is_v6 != 0 ? "[" + std::string(text.data()) + "]" : text.data();
  return address + ":" + std::to_string(what.port);
}

bool network::has(const endpoint& address) const {
  if (address.is_v6 != begin.is_v6) return false;
  for (unsigned bit = 0; bit < bits; ++bit) {
    const auto differs = static_cast<unsigned>(address.address[bit / 8] ^ begin.address[bit / 8]);
    if ((differs & (0x80U >> (bit % 8))) != 0) return false;
  }
  return true;
}

network parse_network(const std::string& text) {
  const std::string address = text.substr(0, text.find('/'));
  network parsed;
  parsed.begin.is_v6 = address.find(':') != std::string::npos ? 1 : 0;
  const bool is_v6 = parsed.begin.is_v6 != 0;
  parsed.bits = is_v6 ? 128 : 32;
  bool is_good = inet_pton(is_v6 ? AF_INET6 : AF_INET, address.c_str(), parsed.begin.address.data()) == 1;
  if (address.size() < text.size()) {
    const char* const end = text.data() + text.size();
    const unsigned most = parsed.bits;
    const auto [last, error] = std::from_chars(text.data() + address.size() + 1, end, parsed.bits);
    is_good = is_good && error == std::errc() && last == end && parsed.bits <= most;
  }
  if (!is_good) {
    throw std::invalid_argument("--interface: '" + text +
                                "' is no network such as 10.77.0.0/24 or fd00::/64");
  }
  return parsed;
}

std::vector<endpoint> local_paths(const std::string& interfaces, bool is_one_machine) {
  const std::vector<endpoint> own = own_addresses();
  std::vector<endpoint> paths;
  if (interfaces.empty()) {
    const auto found =
        std::ranges::find_if(own, [&](const endpoint& each) { return is_loopback(each) == is_one_machine; });
    if (found == own.end()) {
      throw std::invalid_argument("this machine has no address for UDP; its own are: " + list_of(own));
    }
    return {*found};
  }
  std::istringstream texts(interfaces);
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
  if (interfaces.ends_with(',')) parse_network("");  // which it has behind the comma
  if (paths.size() > most_paths) {
    throw std::invalid_argument("--interface: at most " + std::to_string(most_paths) + " networks");
  }
  if (std::ranges::any_of(paths, [&](const endpoint& each) { return each.is_v6 != paths[0].is_v6; })) {
    throw std::invalid_argument("--interface: networks of IPv4 and of IPv6; give one kind");
  }
  return paths;
}

}  // namespace lab
