// SPDX-License-Identifier: MIT
#include "lamina/state.hpp"

#include <cmath>
#include <functional>
#include <ranges>

#include "catch.hpp"
#include "steps.hpp"

namespace lamina_test::state_test {

using lamina::errc;
using lamina::payload_type;
using lamina::worker_options;

namespace {

// Each option on its own, and some together.
const std::vector<worker_options> all_options = {{.drop_ratio = 0.7},
                                                 {.drop_ratio = 0.7, .momentum = 0.9},
                                                 {.drop_ratio = 0.9, .at_least_every = 4},
                                                 {.send_budget = 0.2},
                                                 {.send_budget = 0.2, .by_score = true},
                                                 {.drop_ratio = 0.9, .warm_up_steps = 15},
                                                 {.drop_ratio = 0.7, .search_every = 3},
                                                 {.threshold = 3, .payload = payload_type::float16},
                                                 {.drop_ratio = 0},
                                                 {.send_budget = 0.3,
                                                  .at_least_every = 6,
                                                  .fragment_elements = 4096,
                                                  .momentum = 0.5,
                                                  .payload = payload_type::int8},
                                                 {.drop_ratio = 0.7,
                                                  .warm_up_steps = 15,
                                                  .search_every = 3,
                                                  .fragment_elements = 4096,
                                                  .momentum = 0.9,
                                                  .payload = payload_type::bfloat16}};

const lamina::layout small_model = model_of({3, 0, 65, 2 * 4096 + 70, 1, 40});

// Every other step is planned.
template <class T>
bytes one_step(lamina::worker<T>& worker, const tensors<T>& gradients, bool commits = true) {
  if (worker.steps() % 2 == 0) return send(worker, gradients, commits);
  auto step = worker.begin(worker.plan());
  for (std::size_t l = 0; l < gradients.size(); ++l) REQUIRE(step.add(l, gradients[l]));
  bytes frame = step.frame().to_bytes();
  if (commits) step.commit();
  return frame;
}

template <class T>
bool same_memory(const lamina::worker<T>& a, const lamina::worker<T>& b) {
  return same_bits(a.residual().elements(), b.residual().elements()) &&
         same_bits(a.residual().velocity(), b.residual().velocity()) && a.steps() == b.steps() &&
         same_bits(a.threshold(), b.threshold());
}

errc code_of(const auto& call) {
  try {
    call();
  } catch (const lamina::decode_error& error) {
    REQUIRE(error.code().category() == lamina::category());
    REQUIRE(contains(error.what(), "saved state"));
    return static_cast<errc>(error.code().value());
  }
  return {};
}

// The code for which load refuses, errc{} if it does not. Refusing changes nothing, and merging refuses likewise.
template <class T>
errc refusal(lamina::worker<T>& worker, std::span<const std::byte> saved) {
  const bytes before = worker.save();
  const errc code = code_of([&] { worker.load(saved); });
  if (code != errc{}) REQUIRE(worker.save() == before);
  if (code != errc::other_momentum) {
    const std::vector<std::span<const std::byte>> states = {saved};
    REQUIRE(code_of([&] { lamina::merge_states<T>(states, worker.fragments()); }) == code);
  }
  return code;
}

// A worker some steps into its run, of which something is dropped.
template <class T>
lamina::worker<T> running(const lamina::layout& model, const worker_options& options, std::uint32_t seed,
                          int steps = 5) {
  std::mt19937 random(seed);
  lamina::worker<T> worker(model, options);
  for (int step = 0; step < steps; ++step) one_step(worker, rounding_gradients<T>(random, model));
  return worker;
}

// The saved states of W workers after the same step, each with its own gradients.
template <class T>
std::vector<bytes> saved_by(std::size_t workers, const lamina::layout& model, const worker_options& options,
                            int steps = 5) {
  std::vector<bytes> states;
  for (std::uint32_t w = 0; w < workers; ++w)
    states.push_back(running<T>(model, options, 500 + w, steps).save());
  return states;
}

lamina::detail::state_header header_of(const bytes& saved) {
  lamina::detail::state_header header;
  std::memcpy(&header, saved.data(), sizeof header);
  return header;
}

// The state with another header, or with another number after it, under a good checksum.
void write_header(bytes& saved, lamina::detail::state_header header) {
  if (header.checksum != 0)
    header.checksum = lamina::detail::state_checksum(header, std::span(saved).subspan(sizeof header));
  std::memcpy(saved.data(), &header, sizeof header);
}
bytes with_header(bytes saved, const std::function<void(lamina::detail::state_header&)>& change) {
  auto header = header_of(saved);
  change(header);
  write_header(saved, header);
  return saved;
}
bytes with_number(bytes saved, std::size_t place, auto number) {
  std::memcpy(saved.data() + place, &number, sizeof number);
  write_header(saved, header_of(saved));
  return saved;
}

// What merging says when it throws: a decode_error with this code or, without one, std::invalid_argument.
std::string merge_refusal(const std::vector<bytes>& states, const lamina::layout& model, errc code = {}) {
  try {
    lamina::merge_states<float>(states, model);
  } catch (const lamina::decode_error& error) {
    CHECK(error.code() == code);
    return error.what();
  } catch (const std::invalid_argument& error) {
    CHECK(code == errc{});
    return error.what();
  }
  return "(merged)";
}

}  // namespace

TEMPLATE_TEST_CASE("state: a resumed run goes on bitwise the same, whatever the options", "", float, double) {
  const lamina::layout& model = small_model;
  for (const worker_options& options : all_options) {
    for (const int steps_before : {0, 1, 2, 7}) {
      CAPTURE(&options - all_options.data(), steps_before);
      std::mt19937 random(static_cast<std::uint32_t>(401 + steps_before));
      lamina::worker<TestType> uninterrupted(model, options);
      for (int step = 0; step < steps_before; ++step)
        one_step(uninterrupted, rounding_gradients<TestType>(random, model), random() % 5 != 0);
      const bytes saved = uninterrupted.save();
      REQUIRE(uninterrupted.save() == saved);
      // Into one that ran elsewhere, of which nothing is left.
      auto resumed = running<TestType>(model, options, 412, steps_before == 7 ? 9 : 0);
      resumed.load(saved);
      REQUIRE(same_memory(resumed, uninterrupted));
      REQUIRE(resumed.save() == saved);
      std::size_t dropped = 0;
      for (int step = 0; step < 20; ++step) {
        const std::uint64_t number = uninterrupted.steps() + 1;
        const auto gradients = rounding_gradients<TestType>(random, model);
        const bool commits = random() % 5 != 0;
        const bytes frame = one_step(uninterrupted, gradients, commits);
        REQUIRE(one_step(resumed, gradients, commits) == frame);
        REQUIRE(same_memory(resumed, uninterrupted));
        REQUIRE(same_bits(resumed.values(), uninterrupted.values()));
        const auto view = lamina::decode<TestType>(frame, uninterrupted.fragments());
        REQUIRE(view.step() == number);
        REQUIRE(uninterrupted.steps() == number - (commits ? 0 : 1));
        dropped += model.elements() - view.sent_elements();
      }
      REQUIRE(resumed.save() == uninterrupted.save());
      REQUIRE((dropped > 0) == (options.drop_ratio > 0));
    }
  }
}

TEMPLATE_TEST_CASE("state: every flipped bit is noticed, and changes nothing", "", float, double) {
  const lamina::layout model = model_of({3, 0, 2});
  for (const double momentum : {0.0, 0.9}) {
    const worker_options options{.send_budget = 0.5, .momentum = momentum};
    bytes saved = running<TestType>(model, options, 451).save();
    auto worker = running<TestType>(model, options, 452);
    for (std::size_t size = 0; size < saved.size(); ++size)
      REQUIRE(refusal(worker, std::span(saved).first(size)) == errc::truncated);
    for (const std::size_t more : {1, 4, 8, 64}) {
      bytes longer = saved;
      longer.resize(saved.size() + more);
      REQUIRE(refusal(worker, longer) == errc::trailing_bytes);
    }
    for (std::size_t bit = 0; bit < 8 * saved.size(); ++bit) {
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      saved[bit / 8] ^= mask;
      CAPTURE(bit);
      const errc code = refusal(worker, saved);
      const std::size_t place = bit / 8;
      REQUIRE(code != errc{});
      if (bit != 58 && bit != 59) {
        REQUIRE(code == (place < 4    ? errc::bad_magic
                         : place < 6  ? errc::unsupported_version
                         : place < 7  ? errc::wrong_element_type
                         : bit == 56  ? errc::checksum_mismatch  // says that there is none
                         : bit == 57  ? errc::other_momentum     // says that there is velocity, or none
                         : place < 8  ? errc::nonzero_reserved
                         : place < 32 ? errc::wrong_layout
                                      : errc::checksum_mismatch));
      }
      saved[bit / 8] ^= mask;
    }
    CHECK(refusal(worker, saved) == errc{});
  }
}

TEST_CASE("state: of another model, element type or memory is refused by name, and changes nothing") {
  const lamina::layout model = model_of({3, 8, 3 * 4096});
  auto worker = running<float>(model, {}, 461);
  const auto refused = [&](const bytes& saved) { return refusal(worker, saved); };
  for (const auto& other : {model_of({3, 8, 6}), model_of({3, 8 + 3 * 4096}), model_of({3, 8, 3 * 4096, 0}),
                            lamina::layout({{"a", {3}}, {"b", {8}}, {"c", {3 * 4096}}})})
    CHECK(refused(running<float>(other, {}, 462).save()) == errc::wrong_layout);
  for (const std::size_t elements : {4096, 2 * 4096})
    CHECK(refused(running<float>(model, {.fragment_elements = elements}, 462).save()) == errc::wrong_layout);
  CHECK(refused(running<double>(model, {}, 462).save()) == errc::wrong_element_type);

  auto heavy = running<float>(model, {.momentum = 0.9}, 463);
  CHECK(refused(heavy.save()) == errc::other_momentum);
  CHECK(refusal(heavy, worker.save()) == errc::other_momentum);
  CHECK(contains(make_error_code(errc::other_momentum).message(), "momentum"));
}

TEST_CASE("state: of a model whose bytes cannot be counted is refused as truncated") {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t elements : {most / 4 + 1, most / 8 + 1, most}) {
    for (const bool has_velocity : {false, true}) {
      CAPTURE(elements, has_velocity);
      const lamina::layout model = model_of({elements});
      lamina::detail::state_header header;
      header.element_type = lamina::detail::element_code<float>;
      header.flags = has_velocity ? lamina::detail::state_flag_velocity : 0;
      header.fingerprint = model.fingerprint();
      header.layers = 1;
      header.elements = elements;
      // As many bytes as the wrapped size says, if they are few.
      const std::size_t wrapped = 8 + (has_velocity ? 2 : 1) * elements * sizeof(float);
      std::vector<bytes> states = {bytes(sizeof header + (wrapped < 1000 ? wrapped : 8))};
      std::memcpy(states[0].data(), &header, sizeof header);
      CHECK(code_of([&] { lamina::merge_states<float>(states, model); }) == errc::truncated);
    }
  }
}

