// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "method.hpp"

namespace lamina_baselines {

/// Each layer of two and more dimensions as a matrix M of its first dimension by the rest, sent as P and Q of `rank` columns with
/// M ~ P Q^T, by one round of subspace iteration that begins with the last Q; vectors are sent as they are. With error feedback. By one
/// worker: P is not averaged over the workers before it is orthogonalised, which costs no arithmetic.
/// Source: Vogels, Karimireddy and Jaggi, PowerSGD (NeurIPS 2019), algorithms 1 and 2.
class power_sgd final : public error_feedback {
 public:
  /// Throws std::invalid_argument for a rank of 0.
  power_sgd(const lamina::layout& model, std::size_t rank)
      : error_feedback(model), rank_(rank), q_(model.layers()) {
    if (rank == 0) throw std::invalid_argument("the rank must be at least 1");
    std::uint64_t state = 1;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (!is_matrix(l)) continue;
      q_[l].resize(columns(l) * rank_of(l));
      for (float& each : q_[l]) {  // any start that is not orthogonal to all
        state = state * 6364136223846793005U + 1442695040888963407U;
        each = static_cast<float>(static_cast<double>(state >> 40U) / 8388608.0 - 1);
      }
    }
  }

  void step(std::span<const float> gradient) override {
    begin_message();
    for (std::size_t l = 0; l < model().layers(); ++l) {
      if (is_matrix(l)) {
        compress(l, gradient);
      } else {
        const std::span<float> residual = add(l, gradient);
        for (float& each : residual) {
          write(each);
          each = 0;
        }
      }
    }
  }

  void receive(std::span<float> sum) const override {
    message_reader reader(message());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      float* to = sum.data() + model().offset(l);
      if (!is_matrix(l)) {
        for (std::size_t i = 0; i < model().sizes()[l]; ++i) to[i] += reader.read<float>();
        continue;
      }
      const std::size_t m = columns(l);
      const std::vector<float> p = read(reader, rows(l) * rank_of(l));
      const std::vector<float> q = read(reader, m * rank_of(l));
      for (std::size_t i = 0; i < rows(l); ++i) {
        for (std::size_t k = 0; k < rank_of(l); ++k) {
          for (std::size_t j = 0; j < m; ++j) to[i * m + j] += p[i * rank_of(l) + k] * q[k * m + j];
        }
      }
    }
  }

 private:
  bool is_matrix(std::size_t l) const { return model()[l].shape.size() > 1 && model().sizes()[l] > 0; }
  std::size_t rows(std::size_t l) const { return model()[l].shape[0]; }
  std::size_t columns(std::size_t l) const { return model().sizes()[l] / rows(l); }
  std::size_t rank_of(std::size_t l) const { return std::min({rank_, rows(l), columns(l)}); }

  static std::vector<float> read(message_reader& reader, std::size_t count) {
    std::vector<float> numbers(count);
    std::memcpy(numbers.data(), reader.take(count * sizeof(float)), count * sizeof(float));
    return numbers;
  }

  // P is n by r, row by row; Q^T is r by m, so that inner loops run along rows of M.
  void compress(std::size_t l, std::span<const float> gradient) {
    const std::size_t n = rows(l);
    const std::size_t m = columns(l);
    const std::size_t r = rank_of(l);
    const std::span<float> matrix = residual_of(l);
    p_.resize(n * r);
    for (std::size_t i = 0; i < n; ++i) {
      // Added row by row, each of which the caches still hold when it is multiplied.
      float* row = matrix.data() + i * m;
      const float* from = gradient.data() + model().offset(l) + i * m;
#pragma omp simd
      for (std::size_t j = 0; j < m; ++j) row[j] += from[j];
      for (std::size_t k = 0; k < r; ++k) {
        const float* q = q_[l].data() + k * m;
        float dot = 0;
#pragma omp simd reduction(+ : dot)
        for (std::size_t j = 0; j < m; ++j) dot += row[j] * q[j];
        p_[i * r + k] = dot;
      }
    }
    orthogonalise(n, r);
    std::ranges::fill(q_[l], 0.0F);
    for (std::size_t i = 0; i < n; ++i) {
      const float* row = matrix.data() + i * m;
      for (std::size_t k = 0; k < r; ++k) {
        float* q = q_[l].data() + k * m;
        const float factor = p_[i * r + k];
#pragma omp simd
        for (std::size_t j = 0; j < m; ++j) q[j] += factor * row[j];
      }
    }
    for (std::size_t i = 0; i < n; ++i) {
      float* row = matrix.data() + i * m;
      for (std::size_t k = 0; k < r; ++k) {
        const float* q = q_[l].data() + k * m;
        const float factor = p_[i * r + k];
#pragma omp simd
        for (std::size_t j = 0; j < m; ++j) row[j] -= factor * q[j];
      }
    }
    std::memcpy(extend(p_.size() * sizeof(float)), p_.data(), p_.size() * sizeof(float));
    std::memcpy(extend(q_[l].size() * sizeof(float)), q_[l].data(), q_[l].size() * sizeof(float));
    touch(6 * matrix.size_bytes() + 2 * (p_.size() + q_[l].size()) * sizeof(float));
  }

  // The columns of P, by Gram and Schmidt.
  void orthogonalise(std::size_t n, std::size_t r) {
    for (std::size_t k = 0; k < r; ++k) {
      for (std::size_t before = 0; before < k; ++before) {
        double dot = 0;
        for (std::size_t i = 0; i < n; ++i) dot += double{p_[i * r + k]} * p_[i * r + before];
        for (std::size_t i = 0; i < n; ++i) p_[i * r + k] -= static_cast<float>(dot) * p_[i * r + before];
      }
      double squares = 0;
      for (std::size_t i = 0; i < n; ++i) squares += double{p_[i * r + k]} * p_[i * r + k];
      const double scale = squares > 0 ? 1 / std::sqrt(squares) : 0;
      for (std::size_t i = 0; i < n; ++i) p_[i * r + k] = static_cast<float>(p_[i * r + k] * scale);
    }
  }

  std::size_t rank_;
  std::vector<std::vector<float>> q_;  // of each matrix, kept from step to step
  std::vector<float> p_;
};

}  // namespace lamina_baselines
