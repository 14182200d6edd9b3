// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "lamina/detail/abi.hpp"

/// How a mistake of the caller ends: in an exception or, without exceptions, in a sentence and the end of the program.
namespace lamina::inline LAMINA_ABI::detail {

/// Throws. Compiled with -fno-exceptions there is no way back to a caller that made a mistake: the sentence goes to stderr and the program
/// ends. What comes without a mistake of the program's, bytes from outside and gradients that are not finite, gives an error or a result.
template <class Exception>
[[noreturn]] void raise(const Exception& exception) {
#if LAMINA_HAS_EXCEPTIONS
  throw exception;
#else
  std::fprintf(stderr, "lamina: %s\n", exception.what());
  std::abort();
#endif
}

/// Strings and numbers, one behind the other.
template <class... Words>
std::string sentence(const Words&... words) {
  std::string all;
  const auto append = [&all](const auto& word) {
    using given = std::remove_cvref_t<decltype(word)>;
    if constexpr (std::is_floating_point_v<given>) {
      std::array<char, 32> text{};
      static_cast<void>(std::snprintf(text.data(), text.size(), "%g", static_cast<double>(word)));
      all += text.data();
    } else if constexpr (std::is_integral_v<given>) {
      all += std::to_string(word);
    } else {
      static_assert(!std::is_enum_v<given>, "a number or a name says what an enumerator is");
      all += word;
    }
  };
  (append(words), ...);
  return all;
}

/// Throws an exception that says this: refuse<std::out_of_range>("there is no layer ", index). Most mistakes are arguments.
template <class Exception = std::invalid_argument, class... Words>
[[noreturn]] void refuse(const Words&... words) {
  raise(Exception(sentence(words...)));
}

}  // namespace lamina::inline LAMINA_ABI::detail
