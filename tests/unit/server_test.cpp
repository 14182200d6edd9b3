// SPDX-License-Identifier: MIT
#include "lamina/server.hpp"

#include <stdexcept>
#include <tuple>

#include "executions.hpp"
#include "frames.hpp"

namespace lamina_test::server_test {

using lamina::errc;
using lamina::frame_kind;

namespace {

using indices = std::vector<std::size_t>;
using ranges = std::vector<lamina::element_range>;

const indices lossy_sizes = {100, 7, 0, 1, 64, 33};

// Layers that are empty vectors are not sent.
template <class T>
bytes frame_of(const lamina::layout& model, const tensors<T>& layers, std::uint32_t sender,
               std::uint64_t step = 1, frame_kind kind = frame_kind::gradients, std::uint32_t run = 0,
               lamina::payload_type payload = lamina::payload_type::as_is) {
  lamina::selection chosen(model);
  for (std::size_t l = 0; l < layers.size(); ++l)
    if (!layers[l].empty()) chosen.send(l);
  return lamina_test::frame_of(chosen, layers,
                               {.kind = kind, .step = step, .sender = sender, .payload = payload}, run);
}

// Those of a frame; empty vectors for those that were dropped.
template <class T>
tensors<T> layers_of(const bytes& frame, const lamina::layout& model) {
  const auto view = lamina::decode<T>(frame, model);
  tensors<T> layers(model.layers());
  for (std::size_t l = 0; l < model.layers(); ++l) {
    if (view.is_dropped(l)) continue;
    layers[l].resize(model.sizes()[l]);
    view.restore(l, layers[l]);
  }
  return layers;
}

template <class T>
tensors<T> random_layers(std::mt19937& random, const lamina::layout& model) {
  tensors<T> layers;
  for (const std::size_t size : model.sizes())
    layers.push_back(random_fractions<T>(random, random() % 3 == 0 ? 0 : size));
  return layers;
}

// The mean of each layer, empty where none came; each element exactly once.
template <class T, class Execution = lamina::sequential>
tensors<T> update(lamina::server<T>& server, const Execution& execution = {}) {
  tensors<T> means;
  std::vector<std::vector<char>> seen;
  for (const std::size_t size : server.model().sizes()) {
    means.emplace_back(size);
    seen.emplace_back((size + 4095) / 4096);
  }
  server.update(
      [&](std::size_t layer, std::size_t begin, std::span<const T> mean) {
        ++seen[layer][begin / 4096];
        std::ranges::copy(mean, means[layer].begin() + static_cast<std::ptrdiff_t>(begin));
      },
      execution);
  for (std::size_t l = 0; l < means.size(); ++l) {
    const auto once = std::ranges::count(seen[l], char{1});
    REQUIRE((once == 0 || once == std::ssize(seen[l])));
    if (once == 0) means[l].clear();
  }
  return means;
}

// As server.hpp says it. The frames are in the order of their senders.
template <class T>
tensors<T> literal_mean(const lamina::layout& model, const std::vector<tensors<T>>& frames,
                        std::size_t workers) {
  tensors<T> mean(model.layers());
  for (const auto& layers : frames) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      mean[l].resize(std::max(mean[l].size(), layers[l].size()));
      for (std::size_t i = 0; i < layers[l].size(); ++i) mean[l][i] += layers[l][i];
    }
  }
  for (auto& layer : mean) {
    for (T& each : layer) each /= static_cast<T>(workers);
  }
  return mean;
}

// A server whose parameters are the numbers of the updates that wrote them. It looks into each reply.
struct serving {
  explicit serving(const lamina::server_options& options = {}, const indices& sizes = {2, 1, 0, 3})
      : model(model_of(sizes)), server(model, options) {
    for (const std::size_t size : sizes) parameters.emplace_back(size, 1.0F);
  }

