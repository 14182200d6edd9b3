// SPDX-License-Identifier: MIT
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// What a process of a run has: messages to others, checkpoints, and an eye on its memory.
namespace soak {

/// No wait in this program is longer. A round takes milliseconds; the rest is for a machine that does much else.
inline constexpr std::chrono::seconds deadline{60};

/// The process at the other end is gone: fail-stop, and no failure of this process.
struct peer_lost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class message_kind : std::uint32_t { audit = 1, gradients, lost_send, parameters, arrived, go_on };

/// `replica` is the hash of what the sender holds as parameters.
struct message_header {
  message_kind kind{};
  std::uint32_t reserved = 0;
  std::uint64_t round = 0;
  std::uint64_t replica = 0;
  std::uint64_t bytes = 0;
};

/// Messages over one end of a socket pair. Every call throws peer_lost at the end of the stream, and
/// std::runtime_error, with the peer's name, after the deadline.
class channel {
 public:
  channel(int descriptor, std::string peer) : descriptor_(descriptor), peer_(std::move(peer)) {}
  channel(channel&& other) noexcept
      : descriptor_(std::exchange(other.descriptor_, -1)), peer_(std::move(other.peer_)) {}
  channel& operator=(channel&&) = delete;
  ~channel() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int descriptor() const noexcept { return descriptor_; }
  const std::string& peer() const noexcept { return peer_; }

  void send(message_kind kind, std::uint64_t round, std::uint64_t replica,
            std::span<const std::span<const std::byte>> segments) {
    message_header header{kind, 0, round, replica, 0};
    for (const auto segment : segments) header.bytes += segment.size();
    write_all(std::as_bytes(std::span(&header, 1)));
    for (const auto segment : segments) write_all(segment);
  }
  void send(message_kind kind, std::uint64_t round, std::uint64_t replica,
            std::initializer_list<std::span<const std::byte>> segments = {}) {
    send(kind, round, replica, std::span(segments.begin(), segments.size()));
  }

  /// The next message; its body is valid until the next call.
  std::pair<message_header, std::span<const std::byte>> receive() {
    message_header header;
    read_all(std::as_writable_bytes(std::span(&header, 1)));
    if (header.bytes > most_bytes)
      throw std::runtime_error("a message of " + std::to_string(header.bytes) + " bytes from " + peer_);
    if (body_.size() < header.bytes) body_.resize(header.bytes);
    const auto body = std::span(body_).first(header.bytes);
    read_all(body);
    return {header, body};
  }
  /// The next message, which must be of this kind and round.
  std::pair<message_header, std::span<const std::byte>> receive(message_kind kind, std::uint64_t round) {
    const auto message = receive();
    if (message.first.kind != kind || message.first.round != round) {
      throw std::runtime_error("another message than is due in round " + std::to_string(round) + " from " +
                               peer_);
    }
    return message;
  }

 private:
  static constexpr std::uint64_t most_bytes = 1U << 24U;

  void wait_for(short events) const {
    pollfd wanted{descriptor_, events, 0};
    const auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(deadline).count();
    const int ready = poll(&wanted, 1, static_cast<int>(milliseconds));
    if (ready < 0 && errno != EINTR) throw std::runtime_error("poll failed on the socket of " + peer_);
    if (ready == 0) throw std::runtime_error("nothing from " + peer_ + " within the deadline");
  }

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      wait_for(POLLOUT);
      const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) throw peer_lost("lost " + peer_);
      if (sent < 0 && errno != EAGAIN && errno != EINTR) throw std::runtime_error("cannot send to " + peer_);
      if (sent > 0) bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
  }

  void read_all(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
      wait_for(POLLIN);
      const ssize_t got = recv(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno == ECONNRESET)) throw peer_lost("lost " + peer_);
      if (got < 0 && errno != EAGAIN && errno != EINTR)
        throw std::runtime_error("cannot receive from " + peer_);
      if (got > 0) bytes = bytes.subspan(static_cast<std::size_t>(got));
    }
  }

  int descriptor_;
  std::string peer_;
  std::vector<std::byte> body_;
};

inline std::uint64_t hash_of(const std::vector<float>& numbers) {
  return std::hash<std::string_view>{}(
      {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)});
}

