// SPDX-License-Identifier: MIT
// Local updates: what each worker did that others have not seen is what it has left to send.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"
#include "steps.hpp"
#include "support.hpp"

namespace lamina_test::delta_test {

namespace {

using lamina_test::same_bits;
using lamina_test::tensors;
using lamina_test::throws;
using lamina_test::zeros_like;

const lamina::layout three_layers = lamina_test::model_of({5000, 3, 130});

/// `all[l][i] += scale * other[l][i]`.
template <class T>
void add(tensors<T>& all, const tensors<T>& other, T scale = 1) {
  for (std::size_t l = 0; l < all.size(); ++l) {
    for (std::size_t i = 0; i < all[l].size(); ++i) all[l][i] += scale * other[l][i];
  }
}

template <class T>
std::vector<std::byte> frame_of(const lamina::frame_header& header, const lamina::selection& chosen,
                                const tensors<T>& values, std::uint32_t run = 0) {
  lamina::frame_encoder<T> encoder(chosen.model(), run);
  return encoder.encode(header, chosen, [&](std::size_t f) -> const std::vector<T>& { return values[f]; })
      .to_bytes();
}

lamina::selection everything(const lamina::layout& model) {
  lamina::selection all(model);
  all.send_all();
  return all;
}

enum class mistake {
  none,
  overwrites,            // y, in place of shifting it
  decays_all,            // the momentum also of fragments that were not sent
  adds_rounding_twice,   // of d
  keeps_rounding_twice,  // of r
  takes_its_own_mean,    // each worker's outer optimizer has what that worker sent
  abandons_alone,        // a step that only it could not send, though all agree
  commits_lost_chunks,   // as if all had arrived
};

/// How a worker ends a step that it could not send.
enum class loss { before_commit, after_commit };

/// Where in a step the update that is due is applied.
enum class arrival { before_commit, after_commit, before_moves, before_observe };

struct run_options {
  std::size_t workers = 4;
  lamina::worker_options compress = {};
  lamina::outer_optimizer_options outer = {};
  std::size_t delay = 0;
  bool agrees = true;
  mistake made = mistake::none;
  arrival when = arrival::after_commit;
  loss lost_by = loss::before_commit;
  double chunk_loss = 0;  // share of the chunks of a frame, by chance
};

/// Workers with local updates around a server, all in one place.
template <class T>
class cluster {
 public:
  struct worker {
    lamina::local_delta<T> compressor;
    tensors<T> x;
    tensors<T> y;
  };

  cluster(const lamina::layout& model, const run_options& options)
      : options_(options),
        outer_(lamina::tiling(model, options.compress.fragment_elements).fragments(), options.outer) {
    for (std::size_t w = 0; w < options.workers; ++w) add_worker(model, zeros_like<T>(model));
  }

  void add_worker(const lamina::layout& model, const tensors<T>& x) {
    lamina::worker_options compress = options_.compress;
    compress.sender = static_cast<std::uint32_t>(workers.size());
    workers.push_back({lamina::local_delta<T>(model, compress), x, x});
  }

  /// One step of all: worker w moves y by moves[w], and the update of the step `delay` before comes. Those in `lost` fail to
  /// send. Gives what all sent.
  tensors<T> step(const std::vector<tensors<T>>& moves, const std::vector<std::size_t>& lost = {}) {
    std::vector<double> agreed(fragments().layers());
    if (options_.when == arrival::before_moves) apply_due();
    for (std::size_t w = 0; w < workers.size(); ++w) add(workers[w].y, moves[w]);
    if (options_.when == arrival::before_observe) apply_due();
    for (std::size_t w = 0; w < workers.size(); ++w) {
      workers[w].compressor.observe_all(workers[w].x, workers[w].y);
      for (std::size_t fragment = 0; fragment < agreed.size(); ++fragment)
        agreed[fragment] += workers[w].compressor.values()[fragment] / static_cast<double>(workers.size());
    }
    const std::uint64_t step = workers[0].compressor.step();
    const lamina::server_options of_updates{
        .workers = workers.size(), .kind = lamina::frame_kind::updates, .first_step = step};
    lamina::server<T> server(fragments(), of_updates);
    std::vector<std::vector<std::byte>> frames;
    tensors<T> sent = zeros_like<T>(fragments());
    for (std::size_t w = 0; w < workers.size(); ++w) {
      lamina::local_delta<T>& compressor = workers[w].compressor;
      if (options_.agrees) compressor.select(agreed);
      frames.push_back(compressor.encode(workers[w].x, workers[w].y).to_bytes());
    }
    // The update of this step is not among those under way yet.
    if (options_.when == arrival::before_commit) apply_while_more_than(options_.delay - 1);
    for (std::size_t w = 0; w < workers.size(); ++w) {
      lamina::local_delta<T>& compressor = workers[w].compressor;
      if (std::ranges::find(lost, w) != lost.end()) {
        lose(compressor);
        continue;
      }
      if (options_.chunk_loss > 0) {
        lose_chunks(compressor, frames[w]);
      } else {
        compressor.commit();
      }
      const auto view = lamina::decode<T>(frames[w], fragments());
      REQUIRE_FALSE(server.add(frames[w]));
      for (std::size_t fragment = 0; fragment < fragments().layers(); ++fragment) {
        if (view.is_dropped(fragment)) continue;
        std::vector<T> r(fragments().sizes()[fragment]);
        view.restore(fragment, r);
        for (std::size_t i = 0; i < r.size(); ++i) sent[fragment][i] += r[i];
        if (options_.made == mistake::keeps_rounding_twice) {
          for (std::size_t i = 0; i < r.size(); ++i)
            workers[w].y[fragment][i] -= workers[w].x[fragment][i] - workers[w].y[fragment][i] - r[i];
        }
      }
    }
    if (options_.made == mistake::takes_its_own_mean) {
      std::vector<std::vector<std::byte>>& updates = under_way_.emplace_back();
      for (std::size_t w = 0; w < workers.size(); ++w) {
        lamina::outer_optimizer<T> own_outer = outer_;
        lamina::server<T> own(fragments(), of_updates);
        REQUIRE_FALSE(own.add(frames[w]));
        updates.push_back(update_of(own, own_outer));
      }
    } else {
      under_way_.emplace_back(workers.size(), update_of(server, outer_));
    }
    if (options_.when == arrival::after_commit) apply_due();
    return sent;
  }

  /// Applies the update of the step `delay` before the last, if it was not yet.
  void apply_due() { apply_while_more_than(options_.delay); }

  const lamina::layout& fragments() const { return workers[0].compressor.fragments(); }
  lamina::outer_optimizer<T>& outer() { return outer_; }
  /// Whether x is bitwise identical on all, and where they agree, all have chosen the same.
  bool agree() const {
    return std::ranges::all_of(workers, [&](const worker& each) {
      const worker& first = workers[0];
      for (std::size_t l = 0; l < each.x.size(); ++l) {
        if (!same_bits(each.x[l], first.x[l])) return false;
      }
      return !options_.agrees ||
             std::ranges::equal(each.compressor.chosen().sent(), first.compressor.chosen().sent());
    });
  }

