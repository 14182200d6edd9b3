// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// How the images of a set are shown.
struct looks {
  std::int64_t size;  // pixels a side
  std::uint64_t seed;
  bool augments;  // at random, as it is done for training
};

/// Labelled images: 3 x size x size floats of about zero mean and unit variance, and a class as an integer.
class image_set {
 public:
  explicit image_set(looks as) : as_(as) {}
  virtual ~image_set() = default;
  std::size_t size() const { return size_; }
  std::int64_t classes() const { return classes_; }
  /// An image as it looks in an epoch. It depends on nothing else, so that a run can be repeated and gone on with.
  virtual torch::data::Example<> get(std::size_t index, std::uint64_t epoch) const = 0;

 protected:
  looks as_;
  std::size_t size_ = 0;
  std::int64_t classes_ = 10;
};

struct data_sets {
  std::unique_ptr<image_set> train;
  std::unique_ptr<image_set> test;
};

/// Opens what --data says: cifar10:DIR with data_batch_*.bin and test_batch.bin; imagefolder:DIR with train/CLASS/*.jpg and
/// val/CLASS/*.jpg; or synthetic, which needs no files. Throws std::runtime_error, naming what is missing or damaged.
data_sets open_data(const std::string& source, std::int64_t image_size, std::uint64_t seed);

/// These images as one batch.
torch::data::Example<> batch_of(const image_set& images, const std::vector<std::size_t>& indices, std::uint64_t epoch);

/// The batch of a step, counted from 1, of one of several workers, counted from 0. Those of the workers are disjoint, and each epoch is
/// shuffled anew. Nothing is kept between steps, so that a checkpoint needs nothing of it.
torch::data::Example<> batch_of_step(std::uint64_t step, const image_set& images, std::size_t worker, std::size_t workers,
                                     std::size_t batch, std::uint64_t seed);
