// SPDX-License-Identifier: MIT
// Compiled twice (CMakeLists.txt), the second time with LAMINA_NO_SIMD and with another name for the namespace lamina:
// functions of one name must not have two bodies in one program, and these have. LAMINA_FUZZ_BUILD is the name of one.
#include <cstddef>
#include <stdexcept>

#include "accumulate.hpp"
#include "kernels.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"

namespace lamina_fuzz {
namespace {

template <class T>
class recorder {
 public:
  recorder(const kernel_case& of, std::size_t elements)
      : of_(of),
        model_({{"before", {of.offset}}, {"layer", {elements}}, {"after", {3}}}),
        residual_(model_, {.momentum = of.momentum,
                           .non_finite = of.skips ? lamina::non_finite::skip : lamina::non_finite::refuse}) {}

  kernel_results run(std::span<const T> first, std::span<const T> second) {
    if (!of_.is_clear) add(first, lamina::l2_norm{});
    add(second, lamina::mean_abs{});
    add(first, lamina::max_abs{});
    results_.values.push_back(static_cast<double>(residual_.left_out_elements()));
    const std::span<const T> layer = residual_[1];
    for (const auto functor_value :
         {lamina::mean_abs{}(layer), lamina::l1_norm{}(layer), lamina::l2_norm{}(layer),
          lamina::root_mean_square{}(layer), lamina::max_abs{}(layer)}) {
      results_.values.push_back(functor_value);
    }
    const auto type = static_cast<lamina::payload_type>(of_.payload);
    std::vector<std::byte> payload(lamina::payload_bytes<T>(type, layer.size()));
    lamina::detail::encode_payload<T>(type, layer, payload.data());
    for (const std::byte each : payload) results_.payload.push_back(std::to_integer<std::uint8_t>(each));
    residual_.subtract(1, type);
    add(second, lamina::root_mean_square{});
    results_.elements.insert(results_.elements.end(), residual_.elements().begin(),
                             residual_.elements().end());
    results_.elements.insert(results_.elements.end(), residual_.velocity().begin(),
                             residual_.velocity().end());
    return results_;
  }

 private:
  template <class Functor>
  void add(std::span<const T> gradient, const Functor& functor) {
    try {
      results_.values.push_back(lamina_test::accumulate(residual_, 1, gradient, functor));
    } catch (const std::domain_error&) {
      results_.values.push_back(-7);  // refused
    }
    results_.elements.insert(results_.elements.end(), residual_[1].begin(), residual_[1].end());
  }

  kernel_case of_;
  lamina::layout model_;
  lamina::residual_accumulator<T> residual_;
  kernel_results results_;
};

}  // namespace

kernel_results LAMINA_FUZZ_BUILD(const kernel_case& of, std::span<const float> first,
                                 std::span<const float> second) {
  return recorder<float>(of, first.size()).run(first, second);
}

kernel_results LAMINA_FUZZ_BUILD(const kernel_case& of, std::span<const double> first,
                                 std::span<const double> second) {
  return recorder<double>(of, first.size()).run(first, second);
}

}  // namespace lamina_fuzz
