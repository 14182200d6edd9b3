// SPDX-License-Identifier: MIT
// Local updates: what each worker did that others have not seen is what it has left to send.

#include <deque>
#include <stdexcept>

#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"
#include "unit/frames.hpp"

namespace lamina_test::delta_test {

namespace {

const lamina::layout three_layers = model_of({5000, 3, 130});

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
    for (std::size_t w = 0; w < workers.size(); ++w) add_to(workers[w].y, moves[w]);
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
    std::vector<bytes> frames;
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
      REQUIRE_FALSE(server.add(frames[w]));
      receive<T>(sent, frames[w], fragments());
    }
    under_way_.push_back(update_of(server));
    if (options_.when == arrival::after_commit) apply_due();
    return sent;
  }

  /// Applies the update of the step `delay` before the last, if it was not yet.
  void apply_due() { apply_while_more_than(options_.delay); }

  const lamina::layout& fragments() const { return workers[0].compressor.fragments(); }
  lamina::outer_optimizer<T>& outer() { return outer_; }
  /// Whether x is bitwise identical on all, and where they agree, all have chosen the same.
  bool agree() const {
    const worker& first = workers[0];
    return std::ranges::all_of(workers, [&](const worker& each) {
      return same_tensors(each.x, first.x) &&
             (!options_.agrees ||
              std::ranges::equal(each.compressor.chosen().sent(), first.compressor.chosen().sent()));
    });
  }

  std::vector<worker> workers;

 private:
  void lose(lamina::local_delta<T>& compressor) {
    if (!options_.agrees) {
      compressor.abandon();
    } else if (options_.lost_by == loss::before_commit) {
      compressor.commit_lost();
    } else {
      compressor.commit();
      compressor.forget(compressor.step());
    }
  }

  // Commits what arrives of the frame, in which the rest becomes zeros, as at a receiver.
  void lose_chunks(lamina::local_delta<T>& compressor, bytes& frame) {
    lamina::delivery arrived(compressor.chosen(), lamina::payload_block_elements);
    tensors<T> r = zeros_like<T>(fragments());
    const auto whole = lamina::decode<T>(frame, fragments());
    std::bernoulli_distribution is_lost(options_.chunk_loss);
    for (const std::size_t fragment : compressor.chosen().sent()) {
      for (std::size_t chunk = 0; chunk < arrived.chunks(fragment); ++chunk)
        if (is_lost(random_)) arrived.lose(fragment, chunk);
      whole.restore(fragment, r[fragment], arrived);
    }
    compressor.commit(arrived);
    const lamina::frame_header header{.kind = lamina::frame_kind::updates,
                                      .step = compressor.step(),
                                      .sender = whole.sender(),
                                      .payload = options_.compress.payload};
    frame = frame_of<T>(compressor.chosen(), r, header);
  }

  bytes update_of(lamina::server<T>& server) {
    tensors<T> d = zeros_like<T>(fragments());
    const std::uint64_t step = server.step();
    const lamina::selection arrived = server.arrived();
    server.update([&](std::size_t fragment, std::size_t begin, std::span<const T> mean) {
      std::copy(mean.begin(), mean.end(), d[fragment].begin() + static_cast<std::ptrdiff_t>(begin));
      outer_(fragment, begin, std::span(d[fragment]).subspan(begin, mean.size()));
    });
    return frame_of<T>(
        arrived, d, {.kind = lamina::frame_kind::updates, .step = step, .payload = options_.outer.payload});
  }

  void apply_while_more_than(std::size_t delay) {
    if (under_way_.size() <= delay) return;
    const auto update = lamina::decode<T>(under_way_.front(), fragments());
    for (worker& each : workers) each.compressor.apply(update, each.x, each.y);
    under_way_.pop_front();
  }

  run_options options_;
  std::mt19937 random_{29};
  lamina::outer_optimizer<T> outer_;
  std::deque<bytes> under_way_;
};

/// One step that is sent. Gives its frame.
bytes send(lamina::local_delta<float>& compressor, const tensors<float>& x, const tensors<float>& y) {
  compressor.observe_all(x, y);
  bytes frame = compressor.encode(x, y).to_bytes();
  compressor.commit();
  return frame;
}

std::vector<tensors<double>> integer_moves(std::mt19937& random, std::size_t workers, std::size_t magnitude) {
  std::vector<tensors<double>> moves;
  for (std::size_t w = 0; w < workers; ++w)
    moves.push_back(random_gradients<double>(random, three_layers, magnitude));
  return moves;
}

