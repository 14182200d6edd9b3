// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <cstddef>

#include "messages/mpi_session.hpp"

namespace lab {

inline int rank_of_this() {
  int rank = 0;
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
  return rank;
}

inline std::size_t ranks() {
  int count = 0;
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &count), "MPI_Comm_size");
  return static_cast<std::size_t>(count);
}

}  // namespace lab
