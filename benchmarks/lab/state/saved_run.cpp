// SPDX-License-Identifier: MIT
#include "state/saved_run.hpp"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <lamina/merge.hpp>
#include <lamina/state.hpp>
#include <stdexcept>

#include "launch/local_updates.hpp"
#include "launch/overlap.hpp"
#include "messages/link.hpp"
#include "state/checkpoint.hpp"

namespace lab {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

struct worker_head {
  batch_stream::position taken;
  std::int64_t threads = 0;  // 0: any
};

std::string text_in(const checkpoint& from, const std::string& section) {
  const std::span<const std::byte> bytes = from[section];
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Nothing of a run that loses nothing.
std::string losses_in(const lab::options& options) {
  if (!may_lose(options)) return "";
  return fmt::format(
      "; loss bound {} up, {} down, warm-up {}, stop {}, on loss {}, max losses {}, tags {}, injected {} by "
      "seed {}",
      options.loss_bound, options.loss_bound_down, options.loss_bound_warm_up_steps, options.stop,
      options.on_loss, options.max_losses, options.loss_tags, options.inject_loss, options.inject_seed);
}

// Workers that were lost have no state in a checkpoint.
std::string workers_in(const topology& ranks, std::size_t states) {
  return states == ranks.workers() ? workers_of(ranks) : fmt::format("{} of {}", states, workers_of(ranks));
}

// What `before` workers had of their data and statistics, for each of `now`: who had seen k batches each begins where as
// many images have been seen by all, and the statistics are averaged.
std::vector<std::byte> merge_data_and_statistics(const std::vector<std::vector<std::byte>>& before,
                                                 std::size_t now, const replica& local) {
  std::vector<std::byte> merged = before.front();
  worker_head head;
  std::memcpy(&head, merged.data(), sizeof head);
  head.taken.batches = head.taken.batches * before.size() / now;
  head.threads = 0;  // it is another run from here on
  std::memcpy(merged.data(), &head, sizeof head);
  std::size_t begin = sizeof head;
  for (const torch::Tensor& buffer : local.statistics()) {
    const auto statistics = [&](const std::vector<std::byte>& worker) {
      torch::Tensor read = torch::empty_like(buffer);
      std::memcpy(read.data_ptr(), worker.data() + begin, buffer.nbytes());
      return read;
    };
    if (buffer.is_floating_point()) {
      torch::Tensor sum = torch::zeros_like(buffer, torch::kDouble);
      for (const auto& worker : before) sum += statistics(worker);
      const torch::Tensor mean = (sum / static_cast<double>(before.size())).to(buffer.scalar_type());
      std::memcpy(merged.data() + begin, mean.data_ptr(), buffer.nbytes());
    }
    begin += buffer.nbytes();
  }
  return merged;
}

// Whether the checkpoint is of the same exchange of gradients; throws unless that is allowed to be another, and all else is the same.
bool check_configuration(const checkpoint& from, const training& run, const lamina::layout& model) {
  const std::string before = text_in(from, "configuration");
  const std::string exchange_before = text_in(from, "exchange");
  const std::string now = configuration_of(run, model);
  const std::string exchange_now = exchange_of(run);
  const bool is_same_exchange = exchange_before == exchange_now;
  if (before == now && (is_same_exchange || run.options.changes_exchange)) return is_same_exchange;
  throw std::runtime_error(fmt::format(
      "the checkpoint {} is of another run\n  it was: {}; {}\n  now is: {}; {}{}", from.file().string(),
      before, exchange_before, now, exchange_now, before == now ? "\n  --change-exchange takes it up" : ""));
}

// A worker that sends all gradients as they are, while it computes, keeps no residual.
bool keeps_residual(const training& run) {
  return run.options.overlap == "none" ||
         worker_options_of(run, 0, 0).compression.decide == lamina::decision_timing::ahead;
}

// The state of a residual of which everything was sent in each step.
std::vector<std::byte> empty_residual(const lamina::layout& model, std::uint64_t step) {
  const lamina::layer_selector::memory all_sent{
      .threshold = -1, .allowance = 0, .cleared_in = std::vector<std::uint64_t>(model.layers(), step)};
  const std::vector<float> nothing(model.elements());
  return lamina::save_state<float>(model, all_sent, nothing, {}, step);
}

// The states as workers have them that exchange gradients as the run does.
std::vector<std::vector<std::byte>> for_other_exchange(const std::vector<std::vector<std::byte>>& states,
                                                       const training& run, const replica& local,
                                                       std::uint64_t step) {
  std::vector<std::vector<std::byte>> changed;
  for (const auto& state : states) {
    std::vector<std::vector<std::byte>> parts = unpack(state);
    if (parts.size() != 2)
      throw std::runtime_error("the checkpoint holds no state of a worker of this model");
    std::vector<std::byte>& residual = parts[0];
    if (keeps_residual(run) && residual.empty()) residual = empty_residual(local.model(), step);
    if (!keeps_residual(run) && !residual.empty()) {
      const auto held = lamina::read_state<float>(residual, local.model(), /*with_momentum=*/false).residual;
      if (std::ranges::any_of(held, [](float each) { return each != 0; }))
        throw std::runtime_error("the checkpoint has layers that were held back, and --overlap " +
                                 run.options.overlap + " without layer dropping keeps none");
      residual.clear();
    }
    changed.push_back(pack(parts));
  }
  return changed;
}

}  // namespace

std::string directory_of(const training& run) {
  if (run.options.output.empty()) return "";
  return run.options.output + (run.is_plain() ? "/plain" : run.layer_dropping ? "/with" : "/without");
}

std::vector<std::byte> save_worker(const replica& local, const batch_stream& batches) {
  const worker_head state = {batches.taken(), at::get_num_threads()};
  const auto head = std::as_bytes(std::span(&state, 1));
  std::vector<std::byte> bytes(head.begin(), head.end());
  for (const torch::Tensor& buffer : local.statistics()) {
    const auto* from = static_cast<const std::byte*>(buffer.data_ptr());
    bytes.insert(bytes.end(), from, from + buffer.nbytes());
  }
  return bytes;
}

batch_stream::position load_worker(std::span<const std::byte> bytes, replica& local) {
  worker_head state;
  std::size_t expected = sizeof state;
  const std::vector<torch::Tensor> statistics = local.statistics();
  for (const torch::Tensor& each : statistics) expected += each.nbytes();
  if (bytes.size() != expected) {
    throw std::runtime_error(
        fmt::format("the checkpoint has {} bytes of a worker, {} belong", bytes.size(), expected));
  }
  std::memcpy(&state, bytes.data(), sizeof state);
  if (state.threads != 0 && state.threads != at::get_num_threads()) {
    throw std::runtime_error(
        fmt::format("the checkpoint was made with {} threads a worker, and now there are {}; see --threads",
                    state.threads, at::get_num_threads()));
  }
  bytes = bytes.subspan(sizeof state);
  for (const torch::Tensor& each : statistics) {
    std::memcpy(each.data_ptr(), bytes.data(), each.nbytes());
    bytes = bytes.subspan(each.nbytes());
  }
  local.set_statistics(statistics);
  return state.taken;
}

std::vector<std::vector<std::byte>> merge_workers(const std::vector<std::vector<std::byte>>& states,
                                                  std::size_t workers, const replica& local) {
  std::vector<std::vector<std::byte>> compressors;
  std::vector<std::vector<std::byte>> others;
  std::size_t expected = sizeof(worker_head);
  for (const torch::Tensor& each : local.statistics()) expected += each.nbytes();
  for (const auto& state : states) {
    std::vector<std::vector<std::byte>> parts = unpack(state);
    if (parts.size() != 2 || parts[1].size() != expected)
      throw std::runtime_error("the checkpoint holds no state of a worker of this model");
    compressors.push_back(std::move(parts[0]));
    others.push_back(std::move(parts[1]));
  }
  const std::vector<std::vector<std::byte>> merged = {lamina::merge_states<float>(compressors, local.model()),
                                                      merge_data_and_statistics(others, workers, local)};
  return {workers, pack(merged)};
}

std::string configuration_of(const training& run, const lamina::layout& model) {
  const lab::options& options = run.options;
  const auto said = [](const auto& optional) { return optional ? fmt::format("{}", *optional) : "none"; };
  const bool steps_count = options.schedule.starts_with("cosine");
  return fmt::format("network {}, model {:016x}; data {} at {} pixels; batch {}; seed {}; ", options.network,
                     model.fingerprint(), options.data, options.image_size_pixels, options.batch_images,
                     options.seed) +
         fmt::format(
             "drop ratio {}, warm-up {}, refresh {}, threshold {}, budget {}, selection {}, max age {}; ",
             options.drop_ratio, options.drop_warm_up_steps, options.refresh_steps, said(options.threshold),
             said(options.byte_budget), options.selection, options.max_age_steps) +
         fmt::format("residual momentum {}; payload {}; mode {}; learning rate {}, {}{}, warm-up {}; ",
                     options.residual_momentum, options.payload, options.mode, options.learning_rate,
                     options.schedule, steps_count ? fmt::format(" to step {}", options.steps) : "",
                     options.warm_up_steps) +
         fmt::format("momentum {}, nesterov {}, weight decay {}", options.momentum, options.nesterov,
                     options.weight_decay) +
         (options.priority == "value" ? "" : "; priority " + options.priority) + losses_in(options) +
         (options.decide == "at_end" ? "" : "; decide " + options.decide) + describe_local_updates(options);
}

std::string exchange_of(const training& run) {
  return "topology " + run.options.topology + describe_overlap(run.options);
}

std::string workers_of(const topology& ranks) {
  if (!ranks.has_server || ranks.nodes.size() == ranks.workers())
    return fmt::format("{} workers", ranks.workers());
  std::vector<std::string> nodes;
  for (const auto& node : ranks.nodes) {
    std::vector<std::size_t> workers;
    for (const std::size_t rank : node) workers.push_back(ranks.worker_on(rank));
    nodes.push_back(fmt::format("{}", fmt::join(workers, " ")));
  }
  return fmt::format("workers in nodes {}", fmt::join(nodes, ", "));
}

void save_checkpoint(const training& run, const replica& local, const server_state& state) {
  const std::string configuration = configuration_of(run, local.model());
  const std::string exchange = exchange_of(run);
  const std::string workers = workers_in(run.topology, state.workers.size());
  const auto states = static_cast<std::uint64_t>(state.workers.size());
  std::vector<checkpoint_section> sections = {{"configuration", bytes_of(configuration)},
                                              {"exchange", bytes_of(exchange)},
                                              {"workers", bytes_of(workers)},
                                              {"states", std::as_bytes(std::span(&states, 1))},
                                              {"optimizer", state.optimizer}};
  if (!state.plan.empty()) sections.push_back({"plan", bytes_of(state.plan)});
  for (std::size_t l = 0; l < local.model().layers(); ++l)
    sections.push_back({"parameters/" + local.model()[l].name, std::as_bytes(local[l])});
  for (std::size_t w = 0; w < state.workers.size(); ++w)
    sections.push_back({fmt::format("worker/{}", w), state.workers[w]});
  write_checkpoint(directory_of(run), state.step, sections);
}

bool has_checkpoints(const training& run) {
  std::error_code problem;  // of a directory that is not there
  for (const auto& entry : std::filesystem::directory_iterator(directory_of(run), problem)) {
    if (entry.path().extension() == ".lamina") return true;
  }
  return false;
}

server_state load_checkpoint(const training& run, const replica& local) {
  const auto newest = newest_checkpoint(
      directory_of(run), [](const std::string& why) { fmt::print(stderr, "lab: {}\n", why); });
  if (!newest && has_checkpoints(run))
    throw std::runtime_error("no checkpoint in " + directory_of(run) + " can be taken up");
  if (!newest) return {};
  const std::string file = newest->file().string();
  const bool is_same_exchange = check_configuration(*newest, run, local.model());
  server_state state;
  state.step = newest->step();
  if (state.step > run.options.steps) {
    throw std::runtime_error(fmt::format("the checkpoint {} is beyond --steps {}", file, run.options.steps));
  }
  for (std::size_t l = 0; l < local.model().layers(); ++l) {
    newest->read_into("parameters/" + local.model()[l].name, std::as_writable_bytes(local[l]));
  }
  const std::span<const std::byte> optimizer = (*newest)["optimizer"];
  state.optimizer.assign(optimizer.begin(), optimizer.end());
  std::uint64_t states = 0;
  newest->read_into("states", std::as_writable_bytes(std::span(&states, 1)));
  for (std::size_t w = 0; w < states; ++w) {
    const std::span<const std::byte> worker = (*newest)[fmt::format("worker/{}", w)];
    state.workers.emplace_back(worker.begin(), worker.end());
  }

  if (!is_same_exchange) {
    state.workers = for_other_exchange(state.workers, run, local, state.step);
  } else if (newest->sections().contains("plan")) {
    state.plan = text_in(*newest, "plan");
  }

  const std::string before = text_in(*newest, "workers");
  if (const std::string now = workers_of(run.topology); now != before) {
    if (!run.options.merge_residuals) {
      const std::string hint = run.options.topology == "hybrid" || run.options.updates == "local"
                                   ? ""
                                   : "; --merge-residuals takes it up with others";
      throw std::runtime_error(
          fmt::format("the checkpoint {} is of {}, not of {}{}", file, before, now, hint));
    }
    state.workers = merge_workers(state.workers, run.topology.workers(), local);
  }
  return state;
}

}  // namespace lab
