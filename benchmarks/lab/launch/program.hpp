// SPDX-License-Identifier: MIT
#pragma once

#include "launch/training.hpp"

namespace lab {

/// The whole program, between main()'s arguments and its status: parses the command line, finds out who is who, runs what is
/// asked for, prints the table.
int run_program(int argc, char** argv, const experiment& added = {});

}  // namespace lab
