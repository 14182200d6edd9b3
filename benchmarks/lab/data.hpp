// SPDX-License-Identifier: MIT
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lab {

/// Labelled square colour images. get(i) gives 3 x size x size float32 of about zero mean and unit variance, and the class.
class image_set {
 public:
  virtual ~image_set() = default;
  virtual std::size_t size() const = 0;
  virtual std::pair<torch::Tensor, std::int64_t> get(std::size_t index) const = 0;
};

struct data_sets {
  std::shared_ptr<const image_set> train;
  std::shared_ptr<const image_set> test;
};

/// "cifar10:DIR", with data_batch_1.bin to data_batch_5.bin, of which four may be absent, and test_batch.bin; or "synthetic": textures and
/// shapes of ten classes, 20,000 to train and 2,000 to test, which need no file. `size_pixels` is the side of the images returned; 0: 32.
/// Throws std::invalid_argument for another source, std::runtime_error for a missing or damaged file.
data_sets open_data(const std::string& source, std::int64_t size_pixels, std::uint64_t seed);

/// Which part of a data set one worker reads. The shards of the workers are disjoint.
struct shard {
  std::size_t workers = 1;
  std::size_t worker = 0;
};

struct batch {
  torch::Tensor images;   // B x 3 x size x size
  torch::Tensor classes;  // B
};

/// The batches of one worker: its shard of each epoch, shuffled by the seed and the epoch. What a step sees depends on its number alone.
class batches {
 public:
  /// Throws std::invalid_argument if the shard holds no whole batch.
  batches(std::shared_ptr<const image_set> images, shard part, std::size_t batch_images, std::uint64_t seed);
  /// Of step 1, 2, ...
  batch of(std::uint64_t step);

 private:
  std::shared_ptr<const image_set> images_;
  shard part_;
  std::size_t batch_images_;
  std::uint64_t seed_;
  std::uint64_t epoch_ = 0;              // of the order; counted from 1
  std::vector<std::size_t> order_ = {};  // of all images
};

/// Calls `consume` with each image of the shard once, in batches, the last of which may be smaller.
void for_each_batch(const image_set& images, shard part, std::size_t batch_images,
                    const std::function<void(const batch&)>& consume);

}  // namespace lab
