// SPDX-License-Identifier: MIT
// Frames kept as files: each is written again bitwise, and decodes to the same elements, for ever. The table golden/frames.txt says
// what they are. With LAMINA_WRITE_GOLDEN_FRAMES=1 in the environment the first test writes the files that the table names and that
// are missing; it never writes one anew.
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "support.hpp"

namespace lamina_test::golden_frames_test {

using lamina::payload_type;

namespace {

using bytes = std::vector<std::byte>;
namespace fs = std::filesystem;

const fs::path directory = LAMINA_GOLDEN_DIRECTORY;

// A line "frame", "special" or "size".
struct golden_row {
  std::string file, model = "special", present = "all";
  bool is_double = false;
  lamina::frame_header header;
  std::size_t header_bytes = 0, bytes = 0;
  std::uint64_t fingerprint = 0;
  std::uint32_t run = 0;
  std::vector<std::byte> user;
  std::vector<std::string> means;  // of one that no encoder writes
};

struct golden_table {
  std::map<std::string, std::vector<lamina::layer>> models;
  std::vector<golden_row> frames, specials, sizes;
};

std::size_t place_of(const std::string& word, const std::vector<std::string>& names) {
  const auto found = std::ranges::find(names, word);
  INFO(word);
  REQUIRE(found != names.end());
  return static_cast<std::size_t>(found - names.begin());
}

lamina::layer layer_of(std::istream&& words) {
  lamina::layer made;
  std::string shape;
  words >> made.name >> shape;
  std::istringstream extents(shape);
  for (std::size_t extent; extents >> extent; extents.ignore()) made.shape.push_back(extent);
  return made;
}

golden_row row_of(const std::string& kind, std::istream& words) {
  golden_row row;
  std::string frame_kind = "gradients", elements, payload, checksum, place = "last", user = "-";
  if (kind == "frame") {
    words >> row.file >> row.model >> frame_kind >> elements >> payload >> checksum >> row.header.step >>
        row.header.sender >> row.present >> row.bytes >> std::hex >> row.fingerprint >> std::dec;
    words >> row.run >> row.header.sequence >> place >> user;
  } else if (kind == "special") {
    words >> row.file >> elements >> payload >> row.bytes;
  } else {
    words >> row.model >> elements >> payload >> row.present >> row.header_bytes >> row.bytes >> std::hex >>
        row.fingerprint;
  }
  row.header.kind =
      static_cast<lamina::frame_kind>(1U << place_of(frame_kind, {"gradients", "parameters", "updates"}));
  row.is_double = place_of(elements, {"float", "double"}) == 1;
  row.header.payload = static_cast<payload_type>(
      place_of(payload, {"as_is", "binary16", "bfloat16", "int8", "int4", "ternary"}));
  if (checksum == "none") row.header.checksum = lamina::frame_checksum::none;
  row.header.is_last = place_of(place, {"more", "last"}) == 1;
  for (std::size_t i = 0; user != "-" && i < user.size(); i += 2)
    row.user.push_back(static_cast<std::byte>(std::stoul(user.substr(i, 2), nullptr, 16)));
  return row;
}

const golden_table& table() {
  static const golden_table read = [] {
    golden_table made;
    std::vector<lamina::layer>* layers = nullptr;
    std::ifstream file(directory / "frames.txt");
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string kind, name;
      std::size_t count = 0;
      if (!(words >> kind) || kind == "#" || kind == "payload") continue;
      if (kind == "model") {
        words >> name;
        layers = &made.models[name];
      } else if (kind == "layer") {
        layers->push_back(layer_of(std::move(words)));
      } else if (kind == "layers") {
        words >> count;
        const lamina::layer one = layer_of(std::move(words));
        for (std::size_t l = 0; l < count; ++l) layers->push_back({one.name + std::to_string(l), one.shape});
      } else if (kind == "file") {
        words >> name;
        std::ifstream other(directory / name);
        while (std::getline(other, line))
          if (!line.starts_with('#')) layers->push_back(layer_of(std::istringstream(line)));
      } else if (kind == "means") {
        made.specials.back().means.assign(std::istream_iterator<std::string>(words), {});
      } else {
        auto& rows = kind == "frame" ? made.frames : kind == "special" ? made.specials : made.sizes;
        rows.push_back(row_of(kind, words));
      }
    }
    return made;
  }();
  return read;
}

lamina::selection selection_of(const lamina::layout& model, const std::string& present) {
  lamina::selection chosen(model);
  if (present == "all") chosen.send_all();
  std::istringstream text(present);
  for (std::size_t l; text >> l; text.ignore()) chosen.send(l);
  return chosen;
}

bytes contents_of(const std::string& file) {
  std::ifstream stream(directory / "frames" / file, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto all = std::as_bytes(std::span(text));
  return {all.begin(), all.end()};
}

// The formula that the table gives.
template <class T>
std::vector<T> golden_elements(std::size_t layer, std::size_t count, payload_type type) {
  const int most = type == payload_type::int4 ? 7 : 127;
  const bool is_ternary = type == payload_type::ternary;
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const int k =
        is_ternary
            ? (i % 64 % 3 == 0        ? 0
               : (i + layer) % 2 == 0 ? 1
                                      : -1)
            : static_cast<int>((37 * i + 101 * layer + 11) % (2 * static_cast<std::size_t>(most) + 1)) - most;
    values[i] = std::ldexp(static_cast<T>(k), static_cast<int>((layer + i / 64) % 8) - 4);
  }
  return values;
}

template <class T>
void check_frame(const golden_row& row, const lamina::layout& model) {
  lamina::frame_encoder<T> encoder(model, row.run);
  std::vector<std::vector<T>> layers;
  for (std::size_t l = 0; l < model.layers(); ++l)
    layers.push_back(golden_elements<T>(l, model.sizes()[l], row.header.payload));
  lamina::frame_header header = row.header;
  header.user = row.user;
  const lamina::selection chosen = selection_of(model, row.present);
  const bytes written =
      encoder.encode(header, chosen, [&](std::size_t l) { return std::span<const T>(layers[l]); }).to_bytes();
  const fs::path path = directory / "frames" / row.file;
  if (!fs::exists(path)) {
    REQUIRE(std::getenv("LAMINA_WRITE_GOLDEN_FRAMES") != nullptr);
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(written.data()), static_cast<std::streamsize>(written.size()));
    WARN("written: " << row.file);
  }
  const bytes frame = contents_of(row.file);
  CHECK(frame.size() == row.bytes);
  CHECK((frame == written));
  const auto view = lamina::decode<T>(frame, model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::vector<T> out(model.sizes()[l]);
    if (view.apply_to(l, out)) CHECK(same_bits(out, layers[l]));
    CHECK(view.is_dropped(l) == chosen.is_dropped(l));
  }
}

