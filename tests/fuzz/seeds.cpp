// SPDX-License-Identifier: MIT
// Writes inputs to begin with: frames, states and checkpoints as the library writes them, and for the targets that take
// choices some bytes of any kind. seeds DIRECTORY
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "fuzz.hpp"
#include "lamina/worker.hpp"

namespace {

using lamina_fuzz::bytes;
namespace fs = std::filesystem;

fs::path root;

void write(const std::string& target, const std::string& name, std::initializer_list<int> choices,
           const bytes& rest) {
  fs::create_directories(root / target);
  std::ofstream file(root / target / name, std::ios::binary);
  for (const int each : choices) file.put(static_cast<char>(each));
  file.write(reinterpret_cast<const char*>(rest.data()), static_cast<std::streamsize>(rest.size()));
}

template <class T>
void write_frames_and_states(int type) {
  for (const int which : {0, 1}) {
    const std::byte choice{static_cast<unsigned char>(which)};
    lamina_fuzz::input in(std::span(&choice, 1));
    const lamina::layout& model = lamina_fuzz::some_model(in);
    for (int payload = 0; payload < 4; ++payload) {
      std::mt19937 random(7);
      lamina::compressor_options options;
      options.drop_ratio = 0.5;
      options.payload = static_cast<lamina::payload_type>(payload);
      if (payload % 2 == 1) options.momentum = 0.5;
      lamina::gradient_compressor<T> worker(model, options);
      bytes frame;
      for (int step = 0; step < 2; ++step) {
        for (std::size_t l = 0; l < model.layers(); ++l)
          worker.accumulate(l, lamina_test::random_fractions<T>(random, model.sizes()[l]));
        frame = worker.encode().to_bytes();
        worker.commit();
      }
      const std::string name = std::string(type == 1 ? "double" : "float") + "_model" +
                               std::to_string(which) + "_payload" + std::to_string(payload);
      write("decode", name, {type, which, 0, 0}, frame);
      bytes state(32);
      const bytes saved = worker.save();
      state.insert(state.end(), saved.begin(), saved.end());
      write("state", name, {type, which, payload % 2, 0, 1, 0}, state);
    }
  }
}

}  // namespace

namespace lamina_fuzz {
void fuzz_one(input) {}
}  // namespace lamina_fuzz

int main(int count, char** arguments) {
  if (count != 2) return 1;
  root = arguments[1];
  write_frames_and_states<float>(0);
  write_frames_and_states<double>(1);
  for (const std::string target : {"round_trip", "options", "cluster", "kernels", "checkpoint"}) {
    std::mt19937 random(11);
    for (const std::size_t size : {16, 64, 256, 1000}) {
      bytes any(size);
      for (std::byte& each : any) each = static_cast<std::byte>(random());
      write(target, "any_" + std::to_string(size), {}, any);
    }
  }
}
