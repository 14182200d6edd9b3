// SPDX-License-Identifier: MIT
#pragma once

/// The server's side: what workers send, summed, and what each of them has not seen.

#include "lamina/aggregator.hpp"
#include "lamina/publisher.hpp"