template <class T>
void check_special(const golden_row& row, const lamina::layout& model) {
  const bytes frame = contents_of(row.file);
  CHECK(frame.size() == row.bytes);
  const auto view = lamina::decode<T>(frame, model);
  REQUIRE(row.means.size() == model.elements());
  for (std::size_t i = 0; i < model.elements(); ++i) {
    std::vector<T> out(3);
    view.restore(i / 3, out);
    const T read = out[i % 3];
    const T expected = static_cast<T>(std::strtod(row.means[i].c_str(), nullptr));
    CAPTURE(i, row.means[i], read);
    CHECK((std::isnan(expected) ? std::isnan(read) : same_bits(std::array{expected}, std::array{read})));
  }
}

template <class T>
void check_size(const golden_row& row, const lamina::layout& model) {
  // All layers lie in the memory of the largest.
  const std::vector<T> elements(*std::ranges::max_element(model.sizes()));
  lamina::frame_encoder<T> encoder(model);
  const auto layer = [&](std::size_t l) { return std::span(elements).first(model.sizes()[l]); };
  const auto& frame =
      encoder.encode({.payload = row.header.payload}, selection_of(model, row.present), layer);
  CHECK(frame.segments()[0].size() == row.header_bytes);
  CHECK(frame.size_bytes() == row.bytes);
  if (row.present == "all") CHECK(lamina::largest_frame_bytes<T>(model, row.header.payload) == row.bytes);
}

void for_each_row(const std::vector<golden_row>& rows, const auto& of_float, const auto& of_double) {
  for (const golden_row& row : rows) {
    INFO(row.file << row.model << ", payload type " << static_cast<int>(row.header.payload));
    const lamina::layout model(table().models.at(row.model));
    if (row.fingerprint != 0) CHECK(model.fingerprint() == row.fingerprint);
    row.is_double ? of_double(row, model) : of_float(row, model);
  }
}

}  // namespace

TEST_CASE("golden frames: are written again bitwise, and decode to the elements of the formula") {
  for_each_row(table().frames, check_frame<float>, check_frame<double>);
}

TEST_CASE("golden frames: decode to what payloads mean that no encoder writes") {
  for_each_row(table().specials, check_special<float>, check_special<double>);
}

TEST_CASE("golden frames: sizes of larger models") {
  for_each_row(table().sizes, check_size<float>, check_size<double>);
}

}  // namespace lamina_test::golden_frames_test
