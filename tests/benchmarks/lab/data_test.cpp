// SPDX-License-Identifier: MIT
#include "data.hpp"  // Torch defines CHECK, so its headers come before Catch2's.

#include "catch.hpp"

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "temporary_directory.hpp"

namespace {

using namespace lab;
using Catch::Matchers::Contains;

// Image i is a tensor of one element, i.
class numbered final : public image_set {
 public:
  explicit numbered(std::size_t images) : images_(images) {}
  std::size_t size() const override { return images_; }
  std::pair<torch::Tensor, std::int64_t> get(std::size_t index) const override {
    return {torch::full({1}, static_cast<float>(index)), static_cast<std::int64_t>(index % 10)};
  }

 private:
  std::size_t images_;
};

std::vector<int> numbers_of(const batch& images) {
  std::vector<int> numbers;
  for (std::int64_t i = 0; i < images.images.size(0); ++i) numbers.push_back(images.images[i].item<int>());
  return numbers;
}

std::vector<char> record(char label, std::uint8_t value) {
  std::vector<char> bytes(1 + 3 * 32 * 32, static_cast<char>(value));
  bytes[0] = label;
  return bytes;
}

void write(const std::filesystem::path& file, const std::vector<char>& bytes) {
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TEST_CASE("data: the workers' batches of an epoch are all images once, in another order in the next") {
  const auto images = std::make_shared<numbered>(24);
  std::vector<std::vector<int>> epochs;
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::multiset<int> seen;
    epochs.emplace_back();
    for (std::size_t w = 0; w < 3; ++w) {
      batches of_worker(images, {3, w}, 4, 7);
      for (std::uint64_t step = 1; step <= 2; ++step) {
        const batch each = of_worker.of(2 * static_cast<std::uint64_t>(epoch) + step);
        for (const int number : numbers_of(each)) {
          seen.insert(number);
          epochs.back().push_back(number);
        }
        REQUIRE(each.classes[0].item<int>() == numbers_of(each)[0] % 10);
      }
    }
    REQUIRE(seen.size() == 24);
    REQUIRE(std::set<int>(seen.begin(), seen.end()).size() == 24);
  }
  REQUIRE(epochs[0] != epochs[1]);
}

TEST_CASE("data: a batch depends on the seed and the step only") {
  const auto images = std::make_shared<numbered>(40);
  batches first(images, {1, 0}, 4, 7), again(images, {1, 0}, 4, 7), other(images, {1, 0}, 4, 8);
  static_cast<void>(first.of(1));
  static_cast<void>(first.of(30));
  REQUIRE(numbers_of(first.of(13)) == numbers_of(again.of(13)));
  REQUIRE(numbers_of(first.of(13)) != numbers_of(other.of(13)));
  REQUIRE_THROWS_WITH(batches(images, {11, 0}, 4, 7),
                      Contains("40 training images are too few for 11 workers"));
}

TEST_CASE("data: each image is evaluated by one worker, in a last batch that may be smaller") {
  const numbered images(11);
  std::vector<std::vector<int>> seen;
  for (std::size_t w = 0; w < 2; ++w)
    for_each_batch(images, {2, w}, 4, [&](const batch& each) { seen.push_back(numbers_of(each)); });
  REQUIRE(seen == std::vector<std::vector<int>>{{0, 2, 4, 6}, {8, 10}, {1, 3, 5, 7}, {9}});
}

TEST_CASE("data: synthetic images are drawn from the seed and the index, all classes alike") {
  const data_sets one = open_data("synthetic", 0, 1), same = open_data("synthetic", 0, 1),
                  other = open_data("synthetic", 0, 2);
  REQUIRE(one.train->size() == 20'000);
  REQUIRE(one.test->size() == 2'000);
  const auto [image, label] = one.train->get(13);
  REQUIRE(label == 3);
  REQUIRE(image.sizes() == torch::IntArrayRef({3, 32, 32}));
  REQUIRE(image.equal(same.train->get(13).first));
  REQUIRE(!image.equal(other.train->get(13).first));
  REQUIRE(!image.equal(one.test->get(13).first));
  REQUIRE(open_data("synthetic", 16, 1).train->get(0).first.size(1) == 16);
}

TEST_CASE("data: CIFAR-10 is read, scaled and resized; what is damaged is named") {
  const temporary_directory directory;
  const std::string source = "cifar10:" + directory.path().string();
  REQUIRE_THROWS_WITH(open_data(source, 0, 1), Contains("has none of data_batch_1.bin"));
  std::vector<char> two = record(3, 255);
  const std::vector<char> black = record(9, 0);
  two.insert(two.end(), black.begin(), black.end());
  write(directory.path() / "data_batch_2.bin", two);
  REQUIRE_THROWS_WITH(open_data(source, 0, 1), Contains("test_batch.bin"));
  write(directory.path() / "test_batch.bin", black);
  const data_sets data = open_data(source, 0, 1);
  REQUIRE(data.train->size() == 2);
  const auto [white, label] = data.train->get(0);
  REQUIRE(label == 3);
  REQUIRE(white[0][0][0].item<float>() == Approx((1 - 0.4914) / 0.2470));
  REQUIRE(data.train->get(1).second == 9);
  REQUIRE(open_data(source, 64, 1).train->get(0).first.sizes() == torch::IntArrayRef({3, 64, 64}));
  write(directory.path() / "test_batch.bin", {1, 2, 3});
  REQUIRE_THROWS_WITH(open_data(source, 0, 1), Contains("has 3 bytes"));
  write(directory.path() / "test_batch.bin", record(10, 0));
  REQUIRE_THROWS_WITH(open_data(source, 0, 1), Contains("has a label of 10"));
  REQUIRE_THROWS_WITH(open_data("mnist", 0, 1), Contains("neither cifar10:DIR nor synthetic"));
}

}  // namespace
