// SPDX-License-Identifier: MIT
#include "lamina/state.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <ranges>
#include <string>
#include <utility>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/merge.hpp"
#include "lamina/partition.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using lamina::compressor_options;
using lamina::decision_timing;
using lamina::payload_type;
using lamina::refresh_schedule;
using lamina::state_errc;
using namespace lamina_test;

namespace {

using bytes = std::vector<std::byte>;
template <class T>
using tensors = std::vector<std::vector<T>>;
template <class T>
using compressor_of = lamina::gradient_compressor<T>;

struct named_options {
  std::string name;
  compressor_options options;
};

// Each option on its own, and some together.
std::vector<named_options> all_options() {
  std::vector<named_options> all;
  const auto with = [&](std::string name, const std::function<void(compressor_options&)>& change) {
    compressor_options options;
    options.drop_ratio = 0.7;
    change(options);
    all.push_back({std::move(name), options});
  };
  with("plain", [](auto&) {});
  with("parts", [](auto& o) { o.part_elements = 4096; });
  with("momentum", [](auto& o) { o.momentum = 0.9; });
  with("max_age", [](auto& o) {
    o.drop_ratio = 0.9;
    o.max_age = 4;
  });
  with("byte budget", [](auto& o) { o.byte_budget = 0.2; });
  with("warm-up", [](auto& o) {
    o.drop_ratio = 0.9;
    o.warm_up_steps = 15;
  });
  with("refresh every 3", [](auto& o) { o.refresh = refresh_schedule::every(3); });
  with("first step only", [](auto& o) { o.refresh = refresh_schedule::every(~std::uint64_t{0}); });
  with("fixed threshold", [](auto& o) { o.refresh = refresh_schedule::fixed(3); });
  with("each element", [](auto& o) { o.check = lamina::finite_check::each_element; });
  with("float16", [](auto& o) { o.payload = payload_type::float16; });
  with("bfloat16", [](auto& o) { o.payload = payload_type::bfloat16; });
  with("int8", [](auto& o) { o.payload = payload_type::int8; });
  with("everything sent", [](auto& o) { o.drop_ratio = 0; });
  with("all together", [](auto& o) {
    o.byte_budget = 0.3;
    o.max_age = 6;
    o.part_elements = 4096;
    o.momentum = 0.5;
    o.payload = payload_type::int8;
    o.check = lamina::finite_check::each_element;
  });
  with("as ready", [](auto& o) {
    o.decide = decision_timing::as_ready;
    o.refresh = refresh_schedule::every(3);
    o.max_age = 6;
  });
  with("as ready, within a budget, parts", [](auto& o) {
    o.decide = decision_timing::as_ready;
    o.byte_budget = 0.2;
    o.part_elements = 4096;
  });
  with("ahead", [](auto& o) { o.decide = decision_timing::ahead; });
  with("ahead, within a budget, parts, momentum", [](auto& o) {
    o.decide = decision_timing::ahead;
    o.byte_budget = 0.2;
    o.part_elements = 4096;
    o.momentum = 0.5;
  });
  with("warm-up, parts, momentum, bfloat16", [](auto& o) {
    o.warm_up_steps = 15;
    o.part_elements = 4096;
    o.momentum = 0.9;
    o.payload = payload_type::bfloat16;
    o.refresh = refresh_schedule::every(3);
  });
  return all;
}

lamina::layout small_model() {
  return model_of({3, 0, 65, 2 * 4096 + 70, 1, 40});
}

template <class T>
tensors<T> gradients_of_step(std::mt19937& random, const lamina::layout& model) {
  tensors<T> gradients;
  for (const std::size_t size : model.sizes()) gradients.push_back(random_fractions<T>(random, size));
  return gradients;
}

template <class T>
void accumulate_all(compressor_of<T>& compressor, const tensors<T>& gradients) {
  for (std::size_t l = 0; l < gradients.size(); ++l) compressor.accumulate(l, gradients[l]);
}

template <class T>
bytes one_step(compressor_of<T>& compressor, const tensors<T>& gradients, bool commits = true) {
  accumulate_all(compressor, gradients);
  if (compressor.options().decide == decision_timing::ahead) {
    const auto predicted = compressor.predicted_values();
    compressor.plan_next(std::vector<double>(predicted.begin(), predicted.end()));
  }
  bytes frame = compressor.encode().to_bytes();
  if (commits) compressor.commit();
  return frame;
}

template <class T>
bool same_memory(const compressor_of<T>& a, const compressor_of<T>& b) {
  return same_bits(a.residual().elements(), b.residual().elements()) &&
         same_bits(a.residual().velocity(), b.residual().velocity()) && a.step() == b.step() &&
         same_bits(a.threshold(), b.threshold());
}

// The code for which load refuses, state_errc{} if it does not; checks that refusing changes nothing.
template <class T>
state_errc refusal(compressor_of<T>& compressor, std::span<const std::byte> saved) {
  const bytes before = compressor.save();
  state_errc code{};
  try {
    compressor.load(saved);
    return code;
  } catch (const lamina::decode_error& error) {
    REQUIRE(error.code().category() == lamina::state_category());
    REQUIRE(contains(error.what(), "saved state"));
    code = static_cast<state_errc>(error.code().value());
  }
  REQUIRE(compressor.save() == before);
  return code;
}

// A compressor some steps into its run, in which something is held back.
template <class T>
compressor_of<T> running(const lamina::layout& model, compressor_options options, std::uint32_t seed,
                         int steps = 5) {
  std::mt19937 random(seed);
  compressor_of<T> compressor(model, options);
  for (int step = 0; step < steps; ++step) one_step(compressor, gradients_of_step<T>(random, model));
  return compressor;
}

}  // namespace

