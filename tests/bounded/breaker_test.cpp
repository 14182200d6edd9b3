// SPDX-License-Identifier: MIT
// A sender does not go on for ever: what ends a transfer that gets nowhere, whatever the receiver says.
#include <algorithm>
#include <system_error>

#include "bounded/peer.hpp"
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::breaker_test {

using bytes = std::vector<std::byte>;

using bounded::chunk_grid;

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

}  // namespace lamina_test::breaker_test
