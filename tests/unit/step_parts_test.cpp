// SPDX-License-Identifier: MIT
// Steps that are sent in parts: from the worker through the server and back, at every cut, and every way in which parts do not
// follow each other.
#include "lamina/step_parts.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "lamina/server.hpp"
#include "lamina/worker.hpp"
#include "oracle.hpp"
#include "support.hpp"

using namespace lamina_test;
using lamina::compressor_options;
using lamina::decision_timing;
using lamina::frame_errc;
using lamina::frame_kind;
using lamina::payload_type;

namespace {

using bytes = std::vector<std::byte>;
using compressor = lamina::gradient_compressor<float>;
using aggregator = lamina::gradient_aggregator<float>;

const std::vector<std::size_t> sizes = {3, 0, 70, 1, 64, 2};

compressor_options as_ready(double ratio = 0.5, payload_type type = payload_type::as_is,
                            std::uint32_t sender = 0) {
  compressor_options options;
  options.drop_ratio = ratio;
  options.decide = decision_timing::as_ready;
  options.payload = type;
  options.sender = sender;
  return options;
}

lamina::selection layers_of(const lamina::layout& model, const std::vector<std::size_t>& layers) {
  lamina::selection chosen(model);
  for (const std::size_t l : layers) chosen.send(l);
  return chosen;
}

// A part as the encoder writes it: present and decided so far.
bytes part_of(const lamina::layout& model, std::uint16_t index, const std::vector<std::size_t>& present,
              const std::vector<std::size_t>& decided, bool is_last = false, std::uint32_t sender = 0,
              std::uint64_t step = 1, frame_kind kind = frame_kind::gradients) {
  const std::vector<float> elements(200, static_cast<float>(index + 1));
  lamina::frame_encoder<float> encoder(model);
  const lamina::selection of = layers_of(model, decided);
  return encoder
      .encode(
          kind, step, sender, layers_of(model, present),
          [&](std::size_t l) { return std::span(elements).first(model.sizes()[l]); }, payload_type::as_is,
          lamina::frame_checksum::xxh3, lamina::frame_part{index, is_last, &of})
      .to_bytes();
}
bytes whole(const lamina::layout& model, const std::vector<std::size_t>& present, std::uint32_t sender = 0) {
  const std::vector<float> elements(200, 9.0F);
  lamina::frame_encoder<float> encoder(model);
  return encoder
      .encode(frame_kind::gradients, 1, sender, layers_of(model, present),
              [&](std::size_t l) { return std::span(elements).first(model.sizes()[l]); })
      .to_bytes();
}

tensors<float> means_of(const aggregator& server, const lamina::layout& model) {
  tensors<float> means = zeros_like<float>(model);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    server.mean(l, [&](std::size_t begin, std::span<const float> mean) {
      std::ranges::copy(mean, means[l].begin() + static_cast<std::ptrdiff_t>(begin));
    });
  }
  return means;
}

// The order in which the layers of a step become ready, and after which of them a part goes out.
struct cut {
  std::vector<std::size_t> order;
  std::uint32_t after;  // a bit a position in the order
};

// One step of a worker in parts: `send` gets each frame.
template <class Send>
void step_in_parts(compressor& each, const tensors<float>& gradients, const cut& at, const Send& send) {
  for (std::size_t k = 0; k < at.order.size(); ++k) {
    each.accumulate(at.order[k], gradients[at.order[k]]);
    if (((at.after >> k) & 1U) != 0) send(each.encode_ready());
  }
  send(each.encode_rest());
}

std::vector<std::size_t> backward_order(std::size_t layers) {
  std::vector<std::size_t> order;
  for (std::size_t l = layers; l-- > 0;) order.push_back(l);
  return order;
}

std::error_code refusal_of(aggregator& server, const bytes& frame, const lamina::layout& model) {
  std::error_code quiet;
  aggregator other = server;
  other.add(lamina::decode<float>(frame, model), quiet);
  try {
    server.add(lamina::decode<float>(frame, model));
  } catch (const lamina::decode_error& error) {
    CHECK(error.code() == quiet);
    return error.code();
  }
  CHECK_FALSE(quiet);
  return {};
}

}  // namespace

