// SPDX-License-Identifier: MIT
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <turbojpeg.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "data/data.hpp"

namespace lab {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t imagenet_size_pixels = 224;

struct labelled_file {
  fs::path path;
  std::int64_t label;
};

bool is_jpeg_name(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".jpg" || extension == ".jpeg" || extension == ".JPG" || extension == ".JPEG";
}

std::vector<fs::path> sorted_entries(const fs::path& directory) {
  std::vector<fs::path> entries(fs::directory_iterator(directory), fs::directory_iterator{});
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::vector<std::string> class_names(const fs::path& directory) {
  std::vector<std::string> names;
  for (const fs::path& entry : sorted_entries(directory)) {
    if (fs::is_directory(entry)) names.push_back(entry.filename().string());
  }
  if (names.empty())
    throw std::runtime_error("the directory " + directory.string() + " holds no class folders");
  return names;
}

/// What lies beside the class folders and is none.
void note_stray_files(const fs::path& directory, std::vector<std::string>& notes) {
  for (const fs::path& entry : sorted_entries(directory)) {
    if (!fs::is_directory(entry)) notes.push_back(entry.string() + " is no class folder: skipped");
  }
}

std::vector<labelled_file> list_class(const fs::path& folder, std::int64_t label) {
  std::vector<labelled_file> files;
  for (const fs::path& entry : sorted_entries(folder)) {
    if (!is_jpeg_name(entry) || !fs::is_regular_file(entry)) continue;
    if (fs::file_size(entry) == 0) throw std::runtime_error("the image " + entry.string() + " is empty");
    files.push_back({entry, label});
  }
  if (files.empty()) throw std::runtime_error("the class folder " + folder.string() + " holds no JPEG files");
  return files;
}

/// The files in `directory`, in the order of class and name. `names` are the classes in the order of their
/// labels: those of the training images, so that test images have the same labels.
std::vector<labelled_file> list_images(const fs::path& directory, const std::vector<std::string>& names) {
  std::vector<labelled_file> files;
  for (const std::string& name : class_names(directory)) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
      throw std::runtime_error("the class folder " + (directory / name).string() + " has no training images");
    }
    const std::vector<labelled_file> more = list_class(directory / name, found - names.begin());
    files.insert(files.end(), more.begin(), more.end());
  }
  return files;
}

std::vector<unsigned char> read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open the image " + path.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

struct destroy_decompressor {
  void operator()(void* handle) const { tjDestroy(handle); }
};

/// Returns uint8 of height x width x 3.
at::Tensor decode_jpeg(const fs::path& path) {
  const std::vector<unsigned char> jpeg = read_file(path);
  const std::unique_ptr<void, destroy_decompressor> handle(tjInitDecompress());
  const auto check = [&](int status) {
    if (status == 0) return;
    throw std::runtime_error("cannot decode the image " + path.string() + ": " +
                             tjGetErrorStr2(handle.get()));
  };
  int width = 0, height = 0, subsampling = 0, colour_space = 0;
  check(tjDecompressHeader3(handle.get(), jpeg.data(), jpeg.size(), &width, &height, &subsampling,
                            &colour_space));
  if (width == 0 || height == 0) {  // The library accepts a file that ends before the image starts.
    throw std::runtime_error("cannot decode the image " + path.string() + ": it ends in its header");
  }
  // The library converts every colour space to RGB but these two.
  const bool cmyk = colour_space == TJCS_CMYK || colour_space == TJCS_YCCK;
  const int format = cmyk ? TJPF_CMYK : TJPF_RGB;
  at::Tensor pixels = at::empty({height, width, tjPixelSize[format]}, at::kByte);
  // A file that ends early is only a warning to the library, and the rest of the image would be grey.
  check(tjDecompress2(handle.get(), jpeg.data(), jpeg.size(), pixels.data_ptr<std::uint8_t>(), width, 0,
                      height, format, TJFLAG_STOPONWARNING));
  if (!cmyk) return pixels;
  // JPEG files hold the inks inverted, by Adobe's convention: 255 is no ink.
  const at::Tensor inks = pixels.to(at::kFloat);
  return (inks.narrow(2, 0, 3) * inks.narrow(2, 3, 1) / 255).round_().to(at::kByte);
}

struct box {
  std::int64_t top, left, height, width;
};

std::int64_t to_pixels(double length, std::int64_t limit) {
  return std::clamp<std::int64_t>(std::llround(length), 1, limit);
}

/// The box that is left if the image is resized to 256 pixels on its shorter side and cropped to 224, or to
/// another size in the same proportion.
box central_box(std::int64_t height, std::int64_t width) {
  const std::int64_t shorter = std::min(height, width);
  const std::int64_t side = to_pixels(static_cast<double>(shorter) * 224 / 256, shorter);
  return {(height - side) / 2, (width - side) / 2, side, side};
}

