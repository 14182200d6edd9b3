// SPDX-License-Identifier: MIT
#include <list>
#include <span>
#include <vector>

#include "lamina/codec.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/worker.hpp"