TEST_CASE("parts: at every cut the means, the residual and the state are those of whole frames") {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : {payload_type::as_is, payload_type::int8}) {
    for (std::uint32_t after = 0; after < 64; ++after) {
      CAPTURE(after, static_cast<int>(type));
      std::mt19937 random(after + 1);
      compressor in_parts(model, as_ready(0.6, type));
      compressor at_once(model, as_ready(0.6, type));
      compressor neighbour(model, as_ready(0.6, type, 1));
      auto server = aggregator::of_workers(model, 2);
      auto reference = aggregator::of_workers(model, 2);
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const cut at{backward_order(sizes.size()), after};
        tensors<float> gradients;
        tensors<float> others;
        for (const std::size_t size : sizes) {
          gradients.push_back(random_fractions<float>(random, size));
          others.push_back(random_fractions<float>(random, size));
        }
        std::vector<bytes> kept;
        kept.reserve(20);
        const auto take = [&](aggregator& to, const lamina::encoded_frame& frame) {
          kept.push_back(frame.to_bytes());
          to.add(lamina::decode<float>(kept.back(), model));
        };
        for (const std::size_t l : at.order) at_once.accumulate(l, gradients[l]);
        take(reference, at_once.encode());
        at_once.commit();
        neighbour.accumulate_all(others);
        take(reference, neighbour.encode());
        take(server, neighbour.encode_rest());
        step_in_parts(in_parts, gradients, at, [&](const auto& frame) { take(server, frame); });
        in_parts.commit();
        neighbour.commit();
        REQUIRE(server.is_complete());
        REQUIRE(std::ranges::equal(server.arrived().bitmap(), reference.arrived().bitmap()));
        const tensors<float> means = means_of(server, model);
        const tensors<float> expected = means_of(reference, model);
        for (std::size_t l = 0; l < sizes.size(); ++l) REQUIRE(same_bits(means[l], expected[l]));
        REQUIRE(in_parts.save() == at_once.save());
        server.next_step();
        reference.next_step();
      }
    }
  }
}

TEST_CASE("parts: each holds what was decided since the last one, and says what is decided") {
  const lamina::layout model = model_of({2, 0, 3, 1});
  compressor each(model, as_ready(0));
  const auto decoded = [&](const lamina::encoded_frame& frame) {
    static std::vector<bytes> kept;
    kept.push_back(frame.to_bytes());
    return lamina::decode<float>(kept.back(), model);
  };
  each.begin_step();
  const auto none = decoded(each.encode_ready());
  CHECK(none.sent_elements() == 0);
  CHECK_FALSE(none.is_decided(0));
  CHECK(none.is_decided(1));  // empty
  each.accumulate(3, std::vector<float>{1});
  const auto first = decoded(each.encode_ready());
  each.accumulate(2, std::vector<float>{1, 2, 3});
  each.accumulate(0, std::vector<float>{4, 5});
  const auto last = decoded(each.encode_rest());
  CHECK(first.is_part());
  CHECK(first.part() == 1);
  CHECK_FALSE(first.ends_step());
  CHECK(first.is_decided(3));
  CHECK_FALSE(first.is_decided(2));
  CHECK_FALSE(first.is_dropped(3));
  CHECK(first.is_dropped(2));
  CHECK(last.part() == 2);
  CHECK(last.ends_step());
  CHECK(last.is_dropped(3));
  CHECK(last.is_decided(3));
  CHECK(last.layer(0)[1] == 5);
  CHECK_THROWS_AS((void)last.is_decided(4), std::out_of_range);
  each.accumulate_all(tensors<float>{{1, 1}, {}, {1, 1, 1}, {1}});
  const auto next = decoded(each.encode_ready());  // of the next step
  CHECK(next.part() == 0);
  CHECK(next.step() == 2);
  CHECK(next.sent_elements() == 6);
}

TEST_CASE("parts: what a part does not hold is no zero of it") {
  const lamina::layout model = model_of({2, 1});
  const bytes frame = part_of(model, 0, {1}, {0, 1});
  const auto view = lamina::decode<float>(frame, model);
  std::vector<float> out = {7, 7};
  CHECK(contains(message_of<std::logic_error>([&] { view.restore(0, out); }), "'layer0'"));
  CHECK(out[0] == 7);
  CHECK_FALSE(view.apply_to(0, out));
}

TEST_CASE("parts: a layer is resolved when all senders have decided it, and has its mean from then on") {
  const lamina::layout model = model_of({1, 0, 2});
  auto server = aggregator::of_nodes(model, {1, 3});
  const bytes first_of_0 = part_of(model, 0, {2}, {2}, false, 0);
  const bytes last_of_0 = part_of(model, 1, {}, {0, 2}, true, 0);
  const bytes first_of_1 = part_of(model, 0, {}, {2}, false, 1);
  const bytes last_of_1 = part_of(model, 1, {0}, {0, 2}, true, 1);
  const auto add = [&](const bytes& frame) { server.add(lamina::decode<float>(frame, model)); };
  const auto mean = [&](std::size_t layer) {
    float first = -1;
    server.mean(layer, [&](std::size_t, std::span<const float> block) { first = block[0]; });
    return first;
  };
  CHECK_FALSE(server.is_resolved(1));  // empty, and nothing came
  add(first_of_0);
  CHECK_FALSE(server.is_resolved(2));
  CHECK(contains(message_of<std::logic_error>([&] { mean(2); }), "1 of 2 senders have decided 'layer2'"));
  add(first_of_1);
  CHECK(server.is_resolved(2));
  CHECK(server.is_resolved(1));
  CHECK_FALSE(server.is_resolved(0));
  CHECK(mean(2) == 0.25F);  // over the workers, one of whose four sent 1
  CHECK_FALSE(server.is_complete());
  add(last_of_1);
  CHECK_FALSE(server.is_complete());
  CHECK_FALSE(server.is_resolved(0));
  add(last_of_0);
  CHECK(server.is_complete());
  CHECK(mean(0) == 0.5F);
  CHECK(mean(2) == 0.25F);
  CHECK(server.workers_present() == 4);
  CHECK_THROWS_AS((void)server.is_resolved(3), std::out_of_range);
  server.next_step();
  CHECK_FALSE(server.is_resolved(2));
  CHECK(server.workers_present() == 0);
  const bytes next = part_of(model, 0, {0, 2}, {0, 2}, true, 0, 2);
  CHECK_NOTHROW(add(next));
}

