// SPDX-License-Identifier: MIT
#include "../../adapt/xtensor_headers.hpp"
#include "lamina.hpp"
#include "lamina/adapt/xtensor.hpp"
