// SPDX-License-Identifier: MIT
// What do packets cost? Of one frame of the whole of ResNet-50 in chunks of 1,408 bytes: cutting it, cutting, checking and placing
// its packets at both ends, compared with copying and hashing the same bytes once; and commits of what has arrived.

#include <benchmark/benchmark.h>
#include <time.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "common/limits.hpp"
#include "common/model.hpp"
#include "lamina/bounded/bounded.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"

namespace {

namespace bounded = lamina::bounded;
using lamina::payload_type;

constexpr std::uint64_t secret = 0x0123456789abcdef;
constexpr std::size_t slot_bytes = 1472;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
const std::vector<float>& elements() {
  static const std::vector<float> all = lamina_benchmark::gradient_of_step(model, 1);
  return all;
}

std::span<const float> layer(std::size_t l) {
  return lamina_benchmark::layer_of(elements(), model, l);
}

// A frame, and its packets as they lie in memory when they have come.
struct packets {
  packets()
      : grid(bounded::chunk_grid::of<float>(model, payload_type::as_is,
                                            bounded::chunk_elements<float>(payload_type::as_is, 1416))),
        sent(everything()),
        chunks(encoder.encode({.checksum = lamina::frame_checksum::none}, sent, layer), sent, grid),
        sender(grid,
               {.rank = 1, .receiver = 0, .secret = secret, .rate = {.link_bits = std::uint64_t{1} << 50U}}),
        receiver(grid, {.rank = 0, .sender = 1, .secret = secret}),
        limits(grid),
        datagrams(grid.chunks() * slot_bytes) {
    for (const bounded::chunk& each : chunks.in_sending_order()) {
      const auto data = chunks.bytes_of(each)[0];
      std::memcpy(&datagrams[sizes.size() * slot_bytes + bounded::packet_header_bytes], data.data(),
                  data.size());
      sizes.push_back(bounded::packet_header_bytes + data.size());
    }
  }

  static lamina::selection everything() {
    lamina::selection chosen(model);
    chosen.send_all();
    return chosen;
  }

  std::span<const std::byte> datagram(std::size_t i) const { return {&datagrams[i * slot_bytes], sizes[i]}; }
  // The data lie there: a network would have copied them.
  void write_header(std::size_t i, const bounded::outgoing_packet& packet) {
    std::memcpy(&datagrams[i * slot_bytes], packet.header.data(), packet.header.size());
  }

  void begin() {
    receiver.release(now);
    sender.begin(chunks);
    receiver.on_control(read(sender.poll_control(now)), now);
    sender.on_control(read(receiver.poll_control(now)));
    now += std::chrono::seconds(1);  // the pacer has room for a second's bytes
  }
  void end() {
    benchmark::DoNotOptimize(sender.poll_control(now).size());  // PROBE
    sender.on_control(read(receiver.poll_control(now)));        // STOP
    if (sender.state() != bounded::sender_state::done) throw std::runtime_error("the transfer has not ended");
  }
  bounded::control_message read(std::span<const std::byte> bytes) {
    std::error_code error;
    const auto message = bounded::read_control(bytes, limits, check, error);
    if (error) throw std::system_error(error);
    return message;
  }
  void set_counters(benchmark::State& state) const {
    state.counters["packets"] = static_cast<double>(sizes.size());
    state.counters["data_bytes"] = static_cast<double>(model.elements() * sizeof(float));
  }