/// A vector with its length, one behind the other in a file.
template <class Number>
void write(std::ostream& out, const std::vector<Number>& numbers) {
  const std::uint64_t size = numbers.size();
  out.write(reinterpret_cast<const char*>(&size), sizeof size);
  out.write(reinterpret_cast<const char*>(numbers.data()),
            static_cast<std::streamsize>(size * sizeof(Number)));
}
template <class Number>
void read(std::istream& in, std::vector<Number>& numbers) {
  std::uint64_t size = 0;
  in.read(reinterpret_cast<char*>(&size), sizeof size);
  if (!in || size > 1U << 24U) throw std::runtime_error("a checkpoint is damaged");
  numbers.resize(size);
  in.read(reinterpret_cast<char*>(numbers.data()), static_cast<std::streamsize>(size * sizeof(Number)));
  if (!in) throw std::runtime_error("a checkpoint is too short");
}

/// The checkpoints of one run. The server writes its file last, so a checkpoint is complete once that is there. Each
/// process keeps its two newest files: while one is being written, the one before is complete.
class checkpoint_directory {
 public:
  explicit checkpoint_directory(std::filesystem::path path) : path_(std::move(path)) {}

  /// Written under another name and renamed, so that a kill at any time leaves a whole file or none.
  template <class Write>
  void save(const std::string& process, std::uint64_t round, std::uint64_t every,
            const Write& write_to) const {
    const std::filesystem::path temporary = path_ / (process + ".tmp");
    std::ofstream out(temporary, std::ios::binary);
    write_to(out);
    out.close();
    if (!out) throw std::runtime_error("cannot write " + temporary.string());
    std::filesystem::rename(temporary, file(process, round));
    const std::uint64_t newest_whole = (round - 1) / every * every;
    if (newest_whole >= every) std::filesystem::remove(file(process, newest_whole - every));
  }
  std::ifstream load(const std::string& process, std::uint64_t round) const {
    std::ifstream in(file(process, round), std::ios::binary);
    if (!in) throw std::runtime_error("cannot read " + file(process, round).string());
    return in;
  }
  /// The round of the newest complete checkpoint; 0: none.
  std::uint64_t newest() const {
    std::uint64_t newest = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with("server.") || name.ends_with(".tmp")) continue;
      newest = std::max<std::uint64_t>(newest, std::stoull(name.substr(name.find('.') + 1)));
    }
    return newest;
  }

 private:
  std::filesystem::path file(const std::string& process, std::uint64_t round) const {
    return path_ / (process + "." + std::to_string(round));
  }
  std::filesystem::path path_;
};

/// Sees to it that a process does not grow: looked at once a checkpoint, where all buffers of a round are as they were at the one before.
class memory_watch {
 public:
  /// Throws std::runtime_error if the resident memory has grown beyond what it was after the warm-up.
  void look() {
    const std::uint64_t now = resident_bytes();
    peak = std::max(peak, now);
    if (++looks_ <= warm_up_looks) baseline_ = peak;
    growth = std::max(growth, now > baseline_ ? now - baseline_ : 0);
    if (growth > tolerated_bytes)
      throw std::runtime_error("memory grew by " + std::to_string(growth) + " bytes, to " +
                               std::to_string(now));
  }
  std::uint64_t growth = 0, peak = 0;  // in bytes

 private:
  // By then the largest frame has mostly been seen, and the allocator knows the sizes of a checkpoint.
  static constexpr int warm_up_looks = 8;
  // Buffers grow to the largest frame so far, at most the model's 75 kB for each of eight workers, wherever in the run it
  // comes, and the allocator keeps some of the old ones. A leak of one frame in a hundred rounds is more in 2,000 rounds.
  // With packets a burst larger than any before touches pages of the sockets' buffers for the first time: up to 2 MB of a socket.
  static constexpr std::uint64_t tolerated_bytes = 3U << 20U;

  // 0 where the system does not tell, and under a sanitizer, which keeps what was freed.
  static std::uint64_t resident_bytes() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return 0;
#else
    std::ifstream statm("/proc/self/statm");
    std::uint64_t size = 0, resident = 0;
    statm >> size >> resident;
    return statm ? resident * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) : 0;
#endif
  }

  int looks_ = 0;
  std::uint64_t baseline_ = 0;
};

}  // namespace soak