TEST_CASE("parts: whole frames of some senders and parts of others make one step") {
  const lamina::layout model = model_of({1, 2});
  auto server = aggregator::of_workers(model, 2);
  const bytes of_0 = whole(model, {0}, 0);
  const bytes first = part_of(model, 0, {}, {1}, false, 1);
  const bytes last = part_of(model, 1, {0}, {0, 1}, true, 1);
  server.add(lamina::decode<float>(of_0, model));
  server.add(lamina::decode<float>(first, model));
  CHECK(server.is_resolved(1));
  server.add(lamina::decode<float>(last, model));
  CHECK(server.is_complete());
  CHECK(means_of(server, model)[0][0] == (9.0F + 2.0F) / 2);
}

TEST_CASE("parts: what does not follow is refused by name, and changes nothing") {
  const lamina::layout model = model_of({1, 1, 1, 0});
  const bytes first = part_of(model, 0, {2}, {1, 2});
  const bytes last = part_of(model, 1, {0}, {0, 1, 2}, true);
  const bytes all = whole(model, {0});
  struct attempt {
    std::string what;
    std::vector<bytes> before;
    bytes frame;
    frame_errc expected;
  };
  const std::vector<attempt> attempts = {
      {"a gap", {}, part_of(model, 1, {}, {1}), frame_errc::unexpected_part},
      {"a gap behind the first", {first}, part_of(model, 2, {}, {1, 2}), frame_errc::unexpected_part},
      {"the last one early", {}, last, frame_errc::unexpected_part},
      {"a repetition", {first}, first, frame_errc::unexpected_part},
      {"the largest number", {first}, part_of(model, 65535, {}, {1, 2}), frame_errc::unexpected_part},
      {"a part after the last", {first, last}, part_of(model, 2, {}, {0, 1, 2}), frame_errc::unexpected_part},
      {"the last one twice", {first, last}, last, frame_errc::unexpected_part},
      {"a whole frame after a part", {first}, all, frame_errc::unexpected_part},
      {"a whole frame after the last", {first, last}, all, frame_errc::unexpected_part},
      {"a part after a whole frame", {all}, part_of(model, 1, {}, {0, 1, 2}), frame_errc::unexpected_part},
      {"part 0 after a whole frame", {all}, first, frame_errc::unexpected_part},
      {"a second whole frame", {all}, all, frame_errc::duplicate_sender},
      {"a layer in two parts", {first}, part_of(model, 1, {2}, {1, 2}), frame_errc::duplicate_layer},
      {"a layer that was held back", {first}, part_of(model, 1, {1}, {1, 2}), frame_errc::duplicate_layer},
      {"a layer no longer decided", {first}, part_of(model, 1, {0}, {0, 2}), frame_errc::bad_decided},
      {"of another step", {}, part_of(model, 0, {}, {1}, false, 0, 2), frame_errc::unexpected_step},
      {"of a stranger", {}, part_of(model, 0, {}, {1}, false, 1), frame_errc::unknown_sender},
      {"of parameters",
       {},
       part_of(model, 0, {}, {1}, false, 0, 1, frame_kind::parameters),
       frame_errc::unexpected_kind},
  };
  for (const attempt& each : attempts) {
    INFO(each.what);
    auto server = aggregator::of_workers(model, 1);
    for (const bytes& frame : each.before) server.add(lamina::decode<float>(frame, model));
    const auto observed = [&] {
      std::vector<bool> seen = {server.is_complete(), server.workers_present() == 1};
      for (std::size_t l = 0; l < model.layers(); ++l) {
        seen.push_back(server.is_resolved(l));
        seen.push_back(server.arrived().is_sent(l));
      }
      return seen;
    };
    const std::vector<bool> before = observed();
    CHECK(refusal_of(server, each.frame, model) == each.expected);
    CHECK(observed() == before);
    // What comes next is taken as if nothing had happened.
    if (each.before.size() == 1 && each.before[0] == first) {
      CHECK_FALSE(refusal_of(server, last, model));
      CHECK(server.is_complete());
    }
  }
}

