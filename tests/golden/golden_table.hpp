// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <ios>
#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "lamina/codec.hpp"

/// tests/golden/frames.txt, whose first lines say what its words are.
namespace lamina_test {

using words = std::vector<std::string>;

struct golden_frame {
  std::string file;
  std::string model;
  lamina::frame_kind kind;
  bool is_double;
  lamina::payload_type payload;
  bool has_checksum;
  std::uint64_t step;
  std::uint32_t sender;
  std::string present;
  std::size_t bytes;
  std::uint64_t fingerprint;
  std::uint32_t run;
  std::uint16_t sequence = 0;
  bool is_last = true;
  std::vector<std::byte> user{};
};

struct special_frame {
  std::string file;
  bool is_double;
  lamina::payload_type payload;
  std::size_t bytes;
  words written;
  words means;
};

struct golden_size {
  std::string model;
  bool is_double;
  lamina::payload_type payload;
  std::string present;
  std::size_t header_bytes;
  std::size_t bytes;
  std::uint64_t fingerprint;
};

struct golden_table {
  std::map<std::string, std::vector<lamina::layer>> models;
  std::vector<golden_frame> frames;
  std::vector<special_frame> specials;
  std::vector<golden_size> sizes;

  lamina::layout layout_of(const std::string& model) const { return lamina::layout(models.at(model)); }
};

/// The position of a word in a list, which is what it stands for.
inline std::size_t meaning_of(const std::string& word, const words& names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == word) return i;
  }
  throw std::runtime_error("unknown word in the table of golden frames: " + word);
}
inline lamina::payload_type payload_named(const std::string& word) {
  return static_cast<lamina::payload_type>(
      meaning_of(word, {"as_is", "binary16", "bfloat16", "int8", "int4"}));
}
inline lamina::frame_kind kind_named(const std::string& word) {
  return static_cast<lamina::frame_kind>(1 << meaning_of(word, {"gradients", "parameters", "updates"}));
}

/// "64x3x7x7", or nothing.
inline std::vector<std::size_t> shape_of(const std::string& word) {
  std::vector<std::size_t> shape;
  std::istringstream text(word);
  for (std::size_t extent; text >> extent; text.ignore()) shape.push_back(extent);
  return shape;
}

inline std::vector<words> lines_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<words> lines;
  for (std::string line; std::getline(file, line);) {
    std::istringstream text(line);
    words all{std::istream_iterator<std::string>(text), {}};
    if (!all.empty() && all.front() != "#") lines.push_back(std::move(all));
  }
  return lines;
}

/// `directory` is where frames.txt lies.
inline golden_table read_golden_table(const std::string& directory) {
  golden_table table;
  std::vector<lamina::layer>* layers = nullptr;
  const auto is_double = [](const std::string& word) { return meaning_of(word, {"float", "double"}) == 1; };
  for (const words& w : lines_of(directory + "/frames.txt")) {
    if (w[0] == "model") {
      layers = &table.models[w.at(1)];
    } else if (w[0] == "layer") {
      layers->push_back({w.at(1), shape_of(w.size() > 2 ? w[2] : "")});
    } else if (w[0] == "layers") {
      const std::size_t count = std::stoul(w.at(1));
      for (std::size_t l = 0; l < count; ++l) {
        layers->push_back({w.at(2) + std::to_string(l), shape_of(w.at(3))});
      }
    } else if (w[0] == "file") {
      for (const words& line : lines_of(directory + "/" + w.at(1))) {
        layers->push_back({line[0], shape_of(line.size() > 1 ? line[1] : "")});
      }
    } else if (w[0] == "frame") {
      table.frames.push_back({w.at(1), w.at(2), kind_named(w.at(3)), is_double(w.at(4)),
                              payload_named(w.at(5)), meaning_of(w.at(6), {"none", "xxh3"}) == 1,
                              std::stoull(w.at(7)), static_cast<std::uint32_t>(std::stoul(w.at(8))), w.at(9),
                              std::stoul(w.at(10)), std::stoull(w.at(11), nullptr, 16),
                              w.size() > 12 ? static_cast<std::uint32_t>(std::stoul(w[12])) : 0});
      golden_frame& frame = table.frames.back();
      if (w.size() > 13) {
        frame.sequence = static_cast<std::uint16_t>(std::stoul(w[13]));
        frame.is_last = meaning_of(w.at(14), {"more", "last"}) == 1;
        for (std::size_t i = 0; w.at(15) != "-" && i < w[15].size(); i += 2)
          frame.user.push_back(static_cast<std::byte>(std::stoul(w[15].substr(i, 2), nullptr, 16)));
      }
    } else if (w[0] == "special") {
      table.specials.push_back(
          {w.at(1), is_double(w.at(2)), payload_named(w.at(3)), std::stoul(w.at(4)), {}, {}});
    } else if (w[0] == "payload") {
      table.specials.back().written.assign(w.begin() + 1, w.end());
    } else if (w[0] == "means") {
      table.specials.back().means.assign(w.begin() + 1, w.end());
    } else if (w[0] == "size") {
      table.sizes.push_back({w.at(1), is_double(w.at(2)), payload_named(w.at(3)), w.at(4),
                             std::stoul(w.at(5)), std::stoul(w.at(6)), std::stoull(w.at(7), nullptr, 16)});
    } else {
      throw std::runtime_error("unknown line in the table of golden frames: " + w[0]);
    }
  }
  return table;
}

/// "none", "all", or the indices of the layers as 0,3,5.
inline lamina::selection selection_of(const lamina::layout& model, const std::string& present) {
  lamina::selection chosen(model);
  if (present == "all") {
    chosen.send_all();
  } else if (present != "none") {
    std::istringstream text(present);
    for (std::size_t l; text >> l; text.ignore()) chosen.send(l);
  }
  return chosen;
}

}  // namespace lamina_test
