// SPDX-License-Identifier: MIT
// Each name of fwd.hpp is that of the library: used before it is defined, and as itself afterwards.
#include "lamina/fwd.hpp"

namespace {

template <class... Names>
struct names;
using declared =
    names<lamina::layer, lamina::layout, lamina::tiling, lamina::selection, lamina::delivery,
          lamina::element_range, lamina::float16, lamina::bfloat16, lamina::payload_type,
          lamina::frame_checksum, lamina::non_finite, lamina::frame_kind, lamina::residual_options,
          lamina::worker_options, lamina::server_options, lamina::outer_options, lamina::threshold_search,
          lamina::selector, lamina::tensor_traits<int>, lamina::tensor_ref<float>, lamina::mean_abs,
          lamina::l1_norm, lamina::l2_norm, lamina::root_mean_square, lamina::max_abs, lamina::sequential,
          lamina::residual_accumulator<float>, lamina::worker<float>, lamina::worker<double, lamina::max_abs>,
          lamina::server<double>, lamina::outer_step<float>, lamina::frame_view<float>,
          lamina::frame_encoder<double>, lamina::encoded_frame, lamina::frame_info, lamina::errc,
          lamina::decode_error, lamina::non_finite_gradient>;

}  // namespace

#include <cstddef>

#include "catch.hpp"
#include "lamina/lamina.hpp"

namespace {

// sizeof does not compile for what was only declared.
template <class... Names>
struct names {
  static constexpr std::size_t bytes = (sizeof(Names) + ...);
  static constexpr std::size_t count = sizeof...(Names);
};

}  // namespace

TEST_CASE("fwd: every name that is declared is defined by the library") {
  STATIC_REQUIRE(declared::bytes > declared::count);
}
