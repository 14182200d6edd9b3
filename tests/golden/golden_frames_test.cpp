// SPDX-License-Identifier: MIT
// Frames kept as files: each is written again to the last byte, and decodes to the same elements, for ever. The table
// golden/frames.txt says what they are. With LAMINA_WRITE_GOLDEN_FRAMES=1 in the environment the first test writes the
// files that the table names and that are missing; it never writes one anew.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "catch.hpp"
#include "golden/golden_table.hpp"
#include "lamina/codec.hpp"
#include "lamina/frame.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::payload_type;

namespace {

using bytes = std::vector<std::byte>;
namespace fs = std::filesystem;

const std::string directory = LAMINA_GOLDEN_DIRECTORY;

const golden_table& table() {
  static const golden_table read = read_golden_table(directory);
  return read;
}

fs::path path_of(const std::string& file) {
  return fs::path(directory) / "frames" / file;
}

bytes contents_of(const std::string& file) {
  std::ifstream stream(path_of(file), std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
  const auto all = std::as_bytes(std::span(text));
  return {all.begin(), all.end()};
}

// The formula that the table gives.
template <class T>
std::vector<T> golden_elements(std::size_t layer, std::size_t count, payload_type type) {
  const int most = type == payload_type::int4 ? 7 : 127;
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const int k =
        static_cast<int>((37 * i + 101 * layer + 11) % (2 * static_cast<std::size_t>(most) + 1)) - most;
    const int e = static_cast<int>((layer + i / 64) % 8) - 4;
    values[i] = std::ldexp(static_cast<T>(k), e);
  }
  return values;
}

// The checksum of a frame, or none.
void seal(bytes& frame, bool has_checksum) {
  lamina::detail::wire_header header = lamina::detail::read_header(frame);
  header.flags &= ~lamina::detail::flag_checksum;
  if (has_checksum) header.flags |= lamina::detail::flag_checksum;
  header.checksum = 0;
  std::memcpy(frame.data(), &header, sizeof header);
  if (!has_checksum) return;
  lamina::detail::checksum sum;
  sum.add(std::span(frame).first(lamina::detail::checksum_offset));
  sum.add(std::span(frame).subspan(lamina::detail::wire_header_bytes));
  header.checksum = sum.value();
  std::memcpy(frame.data(), &header, sizeof header);
}

// What the encoder writes. Its frames have a checksum if it can compute one: only then the others are made from them.
template <class T>
bytes encoded(const golden_frame& row) {
  const lamina::layout model = table().layout_of(row.model);
  std::vector<std::vector<T>> layers;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    layers.push_back(golden_elements<T>(l, model.sizes()[l], row.payload));
  }
  lamina::frame_encoder<T> encoder(model, row.run);
  const auto layer = [&](std::size_t l) { return std::span<const T>(layers[l]); };
  bytes frame = encoder
                    .encode({.kind = row.kind,
                             .step = row.step,
                             .sender = row.sender,
                             .payload = row.payload,
                             .sequence = row.sequence,
                             .is_last = row.is_last,
                             .user = row.user},
                            selection_of(model, row.present), layer)
                    .to_bytes();
  if (!row.has_checksum) seal(frame, false);
  return frame;
}

template <class T>
bytes encoded(const special_frame& row) {
  const lamina::layout model = table().layout_of("special");
  lamina::frame_encoder<T> encoder(model);
  const std::vector<T> zeros(3);
  const auto layer = [&](std::size_t) { return std::span<const T>(zeros); };
  bytes frame = encoder.encode({.payload = row.payload}, selection_of(model, "all"), layer).to_bytes();
  std::size_t place = 128;
  for (const std::string& word : row.written) {
    const std::uint64_t number = std::stoull(word, nullptr, 16);
    REQUIRE(place + word.size() / 2 <= frame.size());
    std::memcpy(frame.data() + place, &number, word.size() / 2);
    place += word.size() / 2;
  }
  REQUIRE(place == frame.size());
  seal(frame, true);
  return frame;
}

template <class Row>
void check_written_again(const Row& row, const bytes& frame) {
  CHECK(frame.size() == row.bytes);
  const bool same = frame == contents_of(row.file);
  CHECK(same);
}

template <class Row>
bytes encoded_as_its_type(const Row& row) {
  return row.is_double ? encoded<double>(row) : encoded<float>(row);
}

// Writes the file if it is missing and that is asked for.
template <class Row>
void provide(const Row& row) {
  if (fs::exists(path_of(row.file))) return;
  INFO("LAMINA_WRITE_GOLDEN_FRAMES=1 writes " << row.file);
  REQUIRE(std::getenv("LAMINA_WRITE_GOLDEN_FRAMES") != nullptr);
  const bytes frame = encoded_as_its_type(row);
  std::ofstream(path_of(row.file), std::ios::binary)
      .write(reinterpret_cast<const char*>(frame.data()), static_cast<std::streamsize>(frame.size()));
  WARN("written: " << row.file);
}

