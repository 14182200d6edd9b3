// SPDX-License-Identifier: MIT
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <fstream>
#include <stdexcept>
#include <vector>

#include "data/data.hpp"

namespace lab {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t cifar10_classes = 10;
constexpr std::int64_t cifar10_size_pixels = 32;
constexpr std::size_t record_bytes = 1 + 3 * cifar10_size_pixels * cifar10_size_pixels;

using byte_vector = std::vector<std::uint8_t>;

void check_labels(const fs::path& file, const byte_vector& records) {
  for (std::size_t i = 0; i < records.size(); i += record_bytes) {
    if (records[i] < cifar10_classes) continue;
    throw std::runtime_error("record " + std::to_string(i / record_bytes) + " of " + file.string() +
                             " has label " + std::to_string(records[i]) + ", but labels go from 0 to 9");
  }
}

byte_vector read_records(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open the CIFAR-10 file " + file.string());
  const byte_vector records{std::istreambuf_iterator<char>(stream), {}};
  if (records.empty() || records.size() % record_bytes != 0) {
    throw std::runtime_error(file.string() + " holds " + std::to_string(records.size()) +
                             " bytes, but a CIFAR-10 file holds one or more records of " +
                             std::to_string(record_bytes));
  }
  check_labels(file, records);
  return records;
}

byte_vector read_train_records(const fs::path& directory) {
  byte_vector records;
  for (int i = 1; i <= 5; ++i) {
    const fs::path file = directory / ("data_batch_" + std::to_string(i) + ".bin");
    if (!fs::exists(file)) continue;
    const byte_vector batch = read_records(file);
    records.insert(records.end(), batch.begin(), batch.end());
  }
  if (records.empty()) {
    throw std::runtime_error("the directory " + directory.string() +
                             " holds none of the CIFAR-10 files data_batch_1.bin to data_batch_5.bin");
  }
  return records;
}

class cifar10_set : public image_set {
 public:
  cifar10_set(byte_vector records, std::int64_t image_size_pixels)
      : image_set(cifar10_classes, image_size_pixels), records_(std::move(records)) {}

  torch::optional<std::size_t> size() const override { return records_.size() / record_bytes; }

  torch::data::Example<> view(std::size_t index, std::size_t /*visit*/) override {
    std::uint8_t* record = &records_.at(index * record_bytes);
    const std::int64_t side = cifar10_size_pixels;
    at::Tensor image = at::from_blob(record + 1, {1, 3, side, side}, at::kByte).to(at::kFloat).div_(255);
    const std::int64_t wanted = image_size_pixels();
    if (wanted != side) image = at::_upsample_bilinear2d_aa(image, {wanted, wanted}, /*align_corners=*/false);
    return {(image[0] - mean_) / deviation_, at::scalar_tensor(record[0], at::kLong)};
  }

 private:
  byte_vector records_;
  // Of the red, green and blue values, from 0 to 1, of the 50,000 training images.
  at::Tensor mean_ = at::tensor({0.4914f, 0.4822f, 0.4465f}).view({3, 1, 1});
  at::Tensor deviation_ = at::tensor({0.2470f, 0.2435f, 0.2616f}).view({3, 1, 1});
};

}  // namespace

data_sets open_cifar10(const fs::path& directory, const data_options& options) {
  if (!fs::is_directory(directory)) {
    throw std::runtime_error("the CIFAR-10 directory " + directory.string() + " does not exist");
  }
  const std::int64_t size = options.image_size_pixels == 0 ? cifar10_size_pixels : options.image_size_pixels;
  return {std::make_shared<cifar10_set>(read_train_records(directory), size),
          std::make_shared<cifar10_set>(read_records(directory / "test_batch.bin"), size)};
}

}  // namespace lab
