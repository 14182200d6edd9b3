// SPDX-License-Identifier: MIT
#include "transport.hpp"

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

// The frame's segments, cut wherever a piece is full.
std::vector<segments> pieces_of(const lamina::encoded_frame& frame) {
  std::vector<segments> pieces;
  std::size_t room = 0;
  for (auto rest : frame.segments()) {
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
  throw mpi_error(std::string(call) + ": " + text.data());
}

mpi_session::mpi_session(int& argc, char**& argv) {
  check_mpi(MPI_Init(&argc, &argv), "MPI_Init");
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

mpi_session::~mpi_session() {
  MPI_Finalize();
}

transport::transport(MPI_Comm communicator, std::size_t max_frame_bytes, std::chrono::seconds timeout)
    : communicator_(communicator), max_frame_bytes_(max_frame_bytes), timeout_(timeout) {
  int rank = 0;
  int ranks = 0;
  check_mpi(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(communicator, &ranks), "MPI_Comm_size");
  receivers_.resize(static_cast<std::size_t>(ranks - 1));
  for (std::size_t w = 0; w < receivers_.size(); ++w) receivers_[w].peer = static_cast<int>(w) + 1;
  check_mpi(MPI_Comm_split(communicator, rank == 0 ? MPI_UNDEFINED : 0, rank, &workers_communicator_),
            "MPI_Comm_split");
}

transport::~transport() {
  if (workers_communicator_ != MPI_COMM_NULL) MPI_Comm_free(&workers_communicator_);
}

// `look` says whether it is over, or whether data are on their way: then only a short look away is worth it,
// since MPI moves the pieces on when it is called.
template <class Look>
void transport::wait_until(Look look, const std::string& what) {
  using clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds longest_nap{200};
  std::chrono::microseconds nap{5};
  const auto deadline = clock::now() + timeout_;
  for (progress seen = look(); seen != progress::done; seen = look()) {
    if (clock::now() > deadline) {
      throw mpi_error("nothing heard for " + std::to_string(timeout_.count()) + " s while " + what);
    }
    if (seen == progress::moving) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(nap);
      nap = std::min(2 * nap, longest_nap);
    }
  }
}

void transport::send(std::span<const int> peers, const step_report& report,
                     const lamina::encoded_frame& frame) {
  const announcement announced{frame.size_bytes(), report};
  std::vector<std::unique_ptr<gathered_type>> types;
  for (const segments& piece : pieces_of(frame)) types.push_back(std::make_unique<gathered_type>(piece));

  std::vector<MPI_Request> requests;
  for (const int peer : peers) {
    check_mpi(MPI_Isend(&announced, sizeof announced, MPI_BYTE, peer, announcement_tag, communicator_,
                        &requests.emplace_back()),
              "MPI_Isend");
    for (const auto& type : types) {
      check_mpi(
          MPI_Isend(MPI_BOTTOM, 1, type->get(), peer, frame_tag, communicator_, &requests.emplace_back()),
          "MPI_Isend");
    }
  }
  wait_until([&] { return all_complete(requests) ? progress::done : progress::moving; },
             "sending to " + (peers.size() == 1 ? name_of(peers[0]) : "the workers"));
}

void transport::post(receiver& from) {
  from.announcement_arrived = false;
  from.requests.resize(1);
  check_mpi(MPI_Irecv(&from.announced, sizeof from.announced, MPI_BYTE, from.peer, announcement_tag,
                      communicator_, from.requests.data()),
            "MPI_Irecv");
}

// Moves one receive on.
transport::progress transport::advance(receiver& from) {
  const bool complete = all_complete(from.requests);
  if (from.announcement_arrived) return complete ? progress::done : progress::moving;
  if (!complete) return progress::none;
  from.announcement_arrived = true;

  const std::size_t total = from.announced.frame_bytes;
  if (total > max_frame_bytes_) {
    throw mpi_error(name_of(from.peer) + " announces a frame of " + std::to_string(total) +
                    " bytes, more than the " + std::to_string(max_frame_bytes_) + " of the whole model");
  }
  from.buffer.resize(total);
  from.requests.clear();
  for (std::size_t begin = 0; begin < total; begin += piece_bytes) {
    check_mpi(MPI_Irecv(from.buffer.data() + begin, static_cast<int>(std::min(piece_bytes, total - begin)),
                        MPI_BYTE, from.peer, frame_tag, communicator_, &from.requests.emplace_back()),
              "MPI_Irecv");
  }
  return progress::moving;
}

std::vector<message> transport::receive(std::span<receiver> from) {
  for (receiver& each : from) post(each);
  for (receiver& each : from) {
    const auto look = [&] {
      // All of them move on while one is waited for.
      progress awaited = progress::none;
      bool moving = false;
      for (receiver& any : from) {
        const progress seen = advance(any);
        moving = moving || seen == progress::moving;
        if (&any == &each) awaited = seen;
      }
      return awaited == progress::none && moving ? progress::moving : awaited;
    };
    wait_until(look, "waiting for " + name_of(each.peer));
  }
  std::vector<message> messages;
  for (const receiver& each : from) messages.push_back({each.announced.report, each.buffer});
  return messages;
}

void transport::send_to_workers(const lamina::encoded_frame& frame) {
  std::vector<int> peers;
  for (const receiver& each : receivers_) peers.push_back(each.peer);
  send(peers, {}, frame);
}

std::vector<message> transport::receive_from_workers() {
  return receive(receivers_);
}

void transport::send_to_server(const step_report& report, const lamina::encoded_frame& frame) {
  const std::array server = {0};
  send(server, report, frame);
}

message transport::receive_from_server() {
  return receive(std::span(&from_server_, 1)).front();
}

void transport::mean_over_workers(std::span<float> values) {
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Iallreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM,
                           workers_communicator_, requests.data()),
            "MPI_Iallreduce");
  wait_until([&] { return all_complete(requests) ? progress::done : progress::none; },
             "averaging over the workers");
  for (float& value : values) value /= static_cast<float>(workers());
}

std::uint64_t transport::sum_over_ranks(std::uint64_t value) {
  std::uint64_t sum = 0;
  std::vector<MPI_Request> requests(1);
  check_mpi(MPI_Iallreduce(&value, &sum, 1, MPI_UINT64_T, MPI_SUM, communicator_, requests.data()),
            "MPI_Iallreduce");
  wait_until([&] { return all_complete(requests) ? progress::done : progress::none; },
             "summing over the ranks");
  return sum;
}

}  // namespace resnet50_ps
