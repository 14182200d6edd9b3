// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <lamina/adapt/mpi.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "clock.hpp"

namespace lab {

using lamina::detail::check_mpi;

/// Runs `program()` between MPI_Init_thread and MPI_Finalize, with MPI's errors returned. An exception ends the other ranks too, which may
/// wait for this one for ever.
template <class Program>
int run_ranks(const char* name, int argc, char** argv, int threads, const Program& program) {
  int provided = 0;  // which channels check
  int rank = 0;
  MPI_Init_thread(&argc, &argv, threads, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  try {
    program();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: rank %d: %s\n", name, rank, error.what());
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
  }
  return MPI_Finalize();
}

/// Collective operations of a communicator. Each sleeps between looks at MPI, since the ranks share the cores of one machine and MPI's own
/// waits spin; and the clock stands still meanwhile. std::runtime_error where nothing is heard for the timeout.
class mpi_ranks {
 public:
  mpi_ranks(MPI_Comm communicator, std::chrono::seconds timeout, work_clock& clock)
      : communicator_(communicator), timeout_(timeout), clock_(clock) {
    int number = 0;
    check_mpi(MPI_Comm_rank(communicator_, &number), "MPI_Comm_rank");
    rank_ = static_cast<std::size_t>(number);
    check_mpi(MPI_Comm_size(communicator_, &number), "MPI_Comm_size");
    size_ = static_cast<std::size_t>(number);
  }

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return size_; }
  MPI_Comm communicator() const { return communicator_; }

  /// Those of these ranks that say the same colour; the others, with a colour below 0, get MPI_COMM_NULL. All call it.
  MPI_Comm split(int colour) const {
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(communicator_, colour < 0 ? MPI_UNDEFINED : colour, 0, &part), "MPI_Comm_split");
    return part;
  }

  /// Replaces the values by their sum over the ranks, bitwise identical on all of them: rank 0 makes it.
  void sum(std::span<double> values) const {
    std::vector<MPI_Request> requests(1);
    const int count = static_cast<int>(values.size());
    const void* const own = rank_ == 0 ? MPI_IN_PLACE : values.data();
    check_mpi(MPI_Ireduce(own, values.data(), count, MPI_DOUBLE, MPI_SUM, 0, communicator_, requests.data()),
              "MPI_Ireduce");
    wait(requests, "summing");
    broadcast(std::as_writable_bytes(values));
  }
  void average(std::span<double> values) const {
    sum(values);
    for (double& each : values) each /= static_cast<double>(size_);
  }

  /// Rank 0's tensors become the sums over the ranks; those of the others are unchanged.
  void sum_to_first(std::span<const std::span<float>> tensors) const {
    std::vector<MPI_Request> requests(tensors.size());
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const void* const own = rank_ == 0 ? MPI_IN_PLACE : tensors[t].data();
      check_mpi(MPI_Ireduce(own, tensors[t].data(), static_cast<int>(tensors[t].size()), MPI_FLOAT, MPI_SUM,
                            0, communicator_, &requests[t]),
                "MPI_Ireduce");
    }
    wait(requests, "summing", std::chrono::microseconds{20});  // long sums have many rounds
  }

  /// Rank 0's bytes, fewer than 2^31, go to all.
  void broadcast(std::span<std::byte> bytes) const {
    std::vector<MPI_Request> requests(1);
    check_mpi(
        MPI_Ibcast(bytes.data(), static_cast<int>(bytes.size()), MPI_BYTE, 0, communicator_, requests.data()),
        "MPI_Ibcast");
    wait(requests, "waiting for rank 0");
  }

  /// Returns when all have called it.
  void barrier() const {
    std::vector<MPI_Request> requests(1);
    check_mpi(MPI_Ibarrier(communicator_, requests.data()), "MPI_Ibarrier");
    wait(requests, "waiting for the others");
  }

  /// What each of the ranks has, in their order, on rank 0; the others get nothing.
  template <class T>
  std::vector<T> gather(const T& mine) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return gather_all(std::span<const T>(&mine, 1));
  }
  /// The same of as many from each, one rank's after the other's.
  template <class T>
  std::vector<T> gather_all(std::span<const T> mine) const {
    std::vector<T> all(rank_ == 0 ? size_ * mine.size() : 0);
    std::vector<MPI_Request> requests(1);
    const int bytes = static_cast<int>(mine.size_bytes());
    check_mpi(MPI_Igather(mine.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, 0, communicator_,
                          requests.data()),
              "MPI_Igather");
    wait(requests, "gathering reports");
    return all;
  }

  void wait(std::span<MPI_Request> requests, const std::string& doing,
            std::chrono::microseconds longest_nap = std::chrono::microseconds{200}) const {
    const work_clock::pause waiting(clock_);
    const stopwatch since;
    for (std::chrono::microseconds nap{5};; nap = std::min(2 * nap, longest_nap)) {
      int is_done = 0;
      check_mpi(
          MPI_Testall(static_cast<int>(requests.size()), requests.data(), &is_done, MPI_STATUSES_IGNORE),
          "MPI_Testall");
      if (is_done != 0) return;
      if (since.seconds() > static_cast<double>(timeout_.count()))
        throw std::runtime_error("nothing heard for " + std::to_string(timeout_.count()) + " s while " +
                                 doing);
      std::this_thread::sleep_for(nap);
    }
  }

 private:
  MPI_Comm communicator_;
  std::chrono::seconds timeout_;
  work_clock& clock_;
  std::size_t rank_ = 0;
  std::size_t size_ = 0;
};

}  // namespace lab
