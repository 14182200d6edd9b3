// SPDX-License-Identifier: MIT
#include "mpi_link.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <thread>

namespace resnet50_ps {
namespace {

constexpr int announcement_tag = 1;
constexpr int frame_tag = 2;
// MPI 3.1 counts in int: longer messages go in pieces.
constexpr std::size_t piece_bytes = std::size_t{1} << 30;

using segments = std::vector<std::span<const std::byte>>;

std::size_t size_of(byte_segments bytes) {
  std::size_t sum = 0;
  for (const auto segment : bytes) sum += segment.size();
  return sum;
}

// The segments, cut wherever a piece is full.
std::vector<segments> pieces_of(byte_segments bytes) {
  std::vector<segments> pieces;
  std::size_t room = 0;
  for (auto rest : bytes) {
    while (!rest.empty()) {
      if (room == 0) {
        pieces.emplace_back();
        room = piece_bytes;
      }
      const std::size_t count = std::min(room, rest.size());
      pieces.back().push_back(rest.first(count));
      rest = rest.subspan(count);
      room -= count;
    }
  }
  return pieces;
}

// Segments anywhere in memory as one MPI message.
class gathered_type {
 public:
  explicit gathered_type(const segments& parts) {
    std::vector<int> lengths;
    std::vector<MPI_Aint> addresses;
    for (const auto part : parts) {
      lengths.push_back(static_cast<int>(part.size()));
      check_mpi(MPI_Get_address(part.data(), &addresses.emplace_back()), "MPI_Get_address");
    }
    check_mpi(MPI_Type_create_hindexed(static_cast<int>(parts.size()), lengths.data(), addresses.data(),
                                       MPI_BYTE, &type_),
              "MPI_Type_create_hindexed");
    check_mpi(MPI_Type_commit(&type_), "MPI_Type_commit");
  }
  ~gathered_type() { MPI_Type_free(&type_); }
  gathered_type(const gathered_type&) = delete;
  gathered_type& operator=(const gathered_type&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

bool all_complete(std::vector<MPI_Request>& requests) {
  int done = 0;
  check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
            "MPI_Testall");
  return done != 0;
}

std::string name_of(int rank) {
  return rank == 0 ? "the server" : "worker " + std::to_string(rank - 1);
}

}  // namespace

void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw link_error(std::string(call) + ": " + text.data());
}

mpi_session::mpi_session(int& argc, char**& argv) {
  check_mpi(MPI_Init(&argc, &argv), "MPI_Init");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

mpi_session::~mpi_session() {
  MPI_Finalize();
}

// `look` says whether it is over, or whether data are on their way: then only a short look away is worth it, since MPI
// moves the pieces on when it is called.
template <class Look, class What>
void mpi_messenger::wait_until(Look look, What what) {
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds longest_nap{200};
  std::chrono::microseconds nap{5};
  const auto deadline = clock::now() + options_.timeout;
  for (progress seen = look(); seen != progress::done; seen = look()) {
    if (clock::now() > deadline) {
      throw link_error("nothing heard for " + std::to_string(options_.timeout.count()) + " s while " +
                       what());
    }
    if (seen == progress::moving) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, longest_nap);
    }
  }
}

void mpi_messenger::wait_for(MPI_Request request, const std::string& what) {
  std::vector<MPI_Request> requests = {request};
  wait_until([&] { return all_complete(requests) ? progress::done : progress::none; }, [&] { return what; });
}

void mpi_messenger::send(std::span<const int> ranks, const step_report& report, byte_segments bytes) {
  const receiver::announcement announced{size_of(bytes), report};
  std::vector<std::unique_ptr<gathered_type>> types;
  for (const segments& piece : pieces_of(bytes)) types.push_back(std::make_unique<gathered_type>(piece));

  std::vector<MPI_Request> requests;
  for (const int rank : ranks) {
    check_mpi(MPI_Isend(&announced, sizeof announced, MPI_BYTE, rank, announcement_tag, communicator_,
                        &requests.emplace_back()),
              "MPI_Isend");
    for (const auto& type : types) {
      check_mpi(
          MPI_Isend(MPI_BOTTOM, 1, type->get(), rank, frame_tag, communicator_, &requests.emplace_back()),
          "MPI_Isend");
    }
  }
  const auto unsent = [&] {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      int done = 0;
      MPI_Request_get_status(requests[i], &done, MPI_STATUS_IGNORE);
      if (done == 0) return "sending to " + name_of(ranks[i / (1 + types.size())]);
    }
    return std::string("sending");
  };
  wait_until([&] { return all_complete(requests) ? progress::done : progress::moving; }, unsent);
}

