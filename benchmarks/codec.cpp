// SPDX-License-Identifier: MIT
// What do frames cost? Encoding as segments and in one piece, decoding, restoring, publishing, compared with a copy of as many
// bytes as the frame has.

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "common/model.hpp"
#include "lamina/codec.hpp"
#include "lamina/server.hpp"

namespace {

using enum lamina::payload_type;

const lamina::layout model = lamina_benchmark::read_model("resnet50");
const std::vector<float> elements = lamina_benchmark::gradient_of_step(model, 1);

// Layers spread over the model that hold about so many percent of its elements.
lamina::selection layers_of(std::size_t percent) {
  lamina::selection chosen(model);
  const double wanted = static_cast<double>(percent) / 100 * static_cast<double>(model.elements());
  for (std::size_t k = 0; k < model.layers(); ++k) {
    const std::size_t l = k * 59 % model.layers();  // 59 and 161 have no common divisor
    if (percent == 100 || static_cast<double>(chosen.sent_elements() + model.sizes()[l]) <= wanted)
      chosen.send(l);
  }
  return chosen;
}

std::span<const float> layer(std::size_t l) {
  return lamina_benchmark::layer_of(elements, model, l);
}

void set_bytes(benchmark::State& state, std::size_t bytes) {
  state.counters["frame_bytes"] = static_cast<double>(bytes);
  state.counters["bytes_per_second"] = benchmark::Counter(
      static_cast<double>(bytes) * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

struct encoded {
  encoded(std::size_t percent, lamina::payload_type payload) : chosen(layers_of(percent)), type(payload) {
    encode();
  }

  const lamina::encoded_frame& encode() { return encoder.encode({.payload = type}, chosen, layer); }

  lamina::selection chosen;
  lamina::payload_type type;
  lamina::frame_encoder<float> encoder = lamina::frame_encoder<float>(model);
};

void encode_segments(benchmark::State& state, lamina::payload_type type) {
  encoded frame(static_cast<std::size_t>(state.range(0)), type);
  for (auto _ : state) benchmark::DoNotOptimize(frame.encode().size_bytes());
  set_bytes(state, frame.encoder.frame().size_bytes());
}

void encode_contiguous(benchmark::State& state) {
  encoded frame(static_cast<std::size_t>(state.range(0)), lamina::payload_type::as_is);
  std::vector<std::byte> bytes(frame.encoder.frame().size_bytes());
  for (auto _ : state) {
    frame.encode().copy_to(bytes);
    benchmark::ClobberMemory();
  }
  set_bytes(state, bytes.size());
}

void decode(benchmark::State& state) {
  encoded frame(static_cast<std::size_t>(state.range(0)), lamina::payload_type::as_is);
  const std::vector<std::byte> bytes = frame.encoder.frame().to_bytes();
  for (auto _ : state) benchmark::DoNotOptimize(lamina::decode<float>(bytes, model).step());
  set_bytes(state, bytes.size());
}

// Into dense gradients, zeros for a layer that was dropped.
void restore(benchmark::State& state, lamina::payload_type type) {
  encoded frame(static_cast<std::size_t>(state.range(0)), type);
  const std::vector<std::byte> bytes = frame.encoder.frame().to_bytes();
  const auto view = lamina::decode<float>(bytes, model);
  std::vector<float> to(model.elements());
  for (auto _ : state) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      view.restore(l, lamina_benchmark::layer_of(to, model, l));
    }
    benchmark::ClobberMemory();
  }
  set_bytes(state, bytes.size());
}

// A server's reply to 16 workers of which each is at another step.
void publish(benchmark::State& state) {
  constexpr std::size_t workers = 16;
  const lamina::selection chosen = layers_of(static_cast<std::size_t>(state.range(0)));
  std::vector<std::span<const float>> parameters;
  for (std::size_t l = 0; l < model.layers(); ++l) parameters.push_back(layer(l));
  lamina::frame_encoder<float> encoder(model);
  lamina::server<float> server(model, {.workers = workers, .asynchronous = true});
  for (std::size_t w = 0; w < workers; ++w) server.commit(w, server.reply(w, parameters).clock());
  std::size_t bytes = 0;
  for (std::size_t turn = 0; auto _ : state) {
    state.PauseTiming();
    const std::size_t worker = turn % workers;
    const auto step = static_cast<std::uint64_t>(++turn);
    const auto& frame = encoder.encode({.step = step,
                                        .sender = static_cast<std::uint32_t>(worker),
                                        .checksum = lamina::frame_checksum::none},
                                       chosen, layer);
    benchmark::DoNotOptimize(server.add(frame.to_bytes()));
    server.update([](std::size_t, std::size_t, std::span<const float>) {});
    state.ResumeTiming();
    const auto reply = server.reply(worker, parameters);
    bytes = reply.size_bytes();
    server.commit(worker, reply.clock());
  }
  set_bytes(state, bytes);
}

void copy(benchmark::State& state) {
  const lamina::selection chosen = layers_of(static_cast<std::size_t>(state.range(0)));
  std::vector<float> to(chosen.sent_elements());
  for (auto _ : state) {
    float* end = to.data();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (chosen.is_dropped(l)) continue;
      std::memcpy(end, layer(l).data(), layer(l).size_bytes());
      end += layer(l).size();
    }
    benchmark::ClobberMemory();
  }
  set_bytes(state, to.size() * sizeof(float));
}

void shares(benchmark::internal::Benchmark* each) {
  each->Arg(5)->Arg(100)->Unit(benchmark::kMillisecond);
}

BENCHMARK(copy)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, as_is, as_is)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, fp16, float16)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, bf16, bfloat16)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, int8, int8)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, int4, int4)->Apply(shares);
BENCHMARK_CAPTURE(encode_segments, ternary, ternary)->Apply(shares);
BENCHMARK(encode_contiguous)->Apply(shares);
BENCHMARK(decode)->Apply(shares);
BENCHMARK_CAPTURE(restore, as_is, as_is)->Apply(shares);
BENCHMARK_CAPTURE(restore, fp16, float16)->Apply(shares);
BENCHMARK_CAPTURE(restore, bf16, bfloat16)->Apply(shares);
BENCHMARK_CAPTURE(restore, int8, int8)->Apply(shares);
BENCHMARK_CAPTURE(restore, int4, int4)->Apply(shares);
BENCHMARK_CAPTURE(restore, ternary, ternary)->Apply(shares);
BENCHMARK(publish)->Apply(shares);

}  // namespace
