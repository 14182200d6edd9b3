// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

/// Thresholds over elements: at or above which magnitude do about `keep` of the elements lie? Keeping none is no use:
/// 0 < keep <= elements.size(). `scratch` keeps memory between calls.
namespace lamina_baselines {

/// The exact answer: the keep-th largest magnitude, by selection.
inline float exact_threshold(std::span<const float> elements, std::size_t keep, std::vector<float>& scratch) {
  scratch.resize(elements.size());
  std::ranges::transform(elements, scratch.begin(), [](float x) { return std::abs(x); });
  const auto last = scratch.begin() + static_cast<std::ptrdiff_t>(keep) - 1;
  std::nth_element(scratch.begin(), last, scratch.end(), std::greater<>());
  return *last;
}

/// The exact threshold of a sample of every 100th of `count` elements, which `magnitude` gives, and of at least 1,000 as far as there
/// are so many. Source: Lin et al., Deep Gradient Compression (ICLR 2018), 0.1 to 1 %.
template <class Magnitude>
float threshold_of_sample(std::size_t count, std::size_t keep, std::vector<float>& scratch,
                          Magnitude magnitude) {
  const std::size_t stride = std::max<std::size_t>(1, std::min<std::size_t>(100, count / 1'000));
  scratch.clear();
  for (std::size_t i = stride / 2; i < count; i += stride) scratch.push_back(magnitude(i));
  const double share = static_cast<double>(keep) / static_cast<double>(count);
  const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(scratch.size())));
  const auto last = scratch.begin() + static_cast<std::ptrdiff_t>(std::max<std::size_t>(rank, 1)) - 1;
  std::nth_element(scratch.begin(), last, scratch.end(), std::greater<>());
  return *last;
}

inline float sampled_threshold(std::span<const float> elements, std::size_t keep,
                               std::vector<float>& scratch) {
  return threshold_of_sample(elements.size(), keep, scratch,
                             [&](std::size_t i) { return std::abs(elements[i]); });
}

/// Of what a sum will be, before it is made.
inline float sampled_threshold_of_sum(std::span<const float> first, std::span<const float> second,
                                      std::size_t keep, std::vector<float>& scratch) {
  return threshold_of_sample(first.size(), keep, scratch,
                             [&](std::size_t i) { return std::abs(first[i] + second[i]); });
}

/// The lower end of the bin of a histogram in which the keep-th largest magnitude lies: bins of an eighth of an octave,
/// which are a float's exponent and the first three bits of its mantissa. Keeps `keep` or more.
inline float histogram_threshold(std::span<const float> elements, std::size_t keep) {
  constexpr unsigned shift = 20;
  std::array<std::array<std::uint32_t, 1U << 11U>, 4> counts =
      {};  // four, so that increments do not wait for each other
  for (std::size_t i = 0; i < elements.size(); ++i) {
    ++counts[i % 4][(std::bit_cast<std::uint32_t>(elements[i]) & 0x7fffffffU) >> shift];
  }
  std::size_t above = 0;
  for (std::size_t bin = counts[0].size(); bin-- > 0;) {
    for (const auto& each : counts) above += each[bin];
    if (above >= keep) return std::bit_cast<float>(static_cast<std::uint32_t>(bin) << shift);
  }
  return 0;
}

inline std::size_t count_at_or_above(std::span<const float> elements, float threshold) {
  std::size_t count = 0;
#pragma omp simd reduction(+ : count)
  for (std::size_t i = 0; i < elements.size(); ++i) count += std::abs(elements[i]) >= threshold ? 1 : 0;
  return count;
}

/// The x beyond which a share `upper` of the standard normal law lies, by bisection: a few microseconds.
inline double normal_quantile_from_above(double upper) {
  double low = -40;
  double high = 40;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (std::erfc(middle / std::sqrt(2.0)) / 2 > upper ? low : high) = middle;
  }
  return (low + high) / 2;
}

/// Mean and standard deviation, as if the elements were normal; then up to four corrections by half as long as it keeps
/// less than two thirds or more than four thirds. Source: Shi et al., Understanding Top-k Sparsification in Distributed
/// Deep Learning (2019), algorithm 1 (Gaussian-k).
inline float gaussian_threshold(std::span<const float> elements, std::size_t keep) {
  double sum = 0;
  double squares = 0;
#pragma omp simd reduction(+ : sum, squares)
  for (std::size_t i = 0; i < elements.size(); ++i) {
    sum += elements[i];
    squares += static_cast<double>(elements[i]) * elements[i];
  }
  const auto count = static_cast<double>(elements.size());
  const double mean = sum / count;
  const double deviation = std::sqrt(std::max(0.0, squares / count - mean * mean));
  const double upper = static_cast<double>(keep) / count / 2;  // of both sides
  auto threshold =
      static_cast<float>(std::max(0.0, std::abs(mean) + deviation * normal_quantile_from_above(upper)));
  for (int i = 0; i < 4; ++i) {
    const std::size_t kept = count_at_or_above(elements, threshold);
    if (3 * kept < 2 * keep) {
      threshold *= 0.5F;
    } else if (3 * kept > 4 * keep) {
      threshold *= 1.5F;
    } else {
      break;
    }
  }
  return threshold;
}

/// As if magnitudes were exponential: a first threshold keeps a quarter, the excess over it is exponential again, and so on
/// until the share is reached. Source: Abdelmoniem et al., SIDCo (MLSys 2021), multi-stage with the exponential law; the
/// number of stages is what the share asks for, not adapted over the steps.
inline float exponential_threshold(std::span<const float> elements, std::size_t keep,
                                   std::vector<float>& scratch) {
  constexpr double stage_share = 0.25;
  double share = static_cast<double>(keep) / static_cast<double>(elements.size());
  double threshold = 0;
  scratch.resize(elements.size());
  std::span<const float> rest = elements;
  for (;;) {
    if (rest.empty()) return static_cast<float>(threshold);
    double excess = 0;
#pragma omp simd reduction(+ : excess)
    for (std::size_t i = 0; i < rest.size(); ++i) excess += std::abs(rest[i]);
    const double mean = std::max(0.0, excess / static_cast<double>(rest.size()) - threshold);
    threshold -= mean * std::log(std::max(share, stage_share));
    if (share >= stage_share) return static_cast<float>(threshold);
    share /= stage_share;
    std::size_t kept = 0;
    for (const float each : rest) {
      const float magnitude = std::abs(each);
      scratch[kept] = magnitude;
      kept += magnitude >= static_cast<float>(threshold) ? 1 : 0;
    }
    rest = std::span(scratch).first(kept);
  }
}

}  // namespace lamina_baselines
