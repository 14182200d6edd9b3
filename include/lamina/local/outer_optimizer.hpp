// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include "lamina/payload.hpp"
#include "lamina/representative.hpp"

/// What becomes of the mean of the workers' local deltas. Read delta.hpp before.
namespace lamina::inline LAMINA_ABI {

/// What becomes of the mean of the workers' updates. The defaults average, which wants no other learning rate than the workers'
/// optimizer does. With Adam inside, rate 0.7 and momentum 0.9 are what DiLoCo takes, every 500 steps; docs/results/learning.md has others.
struct outer_optimizer_options {
  double rate = 1;       ///< η, finite and above 0, as T, too
  double momentum = 0;   ///< μ in [0, 1), as T, too
  bool nesterov = true;  ///< d = η·(G + μ·m); else η·m. Without momentum both are η·G.
  /// How d goes to the workers. What rounding takes away of it stays here and is added to the next d of that element.
  payload_type payload = payload_type::as_is;
};

/// The outer optimizer of local updates: from G, the mean of what the workers sent of a fragment, to d, what all subtract from the
/// shared parameters (delta.hpp):
///
///     m <- μ·m + G;   d = η·(G + μ·m);   d <- payload(d + e);   e <- what that rounded away
///
/// Parts that are not sent keep m and e as they are. It runs where the mean is: on a server, on the owner of a shard, or on
/// every worker alike, since d of the same G is bitwise identical everywhere; the sums and products are rounded one by one.
///
/// Memory: m, if there is a momentum, and e, if the payload rounds; N elements each. Cost: two reads and a write of G, m and e each.
/// Source: DiLoCo (Douillard et al. 2023), algorithm 1; Nesterov's momentum as in Sutskever et al. 2013.
template <element T>
class outer_optimizer {
 public:
  /// For local_delta::fragments(). Throws std::invalid_argument, naming the option that is outside its range.
  explicit outer_optimizer(const layout& fragments, const outer_optimizer_options& options = {})
      : fragments_(fragments), options_(options) {
    // As T, since they are used so: a rate of 1e-60 is 0 as a float, and a momentum of 1 - 1e-9 is 1.
    if (!detail::is_finite(options.rate) || options.rate > largest_number ||
        !(options.rate > 0 && static_cast<T>(options.rate) > 0)) {
      detail::refuse("the outer rate must be a finite number above 0, got ", options.rate);
    }
    if (!detail::is_finite(options.momentum) ||
        !(options.momentum >= 0 && options.momentum < 1 && static_cast<T>(options.momentum) < 1)) {
      detail::refuse("the outer momentum must lie in [0, 1), got ", options.momentum);
    }
    if (options.momentum > 0) momentum_.resize(fragments.elements());
    detail::check_payload_type(options.payload);
    if (options.payload != payload_type::as_is) rounding_.resize(fragments.elements());
  }

  /// G to d, in place, of elements `begin` on of a fragment: both begin and end at multiples of 64, or at the fragment's end. Each element
  /// once a step. Throws std::out_of_range for the fragment, and for elements beyond it; std::invalid_argument for other multiples; and
  /// std::domain_error, naming the fragment, for a mean that holds NaN or infinity, or so large that m, d or e, which keep what they are
  /// given for ever, might become infinite. Nothing has changed then.
  void operator()(std::size_t fragment, std::size_t begin, std::span<T> mean) {
    fragments_.check_layer(fragment);
    const std::size_t elements = fragments_.sizes()[fragment];
    if (begin > elements || mean.size() > elements - begin) {
      detail::refuse<std::out_of_range>("elements ", begin, " to ", begin + mean.size(), " are not in '",
                                        fragments_[fragment].name, "', which has ", elements);
    }
    if (begin % payload_block_elements != 0 ||
        (mean.size() % payload_block_elements != 0 && begin + mean.size() != elements)) {
      detail::refuse("the outer optimizer takes elements in blocks of ", payload_block_elements);
    }
    const std::size_t offset = fragments_.offset(fragment) + begin;
    check_size(fragment, offset, mean);
    for (std::size_t done = 0; done < mean.size(); done += detail::block_elements) {
      const std::size_t count = (std::min)(detail::block_elements, mean.size() - done);
      move(offset + done, mean.subspan(done, count));
    }
  }

