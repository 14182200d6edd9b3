// SPDX-License-Identifier: MIT
#pragma once

#include "../accumulate.hpp"
#include "../support.hpp"
#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"

/// What every adapter promises, with REQUIRE alone since torch has a CHECK of its own.
namespace lamina_test {

/// More elements than one block of representative.hpp, both signs, sums that round.
template <class T>
std::vector<T> adapted_values(std::size_t count = 5000) {
  std::mt19937 random(7);
  return random_fractions<T>(random, count);
}

/// Functors give bitwise what they give for a vector of these values. l1_norm and root_mean_square go over the elements as
/// mean_abs and l2_norm do.
template <class T, class Tensor>
void require_functors(const Tensor& tensor, const std::vector<T>& values) {
  const auto same = [&](auto functor) { return same_bits(functor(tensor), functor(values)); };
  REQUIRE(same(lamina::mean_abs{}));
  REQUIRE(same(lamina::l2_norm{}));
  REQUIRE(same(lamina::max_abs{}));
}

/// Refused to read, to write, by the functors and by accumulate, with a message that holds `sentence`, or to write `of_writing`.
template <class T, class Tensor>
void require_refused(Tensor&& tensor, const std::string& sentence, const std::string& of_writing = "") {
  const auto is_refused = [&](const std::string& expected, auto call) {
    return contains(message_of<std::invalid_argument>(call), expected);
  };
  lamina::residual_accumulator<T> residual(model_of({6}));
  REQUIRE(is_refused(sentence, [&] { (void)lamina::elements_of<T>(tensor); }));
  REQUIRE(is_refused(of_writing.empty() ? sentence : of_writing,
                     [&] { (void)lamina::writable_elements_of<T>(tensor); }));
  REQUIRE(is_refused(sentence, [&] { (void)lamina::mean_abs{}(tensor); }));
  REQUIRE(is_refused(sentence, [&] { lamina_test::accumulate(residual, 0, tensor); }));
}

/// The tensor is read at `memory`, where the values lie, and gives functors and residuals bitwise these values.
template <class T, class Tensor>
void require_readable(const Tensor& tensor, const T* memory, const std::vector<T>& values) {
  REQUIRE(lamina::elements_of<T>(tensor).data() == memory);
  REQUIRE(same_bits(lamina::elements_of<T>(tensor), values));
  require_functors(tensor, values);
  lamina::residual_accumulator<T> residual(model_of({values.size()}));
  REQUIRE(same_bits(lamina_test::accumulate(residual, 0, tensor), lamina::mean_abs{}(values)));
  REQUIRE(same_bits(residual[0], values));
}

/// As above, and frames are restored into the tensor's memory.
template <class T, class Tensor>
void require_tensor(Tensor& tensor, const T* memory, const std::vector<T>& values) {
  require_readable(std::as_const(tensor), memory, values);
  REQUIRE(lamina::writable_elements_of<T>(tensor).data() == memory);

  const lamina::layout model = model_of({values.size()});
  lamina::worker<T> worker(model, {.drop_ratio = 0});
  auto step = worker.begin();
  REQUIRE(step.add(0, tensor));
  const std::vector<std::byte> bytes = step.frame().to_bytes();
  std::ranges::fill(lamina::writable_elements_of<T>(tensor), T(1));
  lamina::decode<T>(bytes, model).restore(0, tensor);
  REQUIRE(same_bits(std::span(memory, values.size()), values));
}

}  // namespace lamina_test
