// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace soak {

inline std::uint64_t hash_of(std::span<const std::byte> bytes) {
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}
template <class Number>
std::uint64_t hash_of(const std::vector<Number>& numbers) {
  return hash_of(std::as_bytes(std::span(numbers)));
}

/// What a process saves: pieces one behind the other, each with its length, and a hash at the end.
class file_writer {
 public:
  template <class Number>
  void add(const std::vector<Number>& numbers) {
    add_bytes(std::as_bytes(std::span(numbers)));
  }
  void add(std::uint64_t number) { add(std::vector<std::uint64_t>{number}); }

  /// Written beside the file and renamed, so that a kill at any time leaves a whole file or none.
  void write(const std::filesystem::path& path) {
    const std::uint64_t hash = hash_of(bytes_);
    std::filesystem::path temporary = path;
    temporary += ".tmp";
    std::ofstream out(temporary, std::ios::binary);
    out.write(reinterpret_cast<const char*>(bytes_.data()), static_cast<std::streamsize>(bytes_.size()));
    out.write(reinterpret_cast<const char*>(&hash), sizeof hash);
    out.close();
    if (!out) throw std::runtime_error("cannot write " + temporary.string());
    std::filesystem::rename(temporary, path);
  }

 private:
  void add_bytes(std::span<const std::byte> bytes) {
    const std::uint64_t size = bytes.size();
    const auto length = std::as_bytes(std::span(&size, 1));
    bytes_.insert(bytes_.end(), length.begin(), length.end());
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> bytes_;
};

/// Reads the pieces back in order. Throws std::runtime_error for a file that is missing or damaged.
class file_reader {
 public:
  explicit file_reader(const std::filesystem::path& path) : name_(path.string()) {
    std::ifstream in(path, std::ios::binary);
    const std::vector<char> all{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    std::uint64_t hash = 0;
    if (!in || all.size() < sizeof hash) throw std::runtime_error("cannot read " + name_);
    bytes_.resize(all.size() - sizeof hash);
    std::memcpy(bytes_.data(), all.data(), bytes_.size());
    std::memcpy(&hash, all.data() + bytes_.size(), sizeof hash);
    if (hash != hash_of(bytes_)) throw std::runtime_error(name_ + " is damaged");
  }

  template <class Number>
  std::vector<Number> vector_of() {
    static_assert(std::is_trivially_copyable_v<Number>);
    std::uint64_t size = 0;
    take(std::as_writable_bytes(std::span(&size, 1)));
    if (size > bytes_.size() - at_) throw std::runtime_error(name_ + " is too short");
    std::vector<Number> numbers(size / sizeof(Number));
    take(std::as_writable_bytes(std::span(numbers)));
    return numbers;
  }
  std::uint64_t number() { return vector_of<std::uint64_t>().at(0); }

 private:
  void take(std::span<std::byte> to) {
    if (to.size() > bytes_.size() - at_) throw std::runtime_error(name_ + " is too short");
    if (!to.empty()) std::memcpy(to.data(), bytes_.data() + at_, to.size());
    at_ += to.size();
  }
  std::string name_;
  std::vector<std::byte> bytes_;
  std::size_t at_ = 0;
};

/// The checkpoints of one run. The server writes its file last, so a checkpoint is complete once that is there. Each
/// process keeps its two newest files: while one is being written, the one before is complete.
class checkpoint_directory {
 public:
  explicit checkpoint_directory(std::filesystem::path path) : path_(std::move(path)) {}

  std::filesystem::path file(const std::string& process, std::uint64_t round) const {
    return path_ / (process + "." + std::to_string(round));
  }
  void save(file_writer& writer, const std::string& process, std::uint64_t round, std::uint64_t every) const {
    writer.write(file(process, round));
    const std::uint64_t newest_whole = (round - 1) / every * every;
    if (newest_whole >= every) std::filesystem::remove(file(process, newest_whole - every));
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
  std::filesystem::path path_;
};

}  // namespace soak
