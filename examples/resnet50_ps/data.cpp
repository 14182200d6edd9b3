// SPDX-License-Identifier: MIT
#include "data.hpp"

#include <turbojpeg.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>

namespace {

namespace fs = std::filesystem;
using example = torch::data::Example<>;

struct generator : std::mt19937 {
  generator(std::uint64_t seed, std::uint64_t index, std::uint64_t epoch) {
    std::seed_seq all{seed, index, epoch};
    this->seed(all);
  }
  std::int64_t up_to(std::int64_t most) { return static_cast<std::int64_t>((*this)() % static_cast<std::uint64_t>(most + 1)); }
  double between(double low, double high) { return std::uniform_real_distribution(low, high)(*this); }
};

std::vector<unsigned char> read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

// 3 x height x width from 0 to 1 as 3 x size x size, less the mean and over the deviation of each colour.
torch::Tensor normalised(torch::Tensor image, std::int64_t size, at::ArrayRef<float> mean, at::ArrayRef<float> deviation) {
  if (image.size(1) != size || image.size(2) != size)
    image = torch::_upsample_bilinear2d_aa(image.unsqueeze(0), {size, size}, /*align_corners=*/false)[0];
  return (image - torch::tensor(mean).view({3, 1, 1})) / torch::tensor(deviation).view({3, 1, 1});
}

class cifar10 : public image_set {
 public:
  cifar10(const std::vector<fs::path>& files, looks as) : image_set(as) {
    for (const fs::path& file : files) {
      const std::vector<unsigned char> more = read_file(file);
      if (more.empty() || more.size() % record_bytes != 0)
        throw std::runtime_error(file.string() + " is damaged, or not of CIFAR-10's binary version: it has " + std::to_string(more.size()) +
                                 " bytes, an image 3073");
      records_.insert(records_.end(), more.begin(), more.end());
    }
    size_ = records_.size() / record_bytes;
  }
  example get(std::size_t index, std::uint64_t epoch) const override {
    // A byte for the class, then a plane of bytes for each colour.
    auto* record = const_cast<unsigned char*>(&records_.at(index * record_bytes));
    torch::Tensor image = torch::from_blob(record + 1, {3, 32, 32}, torch::kByte).to(torch::kFloat).div_(255);
    if (as_.augments) {  // shifted by up to 4 pixels, and half of them mirrored (He et al.)
      generator random(as_.seed, index, epoch);
      image = torch::constant_pad_nd(image, {4, 4, 4, 4});
      image = image.narrow(1, random.up_to(8), 32).narrow(2, random.up_to(8), 32);
      if (random.up_to(1) == 1) image = image.flip(2);
    }
    return {normalised(image, as_.size, {0.4914F, 0.4822F, 0.4465F}, {0.2470F, 0.2435F, 0.2616F}),
            torch::scalar_tensor(record[0], torch::kLong)};
  }

 private:
  static constexpr std::size_t record_bytes = 1 + 3 * 32 * 32;
  std::vector<unsigned char> records_;
};

// Height x width x 3 bytes.
torch::Tensor decode_jpeg(const fs::path& path) {
  const std::vector<unsigned char> jpeg = read_file(path);
  const std::unique_ptr<void, int (*)(void*)> decoder(tjInitDecompress(), tjDestroy);
  const auto succeed = [&](int status) {
    if (status != 0) throw std::runtime_error("cannot decode " + path.string() + ": " + tjGetErrorStr2(decoder.get()));
  };
  int width = 0, height = 0, subsampling = 0, colours = 0;
  succeed(tjDecompressHeader3(decoder.get(), jpeg.data(), jpeg.size(), &width, &height, &subsampling, &colours));
  torch::Tensor pixels = torch::empty({height, width, 3}, torch::kByte);
  // To the library a file that ends early is a warning, and the rest of the image grey.
  succeed(tjDecompress2(decoder.get(), jpeg.data(), jpeg.size(), pixels.data_ptr<std::uint8_t>(), width, 0, height, TJPF_RGB,
                        TJFLAG_STOPONWARNING));
  return pixels;
}

std::vector<fs::path> sorted_entries(const fs::path& directory) {
  if (!fs::is_directory(directory)) throw std::runtime_error("there is no directory " + directory.string());
  std::vector<fs::path> all(fs::directory_iterator(directory), fs::directory_iterator{});
  std::ranges::sort(all);
  return all;
}

class image_folder : public image_set {
 public:
  image_folder(const fs::path& directory, looks as) : image_set(as) {
    classes_ = 0;
    for (const fs::path& folder : sorted_entries(directory)) {
      if (!fs::is_directory(folder)) continue;
      for (const fs::path& file : sorted_entries(folder)) {
        const std::string name = file.extension().string();
        if (name == ".jpg" || name == ".jpeg" || name == ".JPG" || name == ".JPEG") files_.emplace_back(file, classes_);
      }
      ++classes_;
    }
    if (files_.empty()) throw std::runtime_error(directory.string() + " has no CLASS/NAME.jpg");
    size_ = files_.size();
  }
  example get(std::size_t index, std::uint64_t epoch) const override {
    const auto& [path, label] = files_.at(index);
    const torch::Tensor pixels = decode_jpeg(path);
    const std::int64_t height = pixels.size(0), width = pixels.size(1), shorter = std::min(height, width);
    // The centre, as 224 pixels of an image whose shorter side has 256; or a square anywhere, of half of that side to all of it.
    generator random(as_.seed, index, epoch);
    const std::int64_t side = std::max<std::int64_t>(1, as_.augments ? shorter - random.up_to(shorter / 2) : shorter * 224 / 256);
    const std::int64_t top = as_.augments ? random.up_to(height - side) : (height - side) / 2;
    const std::int64_t left = as_.augments ? random.up_to(width - side) : (width - side) / 2;
    torch::Tensor image = pixels.narrow(0, top, side).narrow(1, left, side).permute({2, 0, 1});
    if (as_.augments && random.up_to(1) == 1) image = image.flip(2);
    image = image.to(torch::kFloat).contiguous().div_(255);
    return {normalised(image, as_.size, {0.485F, 0.456F, 0.406F}, {0.229F, 0.224F, 0.225F}), torch::scalar_tensor(label, torch::kLong)};
  }

