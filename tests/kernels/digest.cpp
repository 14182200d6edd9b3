// SPDX-License-Identifier: MIT
// Prints a hash of what each kernel gives for inputs that are the same everywhere. digests.txt has these lines, and every instruction set,
// optimization and machine prints them: see CMakeLists.txt. tests/unit compares one of these with the literal order of operations.
#include <xxhash.h>

#include <cstdio>

#include "accumulate.hpp"
#include "kernel_cases.hpp"
#include "lamina/lamina.hpp"

namespace {

using namespace lamina_test;
using lamina::payload_type;
using lamina::detail::read_only;

// The product must not be fused with the sum that follows.
struct squares : lamina::detail::callable_representative<squares>, lamina::detail::sum {
  using is_simd = void;
  static auto map(const auto& x) { return x * x; }
  static double finish(double total, std::size_t) { return total; }
};
// Without registers, since it does not say that it takes them.
struct squares_of_elements : lamina::detail::callable_representative<squares_of_elements> {
  static auto map(auto x) { return x * x; }
  static auto combine(auto a, auto b) { return a + b; }
  static double finish(double total, std::size_t) { return total; }
};
// What else a functor may do with a register.
struct other_operators : lamina::detail::callable_representative<other_operators> {
  using is_simd = void;
  static auto map(const auto& x) {
    using V = std::remove_cvref_t<decltype(x)>;
    return lamina::max(-x, x / V(3) - lamina::abs(x));
  }
  static auto combine(const auto& a, const auto& b) { return a + b; }
  static double finish(double total, std::size_t) { return total; }
};

class digest {
 public:
  explicit digest(std::string name) : name_(std::move(name)) {}
  digest(const digest&) = delete;
  digest& operator=(const digest&) = delete;
  ~digest() { std::printf("%s %016llx\n", name_.c_str(), static_cast<unsigned long long>(hash_)); }

  void add(const auto& range) {
    const auto bytes = std::as_bytes(std::span(range));
    hash_ = XXH3_64bits_withSeed(bytes.data(), bytes.size(), hash_);
  }
  void add(double value) { add(std::array{value}); }

