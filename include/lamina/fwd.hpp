// SPDX-License-Identifier: MIT
#pragma once

#include <concepts>

#include "lamina/detail/abi.hpp"

/// The names of the library without their definitions, for headers that only mention them. They cannot be declared by hand: the library
/// lies in an inline namespace.
namespace lamina::inline LAMINA_ABI {

/// The element types that residuals, frames and representative values are computed in.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, double>;

struct layer;
class layout;
class tiling;
class selection;
class delivery;
struct float16;
struct bfloat16;
enum class payload_type : std::uint8_t;
struct worker_options;
struct server_options;
template <class>
struct tensor_traits;
struct mean_abs;
struct sequential;
template <element T>
class residual_accumulator;
template <element T, class Representative = mean_abs>
class worker;
template <element T>
class server;
template <element T, class Representative = mean_abs>
class local_delta;
template <element T>
class outer_optimizer;
class encoded_frame;
template <element T>
class frame_view;
template <element T>
class frame_encoder;
enum class errc;
class decode_error;

}  // namespace lamina::inline LAMINA_ABI
