// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <stdexcept>

/// MPI's errors as exceptions, and its beginning and end.
namespace lab {

/// A peer is gone, silent for too long, or broke the protocol.
class link_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Throws link_error with MPI's own words, naming `call`, unless `code` is MPI_SUCCESS.
void check_mpi(int code, const char* call);

/// MPI_Init_thread and MPI_Finalize, with errors returned instead of fatal. Throws link_error if this MPI does not bear threads as
/// wanted: by default other ones, which leave MPI to the first.
class mpi_session {
 public:
  mpi_session(int& argc, char**& argv, int threads = MPI_THREAD_FUNNELED);
  ~mpi_session();
  mpi_session(const mpi_session&) = delete;
  mpi_session& operator=(const mpi_session&) = delete;
};

}  // namespace lab