  std::vector<worker> workers;

 private:
  void lose(lamina::local_delta<T>& compressor) {
    if (!options_.agrees || options_.made == mistake::abandons_alone) {
      compressor.abandon();
    } else if (options_.lost_by == loss::before_commit) {
      compressor.commit_lost();
    } else {
      compressor.commit();
      compressor.forget(compressor.step());
    }
  }

  // Commits what arrives of the frame, in which the rest becomes zeros, as at a receiver.
  void lose_chunks(lamina::local_delta<T>& compressor, std::vector<std::byte>& frame) {
    lamina::delivery arrived(compressor.chosen(), lamina::payload_block_elements);
    tensors<T> r = zeros_like<T>(fragments());
    const auto whole = lamina::decode<T>(frame, fragments());
    std::bernoulli_distribution is_lost(options_.chunk_loss);
    for (const std::size_t fragment : compressor.chosen().sent()) {
      whole.restore(fragment, r[fragment]);
      for (std::size_t chunk = 0; chunk < arrived.chunks(fragment); ++chunk) {
        if (is_lost(random_)) arrived.lose(fragment, chunk);
      }
      arrived.for_each_lost(fragment, [&](std::size_t begin, std::size_t end) {
        std::fill(r[fragment].begin() + static_cast<std::ptrdiff_t>(begin),
                  r[fragment].begin() + static_cast<std::ptrdiff_t>(end), T(0));
      });
    }
    if (options_.made == mistake::commits_lost_chunks) {
      compressor.commit();
    } else {
      compressor.commit(arrived);
    }
    const lamina::frame_header header{.kind = lamina::frame_kind::updates,
                                      .step = compressor.step(),
                                      .sender = lamina::decode<T>(frame, fragments()).sender(),
                                      .payload = options_.compress.payload};
    frame = frame_of(header, compressor.chosen(), r);
  }

  std::vector<std::byte> update_of(lamina::server<T>& server, lamina::outer_optimizer<T>& outer) {
    tensors<T> d = zeros_like<T>(fragments());
    const std::uint64_t step = server.step();
    const lamina::selection arrived = server.arrived();
    server.update([&](std::size_t fragment, std::size_t begin, std::span<const T> mean) {
      std::copy(mean.begin(), mean.end(), d[fragment].begin() + static_cast<std::ptrdiff_t>(begin));
      if (options_.made == mistake::adds_rounding_twice) {
        for (std::size_t i = begin; i < begin + mean.size(); ++i)
          d[fragment][i] += outer.rounding()[fragments().offset(fragment) + i];
      }
      outer(fragment, begin, std::span(d[fragment]).subspan(begin, mean.size()));
    });
    for (std::size_t fragment = 0; fragment < fragments().layers(); ++fragment) {
      if (options_.made != mistake::decays_all || arrived.is_sent(fragment)) continue;
      std::vector<T> nothing(d[fragment].size());
      outer(fragment, 0, nothing);
    }
    return frame_of<T>({.kind = lamina::frame_kind::updates, .step = step, .payload = options_.outer.payload},
                       arrived, d);
  }

  void apply_while_more_than(std::size_t delay) {
    if (under_way_.size() <= delay) return;
    auto bytes = under_way_.front().begin();
    for (worker& each : workers) {
      // One that has joined since takes what all others do.
      const auto update =
          lamina::decode<T>(bytes == under_way_.front().end() ? bytes[-1] : *bytes++, fragments());
      each.compressor.apply(update, each.x, each.y);
      for (std::size_t f = 0; f < update.layers() && options_.made == mistake::overwrites; ++f) {
        if (!update.is_dropped(f)) each.y[f] = each.x[f];
      }
    }
    under_way_.pop_front();
  }

  run_options options_;
  std::mt19937 random_{29};
  lamina::outer_optimizer<T> outer_;
  std::deque<std::vector<std::vector<std::byte>>> under_way_;  // of each step one for each worker
};

template <class T, class Draw>
std::vector<tensors<T>> drawn_moves(const lamina::layout& model, std::size_t workers, const Draw& draw) {
  std::vector<tensors<T>> moves(workers);
  for (tensors<T>& all : moves) {
    for (const std::size_t elements : model.sizes()) all.push_back(draw(elements));
  }
  return moves;
}
template <class T>
std::vector<tensors<T>> random_moves(std::mt19937& random, const lamina::layout& model, std::size_t workers) {
  return drawn_moves<T>(model, workers,
                        [&](std::size_t n) { return lamina_test::random_fractions<T>(random, n); });
}
template <class T>
std::vector<tensors<T>> integer_moves(std::mt19937& random, const lamina::layout& model, std::size_t workers,
                                      std::size_t magnitude = 8) {
  return drawn_moves<T>(model, workers,
                        [&](std::size_t n) { return lamina_test::random_integers<T>(random, n, magnitude); });
}

const lamina::payload_type payloads[] = {lamina::payload_type::as_is,    lamina::payload_type::float16,
                                         lamina::payload_type::bfloat16, lamina::payload_type::int8,
                                         lamina::payload_type::int4,     lamina::payload_type::ternary};

/// The sum over the workers of what they did, less what of it was applied, less what is left: 0 everywhere if nothing is lost.
template <class T>
class ledger {
 public:
  ledger(const lamina::layout& fragments, std::size_t delay)
      : did_(zeros_like<T>(fragments)), delay_(delay) {}
  void add_step(const std::vector<tensors<T>>& moves, const tensors<T>& sent) {
    for (const tensors<T>& each : moves) add(did_, each, T(-1));
    sent_.push_back(sent);
  }
  bool balances(const cluster<T>& all) const {
    tensors<T> rest = did_;
    for (std::size_t step = 0; step + delay_ < sent_.size(); ++step) add(rest, sent_[step], T(-1));
    for (const auto& each : all.workers) {
      add(rest, each.x, T(-1));
      add(rest, each.y);
      for (std::size_t f = 0; f < rest.size() && !each.compressor.rest().empty(); ++f) {
        const auto outside = each.compressor.rest().subspan(each.compressor.fragments().offset(f));
        for (std::size_t i = 0; i < rest[f].size(); ++i) rest[f][i] -= outside[i];
      }
    }
    for (const auto& fragment : rest) {
      for (const T x : fragment) {
        if (x != 0) return false;
      }
    }
    return true;
  }

