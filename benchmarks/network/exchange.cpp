// SPDX-License-Identifier: MIT
// Ranks that exchange the frames of a layout for some steps, rank 0 being the server, over the transports of the reference harness. Prints
// a line of JSON a step when all are over. Run by ./incast; see --help.
#include <mpi.h>
#include <nlohmann/json.hpp>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/model.hpp"
#include "exchange_steps.hpp"
#include "launch/numbers.hpp"
#include "loops/losses.hpp"
#include "messages/in_process_transport.hpp"
#include "messages/mpi_transport.hpp"
#include "messages/over_udp.hpp"

namespace {

using namespace lab;
using exchange::exchange_plan;
using exchange::step_seen;

struct exchange_options {
  std::string transport = "mpi";
  std::string layers;
  double share = 1;
  std::uint64_t steps = 50;
  std::size_t workers = 2;
  int timeout_seconds = 60;
  double loss_bound = 0;
  double loss_bound_down = 0;
  std::string stop = "eager";
  unsigned max_losses = 3;
  std::string loss_tags = "on";
  double inject_loss = 0;
  std::uint64_t inject_seed = 1;
  std::string interfaces;
  std::uint64_t link_rate_bits = 0;
  std::string rate_control = "on";
  std::size_t mtu = 1500;
  bool check = false;
};

void add_options(CLI::App& app, exchange_options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("--transport", options.transport,
                 "mpi; udp: frames as packets; inprocess: all ranks in one process, over a simulated network")
      ->check(CLI::IsMember({"mpi", "udp", "inprocess"}));
  app.add_option("--layers", options.layers, "file with a line a layer: its name and its shape, as 64x3x7x7")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--share", options.share, "of the elements, in each frame of gradients: above 0, at most 1")
      ->check(lab::finite);
  app.add_option("--steps", options.steps, "steps")
      ->check(counted)
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}));
  app.add_option("--workers", options.workers, "with --transport inprocess")->check(CLI::Range(1, 1000));
  app.add_option("--timeout", options.timeout_seconds, "seconds without progress after which a rank is lost")
      ->check(CLI::Range(1, 86400));
  app.add_option("--loss-bound", options.loss_bound, "share of each layer's gradients that may be missing")
      ->check(lab::finite)
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--loss-bound-down", options.loss_bound_down, "the same of parameters")
      ->check(lab::finite)
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--stop", options.stop, "when a transfer ends: eager or on-probe")
      ->check(CLI::IsMember({"eager", "on-probe"}));
  app.add_option("--max-losses", options.max_losses,
                 "gradients lost so often in a row must arrive; 0: never");
  app.add_option("--loss-tags", options.loss_tags,
                 "on: the smallest of each layer go last and are dropped first")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--inject-loss", options.inject_loss, "share of the packets that are lost on purpose")
      ->check(lab::finite)
      ->check(CLI::Range(0.0, 0.7));
  app.add_option("--inject-seed", options.inject_seed, "of which packets it loses")->check(counted);
  app.add_option(
      "--interface", options.interfaces,
      "with --transport udp: networks of the addresses to use, a path each, between commas; without "
      "it loopback");
  app.add_option("--link-rate", options.link_rate_bits, "with --transport udp: bits a second; 0: not known")
      ->check(link_rate);
  app.add_option("--rate-control", options.rate_control,
                 "with --transport udp: on, or off, to see what it is good for: always at the link's rate")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--mtu", options.mtu, "with --transport udp: bytes")->check(CLI::Range(576, 65535));
  app.add_flag("--check", options.check, "only says whether these options can be meant");
}

bool can_lose(const exchange_options& options) {
  return options.transport == "udp" || options.loss_bound > 0 || options.loss_bound_down > 0 ||
         options.inject_loss > 0;
}

// Without the headers of IP, UDP and the packet; where the network is of IPv6 they are larger.
std::size_t packet_data_bytes(const exchange_options& options) {
  const std::size_t headers = options.interfaces.find(':') == std::string::npos ? 28 : 48;
  return options.mtu - headers - lamina::bounded::packet_header_bytes;
}

