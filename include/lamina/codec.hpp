// SPDX-License-Identifier: MIT
#pragma once

/// The codec: the layers that were chosen to bytes (encoder.hpp) and back (decoder.hpp), and the same of a step in parts
/// (part_encoder.hpp, step_parts.hpp). docs/wire-format/index.md describes every byte.

#include "lamina/decoder.hpp"
#include "lamina/encoder.hpp"
#include "lamina/part_encoder.hpp"
#include "lamina/step_parts.hpp"