TEMPLATE_TEST_CASE("state: a resumed run goes on bit for bit, whatever the options", "", float, double) {
  const lamina::layout model = small_model();
  for (const auto& [name, options] : all_options()) {
    for (const int steps_before : {0, 1, 2, 7, 12}) {
      CAPTURE(name, steps_before);
      std::mt19937 random(static_cast<std::uint32_t>(401 + steps_before));
      compressor_of<TestType> uninterrupted(model, options);
      for (int step = 0; step < steps_before; ++step) {
        one_step(uninterrupted, gradients_of_step<TestType>(random, model), random() % 5 != 0);
      }
      const bytes saved = uninterrupted.save();
      REQUIRE(uninterrupted.save() == saved);
      compressor_of<TestType> resumed(model, options);
      resumed.load(saved);
      REQUIRE(same_memory(resumed, uninterrupted));
      REQUIRE(resumed.save() == saved);
      std::size_t held_back = 0;
      for (int step = 0; step < 20; ++step) {
        const auto gradients = gradients_of_step<TestType>(random, model);
        const bool commits = random() % 5 != 0;
        const bytes frame = one_step(uninterrupted, gradients, commits);
        REQUIRE(one_step(resumed, gradients, commits) == frame);
        REQUIRE(same_memory(resumed, uninterrupted));
        REQUIRE(same_bits(resumed.values(), uninterrupted.values()));
        const auto view = lamina::decode<TestType>(frame, uninterrupted.parts());
        REQUIRE(view.step() == static_cast<std::uint64_t>(steps_before + step + 1));
        held_back += model.elements() - view.sent_elements();
      }
      REQUIRE(resumed.save() == uninterrupted.save());
      if (name != "everything sent") REQUIRE(held_back > 0);
    }
  }
}

TEMPLATE_TEST_CASE("state: loading into a compressor that ran elsewhere leaves nothing of that run", "",
                   float, double) {
  const lamina::layout model = small_model();
  for (const auto& [name, options] : all_options()) {
    CAPTURE(name);
    const auto saved_run = running<TestType>(model, options, 411, 6);
    auto original = saved_run;
    auto other = running<TestType>(model, options, 412, 9);
    // In the middle of a step, too.
    std::mt19937 random(413);
    accumulate_all(other, gradients_of_step<TestType>(random, model));
    other.load(saved_run.save());
    for (int step = 0; step < 20; ++step) {
      const auto gradients = gradients_of_step<TestType>(random, model);
      REQUIRE(one_step(other, gradients) == one_step(original, gradients));
      REQUIRE(same_memory(other, original));
    }
  }
}

TEMPLATE_TEST_CASE("state: a frame encoded and not committed before saving counts as lost", "", float,
                   double) {
  const lamina::layout model = small_model();
  for (const payload_type payload :
       {payload_type::as_is, payload_type::float16, payload_type::int8, payload_type::int4}) {
    std::mt19937 random(421);
    compressor_options options;
    options.drop_ratio = 0.6;
    options.payload = payload;
    compressor_of<TestType> compressor(model, options);
    tensors<TestType> computed;
    tensors<TestType> received;
    for (const std::size_t size : model.sizes()) {
      computed.emplace_back(size);
      received.emplace_back(size);
    }
    for (int step = 1; step <= 40; ++step) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const auto gradient = random_integers<TestType>(random, model.sizes()[l], 3000);
        compressor.accumulate(l, gradient);
        for (std::size_t i = 0; i < gradient.size(); ++i) computed[l][i] += gradient[i];
      }
      const bytes frame = compressor.encode().to_bytes();
      const bool arrives = random() % 3 != 0;
      if (arrives) {
        compressor.commit();
        const auto view = lamina::decode<TestType>(frame, model);
        for (std::size_t l = 0; l < model.layers(); ++l) {
          std::vector<TestType> sent(model.sizes()[l]);
          view.restore(l, sent);
          for (std::size_t i = 0; i < sent.size(); ++i) received[l][i] += sent[i];
        }
      }
      if (!arrives || step % 7 == 0) {
        const bytes saved = compressor.save();
        compressor_of<TestType> resumed(model, options);
        resumed.load(saved);
        CHECK_THROWS_AS(resumed.commit(), std::logic_error);  // the frame was the other's
        CHECK_THROWS_AS(resumed.encode(), std::logic_error);
        compressor = std::move(resumed);
      }
      bool conserved = true;
      for (std::size_t l = 0; l < model.layers(); ++l) {
        for (std::size_t i = 0; i < model.sizes()[l]; ++i) {
          conserved = conserved && received[l][i] + compressor.residual()[l][i] == computed[l][i];
        }
      }
      REQUIRE(conserved);
    }
  }
}

TEST_CASE("state: saving does not disturb the frame that waits for its commit") {
  compressor_options options;
  options.drop_ratio = 0;
  compressor_of<float> compressor(model_of({2}), options);
  const bytes frame = one_step<float>(compressor, {{1, 2}}, false);
  const bytes saved = compressor.save();
  CHECK(compressor.encode().to_bytes() == frame);
  compressor.commit();
  CHECK(same_bits(compressor.residual()[0], std::vector<float>{0, 0}));
  compressor.load(saved);
  CHECK(same_bits(compressor.residual()[0], std::vector<float>{1, 2}));
}

TEST_CASE("state: saving within a step is refused, and names the step") {
  compressor_of<float> compressor(model_of({1, 1}));
  CHECK_NOTHROW((void)compressor.save());  // before the first step
  one_step<float>(compressor, {{1}, {2}});
  CHECK_NOTHROW((void)compressor.save());
  compressor.accumulate(0, std::vector<float>{1});
  const auto save = [&] { (void)compressor.save(); };
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.accumulate(1, std::vector<float>{1});
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.select();
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.encode();
  CHECK_NOTHROW((void)compressor.save());
  compressor.commit();
  CHECK_NOTHROW((void)compressor.save());
}

