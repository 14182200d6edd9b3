// SPDX-License-Identifier: MIT
// The golden packets and control messages: read for ever, and written so. tests/golden/readers_test.py reads them as well.
#include <fstream>
#include <sstream>

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::golden_packets_test {

using bounded::packet_header;

namespace {

using bytes = std::vector<std::byte>;

const std::string directory = LAMINA_GOLDEN_DIRECTORY;

bytes contents_of(const std::string& name) {
  std::ifstream file(directory + "/packets/" + name, std::ios::binary);
  REQUIRE(file.is_open());
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return copy_of(std::as_bytes(std::span(text)));
}

// The rows of one kind; `take` gets the file, the secret and the words behind them.
template <class Take>
std::size_t for_each_row(const std::string& kind, const Take& take) {
  std::size_t rows = 0;
  std::ifstream table(directory + "/packets.txt");
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string first, file;
    std::uint64_t secret = 0;
    words >> first >> file >> std::hex >> secret >> std::dec;
    if (first != kind) continue;
    INFO(file);
    take(contents_of(file), secret, words);
    REQUIRE_FALSE(words.fail());
    ++rows;
  }
  return rows;
}

}  // namespace

// That their elements are written so, the golden frames say.
TEST_CASE("golden packets: every packet is written and read so") {
  const auto check_packet = [](const bytes& all, std::uint64_t secret, std::istream& words) {
    std::string elements, payload;
    unsigned flags = 0, tag = 0;
    std::size_t count = 0;
    packet_header header;
    words >> elements >> payload >> flags >> tag >> header.sender >> header.receiver >> header.transfer >>
        header.fragment >> header.chunk >> header.chunks >> header.transmission >> header.offset >> count >>
        header.sent_at;
    header.flags = static_cast<std::uint8_t>(flags);
    header.tag = static_cast<std::uint8_t>(tag);
    const std::span<const std::byte> data = std::span(all).subspan(bounded::packet_header_bytes);
    header.data_bytes = static_cast<std::uint32_t>(data.size());
    bounded::keyed_check check(secret);
    CHECK(same_bits(bounded::write_packet_header(header, {data, {}}, check),
                    std::span(all).first(bounded::packet_header_bytes)));
    std::error_code error;
    packet_header read = bounded::read_packet_header(all, error);
    CHECK_FALSE(error);
    CHECK(bounded::has_good_check(all, check));
    read.check = 0;
    CHECK(std::memcmp(&read, &header, sizeof read) == 0);
  };
  CHECK(for_each_row("packet", check_packet) > 5);
}

TEST_CASE("golden packets: every control message is written and read so") {
  const bounded::control_limits limits(
      bounded::chunk_grid::of<float>(model_of({8, 8, 8, 32}), payload_type::as_is, 8));
  const auto check_message = [&](const bytes& all, std::uint64_t secret, std::istream& words) {
    std::string text;
    unsigned type = 0;
    bounded::control_header header;
    words >> type >> header.transfer >> header.round >> text;
    header.type = static_cast<bounded::control_type>(type);
    bytes body;
    for (std::size_t i = 0; text != "-" && i < text.size(); i += 2)
      body.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
    header.body_bytes = static_cast<std::uint32_t>(body.size());
    bounded::control_writer writer(secret, body.size());
    writer.put(body);
    CHECK(same_bits(writer.finish(header.type, header.transfer, header.round), all));
    bounded::keyed_check check(secret);
    std::error_code error;
    bounded::control_message read = bounded::read_control(all, limits, check, error);
    CHECK_FALSE(error);
    CHECK(same_bits(read.body, body));
    read.header.check = 0;
    CHECK(std::memcmp(&read.header, &header, sizeof read.header) == 0);
  };
  CHECK(for_each_row("control", check_message) > 4);
}

}  // namespace lamina_test::golden_packets_test
