// SPDX-License-Identifier: MIT
#pragma once

/// Everything of lamina/bounded, which needs xxHash. Each header includes those of lamina/bounded that it is built on, and besides only
/// what these do not bring.

#include "lamina/bounded/receiver.hpp"
#include "lamina/bounded/sender.hpp"
