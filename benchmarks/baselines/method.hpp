// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "lamina/layout.hpp"

/// What others do to send less: straightforward implementations after their papers, on one thread, layer by layer, to set
/// lamina's step against. Written to be read and to be fair, not to be used.
namespace lamina_baselines {

/// A way to compress gradients: one object is one worker together with what a receiver of its messages does.
class method {
 public:
  virtual ~method() = default;
  method(const method&) = delete;
  method& operator=(const method&) = delete;

  /// One step, from the gradient (N elements) to a message that is ready to be sent.
  virtual void step(std::span<const float> gradient) = 0;
  virtual std::size_t message_bytes() const = 0;
  /// Of elements: what the last message would be if its positions were coded as well as their share allows. The same where there are none.
  virtual double entropy_bytes() const { return static_cast<double>(message_bytes()); }
  /// Reads the last message as its receiver does, and adds the gradient it stands for to `sum` (N elements).
  virtual void receive(std::span<float> sum) const = 0;
  /// What the messages so far have not said, N elements; empty for a method that forgets it.
  virtual std::span<const float> residual() const { return {}; }
  /// Bytes that the last step read and wrote in arrays, whatever the caches did about it. A selection by nth_element over
  /// n numbers counts as 3n read and n written, which is what it needs on average.
  virtual std::size_t bytes_touched() const = 0;

 protected:
  method() = default;
};

/// Of a layer of which `kept` elements are sent: their numbers, and positions at the entropy of a coin that falls so often.
inline double sparse_entropy_bytes(std::size_t elements, std::size_t kept) {
  const auto bits_of = [](double share) { return share > 0 ? -share * std::log2(share) : 0.0; };
  const double share = elements == 0 ? 0 : static_cast<double>(kept) / static_cast<double>(elements);
  return sizeof(float) * static_cast<double>(kept) +
         static_cast<double>(elements) * (bits_of(share) + bits_of(1 - share)) / 8;
}

/// A method that keeps what it did not send and adds it to the next gradient (Seide et al. 2014; Stich et al. 2018).
class error_feedback : public method {
 public:
  std::span<const float> residual() const override { return residual_; }
  std::size_t message_bytes() const override { return used_; }
  std::size_t bytes_touched() const override { return touched_; }

 protected:
  explicit error_feedback(const lamina::layout& model) : model_(model), residual_(model.elements()) {}

  const lamina::layout& model() const { return model_; }
  std::span<float> residual_of(std::size_t layer) {
    return std::span(residual_).subspan(model_.offset(layer), model_.sizes()[layer]);
  }
  std::span<float> residual_memory() { return residual_; }

  /// a <- a + g for one layer.
  std::span<float> add(std::size_t layer, std::span<const float> gradient) {
    const std::span<float> to = residual_of(layer);
    const float* from = gradient.data() + model_.offset(layer);
    for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    touch(3 * to.size() * sizeof(float));
    return to;
  }

  void begin_message() {
    used_ = 0;
    touched_ = 0;
  }
  template <class T>
  void write(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(extend(sizeof value), &value, sizeof value);
  }
  /// Room for `bytes` at the end of the message, until the next write.
  std::byte* extend(std::size_t bytes) {
    if (used_ + bytes > message_.size()) message_.resize(2 * (used_ + bytes));
    used_ += bytes;
    return message_.data() + used_ - bytes;
  }
  std::span<const std::byte> message() const { return std::span(message_).first(used_); }
  void touch(std::size_t bytes) { touched_ += bytes; }

 private:
  lamina::layout model_;
  std::vector<float> residual_;
  std::vector<std::byte> message_;  // grows only
  std::size_t used_ = 0;
  std::size_t touched_ = 0;
};

/// Reads a message from its beginning to its end.
class message_reader {
 public:
  explicit message_reader(std::span<const std::byte> message) : rest_(message) {}

  template <class T>
  T read() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  /// The next `bytes` bytes.
  const std::byte* take(std::size_t bytes) {
    const std::byte* at = rest_.data();
    rest_ = rest_.subspan(bytes);
    return at;
  }

 private:
  std::span<const std::byte> rest_;
};

/// How many of `elements` a share of them is: rounded up, so that no layer is silent for ever.
inline std::size_t share_of(std::size_t elements, double fraction) {
  return static_cast<std::size_t>(std::ceil(static_cast<double>(elements) * fraction));
}

/// Throws std::invalid_argument unless 0 < fraction <= 1.
inline double checked_fraction(double fraction) {
  if (!(fraction > 0 && fraction <= 1))
    throw std::invalid_argument("the fraction to send must lie in (0, 1]");
  return fraction;
}

}  // namespace lamina_baselines
