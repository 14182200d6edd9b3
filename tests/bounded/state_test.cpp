// SPDX-License-Identifier: MIT
// Every state of both ends and every event: what the tables of docs/bounded-loss-protocol.md say, and no more.
#include <algorithm>
#include <array>
#include <map>
#include <system_error>

#include "bounded/peer.hpp"
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::state_test {

using bytes = std::vector<std::byte>;

using bounded::chunk;
using bounded::chunk_grid;
using bounded::control_type;

namespace {

// Fragments of 20 and 10 chunks, of which 2 and 1 may be missing, and of one that is dropped.
const lamina::layout& some_model() {
  static const lamina::layout model = model_of({160, 80, 8});
  return model;
}
const chunk_grid& some_grid() {
  static const auto grid = chunk_grid::of<float>(some_model(), payload_type::as_is, 8);
  return grid;
}
const made_frame<float>& some_frame() {
  static std::mt19937 random(91);
  static const made_frame<float> made(random, some_model(), some_of(some_model(), {0, 1}));
  return made;
}
const made_frame<float>& empty_frame() {
  static std::mt19937 random(92);
  static const made_frame<float> made(random, some_model(), lamina::selection(some_model()));
  return made;
}

enum class at { idle, begun, begun_empty, streaming, probing, done, failed };
constexpr std::array all_of_sender = {at::idle,    at::begun, at::begun_empty, at::streaming,
                                      at::probing, at::done,  at::failed};
constexpr std::uint32_t own = 1;

// Its transfer number 1, of which chunk 3 of fragment 0 is required, in its second round if it is probing.
bounded::bounded_sender sender_at(at where) {
  static const auto chunks = some_frame().cut(some_grid(), 100'000);
  static const auto empty = empty_frame().cut(some_grid(), 100'000);
  static const std::vector required = {chunk{0, 3, 0}};
  bounded::bounded_sender sender(some_grid(), {.secret = test_secret, .rate = {.link_bits = 10'000'000'000}});
  peer receiver;
  instant now = 0s;
  const auto send_all = [&] {
    while (sender.state() == sender_state::streaming) {
      if (!sender.next_packet(now)) now = sender.deadline();
    }
    std::ignore = sender.poll_control(now);
  };
  if (where == at::idle) return sender;
  if (where == at::begun_empty) {
    sender.begin(empty);
    std::ignore = sender.poll_control(now);
    return sender;
  }
  sender.begin(chunks, {.required = required});
  std::ignore = sender.poll_control(now);
  if (where == at::begun) return sender;
  if (where == at::failed) {
    sender.on_control(receiver(control_type::abort, own, 0, std::uint32_t{0}));
    return sender;
  }
  REQUIRE_FALSE(sender.on_control(receiver(control_type::ready, own, 0, std::uint64_t{0}, std::uint32_t{1})));
  if (where == at::streaming) return sender;
  send_all();
  REQUIRE_FALSE(sender.on_control(receiver.list(control_type::wanted, own, 0, {{0, all_but(20, {0})}})));
  send_all();
  if (where == at::done) REQUIRE_FALSE(sender.on_control(receiver.list(control_type::stop, own, 2, {})));
  return sender;
}

// What an event leads to, of each state of a sender; `ignored` counts.
struct outcome {
  sender_state next;
  std::optional<errc> error = std::nullopt;
  bool is_ignored = false;
};
using outcomes = std::array<outcome, all_of_sender.size()>;

constexpr sender_state idle = sender_state::idle, begun = sender_state::begun,
                       streaming = sender_state::streaming, probing = sender_state::probing,
                       done = sender_state::done, failed = sender_state::failed;
constexpr errc unexpected = errc::unexpected_message;

// Refused in all states, by this name; after the transfer it is refused, and the transfer stands.
constexpr outcomes refused_as(errc why) {
  return {{{idle, unexpected},
           {failed, why},
           {failed, why},
           {failed, why},
           {failed, why},
           {done, unexpected},
           {failed, {}, true}}};
}
constexpr outcomes all_ignored = {{{idle, {}, true},
                                   {begun, {}, true},
                                   {begun, {}, true},
                                   {streaming, {}, true},
                                   {probing, {}, true},
                                   {done, {}, true},
                                   {failed, {}, true}}};
// Of WANTED and STOP, which come while chunks go out or after.
constexpr outcomes answer(outcome when_streaming, outcome when_probing,
                          outcome when_empty = {failed, unexpected}) {
  return {{{idle, {}, true},
           {failed, unexpected},
           when_empty,
           when_streaming,
           when_probing,
           {done, unexpected},
           {failed, {}, true}}};
}
constexpr outcomes wrong_answer(errc why) {
  return answer({failed, why}, {failed, why});
}

void check_sender(const std::string& event, const outcomes& expected,
                  const std::function<bounded::control_message(peer&)>& message) {
  for (std::size_t k = 0; k < all_of_sender.size(); ++k) {
    auto sender = sender_at(all_of_sender[k]);
    peer receiver;
    const std::uint64_t ignored = sender.counters().ignored;
    const std::error_code error = sender.on_control(message(receiver));
    INFO("event " << event << ", state " << k << ": " << error.message());
    CHECK(sender.state() == expected[k].next);
    CHECK(error == (expected[k].error ? make_error_code(*expected[k].error) : std::error_code()));
    CHECK((sender.counters().ignored != ignored) == expected[k].is_ignored);
    if (sender.state() == failed && expected[k].error) {
      CHECK(sender.failure() == *expected[k].error);
      // The peer is told.
      std::error_code bad;
      bounded::keyed_check check(test_secret);
      const auto abort =
          bounded::read_control(sender.poll_control(0s), bounded::control_limits(some_grid()), check, bad);
      CHECK_FALSE(bad);
      CHECK(abort.header.type == control_type::abort);
      CHECK(bounded::read_abort(abort.body, bad) == make_error_code(*expected[k].error).message());
      CHECK(sender.poll_control(1s).empty());
      CHECK_FALSE(sender.next_packet(1s));
    }
  }
}

}  // namespace

TEST_CASE("states: a sender and everything that may come") {
  const std::uint64_t no_grant = 0;
  const std::uint32_t one = 1;
  check_sender("READY",
               {{{idle, unexpected},
                 {streaming},
                 {failed, unexpected},
                 {failed, unexpected},
                 {failed, unexpected},
                 {done, unexpected},
                 {failed, {}, true}}},
               [&](peer& p) { return p(control_type::ready, own, 0, no_grant, one); });
  check_sender("READY of another transfer", refused_as(unexpected),
               [&](peer& p) { return p(control_type::ready, own + 1, 0, no_grant, one); });
  check_sender(
      "REPORT",
      {{{idle, {}, true}, {begun}, {begun}, {streaming}, {probing}, {done, unexpected}, {failed, {}, true}}},
      [&](peer& p) { return p(control_type::report, own, 0, no_grant, one, one, one, one, one); });
  check_sender("REPORT that is too short",
               {{{idle, {}, true},
                 {failed, errc::truncated},
                 {failed, errc::truncated},
                 {failed, errc::truncated},
                 {failed, errc::truncated},
                 {done, unexpected},
                 {failed, {}, true}}},
               [&](peer& p) { return p(control_type::report, own, 0, no_grant, one, one, one, one); });
  for (const control_type type : {control_type::report, control_type::wanted, control_type::stop}) {
    for (const std::uint32_t other : {own + 1, 0U, 0xffff'ffffU}) {
      check_sender("of another transfer", all_ignored, [&](peer& p) { return p(type, other, 1); });
    }
  }
  const std::map<std::uint32_t, bytes> some = {{0, all_but(20, {3})}};
  check_sender("WANTED of this round", answer({streaming, {}, true}, {streaming}),
               [&](peer& p) { return p.list(control_type::wanted, own, 1, some); });
  check_sender("WANTED of a round before", answer({streaming, {}, true}, {probing, {}, true}),
               [&](peer& p) { return p.list(control_type::wanted, own, 0, some); });
  // Of 30 transmissions and 19 more in the second round.
  check_sender("WANTED unasked, of packets of this round", answer({streaming, {}, true}, {streaming}),
               [&](peer& p) { return p.list(control_type::wanted, own, bounded::unasked_round, some, 31); });
  check_sender("WANTED unasked, from before this round", answer({streaming, {}, true}, {probing, {}, true}),
               [&](peer& p) { return p.list(control_type::wanted, own, bounded::unasked_round, some, 30); });
  check_sender("WANTED of nothing", wrong_answer(errc::bad_list),
               [&](peer& p) { return p.list(control_type::wanted, own, 1, {}); });
  check_sender("WANTED of no chunk of a fragment", wrong_answer(errc::bad_list), [&](peer& p) {
    return p.list(control_type::wanted, own, 1, {{0, bytes(3)}, {1, all_but(10, {})}});
  });
  check_sender("WANTED of a dropped fragment", wrong_answer(errc::no_such_chunk), [&](peer& p) {
    return p.list(control_type::wanted, own, 0, {{2, all_but(1, {})}});
  });
  check_sender("STOP, complete", answer({done}, {done}, {done}),
               [&](peer& p) { return p.list(control_type::stop, own, 1, {}); });
  check_sender("STOP within the bound", answer({done}, {done}, {failed, errc::no_such_chunk}), [&](peer& p) {
    return p.list(control_type::stop, own, 1, {{0, all_but(20, {0, 19})}, {1, all_but(10, {9})}});
  });
  const auto wrong_stop = [&](const std::string& event, errc why,
                              const std::map<std::uint32_t, bytes>& fragments) {
    check_sender(event, answer({failed, why}, {failed, why}, {failed, errc::no_such_chunk}),
                 [&](peer& p) { return p.list(control_type::stop, own, 1, fragments); });
  };
  wrong_stop("STOP with fragment 0 beyond its bound", errc::beyond_bound, {{0, all_but(20, {0, 1, 19})}});
  wrong_stop("STOP with fragment 1 beyond its bound", errc::beyond_bound, {{1, all_but(10, {0, 1})}});
  wrong_stop("STOP without a required chunk", errc::required_missing, {{0, all_but(20, {3})}});
  wrong_stop("STOP that lists a complete fragment", errc::bad_list, {{0, all_but(20, {})}});
  wrong_stop("STOP with a dropped fragment", errc::no_such_chunk, {{2, bytes(1)}});
  check_sender("ABORT",
               {{{idle},
                 {failed, errc::aborted},
                 {failed, errc::aborted},
                 {failed, errc::aborted},
                 {failed, errc::aborted},
                 {done},
                 {failed, {}, true}}},
               [&](peer& p) { return p(control_type::abort, own, 0, one); });
  for (const control_type type : {control_type::hello, control_type::begin, control_type::probe,
                                  control_type::ping, control_type::pong, control_type::bye}) {
    check_sender("of no sender", refused_as(unexpected), [&](peer& p) { return p(type, own, 0); });
  }
}

TEST_CASE("states: a sender that loses its connection, or whose caller gives up, commits nothing") {
  for (const at where : all_of_sender) {
    auto lost = sender_at(where);
    const bool is_under_way = lost.is_under_way();
    lost.lose();
    CHECK((lost.state() == failed) == (is_under_way || where == at::failed));
    if (is_under_way) {
      CHECK(lost.failure() == errc::lost);
      CHECK(lost.poll_control(1s).empty());
      static const auto chunks = some_frame().cut(some_grid());
      CHECK_THROWS_AS(lost.begin(chunks), std::logic_error);
    }
    auto abandoned = sender_at(where);
    abandoned.abandon();
    CHECK((abandoned.state() == failed) == (is_under_way || where == at::failed));
    if (is_under_way) CHECK_FALSE(abandoned.poll_control(1s).empty());
  }
}

TEST_CASE("states: what a WANTED lists is sent again in the order of the frame, required chunks first") {
  auto sender = sender_at(at::probing);
  const auto chunks = some_frame().cut(some_grid(), 100'000);
  peer receiver;
  REQUIRE_FALSE(sender.on_control(
      receiver.list(control_type::wanted, own, 1, {{0, all_but(20, {1, 2})}, {1, all_but(10, {5})}})));
  std::vector<chunk> expected = {{0, 3, 0}};
  for (chunk each : chunks.in_sending_order()) {
    each.tag = 0;
    if (each == chunk{0, 3, 0} || each == chunk{0, 1, 0} || each == chunk{0, 2, 0} || each == chunk{1, 5, 0})
      continue;
    expected.push_back(each);
  }
  std::vector<chunk> sent;
  instant now = 1s;
  while (sender.state() == streaming) {
    const auto packet = sender.next_packet(now);
    if (!packet) {
      now = sender.deadline();
      continue;
    }
    std::error_code bad;
    const auto header = bounded::read_packet_header(packet->header, bad);
    CHECK_FALSE(bad);
    CHECK(header.flags == bounded::flag_sent_before);
    CHECK(header.transmission == 49 + sent.size());
    if (sent.empty()) CHECK((packet->tag & bounded::droppable_tag) == 0);
    sent.push_back({header.fragment, header.chunk, 0});
  }
  CHECK(sent == expected);
}

TEST_CASE("states: required chunks go first, and are not to be dropped") {
  const auto chunks = some_frame().cut(some_grid(), 100'000);
  const auto order = chunks.in_sending_order();
  const std::vector required = {order[order.size() - 1], order[order.size() - 2]};
  CHECK((required[0].tag & bounded::droppable_tag) != 0);
  bounded::bounded_sender sender(some_grid(), {.secret = test_secret});
  sender.begin(chunks, {.required = required});
  peer receiver;
  sender.on_control(receiver(control_type::ready, own, 0, std::uint64_t{0}, std::uint32_t{1}));
  std::vector<std::pair<std::uint32_t, std::uint32_t>> sent;
  for (int k = 0; k < 3; ++k) {
    std::error_code error;
    const auto header = bounded::read_packet_header(sender.next_packet(1s)->header, error);
    sent.emplace_back(header.fragment, header.chunk);
    if (k < 2) CHECK((header.tag & bounded::droppable_tag) == 0);
  }
  std::vector<std::pair<std::uint32_t, std::uint32_t>> expected = {{required[0].fragment, required[0].index},
                                                                   {required[1].fragment, required[1].index}};
  std::ranges::sort(expected);
  expected.emplace_back(order[0].fragment, order[0].index);
  CHECK(sent == expected);
}

// Its PROBE would be left out, and the receiver counts rounds by them.
TEST_CASE("states: a list that comes while PROBE waits to go out is not taken up") {
  auto sender = sender_at(at::streaming);
  peer receiver;
  instant now = 1s;
  while (sender.state() == streaming) {
    if (!sender.next_packet(now)) now = sender.deadline();
  }
  CHECK(sender.deadline() < now);  // the caller comes back at once, and finds PROBE
  CHECK_FALSE(sender.on_control(
      receiver.list(control_type::wanted, own, bounded::unasked_round, {{0, all_but(20, {1, 2})}}, 30)));
  CHECK(sender.state() == probing);
  CHECK(sender.round() == 0);
  CHECK(sender.counters().ignored == 1);
  CHECK_FALSE(sender.poll_control(now).empty());
  CHECK(sender.deadline() > now);
  CHECK(sender.poll_control(now).empty());
}

namespace {

// A sender of one fragment of 20 chunks, and what its receiver says of each round.
class rounds {
 public:
  void begin() {
    sender.begin(chunks_);
    std::ignore = sender.poll_control(now_);
    REQUIRE_FALSE(sender.on_control(
        receiver_(control_type::ready, sender.transfer(), 0, std::uint64_t{0}, std::uint32_t{1})));
    send_all();
  }
  /// The receiver asks for these, having seen so much. The error is what ended the transfer.
  std::error_code ask(const bytes& wanted, std::uint32_t seen) {
    const auto error = sender.on_control(
        receiver_.list(control_type::wanted, sender.transfer(), sender.round(), {{0, wanted}}, seen));
    send_all();
    return error;
  }
  void stop() {
    REQUIRE_FALSE(sender.on_control(receiver_.list(control_type::stop, sender.transfer(), 0, {}, 30)));
  }

 private:
  void send_all() {
    while (sender.state() == sender_state::streaming) {
      if (!sender.next_packet(now_)) now_ = sender.deadline();
    }
    while (!sender.poll_control(now_).empty()) {
    }
  }

  lamina::layout model_ = model_of({160});
  chunk_grid grid_ = chunk_grid::of<float>(model_, payload_type::as_is, 8);
  std::mt19937 random_{91};
  made_frame<float> frame_{random_, model_, everything(model_)};
  bounded::frame_chunks chunks_ = frame_.cut(grid_, 100'000);
  peer receiver_;
  instant now_ = 1s;

 public:
  bounded::bounded_sender sender{grid_, {.secret = test_secret, .rate = {.link_bits = 10'000'000'000}}};
};

}  // namespace

TEST_CASE("breakers: a sender that gets nothing new out of 250 rounds fails") {
  // Also of a receiver that wants now more and now less.
  const bool wavers = GENERATE(false, true);
  rounds transfer;
  transfer.begin();
  std::uint32_t count = 0;
  std::error_code error;
  for (; !error && count < 500; ++count)
    error = transfer.ask(wavers && count % 2 == 1 ? all_but(20, {1}) : all_but(20, {1, 2}), 30);
  CHECK(error == errc::no_progress);
  CHECK(count == 251);  // the first brings two chunks
}

// An honest one ends the transfer itself, after 10 s.
TEST_CASE("breakers: a sender whose receiver says for ever that it has seen nothing fails") {
  rounds transfer;
  const auto rounds_of = [&](std::uint32_t most) {
    transfer.begin();
    std::uint32_t count = 0;
    for (std::error_code error; !error && count < most; ++count) error = transfer.ask(all_but(20, {}), 0);
    return count;
  };
  // Each transfer counts its own.
  CHECK(rounds_of(200) == 200);
  transfer.stop();
  CHECK(rounds_of(1000) == 251);
  CHECK(transfer.sender.failure() == errc::nothing_arrives);
}

}  // namespace lamina_test::state_test
