// SPDX-License-Identifier: MIT
// Torch first: its CHECK and Catch2's clash, so the tests say REQUIRE.
#include "data.hpp"

#include <turbojpeg.h>

#include <array>
#include <fstream>
#include <set>
#include <span>

#include "catch.hpp"
#include "temporary_directory.hpp"

namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, std::span<const unsigned char> bytes) {
  fs::create_directories(path.parent_path());
  std::ranges::copy(bytes, std::ostreambuf_iterator<char>(std::ofstream(path, std::ios::binary).rdbuf()));
}

// A CIFAR-10 image of one colour in each plane.
std::vector<unsigned char> record(int label, int red, int green, int blue) {
  std::vector<unsigned char> bytes(1, static_cast<unsigned char>(label));
  for (const int plane : {red, green, blue})
    bytes.insert(bytes.end(), 1024, static_cast<unsigned char>(plane));
  return bytes;
}

// A JPEG of one colour, wider than high.
void write_jpeg(const fs::path& path, int red, int green, int blue) {
  constexpr int width = 40, height = 30;
  std::vector<unsigned char> pixels;
  for (int i = 0; i < width * height; ++i) {
    for (const int each : {red, green, blue}) pixels.push_back(static_cast<unsigned char>(each));
  }
  unsigned char* jpeg = nullptr;
  unsigned long bytes = 0;
  tjhandle handle = tjInitCompress();
  REQUIRE(tjCompress2(handle, pixels.data(), width, 0, height, TJPF_RGB, &jpeg, &bytes, TJSAMP_444, 95, 0) ==
          0);
  write(path, {jpeg, bytes});
  tjFree(jpeg);
  tjDestroy(handle);
}

}  // namespace

TEST_CASE("resnet50_ps: CIFAR-10 is read as it is written") {
  const temporary_directory directory;
  for (const char* name : {"data_batch_1.bin", "data_batch_2.bin"})
    write(directory.path() / name, record(3, 255, 0, 128));
  write(directory.path() / "test_batch.bin", record(7, 0, 255, 51));
  const data_sets sets = open_data("cifar10:" + directory.path().string(), 0, 1);
  REQUIRE(sets.train->size() == 2);
  REQUIRE(sets.test->size() == 1);
  const auto image = sets.test->get(0, 0);
  REQUIRE(image.target.item<int>() == 7);
  REQUIRE(image.data.sizes() == at::IntArrayRef{3, 32, 32});
  REQUIRE(image.data[0].max().item<double>() == Approx(-0.4914 / 0.2470));
  REQUIRE(image.data[1].min().item<double>() == Approx((1 - 0.4822) / 0.2435));
  REQUIRE(image.data[2][5][6].item<double>() == Approx((0.2 - 0.4465) / 0.2616));
  // As training shows it: another place or mirrored in another epoch, the same in the same.
  REQUIRE(sets.train->get(1, 4).target.item<int>() == 3);
  REQUIRE(torch::equal(sets.train->get(1, 4).data, sets.train->get(1, 4).data));
  std::set<double> sums;
  for (std::uint64_t epoch = 0; epoch < 8; ++epoch)
    sums.insert(sets.train->get(1, epoch).data.sum().item<double>());
  REQUIRE(sums.size() > 2);
}

TEST_CASE("resnet50_ps: an image folder has a class for each directory") {
  const temporary_directory directory;
  for (const char* part : {"train", "val"}) {
    write_jpeg(directory.path() / part / "blue" / "1.jpg", 0, 0, 255);
    write_jpeg(directory.path() / part / "red" / "1.JPG", 255, 0, 0);
    write_jpeg(directory.path() / part / "red" / "2.jpeg", 250, 5, 0);
    write(directory.path() / part / "red" / "notes.txt", std::array<unsigned char, 2>{'n', 'o'});
  }
  const std::string source = "imagefolder:" + directory.path().string();
  const data_sets sets = open_data(source, 16, 1);
  REQUIRE(sets.train->size() == 3);
  REQUIRE(sets.train->classes() == 2);
  for (const image_set* set : {sets.train.get(), sets.test.get()}) {
    const auto blue = set->get(0, 0), red = set->get(1, 0);
    REQUIRE(blue.data.sizes() == at::IntArrayRef{3, 16, 16});
    REQUIRE(blue.target.item<int>() == 0);
    REQUIRE(red.target.item<int>() == 1);
    REQUIRE(red.data[0].mean().item<double>() == Approx((1 - 0.485) / 0.229).margin(0.1));
    REQUIRE(blue.data[0].mean().item<double>() == Approx(-0.485 / 0.229).margin(0.1));
    REQUIRE(blue.data[2].mean().item<double>() == Approx((1 - 0.406) / 0.225).margin(0.1));
  }
  fs::remove_all(directory.path() / "val" / "blue");
  REQUIRE_THROWS_WITH(open_data(source, 16, 1), Catch::Contains("other classes"));
  // One that ends early is no grey image, but an error that names it.
  fs::resize_file(directory.path() / "train" / "red" / "2.jpeg",
                  fs::file_size(directory.path() / "train" / "red" / "2.jpeg") / 2);
  REQUIRE_THROWS_WITH(sets.train->get(2, 0), Catch::Contains("2.jpeg"));
}

TEST_CASE("resnet50_ps: workers have disjoint batches, each epoch in another order") {
  const temporary_directory directory;
  std::vector<unsigned char> bytes;
  for (int i = 0; i < 12; ++i) {
    const auto more = record(i % 10, 20 * i, 20 * i, 20 * i);  // each with a sum of its own
    bytes.insert(bytes.end(), more.begin(), more.end());
  }
  for (const char* name : {"data_batch_1.bin", "test_batch.bin"}) write(directory.path() / name, bytes);
  const data_sets sets = open_data("cifar10:" + directory.path().string(), 0, 1);
  const auto epoch = [&](std::uint64_t first_step) {
    std::vector<float> shown;  // by their brightness
    for (std::uint64_t step = first_step; step < first_step + 2; ++step) {
      for (std::size_t worker = 0; worker < 2; ++worker) {
        const auto batch = batch_of_step(step, *sets.test, worker, 2, 3, 5);
        for (int i = 0; i < 3; ++i) shown.push_back(batch.data[i][0][0][0].item<float>());
      }
    }
    return shown;
  };
  const auto first = epoch(1), second = epoch(3);
  REQUIRE(std::set(first.begin(), first.end()).size() == 12);
  REQUIRE(std::set(first.begin(), first.end()) == std::set(second.begin(), second.end()));
  REQUIRE(first != second);
  REQUIRE(epoch(1) == first);
  REQUIRE_THROWS_WITH(batch_of_step(1, *sets.test, 0, 5, 3, 5), Catch::Contains("too few"));
}

TEST_CASE("resnet50_ps: synthetic images have classes that differ, and are the same each time") {
  const data_sets sets = open_data("synthetic", 0, 1), again = open_data("synthetic", 0, 1),
                  other = open_data("synthetic", 0, 2);
  REQUIRE(torch::equal(sets.train->get(17, 0).data, again.train->get(17, 3).data));
  REQUIRE_FALSE(torch::equal(sets.train->get(17, 0).data, other.train->get(17, 0).data));
  REQUIRE_FALSE(torch::equal(sets.train->get(17, 0).data, sets.test->get(17, 0).data));
  REQUIRE(sets.train->get(17, 0).target.item<int>() == 7);
  REQUIRE(std::abs(sets.train->get(17, 0).data.mean().item<double>()) < 0.7);
}
