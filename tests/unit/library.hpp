// SPDX-License-Identifier: MIT
// Precompiled for the unit tests: the library, and what of it is compiled once, in library.cpp, and not by each test that uses it. The
// pass over elements is most of what a compiler writes for a worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "catch.hpp"
#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"
#include "signed_mean.hpp"

#define LAMINA_TEST_PASS(prefix, T, G, F)                                                                 \
  prefix template lamina::detail::block_result lamina::detail::residual_block<T>::add(std::span<const G>, \
                                                                                      const F&, T) const; \
  prefix template std::pair<double, std::uint16_t> lamina::detail::residual_block<T>::add_rest(           \
      std::span<const G>, std::size_t, const F&) const

#define LAMINA_TEST_PASSES(prefix, T, G)                                                                  \
  LAMINA_TEST_PASS(prefix, T, G, lamina::detail::sum_of_magnitudes);                                      \
  LAMINA_TEST_PASS(prefix, T, G, lamina::mean_abs);                                                       \
  LAMINA_TEST_PASS(prefix, T, G, lamina::l2_norm);                                                        \
  prefix template bool lamina::detail::residual_block<T>::rest_is_finite(std::span<const G>, std::size_t) \
      const;                                                                                              \
  prefix template T lamina::detail::residual_block<T>::undo(std::span<const G>, std::size_t) const

#define LAMINA_TEST_FUNCTOR(prefix, T, F)                                       \
  prefix template lamina::detail::block_result lamina::detail::reduce_block<T>( \
      const F&, std::size_t, const lamina::detail::read_only<T>&)

#define LAMINA_TEST_INSTANCES(prefix, T)                                                                   \
  LAMINA_TEST_PASSES(prefix, T, T);                                                                        \
  LAMINA_TEST_PASSES(prefix, T, lamina::float16);                                                          \
  LAMINA_TEST_PASSES(prefix, T, lamina::bfloat16);                                                         \
  LAMINA_TEST_PASS(prefix, T, T, lamina::l1_norm);                                                         \
  LAMINA_TEST_PASS(prefix, T, T, lamina::max_abs);                                                         \
  LAMINA_TEST_PASS(prefix, T, T, lamina_test::signed_mean);                                                \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina::detail::sum_of_magnitudes);                                       \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina::mean_abs);                                                        \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina::l1_norm);                                                         \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina::l2_norm);                                                         \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina::max_abs);                                                         \
  LAMINA_TEST_FUNCTOR(prefix, T, lamina_test::signed_mean);                                                \
  prefix template void lamina::detail::encode_payload<T, lamina::detail::rest::is_kept>(                   \
      lamina::payload_type, std::span<const T>, std::byte*) noexcept;                                      \
  prefix template void lamina::detail::encode_payload<T, lamina::detail::rest::is_lost>(                   \
      lamina::payload_type, std::span<const T>, std::byte*) noexcept;                                      \
  prefix template void lamina::detail::decode_payload(lamina::payload_type, const std::byte*, std::size_t, \
                                                      std::size_t, std::span<T>) noexcept;                 \
  prefix template std::error_code lamina::detail::frame_decoder::decode(                                   \
      std::span<const std::byte>, const lamina::layout&, lamina::frame_view<T>&);                          \
  prefix template class lamina::residual_accumulator<T>;                                                   \
  prefix template class lamina::worker<T>;                                                                 \
  prefix template class lamina::server<T>;                                                                 \
  prefix template class lamina::frame_view<T>;                                                             \
  prefix template class lamina::frame_encoder<T>

LAMINA_TEST_INSTANCES(extern, float);
LAMINA_TEST_INSTANCES(extern, double);