/// A box of 1/4 to 1 of the image's area with a ratio of width to height of 3/4 to 4/3, cut to the image.
box random_box(std::int64_t height, std::int64_t width, repeatable_random& random) {
  const double area = random.uniform(0.25, 1) * static_cast<double>(height * width);
  const double ratio = std::exp(random.uniform(std::log(3.0 / 4), std::log(4.0 / 3)));
  const std::int64_t box_height = to_pixels(std::sqrt(area / ratio), height);
  const std::int64_t box_width = to_pixels(std::sqrt(area * ratio), width);
  const auto offset = [&random](std::int64_t room) {
    return static_cast<std::int64_t>(random.uniform(0, static_cast<double>(room + 1)));
  };
  const std::int64_t top = offset(height - box_height);
  const std::int64_t left = offset(width - box_width);
  return {top, left, box_height, box_width};
}

/// Returns 3 x size x size float32 from 0 to 1 of a part of `pixels`, which are uint8 of height x width x 3.
at::Tensor crop_and_resize(const at::Tensor& pixels, const box& area, std::int64_t size) {
  const at::Tensor crop = pixels.narrow(0, area.top, area.height).narrow(1, area.left, area.width);
  const at::Tensor planes = crop.permute({2, 0, 1}).unsqueeze(0).to(at::kFloat).contiguous().div_(255);
  return at::_upsample_bilinear2d_aa(planes, {size, size}, /*align_corners=*/false)[0];
}

class image_folder_set : public image_set {
 public:
  image_folder_set(std::vector<labelled_file> files, std::int64_t classes, std::int64_t image_size_pixels,
                   std::uint64_t seed, bool augment)
      : image_set(classes, image_size_pixels), files_(std::move(files)), seed_(seed), augment_(augment) {}

  torch::optional<std::size_t> size() const override { return files_.size(); }

  torch::data::Example<> view(std::size_t index, std::size_t visit) override {
    const labelled_file& file = files_.at(index);
    const at::Tensor pixels = decode_jpeg(file.path);
    const at::Tensor image = augment_ ? random_view(pixels, index, visit) : central_view(pixels);
    return {(image - mean_) / deviation_, at::scalar_tensor(file.label, at::kLong)};
  }

 private:
  at::Tensor central_view(const at::Tensor& pixels) const {
    return crop_and_resize(pixels, central_box(pixels.size(0), pixels.size(1)), image_size_pixels());
  }

  at::Tensor random_view(const at::Tensor& pixels, std::size_t index, std::size_t visit) const {
    repeatable_random random(seed_, index, visit);
    const box area = random_box(pixels.size(0), pixels.size(1), random);
    const at::Tensor image = crop_and_resize(pixels, area, image_size_pixels());
    const bool mirror = random.uniform(0, 1) < 0.5;
    return mirror ? image.flip(2) : image;
  }

  std::vector<labelled_file> files_;
  std::uint64_t seed_;
  bool augment_;
  // Of the red, green and blue values, from 0 to 1, of ImageNet's training images.
  at::Tensor mean_ = at::tensor({0.485f, 0.456f, 0.406f}).view({3, 1, 1});
  at::Tensor deviation_ = at::tensor({0.229f, 0.224f, 0.225f}).view({3, 1, 1});
};

/// Moves every fifth of `train` to the list that is returned.
std::vector<labelled_file> hold_out(std::vector<labelled_file>& train) {
  std::vector<labelled_file> kept, held_out;
  for (std::size_t i = 0; i < train.size(); ++i) {
    (i % 5 == 4 ? held_out : kept).push_back(train[i]);
  }
  train = kept;
  return held_out;
}

}  // namespace

data_sets open_image_folder(const fs::path& directory, const data_options& options) {
  if (!fs::is_directory(directory)) {
    throw std::runtime_error("the image directory " + directory.string() + " does not exist");
  }
  const bool has_val = fs::is_directory(directory / "val");
  const bool split =
      fs::is_directory(directory / "train") && (has_val || fs::is_directory(directory / "test"));
  const fs::path train_directory = split ? directory / "train" : directory;
  const fs::path test_directory = directory / (has_val ? "val" : "test");
  std::vector<std::string> notes;
  if (split && has_val && fs::is_directory(directory / "test")) {
    notes.push_back("the images in " + (directory / "test").string() + " are left aside: there is a val");
  }
  note_stray_files(train_directory, notes);
  if (split) note_stray_files(test_directory, notes);
  const std::vector<std::string> names = class_names(train_directory);
  std::vector<labelled_file> train = list_images(train_directory, names);
  const std::vector<labelled_file> test = split ? list_images(test_directory, names) : hold_out(train);
  if (test.empty()) {
    throw std::runtime_error("the directory " + directory.string() +
                             " holds fewer than five images, too few to hold one out for the test");
  }
  const auto classes = static_cast<std::int64_t>(names.size());
  const std::int64_t size = options.image_size_pixels == 0 ? imagenet_size_pixels : options.image_size_pixels;
  return {std::make_shared<image_folder_set>(train, classes, size, options.seed, /*augment=*/true),
          std::make_shared<image_folder_set>(test, classes, size, options.seed, /*augment=*/false), notes};
}

}  // namespace lab
