// SPDX-License-Identifier: MIT
// EXPECT: lamina needs C++20: compile with -std=c++20

#ifdef LAMINA_SHOULD_FAIL
// The compiler says that it compiles C++17.
#undef __cplusplus
#define __cplusplus 201703L
#endif
#include "lamina/detail/abi.hpp"

int main() {}
