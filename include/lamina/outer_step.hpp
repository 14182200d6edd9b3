// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "lamina/detail/abi.hpp"
#include "lamina/detail/block.hpp"
#include "lamina/detail/elementwise.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/power.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/rounding.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/tensor.hpp"

namespace lamina::inline LAMINA_ABI {

/// What becomes of the mean of the workers' updates. The defaults average, which wants no other learning rate than the workers'
/// optimizer does. With Adam inside, rate 0.7 and momentum 0.9 are what DiLoCo takes, every 500 steps. Where a part came every 13
/// steps, rate 0.7 with a momentum of 0.6 to 0.8 ended better (docs/learning/tried.md, The outer momentum). With Nesterov's
/// momentum of 0.9 in SGD inside, also every 13 steps, a quarter of the learning rate with rate 1 and momentum 0.75 ended better
/// than the average in one trial, and worse in another (docs/decisions/0047-a-smaller-rate-inside.md).
struct outer_options {
  double rate = 1;       ///< η, finite and above 0, as T, too
  double momentum = 0;   ///< μ in [0, 1), as T, too
  bool nesterov = true;  ///< d = η·(G + μ·m); else η·m. Without momentum both are η·G.
  /// 0: momentum counts how often a part came. Else it counts time, and this is for how many steps μ stands: the mean number of
  /// steps between two comings of a part, so 1 / byte_budget; in [1, 65,536]. For Nesterov's alone.
  double period = 0;
  /// How d goes to the workers. What rounding takes away of it stays here and is added to the next d of that element.
  payload_type payload = payload_type::as_is;
};

/// The outer step of local updates: from G, the mean of what the workers sent of a part, to d, what all subtract from the
/// shared parameters (drift.hpp):
///
///     m <- μ·m + G;   d = η·(G + μ·m);   d <- payload(d + e);   e <- what that rounded away
///
/// With a period, m is a drift per period, which fades with time and counts for the time that it stands for. f being the steps
/// since this part last came, t of them in step t where it never did, over the period:
///
///     m <- μ^f·m + (1 - μ^f) / ((1 - μ)·f)·G;   d = η·(G + f·μ^f·m)
///
/// Under a steady drift m is then the same at whatever times a part comes, where it would be as many times as large as the part
/// comes more rarely. With f = 1 both are the same bits.
///
/// Parts that are not sent keep m and e as they are. It runs where the mean is: on a server, on the owner of a slice, or on
/// every worker alike, since the same G gives the same bits of d everywhere; the sums and products are rounded one by one.
///
/// Memory: m, if there is a momentum, and e, if the payload rounds; N elements each. Cost: two reads and a write of G, and one
/// read and write of both. Source: DiLoCo (Douillard et al. 2023), algorithm 1; Nesterov's momentum as in Sutskever et al. 2013;
/// momentum in time is this library's (docs/decisions/0029-what-chooses-a-part.md).
template <element T>
class outer_step {
 public:
  /// \param parts    what is brought together: drift_compressor::parts()
  /// \param options  how
  /// \throws std::invalid_argument  naming the option that is outside its range
  explicit outer_step(const layout& parts, const outer_options& options = {})
      : parts_(parts), options_(options) {
    // As T, since they are used so: a rate of 1e-60 is 0 as a float, and a momentum of 1 - 1e-9 is 1.
    const T rate = static_cast<T>(std::clamp(options.rate, -largest_number, largest_number));
    if (!(rate > 0) || !detail::is_finite(options.rate) || options.rate > largest_number) {
      detail::raise(std::invalid_argument("the outer rate must be a finite number above 0, got " +
                                          std::to_string(options.rate)));
    }
    if (!(options.momentum >= 0 && options.momentum < 1 && static_cast<T>(options.momentum) < 1)) {
      detail::raise(std::invalid_argument("the outer momentum must lie in [0, 1), got " +
                                          std::to_string(options.momentum)));
    }
    if (options.period != 0 && !(options.period >= 1 && options.period <= longest_period)) {
      detail::raise(std::invalid_argument("the outer period must be 0, or lie in [1, 65536], got " +
                                          std::to_string(options.period)));
    }
    if (options.period != 0 && !options.nesterov) {
      detail::raise(
          std::invalid_argument("the outer period is for Nesterov's momentum: nesterov must be true"));
    }
    if (options.momentum > 0) momentum_.resize(parts.elements());
    if (options.momentum > 0 && options.period != 0) {
      step_momentum_ = detail::root_power(static_cast<double>(momentum_factor()), 1 / options.period);
      came_.resize(parts.layers());
      waited_.resize(parts.layers());
    }
    detail::check_payload_type(options.payload);
    if (options.payload != payload_type::as_is) rounding_.resize(parts.elements());
  }

