// SPDX-License-Identifier: MIT
// The residual against its definition: the literal order of additions, and a literal velocity. That all instruction sets give the same is
// said by tests/kernels. And what is left of a gradient that was added, and subtracted again because it holds NaN or infinity.
#include "lamina/residual.hpp"

#include <deque>
#include <optional>

#include "accumulate.hpp"
#include "catch.hpp"
#include "executions.hpp"
#include "fuzz/literal_residual.hpp"
#include "kernel_cases.hpp"
#include "steps.hpp"

#if defined(__linux__)
#include <pthread.h>
#endif

namespace lamina_test::residual_test {

namespace {

constexpr std::size_t block = 4096;
constexpr std::size_t task_elements = 32 * block;

template <class T>
constexpr T largest = std::numeric_limits<T>::max();
template <class T>
constexpr T infinity = std::numeric_limits<T>::infinity();
template <class T>
constexpr T nan_value = std::numeric_limits<T>::quiet_NaN();

lamina::worker_options with_check(lamina::non_finite check, double momentum = 0) {
  return {.momentum = momentum, .non_finite = check};
}

// The largest distance of an element from what it was before a refusal, over what that may leave: 2,048 epsilons of the mean magnitude
// of its block.
template <class T>
double worst_distance(std::span<const T> now, std::span<const T> before) {
  double worst = 0;
  for (std::size_t begin = 0; begin < now.size(); begin += block) {
    const std::size_t end = std::min(begin + block, now.size());
    double total = 0;
    for (std::size_t i = begin; i < end; ++i) total += std::abs(static_cast<double>(before[i]));
    const double most = total / static_cast<double>(end - begin) * 2048 * std::numeric_limits<T>::epsilon();
    for (std::size_t i = begin; i < end; ++i) {
      const double distance = std::abs(static_cast<double>(now[i]) - static_cast<double>(before[i]));
      if (distance > 0) worst = std::max(worst, distance / most);
    }
  }
  return worst;
}

constexpr std::size_t longest = 27 * block;  // with the others more than a task holds

// How many of the elements below a quarter there are: no functor of the library is like it, and it counts zeros.
struct share_of_small {
  static double map(double x) { return x > -0.25 && x < 0.25 ? 1 : 0; }
  static double combine(double a, double b) { return a + b; }
  static double finish(double total, std::size_t elements) { return total / static_cast<double>(elements); }
};

const lamina::layout all_sizes = model_of({1, 3, 0, 64, 300, 2 * block + 70, longest});

// The layer that is refused, if one is.
template <class T, class Functor>
std::optional<std::size_t> add(lamina::residual_accumulator<T>& residual, const tensors<T>& gradients,
                               const Functor& functor, const auto& execution) {
  std::vector<double> values(all_sizes.layers());
  const auto visit = [&](std::size_t layer, const auto& visitor) {
    visitor(std::span<const T>(gradients[layer]));
  };
  return residual.accumulate(0, all_sizes.layers(), visit, values, functor, execution);
}

// Steps, then gradients of 2^k times their size of which the last layer's last element is NaN: how many layers keep rounding of them. Where
// none does, nothing was added before the NaN, and nothing was tested.
template <class T, class Functor>
std::size_t layers_with_no_more_than_rounding(const Functor& functor, double momentum) {
  std::mt19937 random(901);
  lamina::residual_accumulator<T> residual(all_sizes, {.momentum = momentum});
  lamina::residual_accumulator<T> in_threads(all_sizes, {.momentum = momentum});
  std::size_t changed = 0;
  for (const int power : {0, 8, 12, 24, 100}) {
    CAPTURE(power, momentum);
    for (int step = 0; step < 2; ++step) {
      const auto good = rounding_gradients<T>(random, all_sizes);
      for (auto* each : {&residual, &in_threads}) {
        each->begin_step();
        REQUIRE_FALSE(add(*each, good, functor, lamina::sequential()));
      }
    }
    for (auto* each : {&residual, &in_threads}) {
      each->clear(4);
      if (power % 8 == 0) each->begin_step();  // what is refused is the first of its step, or is not
    }
    const auto before = copy_of(residual.elements());
    const auto velocity = copy_of(residual.velocity());
    auto bad = rounding_gradients<T>(random, all_sizes);
    for (auto& layer : bad)
      for (T& each : layer) each = std::ldexp(each, power);
    bad.back().back() = nan_value<T>;
    REQUIRE(add(residual, bad, functor, lamina::sequential()) == all_sizes.layers() - 1);
    REQUIRE(add(in_threads, bad, functor, in_threads_of(3)) == all_sizes.layers() - 1);
    REQUIRE(same_bits(in_threads.elements(), residual.elements()));
    REQUIRE(same_bits(in_threads.velocity(), residual.velocity()));
    REQUIRE(residual.is_clear(4));
    for (std::size_t l = 0; l < all_sizes.layers(); ++l) {
      if (all_sizes.sizes()[l] == 0 || l == 4) continue;
      const auto was = std::span<const T>(before).subspan(all_sizes.offset(l), all_sizes.sizes()[l]);
      REQUIRE(worst_distance(residual[l], was) <= 1.001);
      changed += !same_bits(residual[l], was);
    }
    // Half of a velocity's error, as it decays by a half, goes into the residual.
    const double most = lamina::max_abs{}(before)*2048 * std::numeric_limits<T>::epsilon();
    bool is_near = true;  // in one assertion, since there are millions of elements
    for (std::size_t i = 0; i < velocity.size(); ++i) {
      const double near =
          4 * std::numeric_limits<T>::epsilon() * std::abs(static_cast<double>(velocity[i])) + 2 * most;
      is_near &= std::abs(static_cast<double>(residual.velocity()[i] - velocity[i])) <= near;
    }
    REQUIRE(is_near);
    if (power > 24) REQUIRE(same_bits(residual.elements(), before));
    for (std::size_t l = 1; l < all_sizes.layers(); l += 2)
      for (auto* each : {&residual, &in_threads}) each->clear(l);
  }
  return changed;
}

// As they are added: widened, and each product rounded by itself.
template <class T>
std::vector<T> widened(const auto& gradient, double scale) {
  std::vector<T> values;
  for (const auto each : gradient) {
    T wide = 0;
    if constexpr (requires { lamina::to_float(each); }) {
      wide = lamina::to_float(each);
    } else {
      wide = each;
    }
    const volatile T product = wide * static_cast<T>(scale);
    values.push_back(static_cast<T>(product));
  }
  return values;
}

}  // namespace

// The layer is misaligned in the residual as its gradients are in theirs, each by another offset. Where there is a scale each product is
// rounded by itself, and where there is momentum each velocity.
TEMPLATE_TEST_CASE("residual: a gradient is added, and the value is that of the literal order", "",
                   (std::pair<float, float>), (std::pair<double, double>),
                   (std::pair<float, lamina::float16>), (std::pair<double, lamina::bfloat16>)) {
  using T = typename TestType::first_type;
  using G = typename TestType::second_type;
  std::mt19937 random(31);
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length <= 132; ++length) lengths.push_back(length);
  lengths.insert(lengths.end(), {200, 300, 4095, 4096, 4097, 8193});
  for (const std::size_t length : lengths) {
    for (const kind of : kinds) {
      const double momentum = std::array{0.0, 0.9}[below(random, 2)];
      const double scale = std::array{1.0, 1.0 / 3, -0.7}[below(random, 3)];
      CAPTURE(length, static_cast<int>(of), momentum, scale);
      const std::size_t offset = below(random, 16);
      std::array<std::vector<G>, 2> gradients;
      std::array<std::vector<T>, 2> sums;
      lamina_fuzz::literal_residual<T> literal(std::array{length}, static_cast<T>(momentum),
                                               lamina::non_finite::refuse);
      for (std::size_t k = 0; k < 2; ++k) {
        gradients[k] = numbers<G>(of, random, length);
        literal.begin_step();
        literal.add(0, widened<T>(gradients[k], scale));
        sums[k] = literal[0];
      }
      REQUIRE(literal.left_out() == 0);
      lamina::residual_accumulator<T> residual(
          model_of({offset, length, 7}), with_check(static_cast<lamina::non_finite>(length % 2), momentum));
      const auto check = [&](std::size_t f, const auto& functor) {
        residual.clear(1);
        for (std::size_t k = 0; k < 2; ++k) {
          const placed<G> gradient(gradients[k], (5 * offset + length) % 64);
          residual.begin_step();
          const double value =
              accumulate(residual, 1, gradient.values(), functor, lamina::sequential{}, scale);
          REQUIRE(same_bits(value, literal_values(sums[k])[f]));
          REQUIRE(same_bits(residual[1], sums[k]));
          REQUIRE(same_bits(functor(residual[1]), value));
        }
        if (momentum > 0)
          REQUIRE(same_bits(residual.velocity().subspan(offset, length), literal.velocity(0)));
      };
      check(0, lamina::mean_abs{});
      check(2, lamina::l2_norm{});
      if constexpr (std::is_same_v<T, G>) {
        check(1, lamina::l1_norm{});
        check(3, lamina::max_abs{});
        check(4, signed_mean{});
      }
      REQUIRE(same_bits(residual[0], std::vector<T>(offset)));  // nothing is written beyond the layer
      REQUIRE(same_bits(residual[2], std::vector<T>(7)));
    }
  }
}

