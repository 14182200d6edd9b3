// SPDX-License-Identifier: MIT
#include "exchange_steps.hpp"

#include <time.h>
#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>

#include "sgd.hpp"

namespace exchange {
namespace {

using namespace lab;
namespace bounded = lamina::bounded;

constexpr float learning_rate = 1e-6F;  // numbers do not grow

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of this process.
double processor_seconds() {
  timespec spent{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
  return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
}

// When a rank did what, in a step. A worker hands its own in when all is over, so that they are in nobody's way.
struct marks {
  double came = 0;                      // of a worker: the parameters
  double began = 0;                     // to send
  double ended = 0;                     // of the server: the last frame has come
  double cpu = 0;                       // spent until `began`
  std::uint64_t missing = 0;            // chunks of what was sent then
  std::uint64_t missing_droppable = 0;  // of these
};

// One replica of the parameters, all zeros at first, so that nobody has to send them.
struct parameters {
  explicit parameters(const lamina::layout& model) : layers(model), values(model.elements()) {}
  std::span<float> operator()(std::size_t l) {
    return std::span(values).subspan(layers.offset(l), layers.sizes()[l]);
  }
  std::uint64_t hash() const {
    const auto bytes = std::as_bytes(std::span(values));
    return XXH3_64bits(bytes.data(), bytes.size());
  }

  lamina::layout layers;
  std::vector<float> values;
};

// What a worker sends: layers of noise, and the frame that points into them.
struct gradients {
  explicit gradients(const lamina::layout& model) : layers(model), values(model.elements()), frames(model) {
    std::uint32_t bits = 1;  // a linear congruential generator: any noise will do
    for (float& each : values) {
      bits = bits * 1664525U + 1013904223U;
      each = static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31F;
    }
  }

  lamina::layout layers;
  std::vector<float> values;
  lamina::frame_encoder<float> frames;
};

transfer_cost sum_of(std::span<const sent_frame> sent) {
  transfer_cost sum;
  for (const sent_frame& each : sent) sum += each.cost;
  return sum;
}

transfer_cost sum_of(std::span<const message> arrived) {
  transfer_cost sum;
  for (const message& each : arrived) {
    if (each.transfer) sum += each.transfer->cost;
  }
  return sum;
}

// `all` has the marks of every rank, the server's first: of each one more than `seen`, for the end.
void join(std::vector<step_seen>& seen, std::span<const marks> all) {
  const std::size_t each_has = seen.size() + 1;
  const std::span<const marks> server = all.first(each_has);
  for (std::size_t s = 0; s < seen.size(); ++s) {
    double last_came = server[s].began;
    double first_began = server[s].ended;
    seen[s].cpu_seconds = server[s + 1].cpu - server[s].cpu;
    for (std::size_t w = each_has; w < all.size(); w += each_has) {
      const std::span<const marks> worker = all.subspan(w, each_has);
      last_came = std::max(last_came, worker[s].came);
      first_began = std::min(first_began, worker[s].began);
      seen[s].cpu_seconds += worker[s + 1].cpu - worker[s].cpu;
      seen[s].missing_chunks += worker[s].missing;
      seen[s].missing_droppable_chunks += worker[s].missing_droppable;
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
  parameters local(model);
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, clients.size());
  lamina::parameter_publisher<float> published(model, clients.size(),
                                               {.frame_checksum = plan.losses.checksum()});
  static_cast<void>(published.encode_for_all(0, local));
  published.commit_all();  // all begin with zeros
  const frame_cutter cutter(plan.losses, model);
  sgd optimizer(model.elements(), 0);

  std::vector<step_seen> seen;
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const bool is_over = step > plan.steps;
    const lamina::encoded_frame& frame = published.encode_for_all(step, local);
    const std::size_t frame_bytes = frame.size_bytes();
    marks now{.began = now_seconds(), .cpu = processor_seconds()};
    const std::vector<sent_frame> sent = send_parameters(over, cutter, published, frame, clients);
    if (is_over) {
      mine.push_back(now);
      break;
    }
    const std::vector<message> gradients = over.receive(clients, message_kind::gradients);
    now.ended = now_seconds();
    mine.push_back(now);
    step_seen& line = seen.emplace_back(step_seen{.step = step,
                                                  .bytes_down = frame_bytes * clients.size(),
                                                  .down = sum_of(sent),
                                                  .up = sum_of(gradients)});
    for (const message& each : gradients) {
      line.bytes_up += each.bytes.size();
      read_from("worker " + std::to_string(each.sender),
                [&] { aggregator.add(lamina::decode<float>(each.bytes, model)); });
    }
    for (const std::size_t l : aggregator.arrived().sent()) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(model.offset(l) + begin, gradient, local(l).subspan(begin, gradient.size()),
                         learning_rate);
      });
    }
    published.update(aggregator.arrived());
    aggregator.next_step();
  }
  const std::vector<std::uint64_t> hashes = ranks.gather(local.hash());
  for (std::size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] != hashes[0])
      throw link_error("worker " + std::to_string(rank - 1) + " ends with other parameters than it was sent");
  }
  join(seen, ranks.gather_all(std::span<const marks>(mine)));
  return seen;
}

void work(way& over, const mpi_ranks& ranks, const exchange_plan& plan) {
  const lamina::layout& model = plan.layers;
  constexpr std::size_t server = 0;
  parameters local(model);
  gradients own(model);
  gradient_way up(over, plan.losses, model);
  rotation layers(model, plan.share);
  const auto layer = [&](std::size_t l) {
    return std::span<const float>(own.values).subspan(model.offset(l), model.sizes()[l]);
  };
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const message arrived = over.receive({&server, 1}, message_kind::parameters)[0];
    marks now{.came = now_seconds()};
    write_parameters(arrived, model, step, local);
    if (step > plan.steps) {
      now.cpu = processor_seconds();
      mine.push_back(now);
      break;
    }
    const lamina::selection& chosen = layers.next();
    const lamina::encoded_frame& frame =
        own.frames.encode(lamina::frame_kind::gradients, step, static_cast<std::uint32_t>(ranks.rank() - 1),
                          chosen, layer, lamina::payload_type::as_is, plan.losses.checksum());
    now.began = now_seconds();
    now.cpu = processor_seconds();
    mine.push_back(now);
    const gradient_way::sent sent = up.send(frame, chosen);
    if (!sent.arrived) continue;
    for (const bounded::chunk& each : sent.chunks->in_sending_order()) {
      const bool is_missing = sent.arrived->is_lost(each.part, each.index);
      const bool is_droppable = (each.tag & bounded::droppable_tag) != 0;
      mine.back().missing += is_missing ? 1 : 0;
      mine.back().missing_droppable += is_missing && is_droppable ? 1 : 0;
    }
  }
  static_cast<void>(ranks.gather(local.hash()));
  static_cast<void>(ranks.gather_all(std::span<const marks>(mine)));
}

}  // namespace exchange
