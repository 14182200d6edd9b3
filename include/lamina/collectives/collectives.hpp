// SPDX-License-Identifier: MIT
#pragma once

/// \file
/// All of lamina/collectives but mpi_channel.hpp, which needs MPI, and torch_hooks.hpp, which needs torch. In the order in which they are
/// best read: schedule, sum, channel, executor, agreement, plan, staging, engine; mpi_channel, torch_hooks.

#include "lamina/collectives/agreement.hpp"
#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/engine.hpp"
#include "lamina/collectives/executor.hpp"
#include "lamina/collectives/plan.hpp"
#include "lamina/collectives/schedule.hpp"
#include "lamina/collectives/staging.hpp"
#include "lamina/collectives/sum.hpp"
