// SPDX-License-Identifier: MIT
// Several frames of a step, frames that may repeat an earlier step, and the caller's own bytes in a frame.
#include <stdexcept>

#include "frames.hpp"
#include "lamina/server.hpp"

namespace lamina_test::frames_of_a_step_test {

namespace {

const lamina::layout model({{"a", {3}}, {"b", {2}}, {"nothing", {0}}, {"c", {4}}});

tensors<float> gradients(float of_all) {
  tensors<float> all;
  for (const std::size_t elements : model.sizes()) all.emplace_back(elements, of_all);
  return all;
}

// A frame of these layers, whose elements are all `value`.
bytes frame(const lamina::frame_header& header, const std::vector<std::size_t>& layers, float value = 1) {
  return frame_of(some_of(model, layers), gradients(value), header);
}

// The first element of each layer's mean; 0 for one that did not arrive.
std::vector<float> update(lamina::server<float>& server) {
  std::vector<float> means(model.layers());
  server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
    if (begin == 0) means[layer] = mean[0];
  });
  return means;
}

}  // namespace

TEST_CASE("frames of a step: what is ready goes first, and the last frame ends the step") {
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  lamina::server<float> server(model);
  auto step = worker.begin(some_of(model, {0, 1, 3}));
  step.add(3, std::vector<float>(4, 1.0F));
  const bytes first = step.frame(some_of(model, {3}), false).to_bytes();
  REQUIRE_THROWS_AS(step.frame(some_of(model, {0}), false), std::logic_error);  // it has no gradient yet
  step.add(0, std::vector<float>(3, 2.0F));
  step.add(1, std::vector<float>(2, 3.0F));
  REQUIRE_THROWS_AS(step.frame(some_of(model, {3}), false), std::logic_error);  // it was in a frame
  const bytes second = step.frame(some_of(model, {0, 1}), true).to_bytes();
  step.commit();

  const auto view = lamina::decode<float>(first, model);
  CHECK((view.sequence() == 0 && !view.is_last() && view.sent_elements() == 4));
  REQUIRE_FALSE(server.add(first));
  REQUIRE_THROWS_AS(update(server), std::logic_error);
  REQUIRE_FALSE(server.add(second));
  CHECK(update(server) == std::vector<float>{2, 3, 0, 1});
}

TEST_CASE("frames of a step: a layer that was in a frame takes no further gradient") {
  lamina::worker<float> worker(model);
  auto step = worker.begin(some_of(model, {0, 3}));
  step.add(3, std::vector<float>(4, 1.0F));
  (void)step.frame(some_of(model, {3}), false);
  REQUIRE_THROWS_AS(step.add(3, std::vector<float>(4, 1.0F)), std::logic_error);
  REQUIRE_THROWS_AS(step.add(gradients(1)), std::logic_error);
  step.add(0, std::vector<float>(3, 1.0F));
  step.add(0, std::vector<float>(3, 1.0F));  // not sent yet
  step.skip(1);
  const bytes last = step.frame(some_of(model, {0}), true).to_bytes();
  CHECK(lamina::decode<float>(last, model).layer(0)[0] == 2);
}

TEST_CASE("frames of a step: an update without a sender's last frame takes none of its frames") {
  lamina::server<float> server(model, {.workers = 2});
  REQUIRE_FALSE(server.add(frame({.sender = 0, .is_last = false}, {0, 1})));
  REQUIRE_FALSE(server.add(frame({.sender = 1}, {3})));
  CHECK(update(server) == std::vector<float>{0, 0, 0, 1});
  // Sender 0 has not committed, and comes with the next step.
  REQUIRE(server.add(frame({.sender = 0, .sequence = 1}, {3})) == lamina::errc::unexpected_step);
  REQUIRE_FALSE(server.add(frame({.step = 2, .sender = 0}, {0})));
}

