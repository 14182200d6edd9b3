// SPDX-License-Identifier: MIT
// A worker compiled for the machine at hand, and a server compiled for all machines, in one program. Between them go bytes.
#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <cstdio>
#include <lamina/lamina.hpp>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "worker.hpp"

namespace {

/// What this machine has, asked for by the flags that CMakeLists.txt compiles with.
const char* best_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512) return "avx512";
  if (has_avx2) return "avx2";
#endif
  return "baseline";
}

/// The function of the library that lies next to this program. RTLD_LOCAL: nothing else takes a function out of it. It is
/// never unloaded, as its workers are in use until the end.
make_worker_function* load(const std::string& instruction_set) {
  void* const library = dlopen(("dispatch_worker_" + instruction_set + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? dlsym(library, "make_worker") : nullptr;
  if (!function) throw std::runtime_error(dlerror());
  return reinterpret_cast<make_worker_function*>(function);
}

}  // namespace

int main() try {
  constexpr std::array<layer_description, 3> model = {{{"embedding", 64'000}, {"head", 640}, {"bias", 10}}};
  const std::string instruction_set = best_instruction_set();
  const std::unique_ptr<worker> worker(load(instruction_set)(model, 0.995));
  const std::vector<float> embedding(64'000, 0.125f), head(640, 0.25f), bias(10, 0.375f);
  const std::span<const std::byte> bytes =
      worker->add(std::array<std::span<const float>, 3>{embedding, head, bias});

  std::vector<lamina::layer> layers;
  layers.reserve(model.size());
  for (const layer_description& each : model) layers.push_back({std::string(each.name), {each.elements}});
  lamina::server<float> server((lamina::layout(layers)));
  if (const auto error = server.add_view(bytes)) throw std::system_error(error);
  worker->commit();
  float mean = 0;
  server.update([&](std::size_t, std::size_t, std::span<const float> gradient) { mean = gradient.back(); });
  std::printf("%s: %zu bytes, mean of the bias %g\n", instruction_set.c_str(), bytes.size(),
              static_cast<double>(mean));
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
