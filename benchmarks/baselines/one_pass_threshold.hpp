// SPDX-License-Identifier: MIT
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "lamina/detail/sources.hpp"
#include "method.hpp"
#include "thresholds.hpp"

namespace lamina_baselines {

/// Elements at or above a threshold that is known before the pass, so that the pass which adds the gradient also finds and takes them:
/// a <- a + g, a bit for each element, and the numbers behind each other. What a choice of elements costs at least, by the registers of
/// AVX-512 or AVX2 and lamina's prefetching; without them by a loop without branches.
///
/// The first step's threshold comes from a sample of each layer. Then each step corrects it by what it has kept. Source of thresholds that are used again: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning
/// (Ok-Topk, PPoPP 2022), 3.1.3.
class one_pass_threshold final : public method {
 public:
  one_pass_threshold(const lamina::layout& model, double fraction)
      : model_(model),
        fraction_(checked_fraction(fraction)),
        residual_(model.elements()),
        layers_(model.layers()) {
    std::size_t bits = 0;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      layers_[l].bits = bits;
      bits += (model.sizes()[l] + 7) / 8 + room;
    }
    bits_.resize(bits);
    numbers_.resize(model.elements() + room * model.layers());
  }

  void step(std::span<const float> gradient) override {
    std::size_t begin = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t count = model_.sizes()[l];
      layer& each = layers_[l];
      each.begin = begin;
      each.kept = 0;
      if (count == 0) continue;
      float* to = residual_.data() + model_.offset(l);
      const float* from = gradient.data() + model_.offset(l);
      const std::size_t wanted = share_of(count, fraction_);
      if (is_first_) each.threshold = sampled_threshold({from, count}, wanted, scratch_);
      each.kept = take(to, from, count, each.threshold, bits_.data() + each.bits, numbers_.data() + begin);
      begin += each.kept;
      correct(each, count, wanted);
    }
    is_first_ = false;
    kept_ = begin;
  }

  /// A count for each layer, its bitmap, its numbers.
  std::size_t message_bytes() const override {
    std::size_t bytes = kept_ * sizeof(float);
    for (const std::size_t size : model_.sizes()) bytes += sizeof(std::uint32_t) + (size + 7) / 8;
    return bytes;
  }

  void receive(std::span<float> sum) const override {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const float* from = numbers_.data() + layers_[l].begin;
      const std::uint8_t* bits = bits_.data() + layers_[l].bits;
      float* to = sum.data() + model_.offset(l);
      for (std::size_t i = 0; i < model_.sizes()[l]; ++i) {
        if ((bits[i / 8] >> (i % 8) & 1) != 0) to[i] += *from++;
      }
    }
  }

  std::span<const float> residual() const override { return residual_; }
  std::size_t bytes_touched() const override {
    return 3 * model_.elements() * sizeof(float) + message_bytes();
  }
  double entropy_bytes() const override {
    double bytes = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l)
      bytes += sparse_entropy_bytes(model_.sizes()[l], layers_[l].kept);
    return bytes;
  }

 private:
  static constexpr std::size_t room = 16;  // that a whole register may be written behind the last number

  struct layer {
    std::size_t bits = 0;   // where its bitmap begins
    std::size_t begin = 0;  // and its numbers
    std::size_t kept = 0;
    float threshold = 0;
  };

  // Of exponential magnitudes a share exp(-threshold/mean) is kept. Half of that correction: what waits piles up below the threshold, and with
  // all of it shares swing.
  void correct(layer& each, std::size_t count, std::size_t wanted) const {
    const double share = static_cast<double>(wanted) / static_cast<double>(count);
    if (share >= 1) return;
    const double ratio = (static_cast<double>(each.kept) + 0.5) / (static_cast<double>(wanted) + 0.5);
    each.threshold *= static_cast<float>(std::clamp(1 - 0.5 * std::log(ratio) / std::log(share), 0.5, 2.0));
  }

  // Returns how many.
  static std::size_t take(float* to, const float* from, std::size_t count, float threshold,
                          std::uint8_t* bits, float* numbers) {
    std::size_t kept = 0;
    std::size_t i = 0;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(threshold);
    for (; i + 64 <= count; i += 64) {
      lamina::detail::prefetch_ahead(to + i, 64);
      lamina::detail::prefetch_ahead(from + i, 64);
      for (std::size_t k = 0; k < 64; k += 16) {
        const __m512 sum = _mm512_add_ps(_mm512_loadu_ps(to + i + k), _mm512_loadu_ps(from + i + k));
        const __mmask16 is_taken = _mm512_cmp_ps_mask(_mm512_abs_ps(sum), least, _CMP_GE_OQ);
        _mm512_storeu_ps(to + i + k, _mm512_maskz_mov_ps(static_cast<__mmask16>(~is_taken), sum));
        _mm512_storeu_ps(numbers + kept, _mm512_maskz_compress_ps(is_taken, sum));
        std::memcpy(bits + (i + k) / 8, &is_taken, sizeof is_taken);
        kept += static_cast<std::size_t>(std::popcount(static_cast<unsigned>(is_taken)));
      }
    }
#elif defined(__AVX2__)
    const __m256 least = _mm256_set1_ps(threshold);
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (; i + 64 <= count; i += 64) {
      lamina::detail::prefetch_ahead(to + i, 64);
      lamina::detail::prefetch_ahead(from + i, 64);
      for (std::size_t k = 0; k < 64; k += 8) {
        const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(to + i + k), _mm256_loadu_ps(from + i + k));
        const __m256 is_taken = _mm256_cmp_ps(_mm256_and_ps(sum, magnitude), least, _CMP_GE_OQ);
        _mm256_storeu_ps(to + i + k, _mm256_andnot_ps(is_taken, sum));
        const auto mask = static_cast<unsigned>(_mm256_movemask_ps(is_taken));
        const __m256i order = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(orders()[mask].data()));
        _mm256_storeu_ps(numbers + kept, _mm256_permutevar8x32_ps(sum, order));
        bits[(i + k) / 8] = static_cast<std::uint8_t>(mask);
        kept += static_cast<std::size_t>(std::popcount(mask));
      }
    }
#endif
    for (; i < count; i += 8) {
      unsigned mask = 0;
      for (unsigned k = 0; k < 8 && i + k < count; ++k) {
        const float sum = to[i + k] + from[i + k];
        const bool is_taken = std::abs(sum) >= threshold;
        numbers[kept] = sum;
        kept += is_taken ? 1 : 0;
        to[i + k] = is_taken ? 0.0F : sum;
        mask |= (is_taken ? 1U : 0U) << k;
      }
      bits[i / 8] = static_cast<std::uint8_t>(mask);
    }
    return kept;
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // For each mask, where the lanes that are taken come from.
  static const std::array<std::array<std::uint32_t, 8>, 256>& orders() {
    static const auto table = [] {
      std::array<std::array<std::uint32_t, 8>, 256> made = {};
      for (unsigned mask = 0; mask < 256; ++mask) {
        std::size_t next = 0;
        for (unsigned lane = 0; lane < 8; ++lane) {
          if ((mask >> lane & 1U) != 0) made[mask][next++] = lane;
        }
      }
      return made;
    }();
    return table;
  }
#endif

  lamina::layout model_;
  double fraction_;
  std::vector<float> residual_;
  std::vector<layer> layers_;
  std::vector<std::uint8_t> bits_;
  std::vector<float> numbers_;
  std::vector<float> scratch_;
  std::size_t kept_ = 0;
  bool is_first_ = true;
};

}  // namespace lamina_baselines