 private:
  tensors<T> did_;
  std::vector<tensors<T>> sent_;
  std::size_t delay_;
};

}  // namespace

TEST_CASE("local delta: the shared parameters are bitwise identical on every worker", "[invariant]") {
  const auto agree = [](run_options options, lamina::payload_type payload) {
    std::mt19937 random(1);
    options.compress.drop_ratio = 0.5;
    options.compress.payload = payload;
    options.compress.fragment_elements = 4096;
    options.compress.by_score = payload == lamina::payload_type::int8;
    options.outer = {.rate = 0.7, .momentum = 0.9, .payload = payload};
    cluster<float> all(three_layers, options);
    for (int t = 0; t < 8; ++t) {
      const auto lost = t % 4 == 3 ? std::vector<std::size_t>{0, 2} : std::vector<std::size_t>{};
      all.step(random_moves<float>(random, three_layers, options.workers), lost);
      if (!all.agree()) return false;
    }
    return all.workers[1].compressor.steps_under_way() == options.delay &&
           all.workers[0].x[0] != std::vector<float>(5000);
  };
  for (const auto payload : payloads) {
    for (const std::size_t delay : {0, 1, 3}) {
      for (const bool agrees : {true, false}) CHECK(agree({.delay = delay, .agrees = agrees}, payload));
    }
  }
  CHECK_FALSE(agree({.made = mistake::takes_its_own_mean}, payloads[0]));
}

TEST_CASE("local delta: workers that agree choose the same fragments, also when some could not send",
          "[invariant]") {
  const lamina::layout model = lamina_test::model_of({100, 100, 100, 100, 30});
  const auto run = [&](run_options options) {
    std::mt19937 random(18);
    options.compress.at_least_every = 9;
    options.compress.send_budget = 0.25;
    cluster<float> all(model, options);
    std::size_t sent = 0;
    for (std::size_t t = 0; t < 30; ++t) {
      std::vector<std::size_t> lost;
      if (t == 0 || t % 5 == 2) lost = {t % 4};
      if (t % 7 == 3) lost = {1, 3};
      all.step(random_moves<float>(random, model, options.workers), lost);
      if (!all.agree()) return false;
      sent += all.workers[0].compressor.chosen().sent_layers();
    }
    return sent > 20;
  };
  for (const bool by_score : {false, true}) {
    for (const std::size_t delay : {0, 1, 2}) {
      const lamina::worker_options compress{.by_score = by_score};
      for (const loss lost_by : {loss::before_commit, loss::after_commit})
        CHECK(run({.compress = compress, .delay = delay, .lost_by = lost_by}));
      CHECK(!run({.compress = compress, .delay = delay, .made = mistake::abandons_alone}));
    }
  }
}

TEST_CASE("local delta: all workers together may abandon a step, and no fragment is held for its update") {
  const lamina::layout model = lamina_test::model_of({100, 100});
  const tensors<float> x = zeros_like<float>(model);
  tensors<float> y = x;
  y[0][0] = 2;
  y[1][0] = 1;
  for (const bool is_committed : {false, true}) {
    lamina::local_delta<float> compressor(model, {.drop_ratio = 0.5});
    for (int t = 1; t <= 3; ++t) {
      compressor.observe_all(x, y);
      compressor.encode(x, y);
      CHECK(compressor.chosen().is_sent(0));
      if (is_committed) {
        compressor.commit();
        compressor.abandon(compressor.step());
      } else {
        compressor.abandon();
      }
      CHECK(compressor.steps_under_way() == 0);
    }
    compressor.observe_all(x, y);
    CHECK(lamina_test::message_of<std::logic_error>([&] { compressor.commit_lost(); }) ==
          "commit_lost: step 4 was not selected yet");
    compressor.select();
    compressor.commit_lost();
    CHECK(compressor.steps_under_way() == 1);
    lamina::local_delta<float> resumed(model, {.drop_ratio = 0.5});
    resumed.load(compressor.save());
    CHECK(resumed.save() == compressor.save());
    CHECK(resumed.steps_under_way() == 1);
  }
}

TEST_CASE("local delta: what all did is what was sent and what is left, bitwise", "[invariant]") {
  const auto balances = [](run_options options, lamina::payload_type payload) {
    std::mt19937 random(2);
    options.compress.drop_ratio = 0.6;
    options.compress.at_least_every = options.chunk_loss > 0 ? 4 : 0;
    options.compress.payload = payload;
    // The factors of the momentum have many bits, of which a payload leaves d few.
    options.compress.by_score = payload != lamina::payload_type::as_is;
    options.outer = {.rate = 0.5, .momentum = 0.5, .payload = payload};
    cluster<double> all(three_layers, options);
    ledger<double> books(three_layers, options.delay);
    for (std::size_t t = 0; t < 10; ++t) {
      const auto moves = integer_moves<double>(random, three_layers, options.workers, 5000);
      // Two of four, so that the mean is exact.
      const bool fails = t % 4 == 3 && options.chunk_loss == 0;
      books.add_step(moves,
                     all.step(moves, fails ? std::vector<std::size_t>{0, 2} : std::vector<std::size_t>{}));
      if (!books.balances(all) || !all.agree()) return false;
    }
    return true;
  };
  for (const auto payload : payloads) {
    for (const std::size_t delay : {0, 2}) {
      CHECK(balances({.delay = delay}, payload));
      CHECK(balances({.delay = delay, .agrees = false}, payload));
      CHECK(balances({.delay = delay, .chunk_loss = 0.3}, payload));
      CHECK(balances({.compress = {.error_feedback = true}, .delay = delay}, payload));
      CHECK(balances({.compress = {.error_feedback = true}, .delay = delay, .lost_by = loss::after_commit},
                     payload));
      CHECK(balances({.compress = {.error_feedback = true}, .delay = delay, .agrees = false}, payload));
      CHECK(balances({.compress = {.error_feedback = true}, .delay = delay, .chunk_loss = 0.3}, payload));
    }
  }
  CHECK_FALSE(balances({.delay = 2, .made = mistake::overwrites}, payloads[0]));
  CHECK_FALSE(balances({.made = mistake::commits_lost_chunks, .chunk_loss = 0.3}, payloads[0]));
}

TEST_CASE("local delta: what a payload takes away, both ways, is not lost and not added twice",
          "[invariant]") {
  const auto run = [](lamina::payload_type payload, mistake made) {
    std::mt19937 random(19);
    run_options options{.made = made};
    options.compress.drop_ratio = 0.3;
    options.compress.payload = payload;
    options.outer = {.payload = payload};
    cluster<double> all(three_layers, options);
    ledger<double> books(three_layers, 0);
    tensors<double> mean = zeros_like<double>(three_layers);  // of what was sent, but for what x has of it
    bool up = true;
    bool down = true;
    for (std::size_t t = 0; t < 6; ++t) {
      const auto moves = integer_moves<double>(random, three_layers, options.workers, 1000);
      const auto sent = all.step(moves);
      books.add_step(moves, sent);
      up &= books.balances(all);
      add(mean, sent, 0.25);
      tensors<double> rest = mean;
      add(rest, all.workers[0].x);
      for (std::size_t l = 0; l < rest.size(); ++l) {
        const auto kept = all.outer().rounding().subspan(three_layers.offset(l), rest[l].size());
        down &= std::ranges::equal(rest[l], kept);
      }
    }
    return std::pair(up, down);
  };
  for (const auto payload : {lamina::payload_type::int8, lamina::payload_type::bfloat16}) {
    CHECK(run(payload, mistake::none) == std::pair(true, true));
    CHECK(run(payload, mistake::keeps_rounding_twice) == std::pair(false, true));
    CHECK(run(payload, mistake::adds_rounding_twice) == std::pair(true, false));
  }
}

TEST_CASE(
    "local delta: a delivery that does not fit is refused, and what was encoded can still be committed") {
  tensors<float> x = zeros_like<float>(three_layers);
  tensors<float> y = x;
  y[0][7] = 1;
  lamina::local_delta<float> compressor(three_layers,
                                        {.drop_ratio = 0, .payload = lamina::payload_type::int8});
  const lamina::selection none(three_layers);
  CHECK_THROWS_WITH(compressor.commit(lamina::delivery(none, 64)),
                    Catch::Matchers::Contains("nothing to commit"));
  compressor.observe_all(x, y);
  const lamina::encoded_frame& frame = compressor.encode(x, y);
  CHECK_THROWS_WITH(compressor.commit(lamina::delivery(none, 64)),
                    Catch::Matchers::Contains("the delivery is of another frame"));
  CHECK_THROWS_WITH(compressor.commit(lamina::delivery(compressor.chosen(), 65)),
                    Catch::Matchers::Contains("64"));
  CHECK(compressor.steps_under_way() == 0);
  lamina::delivery arrived(compressor.chosen(), 64);
  arrived.lose(0, 0);
  compressor.commit(arrived);
  CHECK(compressor.steps_under_way() == 1);
  CHECK(frame.segments().empty());
}

TEST_CASE("local delta: with SGD inside and everything sent, it is SGD on the mean gradient, bitwise",
          "[invariant]") {
  std::mt19937 random(5);
  run_options options;
  options.compress.drop_ratio = 0;
  cluster<float> all(three_layers, options);
  tensors<float> dense = zeros_like<float>(three_layers);
  constexpr float rate = 0.125F;
  for (int t = 0; t < 8; ++t) {
    auto gradients = integer_moves<float>(random, three_layers, options.workers);
    tensors<float> sum = zeros_like<float>(three_layers);
    for (const auto& each : gradients) add(sum, each);
    add(dense, sum, -rate / static_cast<float>(options.workers));
    for (auto& each : gradients) {
      for (auto& layer : each) {
        for (float& g : layer) g *= -rate;
      }
    }
    all.step(gradients);
    for (const auto& each : all.workers) REQUIRE((each.y == dense && each.x == dense));
  }
}

TEST_CASE("local delta: one worker goes on as if there were no others", "[invariant]") {
  std::mt19937 random(6);
  run_options options{.workers = 1, .delay = 1};
  options.compress.drop_ratio = 0.5;
  options.compress.by_score = true;
  cluster<float> all(three_layers, options);
  tensors<float> expected = zeros_like<float>(three_layers);
  for (int t = 0; t < 8; ++t) {
    const auto moves = integer_moves<float>(random, three_layers, 1);
    add(expected, moves[0]);
    all.step(moves);
    REQUIRE(all.workers[0].y == expected);
  }
}

TEST_CASE("local delta: when in a step an update comes changes nothing", "[invariant]") {
  for (const std::size_t delay : {1, 3}) {
    for (const bool agrees : {true, false}) {
      const auto run = [&](arrival when) {
        std::mt19937 random(17);
        run_options options{.delay = delay, .agrees = agrees, .when = when};
        options.compress.send_budget = 0.4;
        options.compress.fragment_elements = 4096;
        options.compress.payload = lamina::payload_type::int8;
        options.outer = {.rate = 0.5, .momentum = 0.5, .payload = lamina::payload_type::int8};
        options.compress.by_score = true;
        cluster<double> all(three_layers, options);
        std::vector<std::vector<std::size_t>> chosen;
        for (int t = 0; t < 12; ++t) {
          all.step(integer_moves<double>(random, three_layers, options.workers, 1000));
          for (const auto& each : all.workers) {
            const auto sent = each.compressor.chosen().sent();
            chosen.emplace_back(sent.begin(), sent.end());
          }
        }
        all.apply_due();
        tensors<double> numbers;
        for (const auto& each : all.workers) {
          numbers.insert(numbers.end(), each.x.begin(), each.x.end());
          numbers.insert(numbers.end(), each.y.begin(), each.y.end());
        }
        return std::pair(chosen, numbers);
      };
      const auto usual = run(arrival::after_commit);
      for (const arrival when : {arrival::before_commit, arrival::before_moves, arrival::before_observe}) {
        const auto other = run(when);
        CHECK(other.first == usual.first);
        CHECK(other.second == usual.second);
      }
    }
  }
}

TEST_CASE("local delta: no update is applied between the values of a step and what they choose") {
  // Applied before the values are taken, b is sent, which then has the larger local delta: after that, a, of which nothing is left.
  const lamina::layout model = lamina_test::model_of({4, 4});
  lamina::local_delta<float> compressor(model, {.drop_ratio = 0.6});
  tensors<float> x = zeros_like<float>(model);
  tensors<float> y = {{8, 8, 8, 8}, {1, 1, 1, 1}};
  compressor.observe_all(x, y);
  const auto bytes = compressor.encode(x, y).to_bytes();
  compressor.commit();
  const auto update = lamina::decode<float>(bytes, model);
  const std::vector<float> d(4, -8.0F);
  const auto refusal = [&] {
    const auto message = lamina_test::message_of<std::logic_error>([&] { compressor.apply(update, x, y); });
    CHECK(lamina_test::message_of<std::logic_error>(
              [&] { compressor.apply(1, std::span<const float>(d), x, y); }) == message);
    return message;
  };
  const std::string expected = "apply: step 2 was observed and not encoded yet";
  compressor.observe_all(x, y);
  CHECK(refusal() == expected);
  compressor.select();
  CHECK(refusal() == expected);
  CHECK(compressor.chosen().is_sent(1));
  compressor.encode(x, y);
  compressor.apply(update, x, y);
  compressor.commit();
  CHECK(x[0][0] == 8);
}

TEST_CASE("local delta: an update of a step that was not committed is refused") {
  const lamina::layout model = lamina_test::model_of({4});
  lamina::local_delta<float> compressor(model, {.drop_ratio = 0});
  tensors<float> x = zeros_like<float>(model);
  tensors<float> y = {{1, 1, 1, 1}};
  const auto message_of = [](const auto& call) { return lamina_test::message_of<std::logic_error>(call); };
  for (std::uint64_t step = 1; step < 4; ++step) {
    compressor.observe_all(x, y);
    const auto bytes = compressor.encode(x, y).to_bytes();
    const auto update = lamina::decode<float>(bytes, model);
    CHECK(message_of([&] { compressor.apply(update, x, y); }) ==
          "apply: the update of step " + std::to_string(step) + " comes before that step was committed");
    CHECK(x[0][0] == static_cast<float>(step - 1));
    compressor.commit();
    compressor.apply(update, x, y);
    CHECK(x[0][0] == static_cast<float>(step));
    CHECK(y[0][0] == static_cast<float>(step));
    for (float& each : y[0]) each += 1;
  }
  // From steps that are not there yet, whatever the phase.
  const auto bytes = frame_of({.kind = lamina::frame_kind::updates, .step = 9}, everything(model), x);
  CHECK(message_of([&] { compressor.apply(lamina::decode<float>(bytes, model), x, y); }) ==
        "apply: the update of step 9 comes before that step was committed");
  lamina::local_delta<float> resumed(model, {.drop_ratio = 0});
  resumed.load(compressor.save());
  CHECK(resumed.step() == 3);
}

TEST_CASE("local delta: a step that is forgotten is in the local delta again, and its update still applies") {
  const lamina::layout model = lamina_test::model_of({4, 4});
  for (const bool by_frame : {true, false}) {
    lamina::local_delta<float> compressor(model, {.drop_ratio = 0});
    tensors<float> x = zeros_like<float>(model);
    tensors<float> y = {{1, 1, 1, 1}, {2, 2, 2, 2}};
    compressor.observe_all(x, y);
    const auto bytes = compressor.encode(x, y).to_bytes();
    compressor.commit();
    compressor.forget(1);
    // As on the workers that did not forget it, its fragments are held until its update has come.
    CHECK(compressor.steps_under_way() == 1);
    compressor.observe_all(x, y);
    CHECK(compressor.select().sent_layers() == 0);
    compressor.encode(x, y);
    compressor.commit();
    const std::vector<float> d = {-1, -1, -1, -1, -2, -2, -2, -2};
    CHECK(lamina_test::message_of<std::logic_error>([&] {
            compressor.apply(2, std::span<const float>(), x, y);
          }) == "apply: the update of step 2 comes while step 1 is under way; apply that, or abandon() it");
    if (by_frame) {
      compressor.apply(lamina::decode<float>(bytes, model), x, y);
    } else {
      compressor.apply(1, std::span<const float>(d), x, y);
    }
    CHECK(x == tensors<float>{{1, 1, 1, 1}, {2, 2, 2, 2}});
    CHECK(y == tensors<float>{{2, 2, 2, 2}, {4, 4, 4, 4}});
    compressor.apply(2, std::span<const float>(), x, y);
    CHECK(compressor.steps_under_way() == 0);
    compressor.observe_all(x, y);
    CHECK(compressor.select().sent_layers() == 2);
  }
}

TEST_CASE("local delta: parameters and updates that are not finite are refused, and the layer is named") {
  const lamina::layout model = lamina_test::model_of({4, 5000});
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    lamina::local_delta<float> compressor(model, {.drop_ratio = 0, .fragment_elements = 4096});
    const auto is_refused = [](const auto& call) {
      try {
        call();
      } catch (const lamina::non_finite_gradient& refused) {
        return refused.layer() == 1 && refused.fragment() == 2;
      }
      return false;
    };
    tensors<float> x = zeros_like<float>(model);
    tensors<float> y = {std::vector<float>(4, 1.0F), std::vector<float>(5000, 1.0F)};
    y[1][4999] = bad;
    CHECK(is_refused([&] { compressor.observe_all(x, y); }));
    CHECK(compressor.step() == 0);
    y[1][4999] = 1;
    compressor.observe_all(x, y);
    compressor.encode(x, y);
    compressor.commit();
    tensors<float> broken = zeros_like<float>(compressor.fragments());
    broken[2].back() = bad;
    const auto bytes = frame_of({.kind = lamina::frame_kind::updates}, compressor.chosen(), broken);
    std::vector<float> d(5004);
    d[5003] = bad;
    const auto update = lamina::decode<float>(bytes, compressor.fragments());
    CHECK(is_refused([&] { compressor.apply(update, x, y); }));
    CHECK(is_refused([&] { compressor.apply(1, std::span<const float>(d), x, y); }));
    CHECK(x == zeros_like<float>(model));
    CHECK(y[0][0] == 1);
    CHECK(compressor.steps_under_way() == 1);
  }
}

