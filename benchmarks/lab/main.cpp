// SPDX-License-Identifier: MIT
// Trains ResNet-50 over MPI; see --help. Rank 0 is the server, the others are workers; in an allreduce all are.
#include "launch/program.hpp"

int main(int argc, char** argv) {
  return lab::run_program(argc, argv);
}