/// The sum over the workers of what they did, less what of it was applied, less what is left: 0 everywhere if nothing is lost.
class ledger {
 public:
  ledger(const lamina::layout& fragments, std::size_t delay)
      : did_(zeros_like<double>(fragments)), delay_(delay) {}
  void add_step(const std::vector<tensors<double>>& moves, const tensors<double>& sent) {
    for (const tensors<double>& each : moves) add_to(did_, each, -1.0);
    sent_.push_back(sent);
  }
  bool balances(const cluster<double>& all) const {
    tensors<double> rest = did_;
    for (std::size_t step = 0; step + delay_ < sent_.size(); ++step) add_to(rest, sent_[step], -1.0);
    for (const auto& each : all.workers) {
      add_to(rest, each.x, -1.0);
      add_to(rest, each.y);
      for (std::size_t f = 0; f < rest.size() && !each.compressor.rest().empty(); ++f) {
        const auto outside = each.compressor.rest().subspan(each.compressor.fragments().offset(f));
        for (std::size_t i = 0; i < rest[f].size(); ++i) rest[f][i] -= outside[i];
      }
    }
    return std::ranges::all_of(
        rest, [](const auto& fragment) { return std::ranges::count(fragment, 0.0) == std::ssize(fragment); });
  }

 private:
  tensors<double> did_;
  std::vector<tensors<double>> sent_;
  std::size_t delay_;
};

}  // namespace