TEST_CASE("state: the bytes are header, ages, residual and velocity") {
  const lamina::layout model = model_of({3, 0, 2});
  compressor_options options;
  CHECK(running<float>(model, options, 431).save().size() == 64 + 3 * 8 + 5 * 4);
  CHECK(running<double>(model, options, 431).save().size() == 64 + 3 * 8 + 5 * 8);
  options.momentum = 0.5;
  CHECK(running<float>(model, options, 431).save().size() == 64 + 3 * 8 + 2 * 5 * 4);
  for (const auto timing : {decision_timing::as_ready, decision_timing::ahead}) {
    options.decide = timing;
    CHECK(running<float>(model, options, 431).save().size() == 64 + 2 * 3 * 8 + 2 * 5 * 4);
  }
  options.decide = decision_timing::at_end;
  const bytes saved = running<float>(model, options, 431).save();
  const std::vector<std::byte> magic = {std::byte{0xf5}, std::byte{'L'}, std::byte{'M'}, std::byte{'S'}};
  CHECK(std::equal(magic.begin(), magic.end(), saved.begin()));
}

TEMPLATE_TEST_CASE("state: every truncation and every longer copy is refused, and changes nothing", "", float,
                   double) {
  const lamina::layout model = model_of({3, 0, 5, 1});
  for (const auto timing : {decision_timing::at_end, decision_timing::as_ready, decision_timing::ahead}) {
    compressor_options options;
    options.momentum = timing == decision_timing::as_ready ? 0.9 : 0.0;
    options.decide = timing;
    const bytes saved = running<TestType>(model, options, 441).save();
    auto compressor = running<TestType>(model, options, 442);
    CHECK(refusal(compressor, std::span<const std::byte>{}) == state_errc::truncated);
    for (std::size_t size = 0; size < saved.size(); ++size) {
      CAPTURE(size);
      REQUIRE(refusal(compressor, std::span(saved).first(size)) == state_errc::truncated);
    }
    for (const std::size_t more : {1, 4, 8, 64}) {
      bytes longer = saved;
      longer.resize(saved.size() + more);
      REQUIRE(refusal(compressor, longer) == state_errc::trailing_bytes);
    }
    CHECK(refusal(compressor, saved) == state_errc{});
    CHECK(compressor.save() == saved);
  }
}

TEMPLATE_TEST_CASE("state: every flipped bit is noticed, and changes nothing", "", float, double) {
  const lamina::layout model = model_of({3, 0, 2});
  for (const auto timing : {decision_timing::at_end, decision_timing::as_ready, decision_timing::ahead}) {
    compressor_options options;
    options.momentum = timing == decision_timing::as_ready ? 0.9 : 0.0;
    options.decide = timing;
    options.byte_budget = 0.5;
    const auto one_of_two = [&](decision_timing other) {  // as_ready and ahead together are no timing
      return timing == decision_timing::at_end || timing == other ? state_errc::other_timing
                                                                  : state_errc::nonzero_reserved;
    };
    bytes saved = running<TestType>(model, options, 451).save();
    auto compressor = running<TestType>(model, options, 452);
    for (std::size_t bit = 0; bit < 8 * saved.size(); ++bit) {
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      saved[bit / 8] ^= mask;
      CAPTURE(bit);
      const state_errc code = refusal(compressor, saved);
      const std::size_t place = bit / 8;
      REQUIRE(code == (place < 4    ? state_errc::bad_magic
                       : place < 6  ? state_errc::unsupported_version
                       : place < 7  ? state_errc::wrong_element_type
                       : bit == 56  ? state_errc::checksum_mismatch  // says that there is none
                       : bit == 57  ? state_errc::other_momentum     // says that there is velocity, or none
                       : bit == 58  ? one_of_two(decision_timing::as_ready)
                       : bit == 59  ? one_of_two(decision_timing::ahead)
                       : place < 8  ? state_errc::nonzero_reserved
                       : place < 32 ? state_errc::wrong_layout
                                    : state_errc::checksum_mismatch));
      saved[bit / 8] ^= mask;
    }
    CHECK(refusal(compressor, saved) == state_errc{});
  }
}

TEST_CASE("state: of another model, element type or memory is refused by name, and changes nothing") {
  const lamina::layout model = model_of({3, 8, 5});
  const compressor_options options;
  auto compressor = running<float>(model, options, 461);
  const auto refused = [&](const bytes& saved) { return refusal(compressor, saved); };
  CHECK(refused(running<float>(model_of({3, 8, 6}), options, 462).save()) == state_errc::wrong_layout);
  CHECK(refused(running<float>(model_of({3, 13}), options, 462).save()) == state_errc::wrong_layout);
  CHECK(refused(running<float>(model_of({3, 8, 5, 0}), options, 462).save()) == state_errc::wrong_layout);
  const lamina::layout renamed({{"a", {3}}, {"b", {8}}, {"c", {5}}});
  CHECK(refused(running<float>(renamed, options, 462).save()) == state_errc::wrong_layout);
  CHECK(refused(running<double>(model, options, 462).save()) == state_errc::wrong_element_type);

  compressor_options with_momentum;
  with_momentum.momentum = 0.9;
  auto heavy = running<float>(model, with_momentum, 463);
  CHECK(refused(heavy.save()) == state_errc::other_momentum);
  CHECK(refusal(heavy, compressor.save()) == state_errc::other_momentum);

  // A frame is no state, and a state no frame.
  std::mt19937 random(464);
  const bytes frame = one_step(compressor, gradients_of_step<float>(random, model));
  CHECK(refused(frame) == state_errc::bad_magic);
  std::error_code error;
  const bytes saved = compressor.save();
  lamina::decode<float>(saved, model, error);
  CHECK(error == lamina::frame_errc::bad_magic);
}

TEST_CASE("state: of other parts of the same model is refused") {
  const lamina::layout model = model_of({3 * 4096});
  compressor_options whole;
  compressor_options parts;
  parts.part_elements = 4096;
  compressor_options larger_parts;
  larger_parts.part_elements = 2 * 4096;
  auto compressor = running<float>(model, parts, 471, 2);
  CHECK(refusal(compressor, running<float>(model, whole, 472, 2).save()) == state_errc::wrong_layout);
  CHECK(refusal(compressor, running<float>(model, larger_parts, 472, 2).save()) == state_errc::wrong_layout);
  CHECK(refusal(compressor, running<float>(model, parts, 472, 2).save()) == state_errc{});
}

