// SPDX-License-Identifier: MIT
// Frames that arrive in part: what was lost stays in the residual, so that invariants 1 and 2 of docs/algorithm.md hold at every step.
#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "frames.hpp"
#include "lamina/lamina.hpp"
#include "steps.hpp"

namespace lamina_test::loss_test {

using lamina::payload_type;
using lamina::worker_options;

namespace {

/// Bytes of 0 in place of what was lost of a frame without a checksum, as a receiver leaves them.
template <class T>
void zero_holes(bytes& all, const lamina::delivery& arrived) {
  const lamina::layout& fragments = arrived.sent().model();
  const auto frame = lamina::decode<T>(all, fragments);
  for (const std::size_t f : arrived.sent().sent()) {
    const auto in_frame = frame.bytes_of(f);
    std::byte* const layer = all.data() + (in_frame.data() - all.data());
    const auto zero = [&](std::size_t begin, std::size_t end) {
      std::fill(layer + begin, layer + end, std::byte{0});
    };
    arrived.for_each_lost(f, [&](std::size_t begin, std::size_t end) {
      const std::size_t scales = (fragments.sizes()[f] + 63) / 64;  // of integers
      switch (frame.payload()) {
        case payload_type::as_is:
          return zero(begin * sizeof(T), end * sizeof(T));
        case payload_type::int8:
          zero(begin / 64, end / 64 + (end % 64 != 0));
          return zero(scales + begin, scales + end);
        case payload_type::int4:
          zero(begin / 64, end / 64 + (end % 64 != 0));
          return zero(scales + begin / 2, scales + end / 2 + end % 2);
        case payload_type::ternary:
          zero(begin / 64, end / 64 + (end % 64 != 0));
          return zero(scales + begin / 64 * 13, scales + end / 64 * 13 + (end % 64 + 4) / 5);
        default:
          return zero(begin * 2, end * 2);
      }
    });
  }
}

/// What goes wrong on purpose.
enum class defect {
  none,
  commits_what_was_lost,     ///< commit() in place of commit(arrived)
  takes_what_came_late,      ///< the receiver writes a chunk after it has said what arrived
  says_another_bitmap,       ///< the sender is told of another set of chunks than the receiver uses
  returns_what_has_arrived,  ///< a step that arrived is not committed
};

/// A worker whose frames lose up to 30 % of their chunks, and its receiver: everything that both sides have counted.
template <class T>
class lossy_link {
 public:
  lossy_link(const lamina::layout& model, const worker_options& options, std::size_t chunk_elements,
             std::uint32_t seed, defect wrong = defect::none)
      : worker_(model, options),
        random_(seed),
        chunk_elements_(chunk_elements),
        wrong_(wrong),
        computed_(model.elements()),
        delivered_(model.elements()),
        velocity_(model.elements()),
        losses_in_a_row_(model.elements()) {}

  std::span<const T> computed() const { return computed_; }
  std::span<const T> residual() const { return worker_.residual().elements(); }
  std::size_t partly_lost() const { return partly_lost_; }

  /// One step, planned or not. Gives the bytes as the receiver has them; none if the whole transfer failed, and nothing was
  /// committed.
  bytes step(bool may_fail) {
    auto step = below(random_, 2) == 0 ? worker_.begin(worker_.plan()) : worker_.begin();
    add(step);
    bytes frame = step.frame().to_bytes();
    if (may_fail && below(random_, 32) == 0) return {};
    const lamina::delivery arrived = lose_some(step.sent());
    zero_holes<T>(frame, arrived);
    read(frame, arrived);
    if (wrong_ == defect::takes_what_came_late) {
      for (const std::size_t f : arrived.sent().sent()) {
        arrived.for_each_lost(f, [&](std::size_t begin, std::size_t) {
          delivered_[worker_.fragments().offset(f) + begin] += worker_.residual()[f][begin];
        });
      }
    }
    if (wrong_ == defect::commits_what_was_lost) {
      step.commit();
    } else if (wrong_ == defect::says_another_bitmap) {
      step.commit(lose_some(step.sent()));
    } else if (wrong_ != defect::returns_what_has_arrived) {
      step.commit(arrived);
    }
    return frame;
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
    for (std::size_t i = 0; i < kept.size(); ++i) {
      if (delivered_[i] + kept[i] != computed_[i]) return false;
    }
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
      frame.restore(f, values);
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
  defect wrong_;
  std::vector<T> computed_;   // the sum of the gradients, or of the velocities
  std::vector<T> delivered_;  // the sum of what the receiver has read
  std::vector<T> velocity_;
  std::vector<int> losses_in_a_row_;  // of the chunk that begins at an element
  std::size_t partly_lost_ = 0;
};

/// Whether `steps` steps of three workers conserve everything.
template <class T>
bool conserves_everything(const lamina::layout& model, worker_options options, int steps,
                          defect wrong = defect::none) {
  options.frame_checksum = lamina::frame_checksum::none;
  for (std::uint32_t w = 0; w < 3; ++w) {
    const std::size_t chunk = lamina::has_blocks(options.payload) ? 64 * (1 + w % 2) : 8 + 16 * w;
    lossy_link<T> link(model, options, chunk, 2100 + w, wrong);
    for (int step = 1; step <= steps; ++step) {
      (void)link.step(true);
      if (!link.conserves() || !link.has_right_velocity()) return false;
      if (step % 50 == 0) link.resume();
    }
    CHECK(link.partly_lost() > static_cast<std::size_t>(steps) / 20);  // or the test would say nothing
  }
  return true;
}

const lamina::layout& small_model() {
  static const lamina::layout model = model_of({300, 64, 1, 0, 129, 17, 500, 1});
  return model;
}

}  // namespace

TEST_CASE("loss: what is lost stays in the residual, at every step and in every payload type") {
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    for (const worker_options& options :
         {worker_options{.drop_ratio = 0, .payload = payload},
          worker_options{.drop_ratio = 0.7, .payload = payload},
          worker_options{.send_budget = 0.3, .payload = payload},
          worker_options{.drop_ratio = 0.9, .at_least_every = 7, .payload = payload}}) {
      CHECK(conserves_everything<float>(small_model(), options, 150));
    }
    CHECK(conserves_everything<double>(
        small_model(), {.drop_ratio = 0.5, .non_finite = lamina::non_finite::skip, .payload = payload}, 150));
    CHECK(conserves_everything<float>(
        model_of({5000, 100}), {.drop_ratio = 0.5, .fragment_elements = 4096, .payload = payload}, 100));
  }
}

TEST_CASE("loss: with momentum correction the velocity is cleared with what was delivered, and only there") {
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    for (worker_options options : {worker_options{.drop_ratio = 0.5}, worker_options{.send_budget = 0.4}}) {
      options.at_least_every = 4;
      options.momentum = 0.5;
      options.payload = payload;
      CHECK(conserves_everything<double>(small_model(), options, 250));
    }
  }
}