  /// G to d, in place.
  ///
  /// \param part    index in the layout
  /// \param begin   of what is given, in the part: a multiple of 64
  /// \param mean    G of the elements from there on, which d takes the place of: a multiple of 64, or up to the part's end.
  ///                Each element once a step.
  /// \param step    in which the part was sent, counted from 1: that of the frames. Without a period nobody looks at it.
  /// \throws std::out_of_range      for the part, and for elements beyond it
  /// \throws std::invalid_argument  for what neither begins nor ends at a multiple of 64
  /// \throws std::domain_error      naming the part, for a mean that holds NaN or infinity, which m and e would keep for ever.
  ///                                Nothing has changed then.
  /// \throws std::logic_error       naming the part, with a period, for a step before the last in which the part came, or 0
  void operator()(std::size_t part, std::size_t begin, std::span<T> mean, std::uint64_t step = 0) {
    parts_.check_layer(part);
    const std::size_t elements = parts_.sizes()[part];
    if (begin > elements || mean.size() > elements - begin) {
      detail::raise(std::out_of_range("elements " + std::to_string(begin) + " to " +
                                      std::to_string(begin + mean.size()) + " are not in '" +
                                      parts_[part].name + "', which has " + std::to_string(elements)));
    }
    if (begin % payload_block_elements != 0 ||
        (mean.size() % payload_block_elements != 0 && begin + mean.size() != elements)) {
      detail::raise(std::invalid_argument("the outer step takes elements in blocks of " +
                                          std::to_string(payload_block_elements)));
    }
    if (!is_finite(mean)) {
      detail::raise(std::domain_error("the mean of '" + parts_[part].name + "' holds NaN or infinity"));
    }
    const factors of = factors_in(step, part);
    const std::size_t offset = parts_.offset(part) + begin;
    for (std::size_t done = 0; done < mean.size(); done += detail::block_elements) {
      const std::size_t count = (std::min)(detail::block_elements, mean.size() - done);
      move(of, offset + done, mean.subspan(done, count));
    }
  }

  /// For checkpoints: m and e, N elements in the order of the layout, or none.
  [[nodiscard]] std::span<const T> momentum() const noexcept { return momentum_; }
  [[nodiscard]] std::span<const T> rounding() const noexcept { return rounding_; }
  /// And the step in which each part last came, 0: never; one a part with a momentum that counts time, or none.
  [[nodiscard]] std::span<const std::uint64_t> came() const noexcept { return came_; }
  /// Puts them back, between steps: what comes next is of a later one. Throws std::invalid_argument, and changes nothing, unless
  /// the sizes are those of momentum(), rounding() and came() and all numbers are finite.
  void restore(std::span<const T> momentum, std::span<const T> rounding,
               std::span<const std::uint64_t> came = {}) {
    if (momentum.size() != momentum_.size() || rounding.size() != rounding_.size()) {
      detail::raise(std::invalid_argument("the saved outer step has " + std::to_string(momentum.size()) +
                                          " and " + std::to_string(rounding.size()) + " elements, this one " +
                                          std::to_string(momentum_.size()) + " and " +
                                          std::to_string(rounding_.size())));
    }
    if (came.size() != came_.size()) {
      detail::raise(std::invalid_argument("the saved outer step has the steps of " +
                                          std::to_string(came.size()) + " parts, this one of " +
                                          std::to_string(came_.size())));
    }
    for (const auto numbers : {momentum, rounding}) {
      if (!is_finite(numbers))
        detail::raise(std::invalid_argument("the saved outer step holds NaN or infinity"));
    }
    std::copy(momentum.begin(), momentum.end(), momentum_.begin());
    std::copy(rounding.begin(), rounding.end(), rounding_.begin());
    std::copy(came.begin(), came.end(), came_.begin());
    std::fill(waited_.begin(), waited_.end(), 0);
  }