TEST_CASE("state: a residual that is not finite is refused even with a good checksum, and changes nothing") {
  const lamina::layout model = model_of({3});
  auto compressor = running<float>(model, {}, 481);
  bytes saved = compressor.save();
  const float nan_value = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(saved.data() + saved.size() - sizeof nan_value, &nan_value, sizeof nan_value);
  lamina::detail::state_header header;
  std::memcpy(&header, saved.data(), sizeof header);
  header.checksum = lamina::detail::state_checksum(header, std::span(saved).subspan(sizeof header));
  std::memcpy(saved.data(), &header, sizeof header);
  const bytes before = compressor.save();
  CHECK_THROWS_AS(compressor.load(saved), std::exception);
  CHECK(compressor.save() == before);
}

namespace {

// The saved states of W workers after the same step, each with its own gradients.
template <class T>
std::vector<bytes> saved_by(std::size_t workers, const lamina::layout& model,
                            const compressor_options& options, int steps = 5) {
  std::vector<bytes> states;
  for (std::uint32_t w = 0; w < workers; ++w) {
    states.push_back(running<T>(model, options, 500 + w, steps).save());
  }
  return states;
}

lamina::detail::state_header header_of(const bytes& saved) {
  lamina::detail::state_header header;
  std::memcpy(&header, saved.data(), sizeof header);
  return header;
}

// The state with another header, or with another number at a place behind it, under a good checksum.
void write_header(bytes& saved, lamina::detail::state_header header) {
  if (header.checksum != 0) {
    header.checksum = lamina::detail::state_checksum(header, std::span(saved).subspan(sizeof header));
  }
  std::memcpy(saved.data(), &header, sizeof header);
}
bytes with_header(bytes saved, const std::function<void(lamina::detail::state_header&)>& change) {
  auto header = header_of(saved);
  change(header);
  write_header(saved, header);
  return saved;
}
template <class Number>
bytes with_number(bytes saved, std::size_t place, Number number) {
  std::memcpy(saved.data() + place, &number, sizeof number);
  write_header(saved, header_of(saved));
  return saved;
}

// A compressor that has sent nothing: its residual is what was accumulated.
template <class T>
bytes state_with_residual(const lamina::layout& model, const tensors<T>& residual) {
  compressor_options options;
  options.refresh = refresh_schedule::fixed(std::numeric_limits<double>::infinity());
  compressor_of<T> compressor(model, options);
  one_step(compressor, residual);
  return compressor.save();
}

// A range that makes its states while it is walked.
struct range_of_copies {
  struct iterator {
    using value_type = bytes;
    using difference_type = std::ptrdiff_t;
    bytes operator*() const { return {}; }
    iterator& operator++() { return *this; }
    iterator operator++(int) { return *this; }
    bool operator==(const iterator&) const { return true; }
  };
  iterator begin() const { return {}; }
  iterator end() const { return {}; }
};

// What merging says when it throws: a decode_error with this code or, without one, std::invalid_argument.
std::string merge_refusal(const std::vector<bytes>& states, const lamina::layout& model,
                          state_errc code = {}) {
  try {
    lamina::merge_states<float>(states, model);
  } catch (const lamina::decode_error& error) {
    CHECK(error.code() == code);
    return error.what();
  } catch (const std::invalid_argument& error) {
    CHECK(code == state_errc{});
    return error.what();
  }
  return "(merged)";
}

}  // namespace

TEMPLATE_TEST_CASE(
    "state: every field is checked by name under a good checksum, numbers at the limits included", "", float,
    double) {
  using lamina::detail::state_header;
  constexpr std::array<std::uint64_t, 9> limits = {
      0,          1,           0x7fffffff,         0x80000000,       0x80000001,
      0xffffffff, 0x100000000, 0x8000000000000000, ~std::uint64_t{0}};
  const lamina::layout model = model_of({3, 8, 5});
  for (const double momentum : {0.0, 0.9}) {
    compressor_options options;
    options.momentum = momentum;
    options.refresh = refresh_schedule::fixed(1e30);  // nothing was sent, so that any step will do
    auto compressor = running<TestType>(model, options, 483);
    const bytes saved = compressor.save();
    const auto refused = [&](const std::function<void(state_header&)>& change) {
      return refusal(compressor, with_header(saved, change));
    };
    for (const std::uint64_t number : limits) {
      CAPTURE(number);
      for (std::uint64_t state_header::*field :
           {&state_header::layers, &state_header::elements, &state_header::fingerprint}) {
        CHECK(refused([&](auto& h) { h.*field = number; }) == state_errc::wrong_layout);
        const std::uint64_t more = std::max<std::uint64_t>(number, 1);
        CHECK(refused([&](auto& h) { h.*field += more; }) == state_errc::wrong_layout);
      }
      auto elsewhere = compressor;
      elsewhere.load(with_header(saved, [&](auto& h) { h.step = number; }));
      CHECK(elsewhere.step() == number);
    }
    for (const int number : {0, 3, 256, 65535}) {
      const auto version = [&](auto& h) { h.version = static_cast<std::uint16_t>(number); };
      CHECK(refused(version) == state_errc::unsupported_version);
    }
    for (int number = 0; number < 256; ++number) {
      const auto type = [&](auto& h) { h.element_type = static_cast<std::uint8_t>(number); };
      const bool is_own = number == (sizeof(TestType) == 4 ? 1 : 2);
      CHECK(refused(type) == (is_own ? state_errc{} : state_errc::wrong_element_type));
    }
    for (unsigned flags = 4; flags < 256; flags += 4) {
      const auto flag = [&](auto& h) { h.flags = static_cast<std::uint8_t>(h.flags | flags); };
      const bool is_timing = flags == 4 || flags == 8;
      CHECK(refused(flag) == (is_timing ? state_errc::other_timing : state_errc::nonzero_reserved));
      const auto flag_of_version_1 = [&](auto& h) {
        flag(h);
        h.version = 1;
      };
      CHECK(refused(flag_of_version_1) == state_errc::nonzero_reserved);
    }
    CHECK(refused([](auto& h) { h.magic += 1; }) == state_errc::bad_magic);
  }
}