TEST_CASE("parts: fields that cannot be are refused by name, under a good checksum") {
  const lamina::layout model = model_of({1, 1, 0, 1});
  const bytes good = part_of(model, 3, {0}, {0, 1});
  const bytes last = part_of(model, 3, {0}, {0, 1, 3}, true);
  const auto verdict_of = [&](bytes frame, const auto& change) {
    lamina::detail::wire_header header = lamina::detail::read_header(frame);
    change(header, frame[64], frame[65], frame);
    header.flags &= ~lamina::detail::flag_checksum;
    header.checksum = 0;
    lamina::detail::write_header(frame, header);
    std::error_code error;
    lamina::decode<float>(frame, model, error);
    std::error_code peeked;
    lamina::peek(frame, peeked);
    if (peeked) CHECK(peeked == error);
    return error;
  };
  using header = lamina::detail::wire_header;
  const auto refused = [&](const bytes& frame, frame_errc expected, const auto& change) {
    CHECK(verdict_of(frame, change) == expected);
  };
  const auto none = [](auto&&...) {};
  CHECK_FALSE(verdict_of(good, none));
  CHECK_FALSE(verdict_of(last, none));
  const auto set = [](std::byte& bits, int value) { bits = static_cast<std::byte>(value); };
  // "last" without "part", a number without "part", and what is reserved still.
  refused(whole(model, {}), frame_errc::nonzero_reserved, [](header& h, auto&...) { h.flags |= 4; });
  refused(whole(model, {}), frame_errc::nonzero_reserved, [](header& h, auto&...) { h.part = 1; });
  refused(good, frame_errc::nonzero_reserved, [](header& h, auto&...) { h.reserved = 1; });
  for (unsigned bit = 3; bit < 32; ++bit)
    refused(good, frame_errc::nonzero_reserved, [&](header& h, auto&...) { h.flags |= 1U << bit; });
  // A layer beyond L, an empty one, one that is present and not decided, one left over by the last part.
  refused(good, frame_errc::bad_decided, [&](header&, auto&, std::byte& d, auto&) { set(d, 0b10011); });
  refused(good, frame_errc::bad_decided, [&](header&, auto&, std::byte& d, auto&) { set(d, 0b00111); });
  refused(good, frame_errc::bad_decided, [&](header&, auto&, std::byte& d, auto&) { set(d, 0b00010); });
  refused(last, frame_errc::bad_decided, [&](header&, auto&, std::byte& d, auto&) { set(d, 0b00011); });
  refused(good, frame_errc::bad_decided, [](header& h, auto&...) { h.flags |= 4; });
  // A whole frame that says it is a part has decided nothing; and the padding begins behind both bitmaps.
  refused(whole(model, {0}), frame_errc::bad_decided, [](header& h, auto&...) { h.flags |= 2; });
  refused(good, frame_errc::bad_presence, [](header&, auto&, auto&, bytes& f) { f[66] = std::byte{1}; });
  refused(good, frame_errc::bad_presence, [](header& h, auto&...) {
    h.flags &= ~2U;
    h.part = 0;
  });
}

TEST_CASE("parts: two bitmaps may take another 64 bytes, and peek counts them") {
  for (const std::size_t layers : {1U, 256U, 257U, 512U, 513U, 600U}) {
    const lamina::layout model = model_of(std::vector<std::size_t>(layers, 1));
    const std::size_t expected = 64 + (2 * ((layers + 7) / 8) + 63) / 64 * 64;
    const bytes frame = part_of(model, 0, {}, {layers - 1});
    CHECK(frame.size() == expected);
    const lamina::frame_info info = lamina::peek(std::span(frame).first(lamina::peek_bytes));
    CHECK(info.size_bytes == expected);
    CHECK(info.is_part);
    CHECK_FALSE(info.ends_step);
    CHECK(lamina::decode<float>(frame, model).is_decided(layers - 1));
    std::vector<std::size_t> all(layers);
    for (std::size_t l = 0; l < layers; ++l) all[l] = l;
    const bytes largest = part_of(model, 7, all, all, true);
    CHECK(largest.size() == lamina::largest_frame_bytes<float>(model, payload_type::as_is, true));
    const lamina::frame_info info_of_last = lamina::peek(largest);
    CHECK(info_of_last.ends_step);
    CHECK(info_of_last.part == 7);
    for (std::size_t size = 0; size < frame.size(); ++size) {
      std::error_code error;
      lamina::decode<float>(std::span(frame).first(size), model, error);
      REQUIRE(error == frame_errc::truncated);
    }
  }
}

