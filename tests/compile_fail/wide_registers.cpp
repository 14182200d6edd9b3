// SPDX-License-Identifier: MIT
// EXPECT: lamina needs float and double to be rounded to their type: compile with -msse2 -mfpmath=sse

#include <cfloat>
#ifdef LAMINA_SHOULD_FAIL
// The compiler says that it computes in x87 registers, as GCC does with -mfpmath=387.
#undef FLT_EVAL_METHOD
#define FLT_EVAL_METHOD 2
#endif
#include "lamina/detail/abi.hpp"

int main() {}
