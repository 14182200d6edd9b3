// SPDX-License-Identifier: MIT
// Frames that arrive in part: what was lost stays in the residual, so that invariants 1 and 2 of docs/algorithm.md hold at every step.

#include "accumulate.hpp"
#include "frames.hpp"
#include "lamina/lamina.hpp"

namespace lamina_test::loss_test {

using lamina::payload_type;
using lamina::worker_options;

namespace {

/// A worker whose frames lose up to 30 % of their chunks, and its receiver: everything that both sides have counted.
template <class T>
class lossy_link {
 public:
  lossy_link(const lamina::layout& model, const worker_options& options, std::size_t chunk_elements,
             std::uint32_t seed)
      : worker_(model, options),
        random_(seed),
        chunk_elements_(chunk_elements),
        computed_(model.elements()),
        delivered_(model.elements()),
        velocity_(model.elements()),
        losses_in_a_row_(model.elements()) {}

  std::span<const T> residual() const { return worker_.residual().elements(); }
  std::size_t partly_lost() const { return partly_lost_; }

  /// One step, planned or not. Now and then the whole transfer fails, and nothing is committed.
  void step() {
    auto step = below(random_, 2) == 0 ? worker_.begin(worker_.plan()) : worker_.begin();
    add(step);
    const bytes frame = step.frame().to_bytes();
    if (below(random_, 32) == 0) return;
    const lamina::delivery arrived = lose_some(step.sent());
    read(frame, arrived);
    step.commit(arrived);
  }

  /// Goes on in a worker that was loaded from what this one saves.
  void resume() {
    lamina::worker<T> next(worker_.model(), worker_.options());
    next.load(worker_.save());
    worker_ = std::move(next);
  }

  /// Invariant 1: everything delivered plus the residual is what was added.
  bool conserves() const {
    const auto kept = residual();
    for (std::size_t i = 0; i < kept.size(); ++i)
      if (delivered_[i] + kept[i] != computed_[i]) return false;
    return true;
  }
  /// The velocity is 0 where it was delivered, and goes on where it was not.
  bool has_right_velocity() const {
    const auto kept = worker_.residual().velocity();
    return kept.empty() || std::equal(kept.begin(), kept.end(), velocity_.begin());
  }

 private:
  void add(typename lamina::worker<T>::step& step) {
    const lamina::layout& model = worker_.model();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (below(random_, 16) == 0) {
        step.skip(l);
        continue;
      }
      const std::vector<T> gradient =
          random_integers<T>(random_, model.sizes()[l], magnitudes_[below(random_, 4)]);
      REQUIRE(step.add(l, gradient));
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        T& velocity = velocity_[model.offset(l) + i];
        velocity = static_cast<T>(worker_.options().momentum) * velocity + gradient[i];
        computed_[model.offset(l) + i] += velocity;
      }
    }
  }
  void read(const bytes& from, const lamina::delivery& arrived) {
    const auto frame = lamina::decode<T>(from, worker_.fragments());
    for (const std::size_t f : arrived.sent().sent()) {
      std::vector<T> values(worker_.fragments().sizes()[f]);
      frame.restore(f, values, arrived);  // the rest stays 0
      const std::size_t offset = worker_.fragments().offset(f);
      for (std::size_t i = 0; i < values.size(); ++i) delivered_[offset + i] += values[i];
      arrived.for_each_delivered(f, [&](std::size_t begin, std::size_t end) {
        std::fill_n(velocity_.begin() + static_cast<std::ptrdiff_t>(offset + begin), end - begin, T(0));
      });
      count(arrived, f);
    }
  }
  // No chunk more than three times in a row: momentum makes one more binary digit of a number in each step that it stays.
  lamina::delivery lose_some(const lamina::selection& sent) {
    lamina::delivery arrived(sent, chunk_elements_);
    const std::size_t lost_of_1000 = below(random_, 301);
    for (const std::size_t f : sent.sent()) {
      const bool loses_all = below(random_, 10) == 0;
      for (std::size_t chunk = 0; chunk < arrived.chunks(f); ++chunk) {
        if (!loses_all && below(random_, 1000) >= lost_of_1000) continue;
        if (losses_in_a_row_[sent.model().offset(f) + chunk * chunk_elements_] < 3) arrived.lose(f, chunk);
      }
    }
    return arrived;
  }
  void count(const lamina::delivery& arrived, std::size_t f) {
    for (std::size_t chunk = 0; chunk < arrived.chunks(f); ++chunk) {
      int& losses = losses_in_a_row_[arrived.sent().model().offset(f) + chunk * chunk_elements_];
      losses = arrived.is_lost(f, chunk) ? losses + 1 : 0;
    }
    const std::size_t lost = arrived.lost_chunks(f);
    if (lost > 0 && lost < arrived.chunks(f)) ++partly_lost_;
  }

