// SPDX-License-Identifier: MIT
// Every state of both ends and every event: what the tables of docs/bounded-loss-protocol.md say, and no more.
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::state_test {

using bytes = std::vector<std::byte>;

using bounded::chunk;
using bounded::control_type;

namespace {

// Fragments of 20 and 10 chunks, of which 2 and 1 may be missing, and of one that is dropped.
const cut_frame& some_frame() {
  static const cut_frame frame({160, 80, 8}, {.seed = 91, .bound_ppm = 100'000, .dropped = {2}});
  return frame;
}

// All bits of so many chunks but these.
bytes all_but(std::uint32_t chunks, const std::vector<std::uint32_t>& missing) {
  bytes bits((chunks + 7) / 8);
  for (std::uint32_t i = 0; i < chunks; ++i) {
    if (std::ranges::find(missing, i) == missing.end()) bits[i / 8] |= std::byte{1} << (i % 8);
  }
  return bits;
}

std::error_code give(bounded::bounded_sender& sender, const bytes& all) {
  return sender.on_control(as_read(all));
}
void give_ready(bounded::bounded_sender& sender) {
  REQUIRE_FALSE(
      give(sender, message(control_type::ready, sender.transfer(), 0, std::uint64_t{0}, std::uint32_t{1})));
}
// The packets of a round, until PROBE is to be sent, which is gone then too.
std::vector<bounded::packet_header> sent_in_round(bounded::bounded_sender& sender) {
  std::vector<bounded::packet_header> sent;
  instant now = 1s;
  while (sender.state() == sender_state::streaming) {
    if (const auto packet = sender.next_packet(now)) {
      std::error_code bad;
      sent.push_back(bounded::read_packet_header(packet->header, bad));
      CHECK_FALSE(bad);
      CHECK(packet->tag == sent.back().tag);
    } else {
      now = sender.deadline();
    }
  }
  std::ignore = sender.poll_control(now);
  return sent;
}

enum class at { idle, begun, begun_empty, streaming, probing, done, failed };
constexpr std::array all_of_sender = {at::idle,    at::begun, at::begun_empty, at::streaming,
                                      at::probing, at::done,  at::failed};
constexpr std::uint32_t own = 1;

// Its transfer number 1, of which chunk 3 of fragment 0 is required, in its second round if it is probing.
bounded::bounded_sender sender_at(at where) {
  static const cut_frame empty({160, 80, 8}, {.bound_ppm = 100'000, .dropped = {0, 1, 2}});
  static const std::vector required = {chunk{0, 3, 0}};
  bounded::bounded_sender sender(some_frame().grid,
                                 {.secret = test_secret, .rate = {.link_bits = 10'000'000'000}});
  if (where == at::idle) return sender;
  sender.begin(where == at::begun_empty ? empty.chunks : some_frame().chunks,
               {.required = where == at::begun_empty ? std::vector<chunk>() : required});
  std::ignore = sender.poll_control(0s);
  if (where == at::begun || where == at::begun_empty) return sender;
  if (where == at::failed) {
    give(sender, message(control_type::abort, own, 0, std::uint32_t{0}));
    return sender;
  }
  give_ready(sender);
  if (where == at::streaming) return sender;
  sent_in_round(sender);
  REQUIRE_FALSE(give(sender, list_message(control_type::wanted, own, 0, {{0, all_but(20, {0})}})));
  sent_in_round(sender);
  if (where == at::done) REQUIRE_FALSE(give(sender, list_message(control_type::stop, own, 2, {})));
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

// The same wherever a transfer is under way.
constexpr outcomes alike(outcome before, outcome under_way, outcome after) {
  return {{before, under_way, under_way, under_way, under_way, after, {failed, {}, true}}};
}
// Refused in all states, by this name; after the transfer it is refused, and the transfer stands.
constexpr outcomes refused_as(errc why) {
  return alike({idle, unexpected}, {failed, why}, {done, unexpected});
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

void check_sender(const std::string& event, const outcomes& expected, const bytes& message) {
  for (std::size_t k = 0; k < all_of_sender.size(); ++k) {
    auto sender = sender_at(all_of_sender[k]);
    const std::uint64_t ignored = sender.counters().ignored;
    const std::error_code error = give(sender, message);
    INFO("event " << event << ", state " << k << ": " << error.message());
    CHECK(sender.state() == expected[k].next);
    CHECK(error == (expected[k].error ? make_error_code(*expected[k].error) : std::error_code()));
    CHECK((sender.counters().ignored != ignored) == expected[k].is_ignored);
    if (sender.state() == failed && expected[k].error) {
      CHECK(sender.failure() == *expected[k].error);
      // The peer is told.
      std::error_code bad;
      bounded::keyed_check check(test_secret);
      const auto abort = bounded::read_control(sender.poll_control(0s),
                                               bounded::control_limits(some_frame().grid), check, bad);
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
               message(control_type::ready, own, 0, no_grant, one));
  check_sender("READY of another transfer", refused_as(unexpected),
               message(control_type::ready, own + 1, 0, no_grant, one));
  check_sender(
      "REPORT",
      {{{idle, {}, true}, {begun}, {begun}, {streaming}, {probing}, {done, unexpected}, {failed, {}, true}}},
      message(control_type::report, own, 0, no_grant, one, one, one, one, one));
  check_sender("REPORT that is too short",
               alike({idle, {}, true}, {failed, errc::truncated}, {done, unexpected}),
               message(control_type::report, own, 0, no_grant, one, one, one, one));
  for (const control_type type : {control_type::report, control_type::wanted, control_type::stop}) {
    for (const std::uint32_t other : {own + 1, 0U, 0xffff'ffffU}) {
      check_sender("of another transfer", all_ignored, message(type, other, 1));
    }
  }
  const listed_bits some = {{0, all_but(20, {3})}};
  check_sender("WANTED of this round", answer({streaming, {}, true}, {streaming}),
               list_message(control_type::wanted, own, 1, some));
  check_sender("WANTED of a round before", answer({streaming, {}, true}, {probing, {}, true}),
               list_message(control_type::wanted, own, 0, some));
  // Of 30 transmissions and 19 more in the second round.
  check_sender("WANTED unasked, of packets of this round", answer({streaming, {}, true}, {streaming}),
               list_message(control_type::wanted, own, bounded::unasked_round, some, {.seen = 31}));
  check_sender("WANTED unasked, from before this round", answer({streaming, {}, true}, {probing, {}, true}),
               list_message(control_type::wanted, own, bounded::unasked_round, some, {.seen = 30}));
  check_sender("WANTED of nothing", wrong_answer(errc::bad_list),
               list_message(control_type::wanted, own, 1, {}));
  check_sender("WANTED of no chunk of a fragment", wrong_answer(errc::bad_list),
               list_message(control_type::wanted, own, 1, {{0, bytes(3)}, {1, all_but(10, {})}}));
  check_sender("WANTED of a dropped fragment", wrong_answer(errc::no_such_chunk),
               list_message(control_type::wanted, own, 0, {{2, all_but(1, {})}}));
  check_sender("STOP, complete", answer({done}, {done}, {done}),
               list_message(control_type::stop, own, 1, {}));
  check_sender("STOP within the bound", answer({done}, {done}, {failed, errc::no_such_chunk}),
               list_message(control_type::stop, own, 1, {{0, all_but(20, {0, 19})}, {1, all_but(10, {9})}}));
  const auto wrong_stop = [&](const std::string& event, errc why, const listed_bits& fragments) {
    check_sender(event, answer({failed, why}, {failed, why}, {failed, errc::no_such_chunk}),
                 list_message(control_type::stop, own, 1, fragments));
  };
  wrong_stop("STOP with fragment 0 beyond its bound", errc::beyond_bound, {{0, all_but(20, {0, 1, 19})}});
  wrong_stop("STOP with fragment 1 beyond its bound", errc::beyond_bound, {{1, all_but(10, {0, 1})}});
  wrong_stop("STOP without a required chunk", errc::required_missing, {{0, all_but(20, {3})}});
  wrong_stop("STOP that lists a complete fragment", errc::bad_list, {{0, all_but(20, {})}});
  wrong_stop("STOP with a dropped fragment", errc::no_such_chunk, {{2, bytes(1)}});
  check_sender("ABORT", alike({idle}, {failed, errc::aborted}, {done}),
               message(control_type::abort, own, 0, one));
  for (const control_type type : {control_type::hello, control_type::begin, control_type::probe,
                                  control_type::ping, control_type::pong, control_type::bye}) {
    check_sender("of no sender", refused_as(unexpected), message(type, own, 0));
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
      CHECK_THROWS_AS(lost.begin(some_frame().chunks), std::logic_error);
    }
    auto abandoned = sender_at(where);
    abandoned.abandon();
    CHECK((abandoned.state() == failed) == (is_under_way || where == at::failed));
    if (is_under_way) CHECK_FALSE(abandoned.poll_control(1s).empty());
  }
}

TEST_CASE("states: required chunks go first, not to be dropped, then the order of the frame, in each round") {
  const auto order = some_frame().chunks.in_sending_order();
  std::vector<chunk> required = {order[order.size() - 1], order[order.size() - 2]};
  CHECK((required[0].tag & bounded::droppable_tag) != 0);
  bounded::bounded_sender sender(some_frame().grid, {.secret = test_secret});
  sender.begin(some_frame().chunks, {.required = required});
  std::ignore = sender.poll_control(0s);
  give_ready(sender);
  for (chunk& each : required) each.tag = some_frame().chunks.protected_tag(each.fragment);
  std::ranges::sort(required);
  std::vector<chunk> expected = required;
  expected.insert(expected.end(), order.begin(), order.end() - 2);
  const auto check_round = [&](std::uint32_t first, unsigned flags) {
    std::vector<chunk> sent;
    for (const bounded::packet_header& header : sent_in_round(sender)) {
      CHECK(header.flags == flags);
      CHECK(header.transmission == first + sent.size());
      sent.push_back({header.fragment, header.chunk, header.tag});
    }
    CHECK(sent == expected);
  };
  check_round(0, 0);
  const auto is_unwanted = [&](const chunk& each) {
    return each.fragment == 0 ? each.index == 1 || each.index == 2 : each.index == 5;
  };
  REQUIRE(std::erase_if(expected, is_unwanted) == 3);
  REQUIRE_FALSE(give(
      sender, list_message(control_type::wanted, own, 0, {{0, all_but(20, {1, 2})}, {1, all_but(10, {5})}})));
  check_round(30, bounded::flag_sent_before);
}

// Its PROBE would be left out, and the receiver counts rounds by them.
TEST_CASE("states: a list that comes while PROBE waits to go out is not taken up") {
  auto sender = sender_at(at::streaming);
  instant now = 1s;
  while (sender.state() == streaming) {
    if (!sender.next_packet(now)) now = sender.deadline();
  }
  CHECK(sender.deadline() < now);  // the caller comes back at once, and finds PROBE
  CHECK_FALSE(give(sender, list_message(control_type::wanted, own, bounded::unasked_round,
                                        {{0, all_but(20, {1, 2})}}, {.seen = 30})));
  CHECK(sender.state() == probing);
  CHECK(sender.round() == 0);
  CHECK(sender.counters().ignored == 1);
  CHECK_FALSE(sender.poll_control(now).empty());
  CHECK(sender.deadline() > now);
  CHECK(sender.poll_control(now).empty());
}

TEST_CASE("breakers: a sender that gets nothing new out of 250 rounds fails") {
  // Also of a receiver that wants now more and now less.
  const bool wavers = GENERATE(false, true);
  auto sender = sender_at(at::streaming);
  std::uint32_t count = 0;
  for (std::error_code error; !error && count < 500; ++count) {
    sent_in_round(sender);
    const bytes wanted = wavers && count % 2 == 1 ? all_but(20, {1}) : all_but(20, {1, 2});
    error =
        give(sender, list_message(control_type::wanted, own, sender.round(), {{0, wanted}}, {.seen = 30}));
  }
  CHECK(sender.failure() == errc::no_progress);
  CHECK(count == 251);  // the first brings two chunks
}

// An honest one ends the transfer itself, after 10 s.
TEST_CASE("breakers: a sender whose receiver says for ever that it has seen nothing fails") {
  auto sender = sender_at(at::idle);
  const auto rounds_of = [&](std::uint32_t most) {
    sender.begin(some_frame().chunks);
    std::ignore = sender.poll_control(0s);
    give_ready(sender);
    std::uint32_t count = 0;
    for (std::error_code error; !error && count < most; ++count) {
      sent_in_round(sender);
      error = give(sender, list_message(control_type::wanted, sender.transfer(), sender.round(),
                                        {{0, all_but(20, {})}}));
    }
    return count;
  };
  // Each transfer counts its own.
  CHECK(rounds_of(200) == 200);
  REQUIRE_FALSE(give(sender, list_message(control_type::stop, own, 0, {})));
  CHECK(rounds_of(1000) == 251);
  CHECK(sender.failure() == errc::nothing_arrives);
}

}  // namespace lamina_test::state_test
