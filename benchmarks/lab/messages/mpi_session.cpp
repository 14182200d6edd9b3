// SPDX-License-Identifier: MIT
#include "messages/mpi_session.hpp"

#include <array>
#include <string>

namespace lab {

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw link_error(std::string(call) + ": " + text.data());
}

mpi_session::mpi_session(int& argc, char**& argv, int threads) {
  int provided = MPI_THREAD_SINGLE;  // libtorch has threads of its own
  check_mpi(MPI_Init_thread(&argc, &argv, threads, &provided), "MPI_Init_thread");
  if (provided < threads) {
    throw link_error(threads == MPI_THREAD_FUNNELED
                         ? "this MPI does not bear programs with threads"
                         : "this MPI gives threads level " + std::to_string(provided) + "; --overlap needs " +
                               std::to_string(threads) + " (multiple)");
  }
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

mpi_session::~mpi_session() {
  MPI_Finalize();
}

}  // namespace lab
