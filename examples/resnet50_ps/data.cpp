// SPDX-License-Identifier: MIT
#include "data.hpp"

#include <turbojpeg.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

namespace {

namespace fs = std::filesystem;
using example = torch::data::Example<>;

std::mt19937 random_of(std::uint64_t seed, std::uint64_t index, std::uint64_t epoch) {
  std::seed_seq all{seed, index, epoch};
  return std::mt19937(all);
}
// An integer in [0, most].
std::int64_t draw(std::mt19937& random, std::int64_t most) {
  return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most + 1));
}

std::vector<unsigned char> read_file(const fs::path& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot open " + path.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

// 3 x height x width from 0 to 1 as 3 x size x size, less the mean and over the deviation of each colour.
torch::Tensor normalised(torch::Tensor image, std::int64_t size, at::ArrayRef<float> mean,
                         at::ArrayRef<float> deviation) {
  if (image.size(1) != size || image.size(2) != size)
    image = torch::_upsample_bilinear2d_aa(image.unsqueeze(0), {size, size}, /*align_corners=*/false)[0];
  return (image - torch::tensor(mean).view({3, 1, 1})) / torch::tensor(deviation).view({3, 1, 1});
}

class cifar10 : public image_set {
 public:
  cifar10(const std::vector<fs::path>& files, std::int64_t image_size, bool augments, std::uint64_t seed)
      : image_size_(image_size == 0 ? side : image_size), augments_(augments), seed_(seed) {
    for (const fs::path& file : files) {
      const std::vector<unsigned char> more = read_file(file);
      if (more.empty() || more.size() % record_bytes != 0) {
        throw std::runtime_error(
            file.string() + " has " + std::to_string(more.size()) +
            " bytes, no multiple of the 3073 of a CIFAR-10 image: is it whole, and the binary version?");
      }
      records_.insert(records_.end(), more.begin(), more.end());
    }
    for (std::size_t i = 0; i < size(); ++i) {
      if (records_[i * record_bytes] >= classes())
        throw std::runtime_error("image " + std::to_string(i) + " of " + files[0].parent_path().string() +
                                 " is of class " + std::to_string(records_[i * record_bytes]) +
                                 ", CIFAR-10 has 0 to 9");
    }
  }
  std::size_t size() const override { return records_.size() / record_bytes; }
  std::int64_t classes() const override { return 10; }
  example get(std::size_t index, std::uint64_t epoch) const override {
    const unsigned char* record =
        &records_.at(index * record_bytes);  // a byte for the class, then the colours' planes
    torch::Tensor image =
        torch::from_blob(const_cast<unsigned char*>(record + 1), {3, side, side}, torch::kByte)
            .to(torch::kFloat)
            .div_(255);
    if (augments_) {  // shifted by up to 4 pixels and mirrored half of the times, as He et al. do
      std::mt19937 random = random_of(seed_, index, epoch);
      const std::int64_t top = draw(random, 8), left = draw(random, 8);
      image = torch::constant_pad_nd(image, {4, 4, 4, 4}).narrow(1, top, side).narrow(2, left, side);
      if (draw(random, 1) == 1) image = image.flip(2);
    }
    return {normalised(image, image_size_, {0.4914F, 0.4822F, 0.4465F}, {0.2470F, 0.2435F, 0.2616F}),
            torch::scalar_tensor(record[0], torch::kLong)};
  }

 private:
  static constexpr std::int64_t side = 32;
  static constexpr std::size_t record_bytes = 1 + 3 * side * side;
  std::int64_t image_size_;
  bool augments_;
  std::uint64_t seed_;
  std::vector<unsigned char> records_;
};

// Height x width x 3 bytes.
torch::Tensor decode_jpeg(const fs::path& path) {
  const std::vector<unsigned char> jpeg = read_file(path);
  const std::unique_ptr<void, int (*)(void*)> decoder(tjInitDecompress(), tjDestroy);
  const auto succeed = [&](int status) {
    if (status != 0)
      throw std::runtime_error("cannot decode " + path.string() + ": " + tjGetErrorStr2(decoder.get()));
  };
  int width = 0, height = 0, subsampling = 0, colours = 0;
  succeed(
      tjDecompressHeader3(decoder.get(), jpeg.data(), jpeg.size(), &width, &height, &subsampling, &colours));
  torch::Tensor pixels = torch::empty({height, width, 3}, torch::kByte);
  // To the library a file that ends early is a warning, and the rest of the image grey.
  succeed(tjDecompress2(decoder.get(), jpeg.data(), jpeg.size(), pixels.data_ptr<std::uint8_t>(), width, 0,
                        height, TJPF_RGB, TJFLAG_STOPONWARNING));
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
  image_folder(const fs::path& directory, std::int64_t image_size, bool augments, std::uint64_t seed)
      : image_size_(image_size == 0 ? 224 : image_size), augments_(augments), seed_(seed) {
    for (const fs::path& folder : sorted_entries(directory)) {
      if (!fs::is_directory(folder)) continue;
      for (const fs::path& file : sorted_entries(folder)) {
        std::string extension = file.extension().string();
        std::ranges::transform(extension, extension.begin(), [](unsigned char c) { return std::tolower(c); });
        if (extension == ".jpg" || extension == ".jpeg") files_.emplace_back(file, names_.size());
      }
      names_.push_back(folder.filename().string());
    }
    if (files_.empty()) throw std::runtime_error(directory.string() + " has no CLASS/NAME.jpg");
  }
  std::size_t size() const override { return files_.size(); }
  std::int64_t classes() const override { return static_cast<std::int64_t>(names_.size()); }
  const std::vector<std::string>& names() const { return names_; }
  example get(std::size_t index, std::uint64_t epoch) const override {
    const auto& [path, label] = files_.at(index);
    const torch::Tensor pixels = decode_jpeg(path);
    const std::int64_t height = pixels.size(0), width = pixels.size(1), shorter = std::min(height, width);
    // The centre, as 224 pixels of an image whose shorter side has 256.
    std::int64_t side = std::max<std::int64_t>(1, shorter * 224 / 256);
    std::int64_t top = (height - side) / 2, left = (width - side) / 2;
    bool is_mirrored = false;
    if (augments_) {  // a square anywhere, of half of the shorter side to all of it
      std::mt19937 random = random_of(seed_, index, epoch);
      side = shorter - draw(random, shorter / 2);
      top = draw(random, height - side);
      left = draw(random, width - side);
      is_mirrored = draw(random, 1) == 1;
    }
    torch::Tensor image = pixels.narrow(0, top, side).narrow(1, left, side).permute({2, 0, 1});
    if (is_mirrored) image = image.flip(2);
    image = image.to(torch::kFloat).contiguous().div_(255);
    return {normalised(image, image_size_, {0.485F, 0.456F, 0.406F}, {0.229F, 0.224F, 0.225F}),
            torch::scalar_tensor(static_cast<std::int64_t>(label), torch::kLong)};
  }

 private:
  std::int64_t image_size_;
  bool augments_;
  std::uint64_t seed_;
  std::vector<std::string> names_;
  std::vector<std::pair<fs::path, std::size_t>> files_;
};

// Ten classes: stripes in five directions, narrow and wide, in random colours and at a random place, under noise.
class synthetic : public image_set {
 public:
  synthetic(std::size_t images, std::int64_t image_size, std::uint64_t seed)
      : images_(images), image_size_(image_size == 0 ? 32 : image_size), seed_(seed) {}
  std::size_t size() const override { return images_; }
  std::int64_t classes() const override { return 10; }
  example get(std::size_t index, std::uint64_t /*epoch*/) const override {
    const auto label = static_cast<std::int64_t>(index % 10);
    std::mt19937 random = random_of(seed_, index, 0);
    std::uniform_real_distribution<double> uniform(-1, 1);
    std::normal_distribution<float> noise(0, 0.5F);
    const double direction = static_cast<double>(label % 5) * 0.628 + 0.15 * uniform(random);
    const double pixel = (label < 5 ? 16.0 : 32.0) / static_cast<double>(image_size_);  // radians
    const double across = std::cos(direction) * pixel, down = std::sin(direction) * pixel;
    const double place = 3.14159 * uniform(random);
    torch::Tensor image = torch::empty({3, image_size_, image_size_});
    float* out = image.data_ptr<float>();
    for (int colour = 0; colour < 3; ++colour) {
      const double contrast = 1.0 + 0.5 * uniform(random), mean = 0.3 * uniform(random);
      for (std::int64_t y = 0; y < image_size_; ++y) {
        for (std::int64_t x = 0; x < image_size_; ++x) {
          const double wave =
              std::sin(place + across * static_cast<double>(x) + down * static_cast<double>(y));
          *out++ = static_cast<float>(mean + contrast * wave) + noise(random);
        }
      }
    }
    return {image, torch::scalar_tensor(label, torch::kLong)};
  }

 private:
  std::size_t images_;
  std::int64_t image_size_;
  std::uint64_t seed_;
};

data_sets open_cifar10(const fs::path& directory, std::int64_t image_size, std::uint64_t seed) {
  std::vector<fs::path> train;
  for (const fs::path& file : sorted_entries(directory)) {
    if (file.filename().string().starts_with("data_batch_") && file.extension() == ".bin")
      train.push_back(file);
  }
  if (train.empty()) throw std::runtime_error(directory.string() + " has no data_batch_1.bin");
  return {std::make_unique<cifar10>(train, image_size, true, seed),
          std::make_unique<cifar10>(std::vector{directory / "test_batch.bin"}, image_size, false, seed)};
}

data_sets open_image_folder(const fs::path& directory, std::int64_t image_size, std::uint64_t seed) {
  auto train = std::make_unique<image_folder>(directory / "train", image_size, true, seed);
  auto test = std::make_unique<image_folder>(directory / "val", image_size, false, seed);
  if (train->names() != test->names())
    throw std::runtime_error((directory / "val").string() + " has other class folders than train");
  return {std::move(train), std::move(test)};
}

}  // namespace

