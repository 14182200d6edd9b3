// SPDX-License-Identifier: MIT
// Ranks that exchange the frames of a layout for some steps, rank 0 being the server, over MPI or UDP. Prints
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
#include <stdexcept>
#include <string>
#include <vector>

#include "common/model.hpp"
#include "exchange_steps.hpp"
#include "losses.hpp"
#include "messages/mpi_session.hpp"
#include "mpi_ranks.hpp"
#include "ways.hpp"

namespace {

using namespace lab;
using exchange::exchange_plan;
using exchange::step_seen;

struct exchange_options {
  std::string transport = "mpi";
  std::string layers;
  double share = 1;
  std::uint64_t steps = 50;
  int timeout_seconds = 60;
  double loss_bound = 0;
  std::string stop = "eager";
  std::string loss_tags = "on";
  std::string rate_control = "on";
  socket_options sockets;
};

void add_options(CLI::App& app, exchange_options& options) {
  app.option_defaults()->always_capture_default();
  app.add_option("--transport", options.transport, "mpi; or udp: frames as packets")
      ->check(CLI::IsMember({"mpi", "udp"}));
  app.add_option("--layers", options.layers, "file with a line a layer: its name and its shape, as 64x3x7x7")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--share", options.share, "of the elements, in each frame of gradients: above 0, at most 1");
  app.add_option("--steps", options.steps, "steps")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}));
  app.add_option("--timeout", options.timeout_seconds, "seconds without progress after which a rank is lost")
      ->check(CLI::Range(1, 86400));
  app.add_option("--loss-bound", options.loss_bound, "share of each layer's gradients that may be missing")
      ->check(CLI::Range(0.0, 0.5));
  app.add_option("--stop", options.stop, "when a transfer ends: eager or on-probe")
      ->check(CLI::IsMember({"eager", "on-probe"}));
  app.add_option("--loss-tags", options.loss_tags,
                 "on: the smallest of each layer go last and are dropped first")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--inject-loss", options.sockets.inject_loss,
                 "share of the packets that are lost on purpose")
      ->check(CLI::Range(0.0, 0.7));
  app.add_option(
      "--interface", options.sockets.interfaces,
      "with --transport udp: networks of the addresses to use, a path each, between commas; without "
      "it loopback");
  app.add_option("--link-rate", options.sockets.link_rate_bits,
                 "with --transport udp: bits a second; 0: not known");
  app.add_option("--rate-control", options.rate_control,
                 "with --transport udp: on, or off, to see what it is good for: always at the link's rate")
      ->check(CLI::IsMember({"on", "off"}));
}

bool can_lose(const exchange_options& options) {
  return options.transport == "udp" || options.loss_bound > 0 || options.sockets.inject_loss > 0;
}

exchange_plan plan_of(const exchange_options& options) {
  const auto in_ppm = [](double share) { return static_cast<std::uint32_t>(std::lround(share * 1e6)); };
  if (!(options.share > 0 && options.share <= 1))
    throw std::invalid_argument("--share is above 0 and at most 1");
  if (options.sockets.link_rate_bits > 0 && options.sockets.link_rate_bits < 1'000'000)
    throw std::invalid_argument("--link-rate is 0 or at least 1000000");
  if (can_lose(options) && options.transport == "mpi")
    throw std::invalid_argument("--loss-bound and --inject-loss: over MPI nothing can be lost");
  if (options.rate_control == "off" && options.transport != "udp")
    throw std::invalid_argument("--rate-control off needs --transport udp");
  const exchange_plan plan{.layers = lamina_benchmark::read_layers(options.layers),
                           .share = options.share,
                           .steps = options.steps,
                           .losses = {.is_lossy = can_lose(options),
                                      .bound_up_ppm = in_ppm(options.loss_bound),
                                      .has_tags = options.loss_tags == "on",
                                      .packet_data_bytes = options.sockets.packet_data_bytes()}};
  if (plan.layers.elements() == 0) throw std::invalid_argument(options.layers + " has no layers");
  return plan;
}

std::string name_of(std::size_t rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

std::vector<step_seen> exchange_frames(const exchange_options& options, const exchange_plan& plan) {
  work_clock clock;
  const std::chrono::seconds timeout(options.timeout_seconds);
  const mpi_ranks all(MPI_COMM_WORLD, timeout, clock);
  if (all.size() < 2)
    throw std::invalid_argument("one rank alone has nobody to exchange with: mpirun -n 2 or more");
  std::unique_ptr<way> over;
  if (options.transport == "udp") {
    socket_options sockets = options.sockets;
    sockets.bound_up_ppm = plan.losses.bound_up_ppm;
    sockets.has_tags = plan.losses.has_tags;
    sockets.controls_rate = options.rate_control == "on";
    if (options.stop == "on-probe") sockets.stop = lamina::bounded::stop_policy::on_probe;
    over = way_over_udp(MPI_COMM_WORLD, frame_grid(plan.layers, plan.losses), sockets, timeout, name_of);
  } else {
    over = way_over_mpi(MPI_COMM_WORLD, timeout);
  }
  if (all.rank() == 0) return exchange::serve(*over, all, plan);
  exchange::work(*over, all, plan);
  return {};
}

void print(const step_seen& seen, bool is_lossy, bool has_tags) {
  nlohmann::ordered_json line = {{"step", seen.step},
                                 {"down_seconds", seen.down_seconds},
                                 {"up_seconds", seen.up_seconds},
                                 {"seconds", seen.seconds},
                                 {"period_seconds", seen.period_seconds},
                                 {"bytes_down", seen.bytes_down},
                                 {"bytes_up", seen.bytes_up},
                                 {"missing_down", seen.missing_down},
                                 {"missing_up", seen.missing_up},
                                 {"cpu_seconds", seen.cpu_seconds}};
  if (is_lossy) {  // whose packets are the program's own; those of MPI are the kernel's
    line["packets"] = seen.packets.sent;
    line["repeated"] = seen.packets.repeated;
    line["duplicate"] = seen.packets.duplicate;
    line["late"] = seen.packets.late;
    line["wire_bytes"] = seen.packets.wire_bytes;
    line["rounds"] = seen.packets.rounds;
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
    const mpi_session session(argc, argv);
    try {
      for (const step_seen& each : exchange_frames(options, plan))
        print(each, plan.losses.is_lossy, plan.losses.has_tags);
    } catch (const std::exception& error) {
      end_all_ranks(error);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "exchange: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
