// SPDX-License-Identifier: MIT
// Models beyond 2^31 and 2^32 elements. Sizes are given without memory, or with memory that is only
// addressed; the test "[.large]" is hidden and takes what it says: lamina_tests "[large]", 17 GiB.
#include <cstdio>
#include <memory>

#include "frames.hpp"
#include "lamina/lamina.hpp"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace lamina_test::size_test {

constexpr std::size_t two_31 = std::size_t{1} << 31U;
constexpr std::size_t two_32 = std::size_t{1} << 32U;

TEST_CASE("sizes: a layer beyond 2^32 elements is cut into fragments, and these into blocks") {
  const std::size_t elements = 2 * two_32 + 4097;
  const lamina::layout model({{"a", {7}}, {"b", {elements}}, {"c", {5}}});
  for (const std::size_t size : {two_31, two_32, two_32 + 4096}) {
    const lamina::tiling cut(model, size);
    const std::size_t fragments = elements / size + 1;
    REQUIRE(cut.fragments().layers() == fragments + 2);
    CHECK(cut.fragments().elements() == model.elements());
    for (std::size_t k = 0; k < fragments; ++k) {
      CHECK(cut.layer_of(1 + k) == 1);
      CHECK(cut.begin(1 + k) == k * size);
      CHECK(cut.fragments().offset(1 + k) == 7 + k * size);
    }
    CHECK(cut.fragments().sizes()[fragments] == elements % size);
    CHECK(cut.layer_of(fragments + 1) == 2);
  }

  const lamina::detail::layer_blocks blocks(model);
  const std::size_t of_b = elements / 4096 + 1;
  CHECK(blocks.count() == of_b + 2);
  CHECK(blocks.extent_of(1, of_b) == std::pair(elements - 1, std::size_t{1}));
  std::size_t next = 0;
  std::size_t count = 0;
  blocks.for_each_run(0, 3, lamina::sequential{}, [&](std::size_t layer, std::size_t block, std::size_t end) {
    for (; block < end; ++block) {
      const auto [begin, size] = blocks.extent_of(layer, block);
      if (model.offset(layer) + begin != next) FAIL("block " << block << " begins elsewhere");
      next += size;
      ++count;
    }
  });
  CHECK(next == model.elements());
  CHECK(count == blocks.count());
}

TEST_CASE("sizes: the decision counts elements beyond 2^32") {
  const std::vector<std::size_t> sizes = {two_32 + 1, two_31, 3 * two_32, 10, two_31 + 1};
  const std::vector<double> values = {3, 1, 5, 4, 2};
  const lamina::layout model = model_of(sizes);
  for (const double ratio : {0.05, 0.1, 0.2, 0.3, 0.5, 0.9}) {
    const lamina::tiling cut(model);
    lamina::selector selector(cut, {.drop_ratio = ratio});
    const lamina::selection& chosen = selector.decide(1, values);
    CHECK(selector.threshold() == literal_algorithm_1(values, sizes, ratio));
    CHECK(static_cast<double>(model.elements() - chosen.sent_elements()) <=
          ratio * static_cast<double>(model.elements()));
  }
  const lamina::tiling cut(model);
  lamina::selector by_budget(cut, {.send_budget = 0.61});
  CHECK(by_budget.decide(1, values).sent_elements() == 3 * two_32 + 10);
  by_budget.commit(1);
  CHECK(by_budget.remember(1).allowance ==
        Approx(0.61 * static_cast<double>(model.elements()) - 3.0 * 4294967296.0 - 10));
}

// In 64 bits the bytes of these layers come to a few hundred, one by one or together: the frame below has them.
TEMPLATE_TEST_CASE("sizes: a residual whose bytes cannot be counted is refused", "", float, double) {
  const std::size_t whole = std::numeric_limits<std::size_t>::max() / sizeof(TestType) + 1;
  for (const auto& sizes : {std::vector{whole + 64}, std::vector{whole / 2 + 64, whole / 2 + 64}})
    CHECK_THROWS_AS(lamina::residual_accumulator<TestType>(model_of(sizes)), std::length_error);
}

// Not under the thread sanitizer, which keeps a shadow of all that is mapped and takes minutes over it.
#if __has_include(<sys/mman.h>) && defined(MAP_NORESERVE) && !defined(__SANITIZE_THREAD__)
namespace {

// Addresses of zeros, which take memory where they are written; nullptr where the system gives none.
std::byte* sparse_addresses(std::size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return nullptr;
#if defined(MADV_HUGEPAGE)
  madvise(at, bytes, MADV_HUGEPAGE);  // or reading all of it takes a page of tables for each two megabytes
#endif
  return static_cast<std::byte*>(at);
}

class sparse_memory {
 public:
  explicit sparse_memory(std::size_t bytes) : begin_(sparse_addresses(bytes)), size_(bytes) {}
  ~sparse_memory() {
    if (begin_ != nullptr) munmap(begin_, size_);
  }
  sparse_memory(const sparse_memory&) = delete;
  sparse_memory& operator=(const sparse_memory&) = delete;

