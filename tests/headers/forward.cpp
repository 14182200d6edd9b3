// SPDX-License-Identifier: MIT
// Each name of fwd.hpp is that of the library: used before it is defined, and as itself afterwards.
#include "lamina/fwd.hpp"

namespace {

template <class... Names>
struct names;
using declared = names<lamina::layer, lamina::layout, lamina::tiling, lamina::selection, lamina::delivery,
                       lamina::float16, lamina::bfloat16, lamina::payload_type, lamina::worker_options,
                       lamina::server_options, lamina::tensor_traits<int>, lamina::mean_abs,
                       lamina::sequential, lamina::residual_accumulator<float>, lamina::worker<float>,
                       lamina::worker<double>, lamina::server<double>, lamina::local_delta<float>,
                       lamina::outer_optimizer<float>, lamina::encoded_frame, lamina::frame_view<float>,
                       lamina::frame_encoder<double>, lamina::errc, lamina::decode_error>;

}  // namespace

#include <cstddef>

#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"

namespace {

// sizeof does not compile for what was only declared.
template <class... Names>
struct names {
  static constexpr std::size_t bytes = (sizeof(Names) + ...);
};
static_assert(declared::bytes > 0);

}  // namespace
