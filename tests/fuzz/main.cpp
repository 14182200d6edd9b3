// SPDX-License-Identifier: MIT
// All targets in one program, with libFuzzer or in its place: that runs a target over its seeds, and over files and directories of
// files, so that what was found once stays a test with any compiler.
//     LAMINA_FUZZ_TARGET=TARGET fuzz OPTIONS...
//     fuzz_replay TARGET [FILE]...
//     fuzz_replay --write-seeds DIRECTORY
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "control.hpp"  // before steps.hpp, which has other meanings for its names

#include "cluster.hpp"
#include "decode.hpp"
#include "options.hpp"
#include "packet.hpp"
#include "round_trip.hpp"
#include "seeds.hpp"
#include "state.hpp"
#include "transfer.hpp"

namespace {

using namespace lamina_fuzz;
namespace fs = std::filesystem;

const std::map<std::string, void (*)(input)> targets = {
    {"cluster", of_cluster::fuzz_one}, {"control", of_control::fuzz_one},
    {"decode", of_decode::fuzz_one},   {"options", of_options::fuzz_one},
    {"packet", of_packet::fuzz_one},   {"round_trip", of_round_trip::fuzz_one},
    {"state", of_state::fuzz_one},     {"transfer", of_transfer::fuzz_one}};

}  // namespace

#ifdef LAMINA_FUZZ_ENGINE
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto target = targets.at(std::getenv("LAMINA_FUZZ_TARGET"));
  target(input(std::as_bytes(std::span(data, size))));
  return 0;
}
#else
int main(int count, char** arguments) {
  const std::vector<std::string> words(arguments + 1, arguments + count);
  if (words.size() == 2 && words[0] == "--write-seeds") {
    of_seeds::for_each_seed([&](const auto& target, const auto& name, const auto& seed) {
      fs::create_directories(fs::path(words[1]) / target);
      std::ofstream(fs::path(words[1]) / target / name, std::ios::binary)
          .write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    });
    return 0;
  }
  if (words.empty() || !targets.contains(words[0])) return 2;
  std::size_t inputs = 0;
  const auto run = [&](const std::string& name, std::span<const std::byte> all) {
    std::fprintf(stderr, "%s\n", name.c_str());  // the last one is that which crashed
    targets.at(words[0])(input(all));
    ++inputs;
  };
  of_seeds::for_each_seed([&](const std::string& target, const std::string& name, const bytes& all) {
    if (target == words[0]) run(name, all);
  });
  const auto run_file = [&](const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(stream), {}};
    check(stream.is_open(), "a file can be read");
    run(file.string(), std::as_bytes(std::span(text)));
  };
  for (const fs::path path : std::span(words).subspan(1)) {
    if (fs::is_directory(path)) {
      for (const auto& each : fs::directory_iterator(path)) run_file(each.path());
    } else if (fs::exists(path)) {
      run_file(path);
    }
  }
  std::printf("%zu inputs\n", inputs);
}
#endif
