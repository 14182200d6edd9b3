// SPDX-License-Identifier: MIT
#include "data.hpp"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numbers>
#include <numeric>
#include <stdexcept>

namespace lab {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t native_size_pixels = 32;

// Random numbers that are the same on every machine, unlike those of the standard distributions (SplitMix64, Steele et al., OOPSLA 2014).
class repeatable_random {
 public:
  repeatable_random(std::uint64_t seed, std::uint64_t stream, std::uint64_t index)
      : state_(mix(mix(mix(seed) + stream) + index)) {}

  std::uint64_t bits() { return mix(state_ += golden_ratio); }
  // Uniform in [low, high).
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53;
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

// A figure is positive inside and negative outside, with a slope of about one at the edge. Textures repeat after a distance of 2;
// shapes reach to a distance of about 1.
using figure = double (*)(double x, double y);

double from_nearest_odd(double x) {
  return x - 2 * std::floor(x / 2) - 1;
}
double wave(double x) {
  return 0.5 - std::abs(from_nearest_odd(x));
}
double stripes(double, double y) {
  return wave(y);
}
double rings(double x, double y) {
  return wave(std::hypot(x, y));
}
double dots(double x, double y) {
  return 0.6 - std::hypot(from_nearest_odd(x), from_nearest_odd(y));
}
double checkers(double x, double y) {
  const double a = wave(x), b = wave(y);
  return std::copysign(std::min(std::abs(a), std::abs(b)), a * b);
}
double disc(double x, double y) {
  return 1 - std::hypot(x, y);
}
double frame(double x, double y) {
  return 0.25 - std::abs(0.8 - std::max(std::abs(x), std::abs(y)));
}
double cross(double x, double y) {
  return std::min(0.3 - std::min(std::abs(x), std::abs(y)), 1.1 - std::max(std::abs(x), std::abs(y)));
}

struct image_class {
  figure inside;
  double angle_degrees;
  double smallest_scale, largest_scale;  // how many units of the figure the side of an image is long
  double largest_shift;                  // from the centre of the image, in units of the figure
};

constexpr std::array<image_class, 10> image_classes = {{
    {stripes, 0, 6, 10, 1},
    {stripes, 45, 6, 10, 1},
    {stripes, 90, 6, 10, 1},
    {stripes, 135, 6, 10, 1},
    {checkers, 0, 6, 10, 1},
    {dots, 0, 6, 10, 1},
    {rings, 0, 6, 10, 1.5},
    {disc, 0, 2.2, 3.6, 0.4},
    {frame, 0, 2.2, 3.6, 0.4},
    {cross, 0, 2.2, 3.6, 0.4},
}};

// -1 outside of the figure, 1 inside, between them at its edge.
std::vector<double> draw_figure(const image_class& kind, std::int64_t size, repeatable_random& random) {
  const double angle = (kind.angle_degrees + random.uniform(-12, 12)) * std::numbers::pi / 180;
  const double scale = random.uniform(kind.smallest_scale, kind.largest_scale);
  const double shift_x = random.uniform(-kind.largest_shift, kind.largest_shift);
  const double shift_y = random.uniform(-kind.largest_shift, kind.largest_shift);
  const double pixel = scale / static_cast<double>(size);
  const double step_x = pixel * std::cos(angle), step_y = pixel * std::sin(angle);
  const double middle = static_cast<double>(size - 1) / 2;
  std::vector<double> picture;
  for (std::int64_t row = 0; row < size; ++row) {
    for (std::int64_t column = 0; column < size; ++column) {
      const double x = static_cast<double>(column) - middle, y = static_cast<double>(row) - middle;
      const double inside = kind.inside(step_x * x + step_y * y + shift_x, step_x * y - step_y * x + shift_y);
      picture.push_back(std::clamp(inside / pixel, -1.0, 1.0));
    }
  }
  return picture;
}

// In random colours on a random gradient with noise. Neither the average colour nor the sign of the contrast may tell the class, or a
// linear model would do.
torch::Tensor paint(const std::vector<double>& picture, std::int64_t size, repeatable_random& random) {
  const double average = std::reduce(picture.begin(), picture.end()) / static_cast<double>(picture.size());
  const double sign = random.uniform(-1, 1) < 0 ? -1 : 1;
  torch::Tensor image = torch::empty({3, size, size});
  float* pixel = image.data_ptr<float>();
  for (int channel = 0; channel < 3; ++channel) {
    const double contrast = sign * random.uniform(0.3, 1.2);
    const double colour = random.uniform(-0.5, 0.5) - contrast * average;
    const double slope_x = random.uniform(-0.8, 0.8) / static_cast<double>(size);
    const double slope_y = random.uniform(-0.8, 0.8) / static_cast<double>(size);
    for (std::int64_t i = 0; i < size * size; ++i) {
      const double shade = slope_x * static_cast<double>(i % size) + slope_y * static_cast<double>(i / size);
      *pixel++ = static_cast<float>(colour + contrast * picture[static_cast<std::size_t>(i)] + shade +
                                    random.uniform(-0.5, 0.5));
    }
  }
  return image;
}

class synthetic_set final : public image_set {
 public:
  synthetic_set(std::size_t images, std::uint64_t stream, std::int64_t size_pixels, std::uint64_t seed)
      : images_(images), stream_(stream), size_pixels_(size_pixels), seed_(seed) {}
  std::size_t size() const override { return images_; }
  std::pair<torch::Tensor, std::int64_t> get(std::size_t index) const override {
    const std::size_t label = index % image_classes.size();
    repeatable_random random(seed_, stream_, index);
    return {paint(draw_figure(image_classes[label], size_pixels_, random), size_pixels_, random),
            static_cast<std::int64_t>(label)};
  }