TEST_CASE("parts: a receiver of whole frames refuses a part by name") {
  const lamina::layout model = model_of({1});
  const bytes frame = part_of(model, 0, {0}, {0}, true);
  const auto view = lamina::decode<float>(frame, model);
  std::error_code error;
  lamina::expect(view, frame_kind::gradients, 1, error);
  CHECK(error == frame_errc::unexpected_part);
  lamina::expect_part(view, frame_kind::gradients, 1, error);
  CHECK_FALSE(error);
  lamina::expect_part(view, frame_kind::gradients, 2, error);
  CHECK(error == frame_errc::unexpected_step);
  const auto message =
      message_of<lamina::decode_error>([&] { lamina::expect(view, frame_kind::gradients, 1); });
  CHECK(contains(message, "step 1, part 0"));
}

TEST_CASE("parts: an encoder refuses what no reader would take") {
  const lamina::layout model = model_of({1, 0, 1});
  CHECK(contains(message_of<std::invalid_argument>([&] { part_of(model, 0, {0}, {2}); }), "'layer0'"));
  CHECK(contains(message_of<std::invalid_argument>([&] { part_of(model, 0, {2}, {2}, true); }), "last"));
  const lamina::layout other = model_of({1, 1});
  const lamina::selection decided(other);
  lamina::frame_encoder<float> encoder(model);
  CHECK_THROWS_AS(encoder.encode(
                      frame_kind::gradients, 1, 0, lamina::selection(model),
                      [](std::size_t) { return std::span<const float>(); }, payload_type::as_is,
                      lamina::frame_checksum::xxh3, lamina::frame_part{0, false, &decided}),
                  std::invalid_argument);
}

TEST_CASE("parts: an encoder of parts counts to 65,535 and no further") {
  const lamina::layout model = model_of({1});
  const lamina::selection none(model);
  lamina::part_encoder<float> encoder(model);
  const auto elements = [](std::size_t) { return std::span<const float>(); };
  const auto encode = [&](std::uint64_t step) -> const auto& {
    return encoder.encode(frame_kind::gradients, step, 0, none, none, false, elements);
  };
  for (std::size_t k = 0; k < 65536; ++k) encode(1);
  const bytes last = encoder.frame(65535).to_bytes();
  CHECK(lamina::decode<float>(last, model).part() == 65535);
  CHECK(contains(message_of<std::length_error>([&] { encode(1); }), "65536 parts"));
  CHECK(encoder.count() == 65536);
  CHECK_NOTHROW(encode(2));
  CHECK(encoder.count() == 1);
  CHECK_THROWS_AS((void)encoder.frame(1), std::out_of_range);
  CHECK_THROWS_AS((void)encoder.layers(1), std::out_of_range);
}

TEST_CASE("parts: frames stay as they are while those after them are encoded") {
  const lamina::layout model = model_of({130, 70, 5, 300});
  for (const payload_type type : {payload_type::as_is, payload_type::float16, payload_type::int8}) {
    compressor each(model, as_ready(0, type));
    std::mt19937 random(3);
    for (int step = 0; step < 3; ++step) {
      std::vector<const lamina::encoded_frame*> frames;
      std::vector<bytes> copies;
      for (std::size_t l = model.layers(); l-- > 0;) {
        each.accumulate(l, random_fractions<float>(random, model.sizes()[l]));
        frames.push_back(&(l > 0 ? each.encode_ready() : each.encode_rest()));
        copies.push_back(frames.back()->to_bytes());
      }
      for (std::size_t k = 0; k < frames.size(); ++k) CHECK(frames[k]->to_bytes() == copies[k]);
      each.commit();
    }
  }
}

namespace {

// What of a step arrives, and what its failure leaves.
enum class fate { arrives, is_sent_again, is_given_up, is_forgotten };

}  // namespace

