// SPDX-License-Identifier: MIT
#pragma once

/// The list-[0] codec: selected layers to bytes (encoder.hpp) and back (decoder.hpp). docs/wire-format.md describes every
/// byte.

#include "lamina/decoder.hpp"
#include "lamina/encoder.hpp"
