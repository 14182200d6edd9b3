// SPDX-License-Identifier: MIT
// The golden packets and control messages: read for ever, and written so. tests/golden/readers_test.py reads them as well.
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::golden_packets_test {

using bounded::packet_header;

namespace {

using bytes = std::vector<std::byte>;

const std::string directory = LAMINA_GOLDEN_DIRECTORY;

struct golden_packet {
  std::string file;
  std::uint64_t secret = 0;
  bool is_double = false;
  payload_type payload{};
  packet_header header;
  std::size_t count = 0;
};
struct golden_control {
  std::string file;
  std::uint64_t secret = 0;
  bounded::control_header header;
  bytes body;
};
struct golden_table {
  std::vector<golden_packet> packets;
  std::vector<golden_control> controls;
};

golden_packet packet_of(std::istream& words) {
  golden_packet row;
  std::string elements, payload;
  unsigned flags = 0, tag = 0;
  packet_header& header = row.header;
  words >> row.file >> std::hex >> row.secret >> std::dec >> elements >> payload >> flags >> tag >>
      header.sender >> header.receiver >> header.transfer >> header.fragment >> header.chunk >>
      header.chunks >> header.transmission >> header.offset >> row.count >> header.sent_at;
  header.flags = static_cast<std::uint8_t>(flags);
  header.tag = static_cast<std::uint8_t>(tag);
  row.is_double = elements == "double";
  row.payload = payload == "as_is"      ? payload_type::as_is
                : payload == "binary16" ? payload_type::float16
                : payload == "bfloat16" ? payload_type::bfloat16
                                        : payload_type::int8;
  header.data_bytes =
      static_cast<std::uint32_t>(row.is_double ? lamina::payload_bytes<double>(row.payload, row.count)
                                               : lamina::payload_bytes<float>(row.payload, row.count));
  return row;
}
golden_control control_of(std::istream& words) {
  golden_control row;
  std::string body;
  unsigned type = 0;
  words >> row.file >> std::hex >> row.secret >> std::dec >> type >> row.header.transfer >>
      row.header.round >> body;
  row.header.type = static_cast<bounded::control_type>(type);
  for (std::size_t i = 0; body != "-" && i < body.size(); i += 2) {
    row.body.push_back(static_cast<std::byte>(std::stoul(body.substr(i, 2), nullptr, 16)));
  }
  row.header.body_bytes = static_cast<std::uint32_t>(row.body.size());
  return row;
}

const golden_table& table() {
  static const golden_table read = [] {
    golden_table rows;
    std::ifstream file(directory + "/packets.txt");
    for (std::string line; std::getline(file, line);) {
      std::istringstream words(line);
      std::string kind;
      words >> kind;
      if (kind == "packet") rows.packets.push_back(packet_of(words));
      if (kind == "control") rows.controls.push_back(control_of(words));
      REQUIRE(((kind != "packet" && kind != "control") || words));
    }
    return rows;
  }();
  return read;
}

bytes contents_of(const std::string& name) {
  std::ifstream file(directory + "/packets/" + name, std::ios::binary);
  REQUIRE(file.is_open());
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto all = std::as_bytes(std::span(text));
  return {all.begin(), all.end()};
}

template <class T>
bytes data_of(const golden_packet& row) {
  std::vector<T> elements;
  for (std::size_t k = 0; k < row.count; ++k) {
    const std::size_t i = static_cast<std::size_t>(row.header.offset) + k;
    const auto fragment = row.header.fragment;
    const auto integer = static_cast<int>((37 * i + 101 * std::size_t{fragment} + 11) % 255) - 127;
    elements.push_back(static_cast<T>(std::ldexp(integer, static_cast<int>((fragment + i / 64) % 8) - 4)));
  }
  bytes data(row.header.data_bytes);
  if (row.payload == payload_type::as_is) {
    if (row.count > 0) std::memcpy(data.data(), elements.data(), data.size());
  } else {
    lamina::detail::encode_payload<T>(row.payload, elements, data.data());
  }
  return data;
}

bytes written(const golden_packet& row) {
  bounded::keyed_check check(row.secret);
  const bytes data = row.is_double ? data_of<double>(row) : data_of<float>(row);
  const auto header = bounded::write_packet_header(row.header, {data, {}}, check);
  bytes all(header.begin(), header.end());
  all.insert(all.end(), data.begin(), data.end());
  return all;
}
bytes written(const golden_control& row) {
  bounded::control_writer writer(row.secret, row.body.size());
  writer.put(row.body);
  const auto all = writer.finish(row.header.type, row.header.transfer, row.header.round);
  return {all.begin(), all.end()};
}

}  // namespace

TEST_CASE("golden packets: every packet is written so") {
  REQUIRE(table().packets.size() > 5);
  for (const golden_packet& row : table().packets) {
    INFO(row.file);
    CHECK(written(row) == contents_of(row.file));
  }
}

TEST_CASE("golden packets: every packet is read so") {
  for (const golden_packet& row : table().packets) {
    INFO(row.file);
    const bytes all = contents_of(row.file);
    std::error_code error;
    packet_header header = bounded::read_packet_header(all, error);
    CHECK_FALSE(error);
    bounded::keyed_check check(row.secret);
    CHECK(bounded::has_good_check(all, check));
    header.check = 0;
    CHECK(std::memcmp(&header, &row.header, sizeof header) == 0);
  }
}

TEST_CASE("golden packets: every control message is written and read so") {
  REQUIRE(table().controls.size() > 4);
  const bounded::control_limits limits(
      bounded::chunk_grid::of<float>(model_of({8, 8, 8, 32}), payload_type::as_is, 8));
  for (const golden_control& row : table().controls) {
    INFO(row.file);
    const bytes all = contents_of(row.file);
    CHECK(written(row) == all);
    bounded::keyed_check check(row.secret);
    std::error_code error;
    bounded::control_message read = bounded::read_control(all, limits, check, error);
    CHECK_FALSE(error);
    CHECK(same_bits(read.body, row.body));
    read.header.check = 0;
    CHECK(std::memcmp(&read.header, &row.header, sizeof read.header) == 0);
  }
}

}  // namespace lamina_test::golden_packets_test