TEST_CASE("residual: zeros at first, n_l of them, from the start of a cache line") {
  const lamina::layout model = model_of({3, 0, 5000});
  const lamina::residual_accumulator<float> residual(model);
  CHECK(same_bits(residual.elements(), std::vector<float>(5003)));
  CHECK(reinterpret_cast<std::uintptr_t>(residual[0].data()) % 64 == 0);
  CHECK(residual[2].data() == residual[0].data() + 3);
}

TEST_CASE("residual: an execution gets tasks of 32 blocks, and none for a layer of one") {
  struct row {
    std::size_t elements, tasks;
  };
  for (const row each : {row{0, 0}, row{1, 0}, row{task_elements, 0}, row{task_elements + 1, 2},
                         row{2 * task_elements, 2}, row{2 * task_elements + 1, 3}}) {
    lamina::residual_accumulator<float> residual(model_of({each.elements}));
    std::size_t calls = 0;
    const auto note = [&](std::size_t tasks, auto&& work) {
      calls += tasks;
      for (std::size_t i = 0; i < tasks; ++i) work(i);
    };
    accumulate(residual, 0, std::vector<float>(each.elements), lamina::mean_abs{}, note);
    CHECK(calls == each.tasks);
  }
}

TEMPLATE_TEST_CASE("residual: layers at once give bitwise what they give one by one", "", float, double) {
  std::mt19937 random(508);
  const double momentum = GENERATE(0.0, 0.9);
  // Empty layers at the ends and in a row, small ones that share a task, one that fills several.
  const lamina::layout model =
      model_of({0, 3, 0, 0, 70, 4096, 1, 2 * task_elements + 5, 4097, 0, 9, task_elements, 5, 0});
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    lamina::residual_accumulator<TestType> one_by_one(model, with_check(check, momentum));
    std::deque<lamina::residual_accumulator<TestType>> at_once;
    for (int k = 0; k < 6; ++k) at_once.emplace_back(model, with_check(check, momentum));
    for (int step = 0; step < 4; ++step) {
      auto gradients = rounding_gradients<TestType>(random, model);
      if (step == 2 && check == lamina::non_finite::skip) {
        for (const std::size_t place : {task_elements - 1, task_elements, 2 * task_elements + 4})
          gradients[7][place] = nan_value<TestType>;
      }
      const auto of = [&](std::size_t layer, const auto& visitor) {
        visitor(std::span<const TestType>(gradients[layer]));
      };
      std::vector<double> expected;
      one_by_one.begin_step();
      for (std::size_t l = 0; l < model.layers(); ++l)
        expected.push_back(accumulate(one_by_one, l, gradients[l]));
      const auto require_same = [&](std::size_t k, const auto& execution) {
        auto& residual = at_once[k];
        std::vector<double> values(model.layers());
        // In one call, and in two.
        const std::size_t cut = k == 2 ? 7 : model.layers();
        residual.begin_step();
        residual.accumulate(0, cut, of, std::span(values).first(cut), lamina::mean_abs{}, execution);
        residual.accumulate(cut, model.layers(), of, std::span(values).subspan(cut), lamina::mean_abs{},
                            execution);
        REQUIRE(same_bits(values, expected));
        REQUIRE(same_bits(residual.elements(), one_by_one.elements()));
        REQUIRE(same_bits(residual.velocity(), one_by_one.velocity()));
        REQUIRE(residual.left_out_elements() == one_by_one.left_out_elements());
        residual.clear(4);
      };
      for (std::size_t k = 0; k < 4; ++k) require_same(k, in_threads_of(std::array{1, 2, 7, 64}[k]));
      require_same(4, in_reverse);
      require_same(5, pool{3});
      one_by_one.clear(4);
    }
    CHECK(one_by_one.left_out_elements() == (check == lamina::non_finite::skip ? 3U : 0U));
  }
}