  // A step in which all senders send these layers.
  void update(const indices& layers) {
    tensors<float> gradients(model.layers());
    for (const std::size_t l : layers) gradients[l].assign(model.sizes()[l], 1);
    for (std::uint32_t s = 0; s < server.senders(); ++s)
      REQUIRE_FALSE(server.add(frame_of(model, gradients, s, server.step(s))));
    ++updates;
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i)
        parameters[l][begin + i] = updates + static_cast<float>(begin + i) / 16;
    });
  }
  // The layers that a worker is brought.
  indices reply_and_commit(std::size_t worker) {
    const lamina::server_reply made = reply(worker);
    const bytes frame = made.to_bytes();
    const auto view = lamina::decode<float>(frame, model);
    CHECK(view.kind() == frame_kind::parameters);
    CHECK(view.step() == server.step(worker));
    indices found;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      CHECK(view.is_dropped(l) == made.sent().is_dropped(l));
      if (view.is_dropped(l)) continue;
      CHECK(same_bits(view.layer(l), parameters[l]));
      found.push_back(l);
    }
    server.commit(worker, made.clock());
    return found;
  }

  lamina::server_reply reply(std::size_t worker) { return server.reply(worker, parameters); }
  bool is_pending(std::size_t worker, const ranges& expected) const {
    return std::ranges::equal(server.pending(worker), expected);
  }
  // The worker has lost one chunk of 8 elements of layer 0.
  std::uint64_t lose(std::size_t worker, std::size_t chunk) {
    const auto lossy = reply(worker);
    lamina::delivery arrived(lossy.sent(), 8);
    arrived.lose(0, chunk);
    server.commit(worker, lossy.clock(), arrived);
    return lossy.clock();
  }

  lamina::layout model;
  tensors<float> parameters;
  lamina::server<float> server;
  float updates = 0;
};

}  // namespace

TEMPLATE_TEST_CASE("server: the mean is summed in the order of the senders", "", float, double) {
  const lamina::layout model = model_of({1, 4096 + 30, 0, 7, 9000});
  std::mt19937 random(93);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::size_t> nodes(1 + below(random, 5));
    for (std::size_t& workers : nodes) workers = round % 2 == 0 ? 1 : 1 + below(random, 4);
    lamina::server<TestType> server(model, {.nodes = nodes});
    for (std::uint64_t step = 1; step <= 3; ++step) {
      indices missing;
      indices order;
      std::vector<tensors<TestType>> sent;
      std::vector<bytes> frames(nodes.size());
      std::size_t workers = 0;
      for (std::size_t s = 0; s < nodes.size(); ++s) {
        if (random() % 4 == 0 && missing.size() + 1 < nodes.size()) {
          missing.push_back(s);
          continue;
        }
        workers += nodes[s];
        frames[s] = frame_of(model, random_layers<TestType>(random, model), static_cast<std::uint32_t>(s),
                             step, frame_kind::gradients, 0, payload_types[random() % payload_types.size()]);
        sent.push_back(layers_of<TestType>(frames[s], model));
        order.insert(order.begin() + static_cast<std::ptrdiff_t>(below(random, order.size() + 1)), s);
      }
      for (const std::size_t s : order) {
        REQUIRE_FALSE(server.complete());
        const auto error = server.add(std::move(frames[s]));
        REQUIRE_FALSE(error);
      }
      REQUIRE(server.missing() == missing);
      REQUIRE(server.complete() == missing.empty());
      const auto expected = literal_mean(model, sent, workers);
      for (std::size_t l = 0; l < model.layers(); ++l)
        REQUIRE(server.arrived().is_sent(l) == !expected[l].empty());
      REQUIRE(same_tensors(update(server), expected));
      REQUIRE(server.step() == step + 1);
      REQUIRE(server.arrived().sent_layers() == 0);
      REQUIRE(server.workers().size() == nodes.size());
    }
  }
}

TEST_CASE("server: the mean is bitwise the same through any execution") {
  constexpr std::size_t task = 65'536;
  const lamina::layout model = model_of({1, task - 1, task, task + 1, 3 * task + 4097});
  std::mt19937 random(94);
  std::vector<tensors<float>> sent;
  for (int s = 0; s < 3; ++s) sent.push_back(random_layers<float>(random, model));
  sent[0][4] = random_fractions<float>(random, 3 * task + 4097);
  const auto expected = literal_mean(model, sent, 3);
  std::vector<bytes> frames;
  for (std::uint32_t s = 0; s < 3; ++s) frames.push_back(frame_of(model, sent[s], s));
  const auto through = [&](const auto& execution) {
    lamina::server<float> server(model, {.workers = 3});
    for (const bytes& each : frames) REQUIRE_FALSE(server.add_view(each));
    return update(server, execution);
  };
  CHECK(same_tensors(through(lamina::sequential{}), expected));
  CHECK(same_tensors(through(in_reverse), expected));
  CHECK(same_tensors(through(in_threads_of(3)), expected));
}

