// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lamina/collectives/agreement.hpp"
#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/round_header.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/detail/finite.hpp"

/// The constants of a network, measured over a channel, from which lamina::collectives::plan chooses.
namespace lab {

using lamina::collectives::channel;
using lamina::collectives::cost_table;
using lamina::collectives::round_header;

struct calibration_options {
  std::size_t latency_rounds = 200;  ///< of 4 bytes
  /// That a rank sends in each of two measurements, if a round of sixteen pieces is not more by itself.
  std::size_t most_bytes = std::size_t{64} << 20U;
  std::size_t least_bytes =
      std::size_t{8} << 20U;  ///< though seconds are over: a limited link gives the first bytes for free
  double seconds = 1;
  lamina::collectives::piece_sizes pieces = {};  ///< as the engine's
  /// Bytes a second that the network is known not to exceed; what is measured above it is refused. 0: not known.
  double known_rate = 0;
  std::chrono::milliseconds timeout = std::chrono::minutes(2);
};

/// Thrown for a rate that the network cannot have.
class calibration_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

/// Of a round of which the seconds a byte are measured: many, as the engine's rounds have. A link with a token bucket lets a single piece
/// pass at the speed of the wire, and the rate it is limited to is seen by the rounds that empty the bucket.
inline constexpr std::size_t pieces_of_a_round = 16;

inline bool can_be(double constant) noexcept {
  return lamina::detail::is_finite(constant) && constant > 0;
}

class calibrator {
 public:
  calibrator(channel& over, const calibration_options& options)
      : channel_(over),
        talk_(over, options.timeout),
        patience_(options.timeout),
        options_(options),
        memory_(std::make_shared<memory>()) {
    const std::size_t most = pieces_of_a_round * (std::max)(options.pieces.both_ways, options.pieces.one_way);
    memory_->out.resize(most);
    memory_->in.resize(most);
  }

  double latency() {
    std::vector<double> seconds;
    for (std::size_t k = 0; k < options_.latency_rounds; ++k)
      seconds.push_back(exchange(after(), before(), 4, 1));
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
      lamina::collectives::add_to(to, from);
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

  // Seconds of so many pieces to a rank, and as many from another, all under way at once.
  double exchange(std::size_t to, std::size_t from, std::size_t bytes, std::size_t pieces) {
    if (to == talk_.rank()) return 0;
    const auto begin = clock::now();
    try {
      for (std::size_t k = 0; k < pieces; ++k)
        channel_.receive(from, tag, {{}, std::span(memory_->in).subspan(k * bytes, bytes)});
      for (std::size_t k = 0; k < pieces; ++k)
        channel_.send(to, tag, {{}, std::span(std::as_const(memory_->out)).subspan(k * bytes, bytes)});
      patience_.renew(clock::now());
      for (std::size_t open = 2 * pieces; open > 0;) {
        const std::size_t done = channel_.progress().size();
        open -= done;
        if (done > 0) {
          patience_.renew(clock::now());
        } else if (patience_.is_over(clock::now())) {
          throw lamina::collectives::channel_error(from, "nothing heard for " +
                                                             std::to_string(options_.timeout.count()) +
                                                             " ms from " + channel_.name_of(from));
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(5));
        }
      }
    } catch (...) {
      channel_.abandon(memory_);
      throw;
    }
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
      seconds.push_back(exchange(to, from, piece, pieces_of_a_round) / static_cast<double>(bytes));
      if (k + 1 < least) continue;
      std::vector<std::uint32_t> is_over = {since(begin) > options_.seconds ? 1U : 0U};
      talk_.broadcast(is_over);
      if (is_over[0] != 0) break;
    }
    seconds.erase(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 8));
    return median(seconds);
  }

  struct memory {
    std::vector<std::byte> out;
    std::vector<std::byte> in;
  };
  static constexpr std::uint32_t tag = 2;

  channel& channel_;
  lamina::collectives::detail::conversation talk_;
  lamina::collectives::detail::patience patience_;
  calibration_options options_;
  std::shared_ptr<memory> memory_;
};

inline void check_options(const calibration_options& options) {
  if (options.latency_rounds == 0)
    throw std::invalid_argument("calibration: latency_rounds is 0: at least one is needed");
  for (const std::size_t bytes : {options.pieces.both_ways, options.pieces.one_way}) {
    if (bytes >= round_header::size_bytes + sizeof(float)) continue;
    throw std::invalid_argument("calibration: a piece of " + std::to_string(bytes) +
                                " bytes has no room for a header and an element");
  }
  if (!lamina::detail::is_finite(options.seconds) || options.seconds < 0) {
    throw std::invalid_argument("calibration: seconds is " + std::to_string(options.seconds) +
                                ": it must be finite and not below 0");
  }
  if (!lamina::detail::is_finite(options.known_rate) || options.known_rate < 0) {
    throw std::invalid_argument("calibration: known_rate is " + std::to_string(options.known_rate) +
                                ": it must be finite, and 0 where it is not known");
  }
}

}  // namespace detail

/// The largest of each constant over all ranks. Throws channel_error, which ends the channel; and on all ranks
/// std::invalid_argument where a constant of one cannot be.
[[nodiscard]] inline cost_table agree_on_costs(channel& over, const cost_table& own,
                                               std::chrono::milliseconds timeout = std::chrono::minutes(2)) {
  std::vector<double> most = {own.alpha, own.beta_one_way, own.beta_both_ways, own.gamma};
  lamina::collectives::detail::conversation(over, timeout).combine(most, [](const auto& before, auto& here) {
    // A number that cannot be is kept: the largest would hide it.
    const auto larger = [](double a, double b) {
      return !detail::can_be(a) || (detail::can_be(b) && a > b) ? a : b;
    };
    std::ranges::transform(before, here, here.begin(), larger);
  });
  const cost_table agreed = {most[0], most[1], most[2], most[3]};
  lamina::collectives::check_costs(agreed);
  return agreed;
}

/// Measures the network with all ranks at once, as in the run, since they share links and cores. All ranks call it at the same time and get
/// the same table, the largest of each constant. About twice options.seconds.
///
///  - alpha: ring rounds of 4 bytes;
///  - beta_one_way: ring rounds of sixteen pieces at once; beta_both_ways: exchanges of as many with rank r xor 1; of both alpha is
///    taken off;
///  - gamma: adding in memory.
///
/// One rank, which sends nothing, measures gamma alone and has gigabit_costs otherwise. Throws calibration_error for a rate above
/// options.known_rate; std::invalid_argument for a constant that cannot be and, before a message is sent, for an option that cannot be;
/// channel_error where a rank is silent, which ends the channel.
[[nodiscard]] inline cost_table calibrate(channel& over, const calibration_options& options = {}) {
  detail::check_options(options);
  cost_table own = lamina::collectives::gigabit_costs;
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
  lamina::collectives::check_costs(own);
  if (over.ranks() > 1 && options.known_rate > 0) {
    for (const auto& [name, beta] :
         {std::pair("beta_one_way", own.beta_one_way), std::pair("beta_both_ways", own.beta_both_ways)}) {
      if (beta * options.known_rate >= 1) continue;
      throw calibration_error(std::string(name) + " was measured as " + std::to_string(beta * 1e9) +
                              " ns a byte, which is quicker than the rate of the network allows");
    }
  }
  return own;
}

}  // namespace lab
