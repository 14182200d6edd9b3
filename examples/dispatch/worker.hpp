// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

// What the program and its libraries share. Nothing of lamina's is in it: its types have another name in each of them.

struct layer_description {
  std::string_view name;
  std::size_t elements;
};

class worker {
 public:
  virtual ~worker() = default;
  /// The frame of a step with these gradients, as one piece, valid until the next call.
  virtual std::span<const std::byte> add(std::span<const std::span<const float>> gradients) = 0;
  /// It has arrived.
  virtual void commit() = 0;
};

/// Each library's one function, make_worker: the caller deletes the worker.
using make_worker_function = worker*(std::span<const layer_description> model, double drop_ratio);
