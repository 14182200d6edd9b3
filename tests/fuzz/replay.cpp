// SPDX-License-Identifier: MIT
// In the place of libFuzzer: runs a target over files and directories of files, so that what was found once stays a test
// with any compiler.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

void run(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(stream), {}};
  if (!stream.is_open()) {
    std::fprintf(stderr, "cannot read %s\n", file.c_str());
    std::exit(1);
  }
  std::fprintf(stderr, "%s\n", file.filename().c_str());  // the last one is that which crashed
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<fs::path> files;
  for (int i = 1; i < count; ++i) {
    const fs::path given = arguments[i];
    if (fs::is_directory(given)) {
      for (const auto& each : fs::directory_iterator(given)) files.push_back(each.path());
    } else if (fs::exists(given)) {
      files.push_back(given);
    }
  }
  std::ranges::sort(files);
  for (const fs::path& file : files) run(file);
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;
}