exchange_plan plan_of(const exchange_options& options) {
  const auto in_ppm = [](double share) { return static_cast<std::uint32_t>(std::lround(share * 1e6)); };
  if (!(options.share > 0 && options.share <= 1))
    throw std::invalid_argument("--share is above 0 and at most 1");
  if (can_lose(options) && options.transport == "mpi")
    throw std::invalid_argument(
        "--loss-bound, --loss-bound-down and --inject-loss: over MPI nothing can be lost");
  if (options.rate_control == "off" && options.transport != "udp")
    throw std::invalid_argument("--rate-control off needs --transport udp");
  exchange_plan plan{.layers = lamina_benchmark::read_layers(options.layers),
                     .share = options.share,
                     .steps = options.steps,
                     .losses = {.is_lossy = can_lose(options),
                                .bound_up_ppm = in_ppm(options.loss_bound),
                                .bound_down_ppm = in_ppm(options.loss_bound_down),
                                .max_losses = options.max_losses,
                                .has_tags = options.loss_tags == "on",
                                .packet_data_bytes = packet_data_bytes(options)}};
  if (plan.layers.elements() == 0) throw std::invalid_argument(options.layers + " has no layers");
  if (options.transport == "inprocess") plan.processor_clock = CLOCK_THREAD_CPUTIME_ID;
  return plan;
}

lamina::bounded::stop_policy stop_of(const exchange_options& options) {
  return options.stop == "eager" ? lamina::bounded::stop_policy::eager
                                 : lamina::bounded::stop_policy::on_probe;
}

std::string name_of(std::size_t rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

std::vector<step_seen> take_part(transport& ranks, const exchange_plan& plan) {
  if (ranks.rank() == 0) return exchange::serve(ranks, plan);
  exchange::work(ranks, plan);
  return {};
}

std::vector<step_seen> exchange_in_process(const exchange_options& options, const exchange_plan& plan) {
  std::vector<step_seen> seen;
  in_process_options ends{.name_of = name_of, .on_death = {}};
  if (can_lose(options)) {
    ends.losses = lossy_options{.loss = options.inject_loss,
                                .seed = options.inject_seed,
                                .stop = stop_of(options),
                                .most_bound_up_ppm = plan.losses.bound_up_ppm,
                                .most_bound_down_ppm = plan.losses.bound_down_ppm};
  }
  const auto body = [&](transport& ranks) {
    std::vector<step_seen> mine = take_part(ranks, plan);
    if (ranks.rank() == 0) seen = std::move(mine);
  };
  run_in_process(options.workers + 1, body, ends);
  return seen;
}

// The server talks to all, everybody else to the server.
std::vector<std::size_t> peers_of(std::size_t rank, std::size_t ranks) {
  if (rank > 0) return {0};
  std::vector<std::size_t> workers(ranks - 1);
  std::iota(workers.begin(), workers.end(), std::size_t{1});
  return workers;
}

std::unique_ptr<transport> meet_over_sockets(const exchange_options& options, const exchange_plan& plan,
                                             std::size_t ranks, std::size_t max_message_bytes) {
  int number = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &number), "MPI_Comm_rank");
  const auto rank = static_cast<std::size_t>(number);
  const lamina::bounded::chunk_grid grid =
      frame_grid(plan.layers, lamina::payload_type::as_is, plan.losses.packet_data_bytes);
  const std::chrono::seconds timeout(options.timeout_seconds);
  return meet_over_udp(MPI_COMM_WORLD,
                       {.rank = rank,
                        .ranks = ranks,
                        .takes_gradients = rank == 0,
                        .peers = peers_of(rank, ranks),
                        .frames = {.gradients = grid,
                                   .parameters = grid,
                                   .most_bound_up_ppm = plan.losses.bound_up_ppm,
                                   .most_bound_down_ppm = plan.losses.bound_down_ppm,
                                   .stop = stop_of(options),
                                   .has_tags = plan.losses.has_tags},
                        .link_bits = options.link_rate_bits,
                        .senders = static_cast<std::uint32_t>(rank == 0 ? 1 : ranks - 1),
                        .controls_rate = options.rate_control == "on",
                        .mtu = options.mtu,
                        .max_message_bytes = max_message_bytes,
                        .timeout_of = [timeout](std::size_t) { return timeout; },
                        .name_of = name_of},
                       local_paths(options.interfaces, options.interfaces.empty()),
                       {.inject_loss = options.inject_loss, .inject_seed = options.inject_seed << 8U | rank});
}

