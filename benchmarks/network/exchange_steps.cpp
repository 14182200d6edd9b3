// SPDX-License-Identifier: MIT
#include "exchange_steps.hpp"

#include <xxhash.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "loops/losses.hpp"
#include "messages/link.hpp"
#include "model/optimizer.hpp"

namespace exchange {
namespace {

using namespace lab;
namespace bounded = lamina::bounded;

constexpr float learning_rate = 1e-6F;  // numbers do not grow

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double processor_seconds(clockid_t clock) {
  timespec spent{};
  clock_gettime(clock, &spent);
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
    return std::max<std::uint64_t>(1, XXH3_64bits(bytes.data(), bytes.size()));
  }

  lamina::layout layers;
  std::vector<float> values;
};

struct published {
  parameters local;
  lamina::parameter_publisher<float> frames;
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

transfer_cost sum_of(std::span<const pushed> arrived) {
  transfer_cost sum;
  for (const pushed& each : arrived) {
    if (each.transfer) sum += each.transfer->cost;
  }
  return sum;
}

std::vector<std::vector<marks>> receive_marks(server_link& workers, std::uint64_t steps) {
  std::vector<std::vector<marks>> of_workers;
  for (const message& each : workers.receive_from_all(message_kind::values)) {
    if (each.bytes.size() != steps * sizeof(marks))
      throw link_error(workers.name_of(each.sender) + " tells of another number of steps");
    std::memcpy(of_workers.emplace_back(steps).data(), each.bytes.data(), each.bytes.size());
  }
  return of_workers;
}

// Those of the server and of the workers have one more than `seen`: the end.
void join(std::vector<step_seen>& seen, const std::vector<marks>& server,
          const std::vector<std::vector<marks>>& workers) {
  for (std::size_t s = 0; s < seen.size(); ++s) {
    double last_came = server[s].began;
    double first_began = server[s].ended;
    seen[s].cpu_seconds = server[s + 1].cpu - server[s].cpu;
    for (const std::vector<marks>& worker : workers) {
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

std::vector<step_seen> serve(transport& ranks, const exchange_plan& plan) {
  const lamina::layout& model = plan.layers;
  std::vector<client> clients;
  for (std::size_t rank = 1; rank < ranks.ranks(); ++rank) clients.push_back({.rank = rank});
  server_link workers(ranks, clients);
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, clients.size());
  // Shared with the sends, as in the harness.
  const auto out = std::make_shared<published>(
      published{parameters(model), lamina::parameter_publisher<float>(
                                       model, clients.size(), {.frame_checksum = checksum_of(plan.losses)})});
  const auto layer = [&](std::size_t l) { return out->local(l); };
  static_cast<void>(out->frames.encode_for_all(0, layer));
  out->frames.commit_all();  // all begin with zeros
  const parameter_way down(plan.losses, model);
  sgd optimizer(model, {.learning_rate = learning_rate});

  std::vector<step_seen> seen;
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const bool is_over = step > plan.steps;
    const lamina::encoded_frame& frame = out->frames.encode_for_all(step, layer);
    marks now{.began = now_seconds(), .cpu = processor_seconds(plan.processor_clock)};
    const std::vector<sent_frame> sent =
        down.send_to_all(workers, out->frames, frame, is_over ? 0 : plan.losses.bound_down(step), layer, out);
    for (std::size_t c = 0; c < sent.size(); ++c) commit(out->frames, c, sent[c]);
    if (is_over) {
      mine.push_back(now);
      break;
    }

    const std::vector<pushed> gradients = workers.receive_gradients();
    now.ended = now_seconds();
    mine.push_back(now);
    step_seen& line = seen.emplace_back(step_seen{.step = step,
                                                  .bytes_down = frame.size_bytes() * clients.size(),
                                                  .down = sum_of(sent),
                                                  .up = sum_of(gradients)});
    for (const pushed& each : gradients) {
      line.bytes_up += each.bytes.size();
      read_from(workers.name_of(each.sender),
                [&] { aggregator.add(lamina::decode<float>(each.bytes, model)); });
    }
    for (const std::size_t l : aggregator.arrived().sent()) {
      optimizer.begin(l, step);
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> gradient) {
        optimizer.update(l, begin, gradient, layer(l));
      });
    }
    out->frames.update(aggregator.arrived());
    aggregator.next_step();
  }
  const std::uint64_t expected = out->local.hash();
  for (const pushed& each : workers.receive_last_reports()) {
    if (each.report.replica_hash != expected)
      throw other_replica(workers.name_of(each.sender), plan.steps + 1);
  }
  join(seen, mine, receive_marks(workers, plan.steps + 1));
  return seen;
}

void work(transport& ranks, const exchange_plan& plan) {
  const lamina::layout& model = plan.layers;
  worker_link server(ranks, 0);
  parameters local(model);
  const auto own = std::make_shared<gradients>(model);
  const frame_cutter cutter(plan.losses, model, lamina::payload_type::as_is);
  std::optional<bounded::loss_memory> memory;
  if (cutter.grid()) memory.emplace(*cutter.grid());
  rotation layers(model, plan.share);
  const auto layer = [&](std::size_t l) {
    return std::span<const float>(own->values).subspan(model.offset(l), model.sizes()[l]);
  };
  std::vector<marks> mine;
  for (std::uint64_t step = 1;; ++step) {
    const message arrived = server.receive_parameters();
    marks now{.came = now_seconds()};
    write_parameters(arrived, server.name_of_server(), model, step, [&](std::size_t l) { return local(l); });
    if (step > plan.steps) {
      now.cpu = processor_seconds(plan.processor_clock);
      mine.push_back(now);
      break;
    }
    const lamina::selection& chosen = layers.next();
    const lamina::encoded_frame& frame =
        own->frames.encode(lamina::frame_kind::gradients, step, static_cast<std::uint32_t>(ranks.rank() - 1),
                           chosen, layer, lamina::payload_type::as_is, checksum_of(plan.losses));
    const auto chunks = cutter.cut(frame, chosen, plan.losses.bound_up(step));
    std::vector<bounded::chunk> required;
    if (memory) required = memory->required(chosen, plan.losses.max_losses);
    now.began = now_seconds();
    now.cpu = processor_seconds(plan.processor_clock);
    mine.push_back(now);
    const sent_frame sent =
        server.push({}, {.frame = {frame.segments(), own}, .chunks = chunks ? &*chunks : nullptr},
                    {.required = required});
    if (!sent.arrived) continue;
    memory->note(*sent.arrived);
    for (const bounded::chunk& each : chunks->in_sending_order()) {
      const bool is_missing = sent.arrived->is_lost(each.part, each.index);
      const bool is_droppable = (each.tag & bounded::droppable_tag) != 0;
      mine.back().missing += is_missing ? 1 : 0;
      mine.back().missing_droppable += is_missing && is_droppable ? 1 : 0;
    }
  }
  step_report last;
  last.replica_hash = local.hash();
  server.finish(last);
  server.send(message_kind::values, payload(std::as_bytes(std::span<const marks>(mine))));
}

}  // namespace exchange