  [[nodiscard]] const outer_options& options() const noexcept { return options_; }

 private:
  using buffer = std::array<T, detail::block_elements>;
  static constexpr auto largest_number = static_cast<double>((std::numeric_limits<T>::max)());
  static constexpr double longest_period = 65536;

  // m <- kept·m + joins·G; d = η·(G + counts·m).
  struct factors {
    T kept, joins, counts;
  };

  T momentum_factor() const { return static_cast<T>(options_.momentum); }

  // Of a part that comes in `step`; every piece of it gets the same.
  factors factors_in(std::uint64_t step, std::size_t part) {
    const T mu = momentum_factor();
    if (came_.empty()) return {mu, T(1), mu};
    if (step > came_[part]) {
      waited_[part] = step - came_[part];
      came_[part] = step;
    } else if (step < came_[part] || waited_[part] == 0) {
      detail::raise(std::logic_error("the outer step: '" + parts_[part].name + "' came in step " +
                                     std::to_string(came_[part]) + ", and comes again in step " +
                                     std::to_string(step)));
    }
    const double periods = static_cast<double>(waited_[part]) / options_.period;
    if (periods == 1) return {mu, T(1), mu};
    const double kept = detail::whole_power(step_momentum_, waited_[part]);
    const double gathered = detail::rounded((1 - static_cast<double>(mu)) * periods);
    return {static_cast<T>(kept), static_cast<T>((1 - kept) / gathered), static_cast<T>(periods * kept)};
  }

  static bool is_finite(std::span<const T> numbers) {
    return detail::is_finite_magnitude(
        detail::largest_magnitude<T>(numbers.size(), detail::read_only<T>{numbers.data()}));
  }

  // to[i] *= factor, each product rounded by itself.
  static void scale(T* to, T factor, std::size_t count) {
    if (factor != T(1)) detail::copy_elements(to, count, detail::read_only<T, T, true>(to, factor));
  }

  // One block: loops that each do one thing, in cache.
  void move(const factors& of, std::size_t offset, std::span<T> block) {
    T* d = block.data();
    const std::size_t count = block.size();
    if (!momentum_.empty()) {
      T* m = momentum_.data() + offset;
      buffer product;
      scale(m, of.kept, count);
      if (of.joins == T(1)) {
        detail::add_elements(m, d, count);
      } else {
        detail::copy_elements(product.data(), count, detail::read_only<T, T, true>(d, of.joins));
        detail::add_elements(m, product.data(), count);
      }
      if (options_.nesterov) {
        detail::copy_elements(product.data(), count, detail::read_only<T, T, true>(m, of.counts));
        detail::add_elements(d, product.data(), count);
      } else {
        std::copy_n(m, count, d);
      }
    }
    scale(d, static_cast<T>(options_.rate), count);
    if (rounding_.empty()) return;

    T* e = rounding_.data() + offset;
    detail::add_elements(d, e, count);
    std::copy_n(d, count, e);
    std::array<std::byte, payload_bytes<T>(payload_type::as_is, detail::block_elements)> said;
    detail::encode_payload<T>(options_.payload, std::span<const T>(d, count), said.data());
    detail::decode_payload<T>(options_.payload, said.data(), count, 0, block);
    detail::subtract_elements(e, d, count);
  }

  layout parts_;
  outer_options options_;
  std::vector<T> momentum_;
  std::vector<T> rounding_;
  double step_momentum_ = 0;           // μ^(1 / period)
  std::vector<std::uint64_t> came_;    // of a part, the step
  std::vector<std::uint64_t> waited_;  // steps, until then
};

}  // namespace lamina::inline LAMINA_ABI