TEST_CASE(
    "local delta: with error feedback the worker has what all share, and the rest joins the next message") {
  const lamina::layout model = lamina_test::model_of({2, 2});
  lamina::local_delta<float> compressor(
      model, {.threshold = 1, .error_feedback = true, .payload = lamina::payload_type::int4});
  tensors<float> x = zeros_like<float>(model);
  tensors<float> y = {{-7, -0.25}, {-0.5, -0.5}};
  const auto message = [&] {
    compressor.observe_all(x, y);
    const auto bytes = compressor.encode(x, y).to_bytes();
    compressor.commit();
    std::vector<float> r(2);
    lamina::decode<float>(bytes, model).restore(0, r);
    return r;
  };
  CHECK(message() == std::vector<float>{7, 0});  // integers, from -7 to 7
  CHECK(compressor.rest()[1] == 0);              // until it has arrived
  compressor.apply(1, std::vector<float>{3, 0}, x, y);
  CHECK(x == tensors<float>{{-3, 0}, {0, 0}});
  CHECK(y == tensors<float>{{-3, 0}, {-0.5, -0.5}});  // as shared, but for what was not chosen
  CHECK(std::ranges::equal(compressor.rest(), std::vector<float>{0, 0.25, 0, 0}));
  y = {{-10, -0.25}, {-0.5, -0.5}};
  CHECK(message() == std::vector<float>{7, 0});  // of 0.25 + 0.25, to even
  y[0][1] -= 1;                                  // while it is under way
  compressor.apply(2, std::vector<float>{7, 0}, x, y);
  CHECK(y == tensors<float>{{-10, -1}, {-0.5, -0.5}});
  CHECK(std::ranges::equal(compressor.rest(), std::vector<float>{0, 0.5, 0, 0}));
  // Without error feedback the same state is another's.
  lamina::local_delta<float> other(model, {.threshold = 1});
  CHECK(throws<lamina::decode_error>([&] { other.load(compressor.save()); }));
  lamina::local_delta<float> joined(model, {.threshold = 1, .error_feedback = true});
  joined.join(compressor.save());
  CHECK(std::ranges::equal(joined.rest(), std::vector<float>(4)));
}

