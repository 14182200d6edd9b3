// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>
#include <cstdint>

#include "lamina/detail/abi.hpp"

/// The names of the library without their definitions, for headers that only mention them. They cannot be declared by hand: the library
/// lies in an inline namespace.
namespace lamina::inline LAMINA_ABI {

/// The element types that residuals, frames and representative values are computed in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, double>;

// What is described.
struct layer;
class layout;
class tiling;
class selection;
class delivery;
struct element_range;
struct float16;
struct bfloat16;

// What is told.
enum class payload_type : std::uint8_t;
enum class frame_checksum : std::uint8_t;
enum class non_finite : std::uint8_t;
enum class frame_kind : std::uint8_t;
struct residual_options;
struct worker_options;
struct server_options;
struct outer_options;

// What computes.
class threshold_search;
template <class>
struct tensor_traits;
struct mean_abs;
struct l1_norm;
struct l2_norm;
struct root_mean_square;
struct max_abs;
struct sequential;
template <element T>
class residual_accumulator;
template <element T, class Representative = mean_abs>
class worker;
template <element T>
class server;
class selector;
template <element T>
class tensor_ref;
template <element T, class Representative = mean_abs>
class drift_compressor;
template <element T>
class outer_step;

// What goes over the wire.
class encoded_frame;
template <element T>
class frame_view;
template <element T>
class frame_encoder;
struct frame_header;
struct frame_info;

// What goes wrong.
enum class errc;
class decode_error;
class non_finite_gradient;

}  // namespace lamina::inline LAMINA_ABI