TEST_CASE("server: asynchronous, each frame is a step of its own in the order of arrival, over all workers") {
  const lamina::layout model = model_of({1, 2});
  lamina::server<float> server(model, {.nodes = {3, 1}, .asynchronous = true});
  CHECK_FALSE(server.complete());
  for (const auto& [sender, step] : {std::pair{1U, 5U}, {0U, 1U}, {1U, 9U}}) {
    REQUIRE_FALSE(server.add(frame_of<float>(model, {{float(step)}, {}}, sender, step)));
    CHECK(server.complete());
    CHECK(server.step(sender) == step + 1);
  }
  std::vector<float> given;
  server.update([&](std::size_t layer, std::size_t, std::span<const float> mean) {
    CHECK(layer == 0);
    given.push_back(mean[0]);
  });
  CHECK(given == std::vector<float>{5.0F / 4, 1.0F / 4, 9.0F / 4});
  CHECK(std::ranges::equal(server.workers(), indices{0, 1}));
  CHECK_FALSE(server.complete());
}

TEST_CASE("server: a frame that is not expected is refused by its code, and changes nothing") {
  const lamina::layout model = model_of({1, 1});
  lamina::server<float> server(model, {.workers = 2, .first_step = 7, .run = 5});
  const auto of = [&](std::uint32_t sender, std::uint64_t step, frame_kind kind = frame_kind::gradients,
                      std::uint32_t run = 5, std::vector<float> first = {8}) {
    return frame_of<float>(model, {std::move(first), {}}, sender, step, kind, run);
  };
  const auto refused = [&](const bytes& frame) {
    const std::error_code error = server.add(frame);
    CHECK(server.add_view(frame) == error);
    CHECK(server.missing() == indices{1});
    CHECK(server.arrived().sent_elements() == 1);
    CHECK(server.step() == 7);
    return error;
  };
  REQUIRE_FALSE(server.add(of(0, 7)));
  CHECK(refused(of(1, 7, frame_kind::parameters)) == errc::unexpected_kind);
  CHECK(refused(of(1, 7, frame_kind::updates)) == errc::unexpected_kind);
  CHECK(refused(of(1, 7, frame_kind::gradients, 0)) == errc::other_run);
  CHECK(refused(of(1, 7, frame_kind::gradients, 6)) == errc::other_run);
  CHECK(refused(of(1, 6)) == errc::unexpected_step);
  CHECK(refused(of(1, 8)) == errc::unexpected_step);
  CHECK(refused(of(2, 7)) == errc::unknown_sender);
  CHECK(refused(of(~std::uint32_t{0}, 7)) == errc::unknown_sender);
  CHECK(refused(of(0, 7)) == errc::duplicate_frame);
  CHECK(refused(frame_of<float>(model_of({1, 2}), {{1}, {}}, 1, 7)) == errc::wrong_layout);

  REQUIRE_FALSE(server.add(of(1, 7, frame_kind::gradients, 5, {4})));
  CHECK(update(server)[0] == std::vector<float>{6});
  CHECK(server.add(of(0, 7)) == errc::duplicate_frame);  // one that comes again in the next step
  CHECK(server.add(of(0, 6)) == errc::unexpected_step);
}

TEST_CASE("server: any bytes are taken, or refused by name without effect") {
  const lamina::layout model = model_of({3, 4, 2, 0});
  const bytes good = frame_of<float>(model, {{1, 2, 3}, {}, {4, 5}, {}}, 1, 7);
  std::mt19937 random(95);
  lamina::server<float> server(model, {.workers = 2, .first_step = 7});
  for (int round = 0; round < 5000; ++round) {
    bytes damaged = good;
    damaged[8] = std::byte{lamina::detail::flag_last};  // no checksum, which would see it all
    std::fill_n(damaged.begin() + lamina::detail::checksum_offset, 8, std::byte{0});
    for (std::size_t hits = 1 + below(random, 3); hits > 0; --hits)
      damaged[below(random, damaged.size())] = static_cast<std::byte>(random() % 4);
    if (random() % 8 == 0) damaged.resize(below(random, damaged.size()));
    const std::error_code error = server.add(std::move(damaged));
    REQUIRE((!error || error.category() == lamina::category()));
    REQUIRE((server.missing().size() == 2 || !error));
    REQUIRE((server.arrived().sent_layers() == 0 || !error));
    if (!error) server = lamina::server<float>(model, {.workers = 2, .first_step = 7});
  }
}