  // Sums stay below 2^24; what is beyond 7, 127, 256 or 2,048 is rounded by one payload or another.
  static constexpr std::array<std::size_t, 4> magnitudes_ = {1, 8, 300, 3000};

  lamina::worker<T> worker_;
  std::mt19937 random_;
  std::size_t chunk_elements_;
  std::vector<T> computed_;   // the sum of the gradients, or of the velocities
  std::vector<T> delivered_;  // the sum of what the receiver has read
  std::vector<T> velocity_;
  std::vector<int> losses_in_a_row_;  // of the chunk that begins at an element
  std::size_t partly_lost_ = 0;
};

/// Whether `steps` steps of three workers conserve everything.
template <class T>
bool conserves_everything(const lamina::layout& model, const worker_options& options, int steps) {
  for (std::uint32_t w = 0; w < 3; ++w) {
    const std::size_t chunk = lamina::has_blocks(options.payload) ? 64 * (1 + w % 2) : 8 + 16 * w;
    lossy_link<T> link(model, options, chunk, 2100 + w);
    for (int step = 1; step <= steps; ++step) {
      link.step();
      if (!link.conserves() || !link.has_right_velocity()) return false;
      if (step % 50 == 0) link.resume();
    }
    CHECK(link.partly_lost() > static_cast<std::size_t>(steps) / 20);  // or the test would say nothing
  }
  return true;
}

const lamina::layout small_model = model_of({300, 64, 1, 0, 129, 17, 500, 1});

}  // namespace

// With momentum correction the velocity is cleared with what was delivered, and only there.
TEST_CASE("loss: what is lost stays in the residual, at every step and in every payload type") {
  for (const payload_type payload : all_payload_types) {
    CAPTURE(static_cast<int>(payload));
    for (const worker_options& options :
         {worker_options{.drop_ratio = 0.7, .payload = payload},
          worker_options{.drop_ratio = 0.9, .at_least_every = 7, .payload = payload}})
      CHECK(conserves_everything<float>(small_model, options, 150));
    for (const worker_options& options :
         {worker_options{.drop_ratio = 0.5, .at_least_every = 4, .momentum = 0.5, .payload = payload},
          worker_options{.send_budget = 0.4, .non_finite = lamina::non_finite::skip, .payload = payload}})
      CHECK(conserves_everything<double>(small_model, options, 200));
    CHECK(conserves_everything<float>(
        model_of({5000, 100}), {.drop_ratio = 0.5, .fragment_elements = 4096, .payload = payload}, 100));
  }
}

TEST_CASE("residual: a range that is cleared of a layer that counts as zero is zero") {
  const auto momentum = GENERATE(0.0, 0.5);
  lamina::residual_accumulator<float> residual(model_of({256}), {.momentum = momentum});
  const auto take = [&] {
    residual.subtract(0, payload_type::float16, 10, 70);
    residual.clear(0, 10, 70);
    CHECK(residual.is_clear(0));
  };
  take();  // a new one
  accumulate(residual, 0, std::vector<float>(256, 5));
  residual.clear(0);
  take();  // memory still has what was sent
  accumulate(residual, 0, std::vector<float>(256, 7));
  CHECK_FALSE(residual.is_clear(0));
  for (const float each : residual[0]) REQUIRE(each == 7);
  for (const float each : residual.velocity()) REQUIRE(each == 7);
}

TEST_CASE("residual: ranges that are not there are refused, and nothing changes") {
  lamina::residual_accumulator<float> residual(model_of({256, 0}));
  accumulate(residual, 0, std::vector<float>(256, 5));
  CHECK(message_of<std::out_of_range>([&] { residual.clear(0, 200, 257); }) ==
        "elements 200 to 257 of layer 'layer0' are not among its 256");
  CHECK(throws<std::out_of_range>([&] { residual.clear(0, 9, 8); }));
  CHECK(throws<std::out_of_range>([&] { residual.clear(2, 0, 0); }));
  CHECK(throws<std::out_of_range>([&] { residual.subtract(0, payload_type::float16, 0, 257); }));
  CHECK(message_of<std::invalid_argument>([&] { residual.subtract(0, payload_type::int8, 32, 64); }) ==
        "element 32 of layer 'layer0' does not begin a block of the int8 payload");
  residual.clear(0, 256, 256);
  residual.clear(1, 0, 0);
  for (const float each : residual[0]) REQUIRE(each == 5);
}

