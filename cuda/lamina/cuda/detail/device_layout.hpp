// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory_resource>
#include <stdexcept>
#include <vector>

#include "lamina/cuda/detail/device_array.hpp"
#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/residual/blocks.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The tables of a model in device memory: where its layers and their blocks are.
class device_layout {
 public:
  /// Allocates on the current device, from a resource unless that is null. Throws std::invalid_argument for 2^32 layers or more.
  explicit device_layout(const layout& model, std::pmr::memory_resource* memory = nullptr)
      : elements_(model.elements()),
        sizes_(memory, "tables"),
        offsets_(memory, "tables"),
        first_block_(memory, "tables"),
        places_(memory, "tables"),
        block_totals_(memory, "the totals of blocks"),
        arrivals_(memory, "the totals of blocks") {
    if (model.layers() > (std::numeric_limits<std::uint32_t>::max)()) {
      throw std::invalid_argument("2^32 layers or more are not on the device");
    }
    const lamina::detail::layer_blocks blocks(model);
    std::vector<std::size_t> first_block = {0};
    std::vector<block_place> places;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      first_block.push_back(blocks.first(l + 1));
      offset_of_.push_back(padded_elements_);
      for (std::size_t begin = 0; begin < model.sizes()[l]; begin += block_elements) {
        const std::size_t count = (std::min)(model.sizes()[l] - begin, block_elements);
        places.push_back(
            {static_cast<std::uint32_t>(l), static_cast<std::uint32_t>(count), padded_elements_ + begin});
      }
      // So that each layer begins where 16 bytes can be loaded at once.
      padded_elements_ += (model.sizes()[l] + lanes - 1) / lanes * lanes;
    }
    sizes_ = std::vector<std::size_t>(model.sizes().begin(), model.sizes().end());
    offsets_ = offset_of_;
    first_block_ = first_block;
    places_ = places;
    block_totals_.resize(blocks.count());
    arrivals_.resize(blocks.count() + 1);
  }

  /// Where layer l begins in a buffer of padded_elements(), on the host.
  std::size_t offset(std::size_t layer) const { return offset_of_.at(layer); }
  std::size_t padded_elements() const noexcept { return padded_elements_; }
  std::size_t blocks() const noexcept { return places_.size(); }

  /// The tables alone; the memory of a residual is the caller's to fill in.
  template <class T>
  model_view<T> view() {
    model_view<T> at;
    at.layers = sizes_.size();
    at.blocks = places_.size();
    at.elements = elements_;
    at.sizes = sizes_.data().get();
    at.offsets = offsets_.data().get();
    at.first_block = first_block_.data().get();
    at.places = places_.data().get();
    at.block_totals = block_totals_.data().get();
    at.arrivals = arrivals_.data().get();
    return at;
  }

 private:
  std::size_t elements_;
  std::size_t padded_elements_ = 0;
  std::vector<std::size_t> offset_of_;
  device_array<std::size_t> sizes_;
  device_array<std::size_t> offsets_;
  device_array<std::size_t> first_block_;
  device_array<block_place> places_;
  device_array<double> block_totals_;
  device_array<std::uint32_t> arrivals_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
