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

#include "lamina/detail/loops.hpp"
#include "method.hpp"
#include "thresholds.hpp"

namespace lamina_baselines {

/// Elements at or above a threshold that is known before the pass, so that the pass which adds the gradient also finds and takes them:
/// a <- a + g, a bit for each element, and the numbers behind each other. What a choice of elements costs at least, by the registers of
/// AVX-512 or AVX2 and lamina's prefetching; without them by a loop without branches. Of each layer goes out what is smaller, the bitmap or
/// the indices, and the numbers.
class one_pass : public method {
 public:
  void step(std::span<const float> gradient) final {
    std::size_t begin = 0;
    indices_.clear();
    bytes_ = 0;
    touched_ = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const std::size_t count = model_.sizes()[l];
      layer& each = layers_[l];
      each.begin = begin;
      each.kept = 0;
      bytes_ += sizeof(std::uint32_t);
      if (count == 0) continue;
      float* to = residual_.data() + model_.offset(l);
      const float* from = gradient.data() + model_.offset(l);
      const std::size_t wanted = share_of(count, fraction_);
      each.kept = take(to, from, count, threshold_of(l, {to, count}, {from, count}, wanted),
                       bits_.data() + each.bits, numbers_.data() + begin);
      taken(l, {to, count}, wanted);
      begin += each.kept;
      const std::size_t bitmap = (count + 7) / 8;
      if (each.kept * sizeof(std::uint32_t) < bitmap) write_indices(each, count);
      bytes_ += each.kept * sizeof(float) + std::min(each.kept * sizeof(std::uint32_t), bitmap);
    }
  }

  std::size_t message_bytes() const final { return bytes_; }

  void receive(std::span<float> sum) const final {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const float* from = numbers_.data() + layers_[l].begin;
      const std::uint8_t* bits = bits_.data() + layers_[l].bits;
      float* to = sum.data() + model_.offset(l);
      for (std::size_t i = 0; i < model_.sizes()[l]; ++i) {
        if ((bits[i / 8] >> (i % 8) & 1) != 0) to[i] += *from++;
      }
    }
  }

  std::span<const float> residual() const final { return residual_; }
  std::size_t bytes_touched() const final {
    return 3 * model_.elements() * sizeof(float) + bytes_ + 2 * indices_.size() * sizeof(std::uint32_t) +
           touched_;
  }
  double entropy_bytes() const final {
    double bytes = 0;
    for (std::size_t l = 0; l < layers_.size(); ++l)
      bytes += sparse_entropy_bytes(model_.sizes()[l], layers_[l].kept);
    return bytes;
  }

 protected:
  one_pass(const lamina::layout& model, double fraction)
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

  /// Of layer `l` before its pass.
  virtual float threshold_of(std::size_t l, std::span<const float> residual, std::span<const float> gradient,
                             std::size_t wanted) = 0;
  /// After its pass.
  virtual void taken(std::size_t l, std::span<float> residual, std::size_t wanted) = 0;

  std::size_t kept(std::size_t l) const { return layers_[l].kept; }

  /// Gives back to the residual all that was taken but for the `wanted` largest: at least one, fewer than were taken.
  void keep_largest(std::size_t l, std::span<float> residual, std::size_t wanted) {
    layer& each = layers_[l];
    float* numbers = numbers_.data() + each.begin;
    std::uint8_t* bits = bits_.data() + each.bits;
    const float threshold = exact_threshold({numbers, each.kept}, wanted, scratch_);
    auto ties = static_cast<std::size_t>(std::ranges::count(std::span(scratch_).first(wanted), threshold));
    std::size_t read = 0;
    std::size_t written = 0;
    for (std::size_t i = 0; i < residual.size(); ++i) {
      if ((bits[i / 8] >> (i % 8) & 1) == 0) continue;
      const float number = numbers[read++];
      const float magnitude = std::abs(number);
      if (magnitude > threshold || (magnitude == threshold && ties > 0)) {
        ties -= magnitude == threshold ? 1 : 0;
        numbers[written++] = number;
      } else {
        residual[i] = number;
        bits[i / 8] = static_cast<std::uint8_t>(bits[i / 8] & ~(1U << (i % 8)));
      }
    }
    each.kept = written;
  }

  std::vector<float> scratch_;
  std::size_t touched_ = 0;  // besides those of the pass, in this step

 private:
  static constexpr std::size_t room = 16;  // that a whole register may be written behind the last number

  struct layer {
    std::size_t bits = 0;   // where its bitmap begins
    std::size_t begin = 0;  // and its numbers
    std::size_t kept = 0;
  };

  void write_indices(const layer& each, std::size_t count) {
    const std::uint8_t* bits = bits_.data() + each.bits;
    for (std::size_t byte = 0; byte < (count + 7) / 8; byte += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      std::memcpy(&word, bits + byte, std::min(sizeof word, (count + 7) / 8 - byte));
      for (; word != 0; word &= word - 1)
        indices_.push_back(
            static_cast<std::uint32_t>(8 * byte + static_cast<std::size_t>(std::countr_zero(word))));
    }
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
  std::vector<std::uint32_t> indices_;
  std::size_t bytes_ = 0;
};

