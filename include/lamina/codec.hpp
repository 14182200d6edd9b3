// SPDX-License-Identifier: MIT
#pragma once

/// The codec: the layers that were chosen to bytes (encoder.hpp) and back (decoder.hpp). docs/wire-format.md describes
/// every byte.

#include "lamina/decoder.hpp"
#include "lamina/encoder.hpp"
