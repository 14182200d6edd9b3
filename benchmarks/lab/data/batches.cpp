// SPDX-License-Identifier: MIT
#include "data/batches.hpp"

#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/shared.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lab {
namespace {

using shared_images = torch::data::datasets::SharedBatchDataset<image_set>;

template <class Sampler>
auto make_loader(std::shared_ptr<image_set> images, Sampler sampler, std::size_t batch_images,
                 bool drop_last) {
  return torch::data::make_data_loader(
      shared_images(std::move(images)).map(torch::data::transforms::Stack<>()), std::move(sampler),
      torch::data::DataLoaderOptions(batch_images).drop_last(drop_last));
}

// One shuffled epoch of a shard without its first images, as indices that also say the visit; see image_set.
class epoch_sampler : public torch::data::samplers::Sampler<> {
 public:
  epoch_sampler(std::size_t images, shard part, std::uint64_t shuffle, std::uint64_t visit,
                std::size_t skipped_images)
      : shuffled_(images, part.workers, part.worker, /*allow_duplicates=*/false),
        first_index_(visit * images),
        skipped_images_(skipped_images) {
    shuffled_.set_epoch(shuffle);  // what it shuffles by; the same for all workers, or shards would overlap
    reset();
  }
  void reset(torch::optional<std::size_t> size = torch::nullopt) final {
    shuffled_.reset(size);
    if (skipped_images_ > 0) shuffled_.next(skipped_images_);
  }
  torch::optional<std::vector<std::size_t>> next(std::size_t count) final {
    auto indices = shuffled_.next(count);
    if (indices) {
      for (std::size_t& index : *indices) index += first_index_;
    }
    return indices;
  }
  void save(torch::serialize::OutputArchive& archive) const final { shuffled_.save(archive); }
  void load(torch::serialize::InputArchive& archive) final { shuffled_.load(archive); }

 private:
  torch::data::samplers::DistributedRandomSampler shuffled_;
  std::size_t first_index_;
  std::size_t skipped_images_;
};

using training_loader = decltype(make_loader(nullptr, std::declval<epoch_sampler>(), 1, true));
using training_iterator = decltype(std::declval<training_loader>()->begin());

}  // namespace

struct batch_stream::epoch {
  explicit epoch(training_loader each) : loader(std::move(each)), at(loader->begin()) {}
  training_loader loader;
  training_iterator at;
  bool at_was_taken = false;
};

batch_stream::batch_stream(std::shared_ptr<image_set> images, shard part, std::size_t batch_images,
                           std::uint64_t seed, position begin)
    : images_(std::move(images)), part_(part), batch_images_(batch_images), seed_(seed), taken_(begin) {
  const std::size_t shard_images = images_->size().value() / part.workers;
  if (shard_images < batch_images) {
    throw std::invalid_argument(std::to_string(images_->size().value()) +
                                " training images are too few for " + std::to_string(part.workers) +
                                " workers with batches of " + std::to_string(batch_images));
  }
  if (begin.epochs > 0) begin_epoch(begin.epochs - 1, begin.batches);
}

batch_stream::~batch_stream() = default;

void batch_stream::begin_epoch(std::uint64_t index, std::uint64_t skipped_batches) {
  // Seeds that differ in any epoch or run: epochs of one run must not repeat the next run's.
  const epoch_sampler sampler(images_->size().value(), part_, seed_ * 1'000'003 + index, index,
                              skipped_batches * batch_images_);
  epoch_ = std::make_unique<epoch>(make_loader(images_, sampler, batch_images_, /*drop_last=*/true));
}

batch_stream::batch batch_stream::next() {
  if (epoch_ && epoch_->at_was_taken) ++epoch_->at;  // not before: it reads the next batch
  if (!epoch_ || epoch_->at == epoch_->loader->end()) {
    begin_epoch(taken_.epochs, 0);
    taken_ = {taken_.epochs + 1, 0};
  }
  epoch_->at_was_taken = true;
  ++taken_.batches;
  return *epoch_->at;
}

void for_each_batch(std::shared_ptr<image_set> images, shard part, std::size_t batch_images,
                    const std::function<void(const batch_stream::batch&)>& consume) {
  torch::data::samplers::DistributedSequentialSampler sampler(images->size().value(), part.workers,
                                                              part.worker,
                                                              /*allow_duplicates=*/false);
  const auto loader = make_loader(std::move(images), std::move(sampler), batch_images, /*drop_last=*/false);
  for (const auto& batch : *loader) consume(batch);
}

}  // namespace lab
