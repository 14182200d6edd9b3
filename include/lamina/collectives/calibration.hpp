// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/collectives/agreement.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/round_header.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/detail/abi.hpp"

namespace lamina::inline LAMINA_ABI::collectives {

struct calibration_options {
  std::size_t latency_rounds = 200;  ///< of 4 bytes
  /// That a rank sends in each of two measurements, if a round of sixteen pieces is not more by itself.
  std::size_t most_bytes = std::size_t{64} << 20U;
  std::size_t least_bytes =
      std::size_t{8} << 20U;  ///< though seconds are over: a limited link gives the first bytes for free
  double seconds = 1;
  piece_sizes pieces = {};  ///< as the engine's
  /// Bytes a second that the network is known not to exceed; what is measured above it is refused. 0: not known.
  double known_rate = 0;
  std::chrono::milliseconds timeout = std::chrono::minutes(2);
};

namespace detail {

/// Of a round of which the seconds a byte are measured: many, as the engine's rounds have. A link with a token bucket lets a single piece
/// pass at the speed of the wire, and the rate it is limited to is seen by the rounds that empty the bucket.
inline constexpr std::size_t pieces_of_a_round = 16;

class calibrator {
 public:
  calibrator(channel& over, const calibration_options& options)
      : talk_(over, options.timeout), options_(options) {
    talk_.make_room(pieces_of_a_round * (std::max)(options.pieces.both_ways, options.pieces.one_way));
  }

  double latency() {
    std::vector<double> seconds;
    for (std::size_t k = 0; k < options_.latency_rounds; ++k)
      seconds.push_back(exchange(after(), before(), {4, 1}));
    return median(seconds);
  }
  double one_way() { return rate(after(), before(), options_.pieces.one_way); }
  // With rank r xor 1. The last of an odd number has nobody, and looks on: 0.
  double both_ways() {
    const std::size_t peer = talk_.rank() ^ 1U;
    const std::size_t with = peer < talk_.ranks() ? peer : talk_.rank();
    return rate(with, with, options_.pieces.both_ways);
  }
  // In memory, of a chunk.
  static double adding() {
    std::vector<float> to(std::size_t{1} << 20U, 1.0F);
    const std::vector<float> from(to.size(), 1.0F);
    std::vector<double> seconds;
    for (int k = 0; k < 9; ++k) {
      const auto begin = clock::now();
      add_to(to, from);
      seconds.push_back(since(begin) / static_cast<double>(to.size() * sizeof(float)));
    }
    return median(seconds);
  }

 private:
  using clock = std::chrono::steady_clock;
  static double since(clock::time_point begin) {
    return std::chrono::duration<double>(clock::now() - begin).count();
  }
  static double median(std::vector<double>& values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::ranges::nth_element(values, middle);
    return *middle;
  }
  [[nodiscard]] std::size_t after() const { return (talk_.rank() + 1) % talk_.ranks(); }
  [[nodiscard]] std::size_t before() const { return (talk_.rank() + talk_.ranks() - 1) % talk_.ranks(); }

  double exchange(std::size_t to, std::size_t from, conversation::messages each_way) {
    if (to == talk_.rank()) return 0;
    const auto begin = clock::now();
    talk_.exchange(to, each_way, from, each_way);
    return since(begin);
  }

  // Seconds a byte, the median after the first eighth of the rounds. All ranks stop in the same round, when rank 0 says that time is over.
  double rate(std::size_t to, std::size_t from, std::size_t piece) {
    const std::size_t bytes = piece * pieces_of_a_round;
    const std::size_t rounds = (std::max)(std::size_t{1}, options_.most_bytes / bytes);
    const std::size_t least = options_.least_bytes / bytes;
    std::vector<double> seconds;
    const auto begin = clock::now();
    for (std::size_t k = 0; k < rounds; ++k) {
      seconds.push_back(exchange(to, from, {piece, pieces_of_a_round}) / static_cast<double>(bytes));
      if (k + 1 < least) continue;
      std::vector<std::uint32_t> is_over = {since(begin) > options_.seconds ? 1U : 0U};
      talk_.broadcast(is_over);
      if (is_over[0] != 0) break;
    }
    seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 8));
    return median(seconds);
  }

  conversation talk_;
  calibration_options options_;
};

inline void check_options(const calibration_options& options) {
  if (options.latency_rounds == 0)
    throw std::invalid_argument("calibration: latency_rounds is 0: at least one is needed");
  for (const std::size_t bytes : {options.pieces.both_ways, options.pieces.one_way}) {
    if (bytes >= round_header::size_bytes + sizeof(float)) continue;
    throw std::invalid_argument("calibration: a piece of " + std::to_string(bytes) +
                                " bytes has no room for a header and an element");
  }
  if (!std::isfinite(options.seconds) || options.seconds < 0) {
    throw std::invalid_argument("calibration: seconds is " + std::to_string(options.seconds) +
                                ": it must be finite and not below 0");
  }
  if (!std::isfinite(options.known_rate) || options.known_rate < 0) {
    throw std::invalid_argument("calibration: known_rate is " + std::to_string(options.known_rate) +
                                ": it must be finite, and 0 where it is not known");
  }
}

}  // namespace detail

/// Measures the network with all ranks at once, as in the run, since they share links and cores. All ranks call it at the same time and get
/// the same table, the largest of each constant, with three digits. About twice options.seconds.
///
///  - alpha: ring rounds of 4 bytes;
///  - beta_one_way: ring rounds of sixteen pieces at once; beta_both_ways: exchanges of as many with rank r xor 1; of both alpha is
///    taken off;
///  - gamma: adding in memory.
///
/// One rank, which sends nothing, measures gamma alone and has gigabit_costs otherwise. Throws calibration_error for a constant that
/// cannot be, or a rate above options.known_rate; std::invalid_argument, before a message is sent, for an option that cannot be;
/// channel_error where a rank is silent, which ends the channel.
[[nodiscard]] inline cost_table calibrate(channel& over, const calibration_options& options = {}) {
  detail::check_options(options);
  cost_table own = gigabit_costs;
  own.gamma = detail::calibrator::adding();
  if (over.ranks() > 1) {
    detail::calibrator measure(over, options);
    own.alpha = measure.latency();
    const auto beta = [&](double seconds, std::size_t bytes) {
      return (std::max)(seconds - own.alpha / static_cast<double>(bytes), seconds / 10);
    };
    own.beta_one_way = beta(measure.one_way(), detail::pieces_of_a_round * options.pieces.one_way);
    const double both = measure.both_ways();
    own.beta_both_ways =
        both > 0 ? beta(both, detail::pieces_of_a_round * options.pieces.both_ways) : own.beta_one_way;
    own = agree_on_costs(over, own, options.timeout);
  }
  check_costs(own);
  if (over.ranks() > 1 && options.known_rate > 0) {
    for (const auto& [name, beta] :
         {std::pair("beta_one_way", own.beta_one_way), std::pair("beta_both_ways", own.beta_both_ways)}) {
      if (beta * options.known_rate >= 1) continue;
      throw calibration_error(std::string(name) + " was measured as " + std::to_string(beta * 1e9) +
                              " ns a byte, which is quicker than the rate of the network allows");
    }
  }
  return rounded(own);
}

}  // namespace lamina::inline LAMINA_ABI::collectives