TEST_CASE("server: options that make no server are refused by name") {
  const lamina::layout model = model_of({1});
  const auto refusal = [&](const lamina::server_options& options) {
    return message_of<std::invalid_argument>([&] { lamina::server<float> server(model, options); });
  };
  CHECK(contains(refusal({.workers = 0}), "at least one worker"));
  CHECK(contains(refusal({.nodes = {3, 0, 1}}), "nodes: sender 1"));
  lamina::server<float> server(model, {.workers = 2});
  CHECK_THROWS_AS(update(server), std::logic_error);  // no frame is there
  CHECK(server.step() == 1);
}

TEST_CASE("server: a model without layers goes through") {
  const lamina::layout model = model_of({});
  lamina::server<float> server(model);
  REQUIRE_FALSE(server.add(frame_of<float>(model, {}, 0)));
  update(server);
  CHECK(server.reply(0, tensors<float>()).sent().sent_layers() == 0);
}

TEST_CASE("server: workers that have seen the same share one frame, of several under way") {
  const auto payload = GENERATE(lamina::payload_type::as_is, lamina::payload_type::bfloat16);
  serving at({.workers = 3, .payload = payload});
  const lamina::server_reply first = at.reply(0);
  CHECK(&at.reply(1).frame() == &first.frame());
  if (payload == lamina::payload_type::as_is)  // it points into the parameters
    CHECK(first.segments()[3].data() == reinterpret_cast<const std::byte*>(at.parameters[3].data()));
  const bytes sent_first = first.to_bytes();
  at.server.commit(1, at.reply(1).clock());
  const lamina::server_reply other = at.reply(1);
  const bytes sent_other = other.to_bytes();
  CHECK(sent_other != sent_first);
  CHECK(&at.reply(2).frame() == &first.frame());
  at.server.commit(2, at.reply(2).clock());
  std::ignore = at.reply(2);
  CHECK(first.to_bytes() == sent_first);
  CHECK(other.to_bytes() == sent_other);
}

TEST_CASE("server: the options say how replies are written, and of which run") {
  const auto checksum = GENERATE(lamina::frame_checksum::none, lamina::frame_checksum::xxh3);
  serving at({.run = 5, .payload = lamina::payload_type::bfloat16, .frame_checksum = checksum});
  at.parameters[0] = {1.0F, 1.0F + 0x1p-20F};
  const bytes frame = at.reply(0).to_bytes();
  const auto view = lamina::decode<float>(frame, at.model);
  CHECK(view.run() == 5);
  std::vector<float> replica(2);
  CHECK(view.apply_to(0, replica));
  CHECK(replica == std::vector<float>{1, 1});  // rounded, and the server's is not
  const bool has_checksum = (frame[8] & std::byte{1}) != std::byte{0};
  CHECK(has_checksum == (checksum == lamina::frame_checksum::xxh3));
}

TEST_CASE("server: mistakes of a reply or a commit throw, and change nothing") {
  serving at({.workers = 2, .payload = lamina::payload_type::int8});
  at.server.commit(0, at.reply(0).clock());
  at.update({0, 1});
  tensors<float> wrong = at.parameters;
  wrong[1].resize(2);
  CHECK_THROWS_AS(at.server.reply(0, wrong), std::invalid_argument);
  CHECK_THROWS_AS(at.server.reply(0, tensors<float>(3)), std::invalid_argument);
  wrong = at.parameters;
  wrong[0][1] = std::numeric_limits<float>::quiet_NaN();
  CHECK_THROWS_AS(at.server.reply(0, wrong), std::invalid_argument);
  CHECK_THROWS_AS(at.server.commit(1, 1), std::invalid_argument);  // no reply to this worker
  const auto sent = at.reply(0).sent();
  CHECK(sent.sent_layers() == 2);  // nothing was committed
  const std::uint64_t clock = at.reply(0).clock();
  for (const std::uint64_t none : {std::uint64_t{0}, clock + 1, ~std::uint64_t{0}})
    CHECK_THROWS_AS(at.server.commit(0, none), std::invalid_argument);
  CHECK(message_of<std::out_of_range>([&] { (void)at.reply(2); }) == "worker 2 is none of the 2 senders");
  CHECK_THROWS_AS(at.server.commit(2, 1), std::out_of_range);
  CHECK_THROWS_AS(at.server.pending(2), std::out_of_range);
  CHECK_THROWS_AS(at.server.forget(2), std::out_of_range);
}

