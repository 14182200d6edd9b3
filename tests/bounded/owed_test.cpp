// SPDX-License-Identifier: MIT
// Parameters that a lossy network has lost: what is pending becomes chunks of the next frame, or repairs sent with it.
#include "bounded/simulated_transfer.hpp"
#include "catch.hpp"
#include "lamina/server.hpp"

namespace lamina_test::owed_test {

using bounded::chunk_grid;
using bounded::frame_chunks;

namespace {

const lamina::layout& model() {
  static const lamina::layout model = model_of({100, 7, 0, 1300, 64, 330});
  return model;
}
constexpr std::size_t chunk_elements = 16;

using parameters = std::vector<std::vector<double>>;

parameters zeros() {
  parameters all;
  for (const std::size_t size : model().sizes()) all.emplace_back(size);
  return all;
}

// A worker at the other end of a lossy way.
class replica {
 public:
  replica(const chunk_grid& grid, std::uint64_t seed)
      : link(grid, {.data = {.seed = seed, .loss = 0.2, .duplicate = 0.05, .jitter = 2ms},
                    .kind = lamina::frame_kind::parameters,
                    .most_bound_ppm = bounded::most_bound_ppm,
                    .stop = stop_policy::on_probe}),
        values_(zeros()),
        is_wrong_(zeros()) {}

  // What the receiver has, into the values.
  void take() {
    const auto frame = lamina::decode<double>(link.receiver.frame(), model());
    for (std::size_t l = 0; l < values_.size(); ++l) frame.restore(l, values_[l], link.receiver.arrived());
    for (const auto& [l, begin, bytes] : link.receiver.repairs()) {
      for (std::size_t i = 0; i < bytes.size() / sizeof(double); ++i) {
        repaired.push_back({l, begin + i, begin + i + 1});
        std::memcpy(&values_[l][begin + i], bytes.data() + i * sizeof(double), sizeof(double));
      }
    }
  }
  // Whether no value is wrong after this transfer that was wrong after the one before.
  bool heals(const parameters& server) {
    bool is_right_in_time = true;
    for (std::size_t l = 0; l < values_.size(); ++l) {
      for (std::size_t i = 0; i < values_[l].size(); ++i) {
        const bool is_wrong = values_[l][i] != server[l][i];
        if (is_wrong && is_wrong_[l][i] != 0) is_right_in_time = false;
        is_wrong_[l][i] = is_wrong ? 1 : 0;
      }
    }
    return is_right_in_time;
  }
  const parameters& values() const { return values_; }

  simulated_link link;
  std::vector<lamina::element_range> repaired;  // by the last transfer

