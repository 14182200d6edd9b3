// SPDX-License-Identifier: MIT
#include "lamina/state.hpp"

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>

#include "catch.hpp"
#include "lamina/codec.hpp"
#include "lamina/worker.hpp"
#include "support.hpp"

using lamina::compressor_options;
using lamina::frame_errc;
using lamina::payload_type;
using lamina::refresh_schedule;
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
  with("first step only", [](auto& o) { o.refresh = refresh_schedule::first_step_only(); });
  with("fixed threshold", [](auto& o) { o.refresh = refresh_schedule::fixed(3); });
  with("fresh source", [](auto& o) { o.source = lamina::threshold_source::fresh; });
  with("fresh source every 3", [](auto& o) {
    o.source = lamina::threshold_source::fresh;
    o.refresh = refresh_schedule::every(3);
  });
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
  with("warm-up, parts, momentum, bfloat16", [](auto& o) {
    o.warm_up_steps = 15;
    o.part_elements = 4096;
    o.momentum = 0.9;
    o.payload = payload_type::bfloat16;
    o.refresh = refresh_schedule::every(3);
    o.source = lamina::threshold_source::fresh;
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

// The code for which load refuses, frame_errc{} if it does not; checks that refusing changes nothing.
template <class T>
frame_errc refusal(compressor_of<T>& compressor, std::span<const std::byte> saved) {
  const bytes before = compressor.save();
  frame_errc code{};
  try {
    compressor.load(saved);
    return code;
  } catch (const lamina::decode_error& error) {
    REQUIRE(error.code().category() == lamina::frame_category());
    REQUIRE(contains(error.what(), "saved state"));
    code = static_cast<frame_errc>(error.code().value());
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
  for (const payload_type payload : {payload_type::as_is, payload_type::float16, payload_type::int8}) {
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
  CHECK_NOTHROW(compressor.save());  // before the first step
  one_step<float>(compressor, {{1}, {2}});
  CHECK_NOTHROW(compressor.save());
  compressor.accumulate(0, std::vector<float>{1});
  const auto save = [&] { compressor.save(); };
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.accumulate(1, std::vector<float>{1});
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.select();
  CHECK(contains(message_of<std::logic_error>(save), "step 2"));
  compressor.encode();
  CHECK_NOTHROW(compressor.save());
  compressor.commit();
  CHECK_NOTHROW(compressor.save());
}

TEST_CASE("state: the bytes are header, ages, residual and velocity") {
  const lamina::layout model = model_of({3, 0, 2});
  compressor_options options;
  CHECK(running<float>(model, options, 431).save().size() == 64 + 3 * 8 + 5 * 4);
  CHECK(running<double>(model, options, 431).save().size() == 64 + 3 * 8 + 5 * 8);
  options.momentum = 0.5;
  CHECK(running<float>(model, options, 431).save().size() == 64 + 3 * 8 + 2 * 5 * 4);
  const bytes saved = running<float>(model, options, 431).save();
  const std::vector<std::byte> magic = {std::byte{0xf5}, std::byte{'L'}, std::byte{'M'}, std::byte{'S'}};
  CHECK(std::equal(magic.begin(), magic.end(), saved.begin()));
}

TEMPLATE_TEST_CASE("state: every truncation and every longer copy is refused, and changes nothing", "", float,
                   double) {
  const lamina::layout model = model_of({3, 0, 5, 1});
  for (const double momentum : {0.0, 0.9}) {
    compressor_options options;
    options.momentum = momentum;
    const bytes saved = running<TestType>(model, options, 441).save();
    auto compressor = running<TestType>(model, options, 442);
    CHECK(refusal(compressor, std::span<const std::byte>{}) == frame_errc::truncated);
    for (std::size_t size = 0; size < saved.size(); ++size) {
      CAPTURE(size);
      REQUIRE(refusal(compressor, std::span(saved).first(size)) == frame_errc::truncated);
    }
    for (const std::size_t more : {1, 4, 8, 64}) {
      bytes longer = saved;
      longer.resize(saved.size() + more);
      REQUIRE(refusal(compressor, longer) == frame_errc::trailing_bytes);
    }
    CHECK(refusal(compressor, saved) == frame_errc{});
    CHECK(compressor.save() == saved);
  }
}

TEMPLATE_TEST_CASE("state: every flipped bit is noticed, and changes nothing", "", float, double) {
  if (!lamina::checksums_available) {
    WARN("state: skipped, there is no checksum in this build");
    return;
  }
  const lamina::layout model = model_of({3, 0, 2});
  for (const double momentum : {0.0, 0.9}) {
    compressor_options options;
    options.momentum = momentum;
    options.byte_budget = 0.5;
    bytes saved = running<TestType>(model, options, 451).save();
    auto compressor = running<TestType>(model, options, 452);
    for (std::size_t bit = 0; bit < 8 * saved.size(); ++bit) {
      const std::byte mask{static_cast<unsigned char>(1U << (bit % 8))};
      saved[bit / 8] ^= mask;
      CAPTURE(bit);
      const frame_errc code = refusal(compressor, saved);
      const std::size_t place = bit / 8;
      REQUIRE(code == (place < 4    ? frame_errc::bad_magic
                       : place < 6  ? frame_errc::unsupported_version
                       : place < 7  ? frame_errc::wrong_element_type
                       : bit == 56  ? frame_errc::checksum_mismatch  // says that there is none
                       : bit == 57  ? frame_errc::wrong_layout       // says that there is velocity, or none
                       : place < 8  ? frame_errc::nonzero_reserved
                       : place < 32 ? frame_errc::wrong_layout
                                    : frame_errc::checksum_mismatch));
      saved[bit / 8] ^= mask;
    }
    CHECK(refusal(compressor, saved) == frame_errc{});
  }
}

TEST_CASE("state: of another model, element type or memory is refused by name, and changes nothing") {
  const lamina::layout model = model_of({3, 8, 5});
  const compressor_options options;
  auto compressor = running<float>(model, options, 461);
  const auto refused = [&](const bytes& saved) { return refusal(compressor, saved); };
  CHECK(refused(running<float>(model_of({3, 8, 6}), options, 462).save()) == frame_errc::wrong_layout);
  CHECK(refused(running<float>(model_of({3, 13}), options, 462).save()) == frame_errc::wrong_layout);
  CHECK(refused(running<float>(model_of({3, 8, 5, 0}), options, 462).save()) == frame_errc::wrong_layout);
  const lamina::layout renamed({{"a", {3}}, {"b", {8}}, {"c", {5}}});
  CHECK(refused(running<float>(renamed, options, 462).save()) == frame_errc::wrong_layout);
  CHECK(refused(running<double>(model, options, 462).save()) == frame_errc::wrong_element_type);

  compressor_options with_momentum;
  with_momentum.momentum = 0.9;
  auto heavy = running<float>(model, with_momentum, 463);
  CHECK(refused(heavy.save()) == frame_errc::wrong_layout);
  CHECK(refusal(heavy, compressor.save()) == frame_errc::wrong_layout);

  // A frame is no state, and a state no frame.
  std::mt19937 random(464);
  const bytes frame = one_step(compressor, gradients_of_step<float>(random, model));
  CHECK(refused(frame) == frame_errc::bad_magic);
  std::error_code error;
  const bytes saved = compressor.save();
  lamina::decode<float>(saved, model, error);
  CHECK(error == frame_errc::bad_magic);
}

TEST_CASE("state: of other parts of the same model is refused") {
  const lamina::layout model = model_of({3 * 4096});
  compressor_options whole;
  compressor_options parts;
  parts.part_elements = 4096;
  compressor_options larger_parts;
  larger_parts.part_elements = 2 * 4096;
  auto compressor = running<float>(model, parts, 471, 2);
  CHECK(refusal(compressor, running<float>(model, whole, 472, 2).save()) == frame_errc::wrong_layout);
  CHECK(refusal(compressor, running<float>(model, larger_parts, 472, 2).save()) == frame_errc::wrong_layout);
  CHECK(refusal(compressor, running<float>(model, parts, 472, 2).save()) == frame_errc{});
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
