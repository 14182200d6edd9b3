// SPDX-License-Identifier: MIT
#include "messages/link.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace lab {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

std::string text_in(const message& arrived) {
  return {reinterpret_cast<const char*>(arrived.bytes.data()), arrived.bytes.size()};
}

payload mean_of(const value_sum& sum) {
  std::vector<double> mean = sum.values;
  for (double& each : mean) each /= sum.workers;
  return payload(std::as_bytes(std::span(mean)));
}

}  // namespace

void expect(const message& arrived, message_kind kind, const std::string& sender) {
  if (arrived.kind == message_kind::failure) throw link_error(sender + " failed: " + text_in(arrived));
  if (arrived.kind == kind) return;
  throw link_error(sender + " sent " + describe(arrived.kind) + " where " + describe(kind) +
                   " belongs: not all ranks are at the same place of the same run");
}

void send_failure(transport& ranks, std::span<const std::size_t> to, const std::string& reason) {
  ranks.send(to, message_kind::failure, payload(std::as_bytes(std::span(reason))));
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

void read_elements(std::span<const std::byte> from, std::span<std::byte> into) {
  if (from.size() != into.size()) throw link_error("the state to resume from is that of another model");
  if (!from.empty()) std::memcpy(into.data(), from.data(), from.size());
}

pushed read_pushed(const message& arrived) {
  if (!arrived.behind.empty()) {
    return {.sender = arrived.sender,
            .report = decode_report(arrived.behind),
            .bytes = arrived.bytes,
            .owner = arrived.owner,
            .transfer = arrived.transfer};
  }
  const std::size_t behind = std::min(report_bytes, arrived.bytes.size());
  return {.sender = arrived.sender,
          .report = decode_report(arrived.bytes.last(behind)),
          .bytes = arrived.bytes.first(arrived.bytes.size() - behind),
          .owner = arrived.owner,
          .transfer = arrived.transfer};
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
  if (numbers.empty()) throw link_error("values to be averaged do not say over how many workers");
  std::memcpy(numbers.data(), asking.bytes.data(), numbers.size() * sizeof(double));
  add(std::span(numbers).subspan(1), numbers[0]);
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

void server_link::send(std::size_t client, message_kind kind, const payload& what) {
  const work_clock::pause sending(clock_);
  transport_.send(std::span(&clients_[client].rank, 1), kind, what);
}

void server_link::begin_send(std::size_t client, message_kind kind, const payload& what) {
  const work_clock::pause sending(clock_);
  transport_.begin_send(clients_[client].rank, kind, what);
}

void server_link::flush() {
  const work_clock::pause sending(clock_);
  transport_.flush(ranks_left_);
}

void server_link::send_to_all(message_kind kind, const payload& what) {
  const work_clock::pause sending(clock_);
  try {
    transport_.send(ranks_left_, kind, what);
  } catch (const peers_lost& loss) {
    lose(loss);
  }
}

sent_frame server_link::send_frame(std::size_t client, message_kind kind, const outgoing_frame& what,
                                   const lamina::bounded::obligations& owed) {
  const work_clock::pause sending(clock_);
  return transport_.send_frame(std::span(&clients_[client].rank, 1), kind, what, std::span(&owed, 1))[0];
}

std::vector<sent_frame> server_link::send_frame_to_all(
    message_kind kind, const outgoing_frame& what, std::span<const lamina::bounded::obligations> of_clients) {
  const work_clock::pause sending(clock_);
  std::vector<lamina::bounded::obligations> of_those_left;
  if (!of_clients.empty()) {
    for (const std::size_t each : numbers_left_) of_those_left.push_back(of_clients[each]);
  }
  std::vector<sent_frame> all(clients());
  const auto keep = [&](const std::vector<sent_frame>& sent) {
    for (std::size_t i = 0; i < sent.size(); ++i) all[numbers_left_[i]] = sent[i];
  };
  try {
    keep(transport_.send_frame(ranks_left_, kind, what, of_those_left));
  } catch (const frame_lost& loss) {
    keep(loss.sent());
    lose(loss);
  } catch (const peers_lost& loss) {
    lose(loss);
  }
  return all;
}

std::vector<message> server_link::receive_from_all(message_kind kind) {
  const work_clock::pause waiting(clock_);
  for (;;) {
    try {
      std::vector<message> messages = transport_.receive_from_each(ranks_left_);
      for (message& each : messages) {
        each.sender = numbers_left_[each.sender];
        expect(each, kind, name_of(each.sender));
      }
      return messages;
    } catch (const peers_lost& loss) {
      lose(loss);
    }
  }
}

std::vector<pushed> server_link::receive_pushed(message_kind kind) {
  std::vector<pushed> all;
  for (const message& each : receive_from_all(kind)) all.push_back(read_pushed(each));
  return all;
}

void server_link::average() {
  const work_clock::pause averaging(clock_);
  value_sum sum;
  for (const message& each : receive_from_all(message_kind::values)) sum.add(each);
  send_to_all(message_kind::mean, mean_of(sum));
}

message server_link::receive_from_any(std::span<const std::size_t> clients) {
  const work_clock::pause waiting(clock_);
  std::vector<std::size_t> ranks;
  for (const std::size_t each : clients) ranks.push_back(clients_[each].rank);
  message arrived = transport_.receive_from_any(ranks);
  arrived.sender = clients[arrived.sender];
  return arrived;
}

void server_link::take_values(const message& asking) {
  const work_clock::pause averaging(clock_);
  latest_.resize(clients());
  latest_[asking.sender] = {};
  latest_[asking.sender].add(asking);
}

void server_link::answer_with_mean(std::size_t client) {
  const work_clock::pause averaging(clock_);
  value_sum sum;
  for (const value_sum& each : latest_) {
    if (each.workers > 0) sum.add(each.values, each.workers);
  }
  begin_send(client, message_kind::mean, mean_of(sum));
}

void worker_link::send(message_kind kind, const payload& what) {
  const work_clock::pause sending(clock_);
  transport_.send(std::span(&hub_, 1), kind, what);
}

void worker_link::begin_send(message_kind kind, const payload& what) {
  const work_clock::pause sending(clock_);
  transport_.begin_send(hub_, kind, what);
}

std::optional<message> worker_link::look_for(message_kind kind) {
  const work_clock::pause looking(clock_);
  std::optional<message> arrived = transport_.look_for(std::span(&hub_, 1));
  if (arrived) expect(*arrived, kind, name_of_server());
  return arrived;
}

void worker_link::flush() {
  const work_clock::pause sending(clock_);
  transport_.flush(std::span(&hub_, 1));
}

message worker_link::receive(message_kind kind) {
  const work_clock::pause waiting(clock_);
  message arrived = transport_.receive_from_each(std::span(&hub_, 1))[0];
  expect(arrived, kind, name_of_server());
  return arrived;
}

message worker_link::receive_parameters() {
  message arrived = receive(message_kind::parameters);
  clock_.take();
  return arrived;
}

void worker_link::push(const step_report& report, payload gradients) {
  send(message_kind::gradients, with_report(report, std::move(gradients)));
}

void worker_link::begin_push(const step_report& report, payload gradients) {
  begin_send(message_kind::gradients, with_report(report, std::move(gradients)));
}

payload worker_link::with_report(step_report report, payload gradients) {
  report.compute_seconds = clock_.take() - report.node_seconds;
  gradients.append(payload(encode_report(report)));
  return gradients;
}

sent_frame worker_link::push(step_report report, outgoing_frame gradients,
                             const lamina::bounded::obligations& owed) {
  report.compute_seconds = clock_.take() - report.node_seconds;
  gradients.behind = payload(encode_report(report));
  const work_clock::pause sending(clock_);
  return transport_.send_frame(std::span(&hub_, 1), message_kind::gradients, gradients,
                               std::span(&owed, 1))[0];
}

void worker_link::finish(const step_report& report) {
  send(message_kind::finished, payload(encode_report(report)));
}

void worker_link::send_states(std::span<const std::vector<std::byte>> states) {
  send(message_kind::state, payload(pack(states)));
}

std::vector<std::vector<std::byte>> worker_link::receive_states(std::size_t expected) {
  std::vector<std::vector<std::byte>> states = unpack(receive(message_kind::state).bytes);
  if (states.size() == expected) return states;
  throw link_error(name_of_server() + " sent " + std::to_string(states.size()) +
                   " states to resume from, not " + std::to_string(expected));
}

void worker_link::average(std::span<double> values, double weight) {
  const work_clock::pause averaging(clock_);
  payload asking(bytes_of(weight));
  asking.append(payload(std::as_bytes(std::span<const double>(values))));
  send(message_kind::values, asking);
  const message mean = receive(message_kind::mean);
  if (mean.bytes.size() != values.size_bytes()) throw link_error("the server sent a mean of other values");
  std::memcpy(values.data(), mean.bytes.data(), mean.bytes.size());
}

}  // namespace lab
