// SPDX-License-Identifier: MIT
// Ranks that exchange the frames of a layout for some steps, rank 0 being the server, over MPI or UDP. Prints
// a line of JSON a step when all are over. Run by ./incast; see --help.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "common/model.hpp"
#include "exchange_steps.hpp"

namespace {

using namespace lab;

void add_options(CLI::App& app, std::string& layers, exchange::exchange_plan& plan) {
  app.option_defaults()->always_capture_default();
  add_link_options(app, "Links", plan.links);
  app.add_option("--layers", layers, "file with a line a layer: its name and its shape, as 64x3x7x7")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--share", plan.share, "of the elements, in each frame of gradients: above 0, at most 1");
  app.add_option("--steps", plan.steps, "steps")
      ->check(CLI::Range(std::uint64_t{1}, std::uint64_t{1'000'000}));
  app.add_flag("--stop-on-probe", plan.links.stops_on_probe, "a transfer ends on probe, in place of eagerly");
  app.add_option("--loss-tags", plan.links.has_tags,
                 "on: the smallest of each layer go last and are dropped first");
  app.add_option("--rate-control", plan.links.controls_rate,
                 "with udp: on, or off, to see what it is good for: always at the link's rate");
}

void exchange_frames(exchange::exchange_plan& plan, const std::string& layers) {
  if (const std::string mistake = plan.links.mistake(); !mistake.empty())
    throw std::invalid_argument(mistake);
  plan.layers = lamina_benchmark::read_layers(layers);
  if (plan.layers.elements() == 0) throw std::invalid_argument(layers + " has no layers");
  work_clock clock;
  const mpi_ranks all(MPI_COMM_WORLD, exchange::timeout, clock);
  if (all.size() < 2)
    throw std::invalid_argument("one rank alone has nobody to exchange with: mpirun -n 2 or more");
  const auto over = open_way(MPI_COMM_WORLD, plan.layers, plan.links, exchange::timeout, exchange::name_of);
  if (all.rank() != 0) return exchange::work(*over, all, plan);
  for (const exchange::step_seen& seen : exchange::serve(*over, all, plan)) {
    nlohmann::ordered_json line = {{"step", seen.step},
                                   {"down_seconds", seen.down_seconds},
                                   {"up_seconds", seen.up_seconds},
                                   {"seconds", seen.seconds},
                                   {"period_seconds", seen.period_seconds},
                                   {"bytes_down", seen.bytes_down},
                                   {"bytes_up", seen.bytes_up},
                                   {"missing_up", seen.missing_up},
                                   {"cpu_seconds", seen.cpu_seconds}};
    if (plan.links.is_lossy()) {  // whose packets are the program's own; those of MPI are the kernel's
      line["packets"] = seen.packets.sent;
      line["repeated"] = seen.packets.repeated;
      line["late"] = seen.packets.late;
    }
    if (plan.links.is_lossy() && plan.links.has_tags) {
      line["missing_chunks"] = seen.packets.missing;
      line["missing_droppable"] = seen.packets.missing_droppable;
    }
    std::printf("%s\n", line.dump().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  exchange::exchange_plan plan;
  std::string layers;
  CLI::App app("Exchanges frames between a server, rank 0, and workers, and says what each step took.");
  add_options(app, layers, plan);
  CLI11_PARSE(app, argc, argv);
  return run_ranks("exchange", argc, argv, MPI_THREAD_FUNNELED, [&] { exchange_frames(plan, layers); });
}
