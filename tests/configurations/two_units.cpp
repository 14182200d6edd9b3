// SPDX-License-Identifier: MIT
// Two configurations of lamina in one program, one of them behind a look at what the machine has.
#include <cstdio>

#include "unit.hpp"

int main() {
#if defined(LAMINA_TEST_SECOND_IS_WIDE)
  const bool runs_second = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl");
#else
  const bool runs_second = true;
#endif
  const bool first_works = first_unit::works();
  const bool second_works = runs_second && second_unit::works();
  std::printf("first unit: %s, second unit: %s\n", first_works ? "right" : "wrong",
              second_works  ? "right"
              : runs_second ? "wrong"
                            : "not for this machine");
  if (!first_works || second_works != runs_second) return 1;
#if defined(LAMINA_TEST_OTHER_SENTENCE)
  std::printf("%s\n%s\n", first_unit::own_sentence().c_str(), second_unit::own_sentence().c_str());
  if (first_unit::own_sentence() == second_unit::own_sentence()) return 1;
#endif
}
