// SPDX-License-Identifier: MIT
// How fast: the formulas, and what senders make of a link that is full, and of one that loses at random.
#include "lamina/bounded/rate.hpp"

#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"

namespace lamina_test::rate_test {

using bounded::rate_control;

namespace {

bounded::transfer_report report_of(std::uint32_t received, std::uint32_t transmissions,
                                   std::uint32_t delay_us, std::uint32_t open = 1,
                                   std::uint64_t granted = 0) {
  return {.granted_bits = granted,
          .received = received,
          .transmissions = transmissions,
          .delay_us = delay_us,
          .open_transfers = open};
}

// Several senders, each with a receiver of its own, whose packets meet in one queue before one link; each sends one frame after the other.
// Messages do not wait in queues.
class shared_link {
 public:
  struct options {
    std::size_t senders = 4;
    double link_bits = 200e6;
    std::size_t queue_bytes = 65'536;
    double loss = 0;
    std::uint32_t bound_ppm = 100'000;
    std::uint64_t told_link_bits = 0;  // what the ends believe; 0: nothing
  };

  explicit shared_link(const options& given)
      : frame_({65'000}, {.seed = 7, .chunk_elements = 352, .bound_ppm = given.bound_ppm}),
        data({.seed = 3,
              .loss = given.loss,
              .delay = 100us,
              .link_bits = given.link_bits,
              .queue_bytes = given.queue_bytes}) {
    const auto senders = static_cast<std::uint32_t>(given.senders);
    for (std::uint32_t s = 0; s < senders; ++s) {
      ends.push_back(std::make_unique<simulated_link>(
          frame_.grid,
          simulated_link::options{.rate = {.link_bits = given.told_link_bits, .senders = senders},
                                  .shared = {&data, s}}));
      ends.back()->up = ends.back()->down = lossy_channel({.delay = 100us});
      ends.back()->receiver.set_load(senders, 0);
    }
  }

  /// Until this time; the senders begin again and again.
  void run(instant until) {
    while (now < until) {
      instant at = bounded::never;
      for (const auto& each : ends) {
        if (!each->sender.is_under_way() && each->sender.state() != sender_state::failed) {
          each->receiver.release(now);
          each->sender.begin(frame_.chunks);
        }
        each->pump();
        at = std::min(at, each->next());
      }
      at = std::min(at, data.next());
      if (at >= bounded::never) return;
      now = std::max(now, at);
      for (const auto& each : ends) each->now = now;
      while (auto arrived = data.receive(now)) ends[arrived->from]->take(arrived->bytes);
      for (const auto& each : ends) each->deliver();
    }
  }

  std::vector<std::unique_ptr<simulated_link>> ends;
  instant now{};

 private:
  cut_frame frame_;

 public:
  lossy_channel data;
};

struct measured {
  double link = 0;      // share of it that was used
  double jain = 0;      // of what the senders got through
  double repeated = 0;  // share of the packets
};

// From 200 reports a sender on, for a second.
measured measure(const shared_link::options& options) {
  shared_link run(options);
  const auto reports = [&] {
    return (*std::ranges::min_element(run.ends, {}, [](const auto& each) { return each->reports; }))->reports;
  };
  while (reports() < 200 && run.now < 10s) run.run(run.now + 10ms);
  REQUIRE(reports() >= 200);
  std::vector<std::uint64_t> placed;
  std::uint64_t packets = 0, repeated = 0;
  const std::uint64_t before = run.data.wire_bytes();
  const instant began = run.now;
  for (const auto& each : run.ends) {
    placed.push_back(each->receiver.counters().of(packet_fate::placed));
    packets -= each->sender.counters().packets;
    repeated -= each->sender.counters().repeated;
  }
  run.run(began + 1s);
  double sum = 0, squares = 0;
  for (std::size_t s = 0; s < run.ends.size(); ++s) {
    const auto& each = *run.ends[s];
    const auto goodput = static_cast<double>(each.receiver.counters().of(packet_fate::placed) - placed[s]);
    sum += goodput;
    squares += goodput * goodput;
    packets += each.sender.counters().packets;
    repeated += each.sender.counters().repeated;
    REQUIRE_FALSE(each.sender.failure());
  }
  return {.link = 8 * static_cast<double>(run.data.wire_bytes() - before) / options.link_bits,
          .jain = sum * sum / (static_cast<double>(run.ends.size()) * squares),
          .repeated = static_cast<double>(repeated) / static_cast<double>(packets)};
}

}  // namespace

TEST_CASE("rate: it begins at the share of the link, and stays between its bounds") {
  CHECK(rate_control({.link_bits = 1'000'000'000, .senders = 8}).bits() == 125e6);
  CHECK(rate_control({.link_bits = 1'000'000'000, .senders = 1000}).bits() == 10e6);  // r_min
  CHECK(rate_control().bits() == 100e6);
  CHECK(rate_control({.link_bits = 10'000}).bits() == 1e6);
  rate_control rate({.link_bits = 1'000'000'000, .senders = 2});
  rate.report(report_of(100, 100, 0, 4));
  CHECK(rate.bits() == 500e6 + 5e6);
  for (int k = 0; k < 200; ++k) rate.report(report_of(100, 100, 0, 4));
  CHECK(rate.bits() == 1e9);
  for (int k = 0; k < 200; ++k) rate.report(report_of(10, 100, 0));
  CHECK(rate.bits() == 10e6);
  rate_control unknown;
  unknown.report(report_of(100, 100, 0));
  CHECK(unknown.bits() == Approx(110e6));
  unknown.report(report_of(90, 100, 5000));
  CHECK(unknown.bits() == Approx(110e6 * 0.95 * 0.9));
  unknown.report(report_of(100, 100, 0, 2));
  CHECK(unknown.bits() == Approx(110e6 * 0.95 * 0.9 + 10e6));
  for (int k = 0; k < 2000; ++k) unknown.report(report_of(100, 100, 0));
  CHECK(unknown.bits() == 10e9);
}

TEST_CASE("rate: without control it is the link's, whatever is lost or granted") {
  rate_control rate({.link_bits = 1'000'000'000, .senders = 2, .is_controlled = false});
  rate.report(report_of(10, 100, 9000));
  rate.silence();
  rate.grant(1'000'000);
  CHECK(rate.bits() == 1e9);
}

TEST_CASE("rate: a loss is congestion where there is a delay, or where it is large beyond chance") {
  const auto after = [](const bounded::transfer_report& report) {
    rate_control rate({.link_bits = 1'000'000'000, .senders = 2});
    rate.report(report);
    return rate.bits() / 500e6;
  };
  CHECK(after(report_of(80, 100, 1000)) == Approx(1.04));
  CHECK(after(report_of(80, 100, 1001)) == Approx(0.95 * 0.8));
  CHECK(after(report_of(99, 100, 9000)) == Approx(1.04));  // 1 %
  CHECK(after(report_of(98, 100, 9000)) == Approx(0.95 * 0.98));
  CHECK(after(report_of(67, 100, 0)) == Approx(1.04));  // 25 and two deviations of 4.3
  CHECK(after(report_of(66, 100, 0)) == Approx(0.95 * 0.66));
  CHECK(after(report_of(0, 15, 9000)) == 1);  // too few to tell
  CHECK(after(report_of(0, 16, 0)) == Approx(1e7 / 500e6));
  CHECK(after(report_of(130, 100, 9000)) == Approx(1.04));  // more than were sent: some came twice
}

TEST_CASE("rate: a grant bounds it, and silence ends it") {
  rate_control rate({.link_bits = 1'000'000'000, .senders = 2});
  rate.grant(100'000'000);
  CHECK(rate.bits() == 100e6);
  rate.report(report_of(10, 10, 0, 1, 200'000'000));  // too few for the rate, but a grant
  CHECK(rate.bits() == 200e6);
  rate.grant(2'000'000'000);
  CHECK(rate.bits() == 500e6);
  rate.grant(0);
  CHECK(rate.bits() == 500e6);
  rate.silence();
  CHECK(rate.bits() == 10e6);
}

TEST_CASE("rate: a pacer lets a burst go, then one packet after the other") {
  constexpr std::size_t bits = 12'000;
  bounded::pacer slow(bits);
  for (int k = 0; k < 8; ++k) {
    CHECK(slow.when(1s, 12e6, bits) == 1s);  // eight packets, of one millisecond each
    slow.spend(bits);
  }
  CHECK(slow.when(1s, 12e6, bits) > 1s + 999us);
  CHECK(slow.when(1s, 12e6, bits) <= 1s + 1001us);
  CHECK(slow.when(1s + 1001us, 12e6, bits) == 1s + 1001us);
  // It saves up no more than the burst.
  int burst = 0;
  while (slow.when(100s, 12e6, bits) == 100s) {
    slow.spend(bits);
    ++burst;
  }
  CHECK(burst == 8);
  bounded::pacer quick(bits);
  burst = 0;
  while (quick.when(1s, 1.2e9, bits) == 1s) {
    quick.spend(bits);
    ++burst;
  }
  CHECK(burst == 100);  // a millisecond
}

TEST_CASE("rate: the delay is what is beyond the least of ten seconds, whatever the clocks say") {
  for (const std::uint32_t offset : {0U, 5U, 0x7fffffffU, 0xfffffff0U}) {
    for (const instant begin : {instant(0s), instant(4'294'967'295us)}) {
      bounded::queueing_delay delay;
      CHECK(delay.take_median() == 0);
      const auto add = [&](instant at, std::uint32_t waited) {
        // Sent so long before that it took 100 us and what it waited; by a clock of its own.
        delay.add(bounded::wire_microseconds(at) - 100 - waited + offset, at);
      };
      for (const std::uint32_t waited : {0U, 500U, 300U}) add(begin, waited);
      CHECK(delay.take_median() == 300);
      for (int k = 0; k < 1000; ++k) add(begin + 1s, k < 500 ? 9000 : 40 + static_cast<std::uint32_t>(k % 3));
      CHECK(delay.take_median() == 41);  // of the newest
      add(begin + 9s, 2000);
      CHECK(delay.take_median() == 2000);
      // The 0 of the beginning is forgotten, the 40 of a second later is not; then that too.
      add(begin + 10s, 2000);
      CHECK(delay.take_median() == 1960);
      add(begin + 15s, 2500);
      CHECK(delay.take_median() == 500);
    }
  }
}

TEST_CASE("rate: a delay of any size is a number") {
  bounded::queueing_delay delay;
  delay.add(0, 0s);
  delay.add(0x8000'0000, 0s);
  delay.add(0x8000'0001, 0s);
  CHECK(delay.take_median() == 0x8000'0000);  // by clocks that leap
}

TEST_CASE("rate: several senders fill a link, share it and do not flood it") {
  using options = shared_link::options;
  struct row {
    const char* what;
    options of;
    double link, jain, repeated;  // at least, at least and at most
  };
  for (const row& each :
       {row{"4", {.bound_ppm = 0, .told_link_bits = 200'000'000}, 0.85, 0.8, 0.05},
        row{"8", {.senders = 8, .told_link_bits = 200'000'000}, 0.85, 0.8, 0.05},
        row{"a queue of 50 ms", {.queue_bytes = 1'250'000, .told_link_bits = 200'000'000}, 0.95, 0.8, 0.01},
        row{"a link that nobody has told of", {}, 0.85, 0.6, 0.05}}) {
    const measured found = measure(each.of);
    CAPTURE(each.what, found.link, found.jain, found.repeated);
    CHECK(found.link > each.link);
    CHECK(found.link < 1.001);
    CHECK(found.jain > each.jain);
    CHECK(found.repeated < each.repeated);
  }
}

TEST_CASE("rate: a link that loses at random is not taken for a full one") {
  for (const double loss : {0.05, 0.2}) {
    CAPTURE(loss);
    shared_link run({.senders = 1, .link_bits = 0, .loss = loss, .told_link_bits = 200'000'000});
    double least = 1e12;
    while (run.ends.front()->reports < 200 && run.now < 10s) {
      run.run(run.now + 10ms);
      least = std::min(least, run.ends.front()->sender.rate().bits());
    }
    CHECK(run.ends.front()->reports >= 200);
    CHECK(least > 0.8 * 200e6);
  }
}

}  // namespace lamina_test::rate_test
