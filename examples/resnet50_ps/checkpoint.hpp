// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <span>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

/// Bytes as a tensor, which an archive of torch can hold; and back.
inline torch::Tensor tensor_of(std::span<const std::byte> bytes) {
  torch::Tensor tensor = torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::kByte);
  std::ranges::copy(bytes, static_cast<std::byte*>(tensor.data_ptr()));
  return tensor;
}
inline std::span<const std::byte> bytes_of(const torch::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.data_ptr()), static_cast<std::size_t>(tensor.numel())};
}

/// Tensors as bytes of a message; and back.
inline std::vector<std::byte> packed(const std::vector<torch::Tensor>& tensors) {
  std::ostringstream stream;
  torch::save(tensors, stream);
  const std::string text = std::move(stream).str();
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}
inline std::vector<torch::Tensor> unpacked(std::span<const std::byte> bytes) {
  std::vector<torch::Tensor> tensors;
  torch::load(tensors, reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return tensors;
}

/// Writes a file such that a kill, a power failure or a full disk at any moment leaves the one before. Torch serializes into memory
/// here: its own way into a file ends the program where the disk is full. Throws std::system_error.
inline void replace_file(const std::filesystem::path& path, const std::string& bytes) {
  const std::string part = path.string() + ".part";
  std::FILE* file = std::fopen(part.c_str(), "wb");
  bool is_written = file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                    std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  int reason = errno;
  if (file != nullptr && std::fclose(file) != 0 && is_written) {
    is_written = false;
    reason = errno;
  }
  if (!is_written) {
    std::remove(part.c_str());
    throw std::system_error(reason, std::generic_category(), "cannot write " + path.string());
  }
  std::filesystem::rename(part, path);
}