/// The first step's threshold comes from a sample of each layer. Then each step corrects it by what it has kept. Source of thresholds that
/// are used again: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning (Ok-Topk, PPoPP 2022), 3.1.3.
class one_pass_threshold final : public one_pass {
 public:
  one_pass_threshold(const lamina::layout& model, double fraction)
      : one_pass(model, fraction), thresholds_(model.layers()) {}

 private:
  float threshold_of(std::size_t l, std::span<const float> residual, std::span<const float> gradient,
                     std::size_t wanted) override {
    if (thresholds_[l] == 0)  // at first, and while a layer is mostly zeros: no correction would lift it
      thresholds_[l] = sampled_threshold_of_sum(residual, gradient, wanted, scratch_);
    return thresholds_[l];
  }

  // Of exponential magnitudes a share exp(-threshold/mean) is kept. Half of that correction: what waits piles up below the threshold, and with
  // all of it shares swing.
  void taken(std::size_t l, std::span<float> residual, std::size_t wanted) override {
    const double share = static_cast<double>(wanted) / static_cast<double>(residual.size());
    if (share >= 1) return;
    const double ratio = (static_cast<double>(kept(l)) + 0.5) / (static_cast<double>(wanted) + 0.5);
    thresholds_[l] *= static_cast<float>(std::clamp(1 - 0.5 * std::log(ratio) / std::log(share), 0.5, 2.0));
  }

  std::vector<float> thresholds_;
};

/// Those above a threshold that a sample of the sum suggests; if they are more than 1.3 times as many as wanted, exactly k of them.
/// Source: Lin et al., Deep Gradient Compression (ICLR 2018), 3.1 and appendix; without its momentum correction, which is
/// another matter and which lamina has as well. That the sample is taken before the pass, and not after it, is ours.
class sampled_top_k final : public one_pass {
 public:
  sampled_top_k(const lamina::layout& model, double fraction) : one_pass(model, fraction) {}

 private:
  float threshold_of(std::size_t, std::span<const float> residual, std::span<const float> gradient,
                     std::size_t wanted) override {
    const float threshold = sampled_threshold_of_sum(residual, gradient, wanted, scratch_);
    touched_ += (3 + 4) * scratch_.size() * sizeof(float);  // read and written, and the selection
    return threshold;
  }

  void taken(std::size_t l, std::span<float> residual, std::size_t wanted) override {
    const std::size_t were = kept(l);
    if (10 * were <= 13 * wanted) return;
    keep_largest(l, residual, wanted);
    touched_ += residual.size() / 8 + (2 + 4 + 3) * were * sizeof(float);
  }
};

}  // namespace lamina_baselines