TEST_CASE("local delta: saved with steps under way and resumed, it goes on bitwise", "[invariant]") {
  for (const auto payload : payloads) {
    run_options options{.delay = 2};
    options.compress.error_feedback = payload >= lamina::payload_type::int4;
    options.compress.send_budget = 0.3;
    options.compress.at_least_every = 5;
    options.compress.payload = payload;
    options.compress.fragment_elements = 4096;
    options.outer = {.rate = 0.7, .momentum = 0.9, .payload = payload};
    options.compress.by_score = true;
    std::mt19937 random(7);
    cluster<float> whole(three_layers, options);
    for (int t = 0; t < 7; ++t) whole.step(random_moves<float>(random, three_layers, options.workers));
    cluster<float> resumed = whole;
    lamina::outer_optimizer<float> outer(resumed.fragments(), options.outer);
    outer.restore(resumed.outer().momentum(), resumed.outer().rounding());
    resumed.outer() = outer;
    for (int t = 0; t < 7; ++t) {
      const auto moves = random_moves<float>(random, three_layers, options.workers);
      for (std::size_t w = 0; w < 4; ++w) {
        auto& compressor = resumed.workers[w].compressor;
        const auto bytes = compressor.save();
        lamina::worker_options compress = options.compress;
        compress.sender = static_cast<std::uint32_t>(w);  // not in the bytes: it is an option
        compressor = lamina::local_delta<float>(three_layers, compress);
        compressor.load(bytes);
        CHECK(compressor.save() == bytes);
        CHECK(compressor.steps_under_way() == 2);
      }
      whole.step(moves);
      resumed.step(moves);
      for (std::size_t w = 0; w < 4; ++w) {
        REQUIRE(lamina_test::same_tensors(whole.workers[w].x, resumed.workers[w].x));
        REQUIRE(lamina_test::same_tensors(whole.workers[w].y, resumed.workers[w].y));
      }
    }
  }
}

