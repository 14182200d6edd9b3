// SPDX-License-Identifier: MIT
// EXPECT: lamina: frames are little-endian and sent out of memory as they are; this machine is big-endian

#ifdef LAMINA_SHOULD_FAIL
// A little-endian machine says that it is another.
#undef __BYTE_ORDER__
#define __BYTE_ORDER__ __ORDER_BIG_ENDIAN__
#include "lamina/codec.hpp"
#else
// What writes no bytes compiles on every machine.
#include "lamina/representative.hpp"
#endif

int main() {}