TEST_CASE("server: what throws in an update ends the step, so that no block is given twice") {
  const bool asynchronous = GENERATE(false, true);
  serving at({.workers = 2, .asynchronous = asynchronous});
  for (std::size_t w : {0, 1}) at.reply_and_commit(w);
  const tensors<float> gradients = {{1, 1}, {}, {}, {1, 1, 1}};
  for (std::uint32_t s = 0; s < 2; ++s) REQUIRE_FALSE(at.server.add(frame_of(at.model, gradients, s)));
  const auto failing = [&](std::size_t l, std::size_t, std::span<const float>) {
    if (l == 3) throw std::runtime_error("the optimizer failed");
    at.parameters[l].assign(2, 7);
  };
  CHECK_THROWS_WITH(at.server.update(failing), "the optimizer failed");
  CHECK_THROWS_AS(at.server.update(failing), std::logic_error);  // no frame is there
  // What was applied goes out, and the next step begins.
  CHECK(std::ranges::equal(at.server.workers(), indices{0, 1}));
  CHECK(at.reply_and_commit(1) == indices{0, 3});
  CHECK(at.server.step(0) == 2);
  at.update({1});
  CHECK(at.reply_and_commit(1) == indices{1});
}

TEST_CASE("server: workers and server agree on fragments") {
  const lamina::layout model = model_of({10'000, 5});
  tensors<float> parameters = {std::vector<float>(10'000), std::vector<float>(5)};
  tensors<float> replica = parameters;
  std::mt19937 random(96);
  lamina::server<float> server(model, {.fragment_elements = 4096, .run = 8});
  lamina::worker<float> worker(model, {.drop_ratio = 0.6, .fragment_elements = 4096, .run = 8});
  for (int t = 1; t <= 5; ++t) {
    auto step = worker.add(
        tensors<float>{random_fractions<float>(random, 10'000), random_fractions<float>(random, 5)});
    REQUIRE_FALSE(server.add(step.frame().to_bytes()));
    CHECK(std::ranges::equal(server.arrived().bitmap(), step.sent().bitmap()));
    CHECK(step.sent().sent_layers() < 4);
    step.commit();
    server.update([&](std::size_t l, std::size_t begin, std::span<const float> mean) {
      for (std::size_t i = 0; i < mean.size(); ++i) parameters[l][begin + i] -= mean[i];
    });
    const auto reply = server.reply(0, parameters);
    lamina::apply<float>(reply.to_bytes(), worker.tiles(), server.step(), replica, 8);
    server.commit(0, reply.clock());
    CHECK(replica == parameters);
  }
}

// Parameters that are lost on their way down: each worker is brought what it lacks, once.

TEST_CASE("repair: what is pending stays until a later reply has arrived") {
  serving at({.workers = 2, .asynchronous = true}, lossy_sizes);
  const auto before = at.reply(1);
  at.update({0, 1, 3, 4, 5});
  at.lose(1, 12);
  const ranges one = {{0, 96, 100}};
  CHECK(at.is_pending(0, {}));
  CHECK(at.is_pending(1, one));
  at.server.commit(1, before.clock());  // late
  CHECK(at.is_pending(1, one));
  const auto empty = at.reply(1);
  CHECK(empty.sent().sent_layers() == 0);
  CHECK(at.is_pending(1, one));
  at.server.commit(1, empty.clock());  // with the repairs that were sent with it
  CHECK(at.is_pending(1, {}));

  at.update({0, 1, 3, 4, 5});
  const std::uint64_t clock = at.lose(1, 2);
  at.update({0, 1, 3, 4, 5});
  at.parameters[0].resize(3);
  CHECK_THROWS_AS(at.reply(1), std::invalid_argument);
  CHECK_THROWS_AS(at.server.commit(1, clock, lamina::delivery(everything(at.model), 8)),
                  std::invalid_argument);
  at.parameters[0].resize(100);
  CHECK(at.is_pending(1, {{0, 16, 24}}));
  CHECK(at.reply(1).sent().is_sent(0));
}

TEST_CASE("repair: of a worker that was forgotten nothing is pending, nor of a reply from before") {
  serving at({.asynchronous = true}, lossy_sizes);
  at.lose(0, 0);
  at.update({0, 1, 3, 4, 5});
  const auto before = at.reply(0);
  const std::uint64_t clock = before.clock();
  const lamina::selection sent = before.sent();
  at.server.forget(0);
  CHECK(at.is_pending(0, {}));
  lamina::delivery arrived(sent, 8);
  arrived.lose(0, 0);
  at.server.commit(0, clock, arrived);
  CHECK(at.is_pending(0, {}));
  CHECK(at.reply(0).sent().sent_elements() == at.model.elements());
}

TEST_CASE("repair: the delivery of another reply is refused by name and changes nothing") {
  serving at({.workers = 2, .asynchronous = true, .payload = lamina::payload_type::int8}, lossy_sizes);
  const lamina::delivery right(everything(at.model), 64);
  CHECK_THROWS_AS(at.server.commit(1, 1, right), std::invalid_argument);  // there was no reply
  const std::uint64_t clock = at.reply(1).clock();
  CHECK_THROWS_AS(at.server.commit(0, clock, right), std::invalid_argument);
  CHECK_THROWS_AS(at.server.commit(2, clock, right), std::out_of_range);
  using Catch::Matchers::Contains;
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(some_of(at.model, {0}), 64)),
                    Contains("the delivery is of another frame"));
  CHECK_THROWS_WITH(at.server.commit(1, clock, lamina::delivery(everything(at.model), 32)),
                    Contains("a multiple of 64 elements, these have 32"));
  CHECK(at.reply(1).sent().sent_elements() == at.model.elements());  // nothing was committed
  at.server.commit(1, clock, right);
  CHECK(at.reply(1).sent().sent_elements() == 0);
}

TEST_CASE("server: a worker takes the reply of the step that comes next, between steps, and no other") {
  const lamina::layout model({{"embedding", {400, 16}}, {"head", {10}}});
  const tensors<float> parameters = {std::vector<float>(6400, 0.5F), std::vector<float>(10, 2)};
  lamina::server<float> server(model, {.run = 7});
  const auto reply = server.reply(0, parameters).to_bytes();
  tensors<float> replica = {std::vector<float>(6400), std::vector<float>(10)};
  const tensors<float> before = replica;

  lamina::worker<float> of_another_run(model);
  REQUIRE_THROWS_AS(of_another_run.apply(reply, replica), lamina::decode_error);
  lamina::worker<float> worker(model, {.run = 7});
  worker.skip_to(2);
  REQUIRE_THROWS_AS(worker.apply(reply, replica), lamina::decode_error);
  lamina::worker<float> in_time(model, {.run = 7});
  {
    auto step = in_time.begin();
    REQUIRE_THROWS_AS(in_time.apply(reply, replica), std::logic_error);
  }
  REQUIRE(replica == before);
  REQUIRE(in_time.apply(reply, replica) == model.elements());
  REQUIRE(replica == parameters);
}

TEST_CASE("apply: what does not fit is refused before anything is written") {
  const lamina::layout model = model_of({3, 10'000, 0, 5});
  const tensors<float> parameters = {
      std::vector<float>(3, 1), std::vector<float>(10'000, 2), {}, {3, 3, 3, 3, 3}};
  const bytes frame = frame_of(model, parameters, 0, 1, frame_kind::parameters);
  const lamina::tiling whole(model);
  tensors<float> mine = {std::vector<float>(3), std::vector<float>(10'000), {}, std::vector<float>(4)};
  const auto refused = [&] { lamina::apply<float>(frame, whole, 1, mine); };
  CHECK_THROWS_AS(refused(), std::invalid_argument);  // the last has 4 elements
  mine.pop_back();
  CHECK_THROWS_AS(refused(), std::invalid_argument);
  mine.emplace_back(5);
  CHECK_THROWS_AS(lamina::apply<float>(frame, whole, 2, mine), lamina::decode_error);
  CHECK_THROWS_AS(lamina::apply<float>(frame, whole, 1, mine, 7), lamina::decode_error);
  CHECK_THROWS_AS(lamina::apply<float>(frame, lamina::tiling(model, 4096), 1, mine), lamina::decode_error);
  CHECK(mine[0] == std::vector<float>(3));
  CHECK(lamina::apply<float>(frame, whole, 1, mine) == 10'008);
  CHECK(mine == parameters);
}

}  // namespace lamina_test::server_test