TEST_CASE("state: the merged residual is the mean, summed in the order of the workers") {
  const lamina::layout& model = small_model;
  for (const worker_options& options : {worker_options{.drop_ratio = 0.7, .fragment_elements = 4096},
                                        worker_options{.drop_ratio = 0.7, .momentum = 0.9}}) {
    lamina::worker<float> worker(model, options);
    std::vector<float> residuals(model.elements());
    std::vector<float> velocities(options.momentum == 0 ? 0 : model.elements());
    const auto states = saved_by<float>(3, model, options);
    for (const bytes& saved : states) {
      worker.load(saved);
      for (std::size_t i = 0; i < residuals.size(); ++i) residuals[i] += worker.residual().elements()[i];
      for (std::size_t i = 0; i < velocities.size(); ++i) velocities[i] += worker.residual().velocity()[i];
    }
    for (auto* each : {&residuals, &velocities}) {
      for (float& element : *each) element /= 3;
    }
    worker.load(lamina::merge_states<float>(states, worker.fragments()));
    CHECK(worker.steps() == 5);
    CHECK(same_bits(worker.residual().elements(), residuals));
    CHECK(same_bits(worker.residual().velocity(), velocities));
  }
}

TEST_CASE("state: merged threshold and allowance are means, and an invalid threshold stays invalid") {
  const lamina::layout model = model_of({3, 2});
  const bytes saved = running<float>(model, {}, 521).save();
  const double infinity = std::numeric_limits<double>::infinity();
  const auto merged = [&](const std::vector<double>& thresholds) {
    std::vector<bytes> states;
    for (const double threshold : thresholds) {
      states.push_back(with_header(saved, [&](auto& header) {
        header.threshold = threshold;
        header.allowance = 8 * threshold;
        if (!std::isfinite(threshold)) header.allowance = 2;
      }));
    }
    lamina::worker<float> worker(model);
    const bytes state = lamina::merge_states<float>(states, model);
    worker.load(state);
    CHECK(same_bits(worker.threshold(), header_of(state).threshold));
    return std::pair(header_of(state).threshold, header_of(state).allowance);
  };
  CHECK(merged({1, 2, 6}) == std::pair(3.0, 24.0));
  CHECK(merged({0.1, 0.1, 0.1}) == std::pair(0.1, 0.8));  // their rounded sum over 3 is another number
  CHECK(merged({5, -1, 5, 5}) == std::pair(-1.0, 28.0));
  CHECK(merged({-1, -3}) == std::pair(-1.0, -16.0));
  CHECK(merged({infinity, 4}) == std::pair(infinity, 17.0));
  CHECK(merged({-infinity, infinity, 2}).first == infinity);  // budgets of which one dropped everything
}

