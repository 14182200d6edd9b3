// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <span>
#include <system_error>

/// Bytes as a tensor, which an archive of torch can hold; and back.
inline torch::Tensor tensor_of(std::span<const std::byte> bytes) {
  return torch::from_blob(const_cast<std::byte*>(bytes.data()), {static_cast<std::int64_t>(bytes.size())}, torch::kByte).clone();
}
inline std::span<const std::byte> bytes_of(const torch::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

/// Writes a file such that a kill, a power failure or a full disk at any moment leaves the one before. Torch serializes into memory
/// here: its own way into a file ends the program where the disk is full. Throws std::system_error.
inline void replace_file(const std::filesystem::path& path, const std::string& bytes) {
  const std::string part = path.string() + ".part";
  std::FILE* file = std::fopen(part.c_str(), "wb");
  const bool is_written = file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() && std::fflush(file) == 0 &&
                          ::fsync(::fileno(file)) == 0;
  const int reason = errno;
  if (file != nullptr) std::fclose(file);
  if (!is_written) {
    std::remove(part.c_str());
    throw std::system_error(reason, std::generic_category(), "cannot write " + path.string());
  }
  std::filesystem::rename(part, path);
}
