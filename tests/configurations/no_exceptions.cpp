// SPDX-License-Identifier: MIT
// Compiled with -fno-exceptions and -fno-rtti: what a program can meet without a mistake of its own comes as an error code.
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
  lamina::gradient_compressor<float> worker(model, {.drop_ratio = 0});
  for (std::size_t l = 0; l < model.layers(); ++l)
    worker.accumulate(l, std::vector<float>(model.sizes()[l], 0.5f));
  const std::vector<std::byte> bytes = worker.encode().to_bytes();
  worker.commit();
  return bytes;
}

std::error_code decoded(std::span<const std::byte> bytes, const lamina::layout& model) {
  std::error_code error = std::make_error_code(std::errc::io_error);
  (void)lamina::decode<float>(bytes, model, error);
  return error;
}

void damaged_bytes_are_told_by_code(const lamina::layout& model) {
  const std::vector<std::byte> bytes = a_frame(model);
  check(!decoded(bytes, model), "a whole frame is decoded");
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    check(decoded(std::span(bytes).first(size), model) == lamina::frame_errc::truncated, "a frame cut short");
  }
  std::error_code error;
  for (std::size_t size = 0; size < lamina::peek_bytes; ++size) {
    (void)lamina::peek(std::span(bytes).first(size), error);
    check(error == lamina::frame_errc::truncated, "a look at a header cut short");
  }
  check(lamina::peek(bytes, error).size_bytes == bytes.size() && !error, "a look at a header");
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    std::vector<std::byte> damaged = bytes;
    damaged[at] ^= std::byte{1};
    check(static_cast<bool>(decoded(damaged, model)), "a bit changed on the way");
  }
  check(decoded(bytes, lamina::layout({{"other", {1}}})) == lamina::frame_errc::wrong_layout,
        "another model");
}

void bad_gradients_are_told_by_code(const lamina::layout& model, lamina::finite_check check_first) {
  using gradients = std::vector<std::vector<float>>;
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float most = std::numeric_limits<float>::max();
  const std::vector<float> first(12, 0.5f);
  const std::vector<float> second(5, 0.25f);
  lamina::compressor_options options;
  options.drop_ratio = 0;
  options.check = check_first;
  lamina::gradient_compressor<float> worker(model, options);
  std::error_code error = std::make_error_code(std::errc::io_error);
  const auto is = [&](lamina::errc expected) { return error == expected; };

  check(worker.encode(error).size_bytes() == 0 && is(lamina::errc::out_of_order), "encode before a gradient");
  worker.select(error);
  check(is(lamina::errc::out_of_order), "select before a gradient");

  worker.accumulate(2, first, error);
  check(is(lamina::errc::no_such_layer), "a layer too many");
  worker.accumulate(1, first, error);
  check(is(lamina::errc::wrong_size), "a gradient of another size");
  worker.accumulate_all(gradients{first}, error);
  check(is(lamina::errc::wrong_count), "a gradient too few");
  worker.accumulate_all(gradients{first, first}, error);
  check(is(lamina::errc::wrong_size), "a gradient of another size among all");

  if (check_first == lamina::finite_check::whole_layer) {
    worker.accumulate(1, std::vector<float>{0, 0, 0, 0, nan}, error);
    check(is(lamina::errc::non_finite), "NaN");
    worker.accumulate_all(gradients{first, {0, nan, 0, 0, 0}}, error);
    check(is(lamina::errc::non_finite), "NaN among all");
    check(worker.step() == 0 && worker.residual()[0][0] == 0, "a batch refused whole");
    worker.accumulate(1, std::vector<float>(5, most), error);
    check(!error, "a gradient as large as can be");
    worker.accumulate(1, std::vector<float>(5, most), error);
    check(is(lamina::errc::overflow) && worker.residual()[1][4] == most, "one more of them");
    worker.accumulate(1, std::vector<float>(5, -most), error);
    check(!error && worker.residual()[1][4] == 0, "the same taken back");
  }

  worker.accumulate(1, second, error);
  check(!error, "a layer");
  worker.encode(error);
  check(is(lamina::errc::no_gradient), "encode before all layers have one");
  worker.accumulate(0, first, error);
  check(!error, "the other layer");
  worker.select(std::vector<double>{1}, error);
  check(is(lamina::errc::wrong_count), "a value too few");
  worker.select(error);
  check(!error, "select");
  const std::vector<std::byte> bytes = worker.encode(error).to_bytes();
  check(!error, "encode");
  worker.commit();
  const auto frame = lamina::decode<float>(bytes, model, error);
  check(!error && !frame.is_dropped(1), "the frame of all that");
  worker.accumulate_all(gradients{first, second}, error, 2.0);
  check(!error && worker.step() == 2 && worker.residual()[0][0] == 1.0f, "the next step, scaled");
}

void what_was_lost_stays(const lamina::layout& model) {
  lamina::gradient_compressor<float> worker(model, {.drop_ratio = 0});
  worker.accumulate(0, std::vector<float>(12, 0.5f));
  worker.accumulate(1, std::vector<float>(5, 0.25f));
  worker.encode();
  lamina::delivery arrived(worker.chosen(), 4);
  arrived.lose(0, 1);
  worker.commit(arrived);
  check(worker.residual()[0][3] == 0 && worker.residual()[0][4] == 0.5f, "what was lost of a layer");
  check(worker.residual()[1][0] == 0, "a layer of which nothing was lost");
}

void frames_reach_a_server(const lamina::layout& model) {
  const std::vector<std::byte> bytes = a_frame(model);
  auto server = lamina::gradient_aggregator<float>::of_workers(model, 1);
  std::error_code error;
  const auto frame = lamina::decode<float>(bytes, model, error);
  lamina::expect(frame, lamina::frame_kind::parameters, 1, error);
  check(error == lamina::frame_errc::unexpected_kind, "a frame of another kind");
  lamina::expect(frame, lamina::frame_kind::gradients, 2, error);
  check(error == lamina::frame_errc::unexpected_step, "a frame of another step");
  server.add(frame, error);
  check(!error, "the first frame");
  server.add(frame, error);
  check(error == lamina::frame_errc::duplicate_sender, "the same once more");
  std::size_t right = 0;
  for (std::size_t l = 0; l < model.layers(); ++l) {
    server.mean(l, [&](std::size_t, std::span<const float> mean) {
      for (const float each : mean) right += each == 0.5f;
    });
  }
  check(right == model.elements(), "the mean of one worker");
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
  bad_gradients_are_told_by_code(model, lamina::finite_check::whole_layer);
  bad_gradients_are_told_by_code(model, lamina::finite_check::each_element);
  what_was_lost_stays(model);
  frames_reach_a_server(model);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