TEMPLATE_TEST_CASE("parts: nothing is lost, whatever fails, within a budget and with parts of layers", "",
                   float, double) {
  using T = TestType;
  for (std::uint32_t seed = 1; seed <= 24; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const lamina::layout model = seed % 3 == 0 ? model_of({2 * 4096 + 5, 3, 0, 4097}) : random_model(random);
    compressor_options options = as_ready(0.7);
    if (seed % 3 == 0) options.part_elements = 4096;
    if (seed % 2 == 0) options.byte_budget = 0.3;
    if (seed % 5 == 0) options.max_age = 3;
    lamina::gradient_compressor<T> each(model, options);
    tensors<T> computed = zeros_like<T>(each.parts());
    tensors<T> received = computed;
    double sent = 0;
    for (int step = 1; step <= 20; ++step) {
      const auto what = static_cast<fate>(random() % 8 < 5 ? 0 : random() % 4);
      std::vector<bytes> arrived;
      const auto send = [&](const lamina::encoded_frame& frame) { arrived.push_back(frame.to_bytes()); };
      for (std::size_t l = model.layers(); l-- > 0;) {
        const auto gradient = random_integers<T>(random, model.sizes()[l]);
        each.accumulate(l, gradient);
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          const std::size_t part = each.cut().first(l) + i / 4096 * (options.part_elements > 0 ? 1 : 0);
          computed[part][i - (options.part_elements > 0 ? i / 4096 * 4096 : 0)] += gradient[i];
        }
        if (random() % 3 == 0) send(each.encode_ready());
      }
      if (what == fate::is_given_up) {
        each.abandon();
        continue;
      }
      send(each.encode_rest());
      if (what == fate::is_forgotten) continue;
      if (what == fate::is_sent_again) {  // to a server that was restarted, say
        arrived.clear();
        if (random() % 2 == 0) {
          send(each.encode_ready());
          CHECK_THROWS_AS(each.commit(), std::logic_error);  // the last part is still to come
        }
        send(each.encode_rest());
      }
      auto server = lamina::gradient_aggregator<T>::of_workers(each.parts(), 1, {.first_step = each.step()});
      for (const bytes& frame : arrived) server.add(lamina::decode<T>(frame, each.parts()));
      REQUIRE(server.is_complete());
      for (std::size_t part = 0; part < each.parts().layers(); ++part) {
        REQUIRE(server.arrived().is_sent(part) == each.is_sent(part));
        server.mean(part, [&](std::size_t begin, std::span<const T> mean) {
          for (std::size_t i = 0; i < mean.size(); ++i) received[part][begin + i] += mean[i];
        });
      }
      each.commit();
      sent += static_cast<double>(each.chosen().sent_elements());
      if (options.byte_budget && options.max_age == 0)
        REQUIRE(sent <= *options.byte_budget * static_cast<double>(model.elements()) * step);
      for (std::size_t part = 0; part < each.parts().layers(); ++part) {
        for (std::size_t i = 0; i < computed[part].size(); ++i)
          REQUIRE(received[part][i] + each.residual()[part][i] == computed[part][i]);
      }
    }
    REQUIRE(sent > 0);
  }
}

TEST_CASE("parts: clearing a layer when its part is encoded would lose what a failed step has sent") {
  // The compressor's own pieces, cleared too early or in time; the second step fails after its first part.
  const lamina::layout model = model_of({2, 2});
  const auto is_conserved = [&](bool clears_with_its_part) {
    const compressor_options options = as_ready(0);
    lamina::residual_accumulator<float> residual(model);
    lamina::layer_selector selector(model, options);
    lamina::part_encoder<float> encoder(model);
    tensors<float> received = zeros_like<float>(model);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const bool fails = step == 2;
      selector.begin(step);
      lamina::selection decided(model);
      std::vector<bytes> arrived;
      for (const std::size_t l : {1U, 0U}) {
        selector.decide_layer(l, residual.accumulate(l, std::vector<float>{1, 2}));
        decided.send(l);
        arrived.push_back(encoder
                              .encode(frame_kind::gradients, step, 0, selector.chosen(), decided, l == 0,
                                      [&](std::size_t layer) { return residual[layer]; })
                              .to_bytes());
        if (clears_with_its_part) residual.clear(l);
        if (fails) break;
      }
      if (fails) continue;
      for (const bytes& frame : arrived) {
        const auto view = lamina::decode<float>(frame, model);
        for (const std::size_t l : {0U, 1U}) {
          for (std::size_t i = 0; i < view.layer(l).size(); ++i) received[l][i] += view.layer(l)[i];
        }
      }
      selector.commit(step);
      for (const std::size_t l : {0U, 1U}) residual.clear(l);
    }
    return received[1][1] + residual[1][1] == 3 * 2;  // layer 1 had its gradient in all three steps
  };
  CHECK(is_conserved(false));
  CHECK_FALSE(is_conserved(true));
}

TEST_CASE(
    "parts: a resumed worker sends the parts that it would have sent, by the threshold of the step before") {
  std::mt19937 random(5);
  const lamina::layout model = model_of({4, 8, 2, 16});
  const cut at{backward_order(4), 0b0101};
  compressor each(model, as_ready(0.5));
  tensors<float> gradients;
  for (int step = 1; step <= 6; ++step) {
    gradients.clear();
    for (const std::size_t size : model.sizes()) gradients.push_back(random_fractions<float>(random, size));
    if (step == 6) break;
    step_in_parts(each, gradients, at, [](const auto&) {});
    each.commit();
  }
  const bytes saved = each.save();
  const auto parts_of = [&](compressor& one) {
    std::vector<bytes> parts;
    step_in_parts(one, gradients, at, [&](const auto& frame) { parts.push_back(frame.to_bytes()); });
    return parts;
  };
  compressor resumed(model, as_ready(0.5));
  resumed.load(saved);
  const std::vector<bytes> expected = parts_of(each);
  CHECK(parts_of(resumed) == expected);
  // The threshold of the current step is known at its end alone: by it other layers would have gone out.
  compressor at_end(model, [] {
    compressor_options options = as_ready(0.5);
    options.decide = decision_timing::at_end;
    return options;
  }());
  lamina::residual_accumulator<float> residual(model);
  lamina::layer_selector current(model, at_end.options());
  std::vector<double> values(model.layers());
  compressor before(model, as_ready(0.5));
  before.load(saved);
  for (std::size_t l = 0; l < model.layers(); ++l) {
    residual.accumulate(l, before.residual()[l]);
    values[l] = residual.accumulate(l, gradients[l]);
  }
  const lamina::selection& of_current = current.decide(6, values, values);
  CHECK_FALSE(std::ranges::equal(of_current.bitmap(), each.chosen().bitmap()));
}

