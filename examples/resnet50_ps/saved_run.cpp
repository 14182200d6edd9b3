// SPDX-License-Identifier: MIT
#include "saved_run.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "checkpoint.hpp"

namespace resnet50_ps {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

struct worker_head {
  batch_stream::position taken;
  std::int64_t threads = 0;
};

}  // namespace

std::string directory_of(const training& run) {
  return run.given.output.empty() ? "" : run.given.output + (run.layer_dropping ? "/with" : "/without");
}

std::vector<std::byte> save_worker(const replica& local, const batch_stream& batches) {
  const worker_head state = {batches.taken(), at::get_num_threads()};
  const auto head = std::as_bytes(std::span(&state, 1));
  std::vector<std::byte> bytes(head.begin(), head.end());
  for (const torch::Tensor& buffer : local.network.ptr()->buffers()) {
    const auto* from = static_cast<const std::byte*>(buffer.data_ptr());
    bytes.insert(bytes.end(), from, from + buffer.nbytes());
  }
  return bytes;
}

batch_stream::position load_worker(std::span<const std::byte> bytes, const replica& local) {
  worker_head state;
  std::size_t expected = sizeof state;
  for (const torch::Tensor& buffer : local.network.ptr()->buffers()) expected += buffer.nbytes();
  if (bytes.size() != expected) {
    throw std::runtime_error(
        fmt::format("the checkpoint has {} bytes of a worker, {} belong", bytes.size(), expected));
  }
  std::memcpy(&state, bytes.data(), sizeof state);
  if (state.threads != at::get_num_threads()) {
    throw std::runtime_error(
        fmt::format("the checkpoint was made with {} threads a worker, and now there are {}; see --threads",
                    state.threads, at::get_num_threads()));
  }
  bytes = bytes.subspan(sizeof state);
  for (const torch::Tensor& buffer : local.network.ptr()->buffers()) {
    std::memcpy(buffer.data_ptr(), bytes.data(), buffer.nbytes());
    bytes = bytes.subspan(buffer.nbytes());
  }
  return state.taken;
}

std::string configuration_of(const training& run, const lamina::layout& model) {
  const options& given = run.given;
  const auto said = [](const auto& optional) { return optional ? fmt::format("{}", *optional) : "none"; };
  const bool steps_count = given.schedule.starts_with("cosine");
  return fmt::format("model {:016x}; data {} at {} pixels; batch {}; seed {}; workers {}; ",
                     model.fingerprint(), given.data, given.image_size_pixels, given.batch_images, given.seed,
                     run.workers) +
         fmt::format(
             "drop ratio {}, warm-up {}, refresh {}, threshold {}, budget {}, selection {}, max age {}; ",
             given.drop_ratio, given.drop_warm_up_steps, given.refresh_steps, said(given.threshold),
             said(given.byte_budget), given.selection, given.max_age_steps) +
         fmt::format("residual momentum {}; payload {}; mode {}; learning rate {}, {}{}, warm-up {}; ",
                     given.residual_momentum, given.payload, given.mode, given.learning_rate, given.schedule,
                     steps_count ? fmt::format(" to step {}", given.steps) : "", given.warm_up_steps) +
         fmt::format("momentum {}, nesterov {}, weight decay {}", given.momentum, given.nesterov,
                     given.weight_decay);
}

void save_checkpoint(const training& run, const replica& local, const server_state& state) {
  checkpoint_writer writer(directory_of(run), state.step);
  writer.add("configuration", bytes_of(configuration_of(run, local.model())));
  writer.add_value("workers", static_cast<std::uint64_t>(state.workers.size()));
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    writer.add("parameters/" + local.model()[l].name, std::as_bytes(local[l]));
  }
  writer.add("velocity", std::as_bytes(std::span(state.velocity)));
  for (std::size_t w = 0; w < state.workers.size(); ++w)
    writer.add(fmt::format("worker/{}", w), state.workers[w]);
  writer.commit();
}

bool has_checkpoints(const training& run) {
  std::error_code problem;  // of a directory that is not there
  for (const auto& entry : std::filesystem::directory_iterator(directory_of(run), problem)) {
    if (entry.path().extension() == ".lamina") return true;
  }
  return false;
}

std::optional<server_state> load_checkpoint(const training& run, const replica& local) {
  const auto newest = newest_checkpoint(
      directory_of(run), [](const std::string& why) { fmt::print(stderr, "resnet50_ps: {}\n", why); });
  if (!newest) return std::nullopt;
  const checkpoint_reader reader(*newest);
  const std::vector<std::byte> saved = reader.read("configuration");
  const std::string before(reinterpret_cast<const char*>(saved.data()), saved.size());
  if (const std::string now = configuration_of(run, local.model()); now != before) {
    throw std::runtime_error(fmt::format("the checkpoint {} is of another run\n  it was: {}\n  now is: {}",
                                         newest->string(), before, now));
  }
  server_state state;
  state.step = reader.step();
  if (state.step > run.given.steps) {
    throw std::runtime_error(
        fmt::format("the checkpoint {} is beyond --steps {}", newest->string(), run.given.steps));
  }
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    reader.read_into("parameters/" + local.model()[l].name, std::as_writable_bytes(local[l]));
  }
  state.velocity.resize(run.given.momentum > 0 ? local.model().elements() : 0);
  reader.read_into("velocity", std::as_writable_bytes(std::span(state.velocity)));
  state.workers.resize(reader.read_value<std::uint64_t>("workers"));
  for (std::size_t w = 0; w < state.workers.size(); ++w)
    state.workers[w] = reader.read(fmt::format("worker/{}", w));
  return state;
}

}  // namespace resnet50_ps