TEST_CASE("commit: the delivery of another frame is refused by name and changes nothing") {
  const lamina::layout model = model_of({256, 64, 10});
  lamina::worker<float> worker(model, {.drop_ratio = 0.5, .payload = payload_type::int8});
  auto step = worker.add(
      tensors<float>{std::vector<float>(256, 1), std::vector<float>(64, 2), std::vector<float>(10, 9)});
  step.frame();
  const std::vector<float> before = residual_of(worker);
  const auto refuses = [&](const lamina::delivery& arrived, const char* named) {
    CHECK(contains(message_of<std::invalid_argument>([&] { step.commit(arrived); }), named));
    CHECK(residual_of(worker) == before);
  };
  refuses(lamina::delivery(some_of(model, {0}), 64), "the delivery is of another frame");
  const auto sent = step.sent().sent();
  const auto same_bits_of_other = some_of(model_of({256, 64, 11}), {sent.begin(), sent.end()});
  refuses(lamina::delivery(same_bits_of_other, 64), "the delivery is of another frame");
  refuses(lamina::delivery(step.sent(), 96), "a multiple of 64 elements, these have 96");
  CHECK_NOTHROW(step.commit(lamina::delivery(step.sent(), 64)));
}

TEST_CASE("commit: a fragment of which nothing arrived keeps its age, one that arrived in part begins anew") {
  lamina::worker<float> worker(model_of({64, 64}), {.threshold = 1e30, .at_least_every = 4});
  const auto sent_in_step = [&](bool loses_all_of_first) {
    auto step = worker.add(tensors<float>(2, std::vector<float>(64, 1)));
    lamina::delivery arrived(step.select(), 16);
    for (std::size_t chunk = 0; chunk < arrived.chunks(0) && loses_all_of_first; ++chunk)
      arrived.lose(0, chunk);
    for (std::size_t chunk = 1; chunk < arrived.chunks(1); ++chunk) arrived.lose(1, chunk);
    step.commit(arrived);
    return sent_of(step.sent());
  };
  for (int k = 1; k < 4; ++k) REQUIRE(sent_in_step(true) == "00");
  CHECK(sent_in_step(true) == "11");
  CHECK(sent_in_step(true) == "10");
  CHECK(sent_in_step(false) == "10");
  CHECK(sent_in_step(false) == "00");
  CHECK(sent_in_step(false) == "01");
}

TEST_CASE("commit: a budget is charged for what was lost, since it crossed the network") {
  lamina::worker<float> worker(model_of({100, 100}), {.send_budget = 0.25});
  int sent = 0;
  for (int t = 1; t <= 40; ++t) {
    auto step = worker.add(tensors<float>(2, std::vector<float>(100, 1)));
    lamina::delivery arrived(step.select(), 100);
    for (const std::size_t f : step.sent().sent()) {
      arrived.lose(f, 0);
      ++sent;
    }
    step.commit(arrived);
  }
  CHECK(sent == 20);
}

// The payload is of frames; packed elements are as they are, and their chunks need no multiple of 64. Of what is packed in half the bytes
// rounding stays where it arrived.
TEST_CASE("commit: what was packed is committed by what arrived of it") {
  const float x = 1 + 0x1p-12F;
  const auto commit_some = [&](payload_type payload, auto packed, float left) {
    lamina::worker<float> worker(model_of({10}), {.drop_ratio = 0, .payload = payload});
    auto step = worker.add(tensors<float>{std::vector<float>(10, x)});
    step.select();
    step.pack(packed);
    lamina::delivery arrived(step.sent(), 3);
    arrived.lose(0, 1);
    arrived.lose(0, 3);
    step.commit(arrived);
    CHECK(residual_of(worker) == std::vector<float>{left, left, left, x, x, x, left, left, left, x});
  };
  for (const payload_type payload : {payload_type::as_is, payload_type::int8, payload_type::ternary})
    commit_some(payload, std::vector<float>(), 0);
  commit_some(payload_type::bfloat16, std::vector<lamina::bfloat16>(), 0x1p-12F);
}

}  // namespace lamina_test::loss_test
