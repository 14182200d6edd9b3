// SPDX-License-Identifier: MIT
// Frames that arrive in part: what was lost stays in the residual, so that oracles 1 and 2 of docs/scheme/index.md hold at every step.
#include <algorithm>
#include <array>
#include <cstddef>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::compressor_options;
using lamina::decision_timing;
using lamina::payload_type;

namespace {

constexpr std::array payload_types = {payload_type::as_is, payload_type::float16, payload_type::bfloat16,
                                      payload_type::int8, payload_type::int4};

/// Bytes of 0 in place of what was lost of a frame without a checksum, as a receiver leaves them.
template <class T>
void zero_holes(std::vector<std::byte>& bytes, const lamina::delivery& arrived) {
  const lamina::layout& parts = arrived.sent().model();
  const auto frame = lamina::decode<T>(bytes, parts);
  for (const std::size_t part : arrived.sent().sent()) {
    const auto in_frame = frame.bytes_of(part);
    std::byte* const layer = bytes.data() + (in_frame.data() - bytes.data());
    const auto zero = [&](std::size_t begin, std::size_t end) {
      std::fill(layer + begin, layer + end, std::byte{0});
    };
    arrived.for_each_lost(part, [&](std::size_t begin, std::size_t end) {
      const std::size_t scales = (parts.sizes()[part] + 63) / 64;  // of integers
      switch (frame.payload()) {
        case payload_type::as_is:
          return zero(begin * sizeof(T), end * sizeof(T));
        case payload_type::int8:
          zero(begin / 64, end / 64 + (end % 64 != 0));
          return zero(scales + begin, scales + end);
        case payload_type::int4:
          zero(begin / 64, end / 64 + (end % 64 != 0));
          return zero(scales + begin / 2, scales + end / 2 + end % 2);
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

/// A worker whose frames lose up to 30 % of their chunks, and its receiver: everything that both ends have counted.
template <class T>
class lossy_link {
 public:
  lossy_link(const lamina::layout& model, const compressor_options& options, std::size_t chunk_elements,
             std::uint32_t seed, defect wrong = defect::none)
      : options_(options),
        compressor_(model, options),
        random_(seed),
        chunk_elements_(chunk_elements),
        wrong_(wrong),
        computed_(model.elements()),
        delivered_(model.elements()),
        velocity_(model.elements()),
        losses_in_a_row_(model.elements()) {}

  lamina::gradient_compressor<T>& compressor() { return compressor_; }
  std::span<const T> computed() const { return computed_; }
  std::span<const T> residual() const { return compressor_.residual().elements(); }
  std::size_t partly_lost() const { return partly_lost_; }

  void accumulate() {
    const lamina::layout& model = compressor_.model();
    for (std::size_t l = 0; l < model.layers(); ++l) {
      if (below(random_, 16) == 0) {
        compressor_.skip(l);
        continue;
      }
      const std::vector<T> gradient = random_integers<T>(random_, model.sizes()[l], 1 + below(random_, 8));
      compressor_.accumulate(l, gradient);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        T& velocity = velocity_[model.offset(l) + i];
        velocity = static_cast<T>(options_.momentum) * velocity + gradient[i];
        computed_[model.offset(l) + i] += velocity;
      }
    }
  }

  /// One frame on its way. Gives the bytes as the receiver has them; none if the whole transfer failed, and nothing was committed.
  std::vector<std::byte> send(bool may_fail) {
    std::vector<std::byte> bytes = compressor_.encode().to_bytes();
    if (may_fail && below(random_, 32) == 0) return {};
    const lamina::delivery arrived = lose_some();
    zero_holes<T>(bytes, arrived);
    const auto frame = lamina::decode<T>(bytes, compressor_.parts());
    for (const std::size_t part : arrived.sent().sent()) {
      std::vector<T> values(compressor_.parts().sizes()[part]);
      frame.restore(part, values);
      const std::size_t offset = compressor_.parts().offset(part);
      for (std::size_t i = 0; i < values.size(); ++i) delivered_[offset + i] += values[i];
      arrived.for_each_delivered(part, [&](std::size_t begin, std::size_t end) {
        std::fill_n(velocity_.begin() + static_cast<std::ptrdiff_t>(offset + begin), end - begin, T(0));
      });
      count(arrived, part);
    }
    if (wrong_ == defect::takes_what_came_late) {
      for (const std::size_t part : arrived.sent().sent()) {
        arrived.for_each_lost(part, [&](std::size_t begin, std::size_t) {
          const std::size_t at = compressor_.parts().offset(part) + begin;
          delivered_[at] += compressor_.residual()[part][begin];
        });
      }
    }
    if (wrong_ == defect::commits_what_was_lost) {
      compressor_.commit();
    } else if (wrong_ == defect::says_another_bitmap) {
      compressor_.commit(lose_some());
    } else if (wrong_ != defect::returns_what_has_arrived) {
      compressor_.commit(arrived);
    }
    return bytes;
  }

  /// Goes on in a compressor that was loaded from what this one saves.
  void resume() {
    lamina::gradient_compressor<T> next(compressor_.model(), options_);
    next.load(compressor_.save());
    compressor_ = std::move(next);
  }

  /// Oracle 1: everything delivered plus the residual is what was accumulated.
  bool conserves() const {
    const auto kept = residual();
    for (std::size_t i = 0; i < kept.size(); ++i) {
      if (delivered_[i] + kept[i] != computed_[i]) return false;
    }
    return true;
  }
  /// The velocity is 0 where it was delivered, and goes on where it was not.
  bool has_right_velocity() const {
    const auto kept = compressor_.residual().velocity();
    return kept.empty() || std::equal(kept.begin(), kept.end(), velocity_.begin());
  }

 private:
  // No chunk more than three times in a row: momentum makes one more binary digit of a number in each step that it waits.
  lamina::delivery lose_some() {
    const lamina::selection& sent = compressor_.chosen();
    lamina::delivery arrived(sent, chunk_elements_);
    const std::size_t lost_of_1000 = below(random_, 301);
    for (const std::size_t part : sent.sent()) {
      const bool loses_all = below(random_, 10) == 0;
      for (std::size_t chunk = 0; chunk < arrived.chunks(part); ++chunk) {
        if (!loses_all && below(random_, 1000) >= lost_of_1000) continue;
        if (losses_in_a_row_[sent.model().offset(part) + chunk * chunk_elements_] < 3)
          arrived.lose(part, chunk);
      }
    }
    return arrived;
  }
  void count(const lamina::delivery& arrived, std::size_t part) {
    for (std::size_t chunk = 0; chunk < arrived.chunks(part); ++chunk) {
      int& losses = losses_in_a_row_[arrived.sent().model().offset(part) + chunk * chunk_elements_];
      losses = arrived.is_lost(part, chunk) ? losses + 1 : 0;
    }
    const std::size_t lost = arrived.lost_chunks(part);
    if (lost > 0 && lost < arrived.chunks(part)) ++partly_lost_;
  }

  compressor_options options_;
  lamina::gradient_compressor<T> compressor_;
  std::mt19937 random_;
  std::size_t chunk_elements_;
  defect wrong_;
  std::vector<T> computed_;   // the sum of the gradients, or of the velocities
  std::vector<T> delivered_;  // the sum of what the receiver has read
  std::vector<T> velocity_;
  std::vector<int> losses_in_a_row_;  // of the chunk that begins at an element
  std::size_t partly_lost_ = 0;
};

template <class T>
void plan_next(std::vector<lossy_link<T>>& links) {
  std::vector<double> agreed(links[0].compressor().parts().layers());
  for (auto& each : links) {
    const auto predicted = each.compressor().predicted_values();
    for (std::size_t l = 0; l < agreed.size(); ++l) {
      agreed[l] += predicted[l] / static_cast<double>(links.size());
    }
  }
  for (auto& each : links) each.compressor().plan_next(agreed);
}

/// Whether `steps` steps of four workers conserve everything.
template <class T>
bool conserves_everything(const lamina::layout& model, compressor_options options, int steps,
                          defect wrong = defect::none) {
  options.frame_checksum = lamina::frame_checksum::none;
  std::vector<lossy_link<T>> links;
  for (std::uint32_t w = 0; w < 4; ++w) {
    options.sender = w;
    const std::size_t chunk = lamina::has_blocks(options.payload) ? 64 * (1 + w % 2) : 8 + 16 * w;
    links.emplace_back(model, options, chunk, 2100 + w, wrong);
  }
  for (int step = 1; step <= steps; ++step) {
    for (auto& each : links) each.accumulate();
    if (options.decide == decision_timing::ahead) plan_next(links);
    for (auto& each : links) {
      (void)each.send(true);
      if (!each.conserves() || !each.has_right_velocity()) return false;
      if (step % 200 == 0) each.resume();
    }
  }
  // Or the test would say nothing.
  for (const auto& each : links) CHECK(each.partly_lost() > static_cast<std::size_t>(steps) / 20);
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
    CHECK(conserves_everything<float>(small_model(), {.drop_ratio = 0, .payload = payload}, 1000));
    CHECK(conserves_everything<float>(small_model(), {.drop_ratio = 0.7, .payload = payload}, 1000));
    CHECK(conserves_everything<float>(small_model(), {.byte_budget = 0.3, .payload = payload}, 1000));
    CHECK(conserves_everything<float>(small_model(), {.drop_ratio = 0.9, .max_age = 7, .payload = payload},
                                      1000));
    CHECK(conserves_everything<double>(small_model(), {.drop_ratio = 0.5, .payload = payload}, 1000));
  }
}

TEST_CASE("loss: what is lost stays, whenever layers are decided") {
  for (const payload_type payload : payload_types) {
    for (const decision_timing decide : {decision_timing::as_ready, decision_timing::ahead}) {
      CAPTURE(static_cast<int>(payload), static_cast<int>(decide));
      CHECK(conserves_everything<float>(
          small_model(), {.drop_ratio = 0.7, .max_age = 9, .decide = decide, .payload = payload}, 1000));
      CHECK(conserves_everything<float>(small_model(),
                                        {.byte_budget = 0.3, .decide = decide, .payload = payload}, 1000));
    }
  }
}

TEST_CASE("loss: with momentum correction the velocity is cleared with what was delivered, and only there") {
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    CHECK(conserves_everything<double>(
        small_model(), {.drop_ratio = 0.5, .max_age = 4, .momentum = 0.5, .payload = payload}, 1000));
    CHECK(conserves_everything<double>(
        small_model(), {.byte_budget = 0.4, .max_age = 4, .momentum = 0.5, .payload = payload}, 1000));
  }
}

TEST_CASE("loss: what is lost of a part of a layer stays") {
  const lamina::layout model = model_of({5000, 100});
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    CHECK(conserves_everything<float>(model, {.drop_ratio = 0.5, .part_elements = 4096, .payload = payload},
                                      1000));
  }
}

TEST_CASE("loss: elements that are left out one by one lose nothing either") {
  CHECK(conserves_everything<float>(small_model(),
                                    {.drop_ratio = 0.5, .non_finite = lamina::non_finite::skip}, 200));
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

/// Oracle 2 over `steps` steps of four workers and a server with plain SGD. What was lost counts as zeros, and the mean divides by
/// all workers; or else by those of which the element has arrived.
bool follows_dense_iterate(payload_type payload, int steps, bool divides_by_all = true) {
  constexpr std::size_t workers = 4;
  constexpr float rate = 0.25F;
  const lamina::layout& model = small_model();
  std::vector<lossy_link<float>> links;
  for (std::uint32_t w = 0; w < workers; ++w) {
    links.emplace_back(model,
                       compressor_options{.drop_ratio = 0.6,
                                          .payload = payload,
                                          .sender = w,
                                          .frame_checksum = lamina::frame_checksum::none},
                       64, 2200 + w);
  }
  auto aggregator = lamina::gradient_aggregator<float>::of_workers(model, workers);
  std::vector<float> parameters(model.elements());
  for (int step = 1; step <= steps; ++step) {
    for (auto& each : links) each.accumulate();
    std::vector<int> givers(model.elements());
    std::vector<std::vector<std::byte>> frames;
    for (auto& each : links) {
      frames.push_back(each.send(false));
      const auto frame = lamina::decode<float>(frames.back(), model);
      aggregator.add(frame);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        std::vector<float> values(model.sizes()[l]);
        frame.restore(l, values);
        for (std::size_t i = 0; i < values.size(); ++i) {
          if (values[i] != 0) ++givers[model.offset(l) + i];
        }
      }
    }
    for (const std::size_t l : aggregator.arrived().sent()) {
      aggregator.mean(l, [&](std::size_t begin, std::span<const float> mean) {
        for (std::size_t i = 0; i < mean.size(); ++i) {
          const std::size_t at = model.offset(l) + begin + i;
          const float weight = divides_by_all || givers[at] == 0
                                   ? 1
                                   : static_cast<float>(workers) / static_cast<float>(givers[at]);
          const volatile float change = rate * weight * mean[i];  // no contraction to FMA
          parameters[at] -= change;
        }
      });
    }
    aggregator.next_step();
    constexpr float scale = rate / workers;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      float held_back = 0;
      float computed = 0;
      for (const auto& each : links) {
        held_back += each.residual()[i];
        computed += each.computed()[i];
      }
      if (parameters[i] - scale * held_back != -scale * computed) return false;
    }
  }
  return true;
}

}  // namespace

