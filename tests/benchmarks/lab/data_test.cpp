// SPDX-License-Identifier: MIT
#include "data/data.hpp"  // Torch defines CHECK, so its headers come before Catch2's.

#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/shared.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>

#include "catch.hpp"

#include <stdlib.h>
#include <turbojpeg.h>
#include "temporary_directory.hpp"

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <stdexcept>
#include <vector>

namespace {

namespace fs = std::filesystem;
using lab::data_sets;
using lab::image_set;
using lab::open_data;
using byte_vector = std::vector<std::uint8_t>;
using example = torch::data::Example<>;

// ---- Helpers ----

void write_file(const fs::path& path, const byte_vector& bytes) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

/// What the exception of type `error` says that `action` throws; fails the test if it throws none.
template <typename error, typename function>
std::string message_of(function action) {
  try {
    action();
  } catch (const error& thrown) {
    return thrown.what();
  }
  FAIL("nothing was thrown");
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

bool same(const example& a, const example& b) {
  return a.data.equal(b.data) && a.target.equal(b.target);
}

std::size_t count(const std::shared_ptr<image_set>& set) {
  return set->size().value();
}

std::int64_t label_of(const example& one) {
  return one.target.item<std::int64_t>();
}

/// Two floats of an image: as good as the image itself to tell noisy images apart.
std::uint64_t fingerprint(const torch::Tensor& image) {
  const torch::Tensor pixels = image.contiguous();
  std::uint64_t bits = 0;
  std::memcpy(&bits, pixels.data_ptr<float>(), sizeof bits);
  return bits;
}

void require_well_formed(const std::shared_ptr<image_set>& set, std::size_t index) {
  const example one = set->get(index);
  const std::int64_t size = set->image_size_pixels();
  REQUIRE(one.data.sizes() == std::vector<std::int64_t>{3, size, size});
  REQUIRE(one.data.scalar_type() == torch::kFloat);
  REQUIRE(one.data.isfinite().all().item<bool>());
  REQUIRE(one.target.dim() == 0);
  REQUIRE(one.target.scalar_type() == torch::kLong);
  REQUIRE(label_of(one) >= 0);
  REQUIRE(label_of(one) < set->classes());
}

/// The fingerprints of all images that a worker reads in an epoch.
std::multiset<std::uint64_t> read_shard(const std::shared_ptr<image_set>& set, std::size_t workers,
                                        std::size_t rank, std::size_t threads) {
  torch::data::samplers::DistributedRandomSampler sampler(count(set), workers, rank,
                                                          /*allow_duplicates=*/false);
  sampler.set_epoch(3);
  auto batches =
      torch::data::datasets::SharedBatchDataset<image_set>(set).map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(std::move(batches), sampler,
                                              torch::data::DataLoaderOptions(64).workers(threads));
  std::multiset<std::uint64_t> seen;
  for (const example& batch : *loader) {
    for (std::int64_t i = 0; i < batch.data.size(0); ++i) seen.insert(fingerprint(batch.data[i]));
  }
  return seen;
}

// ---- The source ----

TEST_CASE("an unknown data source is refused with the accepted forms") {
  for (const std::string source : {"", "mnist", "cifar10", "cifar10:", "imagefolder",
                                   "imagefolder:", "synthetic:", "synthetic:x", "cifar10 :x", ":x"}) {
    INFO(source);
    const std::string message = message_of<std::invalid_argument>([&] { open_data(source, {}); });
    REQUIRE(contains(message, '"' + source + '"'));
    REQUIRE(contains(message, "cifar10:DIR, imagefolder:DIR and synthetic"));
  }
}

TEST_CASE("a negative image size is refused") {
  REQUIRE(contains(message_of<std::invalid_argument>([] { open_data("synthetic", {-1, 0}); }), "-1"));
}

// ---- CIFAR-10 ----

constexpr std::size_t record_bytes = 3073;

/// Records of label i % 10, which are black but for the pixel of row 1 and column 2, of red 255 and blue 51.
byte_vector cifar10_records(std::size_t count) {
  byte_vector records(count * record_bytes, 0);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t* record = &records[i * record_bytes];
    record[0] = static_cast<std::uint8_t>(i % 10);
    record[1 + 0 * 1024 + 32 + 2] = 255;
    record[1 + 2 * 1024 + 32 + 2] = 51;
  }
  return records;
}

void write_cifar10(const fs::path& directory) {
  write_file(directory / "data_batch_1.bin", cifar10_records(12));
  write_file(directory / "data_batch_4.bin", cifar10_records(3));
  write_file(directory / "test_batch.bin", cifar10_records(2));
}

TEST_CASE("CIFAR-10 files are read into normalised planes") {
  const temporary_directory directory;
  write_cifar10(directory.path());
  const data_sets sets = open_data("cifar10:" + directory.path().string(), {});
  REQUIRE(count(sets.train) == 15);
  REQUIRE(count(sets.test) == 2);
  REQUIRE(sets.train->classes() == 10);
  REQUIRE(sets.train->image_size_pixels() == 32);
  for (std::size_t i = 0; i < 15; ++i) require_well_formed(sets.train, i);
  REQUIRE(label_of(sets.train->get(11)) == 1);
  REQUIRE(label_of(sets.train->get(14)) == 2);
  const torch::Tensor image = sets.test->get(1).data;
  const auto value = [&](int channel, int row, int column) {
    return image[channel][row][column].item<double>();
  };
  REQUIRE(std::abs(value(0, 1, 2) - (1 - 0.4914) / 0.2470) < 1e-5);
  REQUIRE(std::abs(value(1, 1, 2) - (0 - 0.4822) / 0.2435) < 1e-5);
  REQUIRE(std::abs(value(2, 1, 2) - (0.2 - 0.4465) / 0.2616) < 1e-5);
  REQUIRE(std::abs(value(0, 2, 1) - (0 - 0.4914) / 0.2470) < 1e-5);
}

TEST_CASE("CIFAR-10 images are resized on request") {
  const temporary_directory directory;
  write_cifar10(directory.path());
  for (const std::int64_t size_pixels : {1, 16, 75}) {
    const data_sets sets = open_data("cifar10:" + directory.path().string(), {size_pixels, 0});
    REQUIRE(sets.test->image_size_pixels() == size_pixels);
    require_well_formed(sets.test, 0);
  }
}

TEST_CASE("damaged CIFAR-10 directories are refused with the name of the file") {
  const temporary_directory parent;
  const fs::path directory = parent.path() / "cifar";
  const auto message = [&] {
    return message_of<std::runtime_error>([&] { open_data("cifar10:" + directory.string(), {}); });
  };
  REQUIRE(contains(message(), directory.string()));
  write_file(directory / "test_batch.bin", cifar10_records(1));
  REQUIRE(contains(message(), "data_batch_1.bin"));
  write_cifar10(directory);

  SECTION("no test file") {
    fs::remove(directory / "test_batch.bin");
    REQUIRE(contains(message(), (directory / "test_batch.bin").string()));
  }
  SECTION("truncated") {
    fs::resize_file(directory / "data_batch_4.bin", 2 * record_bytes + 100);
    REQUIRE(contains(message(), (directory / "data_batch_4.bin").string() + " holds 6246 bytes"));
  }
  SECTION("empty") {
    fs::resize_file(directory / "data_batch_4.bin", 0);
    REQUIRE(contains(message(), (directory / "data_batch_4.bin").string() + " holds 0 bytes"));
  }
  SECTION("bad label") {
    byte_vector records = cifar10_records(3);
    records[2 * record_bytes] = 10;
    write_file(directory / "test_batch.bin", records);
    REQUIRE(contains(message(), "record 2 of " + (directory / "test_batch.bin").string() + " has label 10"));
  }
}

// ---- Image folders ----

/// A picture of one colour; `pixel` has as many bytes as `format` has.
byte_vector encode_jpeg(int width, int height, int format, const byte_vector& pixel, int subsampling) {
  byte_vector pixels;
  for (int i = 0; i < width * height; ++i) pixels.insert(pixels.end(), pixel.begin(), pixel.end());
  const tjhandle handle = tjInitCompress();
  unsigned char* jpeg = nullptr;
  unsigned long bytes = 0;
  const int status =
      tjCompress2(handle, pixels.data(), width, 0, height, format, &jpeg, &bytes, subsampling, 100, 0);
  const byte_vector encoded(jpeg, jpeg + bytes);
  tjFree(jpeg);
  tjDestroy(handle);
  REQUIRE(status == 0);
  return encoded;
}

byte_vector red_jpeg(int width, int height) {
  return encode_jpeg(width, height, TJPF_RGB, {255, 0, 0}, TJSAMP_420);
}

/// A picture that differs from place to place, so that two parts of it can be told apart.
byte_vector gradient_jpeg() {
  byte_vector pixels;
  for (int i = 0; i < 64 * 48; ++i) {
    pixels.insert(pixels.end(),
                  {static_cast<std::uint8_t>(i % 64 * 4), static_cast<std::uint8_t>(i / 64 * 5), 90});
  }
  const tjhandle handle = tjInitCompress();
  unsigned char* jpeg = nullptr;
  unsigned long bytes = 0;
  REQUIRE(tjCompress2(handle, pixels.data(), 64, 0, 48, TJPF_RGB, &jpeg, &bytes, TJSAMP_444, 95, 0) == 0);
  const byte_vector encoded(jpeg, jpeg + bytes);
  tjFree(jpeg);
  tjDestroy(handle);
  return encoded;
}

data_sets open_folder(const fs::path& directory, std::int64_t size_pixels = 0, std::uint64_t seed = 0) {
  return open_data("imagefolder:" + directory.string(), {size_pixels, seed});
}

/// Whether the image has nearly the colour, given from 0 to 1, in every pixel.
bool has_colour(const torch::Tensor& image, const std::vector<double>& rgb) {
  const std::vector<double> mean = {0.485, 0.456, 0.406}, deviation = {0.229, 0.224, 0.225};
  for (int channel = 0; channel < 3; ++channel) {
    const torch::Tensor value = image[channel] * deviation[channel] + mean[channel];
    if ((value - rgb[channel]).abs().max().item<double>() > 0.02) return false;
  }
  return true;
}

TEST_CASE("JPEG files of all colour spaces and sizes become images of the wanted size") {
  const temporary_directory directory;
  const fs::path train = directory.path() / "train", val = directory.path() / "val";
  write_file(val / "any" / "a.jpg", red_jpeg(40, 30));
  const std::vector<std::pair<byte_vector, std::vector<double>>> cases = {
      {red_jpeg(1, 1), {1, 0, 0}},
      {red_jpeg(1, 301), {1, 0, 0}},
      {red_jpeg(17, 5), {1, 0, 0}},
      {red_jpeg(333, 251), {1, 0, 0}},
      {encode_jpeg(31, 33, TJPF_RGB, {0, 0, 255}, TJSAMP_444), {0, 0, 1}},
      {encode_jpeg(31, 33, TJPF_GRAY, {128}, TJSAMP_GRAY), {0.5, 0.5, 0.5}},
      // Inverted inks: no cyan, full magenta and yellow, half black.
      {encode_jpeg(30, 20, TJPF_CMYK, {255, 0, 0, 128}, TJSAMP_444), {0.5, 0, 0}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    write_file(train / "any" / (std::to_string(i) + ".JPEG"), cases[i].first);
    write_file(val / "any" / (std::to_string(i) + ".JPEG"), cases[i].first);
  }
  const data_sets sets = open_folder(directory.path(), 37);
  REQUIRE(count(sets.train) == cases.size());
  for (std::size_t i = 0; i < cases.size(); ++i) {
    INFO("case " << i);
    require_well_formed(sets.train, i);
    REQUIRE(has_colour(sets.train->get(i).data, cases[i].second));
    REQUIRE(has_colour(sets.test->get(i).data, cases[i].second));
  }
}

TEST_CASE("class folders are numbered by name, in train and val alike") {
  const temporary_directory directory;
  for (const std::string name : {"pear", "apple", "fig"}) {
    write_file(directory.path() / "train" / name / "1.jpeg", red_jpeg(8, 8));
  }
  write_file(directory.path() / "train" / "apple" / "notes.txt", {1, 2, 3});
  write_file(directory.path() / "val" / "pear" / "2.JPG", red_jpeg(8, 8));
  const data_sets sets = open_folder(directory.path());
  REQUIRE(sets.train->image_size_pixels() == 224);
  REQUIRE(sets.train->classes() == 3);
  REQUIRE(sets.test->classes() == 3);
  REQUIRE(count(sets.train) == 3);
  REQUIRE(count(sets.test) == 1);
  REQUIRE(label_of(sets.train->get(0)) == 0);
  REQUIRE(label_of(sets.test->get(0)) == 2);

  write_file(directory.path() / "val" / "plum" / "3.jpg", red_jpeg(8, 8));
  REQUIRE(contains(message_of<std::runtime_error>([&] { open_folder(directory.path()); }), "plum"));
}

TEST_CASE(
    "train and test are halves as train and val are, and what is no class folder is skipped with a note") {
  const temporary_directory directory;
  for (const std::string name : {"pear", "apple"}) {
    write_file(directory.path() / "train" / name / "1.jpg", red_jpeg(8, 8));
  }
  write_file(directory.path() / "test" / "pear" / "2.jpg", red_jpeg(8, 8));
  write_file(directory.path() / "train" / "README.md", {1, 2, 3});
  data_sets sets = open_folder(directory.path());
  REQUIRE(count(sets.train) == 2);
  REQUIRE(count(sets.test) == 1);
  REQUIRE(label_of(sets.test->get(0)) == 1);
  REQUIRE(sets.notes.size() == 1);
  REQUIRE(contains(sets.notes[0], "train/README.md is no class folder"));

  write_file(directory.path() / "val" / "apple" / "3.jpg", red_jpeg(8, 8));
  sets = open_folder(directory.path());
  REQUIRE(label_of(sets.test->get(0)) == 0);
  REQUIRE(sets.notes.size() == 2);
  REQUIRE(contains(sets.notes[0], "test are left aside"));
}

TEST_CASE("without train and val every fifth image is held out") {
  const temporary_directory directory;
  for (int i = 0; i < 6; ++i) {
    write_file(directory.path() / "a" / (std::to_string(i) + ".jpg"), red_jpeg(8, 8));
    write_file(directory.path() / "b" / (std::to_string(i) + ".jpg"), red_jpeg(8, 8));
  }
  const data_sets sets = open_folder(directory.path(), 8);
  REQUIRE(count(sets.train) == 10);
  REQUIRE(count(sets.test) == 2);
  REQUIRE(label_of(sets.test->get(0)) == 0);
  REQUIRE(label_of(sets.test->get(1)) == 1);
}

TEST_CASE("training images are cropped at random, repeatably from the seed, and test images are not") {
  const temporary_directory directory;
  for (const std::string half : {"train", "val"}) {
    write_file(directory.path() / half / "a" / "1.jpg", gradient_jpeg());
    write_file(directory.path() / half / "a" / "2.jpg", gradient_jpeg());
  }
  const data_sets sets = open_folder(directory.path(), 32, 7);
  const data_sets again = open_folder(directory.path(), 32, 7);
  const data_sets other = open_folder(directory.path(), 32, 8);
  const std::size_t images = sets.train->size().value();
  const example first = sets.train->get(0), second = sets.train->get(images), neighbour = sets.train->get(1);
  REQUIRE(!same(first, second));
  REQUIRE(!same(first, neighbour));
  REQUIRE(label_of(first) == label_of(second));
  REQUIRE(same(neighbour, again.train->get(1)));  // The order of the reads must not count.
  REQUIRE(same(first, again.train->get(0)));
  REQUIRE(same(first, sets.train->get(0)));
  REQUIRE(same(second, again.train->get(images)));
  REQUIRE(!same(first, other.train->get(0)));
  REQUIRE(same(sets.test->get(0), sets.test->get(sets.test->size().value())));
  REQUIRE(same(sets.test->get(0), other.test->get(1)));
}

TEST_CASE("some training images are mirrored, and no test image") {
  const temporary_directory directory;
  for (const std::string half : {"train", "val"}) {
    write_file(directory.path() / half / "a" / "1.jpg", gradient_jpeg());
  }
  const data_sets sets = open_folder(directory.path(), 32);
  const auto grows_to_the_right = [](const example& one) {
    return (one.data[0][16][31] > one.data[0][16][0]).item<bool>();
  };
  int mirrored = 0;
  for (std::size_t i = 0; i < 100; ++i)
    mirrored += grows_to_the_right(sets.train->get(i)) ? 0 : 1;  // one image
  REQUIRE(mirrored > 25);
  REQUIRE(mirrored < 75);
  REQUIRE(grows_to_the_right(sets.test->get(0)));
}

TEST_CASE("image directories without images are refused with their name") {
  const temporary_directory parent;
  const fs::path directory = parent.path() / "images";
  const auto message = [&] { return message_of<std::runtime_error>([&] { open_folder(directory); }); };
  REQUIRE(contains(message(), directory.string() + " does not exist"));
  write_file(directory / "not_in_a_class.jpg", red_jpeg(8, 8));
  REQUIRE(contains(message(), directory.string() + " holds no class folders"));
  write_file(directory / "a" / "1.jpg", red_jpeg(8, 8));
  REQUIRE(contains(message(), "fewer than five images"));
  fs::create_directory(directory / "b");
  REQUIRE(contains(message(), (directory / "b").string() + " holds no JPEG files"));
  write_file(directory / "b" / "2.jpg", {});
  REQUIRE(contains(message(), (directory / "b" / "2.jpg").string() + " is empty"));
}

TEST_CASE("a file that is no whole JPEG is refused when it is read, with its name and the reason") {
  const temporary_directory directory;
  const fs::path folder = directory.path() / "a";
  for (int i = 0; i < 5; ++i) write_file(folder / (std::to_string(i) + ".jpg"), gradient_jpeg());
  byte_vector bytes = gradient_jpeg();
  std::string reason;
  SECTION("text") {
    bytes.assign(1000, 'x');
    reason = "Not a JPEG file";
  }
  SECTION("half of the file") {
    bytes.resize(bytes.size() / 2);
    reason = "Premature end of JPEG file";
  }
  SECTION("without its last ten bytes") {
    bytes.resize(bytes.size() - 10);
    reason = "Premature end of JPEG file";
  }
  SECTION("only the first bytes") {
    bytes.resize(20);
    reason = "ends in its header";
  }
  write_file(folder / "1.jpg", bytes);
  const data_sets sets = open_folder(directory.path());
  require_well_formed(sets.train, 0);
  const std::string message = message_of<std::runtime_error>([&] { sets.train->get(1); });
  INFO(message);
  REQUIRE(contains(message, (folder / "1.jpg").string()));
  REQUIRE(contains(message, reason));
  // A file may also change under a run.
  write_file(folder / "2.jpg", {});
  REQUIRE(contains(message_of<std::runtime_error>([&] { sets.train->get(2); }), (folder / "2.jpg").string()));
  fs::remove(folder / "3.jpg");
  REQUIRE(contains(message_of<std::runtime_error>([&] { sets.train->get(3); }), (folder / "3.jpg").string()));
}

// ---- Synthetic images ----

TEST_CASE("synthetic images depend on the seed and the index alone") {
  const data_sets sets = open_data("synthetic", {0, 5}), again = open_data("synthetic", {0, 5});
  const data_sets other = open_data("synthetic", {0, 6});
  REQUIRE(same(sets.train->get(123), again.train->get(123)));
  REQUIRE(same(sets.train->get(123), sets.train->get(123)));
  REQUIRE(!same(sets.train->get(123), sets.train->get(133)));
  REQUIRE(!same(sets.train->get(123), other.train->get(123)));
  REQUIRE(!same(sets.test->get(123), sets.train->get(123)));
}

TEST_CASE("synthetic images are balanced, normalised and all different") {
  const data_sets sets = open_data("synthetic", {});
  REQUIRE(count(sets.train) == 20'000);
  REQUIRE(count(sets.test) == 2'000);
  std::set<std::uint64_t> seen;
  for (const auto& set : {sets.train, sets.test}) {
    std::vector<std::size_t> images_of(10);
    double sum = 0, sum_of_squares = 0;
    for (std::size_t i = 0; i < count(set); ++i) {
      const example one = set->get(i);
      seen.insert(fingerprint(one.data));
      ++images_of.at(label_of(one));
      sum += one.data.mean().item<double>();
      sum_of_squares += one.data.square().mean().item<double>();
    }
    REQUIRE(images_of == std::vector<std::size_t>(10, count(set) / 10));
    const auto images = static_cast<double>(count(set));
    REQUIRE(std::abs(sum / images) < 0.05);
    REQUIRE(std::abs(std::sqrt(sum_of_squares / images) - 1) < 0.2);
  }
  REQUIRE(seen.size() == 22'000);
}

TEST_CASE("synthetic images are drawn at any size") {
  for (const std::int64_t size_pixels : {1, 8, 224}) {
    const data_sets sets = open_data("synthetic", {size_pixels, 0});
    REQUIRE(sets.train->image_size_pixels() == size_pixels);
    for (std::size_t i = 0; i < 10; ++i) require_well_formed(sets.train, i);
  }
}

TEST_CASE("the average image of its class does not tell the class of a synthetic image") {
  const data_sets sets = open_data("synthetic", {});
  torch::Tensor averages = torch::zeros({10, 3 * 32 * 32});
  for (std::size_t i = 0; i < 5000; ++i) averages[i % 10] += sets.train->get(i).data.flatten() / 500;
  int right = 0;
  for (std::size_t i = 0; i < 2000; ++i) {
    const example one = sets.test->get(i);
    const torch::Tensor distances = (averages - one.data.flatten()).square().sum(1);
    right += distances.argmin().item<std::int64_t>() == label_of(one) ? 1 : 0;
  }
  REQUIRE(right < 500);  // 200 by chance.
}

// ---- Loading ----

TEST_CASE("a DataLoader with a DistributedRandomSampler gives disjoint shards to two workers") {
  const std::shared_ptr<image_set> set = open_data("synthetic", {}).test;
  std::multiset<std::uint64_t> all = read_shard(set, 1, 0, 0);
  REQUIRE(all.size() == 2'000);
  std::multiset<std::uint64_t> shards = read_shard(set, 2, 0, /*threads=*/0);
  REQUIRE(shards.size() == 1'000);
  shards.merge(read_shard(set, 2, 1, /*threads=*/2));
  REQUIRE(shards == all);
}

// ---- Real data, which not every machine has ----

/// The folder with the archives of real images; empty, after a warning, if there is none.
fs::path shared_data() {
  const char* named = std::getenv("LAMINA_SHARED_DATA");
  const fs::path folder =
      named != nullptr ? fs::path(named) : fs::path(LAMINA_SOURCE_DIR) / ".." / "shared" / "data";
  if (fs::is_directory(folder)) return folder;
  WARN("skipped: there is no folder " << folder << "; LAMINA_SHARED_DATA can name another");
  return {};
}

void unpack(const fs::path& archive, const fs::path& directory) {
  const std::string command = "tar -xf '" + archive.string() + "' -C '" + directory.string() + "'";
  REQUIRE(std::system(command.c_str()) == 0);
}

TEST_CASE("the real CIFAR-10 files load") {
  const fs::path folder = shared_data();
  if (folder.empty()) return;
  const temporary_directory directory;
  unpack(folder / "cifar-10-batches-bin.tar.xz", directory.path());
  const data_sets sets = open_data("cifar10:" + (directory.path() / "cifar-10-batches-bin").string(), {});
  REQUIRE(count(sets.train) >= 10'000);
  torch::Tensor sum = torch::zeros(3), sum_of_squares = torch::zeros(3);
  for (std::size_t i = 0; i < 2'000; ++i) {
    require_well_formed(sets.test, i % count(sets.test));
    const torch::Tensor image = sets.train->get(i).data;
    sum += image.mean({1, 2});
    sum_of_squares += image.square().mean({1, 2});
  }
  REQUIRE((sum / 2'000).abs().max().item<double>() < 0.1);
  REQUIRE((sum_of_squares / 2'000 - 1).abs().max().item<double>() < 0.1);
}

TEST_CASE("real ImageNet files load") {
  const fs::path folder = shared_data();
  if (folder.empty()) return;
  const temporary_directory directory;
  unpack(folder / "imagenet-sample.tar", directory.path());
  const data_sets sets = open_folder(directory.path() / "imagenet-sample");
  REQUIRE(count(sets.train) + count(sets.test) == static_cast<std::size_t>(sets.train->classes()));
  for (const auto& set : {sets.train, sets.test}) {
    for (std::size_t i = 0; i < count(set); ++i) require_well_formed(set, i);
  }
}

}  // namespace
