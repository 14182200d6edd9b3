// SPDX-License-Identifier: MIT
#pragma once

#include <torch/data/example.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "data/data.hpp"

namespace lab {

/// Which part of a data set one worker reads. The shards of the workers are disjoint in each epoch.
struct shard {
  std::size_t workers = 1;
  std::size_t worker = 0;
};

/// Endless batches of one worker's shard, shuffled anew in each epoch. Deterministic for a seed.
class batch_stream {
 public:
  using batch = torch::data::Example<>;  // data: B x 3 x H x W, target: B classes

  /// How much was taken: epochs begun, and batches of the last of them.
  struct position {
    std::uint64_t epochs = 0;
    std::uint64_t batches = 0;
  };

  /// Goes on from `begin`. Throws std::invalid_argument if the shard holds no whole batch.
  batch_stream(std::shared_ptr<image_set> images, shard part, std::size_t batch_images, std::uint64_t seed,
               position begin);
  batch_stream(std::shared_ptr<image_set> images, shard part, std::size_t batch_images, std::uint64_t seed)
      : batch_stream(std::move(images), part, batch_images, seed, position()) {}
  ~batch_stream();

  batch next();
  position taken() const { return taken_; }

 private:
  struct epoch;
  void begin_epoch(std::uint64_t index, std::uint64_t skipped_batches);

  std::shared_ptr<image_set> images_;
  shard part_;
  std::size_t batch_images_;
  std::uint64_t seed_;
  position taken_;
  std::unique_ptr<epoch> epoch_;
};

/// Calls `consume` with each batch of the shard once, in order, the last batch possibly smaller.
void for_each_batch(std::shared_ptr<image_set> images, shard part, std::size_t batch_images,
                    const std::function<void(const batch_stream::batch&)>& consume);

}  // namespace lab
