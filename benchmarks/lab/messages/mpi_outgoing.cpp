// SPDX-License-Identifier: MIT
#include "messages/mpi_outgoing.hpp"

#include <algorithm>
#include <utility>

#include "messages/mpi_session.hpp"

namespace lab {
namespace {

// To one receiver at a time: enough to keep a link busy, and few for MPI to look through.
constexpr std::size_t least_pieces_in_flight = 8;
constexpr std::size_t bytes_in_flight = std::size_t{2} << 20;
constexpr std::chrono::milliseconds longest_turn{100};

using segments = std::vector<std::span<const std::byte>>;

// The segments, cut wherever a piece is full.
std::vector<segments> pieces_of(byte_segments bytes, std::size_t piece_bytes) {
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

}  // namespace

int complete_some(std::vector<MPI_Request>& requests) {
  int count = 0;
  std::vector<int> indices(requests.size());
  check_mpi(MPI_Testsome(static_cast<int>(requests.size()), requests.data(), &count, indices.data(),
                         MPI_STATUSES_IGNORE),
            "MPI_Testsome");
  return count == MPI_UNDEFINED ? 0 : count;
}

// Segments anywhere in memory as one MPI message.
class mpi_outgoing::piece_type {
 public:
  explicit piece_type(const segments& parts) {
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
  ~piece_type() { MPI_Type_free(&type_); }  // MPI keeps what a send on its way needs
  piece_type(const piece_type&) = delete;
  piece_type& operator=(const piece_type&) = delete;
  MPI_Datatype get() const { return type_; }

 private:
  MPI_Datatype type_ = MPI_DATATYPE_NULL;
};

mpi_outgoing::mpi_outgoing(MPI_Comm communicator, std::span<const std::size_t> to, message_kind kind,
                           payload what, std::size_t piece_bytes)
    : communicator_(communicator), announced_{kind, piece_bytes, what.size_bytes()}, what_(std::move(what)) {
  for (const segments& piece : pieces_of(what_.segments(), piece_bytes)) pieces_.emplace_back(piece);
  receivers_.reserve(to.size());
  for (const std::size_t rank : to) receivers_.push_back({.rank = rank});
  begin_next();
}

mpi_outgoing::~mpi_outgoing() = default;

mpi_progress mpi_outgoing::advance() {
  const auto now = std::chrono::steady_clock::now();
  bool are_sent = begun_ == receivers_.size();
  bool is_turn_over = true;
  bool have_advanced = false;
  for (receiver& each : std::span(receivers_).first(begun_)) {
    const bool advanced = complete_some(each.requests) > 0;
    std::erase(each.requests, MPI_REQUEST_NULL);
    post_pieces(each);
    if (advanced) each.advanced_at = now;
    have_advanced = have_advanced || advanced;
    are_sent = are_sent && is_sent(each);
    is_turn_over = is_turn_over && (is_sent(each) || now > each.advanced_at + longest_turn);
  }
  if (is_turn_over) begin_next();
  if (are_sent) return mpi_progress::done;
  return have_advanced ? mpi_progress::advanced : mpi_progress::moving;
}

std::vector<std::size_t> mpi_outgoing::waiting() const {
  std::vector<std::size_t> ranks;
  for (const receiver& each : std::span(receivers_).subspan(begun_)) ranks.push_back(each.rank);
  return ranks;
}

bool mpi_outgoing::is_sent_to(std::size_t rank) const {
  const auto found = std::ranges::find(receivers_, rank, &receiver::rank);
  return found != receivers_.end() && is_sent(*found);
}

std::vector<std::size_t> mpi_outgoing::missing() const {
  std::vector<std::size_t> ranks;
  for (const receiver& each : receivers_) {
    if (!is_sent(each)) ranks.push_back(each.rank);
  }
  return ranks;
}

bool mpi_outgoing::is_in_flight() {
  return std::ranges::any_of(receivers_, [](receiver& each) {
    int all_done = 0;
    const int code = MPI_Testall(static_cast<int>(each.requests.size()), each.requests.data(), &all_done,
                                 MPI_STATUSES_IGNORE);
    return code != MPI_SUCCESS || all_done == 0;
  });
}

bool mpi_outgoing::is_sent(const receiver& to) const {
  return &to < receivers_.data() + begun_ && to.posted == pieces_.size() && to.requests.empty();
}

void mpi_outgoing::begin_next() {
  if (begun_ == receivers_.size()) return;
  receiver& next = receivers_[begun_++];
  check_mpi(MPI_Isend(&announced_, sizeof announced_, MPI_BYTE, static_cast<int>(next.rank),
                      mpi_announcement_tag, communicator_, &next.requests.emplace_back(MPI_REQUEST_NULL)),
            "MPI_Isend");
  post_pieces(next);
  next.advanced_at = std::chrono::steady_clock::now();
}

std::size_t mpi_outgoing::pieces_in_flight() const {
  return std::max(least_pieces_in_flight, bytes_in_flight / announced_.piece_bytes);
}

void mpi_outgoing::post_pieces(receiver& to) {
  for (; to.posted < pieces_.size() && to.requests.size() < pieces_in_flight(); ++to.posted) {
    check_mpi(MPI_Isend(MPI_BOTTOM, 1, pieces_[to.posted].get(), static_cast<int>(to.rank), mpi_piece_tag,
                        communicator_, &to.requests.emplace_back(MPI_REQUEST_NULL)),
              "MPI_Isend");
  }
}

}  // namespace lab