TEST_CASE(
    "local delta: one that joins begins at the shared parameters, and one that leaves hands its local delta "
    "over",
    "[invariant]") {
  // 2 and 4 workers, so that means are exact.
  for (const std::size_t delay : {0, 2}) {
    for (const bool joins : {true, false}) {  // or takes another's saved bytes for its own
      std::mt19937 random(8);
      run_options options{.workers = 2, .delay = delay};
      options.compress.send_budget = 0.6;
      options.compress.at_least_every = 4;
      options.compress.by_score = true;
      options.outer = {.rate = 0.5, .momentum = 0.5};
      cluster<double> all(three_layers, options);
      ledger<double> books(three_layers, delay);
      const auto step = [&](const std::vector<std::size_t>& leaving = {}) {
        auto moves = integer_moves<double>(random, three_layers, all.workers.size());
        for (const std::size_t w : leaving) moves[w] = zeros_like<double>(three_layers);
        books.add_step(moves, all.step(moves, leaving));
      };
      const auto agree = [&] { return books.balances(all) && all.agree(); };
      for (int t = 0; t < 4; ++t) step();
      REQUIRE(agree());

      const auto saved = all.workers[0].compressor.save();
      for (int joining = 0; joining < 2; ++joining) {
        all.add_worker(three_layers, all.workers[0].x);
        if (joins) {
          all.workers.back().compressor.join(saved);
        } else {
          all.workers.back().compressor.load(saved);
        }
        CHECK(all.workers.back().compressor.step() == 4);
        CHECK(all.workers.back().compressor.steps_under_way() == delay);
      }
      bool balances = true;
      for (int t = 0; t < 4; ++t) {
        step();
        balances &= agree();
      }
      // With a step under way the other's r is not in this one's local delta.
      CHECK(balances == (joins || delay == 0));
      if (!balances) continue;

      // Nothing of those that leave may be under way.
      for (std::size_t t = 0; t < delay; ++t) step({2, 3});
      REQUIRE(agree());
      for (int leaving = 0; leaving < 2; ++leaving) {
        tensors<double> left = all.workers.back().x;
        add(left, all.workers.back().y, -1.0);
        all.workers.pop_back();
        CHECK(!books.balances(all));
        add(all.workers[0].y, left, -1.0);
        CHECK(books.balances(all));
      }
      for (int t = 0; t < 4; ++t) {
        step();
        REQUIRE(agree());
      }
    }
  }
}

TEST_CASE("local delta: the values are those of the differences, with any functor and execution") {
  std::mt19937 random(9);
  const auto check = [&]<class F>(F functor) {
    lamina::local_delta<float, F> compressor(three_layers, {.fragment_elements = 4096}, functor);
    const auto moves = random_moves<float>(random, three_layers, 2);
    const auto in_reverse = [](std::size_t tasks, auto&& work) {
      for (std::size_t i = tasks; i-- > 0;) work(i);
    };
    const auto values = compressor.observe_all(moves[0], moves[1], in_reverse);
    std::size_t fragment = 0;
    for (std::size_t l = 0; l < three_layers.layers(); ++l) {
      std::vector<float> difference = moves[0][l];
      for (std::size_t i = 0; i < difference.size(); ++i) difference[i] -= moves[1][l][i];
      for (std::size_t begin = 0; begin < difference.size(); begin += 4096, ++fragment) {
        const auto elements =
            std::span(difference).subspan(begin, std::min<std::size_t>(4096, difference.size() - begin));
        CHECK(same_bits(values[fragment], functor(elements)));
      }
    }
    CHECK(fragment == values.size());
  };
  check(lamina::mean_abs{});
  check(lamina::l2_norm{});
  check(lamina::max_abs{});
}

TEST_CASE("local delta: what is packed is what the frame restores") {
  std::mt19937 random(16);
  const tensors<float> x = zeros_like<float>(three_layers);
  const tensors<float> y = random_moves<float>(random, three_layers, 1)[0];
  for (const auto payload : payloads) {
    lamina::local_delta<float> compressor(three_layers, {.drop_ratio = 0, .payload = payload});
    compressor.observe_all(x, y);
    compressor.select();
    std::vector<float> packed(compressor.chosen().sent_elements());
    compressor.pack(x, y, packed);
    const auto bytes = compressor.encode(x, y).to_bytes();
    const auto view = lamina::decode<float>(bytes, three_layers);
    std::vector<float> restored;
    for (std::size_t l = 0; l < three_layers.layers(); ++l) {
      std::vector<float> r(three_layers.sizes()[l]);
      view.restore(l, r);
      restored.insert(restored.end(), r.begin(), r.end());
    }
    CHECK(same_bits(packed, restored));
  }
}

TEST_CASE("local delta: a fragment that is under way is not selected again, whatever asks for it") {
  std::mt19937 random(10);
  lamina::worker_options options{.drop_ratio = 0, .at_least_every = 1, .always_sent = {1}};
  lamina::local_delta<float> compressor(three_layers, options);
  tensors<float> x = zeros_like<float>(three_layers);
  tensors<float> y = random_moves<float>(random, three_layers, 1)[0];
  compressor.observe_all(x, y);
  compressor.select(compressor.values(), std::vector<char>{0, 0, 1});
  CHECK(compressor.chosen().sent_layers() == 2);
  std::vector<float> r(compressor.chosen().sent_elements());
  compressor.pack(x, y, r);
  compressor.commit();

  compressor.observe_all(x, y);
  compressor.encode(x, y);
  CHECK(compressor.chosen().sent_layers() == 1);
  CHECK(compressor.chosen().is_sent(2));
  compressor.commit();
  CHECK(compressor.steps_under_way() == 2);

  const tensors<float> before = y;
  compressor.apply(1, std::span<const float>(r), x, y);
  CHECK(y == before);  // of one worker, d is r
  CHECK(x[0][7] == -r[7]);
  CHECK(compressor.steps_under_way() == 1);
  compressor.abandon(2);
  CHECK(compressor.steps_under_way() == 0);
  compressor.observe_all(x, y);
  compressor.select();
  CHECK(compressor.chosen().is_sent(2));
}

