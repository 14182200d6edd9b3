// SPDX-License-Identifier: MIT
#include <Eigen/Core>

#include "lamina.hpp"
#include "lamina/adapt/eigen.hpp"