TEST_CASE("state: merged, a layer was sent when the worker sent it last that has waited longest") {
  const lamina::layout model = model_of({1, 1, 1});
  const std::vector<float> residual(3);
  std::vector<bytes> states;
  for (const auto& sent_in : {std::vector<std::uint64_t>{4, 2, 3}, std::vector<std::uint64_t>{3, 4, 1}})
    states.push_back(lamina::save_state<float>(model, {1, 0, sent_in}, residual, {}, 4));
  const auto merged = lamina::read_state<float>(lamina::merge_states<float>(states, model), model, false);
  CHECK(merged.memory.sent_in == std::vector<std::uint64_t>{3, 2, 1});
}

TEST_CASE("state: states to merge may be spans, but not copies that are gone") {
  const std::vector<bytes> states(3);
  // A range that makes its states while it is walked.
  const auto copies = std::views::iota(0, 3) | std::views::transform([&](int k) { return states[k]; });
  STATIC_REQUIRE(lamina::detail::saved_states<std::vector<std::span<const std::byte>>>);
  STATIC_REQUIRE(lamina::detail::saved_states<std::vector<bytes>>);
  STATIC_REQUIRE(std::ranges::input_range<decltype(copies)>);
  STATIC_REQUIRE_FALSE(lamina::detail::saved_states<decltype(copies)>);
}