TEST_CASE("state: of version 1 is of steps that are decided at their end, and loads there alone") {
  const lamina::layout model = model_of({3, 8, 5});
  compressor_options options;
  options.drop_ratio = 0.5;
  auto at_end = running<float>(model, options, 485);
  const bytes saved = with_header(at_end.save(), [](auto& h) { h.version = 1; });
  compressor_of<float> resumed(model, options);
  resumed.load(saved);
  CHECK(resumed.save() == at_end.save());
  for (const auto timing : {decision_timing::as_ready, decision_timing::ahead}) {
    options.decide = timing;
    auto other = running<float>(model, options, 486);
    CHECK(refusal(other, saved) == state_errc::other_timing);
    CHECK(refusal(other, at_end.save()) == state_errc::other_timing);
    CHECK(refusal(at_end, other.save()) == state_errc::other_timing);
    CHECK(contains(merge_refusal({at_end.save(), other.save()}, model, state_errc::other_timing),
                   "saved state 1"));
  }
  // Read without a compressor, a selector of another timing does not take it.
  const auto read = lamina::read_state<float>(saved, model, false);
  lamina::layer_selector selector(model, options);
  CHECK_THROWS_AS(selector.restore(read.memory), std::invalid_argument);
}

TEST_CASE("state: merged, a layer waits since the first step in which it did on any worker") {
  const lamina::layout model = model_of({4, 4, 4});
  compressor_options options;
  options.decide = decision_timing::as_ready;
  options.byte_budget = 1.0 / 12;
  std::vector<bytes> states;
  for (const auto& order : {std::vector<std::size_t>{0, 1, 2}, {2, 1, 0}}) {
    compressor_of<float> each(model, options);
    for (int step = 0; step < 5; ++step) {
      for (const std::size_t l : order)
        each.accumulate(l, std::vector<float>(4, l == 1 && step == 0 ? 0 : 1));
      each.encode();
      each.commit();
    }
    states.push_back(each.save());
  }
  const auto waits_since = [&](const bytes& state) {
    return lamina::read_state<float>(state, model, false).memory.waits_since;
  };
  using steps = std::vector<std::uint64_t>;
  CHECK(waits_since(states[0]) == steps{0, 0, 1});
  CHECK(waits_since(states[1]) == steps{0, 0, 1});
  states[1] = with_number(states[1], 64 + 3 * 8, std::uint64_t{4});
  states[1] = with_number(states[1], 64 + 5 * 8, std::uint64_t{2});
  CHECK(waits_since(lamina::merge_states<float>(states, model)) == steps{4, 0, 1});
  const auto later = [&](std::uint64_t step) { return with_number(states[0], 64 + 3 * 8, step); };
  compressor_of<float> each(model, options);
  CHECK(refusal(each, later(6)) == state_errc::impossible_age);
  CHECK(refusal(each, later(5)) == state_errc{});
}

TEMPLATE_TEST_CASE("state: loads from any address", "", float, double) {
  const lamina::layout model = model_of({3, 0, 70});
  compressor_options options;
  options.momentum = 0.9;
  const bytes saved = running<TestType>(model, options, 484).save();
  compressor_of<TestType> compressor(model, options);
  alignas(64) std::array<std::byte, 64 + 2000> buffer{};
  REQUIRE(64 + saved.size() <= buffer.size());
  for (std::size_t shift = 0; shift < 64; ++shift) {
    CAPTURE(shift);
    const auto shifted = std::span(buffer).subspan(shift, saved.size());
    std::ranges::copy(saved, shifted.begin());
    compressor.load(shifted);
    CHECK(compressor.save() == saved);
  }
}

TEMPLATE_TEST_CASE("state: of a model whose bytes cannot be counted is refused as truncated", "", float,
                   double) {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  for (const std::size_t elements : {most / sizeof(TestType) + 1, most / sizeof(TestType) / 2 + 1, most}) {
    for (const bool has_velocity : {false, true}) {
      CAPTURE(elements, has_velocity);
      const lamina::layout model = model_of({elements});
      lamina::detail::state_header header;
      header.element_type = lamina::detail::element_code<TestType>;
      header.flags = has_velocity ? lamina::detail::state_flag_velocity : 0;
      header.fingerprint = model.fingerprint();
      header.layers = 1;
      header.elements = elements;
      // As many bytes as the wrapped size says, if they are few.
      const std::size_t wrapped = 8 + (has_velocity ? 2 : 1) * elements * sizeof(TestType);
      bytes saved(sizeof header + (wrapped < 1000 ? wrapped : 8));
      std::memcpy(saved.data(), &header, sizeof header);
      std::error_code code;
      try {
        lamina::merge_states<TestType>(std::vector<bytes>{saved}, model);
      } catch (const lamina::decode_error& error) {
        code = error.code();
      }
      CHECK(code == state_errc::truncated);
    }
  }
}