 private:
  std::vector<std::pair<fs::path, std::int64_t>> files_;
};

// Ten classes: stripes in five directions, wide and narrow, in random colours and at a random place, under noise.
class synthetic : public image_set {
 public:
  synthetic(std::size_t images, looks as) : image_set(as) { size_ = images; }
  example get(std::size_t index, std::uint64_t /*epoch*/) const override {
    const auto label = static_cast<std::int64_t>(index % 10);
    generator random(as_.seed, index, 0);
    std::normal_distribution<float> noise(0, 0.5F);
    const double direction = 0.628 * static_cast<double>(label % 5) + random.between(-0.15, 0.15);
    const double radians = (label < 5 ? 16.0 : 32.0) / static_cast<double>(as_.size);  // a pixel
    const double across = radians * std::cos(direction), down = radians * std::sin(direction);
    const double place = random.between(-3.14, 3.14);
    torch::Tensor image = torch::empty({3, as_.size, as_.size});
    float* out = image.data_ptr<float>();
    for (int colour = 0; colour < 3; ++colour) {
      const double contrast = random.between(0.5, 1.5), mean = random.between(-0.3, 0.3);
      for (std::int64_t i = 0; i < as_.size * as_.size; ++i) {
        const auto x = static_cast<double>(i % as_.size), y = static_cast<double>(i / as_.size);
        *out++ = static_cast<float>(mean + contrast * std::sin(place + across * x + down * y)) + noise(random);
      }
    }
    return {image, torch::scalar_tensor(label, torch::kLong)};
  }
};

template <class Set, class What>
data_sets open(const What& train, const What& test, looks as) {
  data_sets sets = {std::make_unique<Set>(train, as), std::make_unique<Set>(test, looks{as.size, as.seed + 1, false})};
  if (sets.train->classes() != sets.test->classes()) throw std::runtime_error("the test images have other classes");
  return sets;
}

}  // namespace

data_sets open_data(const std::string& source, std::int64_t image_size, std::uint64_t seed) {
  const std::size_t colon = std::min(source.size(), source.find(':'));
  const std::string kind = source.substr(0, colon);
  const fs::path directory = source.substr(std::min(source.size(), colon + 1));
  const auto as = [&](std::int64_t usual) { return looks{image_size == 0 ? usual : image_size, seed, true}; };
  if (kind == "cifar10" && !directory.empty()) {
    std::vector<fs::path> train;
    for (const fs::path& file : sorted_entries(directory))
      if (file.filename().string().starts_with("data_batch_")) train.push_back(file);
    if (train.empty()) throw std::runtime_error(directory.string() + " has no data_batch_1.bin");
    return open<cifar10>(train, {directory / "test_batch.bin"}, as(32));
  }
  if (kind == "imagefolder" && !directory.empty()) return open<image_folder>(directory / "train", directory / "val", as(224));
  if (source == "synthetic") return open<synthetic, std::size_t>(20'000, 1'000, as(32));
  throw std::runtime_error("--data " + source + " is none of cifar10:DIR, imagefolder:DIR and synthetic");
}

example batch_of(const image_set& images, const std::vector<std::size_t>& indices, std::uint64_t epoch) {
  std::vector<example> examples;
  for (const std::size_t index : indices) examples.push_back(images.get(index, epoch));
  return torch::data::transforms::Stack<>().apply_batch(examples);
}

example batch_of_step(std::uint64_t step, const image_set& images, std::size_t worker, std::size_t workers, std::size_t batch,
                      std::uint64_t seed) {
  const std::uint64_t per_epoch = images.size() / workers / batch;
  if (per_epoch == 0)
    throw std::runtime_error(std::to_string(images.size()) + " training images are too few for " + std::to_string(workers) +
                             " workers with batches of " + std::to_string(batch));
  const std::uint64_t epoch = (step - 1) / per_epoch, place = (step - 1) % per_epoch;
  std::vector<std::size_t> order(images.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::shuffle(order, generator(seed, ~std::uint64_t{0}, epoch));  // the same in all workers
  const auto begin = order.begin() + static_cast<std::ptrdiff_t>((place * workers + worker) * batch);
  return batch_of(images, {begin, begin + static_cast<std::ptrdiff_t>(batch)}, epoch);
}
