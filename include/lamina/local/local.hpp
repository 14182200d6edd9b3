// SPDX-License-Identifier: MIT
#pragma once

/// Local updates for any optimizer: what a worker did that the others have not seen, and what becomes of the workers' mean. Read worker.hpp
/// and server.hpp before.

#include "lamina/local/delta.hpp"
#include "lamina/local/outer_optimizer.hpp"
