// SPDX-License-Identifier: MIT
#include "data/data.hpp"

#include <stdexcept>

namespace lab {

data_sets open_data(const std::string& source, const data_options& options) {
  if (options.image_size_pixels < 0) {
    throw std::invalid_argument("the image size is " + std::to_string(options.image_size_pixels) +
                                " pixels, but must be positive, or 0 for the data set's own");
  }
  const std::size_t colon = source.find(':');
  const std::string kind = source.substr(0, colon);
  const std::string directory = colon == std::string::npos ? "" : source.substr(colon + 1);
  if (source == "synthetic") return open_synthetic(options);
  if (kind == "cifar10" && !directory.empty()) return open_cifar10(directory, options);
  if (kind == "imagefolder" && !directory.empty()) return open_image_folder(directory, options);
  throw std::invalid_argument("the data source \"" + source +
                              "\" is none of cifar10:DIR, imagefolder:DIR and synthetic");
}

}  // namespace lab