  bounded::chunk_grid grid;
  lamina::selection sent;
  lamina::frame_encoder<float> encoder = lamina::frame_encoder<float>(model);
  bounded::frame_chunks chunks;
  bounded::bounded_sender sender;
  bounded::bounded_receiver receiver;
  bounded::control_limits limits;
  bounded::keyed_check check{secret};
  bounded::instant now{};
  std::vector<std::byte> datagrams;
  std::vector<std::size_t> sizes;
};

packets& all_packets() {
  static packets all;
  return all;
}

// Of the processor, in this thread: both ends compute, and wait for nobody.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The order of a frame, with and without the magnitudes of its chunks.
void order(benchmark::State& state, bool tags) {
  packets& all = all_packets();
  for (auto _ : state) {
    const double began = thread_seconds();
    const bounded::frame_chunks chunks(all.encoder.frame(), all.sent, all.grid,
                                       {.bound_ppm = 100'000, .tags = tags});
    benchmark::DoNotOptimize(chunks.in_sending_order().data());
    state.SetIterationTime(thread_seconds() - began);
  }
  all.set_counters(state);
}

// A whole transfer of which both ends, or one of them, count. Headers go into the datagrams.
void transfer(benchmark::State& state, bool counts_sending, bool counts_receiving) {
  packets& all = all_packets();
  const std::size_t count = all.sizes.size();
  for (auto _ : state) {
    all.begin();
    double spent = 0;
    const double began = thread_seconds();
    if (counts_sending && counts_receiving) {
      for (std::size_t i = 0; i < count; ++i) {
        all.write_header(i, *all.sender.next_packet(all.now));
        all.receiver.on_datagram(all.datagram(i), all.now);
      }
      spent = thread_seconds() - began;
    } else {
      for (std::size_t i = 0; i < count; ++i) all.write_header(i, *all.sender.next_packet(all.now));
      const double sent = thread_seconds();
      for (std::size_t i = 0; i < count; ++i) all.receiver.on_datagram(all.datagram(i), all.now);
      spent = counts_sending ? sent - began : thread_seconds() - sent;
    }
    all.end();
    state.SetIterationTime(spent);
  }
  all.set_counters(state);
}

// What the ends cannot do without: each byte is hashed and copied once.
void copy_and_hash(benchmark::State& state) {
  packets& all = all_packets();
  std::vector<std::byte> to(model.elements() * sizeof(float));
  for (auto _ : state) {
    const double began = thread_seconds();
    std::byte* at = to.data();
    std::uint64_t checks = 0;
    for (std::size_t i = 0; i < all.sizes.size(); ++i) {
      const auto datagram = all.datagram(i);
      checks += XXH3_64bits_withSeed(datagram.data(), datagram.size(), secret);
      const auto data = datagram.subspan(bounded::packet_header_bytes);
      std::memcpy(at, data.data(), data.size());
      at += data.size();
    }
    benchmark::DoNotOptimize(checks);
    benchmark::ClobberMemory();
    state.SetIterationTime(thread_seconds() - began);
  }
  all.set_counters(state);
}

enum class arrived : std::uint8_t { not_asked, all, all_but_a_tenth };

// commit() after a step that has emptied the caches, and commit(arrived).
void commit(benchmark::State& state, payload_type payload, arrived what) {
  lamina::worker<float> worker(
      model, {.drop_ratio = 0, .payload = payload, .frame_checksum = lamina::frame_checksum::none});
  const std::size_t chunk = bounded::chunk_elements<float>(payload, 1416);
  for (auto _ : state) {
    auto step = worker.begin();
    for (std::size_t l = 0; l < model.layers(); ++l) step.add(l, layer(l));
    benchmark::DoNotOptimize(step.frame().size_bytes());
    lamina::delivery delivered(step.sent(), chunk);
    if (what == arrived::all_but_a_tenth) {
      std::size_t n = 0;
      for (const std::size_t l : step.sent().sent()) {
        for (std::size_t i = 0; i < delivered.chunks(l); ++i) {
          if (n++ % 10 == 0) delivered.lose(l, i);
        }
      }
    }
    const auto began = std::chrono::steady_clock::now();
    what == arrived::not_asked ? step.commit() : step.commit(delivered);
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
}

using enum payload_type;
BENCHMARK_CAPTURE(order, tags, true)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(order, no_tags, false)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(copy_and_hash)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(transfer, cut, true, false)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(transfer, check_and_place, false, true)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(transfer, both_ends, true, true)->UseManualTime()->Unit(benchmark::kMillisecond);
// Of so many steps: what is timed is the least part of one.
const int steps = lamina_benchmark::is_quick() ? 2 : 20;
BENCHMARK_CAPTURE(commit, plain, as_is, arrived::not_asked)->UseManualTime()->Iterations(steps);
BENCHMARK_CAPTURE(commit, complete, as_is, arrived::all)->UseManualTime()->Iterations(steps);
BENCHMARK_CAPTURE(commit, a_tenth_lost, as_is, arrived::all_but_a_tenth)->UseManualTime()->Iterations(steps);
BENCHMARK_CAPTURE(commit, plain_int8, int8, arrived::not_asked)->UseManualTime()->Iterations(steps);
BENCHMARK_CAPTURE(commit, complete_int8, int8, arrived::all)->UseManualTime()->Iterations(steps);
BENCHMARK_CAPTURE(commit, a_tenth_lost_int8, int8, arrived::all_but_a_tenth)
    ->UseManualTime()
    ->Iterations(steps);

}  // namespace