// Moves one receive on.
mpi_messenger::progress mpi_messenger::advance(receiver& from) {
  // A receive that nothing comes for would take the first message of the next run.
  if (from.at == receiver::phase::closed) return progress::none;
  if (from.at == receiver::phase::idle) {
    from.requests.resize(1);
    check_mpi(MPI_Irecv(&from.announced, sizeof from.announced, MPI_BYTE, from.rank, announcement_tag,
                        communicator_, from.requests.data()),
              "MPI_Irecv");
    from.at = receiver::phase::announcing;
  }
  const bool complete = all_complete(from.requests);
  if (from.at == receiver::phase::arriving) return complete ? progress::done : progress::moving;
  if (!complete) return progress::none;

  const std::size_t total = from.announced.bytes;
  if (total > options_.max_message_bytes) {
    throw link_error(name_of(from.rank) + " announces a message of " + std::to_string(total) +
                     " bytes, more than the " + std::to_string(options_.max_message_bytes) +
                     " that can be meant");
  }
  from.bytes.resize(total);
  from.requests.clear();
  for (std::size_t begin = 0; begin < total; begin += piece_bytes) {
    check_mpi(MPI_Irecv(from.bytes.data() + begin, static_cast<int>(std::min(piece_bytes, total - begin)),
                        MPI_BYTE, from.rank, frame_tag, communicator_, &from.requests.emplace_back()),
              "MPI_Irecv");
  }
  from.at = receiver::phase::arriving;
  return progress::moving;
}

mpi_messenger::receiver& mpi_messenger::receive(std::span<receiver> from, const receiver* awaited) {
  receiver* arrived = nullptr;
  const auto look = [&] {
    // All of them move on while one is waited for.
    bool moving = false;
    for (receiver& each : from) {
      const progress seen = advance(each);
      moving = moving || seen == progress::moving;
      if (seen == progress::done && arrived == nullptr && (awaited == nullptr || awaited == &each))
        arrived = &each;
    }
    return arrived != nullptr ? progress::done : moving ? progress::moving : progress::none;
  };
  wait_until(look,
             [&] { return "waiting for " + (awaited == nullptr ? "any worker" : name_of(awaited->rank)); });
  arrived->at = arrived->announced.report.is_last ? receiver::phase::closed : receiver::phase::idle;
  return *arrived;
}

mpi_server_link::mpi_server_link(MPI_Comm communicator, mpi_link_options options)
    : messenger_(communicator, options) {
  int ranks = 0;
  check_mpi(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");
  receivers_.resize(static_cast<std::size_t>(ranks - 1));
  for (std::size_t w = 0; w < receivers_.size(); ++w) receivers_[w].rank = static_cast<int>(w) + 1;
}

message mpi_server_link::message_of(const mpi_messenger::receiver& from) const {
  return {static_cast<std::size_t>(from.rank - 1), from.announced.report, from.bytes};
}

void mpi_server_link::send(std::span<const std::size_t> workers, byte_segments bytes) {
  std::vector<int> ranks;
  for (const std::size_t w : workers) ranks.push_back(static_cast<int>(w) + 1);
  messenger_.send(ranks, {}, bytes);
}

std::vector<message> mpi_server_link::receive_from_all() {
  std::vector<message> messages;
  for (std::size_t w = 0; w < receivers_.size(); ++w) {
    // Those before have arrived: to move them on would begin their next message.
    messages.push_back(message_of(messenger_.receive(std::span(receivers_).subspan(w), &receivers_[w])));
  }
  return messages;
}

message mpi_server_link::receive_from_any() {
  return message_of(messenger_.receive(receivers_, nullptr));
}

mpi_worker_link::mpi_worker_link(MPI_Comm communicator, MPI_Comm workers, mpi_link_options options)
    : messenger_(communicator, options), workers_communicator_(workers) {
  int size = 0;
  int rank = 0;
  check_mpi(MPI_Comm_size(workers, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(workers, &rank), "MPI_Comm_rank");
  workers_ = static_cast<std::size_t>(size);
  worker_ = static_cast<std::size_t>(rank);
}

void mpi_worker_link::send(const step_report& report, byte_segments bytes) {
  const std::array server = {0};
  messenger_.send(server, report, bytes);
}

message mpi_worker_link::receive() {
  messenger_.receive(std::span(&from_server_, 1), &from_server_);
  return {worker_, from_server_.announced.report, from_server_.bytes};
}

std::vector<double> mpi_worker_link::gather(std::span<const double> values) {
  std::vector<double> all(values.size() * workers_);
  const int count = static_cast<int>(values.size());
  MPI_Request request = MPI_REQUEST_NULL;
  check_mpi(MPI_Iallgather(values.data(), count, MPI_DOUBLE, all.data(), count, MPI_DOUBLE,
                           workers_communicator_, &request),
            "MPI_Iallgather");
  messenger_.wait_for(request, "gathering from the workers");
  return all;
}

}  // namespace resnet50_ps
