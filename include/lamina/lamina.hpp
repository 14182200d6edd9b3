// SPDX-License-Identifier: MIT
#pragma once

/// The core: everything for a worker and a server that needs no optional dependency. To read the headers, begin with tensor, layout,
/// selection, representative, threshold, decision, residual and worker; then payload, frame, codec and server.

#include "lamina/codec.hpp"
#include "lamina/decision.hpp"
#include "lamina/error.hpp"
#include "lamina/execution.hpp"
#include "lamina/half.hpp"
#include "lamina/layout.hpp"
#include "lamina/options.hpp"
#include "lamina/payload.hpp"
#include "lamina/representative.hpp"
#include "lamina/residual.hpp"
#include "lamina/selection.hpp"
#include "lamina/server.hpp"
#include "lamina/state.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"
#include "lamina/version.hpp"
#include "lamina/worker.hpp"
