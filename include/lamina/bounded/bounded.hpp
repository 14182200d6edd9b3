// SPDX-License-Identifier: MIT
#pragma once

/// Everything of lamina/bounded, which needs xxHash. Each header includes those of lamina/bounded that it is built on, and besides only
/// what these do not bring.

#include "lamina/bounded/arrivals.hpp"
#include "lamina/bounded/chunks.hpp"
#include "lamina/bounded/control.hpp"
#include "lamina/bounded/duties.hpp"
#include "lamina/bounded/packet.hpp"
#include "lamina/bounded/rate.hpp"
#include "lamina/bounded/receiver.hpp"
#include "lamina/bounded/sender.hpp"
