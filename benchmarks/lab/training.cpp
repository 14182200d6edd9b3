// SPDX-License-Identifier: MIT
#include "training.hpp"

#define XXH_INLINE_ALL
#include <torch/torch.h>
#include <xxhash.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "networks.hpp"
#include "replay.hpp"

namespace lab {
namespace {

constexpr std::size_t evaluation_batch_images = 100;

std::uint64_t hash_of(const replica& local) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (std::size_t l = 0; l < local.model().layers(); ++l)
    XXH3_64bits_update(&state, local[l].data(), local[l].size_bytes());
  return XXH3_64bits_digest(&state);
}

void compute_gradients(replica& local, const torch::data::Example<>& images, step_report& report) {
  local.network().ptr()->train();
  local.network().ptr()->zero_grad();
  const torch::Tensor loss =
      torch::nn::functional::cross_entropy(local.network().forward(images.data), images.target);
  loss.backward();
  report.loss = loss.item<double>();
  report.images = static_cast<double>(images.target.size(0));
}

replica make_replica(const options& how) {
  torch::manual_seed(static_cast<std::uint64_t>(how.seed));
  return {make_network(how.network, how.classes), how.fragment_elements};
}

void print(const nlohmann::ordered_json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace

void refuse_gradient(const lamina::layout& model, std::size_t layer) {
  throw std::runtime_error("the gradient of '" + model[layer].name +
                           "' holds NaN or infinity: training has diverged, try a lower --learning-rate");
}

training::training(const options& given, mpi_ranks& ranks, work_clock& working)
    : how(given),
      all(ranks),
      clock(working),
      local(make_replica(given)),
      is_server(given.has_server() && ranks.rank() == 0) {
  const std::size_t count = workers_in_all();
  if (count < 1) throw std::invalid_argument("a server alone cannot train: mpirun -n 2 or more");
  if (count % how.workers_per_node != 0)
    throw std::invalid_argument(std::to_string(count) + " workers are no nodes of " +
                                std::to_string(how.workers_per_node));
  const std::chrono::seconds timeout(how.timeout_seconds);
  const std::size_t first = how.has_server() ? 1 : 0;
  const int worker = static_cast<int>(all.rank() - (is_server ? 0 : first));
  const int per_node = static_cast<int>(how.workers_per_node);
  const MPI_Comm of_workers = all.split(is_server ? -1 : 0);
  const MPI_Comm of_node = all.split(is_server ? -1 : worker / per_node);
  const bool sends = worker % per_node == 0;
  const MPI_Comm of_senders = all.split(is_server || !sends ? -1 : 0);
  const MPI_Comm of_callers = all.split(is_server || sends ? 0 : -1);
  if (of_workers != MPI_COMM_NULL) workers.emplace(of_workers, timeout, clock);
  if (of_node != MPI_COMM_NULL && per_node > 1) node.emplace(of_node, timeout, clock);
  if (of_senders != MPI_COMM_NULL) senders.emplace(of_senders, timeout, clock);
  if (of_callers != MPI_COMM_NULL) callers.emplace(of_callers, timeout, clock);

  data_ = open_data(how.data, how.image_size_pixels, how.seed);
  if (is_server) return;
  const auto number = static_cast<std::size_t>(worker);
  compute = gradients_of(
      how, number, local.tiling().model(), local,
      [this, number, count](std::uint64_t step, step_report& report) {
        compute_gradients(local, batch_of_step(step, *data_.train, number, count, how.batch_images, how.seed),
                          report);
      });
}

std::string training::name_of(std::size_t rank) const {
  return how.has_server() && rank == 0 ? "the server"
                                       : "worker " + std::to_string(rank - (how.has_server() ? 1 : 0));
}

float training::learning_rate(std::uint64_t step) const {
  if (step >= how.warm_up_steps) return how.learning_rate;
  return how.learning_rate * static_cast<float>(step) / static_cast<float>(how.warm_up_steps);
}

lamina::worker_options training::compression() const {
  return {
      .drop_ratio = how.drop_ratio,
      .warm_up_steps = how.drop_warm_up_steps,
      .search_every = how.refresh_steps,
      .send_budget = how.send_budget,
      .fragment_elements = how.fragment_elements,
      .momentum = how.residual_momentum,
      // What sums round away of gradients then stays in the residual.
      .payload = how.sum_payload == "bfloat16" ? lamina::payload_type::bfloat16 : lamina::payload_type::as_is,
      .sender = senders ? static_cast<std::uint32_t>(senders->rank()) : 0,
      .frame_checksum = how.links.checksum()};
}

void training::average_statistics() {
  std::vector<std::span<float>> tensors;
  std::vector<double> values;
  for (const torch::Tensor& each : local.network().ptr()->buffers()) {
    if (!each.is_floating_point()) continue;
    tensors.push_back(lamina::writable_elements_of<float>(each));
    values.insert(values.end(), tensors.back().begin(), tensors.back().end());
  }
  workers->average(values);
  auto mean = values.begin();
  for (const auto tensor : tensors) {
    for (float& each : tensor) each = static_cast<float>(*mean++);
  }
}

double training::evaluate() {
  std::array<double, 2> seen{};  // images, and those whose class came first
  if (!is_server) {
    average_statistics();
    const torch::NoGradGuard no_gradients;
    local.network().ptr()->eval();
    std::vector<std::size_t> indices;
    const std::size_t step = workers_in_all();
    for (std::size_t i = workers->rank(); i < data_.test->size(); i += step) {
      indices.push_back(i);
      if (indices.size() < evaluation_batch_images && i + step < data_.test->size()) continue;
      const torch::data::Example<> images = batch_of(*data_.test, indices, 0);
      const torch::Tensor best = local.network().forward(images.data).argmax(1);
      seen[0] += static_cast<double>(indices.size());
      seen[1] += best.eq(images.target).sum().item<double>();
      indices.clear();
    }
  }
  all.sum(seen);
  return seen[1] / seen[0];
}

void training::examine() {
  const work_clock::pause examining(clock);
  const std::vector<std::uint64_t> hashes = all.gather(hash_of(local));
  for (std::size_t rank = 0; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0])
      throw std::runtime_error(name_of(rank) + " ends with other parameters than " + name_of(0));
  }
  nlohmann::ordered_json line = {{"parameters", hashes.empty() ? 0 : hashes[0]}};
  // What is replayed trains nothing.
  if (!how.no_evaluation && how.replay.empty()) line["top1"] = evaluate();
  if (all.rank() == 0) print(line);
}