template <class T>
void check_decoded(const golden_frame& row) {
  const lamina::layout model = table().layout_of(row.model);
  CHECK(model.fingerprint() == row.fingerprint);
  const bytes frame = contents_of(row.file);
  const auto view = lamina::decode<T>(frame, model);
  CHECK(view.kind() == row.kind);
  CHECK(view.step() == row.step);
  CHECK(view.sender() == row.sender);
  CHECK(view.run() == row.run);
  CHECK(view.payload() == row.payload);
  CHECK(view.layers() == model.layers());
  std::error_code error;
  const lamina::frame_info info = lamina::peek(std::span(frame).first(lamina::peek_bytes), error);
  CHECK_FALSE(error);
  CHECK(info.size_bytes == row.bytes);
  CHECK(info.kind == row.kind);
  CHECK(info.payload == row.payload);
  CHECK(info.element_bytes == sizeof(T));
  CHECK(info.sender == row.sender);
  CHECK(info.run == row.run);
  CHECK(info.step == row.step);
  CHECK(info.fingerprint == row.fingerprint);
  CHECK(info.layers == model.layers());
  CHECK((view.sequence() == row.sequence && info.sequence == row.sequence));
  CHECK((view.is_last() == row.is_last && info.is_last == row.is_last));
  CHECK(std::ranges::equal(view.user(), row.user));
  const lamina::selection chosen = selection_of(model, row.present);
  bool all_same = true;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::vector<T> out(model.sizes()[l], T(77));
    all_same &= view.apply_to(l, out) == chosen.is_sent(l);
    const std::vector<T> expected = chosen.is_sent(l) ? golden_elements<T>(l, out.size(), row.payload)
                                                      : std::vector<T>(out.size(), T(77));
    all_same &= view.is_dropped(l) == chosen.is_dropped(l) && same_bits(out, expected);
  }
  CHECK(all_same);
}

template <class T>
void check_decoded(const special_frame& row) {
  const lamina::layout model = table().layout_of("special");
  const bytes frame = contents_of(row.file);
  const auto view = lamina::decode<T>(frame, model);
  REQUIRE(row.means.size() == model.elements());
  for (std::size_t l = 0; l < model.layers(); ++l) {
    std::vector<T> out(3);
    view.restore(l, out);
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::string& word = row.means[3 * l + i];
      CAPTURE(l, i, word, out[i]);
      const T expected = static_cast<T>(std::strtod(word.c_str(), nullptr));
      CHECK((std::isnan(expected) ? std::isnan(out[i])
                                  : same_bits(std::span(&expected, 1), std::span(&out[i], 1))));
    }
  }
}

template <class T>
void check_size(const golden_size& row) {
  const lamina::layout model = table().layout_of(row.model);
  CHECK(model.fingerprint() == row.fingerprint);
  // All layers lie in the memory of the largest.
  const std::vector<T> elements(*std::ranges::max_element(model.sizes()));
  lamina::frame_encoder<T> encoder(model);
  const auto layer = [&](std::size_t l) { return std::span(elements).first(model.sizes()[l]); };
  const auto& frame = encoder.encode({.payload = row.payload}, selection_of(model, row.present), layer);
  CHECK(frame.segments()[0].size() == row.header_bytes);
  CHECK(frame.size_bytes() == row.bytes);
  if (row.present == "all") CHECK(lamina::largest_frame_bytes<T>(model, row.payload) == row.bytes);
}

}  // namespace

TEST_CASE("golden frames: written again they are the same to the last byte") {
  const auto check = [](const auto& row) {
    INFO(row.file);
    provide(row);
    check_written_again(row, encoded_as_its_type(row));
  };
  for (const golden_frame& row : table().frames) check(row);
  for (const special_frame& row : table().specials) check(row);
}

TEST_CASE("golden frames: decode to the elements of the formula") {
  for (const golden_frame& row : table().frames) {
    INFO(row.file);
    row.is_double ? check_decoded<double>(row) : check_decoded<float>(row);
  }
}

TEST_CASE("golden frames: decode to what payloads mean that no encoder writes") {
  for (const special_frame& row : table().specials) {
    INFO(row.file);
    row.is_double ? check_decoded<double>(row) : check_decoded<float>(row);
  }
}

TEST_CASE("golden frames: sizes of larger models") {
  for (const golden_size& row : table().sizes) {
    INFO(row.model << ", payload type " << static_cast<int>(row.payload) << ", layers " << row.present);
    row.is_double ? check_size<double>(row) : check_size<float>(row);
  }
}

TEST_CASE("golden frames: the table names every file, and every kind with every type") {
  std::set<std::string> named;
  std::set<std::array<int, 3>> combinations;
  for (const golden_frame& row : table().frames) {
    named.insert(row.file);
    if (row.has_checksum) {
      combinations.insert({static_cast<int>(row.kind), row.is_double, static_cast<int>(row.payload)});
    }
  }
  for (const special_frame& row : table().specials) named.insert(row.file);
  CHECK(combinations.size() == 3 * 2 * 5);
  CHECK(named.size() == table().frames.size() + table().specials.size());
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(path_of("").parent_path())) {
    files.insert(entry.path().filename().string());
    CHECK(entry.file_size() < 2048);
  }
  CHECK(files == named);
}