TEST_CASE("residual: of layers at once none is added if one of them is refused") {
  const lamina::layout model({{"a", {2}}, {"b", {3}}, {"c", {1}}});
  const double momentum = GENERATE(0.0, 0.5);
  lamina::residual_accumulator<float> residual(model, {.momentum = momentum});
  accumulate(residual, 1, std::vector<float>{1, 0.5F * largest<float>, 2});
  const auto elements = copy_of(residual.elements());
  const auto velocity = copy_of(residual.velocity());
  using gradients = std::vector<std::vector<float>>;
  const auto add = [&](const gradients& from, std::span<double> to) {
    return residual.accumulate(
        0, 3, [&](std::size_t layer, const auto& visitor) { visitor(std::span<const float>(from[layer])); },
        to);
  };
  const std::vector<double> untouched(3, -1);
  std::vector<double> values = untouched;
  const auto refused = [&](const gradients& from) {
    const auto layer = add(from, values);
    CHECK(same_bits(residual.elements(), elements));
    CHECK(same_bits(residual.velocity(), velocity));
    CHECK(values == untouched);
    return layer.value_or(99);
  };
  for (int again = 0; again < 3; ++again) {  // what was refused leaves no trace in the limits either
    CHECK(refused({{1, 2}, {3, 4, 5}, {nan_value<float>}}) == 2);
    CHECK(refused({{1, -infinity<float>}, {3, 4, 5}, {6}}) == 0);
    CHECK(refused({{largest<float>, 1}, {3, 0.75F * largest<float>, 5}, {6}}) == 1);
  }
  const auto message = [](const auto& call) { return message_of<std::invalid_argument>(call); };
  CHECK(contains(message([&] { refused({{1, 2}, {3, 4, 5}, {6, 7}}); }), "'c'"));
  CHECK(contains(message([&] {
                   add({{1, 2}, {3, 4, 5}, {6}}, std::span(values).first(2));
                 }),
                 "2 values of 3 layers"));
  const auto nothing = [](std::size_t, const auto&) {};
  CHECK_THROWS_AS(residual.accumulate(4, 4, nothing, std::span<double>()), std::out_of_range);
  CHECK_FALSE(residual.accumulate(0, 3, nothing, std::span(values)));
  CHECK_FALSE(residual.was_given(0));
  CHECK_FALSE(add({{largest<float> / 2, 2}, {3, 4, 5}, {6}}, values));
  CHECK(residual[2][0] == 6);
  CHECK(values[2] == 6);
}