TEMPLATE_TEST_CASE("state: merged for another number of workers, what is pending is the same", "", float,
                   double) {
  const lamina::layout model = small_model();
  const std::size_t saved_workers = 4;
  for (const std::size_t part_elements : {0, 4096}) {
    for (const double momentum : {0.0, 0.5}) {
      compressor_options options;
      options.drop_ratio = 0.7;
      options.part_elements = part_elements;
      options.momentum = momentum;
      std::mt19937 random(501);
      std::vector<bytes> states;
      std::vector<TestType> residuals(model.elements());  // the sum over the workers
      std::vector<TestType> velocities(momentum == 0 ? 0 : model.elements());
      const auto add_memory = [](const compressor_of<TestType>& worker, auto& a, auto& u) {
        for (std::size_t i = 0; i < a.size(); ++i) a[i] += worker.residual().elements()[i];
        for (std::size_t i = 0; i < u.size(); ++i) u[i] += worker.residual().velocity()[i];
      };
      const auto integers = [&] {
        tensors<TestType> gradients;
        for (const std::size_t size : model.sizes()) {
          gradients.push_back(random_integers<TestType>(random, size));
        }
        return gradients;
      };
      for (std::size_t w = 0; w < saved_workers; ++w) {
        compressor_of<TestType> worker(model, options);
        for (int step = 0; step < 7; ++step) one_step(worker, integers());
        add_memory(worker, residuals, velocities);
        states.push_back(worker.save());
      }
      REQUIRE(std::ranges::count(residuals, TestType(0)) < std::ssize(residuals));
      const lamina::layout parts = lamina::partition(model, part_elements).parts();
      const bytes merged = lamina::merge_states<TestType>(states, parts);
      REQUIRE(merged.size() == states[0].size());

      for (const std::size_t workers : {2, 8, 3, 1}) {
        CAPTURE(part_elements, momentum, workers);
        std::vector<compressor_of<TestType>> resumed(workers, compressor_of<TestType>(model, options));
        std::vector<TestType> a(residuals.size());
        std::vector<TestType> u(velocities.size());
        for (auto& worker : resumed) {
          worker.load(merged);
          REQUIRE(worker.step() == 7);
          add_memory(worker, a, u);
        }
        const auto same_mean = [&](const auto& before, const auto& after) {
          bool same = true;
          for (std::size_t i = 0; i < before.size(); ++i) {
            same = same && before[i] * static_cast<TestType>(workers) ==
                               after[i] * static_cast<TestType>(saved_workers);
          }
          return same;
        };
        REQUIRE(same_mean(residuals, a));
        REQUIRE(same_mean(velocities, u));

        // And as the run goes on, it arrives: without momentum, what is sent plus what is left is what there was.
        if (momentum != 0) continue;
        for (int step = 8; step <= 20; ++step) {
          for (auto& worker : resumed) {
            const auto gradients = integers();
            std::size_t i = 0;
            for (const auto& layer : gradients) {
              for (const TestType each : layer) a[i++] += each;
            }
            const bytes frame = one_step(worker, gradients);
            const auto view = lamina::decode<TestType>(frame, parts);
            REQUIRE(view.step() == static_cast<std::uint64_t>(step));
            for (std::size_t part = 0; part < parts.layers(); ++part) {
              view.for_each_block(part, [&](std::size_t begin, std::span<const TestType> block) {
                for (std::size_t k = 0; k < block.size(); ++k) a[parts.offset(part) + begin + k] -= block[k];
              });
            }
          }
        }
        std::vector<TestType> left(a.size());
        for (const auto& worker : resumed) add_memory(worker, left, velocities);
        REQUIRE(a == left);
      }
    }
  }
}

TEMPLATE_TEST_CASE("state: merging copies of one state gives that state, whatever the options", "", float,
                   double) {
  const lamina::layout model = small_model();
  for (const auto& [name, options] : all_options()) {
    const auto compressor = running<TestType>(model, options, 511, 7);
    const bytes saved = compressor.save();
    for (const std::size_t workers : {1, 2, 3, 5, 7}) {
      CAPTURE(name, workers);
      const std::vector<bytes> copies(workers, saved);
      REQUIRE(lamina::merge_states<TestType>(copies, compressor.parts()) == saved);
    }
  }
}

TEMPLATE_TEST_CASE("state: the merged residual is the mean, summed in the order of the workers", "", float,
                   double) {
  const lamina::layout model = small_model();
  compressor_options options;
  options.drop_ratio = 0.7;
  options.momentum = 0.9;
  std::vector<TestType> residuals(model.elements());
  std::vector<TestType> velocities(model.elements());
  const auto states = saved_by<TestType>(3, model, options);
  compressor_of<TestType> compressor(model, options);
  for (const bytes& saved : states) {
    compressor.load(saved);
    for (std::size_t i = 0; i < model.elements(); ++i) {
      residuals[i] += compressor.residual().elements()[i];
      velocities[i] += compressor.residual().velocity()[i];
    }
  }
  for (std::size_t i = 0; i < model.elements(); ++i) {
    residuals[i] /= 3;
    velocities[i] /= 3;
  }
  compressor.load(lamina::merge_states<TestType>(states, model));
  CHECK(same_bits(compressor.residual().elements(), residuals));
  CHECK(same_bits(compressor.residual().velocity(), velocities));

  const lamina::layout one = model_of({1});
  const auto merged_of = [&](const std::vector<TestType>& values) {
    std::vector<bytes> saved;
    for (const TestType value : values) saved.push_back(state_with_residual<TestType>(one, {{value}}));
    compressor_of<TestType> worker(one);
    worker.load(lamina::merge_states<TestType>(saved, one));
    return worker.residual()[0][0];
  };
  const TestType huge = sizeof(TestType) == 4 ? TestType(1e8) : TestType(1e17);
  CHECK(merged_of({huge, -huge, 3}) == 1);
  CHECK(merged_of({3, huge, -huge}) == 0);
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
    compressor_of<float> compressor(model);
    const bytes state = lamina::merge_states<float>(states, model);
    compressor.load(state);
    CHECK(same_bits(compressor.threshold(), header_of(state).threshold));
    return std::pair(header_of(state).threshold, header_of(state).allowance);
  };
  CHECK(merged({1, 2, 6}) == std::pair(3.0, 24.0));
  CHECK(merged({0.1, 0.1, 0.1}) == std::pair(0.1, 0.8));  // their rounded sum over 3 is another number
  CHECK(merged({5, -1, 5, 5}) == std::pair(-1.0, 28.0));
  CHECK(merged({-1, -3}) == std::pair(-1.0, -16.0));
  CHECK(merged({infinity, 4}) == std::pair(infinity, 17.0));
  CHECK(merged({-infinity, infinity, 2}).first == infinity);  // budgets of which one held everything back
}