  /// For checkpoints: m and e, N elements in the order of the layout, or none.
  [[nodiscard]] std::span<const T> momentum() const noexcept { return momentum_; }
  [[nodiscard]] std::span<const T> rounding() const noexcept { return rounding_; }
  /// Puts them back, between steps. Throws std::invalid_argument, and changes nothing, unless the sizes are those of momentum() and
  /// rounding() and all numbers are finite.
  void restore(std::span<const T> momentum, std::span<const T> rounding) {
    if (momentum.size() != momentum_.size() || rounding.size() != rounding_.size()) {
      detail::refuse("the saved outer optimizer has ", momentum.size(), " and ", rounding.size(),
                     " elements, this one ", momentum_.size(), " and ", rounding_.size());
    }
    for (const auto numbers : {momentum, rounding})
      if (!detail::are_finite(numbers)) detail::refuse("the saved outer optimizer holds NaN or infinity");
    std::copy(momentum.begin(), momentum.end(), momentum_.begin());
    std::copy(rounding.begin(), rounding.end(), rounding_.begin());
  }

 private:
  using buffer = std::array<T, detail::block_elements>;
  static constexpr auto largest_number = static_cast<double>((std::numeric_limits<T>::max)());

  static T largest_of(std::span<const T> numbers) { return static_cast<T>(max_abs()(numbers)); }

  // By what is largest in what comes and in what is kept: an update that overflows is refused before anything is written.
  void check_size(std::size_t fragment, std::size_t offset, std::span<const T> mean) const {
    const T largest = largest_of(mean);
    const auto magnitude_of = [&](const std::vector<T>& kept) {
      return kept.empty() ? 0.0
                          : static_cast<double>(largest_of(std::span(kept).subspan(offset, mean.size())));
    };
    if (detail::is_finite(static_cast<double>(largest))) {
      const double mu = options_.momentum;
      const double m = mu * magnitude_of(momentum_) + static_cast<double>(largest);
      const double ahead = momentum_.empty()   ? static_cast<double>(largest)
                           : options_.nesterov ? static_cast<double>(largest) + mu * m
                                               : m;
      // e becomes no more than d + e, of which it is what rounding takes away; d may be rounded up.
      const double most = (std::max)({m, ahead, options_.rate * ahead + magnitude_of(rounding_)});
      if (detail::is_finite(most) && most <= (rounding_.empty() ? 0.99 : 0.5) * largest_number) return;
    }
    detail::refuse<std::domain_error>("the mean of '", fragments_[fragment].name,
                                      "' holds NaN or infinity, or its update would");
  }

  // to[i] *= factor, each product rounded by itself.
  static void scale(T* to, T factor, std::size_t count) {
    if (factor != T(1)) detail::copy_elements(to, count, detail::read_only<T, T, true>(to, factor));
  }

  // One block: loops that each do one thing, in cache.
  void move(std::size_t offset, std::span<T> block) {
    T* d = block.data();
    const std::size_t count = block.size();
    if (!momentum_.empty()) {
      const T mu = static_cast<T>(options_.momentum);
      T* m = momentum_.data() + offset;
      scale(m, mu, count);
      detail::add_elements(m, d, count);
      if (options_.nesterov) {
        buffer ahead;
        detail::copy_elements(ahead.data(), count, detail::read_only<T, T, true>(m, mu));
        detail::add_elements(d, ahead.data(), count);
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

  layout fragments_;
  outer_optimizer_options options_;
  std::vector<T> momentum_;
  std::vector<T> rounding_;
};

}  // namespace lamina::inline LAMINA_ABI
