// SPDX-License-Identifier: MIT
// A message of more than 2^31 bytes from one rank to another: MPI counts with int, the transport must not.
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>
#include <stdexcept>
#include <vector>

#include "launch/topology.hpp"
#include "messages/mpi_transport.hpp"

namespace {

using namespace lab;

// Two segments, of which one alone is longer than an int can say, and neither ends with a piece.
constexpr std::array<std::size_t, 2> segment_bytes = {(std::size_t{1} << 31) + 12'345, 1'000'003};

unsigned char byte_at(std::size_t place) {
  return static_cast<unsigned char>(place ^ (place >> 12) ^ (place >> 24));
}

void send(transport& here) {
  std::array<std::vector<unsigned char>, 2> segments;
  std::array<std::span<const std::byte>, 2> bytes;
  std::size_t place = 0;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    segments[s].resize(segment_bytes[s]);
    for (unsigned char& each : segments[s]) each = byte_at(place++);
    bytes[s] = std::as_bytes(std::span<const unsigned char>(segments[s]));
  }
  constexpr std::array<std::size_t, 1> to = {0};
  here.send(to, message_kind::gradients, {bytes, nullptr});
}

void receive(transport& here) {
  constexpr std::array<std::size_t, 1> from = {1};
  const message arrived = here.receive_from_each(from)[0];
  if (arrived.bytes.size() != segment_bytes[0] + segment_bytes[1])
    throw std::runtime_error("another number of bytes arrived");
  for (std::size_t place = 0; place < arrived.bytes.size(); ++place) {
    if (arrived.bytes[place] != std::byte{byte_at(place)})
      throw std::runtime_error("byte " + std::to_string(place) + " differs");
  }
  std::printf("%zu bytes arrived as they were sent\n", arrived.bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  const mpi_session session(argc, argv);
  const topology who = flat_topology(1);
  try {
    mpi_transport here(MPI_COMM_WORLD, {.max_message_bytes = std::size_t{1} << 32,
                                        .timeout_of = [](std::size_t) { return std::chrono::seconds(120); },
                                        .exchange_timeout = std::chrono::seconds(120),
                                        .name_of = [&](std::size_t rank) { return who.name_of(rank); }});
    if (here.rank() == 0) {
      receive(here);
    } else {
      send(here);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}
