// SPDX-License-Identifier: MIT
#include "messages/worker_group.hpp"

#include <algorithm>
#include <functional>

namespace lab {
namespace {

constexpr std::size_t first_worker = 0;

template <class T>
std::span<const T> values_in(const message& from, std::size_t count) {
  if (from.bytes.size() != count * sizeof(T)) throw link_error("a worker sums other values than the others");
  return {reinterpret_cast<const T*>(from.bytes.data()), count};
}

// A frame that lies where its packets were put stands until something is sent to its sender.
void keep(message& frame) {
  const auto bytes = std::make_shared<const std::vector<std::byte>>(frame.bytes.begin(), frame.bytes.end());
  frame.bytes = *bytes;
  frame.owner = bytes;
}

}  // namespace

worker_group::worker_group(transport& ranks) : transport_(ranks) {
  for (std::size_t rank = 0; rank < ranks.ranks(); ++rank) {
    if (rank != ranks.rank()) others_.push_back(rank);
  }
}

// To one and from one at a time, each round at another distance: all at once would meet in the queues of the links.
template <class Round>
void worker_group::in_rounds(Round round) const {
  for (std::size_t distance = 1; distance < workers(); ++distance)
    round((worker() + distance) % workers(), (worker() + workers() - distance) % workers());
}

template <class Outgoing, class Take>
void worker_group::exchange_with_all(Outgoing outgoing, Take take) {
  in_rounds([&](std::size_t to, std::size_t from) {
    const message theirs = transport_.exchange(to, message_kind::slice, outgoing(to), from);
    expect(theirs, message_kind::slice, name_of(from));
    take(from, theirs);
  });
}

void worker_group::sum(const std::shared_ptr<std::vector<float>>& values) {
  const work_clock::pause summing(clock_);
  const auto slice = [&](std::size_t w) {
    const std::size_t begin = values->size() * w / workers();
    return std::span(*values).subspan(begin, values->size() * (w + 1) / workers() - begin);
  };
  const auto outgoing = [&](std::span<float> part) {
    const std::span<const std::byte> bytes = std::as_bytes(part);
    return payload({&bytes, 1}, values);
  };
  const std::span<float> mine = slice(worker());
  std::vector<message> messages(workers());
  exchange_with_all([&](std::size_t to) { return outgoing(slice(to)); },
                    [&](std::size_t from, const message& theirs) { messages[from] = theirs; });
  const auto part = [&](std::size_t w) {
    return w == worker() ? std::span<const float>(mine) : values_in<float>(messages[w], mine.size());
  };
  std::vector<float> total(part(0).begin(), part(0).end());
  for (std::size_t w = 1; w < workers(); ++w) {
    std::ranges::transform(total, part(w), total.begin(), std::plus());
  }
  std::ranges::copy(total, mine.begin());

  exchange_with_all([&](std::size_t) { return outgoing(mine); },
                    [&](std::size_t from, const message& theirs) {
                      const std::span<float> to = slice(from);
                      std::ranges::copy(values_in<float>(theirs, to.size()), to.begin());
                    });
}

std::vector<message> worker_group::exchange(const std::function<payload(std::size_t)>& outgoing) {
  const work_clock::pause exchanging(clock_);
  std::vector<message> messages(workers());
  exchange_with_all(outgoing, [&](std::size_t from, const message& theirs) { messages[from] = theirs; });
  return messages;
}

std::vector<message> worker_group::exchange_frames(
    const std::function<void(std::size_t to, const frame_sender& way)>& send) {
  const work_clock::pause exchanging(clock_);
  std::vector<message> messages(workers());
  in_rounds([&](std::size_t to, std::size_t from) {
    message& theirs = messages[from];
    send(to, [&](const outgoing_frame& what, const lamina::bounded::obligations& owed) {
      if (what.chunks == nullptr) {
        theirs = transport_.exchange(to, message_kind::gradients, what.frame, from);
        return sent_frame();
      }
      sent_frame sent = transport_.send_frame({&to, 1}, message_kind::gradients, what, {&owed, 1})[0];
      theirs = transport_.receive_from_each({&from, 1})[0];
      if (!theirs.owner) keep(theirs);
      return sent;
    });
    expect(theirs, message_kind::gradients, name_of(from));
  });
  return messages;
}

// By worker 0, who hears all of them: few values, and it knows at once who is silent.
void worker_group::average(std::span<double> values) {
  const work_clock::pause averaging(clock_);
  const std::vector<message> asking =
      gather(message_kind::values, payload(std::as_bytes(std::span<const double>(values))));
  if (worker() > 0) {
    const message mean = receive_from_first(message_kind::mean);
    std::ranges::copy(values_in<double>(mean, values.size()), values.begin());
    return;
  }
  for (std::size_t w = 1; w < workers(); ++w) {
    std::ranges::transform(values, values_in<double>(asking[w], values.size()), values.begin(), std::plus());
  }
  for (double& each : values) each /= static_cast<double>(workers());
  transport_.send(others_, message_kind::mean, payload(std::as_bytes(std::span<const double>(values))));
}

std::vector<message> worker_group::gather(message_kind kind, const payload& mine) {
  const work_clock::pause gathering(clock_);
  if (worker() > 0) {
    transport_.send({&first_worker, 1}, kind, mine);
    return {};
  }
  const auto own = std::make_shared<std::vector<std::byte>>();
  for (const auto segment : mine.segments()) own->insert(own->end(), segment.begin(), segment.end());
  std::vector<message> messages = {{.sender = 0, .kind = kind, .bytes = *own, .owner = own}};
  for (message each : transport_.receive_from_each(others_)) {
    each.sender = others_[each.sender];
    expect(each, kind, name_of(each.sender));
    messages.push_back(each);
  }
  return messages;
}

std::vector<std::byte> worker_group::scatter(message_kind kind,
                                             const std::function<std::vector<std::byte>(std::size_t)>& make) {
  const work_clock::pause scattering(clock_);
  if (worker() > 0) {
    const message mine = receive_from_first(kind);
    return {mine.bytes.begin(), mine.bytes.end()};
  }
  for (const std::size_t w : others_) transport_.send({&w, 1}, kind, payload(make(w)));
  return make(first_worker);
}

message worker_group::receive_from_first(message_kind kind) {
  message arrived = transport_.receive_from_each({&first_worker, 1})[0];
  expect(arrived, kind, name_of(first_worker));
  return arrived;
}

}  // namespace lab