TEST_CASE("state: after merging no layer waits for longer than max_age, whichever worker held it back") {
  const lamina::layout model = model_of({1, 1, 1});
  compressor_options options;
  options.max_age = 5;
  options.refresh = refresh_schedule::fixed(100);
  const auto worker_that_sends = [&](const std::vector<std::size_t>& layer_of_step) {
    compressor_of<float> worker(model, options);
    for (const std::size_t layer : layer_of_step) {
      tensors<float> gradients(3, std::vector<float>(1));
      gradients[layer][0] = 1000;
      one_step(worker, gradients);
    }
    return worker.save();
  };
  const std::vector<bytes> states = {worker_that_sends({0, 1, 2, 0}), worker_that_sends({2, 1, 0, 1})};
  compressor_of<float> resumed(model, options);
  resumed.load(lamina::merge_states<float>(states, model));
  std::vector<std::vector<std::size_t>> sent;
  for (int step = 5; step <= 8; ++step) {
    const bytes frame = one_step<float>(resumed, {{1}, {1}, {1}});
    const auto view = lamina::decode<float>(frame, model);
    sent.emplace_back();
    for (std::size_t l = 0; l < 3; ++l) {
      if (!view.is_dropped(l)) sent.back().push_back(l);
    }
  }
  // Layer 0 was last sent in steps 4 and 3, layer 1 in 2 and 4, layer 2 in 3 and 1.
  CHECK(sent == std::vector<std::vector<std::size_t>>{{}, {2}, {1}, {0}});
}

TEST_CASE("state: states to merge may be spans, at any address, but not copies that are gone") {
  const lamina::layout model = small_model();
  const auto states = saved_by<float>(3, model, {});
  const bytes merged = lamina::merge_states<float>(states, model);
  std::vector<bytes> shifted;
  std::vector<std::span<const std::byte>> spans;
  for (const bytes& saved : states) {
    shifted.push_back(bytes(1));
    shifted.back().insert(shifted.back().end(), saved.begin(), saved.end());
  }
  for (const bytes& each : shifted) spans.push_back(std::span(each).subspan(1));
  CHECK(lamina::merge_states<float>(spans, model) == merged);
  STATIC_REQUIRE(lamina::detail::saved_states<std::vector<bytes>>);
  STATIC_REQUIRE(std::ranges::input_range<range_of_copies>);
  STATIC_REQUIRE_FALSE(lamina::detail::saved_states<range_of_copies>);
}

TEST_CASE("state: merging refuses what loading refuses, and says which state it is") {
  const lamina::layout model = model_of({3, 0, 5});
  compressor_options heavy;
  heavy.momentum = 0.9;
  const auto good = saved_by<float>(3, model, {});
  const auto changed = [&](const auto& change) { return with_header(good[1], change); };
  bytes cut = good[1];
  cut.pop_back();
  bytes longer = good[1];
  longer.push_back(std::byte{0});
  bytes damaged = good[1];
  damaged.back() ^= std::byte{1};
  std::vector<std::pair<bytes, state_errc>> cases = {
      {{}, state_errc::truncated},
      {cut, state_errc::truncated},
      {longer, state_errc::trailing_bytes},
      {changed([](auto& header) { ++header.magic; }), state_errc::bad_magic},
      {changed([](auto& header) { ++header.version; }), state_errc::unsupported_version},
      {changed([](auto& header) { ++header.element_type; }), state_errc::wrong_element_type},
      {changed([](auto& header) { header.flags |= 16; }), state_errc::nonzero_reserved},
      {changed([](auto& header) { ++header.fingerprint; }), state_errc::wrong_layout},
      {changed([](auto& header) { ++header.layers; }), state_errc::wrong_layout},
      {changed([](auto& header) { ++header.elements; }), state_errc::wrong_layout}};
  cases.emplace_back(damaged, state_errc::checksum_mismatch);
  for (const auto& [bad, code] : cases) {
    CAPTURE(static_cast<int>(code));
    for (const std::size_t place : {0, 1, 2}) {
      auto states = good;
      states[place] = bad;
      CHECK(contains(merge_refusal(states, model, code), "saved state " + std::to_string(place)));
    }
  }

  // With velocity and without.
  const auto with_velocity = saved_by<float>(3, model, heavy);
  CHECK(merge_refusal(with_velocity, model) == "(merged)");
  CHECK(contains(merge_refusal({good[0], good[1], with_velocity[2]}, model, state_errc::other_momentum),
                 "saved state 2"));
  CHECK(contains(
      merge_refusal({with_velocity[0], good[1], with_velocity[2]}, model, state_errc::other_momentum),
      "saved state 1"));
  CHECK(contains(merge_refusal(good, model_of({3, 5}), state_errc::wrong_layout), "saved state 0"));
}

