// SPDX-License-Identifier: MIT
// In the place of libFuzzer: runs a target over its seeds, and over files and directories of files, so that what was found once stays a
// test with any compiler. All targets are one source, which takes a third of the time to compile. replay TARGET [FILE]...
#define LAMINA_FUZZ_TARGET(name)
#define LAMINA_FUZZ_REPLAY
// NOLINTBEGIN(bugprone-suspicious-include)
#include "cluster.cpp"
#include "control.cpp"
#include "decode.cpp"
#include "options.cpp"
#include "packet.cpp"
#include "round_trip.cpp"
#include "seeds.cpp"
#include "state.cpp"
#include "transfer.cpp"
// NOLINTEND(bugprone-suspicious-include)

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

int main(int count, char** arguments) {
  using namespace lamina_fuzz;
  namespace fs = std::filesystem;
  const std::map<std::string, void (*)(input)> targets = {
      {"cluster", of_cluster::fuzz_one}, {"control", of_control::fuzz_one},
      {"decode", of_decode::fuzz_one},   {"options", of_options::fuzz_one},
      {"packet", of_packet::fuzz_one},   {"round_trip", of_round_trip::fuzz_one},
      {"state", of_state::fuzz_one},     {"transfer", of_transfer::fuzz_one}};
  if (count < 2 || !targets.contains(arguments[1])) return 2;
  const std::string wanted = arguments[1];
  std::size_t inputs = 0;
  const auto run = [&](const std::string& name, const bytes& all) {
    std::fprintf(stderr, "%s\n", name.c_str());  // the last one is that which crashed
    targets.at(wanted)(input(all));
    ++inputs;
  };
  of_seeds::for_each_seed([&](const std::string& target, const std::string& name, const bytes& all) {
    if (target == wanted) run(name, all);
  });
  const auto run_file = [&](const fs::path& file) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(stream), {}};
    check(stream.is_open(), "a file can be read");
    const auto all = std::as_bytes(std::span(text));
    run(file.string(), {all.begin(), all.end()});
  };
  for (int i = 2; i < count; ++i) {
    if (fs::is_directory(arguments[i])) {
      for (const auto& each : fs::directory_iterator(arguments[i])) run_file(each.path());
    } else if (fs::exists(arguments[i])) {
      run_file(arguments[i]);
    }
  }
  std::printf("%zu inputs\n", inputs);
}
