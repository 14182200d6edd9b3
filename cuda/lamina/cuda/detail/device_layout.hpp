// SPDX-License-Identifier: MIT
#pragma once

#include <thrust/device_vector.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "lamina/cuda/detail/step.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/layout.hpp"
#include "lamina/residual/blocks.hpp"

namespace lamina::inline LAMINA_ABI::cuda::detail {

/// The tables of a model in device memory: where its layers and their blocks are.
class device_layout {
 public:
  /// Allocates on the current device. Throws std::invalid_argument for 2^32 layers or more.
  explicit device_layout(const layout& model) : elements_(model.elements()) {
    if (model.layers() > std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("2^32 layers or more are not on the device");
    }
    const lamina::detail::layer_blocks blocks(model);
    std::vector<std::size_t> first_block = {0};
    std::vector<std::uint32_t> layer_of_block;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      first_block.push_back(blocks.first(l + 1));
      layer_of_block.insert(layer_of_block.end(), blocks.first(l + 1) - blocks.first(l),
                            static_cast<std::uint32_t>(l));
      offset_of_.push_back(padded_elements_);
      // So that each layer begins where 16 bytes can be loaded at once.
      padded_elements_ += (model.sizes()[l] + lanes - 1) / lanes * lanes;
    }
    sizes_.assign(model.sizes().begin(), model.sizes().end());
    offsets_ = offset_of_;
    first_block_ = first_block;
    layer_of_block_ = layer_of_block;
    block_totals_.resize(blocks.count());
    arrivals_.resize(blocks.count() + 1);
  }

  /// Where layer l begins in a buffer of padded_elements(), on the host.
  std::size_t offset(std::size_t layer) const { return offset_of_.at(layer); }
  std::size_t padded_elements() const noexcept { return padded_elements_; }
  std::size_t blocks() const noexcept { return layer_of_block_.size(); }

  /// The tables alone; the memory of a residual is the caller's to fill in.
  template <class T>
  model_view<T> view() {
    model_view<T> at;
    at.layers = sizes_.size();
    at.blocks = layer_of_block_.size();
    at.elements = elements_;
    at.sizes = sizes_.data().get();
    at.offsets = offsets_.data().get();
    at.first_block = first_block_.data().get();
    at.layer_of_block = layer_of_block_.data().get();
    at.block_totals = block_totals_.data().get();
    at.arrivals = arrivals_.data().get();
    return at;
  }

 private:
  std::size_t elements_;
  std::size_t padded_elements_ = 0;
  std::vector<std::size_t> offset_of_;
  thrust::device_vector<std::size_t> sizes_;
  thrust::device_vector<std::size_t> offsets_;
  thrust::device_vector<std::size_t> first_block_;
  thrust::device_vector<std::uint32_t> layer_of_block_;
  thrust::device_vector<double> block_totals_;
  thrust::device_vector<std::uint32_t> arrivals_;
};

}  // namespace lamina::inline LAMINA_ABI::cuda::detail
