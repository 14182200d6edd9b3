// SPDX-License-Identifier: MIT
#pragma once

/// Everything of lamina/collectives but mpi_channel.hpp, which needs MPI, and torch_hooks.hpp and gathered_linear.hpp, which need torch.

#include "lamina/collectives/agreement.hpp"
#include "lamina/collectives/algorithm.hpp"
#include "lamina/collectives/calibration.hpp"
#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/engine.hpp"
#include "lamina/collectives/engine_options.hpp"
#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/memory_channel.hpp"
#include "lamina/collectives/patience.hpp"
#include "lamina/collectives/plan.hpp"
#include "lamina/collectives/plan_options.hpp"
#include "lamina/collectives/plan_text.hpp"
#include "lamina/collectives/prediction.hpp"
#include "lamina/collectives/round_header.hpp"
#include "lamina/collectives/schedule.hpp"
#include "lamina/collectives/staging.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/collectives/sum_payload.hpp"
#include "lamina/collectives/timeline.hpp"
