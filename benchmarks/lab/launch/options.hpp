// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace CLI {
class App;
}

namespace lab {

/// What to run: the command line, with its defaults.
struct options {
  // Data and network.
  std::string data = "synthetic";
  std::string network = "resnet50";  ///< resnet50 or vgg16
  std::int64_t image_size_pixels = 0;
  bool small_stem = false;
  std::int64_t classes = 0;  ///< of the network; 0: those of the data
  std::size_t batch_images = 16;
  std::uint64_t steps = 300;
  std::uint64_t seed = 1;

  // Layer dropping.
  std::string runs;  ///< all, both, without or with layer dropping
  double drop_ratio = 0.95;
  std::uint64_t drop_warm_up_steps = 0;
  std::uint64_t refresh_steps = 1;  ///< 0: in the first step alone
  std::optional<double> threshold;
  std::optional<double> byte_budget;
  std::string selection;  ///< local or agreed; empty: agreed where workers go in step
  std::uint64_t max_age_steps = 0;
  std::size_t part_elements = 0;
  double residual_momentum = 0;
  std::string payload = "as_is";
  std::string priority = "value";  ///< value or value_times_waiting

  // The server.
  std::string mode = "sync";                     ///< sync or async
  std::optional<std::uint64_t> staleness_steps;  ///< of async; none: any
  std::string topology = "ps";                   ///< ps, hybrid, allreduce or mpi_allreduce
  std::optional<std::size_t> workers_per_node;   ///< of a hybrid one; none: those of each machine
  std::string transport = "mpi";                 ///< mpi, udp or inprocess
  float learning_rate = 0.1F;
  std::string schedule = "constant";
  std::uint64_t warm_up_steps = 20;
  float momentum = 0.0F;
  bool nesterov = false;
  float weight_decay = 0;
  std::uint64_t evaluation_period_steps = 0;  ///< 0: at the end alone
  bool no_evaluation = false;

  // Frames of which some may be lost.
  double loss_bound = 0;       ///< p of gradients, at most a half
  double loss_bound_down = 0;  ///< of parameters
  std::uint64_t loss_bound_warm_up_steps = 0;
  std::string stop = "eager";      ///< eager or on-probe
  std::string on_loss = "return";  ///< return or zero
  unsigned max_losses = 3;         ///< in a row; 0: any number
  std::string loss_tags = "on";    ///< on or off
  double inject_loss = 0;          ///< share of the packets
  std::uint64_t inject_seed = 1;

  // Sockets.
  std::string interfaces;            ///< networks, with commas between them; empty: any
  std::uint64_t link_rate_bits = 0;  ///< a second; 0: not known
  std::size_t mtu = 1500;            ///< bytes

  // Sums beside the computation.
  std::string overlap = "none";             ///< none, backward or step
  std::string decide = "at_end";            ///< at_end or ahead
  std::string exchange = "sums";            ///< sums or owners
  std::string collectives = "pairwise";     ///< an algorithm, by_type or by_cost
  std::string sum_payload = "as_is";        ///< or bfloat16
  std::optional<std::size_t> bucket_bytes;  ///< none: by the costs of the network
  std::optional<std::size_t> chunk_bytes;   ///< none: 4 MiB
  bool is_calibrated = false;
  std::string progress_by = "thread";  ///< thread or hooks
  std::string plan;                    ///< file of an earlier run; empty: the plan is made
  std::string timeline;                ///< file; empty: none is written

  // Local updates.
  std::string updates = "gradients";  ///< gradients or local
  std::uint64_t delay_steps = 0;
  double outer_rate = 1;
  double outer_momentum = 0;
  std::string down_payload = "as_is";

  // The run.
  std::string output;                         ///< directory; empty: none is written
  std::string load;                           ///< file; empty: the model begins as the seed makes it
  std::string save;                           ///< file; empty: the model is not kept
  std::uint64_t checkpoint_period_steps = 0;  ///< 0: no checkpoints
  bool resume = false;
  bool merge_residuals = false;
  bool changes_exchange = false;
  bool degraded = false;
  std::uint64_t interval = 15;
  std::size_t progress_columns = 0;
  std::optional<std::size_t> workers;
  std::string device = "cpu";  ///< cpu or cuda: where the workers compute
  int threads = 0;             ///< a worker; 0: the machine's cores shared among its workers
  std::uint64_t timeout_seconds = 600;

  std::string done_file;
  std::string command_line;
  std::string experiment;  ///< what one changes that all ranks must have alike, in words
};

/// Whether rank 0 is a server and no worker.
inline bool needs_server(const lab::options& options) {
  return options.topology != "allreduce" && options.topology != "mpi_allreduce";
}

/// Whether packets may be lost: on purpose, or for good.
inline bool may_lose(const lab::options& options) {
  return options.loss_bound > 0 || options.loss_bound_down > 0 || options.inject_loss > 0;
}

/// Whether frames are cut into packets.
inline bool cuts_frames(const lab::options& options) {
  return may_lose(options) || options.transport == "udp";
}

/// Whether it trains more than once, to compare.
inline bool compares(const lab::options& options) {
  return options.runs == "all" || options.runs == "both";
}

struct parsed {
  lab::options options;
  /// Set if the program has nothing to run: what to print, and how to end.
  std::optional<int> exit_code;
  std::string message;
};

/// Adds options that are not the program's own.
using option_hook = std::function<void(CLI::App&)>;

/// Reads the command line; for --help and for a mistake gives the message and the exit code.
parsed parse_options(int argc, char** argv, const option_hook& add_options = {});

}  // namespace lab
