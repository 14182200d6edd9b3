// SPDX-License-Identifier: MIT
#include "exchange_steps.hpp"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <lamina/codec.hpp>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>

#include "sgd.hpp"

namespace exchange {
namespace {

using namespace lab;

constexpr float learning_rate = 1e-6F;  // numbers do not grow

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// When a rank did what, in a step. A worker hands its own in when all is over, so that they are in nobody's way.
struct marks {
  double came = 0;             // of a worker: the parameters
  double began = 0;            // to send
  double ended = 0;            // of the server: the last frame has come
  std::clock_t processor = 0;  // spent by this process until `began`
  packet_counts packets = {};  // likewise
};

// The numbers of a replica's parameters, or of a worker's gradients, in layers.
struct numbers {
  explicit numbers(const lamina::layout& model) : values(model.elements()) {
    for (std::size_t l = 0; l < model.layers(); ++l)
      layers.push_back(std::span(values).subspan(model.offset(l), model.sizes()[l]));
  }
  numbers(const numbers&) = delete;
  numbers& operator=(const numbers&) = delete;

  std::uint64_t hash() const {
    const auto bytes = std::as_bytes(std::span(values));
    return XXH3_64bits(bytes.data(), bytes.size());
  }

  std::vector<float> values;
  std::vector<std::span<float>> layers;
};

void fill_with_noise(std::span<float> values) {
  std::uint32_t bits = 1;  // a linear congruential generator: any noise will do
  for (float& each : values) {
    bits = bits * 1664525U + 1013904223U;
    each = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31F;
  }
}

marks marks_now(way& over) {
  return {.began = now_seconds(), .processor = std::clock(), .packets = over.packets()};
}

void add_since(step_seen& to, const marks& before, const marks& after) {
  to.cpu_seconds += static_cast<double>(after.processor - before.processor) / CLOCKS_PER_SEC;
  to.packets.sent += after.packets.sent - before.packets.sent;
  to.packets.repeated += after.packets.repeated - before.packets.repeated;
  to.packets.late += after.packets.late - before.packets.late;
  to.packets.missing += after.packets.missing - before.packets.missing;
  to.packets.missing_droppable += after.packets.missing_droppable - before.packets.missing_droppable;
}

// `all` has the marks of every rank, the server's first: of each one more than `seen`, for the end.
void join(std::vector<step_seen>& seen, std::span<const marks> all) {
  const std::size_t each_has = seen.size() + 1;
  const std::span<const marks> server = all.first(each_has);
  for (std::size_t s = 0; s < seen.size(); ++s) {
    double last_came = server[s].began;
    double first_began = server[s].ended;
    add_since(seen[s], server[s], server[s + 1]);
    for (std::size_t w = each_has; w < all.size(); w += each_has) {
      const std::span<const marks> worker = all.subspan(w, each_has);
      last_came = std::max(last_came, worker[s].came);
      first_began = std::min(first_began, worker[s].began);
      add_since(seen[s], worker[s], worker[s + 1]);
    }
    seen[s].down_seconds = last_came - server[s].began;
    seen[s].up_seconds = server[s].ended - first_began;
    seen[s].seconds = server[s].ended - server[s].began;
    seen[s].period_seconds = server[s + 1].began - server[s].began;
  }
}

// In steps of a part of the layout that has no common divisor with it, so that all are met.
std::vector<std::size_t> spread_order(std::size_t count) {
  const auto golden = static_cast<std::size_t>(std::llround(0.618 * static_cast<double>(count)));
  std::size_t stride = std::max<std::size_t>(1, golden);
  while (std::gcd(stride, count) > 1) ++stride;
  std::vector<std::size_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i * stride % count;
  return order;
}

}  // namespace

rotation::rotation(const lamina::layout& layers, double share)
    : layers_(layers), share_(share), order_(spread_order(layers.layers())), chosen_(layers) {
  if (!(share > 0 && share <= 1))
    throw std::invalid_argument("the share of a frame is above 0 and at most 1, not " +
                                std::to_string(share));
}

const lamina::selection& rotation::next() {
  chosen_.clear();
  const auto wanted = static_cast<std::uint64_t>(
      std::llround(share_ * static_cast<double>(++steps_) * static_cast<double>(layers_.elements())));
  for (std::size_t taken = 0; taken < order_.size() && sent_elements_ < wanted; ++taken) {
    chosen_.send(order_[at_]);
    sent_elements_ += layers_.sizes()[order_[at_]];
    at_ = (at_ + 1) % order_.size();
  }
  return chosen_;
}

std::vector<step_seen> serve(way& over, const mpi_ranks& ranks, const exchange_plan& plan) {
  const lamina::layout& model = plan.layers;
  std::vector<std::size_t> clients(ranks.size() - 1);
  std::iota(clients.begin(), clients.end(), std::size_t{1});
  numbers local(model);
  lamina::server<float> server(model, {.workers = clients.size(), .frame_checksum = plan.links.checksum()});
  commit_all(server, reply_to_all(server, local.layers));  // all begin with zeros
  sgd optimizer(model.elements(), 0);

  std::vector<step_seen> seen;
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const lamina::server_reply frame = reply_to_all(server, local.layers);
    const std::size_t frame_bytes = frame.size_bytes();
    mine.push_back(marks_now(over));
    over.send_parameters(clients, frame.frame(), frame.sent());
    commit_all(server, frame);
    if (step > plan.steps) break;
    const std::vector<arrival> gradients = over.receive(clients);
    mine.back().ended = now_seconds();
    step_seen& line = seen.emplace_back(step_seen{.step = step,
                                                  .bytes_down = frame_bytes * clients.size(),
                                                  .missing_up = add_gradients(server, gradients, name_of)});
    for (const arrival& each : gradients) line.bytes_up += each.bytes.size();
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      optimizer.update(model.offset(l) + begin, mean, local.layers[l].subspan(begin, mean.size()),
                       learning_rate);
    });
  }
  const std::vector<std::uint64_t> hashes = ranks.gather(local.hash());
  for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0])
      throw std::runtime_error(name_of(rank) + " ends with other parameters than it was sent");
  }
  join(seen, ranks.gather_all(std::span<const marks>(mine)));
  return seen;
}

void work(way& over, const mpi_ranks& ranks, const exchange_plan& plan) {
  const lamina::layout& model = plan.layers;
  constexpr std::size_t server = 0;
  numbers local(model);
  numbers gradients(model);
  fill_with_noise(gradients.values);
  lamina::frame_encoder<float> frames(model);
  rotation layers(model, plan.share);
  const lamina::tiling whole(model);
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const arrival arrived = over.receive({&server, 1})[0];
    const double came = now_seconds();
    lamina::apply<float>(arrived.bytes, whole, step, local.layers);
    const bool is_over = step > plan.steps;
    const lamina::selection& chosen = layers.next();
    const lamina::encoded_frame& frame =
        frames.encode({.step = step,
                       .sender = static_cast<std::uint32_t>(ranks.rank() - 1),
                       .checksum = plan.links.checksum()},
                      chosen, [&](std::size_t l) { return gradients.layers[l]; });
    mine.push_back(marks_now(over));
    mine.back().came = came;
    if (is_over) break;
    over.send_gradients(frame, chosen);
  }
  static_cast<void>(ranks.gather(local.hash()));
  static_cast<void>(ranks.gather_all(std::span<const marks>(mine)));
}

}  // namespace exchange
