// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/options.hpp>
#include <optional>
#include <string>

#include "arrays.hpp"

namespace lamina_python {

inline lamina::decision_timing timing(const std::string& decide) {
  using enum lamina::decision_timing;
  return named<lamina::decision_timing>("decide", decide,
                                        {{"at_end", at_end}, {"as_ready", as_ready}, {"ahead", ahead}});
}

inline lamina::payload_type payload_of(const std::string& payload) {
  using enum lamina::payload_type;
  return named<lamina::payload_type>(
      "payload", payload,
      {{"as_is", as_is}, {"float16", float16}, {"bfloat16", bfloat16}, {"int8", int8}, {"int4", int4}});
}

inline lamina::compressor_options options_of(double drop_ratio, std::uint64_t warm_up_steps,
                                             std::uint64_t refresh_every, std::optional<double> byte_budget,
                                             std::uint64_t max_age, std::size_t part_elements,
                                             double momentum) {
  lamina::compressor_options options;
  options.drop_ratio = drop_ratio;
  options.warm_up_steps = warm_up_steps;
  options.refresh = lamina::refresh_schedule::every(refresh_every);
  options.byte_budget = byte_budget;
  options.max_age = max_age;
  options.part_elements = part_elements;
  options.momentum = momentum;
  return options;
}
}  // namespace lamina_python