TEST_CASE("state: merging says which state it refuses, also one with another memory than the first") {
  const lamina::layout model = model_of({3, 0, 5});
  const auto good = saved_by<float>(3, model, {});
  const auto heavy = saved_by<float>(3, model, {.momentum = 0.9});
  CHECK(merge_refusal(heavy, model) == "(merged)");
  for (const std::size_t place : {0, 1, 2}) {
    const std::string named = "saved state " + std::to_string(place);
    auto states = good;
    states[place].pop_back();
    CHECK(contains(merge_refusal(states, model, errc::truncated), named));
    states[place] = with_header(good[1], [](auto& header) { ++header.fingerprint; });
    CHECK(contains(merge_refusal(states, model, errc::wrong_layout), named));
    states = heavy;
    states[place] = good[place];
    const std::string odd = "saved state " + std::to_string(place == 0 ? 1 : place);
    CHECK(contains(merge_refusal(states, model, errc::other_momentum), odd));
  }
}

TEST_CASE("state: merging refuses nothing at all, states of two steps, and numbers that are not finite") {
  const lamina::layout model = model_of({3, 2});
  const auto good = saved_by<float>(3, model, {});
  CHECK(contains(merge_refusal({}, model), "no saved state"));
  const std::string steps = merge_refusal({good[0], good[1], saved_by<float>(1, model, {}, 6)[0]}, model);
  CHECK(contains(steps, "saved state 0 is of step 5"));
  CHECK(contains(steps, "saved state 2 of step 6"));

  using limits = std::numeric_limits<float>;
  for (const auto& options : {worker_options{}, worker_options{.momentum = 0.5}}) {
    const auto saved = saved_by<float>(2, model, options);
    for (std::size_t place = 64 + 2 * 16; place < saved[0].size(); place += 4) {
      CAPTURE(place);
      for (const float bad : {limits::quiet_NaN(), limits::infinity(), -limits::infinity()}) {
        const bytes broken = with_number(saved[1], place, bad);
        CHECK(contains(merge_refusal({saved[0], broken}, model), "saved state 1 holds NaN"));
        CHECK(contains(merge_refusal({broken, broken}, model), "saved state 0 holds NaN"));
        lamina::worker<float> worker(model, options);
        const bytes before = worker.save();
        CHECK_THROWS_AS(worker.load(broken), std::invalid_argument);
        CHECK(worker.save() == before);
      }
      const bytes large = with_number(saved[0], place, limits::max());
      CHECK(contains(merge_refusal({large, with_number(saved[1], place, limits::max() / 2)}, model),
                     "overflow"));
      CHECK(merge_refusal({large, large}, model) == "(merged)");
    }
  }

  const auto with = [&](double threshold, double allowance) {
    return with_header(good[1], [&](auto& header) {
      header.threshold = threshold;
      header.allowance = allowance;
    });
  };
  CHECK(contains(merge_refusal({good[0], with(std::nan(""), 0)}, model), "saved state 1"));
  CHECK(contains(merge_refusal({good[0], with(1, INFINITY)}, model), "saved state 1"));
  const double most = std::numeric_limits<double>::max();
  CHECK(contains(merge_refusal({with(1, most), with(1, most / 2)}, model), "overflow"));
}

