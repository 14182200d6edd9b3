// SPDX-License-Identifier: MIT
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

/// Labelled images: 3 x size x size floats of about zero mean and unit variance, and a class as an integer.
class image_set {
 public:
  virtual ~image_set() = default;
  virtual std::size_t size() const = 0;
  virtual std::int64_t classes() const = 0;
  /// An image as it looks in an epoch. It depends on nothing else, so that a run can be repeated and gone on with.
  virtual torch::data::Example<> get(std::size_t index, std::uint64_t epoch) const = 0;
};

struct data_sets {
  std::unique_ptr<image_set> train;
  std::unique_ptr<image_set> test;
};

/// Opens what --data says: cifar10:DIR with data_batch_*.bin and test_batch.bin; imagefolder:DIR with train/CLASS/*.jpg and
/// val/CLASS/*.jpg; or synthetic, which needs no files. Throws std::runtime_error, naming what is missing or damaged.
data_sets open_data(const std::string& source, std::int64_t image_size, std::uint64_t seed);

/// These images as one batch.
torch::data::Example<> batch_of(const image_set& images, const std::vector<std::size_t>& indices,
                                std::uint64_t epoch);

/// The batches of one worker: each epoch is shuffled anew, and those of the workers are disjoint. Has no state but what it keeps
/// at hand, so that a checkpoint needs none.
class batches {
 public:
  /// \param workers, worker  how many there are, and which of them this is, from 0 on
  /// Throws std::runtime_error if an epoch has not one batch for each worker.
  batches(const image_set& images, std::size_t workers, std::size_t worker, std::size_t batch,
          std::uint64_t seed);
  /// That of a step, counted from 1.
  torch::data::Example<> of_step(std::uint64_t step);

 private:
  const image_set& images_;
  std::size_t workers_, worker_, batch_;
  std::uint64_t seed_;
  std::uint64_t epoch_ = ~std::uint64_t{0};  // that order_ is of
  std::vector<std::size_t> order_;
};
