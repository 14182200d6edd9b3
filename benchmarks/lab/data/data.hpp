// SPDX-License-Identifier: MIT
#pragma once

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace lab {

/// Labelled square colour images, n of them. `get(k·n + i)` returns image i as it looks on the k-th visit, so that what a
/// run sees depends on nothing but the indices: `data` is 3 x size x size float32 of about zero mean and unit variance,
/// `target` the class as an int64 scalar from 0 to classes() - 1. Several threads may call `get` at once. It throws
/// std::runtime_error for an image that cannot be read.
class image_set : public torch::data::datasets::Dataset<image_set> {
 public:
  image_set(std::int64_t classes, std::int64_t image_size_pixels)
      : classes_(classes), image_size_pixels_(image_size_pixels) {}

  std::int64_t classes() const { return classes_; }
  std::int64_t image_size_pixels() const { return image_size_pixels_; }
  torch::data::Example<> get(std::size_t index) final {
    const std::size_t images = size().value();
    return view(index % images, index / images);
  }

 private:
  /// Image `index` < n on this visit.
  virtual torch::data::Example<> view(std::size_t index, std::size_t visit) = 0;

  std::int64_t classes_;
  std::int64_t image_size_pixels_;
};

/// The two halves of a source, with the same classes and the same image size.
struct data_sets {
  std::shared_ptr<image_set> train;
  std::shared_ptr<image_set> test;
  std::vector<std::string> notes = {};  ///< what was there and is not used, a sentence each
};

struct data_options {
  std::int64_t image_size_pixels = 0;  ///< Side of the images returned; 0 takes the source's own.
  std::uint64_t seed = 0;              ///< Of whatever the source draws at random.
};

/// Opens "cifar10:DIR", "imagefolder:DIR" or "synthetic", which the three functions below describe. Throws
/// std::invalid_argument for any other source and for a negative image size.
data_sets open_data(const std::string& source, const data_options& options);

/// CIFAR-10 in its binary version, 32 pixels: `directory` holds data_batch_1.bin to data_batch_5.bin, of
/// which four may be absent, and test_batch.bin. Throws std::runtime_error for a missing or damaged file.
data_sets open_cifar10(const std::filesystem::path& directory, const data_options& options);

/// JPEG files in one folder for each class, 224 pixels: `directory`/CLASS/NAME.jpg, with classes numbered in
/// the order of their names. If `directory` holds the folders train and val, or train and test, they hold the
/// class folders and are the two halves; otherwise every fifth image, in the order of class and name, is a test image. Training
/// images are cropped and mirrored at random, test images are cropped in the centre. Throws
/// std::runtime_error for a class folder without images, fewer than five images to divide, and an empty file;
/// what is in a file is only read, and found damaged, by `get`.
data_sets open_image_folder(const std::filesystem::path& directory, const data_options& options);

/// Textures and shapes in ten classes, 32 pixels, 20,000 to train and 2,000 to test, which need no file: each
/// image is drawn from the seed and its index when it is read. Colours and places are random, so that a
/// linear model gets at most about 25 % right, and a convolutional one nearly all.
data_sets open_synthetic(const data_options& options);

/// Random numbers that are the same on every machine, unlike those of the standard distributions (SplitMix64,
/// Steele et al., OOPSLA 2014).
class repeatable_random {
 public:
  /// Two streams are unrelated if they differ in any of the three numbers.
  repeatable_random(std::uint64_t seed, std::uint64_t stream, std::uint64_t index)
      : state_(mix(mix(mix(seed) + stream) + index)) {}

  /// Uniform in [low, high).
  double uniform(double low, double high) {
    state_ += golden_ratio;
    return low + (high - low) * static_cast<double>(mix(state_) >> 11) * 0x1p-53;
  }

 private:
  static constexpr std::uint64_t golden_ratio = 0x9e3779b97f4a7c15;

  static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  std::uint64_t state_;
};

}  // namespace lab