TEST_CASE("state: an age beyond the state's step is refused, under a good checksum, too") {
  const lamina::layout model = model_of({3, 2});
  lamina::residual_accumulator<float> residual(model);
  const auto saved_with = [&](std::vector<std::uint64_t> sent_in) {
    return lamina::save_state<float>(model, {-1, 0, std::move(sent_in)}, residual.elements(),
                                     residual.velocity(), 3);
  };
  lamina::worker<float> worker(model, {.at_least_every = 10});
  CHECK(refusal(worker, saved_with({4, 0})) == errc::impossible_age);
  CHECK(refusal(worker, saved_with({0, ~std::uint64_t{0}})) == errc::impossible_age);
  CHECK(refusal(worker, saved_with({3, 0})) == errc{});
  CHECK(worker.steps() == 3);
}

TEST_CASE("state: what lies elsewhere is saved as a worker saves it, and read back") {
  const lamina::layout& model = small_model;
  for (const double momentum : {0.0, 0.9}) {
    const auto worker =
        running<float>(model, {.drop_ratio = 0.7, .fragment_elements = 4096, .momentum = momentum}, 495);
    const lamina::layout& fragments = worker.fragments();
    const bytes saved = worker.save();
    const bool has_velocity = momentum > 0;
    const auto state = lamina::read_state<float>(saved, fragments, has_velocity);
    const auto save = [&](std::span<const float> a, std::span<const float> u) {
      return lamina::save_state<float>(fragments, state.memory, a, u, state.step, state.expected);
    };
    CHECK(state.step == worker.steps());
    CHECK(save(state.residual, state.velocity) == saved);
    CHECK_THROWS_AS(save(std::span(state.residual).subspan(1), state.velocity), std::invalid_argument);
    CHECK_THROWS_AS(save(state.residual, std::span(state.residual).first(1)), std::invalid_argument);
    std::vector<float> poisoned(state.residual.begin(), state.residual.end());
    poisoned.back() = std::numeric_limits<float>::infinity();
    const std::string& last = fragments[fragments.layers() - 1].name;
    CHECK(contains(message_of<std::domain_error>([&] { save(poisoned, state.velocity); }), last));
    if (has_velocity)
      CHECK(contains(message_of<std::domain_error>([&] { save(state.residual, poisoned); }), "velocity"));
  }
}

TEST_CASE("state: of a model whose layers are all empty it loads as well") {
  lamina::worker<float> worker(model_of({0, 0}), {.momentum = 0.5});
  send(worker, {{}, {}});
  CHECK(refusal(worker, worker.save()) == errc{});
}

}  // namespace lamina_test::state_test