 private:
  parameters values_;
  parameters is_wrong_;  // 1 after the last transfer
};

}  // namespace

TEST_CASE(
    "owed: over a lossy network a value is wrong for one transfer, and replicas are equal after a bound of "
    "0") {
  std::mt19937 random(131);
  constexpr std::size_t workers = 3;
  const auto grid = chunk_grid::of<double>(model(), payload_type::as_is, chunk_elements);
  lamina::server<double> server(model(),
                                {.workers = workers, .frame_checksum = lamina::frame_checksum::none});
  lamina::frame_encoder<double> encoder(model());
  parameters values = zeros();
  const auto layer = [&](std::size_t l) -> const auto& {
    return values[l];
  };
  std::vector<std::unique_ptr<replica>> replicas;
  for (std::size_t w = 0; w < workers; ++w) replicas.push_back(std::make_unique<replica>(grid, 77 + w));
  std::size_t required = 0;
  std::size_t repairs = 0;
  for (std::uint64_t step = 1; step <= 400; ++step) {
    lamina::selection updated(model());
    for (std::size_t l = 0; l < model().layers(); ++l) {
      if (below(random, 3) == 0) updated.send(l);
    }
    for (std::uint32_t w = 0; w < workers; ++w) {
      const auto& frame = encoder.encode({.step = step, .sender = w}, updated, layer);
      REQUIRE_FALSE(server.add(frame.to_bytes()));
    }
    server.update([&](std::size_t l, std::size_t begin, std::span<const double> mean) {
      for (std::size_t i = begin; i < begin + mean.size(); ++i)
        values[l][i] = static_cast<double>(step) + static_cast<double>(i) / 2048;
    });
    const std::uint32_t bound_ppm = step % 10 == 0 ? 0 : 300'000;
    for (std::size_t w = 0; w < workers; ++w) {
      replica& at = *replicas[w];
      const auto reply = server.reply(w, values);
      if (bound_ppm > 0 && below(random, 4) == 0) continue;  // a slower worker, or the whole transfer failed
      const frame_chunks chunks(reply.frame(), reply.sent(), grid, {.bound_ppm = bound_ppm});
      const bounded::obligations owed = bounded::owed<double>(chunks, server.pending(w), layer);
      required += owed.required.size();
      repairs += owed.repairs.size();
      at.link.transfer(chunks, owed);
      REQUIRE(at.link.sender.state() == sender_state::done);
      at.repaired.clear();
      at.take();
      // What was repaired was pending, and nothing else was.
      for (const auto& each : at.repaired) {
        REQUIRE(std::ranges::any_of(server.pending(w), [&](const lamina::element_range& lost) {
          return lost.layer == each.layer && lost.begin <= each.begin && each.end <= lost.end;
        }));
      }
      server.commit(w, reply.clock(), at.link.sender.arrived());
      REQUIRE(at.heals(values));
      if (bound_ppm == 0) REQUIRE(at.values() == values);
    }
  }
  CHECK(required > 100);
  CHECK(repairs > 100);
}

TEST_CASE("owed: ranges take the chunks in which they lie, and others are refused by name") {
  std::mt19937 random(132);
  const auto grid = chunk_grid::of<float>(model(), payload_type::as_is, chunk_elements);
  lamina::selection sent(model());
  sent.send(0);
  const made_frame<float> made(random, model(), sent, payload_type::as_is, lamina::frame_kind::parameters);
  const frame_chunks chunks = made.cut(grid);
  const auto layer = [&](std::size_t l) -> const auto& {
    return made.values[l];
  };
  const auto owed = [&](lamina::element_range range) {
    return bounded::owed<float>(chunks, std::array{range}, layer);
  };

  const auto within = owed({0, 17, 33});
  REQUIRE(within.required.size() == 2);
  CHECK(within.required[0].index == 1);
  CHECK(within.required[1].index == 2);
  CHECK(within.repairs.empty());

  const auto outside = owed({5, 16, 330});
  CHECK(outside.required.empty());
  REQUIRE(outside.repairs.size() == 1);
  CHECK(outside.repairs[0].begin == 16);
  CHECK(outside.repairs[0].elements.data() == reinterpret_cast<const std::byte*>(&made.values[5][16]));
  CHECK(outside.repairs[0].elements.size() == (330 - 16) * sizeof(float));
  CHECK(bounded::duties_of(chunks, outside).size() == 20);
  CHECK(owed({5, 321, 322}).repairs[0].elements.size() == 10 * sizeof(float));  // the last chunk is shorter

  using Catch::Matchers::Contains;
  CHECK_THROWS_AS(owed({6, 0, 1}), std::out_of_range);
  CHECK_THROWS_WITH(owed({1, 0, 8}), Contains("elements [0, 8) of layer 'layer1'"));
  CHECK_THROWS_WITH(owed({1, 3, 3}), Contains("elements [3, 3) of layer 'layer1'"));
  CHECK_THROWS_WITH(bounded::owed<float>(
                        chunks, std::array{lamina::element_range{1, 0, 7}},
                        [&](std::size_t) -> const auto& { return made.values[0]; }),
                    Contains("layer 'layer1'"));
  CHECK_THROWS_WITH(bounded::owed<double>(chunks, {}, [](std::size_t) { return std::span<const double>(); }),
                    Contains("the grid is of other elements"));
}

}  // namespace lamina_test::owed_test