TEST_CASE("residual: restore puts back what was saved; NaN, infinity and wrong sizes are refused") {
  const lamina::layout model = model_of({2, 0, 3});
  lamina::residual_accumulator<float> residual(model, {.momentum = 0.5});
  accumulate(residual, 0, std::vector<float>{1, 2});
  const auto elements = copy_of(residual.elements());
  const auto velocity = copy_of(residual.velocity());
  using values = std::vector<float>;
  const values good = {1, -2, 3, 0.75F * largest<float>, -0.0F};
  const auto refuses = [&](const values& a, const values& u) {
    CHECK_THROWS_AS(residual.restore(a, u), std::invalid_argument);
    CHECK(same_bits(residual.elements(), elements));
    CHECK(same_bits(residual.velocity(), velocity));
  };
  refuses({1, 2, 3, 4}, good);
  refuses({1, 2, 3, 4, 5, 6}, good);
  refuses(good, {});
  for (const float bad : {nan_value<float>, infinity<float>, -infinity<float>}) {
    refuses({1, 1, 1, 1, bad}, good);
    refuses(good, {bad, 1, 1, 1, 1});
  }
  const values u = {5, 6, 7, 8, 9};
  residual.restore(good, u);
  CHECK(same_bits(residual.elements(), good));
  CHECK(same_bits(residual.velocity(), u));
  // Restored numbers count when the next gradient comes, in size and in sum.
  residual.begin_step();
  CHECK_THROWS_AS(accumulate(residual, 2, values{0, largest<float> / 2, 0}), lamina::non_finite_gradient);
  accumulate(residual, 0, values{1, 1});
  CHECK(same_bits(residual[0], values{1 + 3.5, -2 + 4}));
}