  bool exists() const { return begin_ != nullptr; }
  std::byte* data() const { return begin_; }
  std::span<std::byte> first(std::size_t count) const { return {begin_, count}; }

 private:
  std::byte* begin_;
  std::size_t size_;
};

}  // namespace

TEMPLATE_TEST_CASE("sizes: a layer beyond 2^32 elements is read where its elements lie", "", float, double) {
  const std::size_t elements = two_32 + 4097;
  const lamina::layout model({{"before", {3}}, {"huge", {elements}}, {"after", {70}}});
  for (const auto type : payload_types) {
    CAPTURE(static_cast<int>(type));
    std::array<std::size_t, 4> begins{};
    for (std::size_t l = 0; l < 3; ++l)
      begins[l + 1] = begins[l] + lamina::payload_bytes<TestType>(type, model.sizes()[l]);
    const sparse_memory memory(128 + begins[3] + 1);
    if (!memory.exists()) {
      WARN("sizes: skipped, this system gives no addresses without memory");
      return;
    }
    lamina::detail::wire_header header = header_of<TestType>(model, type);
    header.payload_bytes = begins[3];
    std::memcpy(memory.data(), &header, sizeof header);
    memory.data()[64] = std::byte{7};

    // A stretch of a block at each place where a number of 31 or 32 bits ends, written as a layer of its own.
    const auto bytes = memory.first(128 + begins[3]);
    const std::vector<std::size_t> places = {0,      two_31 / 8 - 64, two_31 / 4, two_31 / 2,  two_31 - 64,
                                             two_31, two_32 - 64,     two_32,     elements - 1};
    const auto stretch = [&](std::size_t place) {
      std::vector<TestType> values(std::min<std::size_t>(64, elements - place));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<TestType>((place / 64 + 7 * i) % 15) - 7;  // which int4 writes as they are
      }
      return values;
    };
    std::byte* const huge = memory.data() + 128 + begins[1];
    for (const std::size_t place : places) {
      const std::vector<TestType> values = stretch(place);
      if (type == lamina::payload_type::as_is) {
        std::memcpy(huge + place * sizeof(TestType), values.data(), values.size() * sizeof(TestType));
        continue;
      }
      std::vector<std::byte> wire(lamina::payload_bytes<TestType>(type, values.size()));
      lamina::detail::encode_payload<TestType>(type, values, wire.data());
      if (lamina::has_blocks(type)) {
        huge[place / 64] = wire[0];
        std::copy(wire.begin() + 1, wire.end(),
                  huge + (elements + 63) / 64 + (type == lamina::payload_type::int4 ? place / 2 : place));
      } else {
        std::ranges::copy(wire, huge + place * 2);
      }
    }

    const auto frame = lamina::decode<TestType>(bytes, model);
    CHECK(frame.sent_elements() == model.elements());
    CHECK(frame.bytes_of(2).data() == memory.data() + 128 + begins[2]);
    for (const std::size_t place : places) {
      const std::vector<TestType> expected = stretch(place);
      std::vector<TestType> got(expected.size());
      frame.copy(1, place, got);
      CHECK(same_bits(got, expected));
      CHECK(same_bits(frame.read(1, place, got), expected));
      if (type == lamina::payload_type::as_is) CHECK(frame.layer(1)[place] == expected[0]);
    }
    std::vector<TestType> beyond(2);
    CHECK_THROWS_AS(frame.copy(1, elements - 1, beyond), std::out_of_range);

    const auto refusal = [&](std::span<const std::byte> of) {
      std::error_code error;
      lamina::decode<TestType>(of, model, error);
      return error;
    };
    CHECK(refusal(bytes.first(bytes.size() - 1)) == lamina::errc::truncated);
    CHECK(refusal(memory.first(bytes.size() + 1)) == lamina::errc::trailing_bytes);
    // As a writer that counts in 32 bits has it; in 31 where the elements are smaller.
    header.payload_bytes = begins[3] % (begins[3] < two_32 ? two_31 : two_32);
    std::memcpy(memory.data(), &header, sizeof header);
    CHECK(refusal(memory.first(128 + header.payload_bytes % 4096)) == lamina::errc::bad_payload_size);
  }
}

