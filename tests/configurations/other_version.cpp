// SPDX-License-Identifier: MIT
// A source of its own, since it depends on a copy of the headers that the build makes.
#include "unit.cpp"  // NOLINT(bugprone-suspicious-include)