std::vector<step_seen> exchange_over_mpi(const exchange_options& options, const exchange_plan& plan) {
  int ranks = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &ranks), "MPI_Comm_size");
  if (ranks < 2)
    throw std::invalid_argument("one rank alone has nobody to exchange with: mpirun -n 2 or more");
  constexpr std::size_t marks_bytes = 64;  // of a step, at most
  const std::size_t most_bytes = lamina::largest_frame_bytes<float>(plan.layers) +
                                 marks_bytes * (options.steps + 1) + (std::size_t{1} << 20);
  if (options.transport == "udp") {
    const auto over = meet_over_sockets(options, plan, static_cast<std::size_t>(ranks), most_bytes);
    return take_part(*over, plan);
  }
  mpi_transport over(
      MPI_COMM_WORLD,
      {.max_message_bytes = most_bytes,
       .timeout_of = [&](std::size_t) { return std::chrono::seconds(options.timeout_seconds); },
       .exchange_timeout = std::chrono::seconds(options.timeout_seconds),
       .name_of = name_of});
  return take_part(over, plan);
}

void print(const step_seen& seen, bool is_lossy, bool has_tags) {
  nlohmann::ordered_json line = {{"step", seen.step},
                                 {"down_seconds", seen.down_seconds},
                                 {"up_seconds", seen.up_seconds},
                                 {"seconds", seen.seconds},
                                 {"period_seconds", seen.period_seconds},
                                 {"bytes_down", seen.bytes_down},
                                 {"bytes_up", seen.bytes_up},
                                 {"missing_down", seen.down.lost_share()},
                                 {"missing_up", seen.up.lost_share()},
                                 {"cpu_seconds", seen.cpu_seconds}};
  if (is_lossy) {  // whose packets are the program's own; those of MPI are the kernel's
    transfer_cost both = seen.down;
    both += seen.up;
    line["packets"] = both.packets;
    line["repeated"] = both.repeated;
    line["duplicate"] = both.duplicate;
    line["late"] = both.late;
    line["wire_bytes"] = both.wire_bytes;
    line["rounds"] = both.rounds;
    if (has_tags) {
      line["missing_chunks"] = seen.missing_chunks;
      line["missing_droppable"] = seen.missing_droppable_chunks;
    }
  }
  std::printf("%s\n", line.dump().c_str());
}

// Says why and ends the other ranks too, which may wait for this one for ever.
[[noreturn]] void end_all_ranks(const std::exception& error) {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fprintf(stderr, "exchange: rank %d: %s\n", rank, error.what());
  std::fflush(stderr);
  MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  exchange_options options;
  CLI::App app("Exchanges frames between a server, rank 0, and workers, and says what each step took.");
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    const exchange_plan plan = plan_of(options);
    if (options.check) return EXIT_SUCCESS;
    std::vector<step_seen> seen;
    if (options.transport == "inprocess") {
      seen = exchange_in_process(options, plan);
    } else {
      const mpi_session session(argc, argv);
      try {
        seen = exchange_over_mpi(options, plan);
      } catch (const std::exception& error) {
        end_all_ranks(error);
      }
    }
    for (const step_seen& each : seen) print(each, plan.losses.is_lossy, plan.losses.has_tags);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchange: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
