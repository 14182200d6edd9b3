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
  virtual void accumulate(std::size_t layer, std::span<const float> gradient) = 0;
  /// The frame as one piece, valid until the next call.
  virtual std::span<const std::byte> encode() = 0;
  virtual void commit() = 0;
};

/// Each library's one function, make_worker: the caller deletes the worker.
using make_worker_function = worker*(std::span<const layer_description> model, double drop_ratio);