 private:
  std::size_t images_;
  std::uint64_t stream_;
  std::int64_t size_pixels_;
  std::uint64_t seed_;
};

constexpr std::size_t record_bytes = 1 + 3 * native_size_pixels * native_size_pixels;

std::vector<std::uint8_t> read_records(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open the CIFAR-10 file " + file.string());
  std::vector<std::uint8_t> records{std::istreambuf_iterator<char>(stream), {}};
  if (records.empty() || records.size() % record_bytes != 0)
    throw std::runtime_error(file.string() + " has " + std::to_string(records.size()) +
                             " bytes, but a CIFAR-10 file has records of " + std::to_string(record_bytes));
  for (std::size_t i = 0; i < records.size(); i += record_bytes) {
    if (records[i] > 9)
      throw std::runtime_error(file.string() + " has a label of " + std::to_string(records[i]));
  }
  return records;
}

class cifar10_set final : public image_set {
 public:
  cifar10_set(std::vector<std::uint8_t> records, std::int64_t size_pixels)
      : records_(std::move(records)), size_pixels_(size_pixels) {}
  std::size_t size() const override { return records_.size() / record_bytes; }
  std::pair<torch::Tensor, std::int64_t> get(std::size_t index) const override {
    const std::uint8_t* const record = &records_[index * record_bytes];
    torch::Tensor image = torch::from_blob(const_cast<std::uint8_t*>(record) + 1,
                                           {1, 3, native_size_pixels, native_size_pixels}, torch::kByte)
                              .to(torch::kFloat)
                              .div_(255);
    if (size_pixels_ != native_size_pixels)
      image = at::_upsample_bilinear2d_aa(image, {size_pixels_, size_pixels_}, /*align_corners=*/false);
    return {(image[0] - mean_) / deviation_, record[0]};
  }

 private:
  std::vector<std::uint8_t> records_;
  std::int64_t size_pixels_;
  // Of the red, green and blue values, from 0 to 1, of the 50,000 training images.
  torch::Tensor mean_ = torch::tensor({0.4914F, 0.4822F, 0.4465F}).view({3, 1, 1});
  torch::Tensor deviation_ = torch::tensor({0.2470F, 0.2435F, 0.2616F}).view({3, 1, 1});
};

data_sets open_cifar10(const fs::path& directory, std::int64_t size_pixels) {
  std::vector<std::uint8_t> records;
  for (int i = 1; i <= 5; ++i) {
    const fs::path file = directory / ("data_batch_" + std::to_string(i) + ".bin");
    if (!fs::exists(file)) continue;
    const std::vector<std::uint8_t> more = read_records(file);
    records.insert(records.end(), more.begin(), more.end());
  }
  if (records.empty())
    throw std::runtime_error(directory.string() + " has none of data_batch_1.bin to data_batch_5.bin");
  return {.train = std::make_shared<cifar10_set>(std::move(records), size_pixels),
          .test = std::make_shared<cifar10_set>(read_records(directory / "test_batch.bin"), size_pixels)};
}

batch stacked(const image_set& images, const std::vector<std::size_t>& indices) {
  std::vector<torch::Tensor> all;
  std::vector<std::int64_t> classes;
  for (const std::size_t i : indices) {
    auto [image, label] = images.get(i);
    all.push_back(std::move(image));
    classes.push_back(label);
  }
  return {torch::stack(all), torch::tensor(classes)};
}

}  // namespace

data_sets open_data(const std::string& source, std::int64_t size_pixels, std::uint64_t seed) {
  const std::int64_t size = size_pixels == 0 ? native_size_pixels : size_pixels;
  const std::string cifar10 = "cifar10:";
  if (source.starts_with(cifar10)) return open_cifar10(source.substr(cifar10.size()), size);
  if (source != "synthetic")
    throw std::invalid_argument("the data \"" + source + "\" is neither cifar10:DIR nor synthetic");
  return {.train = std::make_shared<synthetic_set>(20'000, 0, size, seed),
          .test = std::make_shared<synthetic_set>(2'000, 1, size, seed)};
}

batches::batches(std::shared_ptr<const image_set> images, shard part, std::size_t batch_images,
                 std::uint64_t seed)
    : images_(std::move(images)),
      part_(part),
      batch_images_(batch_images),
      seed_(seed),
      order_(images_->size()) {
  if (images_->size() / part.workers < batch_images)
    throw std::invalid_argument(std::to_string(images_->size()) + " training images are too few for " +
                                std::to_string(part.workers) + " workers with batches of " +
                                std::to_string(batch_images));
}

batch batches::of(std::uint64_t step) {
  const std::size_t batches_an_epoch = images_->size() / part_.workers / batch_images_;
  const std::uint64_t epoch = 1 + (step - 1) / batches_an_epoch;
  if (epoch != epoch_) {
    epoch_ = epoch;
    repeatable_random random(seed_, 2, epoch);  // the same for all workers, or shards would overlap
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[random.bits() % i]);
  }
  std::vector<std::size_t> indices;
  const std::size_t first = (step - 1) % batches_an_epoch * batch_images_;
  for (std::size_t i = first; i < first + batch_images_; ++i)
    indices.push_back(order_[part_.worker + i * part_.workers]);
  return stacked(*images_, indices);
}

void for_each_batch(const image_set& images, shard part, std::size_t batch_images,
                    const std::function<void(const batch&)>& consume) {
  std::vector<std::size_t> indices;
  for (std::size_t i = part.worker; i < images.size(); i += part.workers) {
    indices.push_back(i);
    if (indices.size() < batch_images && i + part.workers < images.size()) continue;
    consume(stacked(images, indices));
    indices.clear();
  }
}

}  // namespace lab
