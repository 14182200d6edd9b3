// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <lamina/options.hpp>
#include <optional>
#include <string>

#include "arrays.hpp"

namespace lamina_python {

inline lamina::payload_type payload_of(const std::string& payload) {
  using enum lamina::payload_type;
  return named<lamina::payload_type>("payload", payload,
                                     {{"as_is", as_is},
                                      {"float16", float16},
                                      {"bfloat16", bfloat16},
                                      {"int8", int8},
                                      {"int4", int4},
                                      {"ternary", ternary}});
}

/// What every class that decides is told; the rest of worker_options is as it is by default.
inline lamina::worker_options options_of(double drop_ratio, std::uint64_t warm_up_steps,
                                         std::uint64_t search_every, std::optional<double> send_budget,
                                         std::uint64_t at_least_every, bool by_score,
                                         std::size_t fragment_elements) {
  lamina::worker_options options;
  options.drop_ratio = drop_ratio;
  options.warm_up_steps = warm_up_steps;
  options.search_every = search_every;
  options.send_budget = send_budget;
  options.at_least_every = at_least_every;
  options.by_score = by_score;
  options.fragment_elements = fragment_elements;
  return options;
}

}  // namespace lamina_python