TEST_CASE("frames of a step: asynchronous, a step that is not complete waits for its last frame") {
  lamina::server<float> server(model, {.workers = 2, .asynchronous = true});
  REQUIRE_FALSE(server.add(frame({.step = 5, .sender = 0, .is_last = false}, {0}, 2)));
  REQUIRE_FALSE(server.complete());
  REQUIRE_FALSE(server.add(frame({.step = 9, .sender = 1}, {3}, 2)));
  CHECK(update(server) == std::vector<float>{0, 0, 0, 1});
  REQUIRE_FALSE(server.complete());
  REQUIRE_FALSE(server.add(frame({.step = 5, .sender = 0, .sequence = 1}, {1}, 2)));
  CHECK(update(server) == std::vector<float>{1, 1, 0, 0});
  // Its next step counts its frames anew.
  REQUIRE_FALSE(server.add(frame({.step = 6, .sender = 0, .is_last = false}, {0}, 2)));
  REQUIRE_FALSE(server.add(frame({.step = 6, .sender = 0, .sequence = 1}, {3}, 2)));
  CHECK(update(server) == std::vector<float>{1, 0, 0, 1});
}

TEST_CASE("a frame whose fate is unknown is not counted twice") {
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  lamina::server<float> server(model, {.asynchronous = GENERATE(true, false)});
  bytes lost_or_not;
  {
    auto step = worker.add(gradients(1));
    lost_or_not = step.frame().to_bytes();
  }  // nobody knows whether it has arrived
  auto step = worker.add(gradients(2));
  const bytes both = step.frame().to_bytes();
  CHECK(step.number() == 1);
  SECTION("it has: 1 and 3 of 3 would count 4") {
    REQUIRE_FALSE(server.add(lost_or_not));
    REQUIRE(server.add(both) == lamina::errc::duplicate_frame);
    CHECK(update(server)[0] == 1);
    REQUIRE(server.add(both) == lamina::errc::duplicate_frame);  // also when the server has gone on
  }
  SECTION("it has not") {
    REQUIRE_FALSE(server.add(both));
    REQUIRE(server.add(lost_or_not) == lamina::errc::duplicate_frame);
    CHECK(update(server)[0] == 3);
    step.commit();
    auto next = worker.add(gradients(4));
    REQUIRE_FALSE(server.add(next.frame().to_bytes()));
    CHECK(update(server)[0] == 4);
  }
}

TEST_CASE("a worker that a server went on without comes with what it has not sent") {
  lamina::worker<float> worker(model, {.drop_ratio = 0, .sender = 1});
  lamina::worker<float> other(model, {.drop_ratio = 0});
  lamina::server<float> server(model, {.workers = 2});
  bytes late;
  {
    auto own = worker.add(gradients(1));
    late = own.frame().to_bytes();
  }
  {
    auto step = other.add(gradients(8));
    REQUIRE_FALSE(server.add(step.frame().to_bytes()));
    step.commit();
  }
  CHECK(update(server)[0] == 8);
  REQUIRE(server.add(late) == lamina::errc::unexpected_step);
  worker.skip_to(server.step());
  REQUIRE_THROWS_AS(worker.skip_to(1), std::invalid_argument);
  auto own = worker.add(gradients(2));
  CHECK(own.number() == 2);
  REQUIRE_FALSE(server.add(own.frame().to_bytes()));
  CHECK(update(server)[0] == 3);
}

TEST_CASE("user bytes travel in a frame, up to 64 of them") {
  lamina::worker<float> worker(model, {.drop_ratio = 0});
  auto step = worker.add(gradients(1));
  const double loss = 0.25;
  const bytes frame = step.frame(std::as_bytes(std::span(&loss, 1))).to_bytes();
  const auto view = lamina::decode<float>(frame, model);
  REQUIRE(view.user().size() == sizeof loss);
  CHECK(std::memcmp(view.user().data(), &loss, sizeof loss) == 0);
  CHECK(view.layer(3)[3] == 1);
  CHECK(step.frame(bytes(63, std::byte{7})).size_bytes() ==
        64 + 64 + 9 * sizeof(float));  // and a byte of presence
  CHECK(step.frame(bytes(64, std::byte{7})).size_bytes() == 64 + 128 + 9 * sizeof(float));
  REQUIRE_THROWS_AS(step.frame(bytes(65)), std::invalid_argument);
  REQUIRE_FALSE(lamina::server<float>(model).add(frame));
}

}  // namespace lamina_test::frames_of_a_step_test