data_sets open_data(const std::string& source, std::int64_t image_size, std::uint64_t seed) {
  const std::size_t colon = std::min(source.size(), source.find(':'));
  const std::string kind = source.substr(0, colon);
  const fs::path directory = source.substr(std::min(source.size(), colon + 1));
  if (kind == "cifar10" && !directory.empty()) return open_cifar10(directory, image_size, seed);
  if (kind == "imagefolder" && !directory.empty()) return open_image_folder(directory, image_size, seed);
  if (source == "synthetic") {
    return {std::make_unique<synthetic>(20'000, image_size, seed),
            std::make_unique<synthetic>(1'000, image_size, seed + 1)};
  }
  throw std::runtime_error("--data " + source + " is none of cifar10:DIR, imagefolder:DIR and synthetic");
}

example batch_of(const image_set& images, const std::vector<std::size_t>& indices, std::uint64_t epoch) {
  std::vector<example> examples;
  for (const std::size_t index : indices) examples.push_back(images.get(index, epoch));
  return torch::data::transforms::Stack<>().apply_batch(examples);
}

batches::batches(const image_set& images, std::size_t workers, std::size_t worker, std::size_t batch,
                 std::uint64_t seed)
    : images_(images), workers_(workers), worker_(worker), batch_(batch), seed_(seed), order_(images.size()) {
  if (images.size() / workers < batch) {
    throw std::runtime_error(std::to_string(images.size()) + " training images are too few for " +
                             std::to_string(workers) + " workers with batches of " + std::to_string(batch));
  }
}

example batches::of_step(std::uint64_t step) {
  const std::uint64_t per_epoch = images_.size() / workers_ / batch_;
  const std::uint64_t epoch = (step - 1) / per_epoch, place = (step - 1) % per_epoch;
  if (epoch != epoch_) {  // the same order in all workers
    std::mt19937 random = random_of(seed_, ~std::uint64_t{0}, epoch);
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::ranges::shuffle(order_, random);
    epoch_ = epoch;
  }
  const auto begin = order_.begin() + static_cast<std::ptrdiff_t>((place * workers_ + worker_) * batch_);
  return batch_of(images_, {begin, begin + static_cast<std::ptrdiff_t>(batch_)}, epoch);
}