TEST_CASE("local delta: by score the agreed value counts for the steps since the fragment was sent",
          "[invariant]") {
  // Written out: the fragment of the largest product goes out, one in each step, as the budget has it.
  const lamina::layout model = lamina_test::model_of({64, 64, 64, 64, 64});
  for (const bool agrees : {true, false}) {
    for (const bool by_score : {true, false}) {
      std::mt19937 random(21);
      run_options options{.workers = 2, .agrees = agrees};
      options.compress.send_budget = 0.2;
      options.compress.by_score = by_score;
      if (!agrees) options.workers = 1;
      cluster<double> all(model, options);
      std::vector<double> sent_in(5);
      std::vector<std::vector<double>> deltas(options.workers, std::vector<double>(5));
      for (int t = 1; t <= 200; ++t) {
        std::vector<tensors<double>> moves(options.workers, zeros_like<double>(model));
        for (std::size_t w = 0; w < options.workers; ++w) {
          for (std::size_t fragment = 0; fragment < 5; ++fragment) {
            const auto move = static_cast<double>(lamina_test::below(random, std::size_t{2} << fragment));
            std::ranges::fill(moves[w][fragment], move);
            deltas[w][fragment] += move;
          }
        }
        std::vector<double> products(5);
        for (std::size_t fragment = 0; fragment < 5; ++fragment) {
          for (const auto& each : deltas)
            products[fragment] += std::abs(each[fragment]) / static_cast<double>(options.workers);
          if (by_score) products[fragment] *= t - sent_in[fragment];
        }
        const auto expected = static_cast<std::size_t>(std::ranges::max_element(products) - products.begin());
        all.step(moves);
        const auto chosen = all.workers[0].compressor.chosen().sent();
        REQUIRE(std::vector<std::size_t>(chosen.begin(), chosen.end()) == std::vector{expected});
        sent_in[expected] = t;
        for (auto& each : deltas) each[expected] = 0;
      }
      // The slowest local deltas a thirty-first as fast as the quickest.
      CHECK((sent_in[0] > 180) == by_score);
    }
  }
}

TEST_CASE("local delta: a step that is abandoned adds to ages, one that is lost counts as sent") {
  const lamina::layout model = lamina_test::model_of({64, 64});
  for (const bool is_lost : {true, false}) {
    lamina::local_delta<float> compressor(model, {.drop_ratio = 0.5, .by_score = true});
    tensors<float> x = zeros_like<float>(model);
    tensors<float> y = {std::vector<float>(64, 3.0F), std::vector<float>(64, 2.0F)};
    compressor.observe_all(x, y);
    compressor.select();
    CHECK(compressor.chosen().is_sent(0));
    if (is_lost) {
      compressor.commit_lost();
      compressor.apply(1, std::vector<float>(64), x, y);
    } else {
      compressor.abandon();
    }
    compressor.observe_all(x, y);
    compressor.select();
    CHECK(compressor.chosen().is_sent(1) == is_lost);  // 2 times 2 steps, and 3 times 1 or 2
    CHECK(compressor.threshold() == (is_lost ? 4 : 6));
  }
}

TEST_CASE("local delta: what is called out of order, or does not fit, is named and changes nothing") {
  tensors<float> x = zeros_like<float>(three_layers);
  tensors<float> y = zeros_like<float>(three_layers);
  y[0][1] = 1;
  lamina::local_delta<float> compressor(three_layers, {.drop_ratio = 0.1, .run = 7});
  const auto message_of = [](const auto& call) { return lamina_test::message_of<std::exception>(call); };

  CHECK(message_of([&] { lamina::local_delta<float>(three_layers, {.momentum = 0.9}); }) ==
        "momentum: a local delta has none, the worker's optimizer may");
  CHECK(message_of([&] {
          lamina::local_delta<float>(three_layers, {.non_finite = lamina::non_finite::skip});
        }) == "non_finite: nothing can be left out of a local delta, so refuse");
  CHECK(message_of([&] { lamina::worker<float>(three_layers, {.payload = lamina::payload_type(9)}); }) ==
        "payload 9 is none of payload_type");
  CHECK(message_of([&] {
          lamina::outer_optimizer<float>(three_layers, {.payload = lamina::payload_type(6)});
        }) == "payload 6 is none of payload_type");
  CHECK(throws<std::invalid_argument>([&] { lamina::local_delta<float>(lamina_test::model_of({})); }));
  CHECK(
      throws<std::invalid_argument>([&] { lamina::local_delta<float>(three_layers, {.always_sent = {3}}); }));

  CHECK(message_of([&] { compressor.select(); }) == "select: step 0 has ended; observe the next one first");
  CHECK(throws<std::logic_error>([&] { compressor.commit(); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(tensors<float>{x[0], x[0], x[2]}, y); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(x, tensors<float>{y[0], y[0], y[2]}); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(x, tensors<float>{}); }));
  CHECK(compressor.step() == 0);
  compressor.observe_all(x, y);
  CHECK(throws<std::logic_error>([&] { static_cast<void>(compressor.save()); }));
  std::vector<float> packed(5000);
  CHECK(message_of([&] { compressor.pack(x, y, packed); }) == "pack: call select() of this step before");
  compressor.observe_all(x, y);
  CHECK(throws<std::invalid_argument>([&] { compressor.select(std::vector<double>(2)); }));
  CHECK(throws<std::invalid_argument>(
      [&] { compressor.select(std::vector<double>(3), std::vector<char>(2)); }));
  compressor.select();
  CHECK(message_of([&] { compressor.select(); }) == "select: step 1 was selected already");
  CHECK(throws<std::invalid_argument>([&] { compressor.pack(x, y, std::span(packed).first(3)); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.encode(x, tensors<float>(3)); }));
  const auto bytes = compressor.encode(x, y).to_bytes();
  compressor.commit();
  CHECK(throws<std::logic_error>([&] { compressor.commit(); }));

  CHECK(message_of([&] { compressor.apply(2, std::span<const float>(packed), x, y); }) ==
        "apply: the update of step 2 comes before that step was committed");
  CHECK(message_of([&] { compressor.apply(1, std::span<const float>(packed).first(3), x, y); }) ==
        "apply: 3 elements where 5000 were sent in step 1");
  CHECK(message_of([&] { compressor.forget(2); }) == "forget: step 2 is not under way");
  CHECK(message_of([&] { compressor.abandon(2); }) == "abandon: step 2 is not under way");
  CHECK(message_of([&] { compressor.commit_lost(); }) == "commit_lost: step 1 has ended");
  const lamina::selection nothing(three_layers);
  const auto empty = frame_of({.kind = lamina::frame_kind::updates}, nothing, x, 7);
  CHECK(message_of([&] { compressor.apply(lamina::decode<float>(empty, three_layers), x, y); }) ==
        "apply: the update of step 1 lacks 'layer0', which was sent in it");
  for (const auto& other :
       {frame_of({}, nothing, x, 7), frame_of({.kind = lamina::frame_kind::updates}, nothing, x, 8)}) {
    CHECK(throws<lamina::decode_error>(
        [&] { compressor.apply(lamina::decode<float>(other, three_layers), x, y); }));
  }
  const auto update = lamina::decode<float>(bytes, three_layers);
  CHECK(throws<std::invalid_argument>([&] { compressor.apply(update, x, tensors<float>(2)); }));
  tensors<float> short_y = y;
  short_y[2].pop_back();
  CHECK(throws<std::invalid_argument>([&] { compressor.apply(update, x, short_y); }));
  CHECK(x == zeros_like<float>(three_layers));
  CHECK(compressor.steps_under_way() == 1);
  compressor.apply(update, x, y);
  CHECK(x[0][1] == 1);
  CHECK(message_of([&] { compressor.apply(update, x, y); }) ==
        "apply: the update of step 1 comes after that of step 1");
}

