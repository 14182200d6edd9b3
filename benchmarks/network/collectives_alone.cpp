// SPDX-License-Identifier: MIT
// Seconds of an all-reduce and nothing else, by each algorithm of lamina::collectives and by MPI, in turn. Run by overlap.py, under mpirun.
// Rank 0 prints a line of JSON for each way and size, or the constants of the network with `calibrate`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "lamina/collectives/collectives.hpp"
#include "lamina/collectives/mpi_channel.hpp"
#include "network/calibration.hpp"

namespace {

namespace collectives = lamina::collectives;
using clock_type = std::chrono::steady_clock;

double since(clock_type::time_point begin) {
  return std::chrono::duration<double>(clock_type::now() - begin).count();
}

// As the engine looks for messages: again and again, with naps that grow while nothing comes.
template <class Advance>
void wait_until_over(const Advance& advance) {
  std::chrono::microseconds nap{5};
  for (bool has_moved = false; !advance(has_moved);) {
    if (has_moved) {
      nap = std::chrono::microseconds{5};
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, std::chrono::microseconds{200});
    }
  }
}

class ways {
 public:
  ways(collectives::mpi_channel& channel, std::size_t most_elements)
      : executor_(channel, 1, std::min(most_elements, chunk_elements), memory_),
        elements_(most_elements, 1.0F) {
    for (const collectives::algorithm how : collectives::all_algorithms)
      all_.emplace_back(collectives::name_of(how),
                        [this, how](std::size_t n) { ours(how, lamina::payload_type::as_is, n); });
    all_.emplace_back("pairwise, bfloat16", [this](std::size_t n) {
      ours(collectives::algorithm::pairwise, lamina::payload_type::bfloat16, n);
    });
    all_.emplace_back("MPI_Allreduce", [this](std::size_t n) {
      MPI_Allreduce(MPI_IN_PLACE, elements_.data(), static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    });
    all_.emplace_back("MPI_Iallreduce", [this](std::size_t n) { tested(n); });
  }

  using way = std::pair<std::string, std::function<void(std::size_t)>>;
  [[nodiscard]] std::vector<way> chosen(const std::vector<std::string>& names) const {
    std::vector<way> found;
    for (const way& each : all_) {
      if (names.empty() || std::ranges::find(names, each.first) != names.end()) found.push_back(each);
    }
    return found;
  }
  // So that numbers do not grow.
  void reset() { std::ranges::fill(elements_, 1.0F); }

 private:
  static constexpr std::size_t chunk_elements = std::size_t{1} << 20U;  // 4 MiB, as of a plan

  void ours(collectives::algorithm how, lamina::payload_type payload, std::size_t n) {
    for (std::size_t begin = 0; begin < n; begin += chunk_elements) {
      const std::size_t count = std::min(chunk_elements, n - begin);
      executor_.start({.number = ++number_,
                       .how = how,
                       .payload = payload,
                       .elements = std::span(elements_).subspan(begin, count)});
      wait_until_over([this](bool& has_moved) {
        if (executor_.is_running()) has_moved = executor_.advance();
        return !executor_.is_running();
      });
    }
  }
  void tested(std::size_t n) {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Iallreduce(MPI_IN_PLACE, elements_.data(), static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD,
                   &request);
    wait_until_over([&](bool&) {
      int is_over = 0;
      MPI_Test(&request, &is_over, MPI_STATUS_IGNORE);
      return is_over != 0;
    });
  }

  collectives::executor::memory memory_;
  collectives::executor executor_;
  std::uint32_t number_ = 0;
  std::vector<float> elements_;
  std::vector<way> all_;
};

// On the rank for which it is most.
double seconds_of(const ways::way& way, std::size_t elements) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begin = clock_type::now();
  way.second(elements);
  double seconds = since(begin);
  MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return seconds;
}

void measure(collectives::mpi_channel& channel, const std::vector<std::size_t>& sizes,
             const std::vector<std::string>& names, double seconds) {
  ways all(channel, *std::ranges::max_element(sizes) / sizeof(float));
  const std::vector<ways::way> chosen = all.chosen(names);
  for (const std::size_t bytes : sizes) {
    const std::size_t elements = bytes / sizeof(float);
    double slowest = 0;
    for (const auto& each : chosen) slowest = std::max(slowest, seconds_of(each, elements));  // and warms up
    const int repetitions =
        static_cast<int>(std::clamp(seconds / slowest, 3.0, 50.0));  // slowest is the same on all ranks
    std::vector<std::vector<double>> taken(chosen.size());
    for (int k = 0; k < repetitions; ++k) {  // interleaved
      all.reset();
      for (std::size_t w = 0; w < chosen.size(); ++w) taken[w].push_back(seconds_of(chosen[w], elements));
    }
    for (std::size_t w = 0; w < chosen.size() && channel.rank() == 0; ++w) {
      std::ranges::sort(taken[w]);
      const nlohmann::json line = {
          {"way", chosen[w].first},    {"bytes", bytes},          {"seconds", taken[w][taken[w].size() / 2]},
          {"least", taken[w].front()}, {"most", taken[w].back()}, {"repetitions", repetitions}};
      std::printf("%s\n", line.dump().c_str());
    }
  }
}

void calibrate(collectives::mpi_channel& channel) {
  const collectives::cost_table costs = lab::calibrate(
      channel, {.most_bytes = std::size_t{16} << 20U, .least_bytes = std::size_t{2} << 20U, .seconds = 0.3});
  if (channel.rank() != 0) return;
  const nlohmann::json line = {{"alpha", costs.alpha},
                               {"beta_one_way", costs.beta_one_way},
                               {"beta_both_ways", costs.beta_both_ways},
                               {"gamma", costs.gamma}};
  std::printf("%s\n", line.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  CLI::App app{"Seconds of an all-reduce and nothing else"};
  std::vector<std::size_t> sizes = {4096, 65536, 1048576};
  std::vector<std::string> names;
  double seconds = 0.5;
  app.add_option("--sizes", sizes, "bytes of float")
      ->check(CLI::Range(std::size_t{4}, std::size_t{1} << 32U));
  app.add_option("--ways", names, "all without it");
  app.add_option("--seconds", seconds, "of each size, all ways together: 3 to 50 repetitions")
      ->check(CLI::PositiveNumber);
  const CLI::App* const calibrating = app.add_subcommand("calibrate", "print the constants of the network");
  int status = 0;
  try {
    app.parse(argc, argv);
    collectives::mpi_channel channel(MPI_COMM_WORLD);
    calibrating->parsed() ? calibrate(channel) : measure(channel, sizes, names, seconds);
  } catch (const CLI::ParseError& error) {
    status = app.exit(error);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "collectives_alone: %s\n", error.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
  return status;
}