TEST_CASE("state: merging refuses nothing at all, states of two steps, and numbers that are not finite") {
  const lamina::layout model = model_of({3, 2});
  const auto good = saved_by<float>(3, model, {});
  CHECK(merge_refusal(good, model) == "(merged)");
  CHECK(contains(merge_refusal({}, model), "no saved state"));

  const std::string steps = merge_refusal({good[0], good[1], saved_by<float>(1, model, {}, 6)[0]}, model);
  CHECK(contains(steps, "saved state 0 is of step 5"));
  CHECK(contains(steps, "saved state 2 of step 6"));

  const float nan_value = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  compressor_options heavy;
  heavy.momentum = 0.5;
  for (const auto& options : {compressor_options{}, heavy}) {
    const auto saved = saved_by<float>(2, model, options);
    for (std::size_t place = 64 + 2 * 8; place < saved[0].size(); place += 4) {
      CAPTURE(place);
      for (const float bad : {nan_value, infinity, -infinity}) {
        const bytes broken = with_number(saved[1], place, bad);
        CHECK(contains(merge_refusal({saved[0], broken}, model), "saved state 1 holds NaN"));
        CHECK(contains(merge_refusal({broken}, model), "saved state 0 holds NaN"));
        CHECK(contains(merge_refusal({broken, broken}, model), "saved state 0 holds NaN"));
      }
      const bytes large = with_number(saved[0], place, largest);
      const bytes nearly = with_number(saved[1], place, largest / 2);
      CHECK(contains(merge_refusal({large, nearly}, model), "overflow"));
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

TEST_CASE("state: errors speak of a state, and a mismatch of momentum has a sentence of its own") {
  for (int code = 1; code <= static_cast<int>(state_errc::impossible_age); ++code) {
    const std::string message = make_error_code(static_cast<state_errc>(code)).message();
    CAPTURE(message);
    CHECK(contains(message, "state"));
    CHECK_FALSE(contains(message, "frame"));
  }
  const lamina::layout model = model_of({3, 8});
  compressor_options with_momentum;
  with_momentum.momentum = 0.9;
  auto plain = running<float>(model, {}, 491);
  auto heavy = running<float>(model, with_momentum, 492);
  for (const auto& message : {message_of<lamina::decode_error>([&] { plain.load(heavy.save()); }),
                              message_of<lamina::decode_error>([&] { heavy.load(plain.save()); })}) {
    CHECK(contains(message, "momentum"));
    CHECK_FALSE(contains(message, "another model"));
  }
}

TEST_CASE("state: an age beyond the state's step is refused, under a good checksum, too") {
  const lamina::layout model = model_of({3, 2});
  lamina::residual_accumulator<float> residual(model);
  const auto saved_with = [&](std::vector<std::uint64_t> sent_in) {
    return lamina::save_state<float>(residual, {-1, 0, std::move(sent_in)}, 3);
  };
  compressor_of<float> compressor(model, {.max_age = 10});
  CHECK(refusal(compressor, saved_with({4, 0})) == state_errc::impossible_age);
  CHECK(refusal(compressor, saved_with({0, ~std::uint64_t{0}})) == state_errc::impossible_age);
  CHECK(refusal(compressor, saved_with({3, 0})) == state_errc{});
  CHECK(compressor.step() == 3);
}

TEST_CASE("state: a residual that holds NaN or infinity is not saved, and its layer is named") {
  const lamina::layout model({{"first", {2}}, {"second", {8192}}});
  for (const double momentum : {0.0, 0.5}) {
    compressor_options options;
    options.check = lamina::finite_check::caller;
    options.refresh = refresh_schedule::fixed(std::numeric_limits<double>::infinity());
    options.part_elements = 4096;
    options.momentum = momentum;
    compressor_of<float> compressor(model, options);
    std::vector<float> gradient(8192, 1);
    compressor.accumulate_all(tensors<float>{{1, 1}, gradient});
    compressor.encode();
    CHECK_NOTHROW((void)compressor.save());
    gradient[5000] = std::numeric_limits<float>::quiet_NaN();
    compressor.accumulate_all(tensors<float>{{1, 1}, gradient});
    compressor.encode();  // goes out, and is not committed
    const auto save = [&] { (void)compressor.save(); };
    CHECK(contains(message_of<std::domain_error>(save), "'second[1]'"));
    compressor.commit();
    CHECK_NOTHROW(save());
  }
}

TEST_CASE("state: what lies elsewhere is saved as a compressor saves it, and read back") {
  const lamina::layout model = small_model();
  for (const double momentum : {0.0, 0.9}) {
    compressor_options options;
    options.drop_ratio = 0.7;
    options.momentum = momentum;
    options.part_elements = 4096;
    const auto compressor = running<float>(model, options, 495);
    const lamina::layout& parts = compressor.parts();
    const bytes saved = compressor.save();
    const bool has_velocity = momentum > 0;
    const auto state = lamina::read_state<float>(saved, parts, has_velocity);
    CHECK(state.step == compressor.step());
    CHECK(same_bits(state.memory.threshold, compressor.threshold()));
    CHECK(same_bits(state.residual, compressor.residual().elements()));
    CHECK(same_bits(state.velocity, compressor.residual().velocity()));
    CHECK(state.memory.cleared_in.size() == parts.layers());

    const std::span<const float> residual = state.residual;
    const std::span<const float> velocity = state.velocity;
    const auto save = [&](const lamina::layer_selector::memory& memory, std::span<const float> a,
                          std::span<const float> u) {
      return lamina::save_state<float>(parts, memory, a, u, state.step);
    };
    CHECK(save(state.memory, residual, velocity) == saved);
    CHECK_THROWS_AS(save(state.memory, residual.first(residual.size() - 1), velocity), std::invalid_argument);
    CHECK_THROWS_AS(save(state.memory, residual, residual.first(1)), std::invalid_argument);
    auto memory = state.memory;
    memory.cleared_in.pop_back();
    CHECK_THROWS_AS(save(memory, residual, velocity), std::invalid_argument);
    std::vector<float> poisoned(residual.begin(), residual.end());
    poisoned.back() = std::numeric_limits<float>::infinity();
    const std::string& last = parts[parts.layers() - 1].name;
    CHECK(contains(message_of<std::domain_error>([&] { save(state.memory, poisoned, velocity); }), last));
    if (has_velocity) {
      CHECK(contains(message_of<std::domain_error>([&] { save(state.memory, residual, poisoned); }),
                     "velocity"));
    }
    const auto mismatch = [&] { (void)lamina::read_state<float>(saved, parts, !has_velocity); };
    CHECK(contains(message_of<lamina::decode_error>(mismatch), "momentum"));
    CHECK_THROWS_AS(lamina::read_state<float>(saved, model, has_velocity), lamina::decode_error);

    bytes damaged = saved;
    const float not_a_number = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(damaged.data() + damaged.size() - sizeof(float), &not_a_number, sizeof(float));
    damaged = with_header(damaged, [](auto&) {});
    CHECK_THROWS_AS(lamina::read_state<float>(damaged, parts, has_velocity), std::invalid_argument);
  }
}
