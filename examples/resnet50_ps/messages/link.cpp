// SPDX-License-Identifier: MIT
#include "messages/link.hpp"

#include <algorithm>
#include <array>
#include <cstring>

namespace resnet50_ps {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

void heed_last_word(const message& from, const std::string& name) {
  if (!from.report.is_last_word) return;
  throw link_error(
      name + " failed: " + std::string(reinterpret_cast<const char*>(from.bytes.data()), from.bytes.size()));
}

}  // namespace

void send_last_word(transport& ranks, std::span<const std::size_t> to, const std::string& reason) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(reason));
  ranks.send(to, {.is_last_word = true}, {&bytes, 1});
}

std::vector<std::byte> pack(std::span<const std::vector<std::byte>> strings) {
  std::vector<std::byte> packed;
  for (const auto& each : strings) {
    const std::uint64_t length = each.size();
    const auto head = bytes_of(length);
    packed.insert(packed.end(), head.begin(), head.end());
    packed.insert(packed.end(), each.begin(), each.end());
  }
  return packed;
}

std::vector<std::vector<std::byte>> unpack(std::span<const std::byte> bytes) {
  std::vector<std::vector<std::byte>> strings;
  while (!bytes.empty()) {
    std::uint64_t length = 0;
    if (bytes.size() < sizeof length) throw link_error("a packed message is cut");
    std::memcpy(&length, bytes.data(), sizeof length);
    bytes = bytes.subspan(sizeof length);
    if (length > bytes.size()) throw link_error("a packed message is cut");
    strings.emplace_back(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length));
    bytes = bytes.subspan(length);
  }
  return strings;
}

void value_sum::add(std::span<const double> more, double of_workers) {
  if (workers == 0) values.assign(more.size(), 0);
  if (more.size() != values.size()) {
    throw link_error("values to be averaged differ in number: " + std::to_string(values.size()) + " and " +
                     std::to_string(more.size()));
  }
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = workers == 0 ? more[i] : values[i] + more[i];
  workers += of_workers;
}

// The message's first number is how many workers the others are of.
void value_sum::add(const message& asking) {
  std::vector<double> numbers(asking.bytes.size() / sizeof(double));
  if (numbers.empty() || !asking.report.asks_for_mean) {
    throw link_error("not all workers ask for the mean at the same time");
  }
  std::memcpy(numbers.data(), asking.bytes.data(), numbers.size() * sizeof(double));
  add(std::span(numbers).subspan(1), numbers[0]);
}

void worker_peers::average(std::span<float> values) {
  std::vector<double> exact(values.begin(), values.end());
  average(std::span(exact));
  std::ranges::transform(exact, values.begin(), [](double each) { return static_cast<float>(each); });
}

server_link::server_link(transport& ranks, std::vector<client> clients,
                         std::function<void(const std::string&)> on_loss)
    : transport_(ranks), clients_(std::move(clients)), on_loss_(std::move(on_loss)) {
  for (std::size_t c = 0; c < clients_.size(); ++c) {
    ranks_left_.push_back(clients_[c].rank);
    numbers_left_.push_back(c);
  }
}

std::vector<std::size_t> server_link::workers_of_clients() const {
  std::vector<std::size_t> workers;
  for (const client& each : clients_) workers.push_back(each.workers);
  return workers;
}

void server_link::lose(const peers_lost& loss) {
  if (!on_loss_) throw loss;
  for (const std::size_t rank : loss.ranks()) {
    const auto place = std::ranges::find(ranks_left_, rank) - ranks_left_.begin();
    ranks_left_.erase(ranks_left_.begin() + place);
    numbers_left_.erase(numbers_left_.begin() + place);
  }
  if (ranks_left_.empty()) throw loss;
  on_loss_(loss.what());
}

void server_link::send(std::size_t to, byte_segments bytes) {
  transport_.send(std::span(&clients_[to].rank, 1), {}, bytes);
}

void server_link::send_to_all(byte_segments bytes) {
  try {
    transport_.send(ranks_left_, {}, bytes);
  } catch (const peers_lost& loss) {
    lose(loss);
  }
}

std::vector<message> server_link::collect() {
  for (;;) {
    try {
      std::vector<message> messages = transport_.receive_from_each(ranks_left_);
      for (message& each : messages) {
        each.sender = numbers_left_[each.sender];
        heed_last_word(each, name_of(each.sender));
      }
      return messages;
    } catch (const peers_lost& loss) {
      lose(loss);
    }
  }
}

void server_link::answer(const std::vector<message>& asking) {
  value_sum sum;
  for (const message& each : asking) sum.add(each);
  for (double& each : sum.values) each /= sum.workers;
  send_to_all(std::as_bytes(std::span(sum.values)));
}

std::vector<message> server_link::receive_from_all() {
  const auto asks = [](const message& each) { return each.report.asks_for_mean; };
  std::vector<message> messages = collect();
  while (std::ranges::any_of(messages, asks)) {
    answer(messages);
    messages = collect();
  }
  return messages;
}

message server_link::receive_from_any() {
  latest_.resize(clients());
  for (;;) {
    message arrived = transport_.receive_from_any(ranks_left_);
    const auto place = static_cast<std::ptrdiff_t>(arrived.sender);
    arrived.sender = numbers_left_[arrived.sender];
    heed_last_word(arrived, name_of(arrived.sender));
    if (!arrived.report.asks_for_mean) {
      if (arrived.report.is_last) {
        ranks_left_.erase(ranks_left_.begin() + place);
        numbers_left_.erase(numbers_left_.begin() + place);
      }
      return arrived;
    }
    latest_[arrived.sender] = {};
    latest_[arrived.sender].add(arrived);
    value_sum sum;
    for (const value_sum& each : latest_) {
      if (each.workers > 0) sum.add(each.values, each.workers);
    }
    for (double& each : sum.values) each /= sum.workers;
    send(arrived.sender, std::as_bytes(std::span(sum.values)));
  }
}

std::span<const std::byte> worker_link::receive() {
  const message arrived = transport_.receive_from_each({&hub_, 1})[0];
  heed_last_word(arrived, name_of_server());
  return arrived.bytes;
}

void worker_link::average_over_clients(std::span<double> values, double weight) {
  const std::array segments = {bytes_of(weight), std::as_bytes(std::span<const double>(values))};
  send({.asks_for_mean = true}, segments);
  const std::span<const std::byte> mean = worker_link::receive();
  if (mean.size() != values.size_bytes()) throw link_error("the server sent a mean of other values");
  std::memcpy(values.data(), mean.data(), mean.size());
}

void worker_link::send_state(const std::vector<std::byte>& state) {
  const std::vector<std::byte> packed = pack({&state, 1});
  const std::span<const std::byte> bytes = packed;
  send({}, {&bytes, 1});
}

std::vector<std::byte> worker_link::receive_state() {
  std::vector<std::vector<std::byte>> states = unpack(worker_link::receive());
  if (states.size() != 1) throw link_error("the server sent no state to resume from");
  return std::move(states[0]);
}

}  // namespace resnet50_ps