TEST_CASE("parts: a call that does not belong there is refused by name, and sends nothing") {
  const lamina::layout model = model_of({1, 1});
  const auto refused = [](const auto& call, const char* named) {
    CHECK(contains(message_of<std::logic_error>(call), named));
  };
  for (const decision_timing timing : {decision_timing::at_end, decision_timing::ahead}) {
    compressor_options options;
    options.decide = timing;
    compressor each(model, options);
    each.accumulate_all(tensors<float>{{1}, {2}});
    refused([&] { each.encode_ready(); }, "encode_ready: options.decide is not as_ready");
    refused([&] { each.encode_rest(); }, "encode_rest: options.decide is not as_ready");
    std::error_code error;
    CHECK(each.encode_ready(error).size_bytes() == 0);
    CHECK(error == lamina::errc::out_of_order);
  }
  compressor each(model, as_ready());
  refused([&] { each.encode_ready(); }, "has no gradients yet");
  each.accumulate(1, std::vector<float>{2});
  refused([&] { each.encode_rest(); }, "'layer0'");
  std::error_code error;
  CHECK(each.encode_rest(error).size_bytes() == 0);
  CHECK(error == lamina::errc::no_gradient);
  each.encode_ready(error);
  CHECK_FALSE(error);
  refused([&] { each.commit(); }, "no frame to commit");
  each.accumulate(0, std::vector<float>{2});
  const compressor copy_before = each;
  CHECK(each.encode_rest(error).size_bytes() > 0);
  compressor copy = each;
  refused([&] { copy.commit(); }, "no frame to commit");  // its frames are the original's
  CHECK_NOTHROW(each.commit());
  refused([&] { each.commit(); }, "no frame to commit");
  refused([&] { each.encode_ready(); }, "has ended");
  refused([&] { each.encode_rest(); }, "has ended");
}

TEST_CASE("parts: a whole frame after parts holds all of them, and what is lost of parts stays") {
  const lamina::layout model = model_of({128, 64});
  for (const payload_type type : {payload_type::as_is, payload_type::int8}) {
    compressor each(model, as_ready(0, type));
    compressor other(model, as_ready(0, type));
    std::mt19937 random(8);
    for (int step = 0; step < 3; ++step) {
      const tensors<float> gradients = {random_fractions<float>(random, 128),
                                        random_fractions<float>(random, 64)};
      each.accumulate(1, gradients[1]);
      each.encode_ready();
      each.accumulate(0, gradients[0]);
      if (step == 0) each.encode_rest();
      other.accumulate_all(gradients);
      CHECK(each.encode().to_bytes() == other.encode().to_bytes());
      const bytes again = each.encode_rest().to_bytes();  // from the beginning, too
      CHECK(lamina::decode<float>(again, model).part() == 0);
      CHECK(lamina::decode<float>(again, model).sent_elements() == model.elements());
      if (step == 1) {
        each.commit();
        other.commit();
        continue;
      }
      each.encode_rest();
      lamina::delivery arrived(each.chosen(), 64);
      arrived.lose(0, 1);
      each.commit(arrived);
      other.commit(arrived);
      CHECK(each.save() == other.save());
    }
  }
}

TEST_CASE("parts of parameters: replicas are the server's at every cut, and each layer comes once") {
  const lamina::layout model = model_of(sizes);
  for (const payload_type type : {payload_type::as_is, payload_type::bfloat16}) {
    for (std::uint32_t after = 0; after < 64; ++after) {
      CAPTURE(after);
      std::mt19937 random(after + 77);
      lamina::parameter_publisher<float> publisher(model, 2, {.payload = type});
      tensors<float> parameters = zeros_like<float>(model);
      tensors<float> replica = zeros_like<float>(model);
      lamina::step_parts parts(model);
      for (std::uint64_t step = 1; step <= 4; ++step) {
        const lamina::selection updated = [&] {
          lamina::selection some(model);
          for (std::size_t l = 0; l < sizes.size(); ++l) {
            if (random() % 2 == 0) some.send(l);
          }
          return some;
        }();
        lamina::selection decided(model);
        std::vector<const lamina::encoded_frame*> frames;
        const auto layer = [&](std::size_t l) -> const auto& {
          return parameters[l];
        };
        for (std::size_t k = 0; k < sizes.size(); ++k) {
          const std::size_t l = sizes.size() - 1 - k;
          if (updated.is_sent(l)) {
            for (float& each : parameters[l]) each += static_cast<float>(random() % 16);
            lamina::selection one(model);
            one.send(l);
            publisher.update(one);
          }
          decided.send(l);
          if (((after >> k) & 1U) != 0)
            frames.push_back(&publisher.encode_ready_for_all(step, decided, layer));
        }
        publisher.commit_all();  // before the last part it commits nothing
        frames.push_back(&publisher.encode_rest_for_all(step, layer));
        std::vector<int> came(sizes.size());
        for (const auto* frame : frames) {
          const bytes copy = frame->to_bytes();
          const auto view = lamina::decode<float>(copy, model);
          lamina::expect_part(view, frame_kind::parameters, step);
          parts.add(view);
          for (std::size_t l = 0; l < sizes.size(); ++l) came[l] += view.apply_to(l, replica[l]) ? 1 : 0;
        }
        REQUIRE(parts.is_complete());
        parts.next_step();
        for (std::size_t l = 0; l < sizes.size(); ++l) {
          REQUIRE(came[l] == (sizes[l] > 0 && (step == 1 || updated.is_sent(l)) ? 1 : 0));
          REQUIRE(publisher.published_to_all().is_sent(l) == (came[l] == 1));
          REQUIRE(same_bits(replica[l], parameters[l]));
        }
        publisher.commit_all();
      }
    }
  }
}

