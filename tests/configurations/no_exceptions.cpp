// SPDX-License-Identifier: MIT
// Compiled with -fno-exceptions and -fno-rtti: what a program can meet without a mistake of its own is a result or an error code.
// A mistake ends the program with lamina's sentence.
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <lamina/lamina.hpp>
#include <limits>
#include <span>
#include <system_error>
#include <vector>

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  if (!holds) std::printf("does not hold: %s\n", what);
  failures += holds ? 0 : 1;
}

std::vector<std::byte> a_frame(const lamina::layout& model) {
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  auto step = worker.begin();
  for (std::size_t l = 0; l < model.layers(); ++l)
    check(step.add(l, std::vector<float>(model.sizes()[l], 0.5f)), "a gradient");
  return step.frame().to_bytes();
}

std::error_code decoded(std::span<const std::byte> bytes, const lamina::layout& model) {
  std::error_code error = std::make_error_code(std::errc::io_error);
  (void)lamina::decode<float>(bytes, model, error);
  return error;
}

void damaged_bytes_are_told_by_code(const lamina::layout& model) {
  const std::vector<std::byte> bytes = a_frame(model);
  check(!decoded(bytes, model), "a whole frame is decoded");
  check(decoded(std::span(bytes).first(100), model) == lamina::errc::truncated, "a frame cut short");
  lamina::server<float> server(model);
  check(!server.add(bytes), "the first frame");
  check(server.add(bytes) == lamina::errc::duplicate_frame, "the same once more");
}

void a_bad_gradient_is_a_result(const lamina::layout& model) {
  using gradients = std::vector<std::vector<float>>;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> first(12, 0.5f);
  const std::vector<float> second(5, 0.25f);
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  {
    const auto step = worker.add(gradients{first, {0, nan, 0, 0, 0}});
    check(!step && step.refused_layer() == 1, "NaN among all");
    check(worker.steps() == 0 && worker.residual()[0][0] == 0, "a batch refused whole");
  }
  const auto step = worker.add(gradients{first, second}, 2.0);
  check(step && step.number() == 1 && worker.residual()[0][0] == 1.0f, "the next step, scaled");

  lamina::worker<float> skipping(model, {.non_finite = lamina::non_finite::skip});
  const auto skipped = skipping.add(gradients{first, {0, nan, 1, 0, 0}});
  check(skipped && skipping.residual()[1][1] == 0 && skipping.residual()[1][2] == 1, "NaN alone left out");
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "--mistake") == 0) {
    std::signal(SIGABRT, [](int) {
      std::fputs("aborted\n", stderr);
      std::_Exit(1);
    });
    lamina::layout({{"only", {1}}}).check_layer(7);
    return 0;
  }
  const lamina::layout model({{"a", {3, 4}}, {"b", {5}}});
  damaged_bytes_are_told_by_code(model);
  a_bad_gradient_is_a_result(model);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
