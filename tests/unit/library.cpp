// SPDX-License-Identifier: MIT
#include "unit/library.hpp"

LAMINA_TEST_INSTANCES(, float);
LAMINA_TEST_INSTANCES(, double);