TEST_CASE("sizes: a layer beyond 2^31 elements is written with all of its bytes counted") {
  const std::size_t elements = two_31 + 4097;
  const lamina::layout model({{"before", {3}}, {"huge", {elements}}, {"after", {70}}});
  const sparse_memory memory(elements * sizeof(float));
  if (!memory.exists()) {
    WARN("sizes: skipped, this system gives no addresses without memory");
    return;
  }
  const std::span huge(reinterpret_cast<const float*>(memory.data()), elements);
  const std::vector<float> others(70, 1);
  lamina::selection all(model);
  all.send_all();
  lamina::frame_encoder<float> encoder(model);
  const auto& frame = encoder.encode({}, all, [&](std::size_t l) {
    return l == 1 ? huge : std::span<const float>(others).first(model.sizes()[l]);
  });
  CHECK(frame.size_bytes() == 128 + (elements + 73) * 4);
  REQUIRE(frame.segments().size() == 4);
  CHECK(frame.segments()[2].size() == elements * 4);
  CHECK(frame.segments()[2].data() == memory.data());
  CHECK(lamina::detail::read_header(frame.segments()[0]).payload_bytes == (elements + 73) * 4);
}

namespace {

// A gradient of many elements that repeats itself in memory, after a number of elements that divides no power of two, so
// that an index that was cut to 31 or 32 bits finds another number.
class repeated_gradient {
 public:
  static constexpr std::size_t period = std::size_t{3} << 20U;

  explicit repeated_gradient(std::size_t elements)
      : memory_((elements / period + 1) * period * sizeof(float)) {
    std::FILE* const file = std::tmpfile();
    REQUIRE(file != nullptr);
    std::vector<float> values(period);
    for (std::size_t i = 0; i < period; ++i) values[i] = value(i);
    REQUIRE(std::fwrite(values.data(), sizeof(float), period, file) == period);
    REQUIRE(std::fflush(file) == 0);
    for (std::size_t k = 0; k <= elements / period; ++k) {
      std::byte* const at = memory_.data() + k * period * sizeof(float);
      REQUIRE(mmap(at, period * sizeof(float), PROT_READ, MAP_SHARED | MAP_FIXED, fileno(file), 0) == at);
    }
    std::fclose(file);
    elements_ = {reinterpret_cast<const float*>(memory_.data()), elements};
  }
  // Integers that int8 writes as they are.
  static float value(std::size_t i) {
    return static_cast<float>(i % period * 2'654'435'761U / 4096 % 255) - 127;
  }
  std::span<const float> elements() const { return elements_; }

 private:
  sparse_memory memory_;
  std::span<const float> elements_;
};

// Without a comparison of each element in the test's log.
bool is_repeated(std::span<const float> block, std::size_t begin) {
  for (std::size_t i = 0; i < block.size(); ++i)
    if (block[i] != repeated_gradient::value(begin + i)) return false;
  return true;
}

}  // namespace

TEST_CASE("sizes: 2^31 + 4097 elements go from the residual through a frame to the receiver", "[.large]") {
  const std::size_t elements = two_31 + 4097;
  const lamina::layout model({{"before", {3}}, {"huge", {elements}}});
  const repeated_gradient gradient(elements);
  for (const auto type : {lamina::payload_type::int8, lamina::payload_type::as_is}) {
    auto worker = std::make_unique<lamina::worker<float>>(
        model, lamina::worker_options{.drop_ratio = 0, .payload = type});  // 8 GiB
    auto step = worker->begin();
    REQUIRE(step.add(0, std::vector<float>(3, 5)));
    REQUIRE(step.add(1, gradient.elements()));
    REQUIRE(is_repeated(worker->residual()[1], 0));
    std::vector<std::byte> bytes = step.frame().to_bytes();  // 2 GiB twice, or 8 once
    REQUIRE(bytes.size() ==
            128 + lamina::payload_bytes<float>(type, 3) + lamina::payload_bytes<float>(type, elements));
    step.commit();
    if (type == lamina::payload_type::int8) {
      REQUIRE(std::ranges::all_of(worker->residual()[1], [](float each) { return each == 0; }));
    }
    worker.reset();

    const auto frame = lamina::decode<float>(bytes, model);
    CHECK(frame.sent_elements() == elements + 3);
    {
      std::vector<float> restored(elements);  // 8 GiB
      frame.restore(1, restored);
      REQUIRE(is_repeated(restored, 0));
    }
    lamina::server<float> server(model);
    REQUIRE_FALSE(server.add_view(bytes));
    std::size_t next = 0;
    bool is_same = true;
    server.update([&](std::size_t layer, std::size_t begin, std::span<const float> mean) {
      if (layer == 0) return;
      is_same &= begin == next && is_repeated(mean, begin);
      next += mean.size();
    });
    CHECK(is_same);
    CHECK(next == elements);
  }
}
#endif

}  // namespace lamina_test::size_test