void training::log(std::uint64_t step, const step_report& report, const step_traffic& traffic) {
  const double server_seconds = clock.take();
  const std::vector<step_report> reports = all.gather(report);
  if (all.rank() != 0) return;
  step_report sum;
  for (const step_report& each : reports) {
    sum.loss += each.loss * each.images;
    sum.images += each.images;
    sum.compute_seconds = std::max(sum.compute_seconds, each.compute_seconds);
    sum.node_seconds = std::max(sum.node_seconds, each.node_seconds);
    sum.sent_bytes += each.sent_bytes;
    sum.is_sender += each.is_sender;
  }
  const double model_bytes = static_cast<double>(local.model().elements() * sizeof(float));
  const double bytes_down = traffic.receivers == 0 ? sum.sent_bytes : static_cast<double>(traffic.bytes_down);
  const double receivers = traffic.receivers == 0 ? sum.is_sender : static_cast<double>(traffic.receivers);
  const double total_seconds = std::exchange(since_last_, stopwatch()).seconds();
  nlohmann::ordered_json line = {
      {"step", step},
      {"loss", sum.loss / sum.images},
      {"sent_up", sum.sent_bytes / sum.is_sender / model_bytes},
      {"sent_down", bytes_down / receivers / model_bytes},
      {"bytes_up", sum.sent_bytes},
      {"bytes_down", bytes_down},
      {"worker_seconds", sum.compute_seconds},
      {"server_seconds", server_seconds},
      {"communication_seconds", std::max(0.0, total_seconds - server_seconds - sum.compute_seconds)},
      {"node_seconds", sum.node_seconds},
      {"total_seconds", total_seconds}};
  if (traffic.lost_up) line["lost_up"] = *traffic.lost_up;
  if (traffic.exposed_seconds >= 0) {
    line["exposed_seconds"] = traffic.exposed_seconds;
    line["hidden_seconds"] = traffic.hidden_seconds;
  }
  print(line);
}

}  // namespace lab
