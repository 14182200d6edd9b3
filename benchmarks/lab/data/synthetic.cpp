// SPDX-License-Identifier: MIT
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <numeric>
#include <vector>

#include "data/data.hpp"

namespace lab {
namespace {

constexpr std::size_t train_images = 20'000;
constexpr std::size_t test_images = 2'000;
constexpr std::int64_t synthetic_size_pixels = 32;

struct point {
  double x, y;
};

// A figure is a function of the position that is positive inside and negative outside, with a slope of about
// one at the edge. Textures repeat after a distance of 2; shapes reach to a distance of about 1.
using figure = double (*)(point);

double from_nearest_odd(double x) {
  return x - 2 * std::floor(x / 2) - 1;
}

double wave(double x) {
  return 0.5 - std::abs(from_nearest_odd(x));
}

double stripes(point p) {
  return wave(p.y);
}

double rings(point p) {
  return wave(std::hypot(p.x, p.y));
}

double dots(point p) {
  return 0.6 - std::hypot(from_nearest_odd(p.x), from_nearest_odd(p.y));
}

double checkers(point p) {
  const double x = wave(p.x), y = wave(p.y);
  return std::copysign(std::min(std::abs(x), std::abs(y)), x * y);
}

double disc(point p) {
  return 1 - std::hypot(p.x, p.y);
}

double frame(point p) {
  return 0.25 - std::abs(0.8 - std::max(std::abs(p.x), std::abs(p.y)));
}

double cross(point p) {
  const double x = std::abs(p.x), y = std::abs(p.y);
  return std::min(0.3 - std::min(x, y), 1.1 - std::max(x, y));
}

struct image_class {
  figure inside;
  double angle_degrees;
  double smallest_scale, largest_scale;  // How many units of the figure the side of an image is long.
  double largest_shift;                  // From the centre of the image, in units of the figure.
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

/// Returns a value for each of size x size pixels: -1 outside of the figure, 1 inside, between them at its
/// edge.
std::vector<double> draw_figure(const image_class& kind, std::int64_t size, repeatable_random& random) {
  const double angle = (kind.angle_degrees + random.uniform(-12, 12)) * std::numbers::pi / 180;
  const double scale = random.uniform(kind.smallest_scale, kind.largest_scale);
  const double shift_x = random.uniform(-kind.largest_shift, kind.largest_shift);
  const double shift_y = random.uniform(-kind.largest_shift, kind.largest_shift);
  const double pixel = scale / static_cast<double>(size);
  const double step_x = pixel * std::cos(angle), step_y = pixel * std::sin(angle);
  const double middle = static_cast<double>(size - 1) / 2;
  std::vector<double> picture;
  picture.reserve(static_cast<std::size_t>(size * size));
  for (std::int64_t row = 0; row < size; ++row) {
    for (std::int64_t column = 0; column < size; ++column) {
      const double x = static_cast<double>(column) - middle, y = static_cast<double>(row) - middle;
      const point p = {step_x * x + step_y * y + shift_x, step_x * y - step_y * x + shift_y};
      picture.push_back(std::clamp(kind.inside(p) / pixel, -1.0, 1.0));
    }
  }
  return picture;
}

/// Returns the picture in random colours on a random gradient with noise, as 3 x size x size.
at::Tensor paint(const std::vector<double>& picture, std::int64_t size, repeatable_random& random) {
  // Neither the average colour nor the sign of the contrast may tell the class, or a linear model would do.
  const double average =
      std::accumulate(picture.begin(), picture.end(), 0.0) / static_cast<double>(picture.size());
  const double sign = random.uniform(-1, 1) < 0 ? -1 : 1;
  at::Tensor image = at::empty({3, size, size});
  float* pixel = image.data_ptr<float>();
  for (int channel = 0; channel < 3; ++channel) {
    const double contrast = sign * random.uniform(0.3, 1.2);
    const double colour = random.uniform(-0.5, 0.5) - contrast * average;
    const double slope_x = random.uniform(-0.8, 0.8) / static_cast<double>(size);
    const double slope_y = random.uniform(-0.8, 0.8) / static_cast<double>(size);
    for (std::int64_t i = 0; i < size * size; ++i) {
      const double gradient =
          slope_x * static_cast<double>(i % size) + slope_y * static_cast<double>(i / size);
      *pixel++ = static_cast<float>(colour + contrast * picture[i] + gradient + random.uniform(-0.5, 0.5));
    }
  }
  return image;
}

class synthetic_set : public image_set {
 public:
  synthetic_set(std::size_t images, std::uint64_t stream, std::int64_t image_size_pixels, std::uint64_t seed)
      : image_set(image_classes.size(), image_size_pixels), images_(images), stream_(stream), seed_(seed) {}

  torch::optional<std::size_t> size() const override { return images_; }

  torch::data::Example<> view(std::size_t index, std::size_t /*visit*/) override {
    const std::size_t label = index % image_classes.size();
    const std::int64_t side = image_size_pixels();
    repeatable_random random(seed_, stream_, index);
    return {paint(draw_figure(image_classes[label], side, random), side, random),
            at::scalar_tensor(static_cast<std::int64_t>(label), at::kLong)};
  }

 private:
  std::size_t images_;
  std::uint64_t stream_;
  std::uint64_t seed_;
};

}  // namespace

data_sets open_synthetic(const data_options& options) {
  const std::int64_t size =
      options.image_size_pixels == 0 ? synthetic_size_pixels : options.image_size_pixels;
  return {std::make_shared<synthetic_set>(train_images, 0, size, options.seed),
          std::make_shared<synthetic_set>(test_images, 1, size, options.seed)};
}

}  // namespace lab