TEST_CASE("parts of parameters: until the last has arrived all of it is sent again") {
  const lamina::layout model = model_of({1, 1, 1});
  const tensors<float> parameters = {{1}, {2}, {3}};
  const auto layer = [&](std::size_t l) -> const auto& {
    return parameters[l];
  };
  lamina::parameter_publisher<float> publisher(model, 1);
  (void)publisher.encode_for_all(1, layer);
  publisher.commit_all();
  publisher.update(layers_of(model, {0, 1}));
  (void)publisher.encode_ready_for_all(2, layers_of(model, {0}), layer);
  CHECK(publisher.published_to_all().sent_layers() == 1);
  // A layer that a part has published must not change any more in this step; others may.
  const auto message = message_of<std::logic_error>([&] { publisher.update(layers_of(model, {0})); });
  CHECK(contains(message, "'layer0'"));
  CHECK_NOTHROW(publisher.update(layers_of(model, {2})));
  (void)publisher.encode_rest_for_all(2, layer);
  CHECK(publisher.published_to_all().sent_layers() == 3);
  CHECK_NOTHROW(publisher.update(layers_of(model, {0})));  // between steps
  (void)publisher.encode_for_all(3, layer);
  CHECK(publisher.published_to_all().sent_layers() == 3);  // step 2 was never committed
  publisher.commit_all();
  publisher.update(layers_of(model, {1}));
  (void)publisher.encode_ready_for_all(4, layers_of(model, {1}), layer);
  publisher.forget(0);
  const bytes again = publisher.encode_ready_for_all(4, layers_of(model, {1}), layer).to_bytes();
  CHECK(lamina::decode<float>(again, model).part() == 0);
  (void)publisher.encode_rest_for_all(4, layer);
  CHECK(publisher.published_to_all().sent_layers() == 3);  // a worker that was restarted gets everything
}

TEST_CASE(
    "parts of parameters: a part that cannot be written leaves those before it, and may be tried again") {
  const lamina::layout model = model_of({1, 1});
  tensors<float> parameters = {{std::numeric_limits<float>::infinity()}, {2}};
  const auto layer = [&](std::size_t l) -> const auto& {
    return parameters[l];
  };
  lamina::parameter_publisher<float> publisher(model, 1, {.payload = payload_type::int8});
  const lamina::encoded_frame& first = publisher.encode_ready_for_all(1, layers_of(model, {1}), layer);
  const bytes copy = first.to_bytes();
  CHECK_THROWS_AS((void)publisher.encode_rest_for_all(1, layer), std::invalid_argument);
  CHECK(first.to_bytes() == copy);
  parameters[0][0] = 1;
  const bytes last = publisher.encode_rest_for_all(1, layer).to_bytes();
  const auto view = lamina::decode<float>(last, model);
  CHECK(view.part() == 1);
  CHECK(view.ends_step());
  CHECK_FALSE(view.is_dropped(0));
  CHECK(view.is_dropped(1));
}

TEST_CASE("parts: a step of which some parts came is not closed") {
  const lamina::layout model = model_of({1, 1});
  auto server = aggregator::of_workers(model, 2);
  const bytes of_0 = whole(model, {0}, 0);
  const bytes first = part_of(model, 0, {1}, {1}, false, 1);
  const bytes last = part_of(model, 1, {}, {0, 1}, true, 1);
  server.add(lamina::decode<float>(first, model));
  CHECK(contains(message_of<std::logic_error>([&] { server.close(); }), "sender 1 has sent 1 of its parts"));
  server.add(lamina::decode<float>(last, model));
  CHECK_NOTHROW(server.close());
  CHECK(server.is_resolved(0));
  CHECK(means_of(server, model)[1][0] == 1);
}
