// SPDX-License-Identifier: MIT
// The same bits with registers and without: values, residual, velocity and payload, for any length and misalignment and
// for numbers with any bits.
#include "kernels.hpp"

#include <algorithm>

#include "fuzz.hpp"

namespace lamina_fuzz::of_kernels {
namespace {

template <class T>
void compare(input& in) {
  kernel_case of;
  of.offset = in.below(64);
  of.skips = in.flag();
  of.is_clear = in.flag();
  of.momentum = in.one_of<double, 3>({0, 0.5, 0.9});
  of.payload = static_cast<unsigned>(in.below(5));
  const bool is_finite = in.flag();
  const std::size_t elements = in.value<std::uint16_t>() % (in.below(4) == 3 ? 9000 : 200);
  // At an address that is aligned for the elements, and for no register.
  const std::size_t shift = in.below(16);
  const auto first = any_values<T>(in, shift + elements, is_finite);
  const auto second = any_values<T>(in, shift + elements, is_finite);
  const auto some = [&](const std::vector<T>& all) { return std::span<const T>(all).subspan(shift); };
  const kernel_results wide = with_registers(of, some(first), some(second));
  const kernel_results plain = without_registers(of, some(first), some(second));
  check(std::ranges::equal(wide.values, plain.values, same_number<double>), "values are the same bits");
  check(lamina_test::same_bits(wide.elements, plain.elements), "the residual is the same bits");
  check(wide.payload == plain.payload, "the payload is the same bits");
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? compare<double>(in) : compare<float>(in);
}

}  // namespace lamina_fuzz::of_kernels

LAMINA_FUZZ_TARGET(kernels)
