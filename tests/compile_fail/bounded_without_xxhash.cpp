// SPDX-License-Identifier: MIT
// EXPECT: lamina/bounded needs xxHash, for the check of its packets: install xxhash.h, and do not define LAMINA_NO_XXHASH

#define LAMINA_NO_XXHASH
#ifdef LAMINA_SHOULD_FAIL
#include "lamina/bounded/bounded.hpp"
#else
// What says what was lost needs no check.
#include "lamina/delivery.hpp"
#endif

int main() {}
