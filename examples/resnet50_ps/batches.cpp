// SPDX-License-Identifier: MIT
#include "batches.hpp"

#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/shared.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>

#include <stdexcept>
#include <string>

namespace resnet50_ps {
namespace {

using shared_images = torch::data::datasets::SharedBatchDataset<image_set>;

template <class Sampler>
auto make_loader(std::shared_ptr<image_set> images, Sampler sampler, std::size_t batch_images,
                 bool drop_last) {
  return torch::data::make_data_loader(
      shared_images(std::move(images)).map(torch::data::transforms::Stack<>()), std::move(sampler),
      torch::data::DataLoaderOptions(batch_images).drop_last(drop_last));
}

auto make_training_loader(const std::shared_ptr<image_set>& images, shard part, std::size_t batch_images,
                          std::uint64_t seed) {
  torch::data::samplers::DistributedRandomSampler sampler(images->size().value(), part.workers, part.worker,
                                                          /*allow_duplicates=*/false);
  sampler.set_epoch(seed);  // what the sampler shuffles by; the same for all workers, or shards would overlap
  return make_loader(images, std::move(sampler), batch_images, /*drop_last=*/true);
}

using training_loader = decltype(make_training_loader(nullptr, {}, 1, 0));
using training_iterator = decltype(std::declval<training_loader>()->begin());

}  // namespace

struct batch_stream::epoch {
  explicit epoch(training_loader each) : loader(std::move(each)), at(loader->begin()) {}
  training_loader loader;
  training_iterator at;
};

batch_stream::batch_stream(std::shared_ptr<image_set> images, shard part, std::size_t batch_images,
                           std::uint64_t seed)
    : images_(std::move(images)), part_(part), batch_images_(batch_images), seed_(seed) {
  const std::size_t shard_images = images_->size().value() / part.workers;
  if (shard_images < batch_images) {
    throw std::invalid_argument(std::to_string(images_->size().value()) +
                                " training images are too few for " + std::to_string(part.workers) +
                                " workers with batches of " + std::to_string(batch_images));
  }
}

batch_stream::~batch_stream() = default;

batch_stream::batch batch_stream::next() {
  if (!epoch_ || epoch_->at == epoch_->loader->end()) {
    // Seeds that differ in any epoch or run: epochs of one run must not repeat the next run's.
    const std::uint64_t shuffle = seed_ * 1'000'003 + epochs_++;
    epoch_ = std::make_unique<epoch>(make_training_loader(images_, part_, batch_images_, shuffle));
  } else {
    ++epoch_->at;
    if (epoch_->at == epoch_->loader->end()) return next();
  }
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

}  // namespace resnet50_ps