// With the limits from before the restore the refused gradient would be added first, and what was restored be lost in its rounding.
TEST_CASE("residual: after a restore a refused gradient leaves rounding of what was restored") {
  const double momentum = GENERATE(0.0, 0.5);
  const lamina::layout model = model_of({100, 4096 + 70});
  lamina::residual_accumulator<float> residual(model, {.momentum = momentum});
  for (const std::size_t layer : {0, 1})
    accumulate(residual, layer, std::vector<float>(model.sizes()[layer], 0x1p60F));
  const std::vector<float> ones(model.elements(), 1);
  residual.restore(ones, momentum > 0 ? ones : std::vector<float>());
  for (const std::size_t layer : {0, 1}) {
    std::vector<float> bad(model.sizes()[layer], 0x1p50F);
    bad.back() = nan_value<float>;
    CHECK_THROWS_AS(accumulate(residual, layer, bad), lamina::non_finite_gradient);
  }
  CHECK(worst_distance<float>(residual.elements(), ones) <= 1);
  CHECK(residual[1][4096] == 1);
}

TEMPLATE_TEST_CASE("refusal: what is left is rounding, however large the gradient, with any threads", "",
                   float, double) {
  for (const double momentum : {0.0, 0.5}) {
    CHECK(layers_with_no_more_than_rounding<TestType>(lamina::mean_abs(), momentum) > 0);
    CHECK(layers_with_no_more_than_rounding<TestType>(lamina::l2_norm(), momentum) > 0);
    CHECK(layers_with_no_more_than_rounding<TestType>(share_of_small(), momentum) > 0);
  }
}

TEST_CASE("refusal: a micro-batch that overflows by its sum, velocity or scale is refused, or left out") {
  const float half = largest<float> / 2;
  for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
    const bool skips = check == lamina::non_finite::skip;
    lamina::worker<float> worker(model_of({2}), {.momentum = 0.5, .non_finite = check});
    auto step = worker.begin();
    // The velocity is at -1.5 halves and the residual at 0 when a micro-batch of -1 half comes.
    for (const float first : {1.5F * half, -1.5F * half, -1.5F * half})
      REQUIRE(step.add(0, std::vector<float>{first, 1}));
    const auto before = copy_of(worker.residual().elements());
    const auto velocity = copy_of(worker.residual().velocity());
    CHECK(step.add(0, std::vector<float>{-half, 1}) == skips);
    const float more = skips ? 1 : 0;
    CHECK(copy_of(worker.residual().elements()) == std::vector<float>{before[0], before[1] + more});
    CHECK(copy_of(worker.residual().velocity()) == std::vector<float>{velocity[0], velocity[1] + more});
    CHECK(worker.residual().left_out_elements() == (skips ? 1 : 0));

    const std::vector<float> gradient = {1, 0x1p120F};
    lamina::worker<float> scaling(model_of({2}), {.non_finite = check});
    auto scaled = scaling.begin();
    CHECK(scaled.add(0, gradient, 0x1p10) == skips);
    CHECK(copy_of(scaling.residual()[0]) == std::vector<float>{skips ? 0x1p10F : 0.0F, 0});
    CHECK(scaled.add(0, gradient, 0x1p-10));
    CHECK(scaling.residual()[0][1] == 0x1p110F);
  }
}