 private:
  std::string name_;
  std::uint64_t hash_ = 0;
};

template <class G>
std::string name_of() {
  return std::is_same_v<G, float>             ? "float"
         : std::is_same_v<G, double>          ? "double"
         : std::is_same_v<G, lamina::float16> ? "float16"
                                              : "bfloat16";
}
// Each length up to some rows with each misalignment, of one kind or another; and around a block and two.
template <class G>
void for_each_case(const auto& visit) {
  std::mt19937 random(2020);
  const auto at = [&](std::size_t length) {
    for (const kind of : kinds) {
      const auto values = numbers<G>(of, random, length);
      for (std::size_t k = 0; k < 3; ++k) visit(values, (3 * static_cast<std::size_t>(of) + k + length) % 16);
    }
  };
  for (std::size_t length = 0; length <= 300; ++length) at(length);
  for (const std::size_t length : {4095, 4096, 4097, 4167, 8193}) at(length);
}

template <class G>
void print_values(const char* name, const auto& functor) {
  digest values("value of " + std::string(name) + ", " + name_of<G>());
  for_each_case<G>([&](const std::vector<G>& elements, std::size_t offset) {
    values.add(functor(placed<G>(elements, offset).values()));
  });
}

template <class G>
void print_pass(const char* name, const auto& functor) {
  using T = computed_type<G>;
  digest pass("pass of " + std::string(name) + ", " + name_of<G>());
  for_each_case<G>([&](const std::vector<G>& elements, std::size_t offset) {
    const auto check = offset % 2 == 0 ? lamina::non_finite::refuse : lamina::non_finite::skip;
    lamina::residual_accumulator<T> residual(model_of({offset, elements.size(), 7}), {.non_finite = check});
    const placed<G> gradient(elements, (5 * offset + elements.size()) % 16);
    for (int step = 0; step < 2; ++step) pass.add(accumulate(residual, 1, gradient.values(), functor));
    pass.add(residual.elements());
  });
}

// With a scale, with momentum, and with numbers that are refused or left out, wherever these are.
template <class T, class G>
void print_steps() {
  digest steps("steps of " + name_of<T>() + ", gradients of " + name_of<G>());
  std::mt19937 random(2021);
  for (const std::size_t length : {1, 64, 70, 300, 4096 + 70}) {
    for (const double momentum : {0.0, 0.9}) {
      for (const auto check : {lamina::non_finite::refuse, lamina::non_finite::skip}) {
        lamina::residual_accumulator<T> residual(model_of({3, length}),
                                                 {.momentum = momentum, .non_finite = check});
        for (std::size_t step = 0; step < 40; ++step) {
          auto gradient = numbers<G>(kind::fractions, random, length);
          if (step % 3 == 1) {
            G& bad = gradient[(7 * step) % length];
            if constexpr (lamina::half_element<G>) {
              bad.bits = 0x7fff;
            } else {
              bad = step % 2 == 0 ? std::numeric_limits<G>::infinity() : std::numeric_limits<G>::quiet_NaN();
            }
          }
          if (step % 8 == 7) residual.clear(1);
          residual.begin_step();
          double value = -1;
          const double scale = std::array{1.0, 0.1, -1.0 / 3, 0x1p-16}[step % 4];
          try {
            value = accumulate(residual, 1, gradient, lamina::mean_abs{}, lamina::sequential{}, scale);
          } catch (const lamina::non_finite_gradient&) {
          }
          steps.add(value);
          steps.add(static_cast<double>(residual.left_out_elements()));
          steps.add(residual.elements());
          steps.add(residual.velocity());
        }
      }
    }
  }
}

template <class T>
void print_elements() {
  namespace detail = lamina::detail;
  digest elements("elements, " + name_of<T>());
  for_each_case<T>([&](const std::vector<T>& values, std::size_t offset) {
    const std::size_t count = values.size();
    const placed<T> from(values, offset);
    const placed<T> to(values, (offset + 5) % 16);
    detail::copy_elements(to.data(), count, read_only<T, T, true>(from.data(), T(0.9)));
    elements.add(to.values());
    detail::add_elements(to.data(), from.data(), count);
    detail::divide_elements(to.data(), T(3), count);
    elements.add(to.values());
    detail::subtract_elements(to.data(), from.data(), count);
    elements.add(to.values());
  });
}

template <class T>
void print_payloads() {
  for (const auto type : {payload_type::float16, payload_type::bfloat16, payload_type::int8,
                          payload_type::int4, payload_type::ternary}) {
    digest payloads("payload " + std::to_string(static_cast<int>(type)) + ", " + name_of<T>());
    for_each_case<T>([&](std::vector<T> values, std::size_t offset) {
      if (offset == 0 && !values.empty()) values[values.size() / 2] = std::numeric_limits<T>::infinity();
      std::vector<std::byte> wire(lamina::payload_bytes<T>(type, values.size()));
      lamina::detail::encode_payload<T>(type, values, wire.data());
      payloads.add(wire);
      lamina::detail::decode_payload<T>(type, wire.data(), values.size(), 0, values);
      payloads.add(values);
    });
  }
}

// What a worker writes, what is read of it, and what stays.
template <class T>
void print_frames() {
  const lamina::layout model = model_of({5000, 0, 70, 4096, 1});
  for (int type = 0; type < 6; ++type) {
    digest frames("frames of payload " + std::to_string(type) + ", " + name_of<T>());
    lamina::worker<T> worker(
        model, {.drop_ratio = 0.5, .momentum = 0.9, .payload = static_cast<payload_type>(type), .sender = 3});
    std::mt19937 random(2022);
    for (int t = 0; t < 3; ++t) {
      auto step = worker.begin();
      for (std::size_t l = 0; l < model.layers(); ++l)
        (void)step.add(l, numbers<T>(kind::fractions, random, model.sizes()[l]));
      const std::vector<std::byte> frame = step.frame().to_bytes();
      step.commit();
      frames.add(frame);
      const auto view = lamina::decode<T>(frame, model);
      for (std::size_t l = 0; l < model.layers(); ++l) {
        std::vector<T> restored(model.sizes()[l]);
        view.restore(l, restored);
        frames.add(restored);
      }
    }
    frames.add(worker.residual().elements());
  }
}

template <class G>
void print_half() {
  digest halves("halves, " + name_of<G>());
  std::array<G, 64> from;
  std::array<float, 64> to;
  for (std::uint32_t first = 0; first < 0x10000; first += 64) {
    for (std::uint32_t i = 0; i < 64; ++i) from[i].bits = static_cast<std::uint16_t>(first + i);
    lamina::detail::widen_all<64>(from.data(), to.data());
    for (float& each : to) {
      if (each != each) each = 0;  // what of a NaN comes along is the machine's choice
    }
    halves.add(to);
  }
}

template <class T>
void print_all_of() {
  print_values<T>("max_abs", lamina::max_abs{});
  print_values<T>("other operators", other_operators{});
  print_pass<T>("mean_abs", lamina::mean_abs{});
  print_pass<T>("l2_norm", lamina::l2_norm{});
  print_pass<T>("squares", squares{});
  print_pass<T>("squares of elements", squares_of_elements{});
  print_steps<T, T>();
  print_steps<T, lamina::float16>();
  print_steps<T, lamina::bfloat16>();
  print_elements<T>();
  print_payloads<T>();
  print_frames<T>();
}
// Of the values of gradients, and of the pass that widens them.
template <class G>
void print_values_of() {
  print_values<G>("mean_abs", lamina::mean_abs{});
  print_values<G>("l2_norm", lamina::l2_norm{});
  print_values<G>("signed_mean", signed_mean{});
  print_values<G>("squares", squares{});
  print_values<G>("squares of elements", squares_of_elements{});
}

}  // namespace

int main() {
  print_all_of<float>();
  print_all_of<double>();
  print_values_of<float>();
  print_values_of<double>();
  print_values_of<lamina::float16>();
  print_values_of<lamina::bfloat16>();
  print_pass<lamina::float16>("mean_abs", lamina::mean_abs{});
  print_pass<lamina::bfloat16>("mean_abs", lamina::mean_abs{});
  print_half<lamina::float16>();
  print_half<lamina::bfloat16>();
  // As of a layer of a thousand million elements.
  digest totals("many totals");
  std::mt19937 random(2023);
  const auto all = numbers<double>(kind::fractions, random, 270'401);
  for (const std::size_t count : {64, 65, 4096, 4097, 270'401})
    totals.add(lamina::detail::finished_value(lamina::l1_norm{}, std::span(all).first(count), 1));
}