TEST_CASE("loss: the parameters less what the residuals hold are those of dense SGD") {
  for (const payload_type payload : payload_types) {
    CAPTURE(static_cast<int>(payload));
    CHECK(follows_dense_iterate(payload, 300));
    CHECK_FALSE(follows_dense_iterate(payload, 20, false));
  }
}

TEST_CASE("loss: the commit of a complete delivery is commit(), to the last bit") {
  std::mt19937 random(2300);
  std::vector<compressor_options> all;
  for (const payload_type payload : payload_types) {
    all.push_back({.drop_ratio = 0.7, .max_age = 5, .momentum = 0.9, .payload = payload});
    all.push_back({.byte_budget = 0.3, .payload = payload});
    all.push_back(
        {.byte_budget = 0.3, .max_age = 9, .decide = decision_timing::as_ready, .payload = payload});
    all.push_back({.drop_ratio = 0.7, .max_age = 5, .decide = decision_timing::ahead, .payload = payload});
  }
  for (const compressor_options& options : all) {
    lamina::gradient_compressor<float> with(small_model(), options);
    lamina::gradient_compressor<float> without(small_model(), options);
    for (int step = 1; step <= 200; ++step) {
      for (std::size_t l = 0; l < small_model().layers(); ++l) {
        const auto gradient = random_fractions<float>(random, small_model().sizes()[l]);
        with.accumulate(l, gradient);
        without.accumulate(l, gradient);
      }
      const bool fails = below(random, 10) == 0;
      for (auto* each : {&with, &without}) {
        if (options.decide == decision_timing::ahead) each->plan_next(each->predicted_values());
        each->encode();
      }
      if (!fails) {
        without.commit();
        with.commit(lamina::delivery(with.chosen(), 64 * (1 + below(random, 4))));
      }
      REQUIRE(with.save() == without.save());
      // A layer that is cleared by runs would add where one that counts as zero takes what comes, -0 too.
      for (std::size_t l = 0; l < small_model().layers(); ++l) {
        REQUIRE(with.residual().is_clear(l) == without.residual().is_clear(l));
      }
      if (options.decide == decision_timing::ahead) {
        REQUIRE(same_bits(with.predicted_values(), without.predicted_values()));
      }
    }
  }
}
