// SPDX-License-Identifier: MIT
#pragma once

#include <mpi.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/adapt/mpi.hpp"
#include "lamina/collectives/channel.hpp"
#include "lamina/collectives/schedule.hpp"

/// \file
/// Messages over MPI: a channel. Read it after channel.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// The one mutex of the process under which all channels call MPI, also those of other shared objects.
///
/// Where MPI gives no more than MPI_THREAD_SERIALIZED, a program takes it for each call of its own while an engine lives, and makes only
/// calls that do not block: one that blocks keeps the engine's thread out, and where the other rank waits for that engine, for ever.
LAMINA_VISIBLE inline std::mutex& mpi_mutex() {
  static std::mutex mutex;
  return mutex;
}

/// Messages over MPI, on a communicator of their own. MPI moves nothing on unless it is called: progress() does, and an engine's thread
/// calls it. Every call is made under mpi_mutex(), which is held for that one call and never while something is waited for, but where a
/// channel begins and ends: all ranks make and destroy theirs while no engine of another channel has work.
class mpi_channel final : public channel {
 public:
  /// Collective: all ranks of `communicator` make one at the same time. Throws std::runtime_error where MPI was begun with a level of
  /// threads below MPI_THREAD_SERIALIZED, or fails. `names` gives what a rank is called in sentences, where that is not "rank 2".
  explicit mpi_channel(MPI_Comm communicator, std::function<std::string(std::size_t rank)> names = {})
      : names_(std::move(names)) {
    using lamina::detail::check_mpi;
    const std::lock_guard lock(mpi_mutex());
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_SERIALIZED) {
      detail::refuse<std::runtime_error>("this MPI gives threads level ", level, "; overlap needs ",
                                         static_cast<int>(MPI_THREAD_SERIALIZED),
                                         " (serialized): call MPI_Init_thread");
    }
    check_mpi(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
    check_mpi(MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_rank(communicator_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(communicator_, &ranks_), "MPI_Comm_size");
    requests_.assign(most_tickets, MPI_REQUEST_NULL);
    posted_.resize(most_tickets);
    indices_.resize(most_tickets);
    statuses_.resize(most_tickets);
    done_.reserve(most_tickets);
  }
  /// Messages that are still under way stay so, with the communicator: MPI may look at their memory until the process ends.
  ~mpi_channel() override {
    const std::lock_guard lock(mpi_mutex());
    int is_finalized = 0;
    MPI_Finalized(&is_finalized);
    if (is_finalized == 0 && open_ == 0 && std::uncaught_exceptions() == 0) MPI_Comm_free(&communicator_);
  }

  [[nodiscard]] std::size_t rank() const override { return static_cast<std::size_t>(rank_); }
  [[nodiscard]] std::size_t ranks() const override { return static_cast<std::size_t>(ranks_); }
  [[nodiscard]] std::string name_of(std::size_t rank) const override {
    return names_ ? names_(rank) : channel::name_of(rank);
  }

  ticket send(std::size_t to, two_parts<const std::byte> message) override {
    return post(to, true, message,
                [&](const void* buffer, int count, MPI_Datatype type, MPI_Request& request) {
                  return MPI_Isend(buffer, count, type, static_cast<int>(to), tag, communicator_, &request);
                });
  }
  ticket receive(std::size_t from, two_parts<std::byte> message) override {
    return post(from, false, {message.header, message.elements},
                [&](const void* buffer, int count, MPI_Datatype type, MPI_Request& request) {
                  return MPI_Irecv(const_cast<void*>(buffer), count, type, static_cast<int>(from), tag,
                                   communicator_, &request);
                });
  }

  std::span<const completion> progress() override {
    done_.clear();
    if (open_ == 0 || is_abandoned_) return done_;
    int count = 0;
    const std::lock_guard lock(mpi_mutex());
    // Tickets from 0 to the highest that is in use.
    const int code =
        MPI_Testsome(static_cast<int>(used_), requests_.data(), &count, indices_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) lamina::detail::check_mpi(code, "MPI_Testsome");
    for (std::size_t k = 0; count != MPI_UNDEFINED && k < static_cast<std::size_t>(count); ++k) {
      const auto which = static_cast<ticket>(indices_[k]);
      const posted& sent_or_due = posted_[which];
      const int error = code == MPI_ERR_IN_STATUS ? statuses_[k].MPI_ERROR : MPI_SUCCESS;
      bool is_truncated = false;
      if (error != MPI_SUCCESS) {
        int kind = error;
        MPI_Error_class(error, &kind);
        is_truncated = kind == MPI_ERR_TRUNCATE;
        if (!is_truncated) check_message(error, sent_or_due.peer);
      }
      int bytes = static_cast<int>(sent_or_due.bytes);
      if (!sent_or_due.is_send && !is_truncated) MPI_Get_count(&statuses_[k], MPI_BYTE, &bytes);
      done_.push_back({which, static_cast<std::size_t>(bytes), is_truncated});
      --open_;
    }
    while (used_ > 0 && requests_[used_ - 1] == MPI_REQUEST_NULL) --used_;
    return done_;
  }

  void abandon(std::shared_ptr<const void> memory) override {
    // MPI cannot be told to forget a send: the memory is kept until the process ends.
    is_abandoned_ = true;
    static_cast<void>(std::make_unique<std::shared_ptr<const void>>(std::move(memory)).release());
  }

 private:
  static constexpr int tag = 0;
  struct posted {
    std::size_t peer = 0;
    std::size_t bytes = 0;
    bool is_send = false;
  };

  template <class Call>
  ticket post(std::size_t peer, bool is_send, two_parts<const std::byte> message, const Call& call) {
    using lamina::detail::check_mpi;
    if (is_abandoned_) throw_abandoned();
    detail::check_rank(peer, ranks());
    if (!std::in_range<int>(message.size()))
      detail::refuse("a message of ", message.size(), " bytes is too long for MPI");
    const std::lock_guard lock(mpi_mutex());
    std::size_t free = 0;
    while (free < used_ && requests_[free] != MPI_REQUEST_NULL) ++free;
    if (free == most_tickets) throw std::logic_error("more messages are under way than there are tickets");
    posted_[free] = {peer, message.size(), is_send};
    if (message.header.empty()) {
      check_message(
          call(message.elements.data(), static_cast<int>(message.elements.size()), MPI_BYTE, requests_[free]),
          peer);
    } else {
      // Both parts as one message.
      const std::array<int, 2> lengths = {static_cast<int>(message.header.size()),
                                          static_cast<int>(message.elements.size())};
      std::array<MPI_Aint, 2> addresses{};
      check_mpi(MPI_Get_address(message.header.data(), addresses.data()), "MPI_Get_address");
      check_mpi(MPI_Get_address(message.elements.data(), &addresses[1]), "MPI_Get_address");
      MPI_Datatype type = lamina::detail::mpi_type_of(lengths, addresses);
      const int code = call(MPI_BOTTOM, 1, type, requests_[free]);
      MPI_Type_free(&type);  // MPI keeps what a message under way needs
      check_message(code, peer);
    }
    used_ = (std::max)(used_, free + 1);
    ++open_;
    return static_cast<ticket>(free);
  }

  static void check_message(int code, std::size_t peer) {
    if (code != MPI_SUCCESS) throw channel_error(peer, "MPI: " + lamina::detail::mpi_text(code));
  }

  std::function<std::string(std::size_t)> names_;
  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int ranks_ = 0;
  std::size_t open_ = 0;
  bool is_abandoned_ = false;
  std::size_t used_ = 0;  // tickets that may be in use lie below
  std::vector<MPI_Request> requests_;
  std::vector<posted> posted_;
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::vector<completion> done_;
};

}  // namespace lamina::inline LAMINA_ABI::collectives
