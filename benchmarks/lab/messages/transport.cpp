// SPDX-License-Identifier: MIT
#include "messages/transport.hpp"

#include <algorithm>
#include <iterator>

namespace lab {

const char* describe(message_kind kind) {
  switch (kind) {
    case message_kind::sign_of_life:
      return "a sign of life";
    case message_kind::introduction:
      return "an introduction";
    case message_kind::welcome:
      return "a welcome";
    case message_kind::parameters:
      return "parameters";
    case message_kind::gradients:
      return "gradients";
    case message_kind::part:
      return "a part of gradients";
    case message_kind::report:
      return "a report";
    case message_kind::finished:
      return "its last report";
    case message_kind::values:
      return "values to be averaged";
    case message_kind::mean:
      return "a mean";
    case message_kind::slice:
      return "a slice of a sum";
    case message_kind::state:
      return "a state";
    case message_kind::failure:
      return "a failure";
  }
  return "a message of an unknown kind";
}

payload::payload(std::span<const std::byte> bytes)
    : payload(std::vector<std::byte>(bytes.begin(), bytes.end())) {}

payload::payload(std::vector<std::byte> bytes) {
  const auto owned = std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  segments_.emplace_back(*owned);
  owners_.push_back(owned);
}

void payload::append(payload more) {
  segments_.insert(segments_.end(), more.segments_.begin(), more.segments_.end());
  owners_.insert(owners_.end(), std::make_move_iterator(more.owners_.begin()),
                 std::make_move_iterator(more.owners_.end()));
}

std::size_t payload::size_bytes() const {
  std::size_t sum = 0;
  for (const auto segment : segments_) sum += segment.size();
  return sum;
}

void transport::flush(std::span<const std::size_t>) {
  throw std::logic_error("flush: this transport does not say when what has begun to go has been sent");
}

std::optional<message> transport::look_for(std::span<const std::size_t>) {
  throw std::logic_error("look_for: this transport gives a message to who waits for one");
}

std::vector<sent_frame> transport::send_frame(std::span<const std::size_t> to, message_kind kind,
                                              const outgoing_frame& what,
                                              std::span<const lamina::bounded::obligations> of_each) {
  const bool is_anything_owed = std::ranges::any_of(of_each, [](const lamina::bounded::obligations& each) {
    return !each.required.empty() || !each.repairs.empty();
  });
  if (is_anything_owed) throw std::logic_error("what was lost is sent again where nothing can be lost");
  payload all = what.frame;
  all.append(what.behind);
  send(to, kind, all);
  return std::vector<sent_frame>(to.size());
}

std::unique_ptr<lamina::collectives::channel> transport::make_channel() {
  throw std::logic_error("make_channel: this transport has messages alone");
}

std::string names_of(std::span<const std::size_t> ranks, const rank_names& name_of) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 < ranks.size() ? ", " : " and ";
    text += name_of(ranks[i]);
  }
  return text;
}

}  // namespace lab
