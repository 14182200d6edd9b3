// SPDX-License-Identifier: MIT
#include <memory_resource>
#include <stdexcept>
#include <tuple>

#include "counted_allocations.hpp"
#include "frames.hpp"
#include "lamina/detail/residual_block.hpp"
#include "lamina/lamina.hpp"
#include "lamina/local/local.hpp"

namespace lamina_test::allocation_test {

TEMPLATE_TEST_CASE("allocation: a worker allocates nothing after its first step", "", float, double) {
  std::mt19937 random(301);
  std::vector<std::size_t> sizes(161);
  for (std::size_t& size : sizes) size = below(random, 3000);
  const lamina::layout model = model_of(sizes);
  const lamina::worker_options options = GENERATE(
      lamina::worker_options{.drop_ratio = 0.8}, lamina::worker_options{.drop_ratio = 0.8, .search_every = 3},
      lamina::worker_options{.threshold = 2}, lamina::worker_options{.send_budget = 0.2});
  lamina::worker<TestType> worker(model, options);
  std::vector<TestType> packed;
  packed.reserve(model.elements());
  for (int t = 1; t <= 12; ++t) {
    const auto gradients = random_gradients<TestType>(random, model);
    const long count = allocations_of([&] {
      if (t % 3 == 0) {  // planned, and one by one
        auto step = worker.begin(worker.plan());
        for (std::size_t l = 0; l < sizes.size(); ++l) step.add(l, gradients[l]);
        step.frame();
        step.commit();
      } else {
        auto step = worker.add(gradients);
        step.select();
        step.pack(packed);
        step.frame();
        if (t % 4 != 0) step.commit();
      }
    });
    CHECK((count > 0) == (t == 1));
  }
}

// No frame is built on the way, whose bytes nobody reads.
TEST_CASE("allocation: packing in half the bytes takes no memory, in the first step as well") {
  const lamina::layout model = model_of({5000, 64, 9000});
  lamina::worker<float> worker(model, {.drop_ratio = 0, .payload = lamina::payload_type::bfloat16});
  const std::vector<std::vector<float>> gradients = {
      std::vector<float>(5000, 1.001F), std::vector<float>(64, 1.001F), std::vector<float>(9000, 1.001F)};
  auto step = worker.add(gradients);
  step.select();
  std::vector<lamina::bfloat16> packed(model.elements());
  CHECK(bytes_of([&] { step.pack(std::span(packed)); }) == 0);
  // What the collective writes over it does not count.
  std::ranges::fill(packed, lamina::bfloat16{0x4000});
  step.commit();
  CHECK(worker.residual()[0][0] == 1.001F - 1.0F);
}

TEST_CASE("allocation: the commit of a frame that arrived in part allocates nothing after the first") {
  const lamina::layout model = model_of({5000, 64, 9000, 1});
  for (const auto payload : all_payload_types) {
    for (const double momentum : {0.0, 0.5}) {
      lamina::worker<float> worker(model, {.drop_ratio = 0, .momentum = momentum, .payload = payload});
      tensors<float> gradients;
      for (const std::size_t size : model.sizes()) gradients.emplace_back(size, 1.0F);
      for (int t = 1; t <= 3; ++t) {
        auto step = worker.add(gradients);
        step.frame();
        lamina::delivery arrived(step.sent(), 64);
        for (std::size_t chunk = 0; chunk < arrived.chunks(0); chunk += 3) arrived.lose(0, chunk);
        arrived.lose(1, 0);
        const long count = allocations_of([&] { step.commit(arrived); });
        if (t > 1 || payload == lamina::payload_type::as_is) CHECK(count == 0);
      }
    }
  }
}

TEST_CASE("allocation: without memory a step stays as it is, and goes on when there is some") {
  const lamina::layout model = model_of({4000, 10, 500});
  const lamina::worker_options options{
      .send_budget = 0.999, .momentum = 0.5, .payload = lamina::payload_type::int8};
  const tensors<float> gradients = {std::vector<float>(4000, 1), std::vector<float>(10, 1.001F),
                                    std::vector<float>(500, 2.001F)};
  lamina::worker<float> worker(model, options);
  lamina::worker<float> expected(model, options);
  const bytes frame = send(expected, gradients);
  auto step = worker.add(gradients);
  const auto fails_without_memory = [](const auto& call) {
    granted = 0;
    const bool has_thrown = throws<std::bad_alloc>(call);
    granted = std::numeric_limits<long>::max();
    return has_thrown;
  };
  CHECK(fails_without_memory([&] { step.frame(); }));
  CHECK(worker.steps() == 1);
  CHECK(step.frame().to_bytes() == frame);
  CHECK(!fails_without_memory([&] { step.commit(); }));
  CHECK(worker.save() == expected.save());
}

TEST_CASE("allocation: a server allocates nothing after its first steps") {
  const auto payload = GENERATE(lamina::payload_type::as_is, lamina::payload_type::bfloat16);
  const bool asynchronous = GENERATE(false, true);
  const lamina::layout model = model_of(std::vector<std::size_t>(20, 5000));
  const tensors<float> parameters(20, std::vector<float>(5000, 1));
  lamina::server<float> server(model, {.workers = 2, .asynchronous = asynchronous, .payload = payload});
  for (std::uint64_t step = 1; step <= 4; ++step) {
    std::vector<bytes> frames;
    for (const std::uint32_t s : {0U, 1U})
      frames.push_back(frame_of(everything(model), parameters, {.step = step, .sender = s}));
    const long count = allocations_of([&] {
      for (auto& each : frames) std::ignore = server.add(std::move(each));
      server.update([](std::size_t, std::size_t, std::span<const float>) {});
      for (const std::size_t w : server.workers()) {
        const auto reply = server.reply(w, parameters);
        if (w == 0) server.commit(w, reply.clock());  // the other's is lost
      }
    });
    if (step > 2) CHECK(count == 0);
    CHECK(server.step(0) == step + 1);
  }
}

// Of docs/cpp/operations.md: once everything has been sent, in bytes an element.
TEST_CASE("allocation: what workers keep") {
  constexpr std::size_t elements = 1 << 20;
  const lamina::layout model({{"weight", {elements}}});
  const std::vector<float> numbers(elements, 1), others(elements, 2);
  const auto kept = [&](auto&& made) { return static_cast<double>(bytes_of(made)) / elements; };
  const auto worker = [&](lamina::worker_options options) {
    options.drop_ratio = 0;
    return kept([&] {
      lamina::worker<float> made(model, options);
      for (int t = 0; t < 2; ++t) {
        auto step = made.add(std::array{std::span(numbers)});
        step.frame();
        step.commit();
      }
    });
  };
  const auto delta = [&](lamina::payload_type payload) {
    return kept([&] {
      lamina::local_delta<float> compressor(model, {.drop_ratio = 0, .payload = payload});
      compressor.observe_all(std::array{std::span(numbers)}, std::array{std::span(others)});
      compressor.select();
      compressor.encode(std::array{std::span(numbers)}, std::array{std::span(others)});
      compressor.commit();
    });
  };
  const auto outer = [&](const lamina::outer_optimizer_options& options) {
    return kept([&] { lamina::outer_optimizer<float> step(model, options); });
  };
  using enum lamina::payload_type;
  const auto about = [](double bytes) { return Approx(bytes).margin(0.01); };
  CHECK(worker({}) == about(4));
  CHECK(worker({.momentum = 0.9}) == about(4 + 4));
  // The fragments of the frame, which lie rounded in the encoder.
  CHECK(worker({.payload = bfloat16}) == about(4 + 2));
  CHECK(worker({.fragment_elements = 4096, .payload = bfloat16}) == about(4 + 2).margin(0.1));
  CHECK(worker({.payload = int8}) == about(4 + 1 + 1.0 / 64));
  CHECK(worker({.payload = int4}) == about(4 + 0.5 + 1.0 / 64));
  CHECK(delta(as_is) == about(4));
  CHECK(delta(int4) == about(4 + 0.5 + 1.0 / 64));
  CHECK(outer({}) == about(0));
  CHECK(outer({.momentum = 0.5}) == about(4));
  CHECK(outer({.momentum = 0.5, .payload = int4}) == about(4 + 4));
}

TEST_CASE("allocation: decode allocates by the layout, not by what the bytes claim, and says if it cannot") {
  const lamina::layout model = model_of({3, 4});
  const bytes good = frame_of<float>(lamina::selection(model), {});
  std::error_code error;
  for (std::size_t at = 0; at < good.size(); ++at) {
    bytes bad = good;
    bad[at] = std::byte{0xff};
    CHECK(allocations_of([&] { lamina::decode<float>(bad, model, error); }) <= 2);
  }
  granted = 0;
  const auto view = lamina::decode<float>(good, model, error);
  granted = std::numeric_limits<long>::max();
  CHECK(error == std::errc::not_enough_memory);
  CHECK(view.layers() == 0);
}

TEST_CASE("buffer: the memory of a resource is not touched, and goes back to it; too much is refused") {
  // Hands out bytes of 0xa5, and keeps what was asked for, and given back, last.
  struct counting_resource final : std::pmr::memory_resource {
    void* do_allocate(std::size_t bytes, std::size_t alignment) override {
      asked = {::operator new (bytes, std::align_val_t{alignment}), bytes, alignment};
      ++allocations;
      return std::memset(std::get<0>(asked), 0xa5, bytes);
    }
    void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) noexcept override {
      returned = {memory, bytes, alignment};
      ::operator delete (memory, std::align_val_t{alignment});
    }
    bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

    std::size_t allocations = 0;
    std::tuple<void*, std::size_t, std::size_t> asked, returned;  // bytes and alignment
  };
  using lamina::detail::buffer;
  counting_resource resource;
  {
    const buffer<double> memory(1000, &resource);
    CHECK(std::get<1>(resource.asked) == 8000);
    CHECK(std::get<2>(resource.asked) == 64);
    const auto bytes = std::as_bytes(std::span(memory));
    CHECK(std::ranges::all_of(bytes, [](std::byte each) { return each == std::byte{0xa5}; }));
    CHECK(buffer<float>(0, &resource).size() == 0);
  }
  CHECK((resource.returned == resource.asked));
  constexpr std::size_t huge = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_AS(buffer<double>(huge / 8 + 1, &resource), std::length_error);  // its bytes would wrap round
  CHECK(resource.allocations == 1);
}

}  // namespace lamina_test::allocation_test