TEST_CASE("local delta: all workers together may abandon a step, and no fragment is held for its update") {
  const lamina::layout model = model_of({100, 100});
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
    CHECK(message_of<std::logic_error>([&] { compressor.commit_lost(); }) ==
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
  const auto payload = GENERATE(from_range(all_payload_types));
  const bool error_feedback = GENERATE(false, true);
  const std::size_t delay = GENERATE(0, 2);
  const auto balances = [&](run_options options) {
    std::mt19937 random(2);
    options.delay = delay;
    options.compress.drop_ratio = 0.6;
    options.compress.at_least_every = options.chunk_loss > 0 ? 4 : 0;
    options.compress.error_feedback = error_feedback;
    options.compress.payload = payload;
    // The factors of the momentum have many bits, of which a payload leaves d few.
    options.compress.by_score = payload != lamina::payload_type::as_is;
    options.outer = {.rate = 0.5, .momentum = 0.5, .payload = payload};
    cluster<double> all(three_layers, options);
    ledger books(three_layers, options.delay);
    for (std::size_t t = 0; t < 10; ++t) {
      const auto moves = integer_moves(random, options.workers, 5000);
      // Two of four, so that the mean is exact.
      const bool fails = t % 4 == 3 && options.chunk_loss == 0;
      books.add_step(moves,
                     all.step(moves, fails ? std::vector<std::size_t>{0, 2} : std::vector<std::size_t>{}));
      if (!books.balances(all) || !all.agree()) return false;
    }
    return true;
  };
  CHECK(balances({}));
  CHECK(balances({.lost_by = loss::after_commit}));
  CHECK(balances({.agrees = false}));
  CHECK(balances({.chunk_loss = 0.3}));
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
          all.step(integer_moves(random, options.workers, 1000));
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

TEST_CASE("local delta: a step that is forgotten is in the local delta again, and its update still applies") {
  const lamina::layout model = model_of({4, 4});
  for (const bool by_frame : {true, false}) {
    lamina::local_delta<float> compressor(model, {.drop_ratio = 0});
    tensors<float> x = zeros_like<float>(model);
    tensors<float> y = {{1, 1, 1, 1}, {2, 2, 2, 2}};
    const bytes frame = send(compressor, x, y);
    compressor.forget(1);
    // As on the workers that did not forget it, its fragments are held until its update has come.
    CHECK(compressor.steps_under_way() == 1);
    compressor.observe_all(x, y);
    CHECK(compressor.select().sent_layers() == 0);
    compressor.encode(x, y);
    compressor.commit();
    const std::vector<float> d = {-1, -1, -1, -1, -2, -2, -2, -2};
    CHECK(message_of<std::logic_error>([&] { compressor.apply(2, std::span<const float>(), x, y); }) ==
          "apply: the update of step 2 comes while step 1 is under way; apply that, or abandon() it");
    if (by_frame) {
      compressor.apply(lamina::decode<float>(frame, model), x, y);
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
  const lamina::layout model = model_of({4, 5000});
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
    send(compressor, x, y);
    tensors<float> broken = zeros_like<float>(compressor.fragments());
    broken[2].back() = bad;
    const auto bytes = frame_of<float>(compressor.chosen(), broken, {.kind = lamina::frame_kind::updates});
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

TEST_CASE("local delta: with error feedback the rest joins the next message") {
  const lamina::layout model = model_of({2, 2});
  lamina::local_delta<float> compressor(
      model, {.threshold = 1, .error_feedback = true, .payload = lamina::payload_type::int4});
  tensors<float> x = zeros_like<float>(model);
  tensors<float> y = {{-7, -0.25}, {-0.5, -0.5}};
  const auto message = [&] {
    const bytes frame = send(compressor, x, y);
    std::vector<float> r(2);
    lamina::decode<float>(frame, model).restore(0, r);
    return r;
  };
  CHECK(message() == std::vector<float>{7, 0});  // integers, from -7 to 7
  CHECK(compressor.rest()[1] == 0);              // until it has arrived
  compressor.apply(1, std::vector<float>{3, 0}, x, y);
  CHECK(x == tensors<float>{{-3, 0}, {0, 0}});
  CHECK(y == tensors<float>{{-3, 0}, {-0.5, -0.5}});  // as shared, but for what was not chosen
  CHECK(std::ranges::equal(compressor.rest(), std::vector<float>{0, 0.25, 0, 0}));
  y = {{-10, -0.5}, {-0.5, -0.5}};
  CHECK(message() == std::vector<float>{7, 1});  // of 0.25 + 0.5
  y[0][1] -= 1;                                  // while it is under way
  compressor.apply(2, std::vector<float>{7, 0}, x, y);
  CHECK(y == tensors<float>{{-10, -1}, {-0.5, -0.5}});
  CHECK(std::ranges::equal(compressor.rest(), std::vector<float>{0, -0.25, 0, 0}));
  // Without error feedback the same state is another's.
  lamina::local_delta<float> other(model, {.threshold = 1});
  CHECK(throws<lamina::decode_error>([&] { other.load(compressor.save()); }));
  lamina::local_delta<float> joined(model, {.threshold = 1, .error_feedback = true});
  joined.join(compressor.save());
  CHECK(std::ranges::equal(joined.rest(), std::vector<float>(4)));
}

// x is bitwise identical on all workers meanwhile, though what they do rounds.
TEST_CASE("local delta: saved with steps under way and resumed, it goes on bitwise", "[invariant]") {
  for (const auto payload : all_payload_types) {
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
    const auto random_moves = [&] {
      std::vector<tensors<float>> moves;
      for (int w = 0; w < 4; ++w) moves.push_back(rounding_gradients<float>(random, three_layers));
      return moves;
    };
    for (int t = 0; t < 7; ++t) whole.step(random_moves());
    cluster<float> resumed = whole;
    lamina::outer_optimizer<float> outer(resumed.fragments(), options.outer);
    outer.restore(resumed.outer().momentum(), resumed.outer().rounding());
    resumed.outer() = outer;
    for (int t = 0; t < 7; ++t) {
      const auto moves = random_moves();
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
      REQUIRE(whole.agree());
      for (std::size_t w = 0; w < 4; ++w) {
        REQUIRE(same_tensors(whole.workers[w].x, resumed.workers[w].x));
        REQUIRE(same_tensors(whole.workers[w].y, resumed.workers[w].y));
      }
    }
  }
}

TEST_CASE("local delta: one that joins begins at the shared parameters", "[invariant]") {
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
      ledger books(three_layers, delay);
      bool balances = true;
      const auto four_steps = [&] {
        for (int t = 0; t < 4; ++t) {
          const auto moves = integer_moves(random, all.workers.size(), 8);
          books.add_step(moves, all.step(moves));
          balances &= books.balances(all) && all.agree();
        }
      };
      four_steps();
      REQUIRE(balances);
      const auto saved = all.workers[0].compressor.save();
      for (int joining = 0; joining < 2; ++joining) {
        all.add_worker(three_layers, all.workers[0].x);
        auto& joined = all.workers.back().compressor;
        joins ? joined.join(saved) : joined.load(saved);
        CHECK(joined.step() == 4);
        CHECK(joined.steps_under_way() == delay);
      }
      four_steps();
      // With a step under way the other's r is not in this one's local delta.
      CHECK(balances == (joins || delay == 0));
    }
  }
}

TEST_CASE("local delta: what is packed is what the frame restores") {
  std::mt19937 random(16);
  const tensors<float> x = zeros_like<float>(three_layers);
  const tensors<float> y = rounding_gradients<float>(random, three_layers);
  for (const auto payload : all_payload_types) {
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
  tensors<float> y = rounding_gradients<float>(random, three_layers);
  compressor.observe_all(x, y);
  compressor.select(compressor.values(), std::vector<char>{0, 0, 1});
  CHECK(compressor.chosen().sent_layers() == 2);
  std::vector<float> r(compressor.chosen().sent_elements());
  compressor.pack(x, y, r);
  compressor.commit();

  send(compressor, x, y);
  CHECK(compressor.chosen().sent_layers() == 1);
  CHECK(compressor.chosen().is_sent(2));
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

TEST_CASE("local delta: a step that is abandoned adds to ages, one that is lost counts as sent") {
  const lamina::layout model = model_of({64, 64});
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
  lamina::local_delta<float> compressor(three_layers,
                                        {.drop_ratio = 0.1, .payload = lamina::payload_type::int8, .run = 7});
  const auto refuses = [](const auto& call, const std::string& expected) {
    CHECK(message_of<std::exception>(call) == expected);
  };
  const auto refuses_delivery = [&](const lamina::selection& sent, std::size_t chunk, const char* named) {
    const auto commit = [&] { compressor.commit(lamina::delivery(sent, chunk)); };
    CHECK(contains(message_of<std::exception>(commit), named));
  };

  refuses([&] { lamina::local_delta<float>(three_layers, {.momentum = 0.9}); },
          "momentum: a local delta has none, the worker's optimizer may");
  refuses([&] { lamina::local_delta<float>(three_layers, {.non_finite = lamina::non_finite::skip}); },
          "non_finite: nothing can be left out of a local delta, so refuse");
  refuses([&] { lamina::worker<float>(three_layers, {.payload = lamina::payload_type(9)}); },
          "payload 9 is none of payload_type");
  refuses([&] { lamina::outer_optimizer<float>(three_layers, {.payload = lamina::payload_type(6)}); },
          "payload 6 is none of payload_type");
  CHECK(throws<std::invalid_argument>([&] { lamina::local_delta<float>(model_of({})); }));
  CHECK(
      throws<std::invalid_argument>([&] { lamina::local_delta<float>(three_layers, {.always_sent = {3}}); }));

  refuses([&] { compressor.select(); }, "select: step 0 has ended; observe the next one first");
  const lamina::selection nothing(three_layers);
  refuses_delivery(nothing, 64, "nothing to commit");
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(tensors<float>{x[0], x[0], x[2]}, y); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(x, tensors<float>{y[0], y[0], y[2]}); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.observe_all(x, tensors<float>{}); }));
  CHECK(compressor.step() == 0);
  compressor.observe_all(x, y);
  CHECK(throws<std::logic_error>([&] { static_cast<void>(compressor.save()); }));
  std::vector<float> packed(5000);
  refuses([&] { compressor.pack(x, y, packed); }, "pack: call select() of this step before");
  compressor.observe_all(x, y);
  CHECK(throws<std::invalid_argument>([&] { compressor.select(std::vector<double>(2)); }));
  CHECK(throws<std::invalid_argument>(
      [&] { compressor.select(std::vector<double>(3), std::vector<char>(2)); }));
  compressor.select();
  refuses([&] { compressor.select(); }, "select: step 1 was selected already");
  CHECK(throws<std::invalid_argument>([&] { compressor.pack(x, y, std::span(packed).first(3)); }));
  CHECK(throws<std::invalid_argument>([&] { compressor.encode(x, tensors<float>(3)); }));
  const auto bytes = compressor.encode(x, y).to_bytes();
  const auto update = lamina::decode<float>(bytes, three_layers);
  refuses([&] { compressor.apply(update, x, y); },
          "apply: the update of step 1 comes before that step was committed");
  refuses_delivery(nothing, 64, "of another frame");
  refuses_delivery(compressor.chosen(), 65, "64");
  CHECK(compressor.steps_under_way() == 0);
  compressor.commit();
  CHECK(throws<std::logic_error>([&] { compressor.commit(); }));

  refuses([&] { compressor.apply(2, std::span<const float>(packed), x, y); },
          "apply: the update of step 2 comes before that step was committed");
  refuses([&] { compressor.apply(1, std::span<const float>(packed).first(3), x, y); },
          "apply: 3 elements where 5000 were sent in step 1");
  refuses([&] { compressor.forget(2); }, "forget: step 2 is not under way");
  refuses([&] { compressor.abandon(2); }, "abandon: step 2 is not under way");
  refuses([&] { compressor.commit_lost(); }, "commit_lost: step 1 has ended");
  const auto empty = frame_of<float>(nothing, x, {.kind = lamina::frame_kind::updates}, 7);
  refuses([&] { compressor.apply(lamina::decode<float>(empty, three_layers), x, y); },
          "apply: the update of step 1 lacks 'layer0', which was sent in it");
  for (const auto& other : {frame_of<float>(nothing, x, {}, 7),
                            frame_of<float>(nothing, x, {.kind = lamina::frame_kind::updates}, 8)}) {
    CHECK(throws<lamina::decode_error>(
        [&] { compressor.apply(lamina::decode<float>(other, three_layers), x, y); }));
  }
  CHECK(throws<std::invalid_argument>([&] { compressor.apply(update, x, tensors<float>(2)); }));
  tensors<float> short_y = y;
  short_y[2].pop_back();
  CHECK(throws<std::invalid_argument>([&] { compressor.apply(update, x, short_y); }));
  CHECK(x == zeros_like<float>(three_layers));
  CHECK(compressor.steps_under_way() == 1);
  // Nor between the values of a step and what they choose.
  compressor.observe_all(x, y);
  for (const bool is_selected : {false, true}) {
    if (is_selected) compressor.select();
    const std::string expected = "apply: step 2 was observed and not encoded yet";
    refuses([&] { compressor.apply(update, x, y); }, expected);
    refuses([&] { compressor.apply(1, std::span<const float>(packed), x, y); }, expected);
  }
  compressor.encode(x, y);
  compressor.apply(update, x, y);
  CHECK(x[0][1] == 1);
  refuses([&] { compressor.apply(update, x, y); }, "apply: the update of step 1 comes after that of step 1");
}

TEST_CASE("local delta: saved bytes that are damaged, cut or of another model are refused by name") {
  std::mt19937 random(11);
  const tensors<float> x = zeros_like<float>(three_layers);
  const tensors<float> y = rounding_gradients<float>(random, three_layers);
  lamina::local_delta<float> compressor(three_layers, {.drop_ratio = 0.01});
  for (int t = 0; t < 2; ++t) send(compressor, x, y);
  const bytes saved = compressor.save();
  const auto code_of = [](const bytes& changed, const lamina::layout& model = three_layers) {
    lamina::local_delta<float> other(model);
    try {
      other.load(changed);
    } catch (const lamina::decode_error& refused) {
      CHECK(other.step() == 0);
      return refused.code();
    }
    return std::error_code();
  };
  using lamina::errc;
  CHECK(code_of(saved, model_of({5000, 3, 131})) == errc::wrong_layout);
  CHECK(code_of({}) == errc::truncated);
  CHECK(code_of(lamina::worker<float>(three_layers).save()) == errc::bad_magic);
  CHECK(code_of({saved.begin(), saved.end() - 4}) == errc::checksum_mismatch);
  // Without a checksum what follows is read, and judged, as it stands.
  bytes unprotected = saved;
  unprotected[7] = std::byte{0};
  std::fill_n(unprotected.begin() + 56, 8, std::byte{0});
  CHECK(!code_of(unprotected));
  struct row {
    const char* what;
    std::size_t offset;
    std::uint64_t value;
    errc expected;
  };
  constexpr std::size_t body = 64 + 3 * 8;
  for (const row& each :
       {row{"elements", 24, 1, errc::wrong_layout}, row{"sent in step 9 of 2", 64, 9, errc::impossible_age},
        row{"applied", body, 3, errc::impossible_age},
        row{"steps under way", body + 8, 1, errc::trailing_bytes},
        row{"many under way", body + 8, ~std::uint64_t{}, errc::truncated},
        row{"outside of a frame", body + 16, 5010, errc::wrong_layout},
        row{"a step's number", body + 24, 5, errc::impossible_age},
        row{"its fragments", body + 32, ~std::uint64_t{}, errc::truncated},
        row{"its elements", body + 40, 1, errc::wrong_layout},
        row{"its first fragment", body + 48, 3, errc::wrong_layout},
        row{"not ascending", body + 56, 0, errc::wrong_layout}}) {
    CAPTURE(each.what);
    bytes changed = unprotected;
    std::memcpy(changed.data() + each.offset, &each.value, sizeof each.value);
    CHECK(code_of(changed) == each.expected);
  }
}

}  // namespace lamina_test::delta_test