TEST_CASE("refusal: an execution that throws leaves all added, or nothing") {
  std::mt19937 random(906);
  const auto gives_up = [](std::size_t tasks, auto&& work) {
    for (std::size_t i = 0; i < tasks / 2; ++i) work(i);
    throw std::runtime_error("no more threads");
  };
  lamina::residual_accumulator<float> residual(all_sizes);
  auto gradients = rounding_gradients<float>(random, all_sizes);
  CHECK_THROWS_AS(add(residual, gradients, lamina::mean_abs(), gives_up), std::runtime_error);
  const auto before = copy_of(residual.elements());
  CHECK(before.back() == gradients.back().back());
  lamina::worker<float> worker(all_sizes);
  CHECK_THROWS_AS(worker.add(gradients, 1, gives_up), std::runtime_error);
  CHECK(same_bits(worker.residual().elements(), before));
  gradients = rounding_gradients<float>(random, all_sizes);
  gradients[1][0] = infinity<float>;
  CHECK(add(residual, gradients, lamina::mean_abs(), gives_up) == 1);
  CHECK(worst_distance<float>(residual.elements().last(longest),
                              std::span<const float>(before).last(longest)) <= 1.001);
  // A refusal is the result of the call, whatever its execution throws.
  const auto step = worker.add(gradients, 1, gives_up);
  CHECK_FALSE(step);
  CHECK(step.refused_layer() == 1);
}

TEST_CASE("residual: a layer that is skipped has the value that the functor gives zeros") {
  for (const std::size_t elements : {std::size_t{1}, block, 2 * block + 70}) {
    lamina::worker<float, share_of_small> worker(model_of({elements}));
    auto step = worker.begin();
    step.skip(0);
    CHECK(step.values()[0] == 1);
  }
}

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
TEST_CASE("residual: a gradient takes less than 80 KB of a thread's stack") {
  const auto run = [](void*) -> void* {
    lamina::residual_accumulator<double> residual(model_of({2 * block}), {.momentum = 0.9});
    const std::vector<lamina::bfloat16> gradient(2 * block, lamina::bfloat16{0x3f80});
    accumulate(residual, 0, gradient, lamina::l2_norm(), {}, 0.1);
    residual.subtract(0, lamina::payload_type::bfloat16);
    lamina::worker<double> worker(model_of({2 * block}), {.drop_ratio = 0});
    auto step = worker.begin();
    step.add(0, gradient, 0.1);
    step.frame();
    step.commit();
    return nullptr;
  };
  constexpr std::size_t bytes = std::size_t{1} << 20;
  void* stack = nullptr;
  REQUIRE(posix_memalign(&stack, 4096, bytes) == 0);
  std::memset(stack, 0x2a, bytes);
  pthread_attr_t attributes;
  REQUIRE(pthread_attr_init(&attributes) == 0);
  REQUIRE(pthread_attr_setstack(&attributes, stack, bytes) == 0);
  pthread_t thread;
  REQUIRE(pthread_create(&thread, &attributes, run, nullptr) == 0);
  REQUIRE(pthread_join(thread, nullptr) == 0);
  pthread_attr_destroy(&attributes);
  const auto* begin = static_cast<const unsigned char*>(stack);
  const auto* used = std::find_if(begin, begin + bytes, [](unsigned char each) { return each != 0x2a; });
  CHECK(begin + bytes - used < 80 * 1024);
  std::free(stack);
}
#endif

}  // namespace lamina_test::residual_test
