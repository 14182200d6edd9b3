// SPDX-License-Identifier: MIT
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <string>

namespace lab {

/// Takes whole numbers from 0 up. Before CLI11 converts them: a minus would wrap around.
inline const CLI::Validator counted(
    [](const std::string& text) {
      const bool digits =
          !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
      return digits ? std::string() : text + " is not a whole number from 0 up";
    },
    "");

/// Takes numbers. Ranges let NaN through, since it compares with nothing.
inline const CLI::Validator finite(
    [](const std::string& text) {
      double value = 0;
      const bool number = CLI::detail::lexical_cast(text, value);
      return number && !std::isfinite(value) ? text + " is not a finite number" : std::string();
    },
    "");

/// Takes bits a second of a link. So slow a one as 1 b/s has a packet under way for hours.
inline const CLI::Validator link_rate(
    [](const std::string& text) {
      const std::string mistake = counted(text);
      if (!mistake.empty() || text.find_first_not_of('0') == std::string::npos) return mistake;
      return text.size() - text.find_first_not_of('0') < 7 ? text + " is neither 0 nor at least 1000000"
                                                           : std::string();
    },
    "");

}  // namespace lab