TEST_CASE("loss: a link that does something else than it says does not conserve") {
  for (const payload_type payload : payload_types) {
    for (const defect wrong : {defect::commits_what_was_lost, defect::takes_what_came_late,
                               defect::says_another_bitmap, defect::returns_what_has_arrived}) {
      CAPTURE(static_cast<int>(payload), static_cast<int>(wrong));
      CHECK_FALSE(
          conserves_everything<float>(small_model(), {.drop_ratio = 0.5, .payload = payload}, 30, wrong));
    }
  }
}

namespace {

/// Invariant 2 over `steps` steps of four workers and a server with plain SGD. What was lost counts as zeros, and the mean divides by
/// all workers; or else by those of which the element has arrived.
bool follows_dense_iterate(payload_type payload, int steps, bool divides_by_all = true) {
  constexpr std::size_t workers = 4;
  constexpr float rate = 0.25F;
  const lamina::layout& model = small_model();
  std::vector<lossy_link<float>> links;
  for (std::uint32_t w = 0; w < workers; ++w) {
    links.emplace_back(model,
                       worker_options{.drop_ratio = 0.6,
                                      .payload = payload,
                                      .sender = w,
                                      .frame_checksum = lamina::frame_checksum::none},
                       64, 2200 + w);
  }
  lamina::server<float> server(model, {.workers = workers});
  std::vector<float> parameters(model.elements());
  for (int step = 1; step <= steps; ++step) {
    std::vector<int> givers(model.elements());
    for (auto& each : links) {
      const bytes from = each.step(false);
      auto values = zeros_like<float>(model);
      receive<float>(values, from, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        for (std::size_t i = 0; i < values[l].size(); ++i) givers[model.offset(l) + i] += values[l][i] != 0;
      }
      const auto error = server.add(from);
      REQUIRE_FALSE(error);
    }
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) {
        const std::size_t at = model.offset(l) + begin + i;
        const float weight = divides_by_all || givers[at] == 0
                                 ? 1
                                 : static_cast<float>(workers) / static_cast<float>(givers[at]);
        const volatile float change = rate * weight * mean[i];  // no contraction to FMA
        parameters[at] -= change;
      }
    });
    constexpr float scale = rate / workers;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      float residuals = 0;
      float computed = 0;
      for (const auto& each : links) {
        residuals += each.residual()[i];
        computed += each.computed()[i];
      }
      if (parameters[i] - scale * residuals != -scale * computed) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("loss: the parameters less what the residuals hold are those of dense SGD") {
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    CHECK(follows_dense_iterate(payload, 100));
    CHECK_FALSE(follows_dense_iterate(payload, 20, false));
  }
}

TEST_CASE("loss: the commit of a complete delivery is commit(), bitwise") {
  std::mt19937 random(2300);
  for (const payload_type payload : payload_types) {
    for (const worker_options& options :
         {worker_options{.drop_ratio = 0.7, .at_least_every = 5, .momentum = 0.9, .payload = payload},
          worker_options{.send_budget = 0.3, .payload = payload}}) {
      lamina::worker<float> with(small_model(), options);
      lamina::worker<float> without(small_model(), options);
      for (int t = 1; t <= 200; ++t) {
        const auto gradients = rounding_gradients<float>(random, small_model());
        const bool fails = below(random, 10) == 0;
        {
          auto a = with.add(gradients);
          a.frame();
          if (!fails) a.commit(lamina::delivery(a.sent(), 64 * (1 + below(random, 4))));
        }
        send(without, gradients, !fails);
        REQUIRE(with.save() == without.save());
        // A layer that is cleared by runs would add where one that counts as zero takes what comes, -0 too.
        for (std::size_t l = 0; l < small_model().layers(); ++l)
          REQUIRE(with.residual().is_clear(l) == without.residual().is_clear(l));
        REQUIRE(same_bits(with.values(), without.values()));
      }
    }
  }
}

}  // namespace lamina_test::loss_test