TEST_CASE("local delta: saved bytes that are damaged, cut or of another model are refused") {
  std::mt19937 random(11);
  const tensors<float> x = zeros_like<float>(three_layers);
  const tensors<float> y = random_moves<float>(random, three_layers, 1)[0];
  lamina::local_delta<float> compressor(three_layers, {.drop_ratio = 0.01});
  for (int t = 0; t < 2; ++t) {
    compressor.observe_all(x, y);
    compressor.encode(x, y);
    compressor.commit();
  }
  const std::vector<std::byte> bytes = compressor.save();
  const auto code_of = [&](std::vector<std::byte> changed, const lamina::layout& model) -> std::error_code {
    lamina::local_delta<float> other(model);
    try {
      other.load(changed);
    } catch (const lamina::decode_error& refused) {
      CHECK(other.step() == 0);
      return refused.code();
    }
    return {};
  };
  CHECK(!code_of(bytes, three_layers));
  CHECK(code_of(bytes, lamina_test::model_of({5000, 3, 131})) == lamina::errc::wrong_layout);
  CHECK(code_of({}, three_layers) == lamina::errc::truncated);
  auto longer = bytes;
  longer.push_back({});
  const auto residual = lamina::worker<float>(three_layers).save();
  CHECK(code_of(residual, three_layers) == lamina::errc::bad_magic);
  CHECK(code_of(longer, three_layers) == lamina::errc::checksum_mismatch);
  for (const std::size_t at : {std::size_t{64}, bytes.size() - 1}) {
    auto changed = bytes;
    changed[at] ^= std::byte{1};
    CHECK(code_of(changed, three_layers) == lamina::errc::checksum_mismatch);
  }
  CHECK(code_of({bytes.begin(), bytes.end() - 4}, three_layers) == lamina::errc::checksum_mismatch);
  // Without a checksum what follows is read, and judged, as it stands.
  const auto unprotected = [&](std::size_t offset, std::uint64_t value) {
    auto changed = bytes;
    changed[7] = std::byte{0};
    for (std::size_t i = 56; i < 64; ++i) changed[i] = std::byte{0};
    if (offset != 0) std::memcpy(changed.data() + offset, &value, sizeof value);
    return changed;
  };
  const std::size_t body = 64 + 3 * 8;
  CHECK(!code_of(unprotected(0, 0), three_layers));
  CHECK(code_of(unprotected(64, 9), three_layers) == lamina::errc::impossible_age);    // sent in step 9 of 2
  CHECK(code_of(unprotected(body, 3), three_layers) == lamina::errc::impossible_age);  // applied
  CHECK(code_of(unprotected(body + 8, 1), three_layers) == lamina::errc::trailing_bytes);  // under way
  CHECK(code_of(unprotected(body + 8, ~std::uint64_t{}), three_layers) == lamina::errc::truncated);
  CHECK(code_of(unprotected(body + 16, 5010), three_layers) == lamina::errc::wrong_layout);  // outside
  CHECK(code_of(unprotected(body + 24, 5), three_layers) == lamina::errc::impossible_age);   // its step
  CHECK(code_of(unprotected(body + 32, ~std::uint64_t{}), three_layers) ==
        lamina::errc::truncated);                                                         // its fragments
  CHECK(code_of(unprotected(body + 40, 1), three_layers) == lamina::errc::wrong_layout);  // its elements
  CHECK(code_of(unprotected(body + 48, 3), three_layers) ==
        lamina::errc::wrong_layout);  // the first of its fragments
  CHECK(code_of(unprotected(body + 56, 0), three_layers) == lamina::errc::wrong_layout);  // not ascending
  CHECK(code_of(unprotected(24, 1), three_layers) == lamina::errc::wrong_layout);         // elements
}

TEST_CASE("outer optimizer: a fragment that was not sent keeps its momentum", "[invariant]") {
  const auto keeps = [](mistake made) {
    std::mt19937 random(14);
    run_options options{.made = made};
    options.compress.drop_ratio = 0.3;
    options.outer = {.momentum = 0.5};
    cluster<double> all(three_layers, options);
    std::size_t kept = 0;
    for (int t = 0; t < 4; ++t) {
      const std::vector<double> before = lamina_test::copy_of(all.outer().momentum());
      all.step(integer_moves<double>(random, three_layers, options.workers));
      for (std::size_t l = 0; l < 3; ++l) {
        if (all.workers[0].compressor.chosen().is_sent(l)) continue;
        for (std::size_t i = three_layers.offset(l); i < three_layers.offset(l) + 3; ++i) {
          if (before[i] != all.outer().momentum()[i]) return false;
          kept += before[i] != 0 ? 1 : 0;
        }
      }
    }
    return kept > 0;
  };
  CHECK(keeps(mistake::none));
  CHECK_FALSE(keeps(mistake::decays_all));
}

TEST_CASE("local delta: frames of updates are taken where they belong and nowhere else") {
  std::mt19937 random(15);
  const tensors<float> x = zeros_like<float>(three_layers);
  const tensors<float> y = random_moves<float>(random, three_layers, 1)[0];
  lamina::local_delta<float> compressor(three_layers, {.drop_ratio = 0.01});
  compressor.observe_all(x, y);
  const auto bytes = compressor.encode(x, y).to_bytes();
  const auto view = lamina::decode<float>(bytes, three_layers);
  CHECK(view.kind() == lamina::frame_kind::updates);
  std::error_code error;
  CHECK(lamina::peek(bytes, error).kind == lamina::frame_kind::updates);
  lamina::server<float> of_gradients(three_layers);
  CHECK(of_gradients.add(bytes) == lamina::errc::unexpected_kind);
  lamina::server<float> of_updates(three_layers, {.kind = lamina::frame_kind::updates});
  CHECK_FALSE(of_updates.add(bytes));
  CHECK(of_updates.complete());
}

}  // namespace lamina_test::delta_test
