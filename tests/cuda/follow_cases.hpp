// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>

#include "device_support.hpp"

/// A device and the CPU through the same steps.
namespace lamina_test {

/// A functor of a user's: the mean of signed values, and NaN of a layer of zeros.
struct unknown_of_zeros : signed_mean {
  LAMINA_HOST_DEVICE static double finish(double total, std::size_t elements) {
    return total == 0 ? std::numeric_limits<double>::quiet_NaN() : signed_mean::finish(total, elements);
  }
};

/// A run: what of the rest a step does is drawn.
struct course {
  lamina::worker_options options{.drop_ratio = 0.7};
  std::size_t steps = 9;
  std::vector<std::size_t> sizes = some_sizes();
  std::size_t skipped = 0;  // elements before each gradient
  bool moves = false;  // states go from one pair of workers to another; else gradients are not always finite
};

/// A worker on the device and one on the CPU, which get the same gradients.
template <class T, class F>
struct two_workers {
  two_workers(const lamina::layout& model, const lamina::worker_options& options)
      : cpu(model, options), device(model, options), buffer(device.largest_frame_bytes()) {}

  template <class Execution>
  void require_same_step(const Execution& execution, const std::string& where) {
    require_same_frame(cpu, device, execution, buffer, where);
    require_same_residuals(cpu, device, execution, where);
  }
  template <class Execution>
  void require_same_state(const Execution& execution, const std::string& where) {
    require(same_bits(device.save(execution), cpu.save()), "the states differ " + where);
  }

  host_worker<T, F> cpu;
  lamina::cuda::worker<T, F> device;
  frame_buffer buffer;
  std::vector<std::byte> saved;  // some steps ago
};

/// Large numbers, and such as are none, in the same places again and again: a sum of several may be finite, and the velocity with it
/// not.
template <class G>
void spoil(std::mt19937& random, std::vector<G>& gradient) {
  if constexpr (!lamina::half_element<G>) {
    using limits = std::numeric_limits<G>;
    const std::size_t n = gradient.size();
    for (const std::size_t at : {std::size_t{0}, n / 2, n - 1}) {
      const std::size_t kind = below(random, 12);
      if (n == 0 || kind > 4) continue;
      const G bad[] = {limits::quiet_NaN(), limits::infinity(), -limits::infinity(), limits::max(),
                       -limits::max()};
      gradient[at] = bad[kind];
    }
  }
}

/// Values, threshold, frame, residual and state of a device are those of a CPU, over steps of one to three micro-batch gradients. What
/// has arrived is committed by itself or with the next gradients, or is lost; a step is selected by itself or with its gradients, by own
/// values or agreed ones, and without what is held; and selecting again changes nothing.
template <class T, class G, class F = lamina::mean_abs, class Execution>
void follows_the_cpu(const Execution& execution, course of) {
  const lamina::layout model = model_of(of.sizes);
  of.options.sender = 3;
  of.options.run = 5;
  two_workers<T, F> pairs[2] = {{model, of.options}, {model, of.options}};
  two_workers<T, F>* now = &pairs[0];
  device_gradients<G> gradients(model, of.skipped);
  for (auto& each : pairs) each.device.bind(execution, gradients.tensors());
  const std::size_t fragments = now->device.fragments().layers();
  std::mt19937 random(7);
  bool commits = false;  // with the next gradients
  for (std::size_t step = 1; step <= of.steps; ++step) {
    auto& cpu = now->cpu;
    auto& device = now->device;
    auto& saved = now->saved;
    std::string where = "in step " + std::to_string(step);
    const bool selects = below(random, 2) == 0;
    if (commits) {
      where += ", which commits";
      cpu.commit();
    }
    for (std::size_t left = below(random, 3);; --left) {
      const bool is_quiet = below(random, 8) == 0;
      for (std::size_t l = 0; l < model.layers(); ++l) {
        const float strength =
            is_quiet && l % 2 == 0 ? 0 : std::ldexp(1.0F, static_cast<int>(below(random, 6)));
        auto gradient = random_gradient<G>(random, model.sizes()[l], strength);
        if (!of.moves) spoil(random, gradient);
        cpu.add(l, gradient);
        gradients.set(l, gradient);
      }
      device.add(execution, {.commit = std::exchange(commits, false), .select = selects && left == 0});
      execution.wait();
      require_same_values(cpu, device, where);
      if (left == 0) break;
    }
    // By own values where it was selected with its gradients, whatever comes after.
    std::vector<double> agreed(cpu.values().begin(), cpu.values().end());
    for (double& each : agreed) {
      const std::size_t kind = below(random, 8);
      each = kind == 0 ? 0 : kind == 1 ? each * 2 : each;
    }
    std::vector<std::uint8_t> held(fragments);
    for (auto& each : held)
      each = static_cast<std::uint8_t>(below(random, 6) == 0 ? 1 + below(random, 255) : 0);
    const on_device<double> device_agreed(agreed);
    const on_device<std::uint8_t> device_held(held);
    const auto select = [&](bool by_agreed, bool holds) {
      device.select(execution, by_agreed ? device_agreed.data() : nullptr,
                    holds ? device_held.data() : nullptr);
    };
    const bool by_agreed = below(random, 3) == 0;
    const bool holds = below(random, 3) == 0;
    if (!selects) {
      const std::vector<char> cpu_held(held.begin(), held.end());
      cpu.select(by_agreed ? agreed : std::vector<double>(), holds ? cpu_held : std::vector<char>());
      select(by_agreed, holds);
    }
    if (below(random, 3) == 0) select(!by_agreed, !holds);
    now->require_same_step(execution, where);

    const std::size_t fate = below(random, 4);  // 0: lost
    commits = fate == 3;
    if (fate == 1 || fate == 2) {
      cpu.commit();
      device.commit(execution);
      require_same_residuals(cpu, device, execution, where + ", committed");
    }
    if (!of.moves || commits || below(random, 2) == 0) continue;
    now->require_same_state(execution, where);
    if (!saved.empty() && below(random, 3) == 0) {  // steps are done again
      device.load(execution, saved);
      cpu.load(saved);
    } else {
      saved = device.save(execution);
      two_workers<T, F>& other = pairs[now == &pairs[0] ? 1 : 0];
      other.device.load(execution, cpu.save());
      other.cpu.load(saved);
      require(other.device.last_step(execution).step == cpu->steps(), "the steps differ " + where);
      now = &other;
    }
    now->require_same_state(execution, where + ", loaded");
  }
}

/// With every option, by name.
inline std::vector<std::pair<std::string, lamina::worker_options>> all_options() {
  using lamina::payload_type;
  return {
      {"drop ratio 0.7", {.drop_ratio = 0.7}},
      {"drop ratio 0", {.drop_ratio = 0}},
      {"drop ratio 1", {.drop_ratio = 1}},
      {"search every 3 steps", {.drop_ratio = 0.7, .search_every = 3}},
      {"search every 100 steps", {.drop_ratio = 0.4, .search_every = 100}},
      {"a fixed threshold", {.threshold = 8}},
      {"a threshold below all", {.threshold = -1}},
      {"an infinite threshold", {.threshold = std::numeric_limits<double>::infinity()}},
      {"warm-up", {.drop_ratio = 0.99, .warm_up_steps = 5}},
      {"warm-up, search every 100 steps", {.drop_ratio = 0.99, .warm_up_steps = 5, .search_every = 100}},
      {"by score", {.drop_ratio = 0.8, .by_score = true}},
      {"by score, a budget of 20 %", {.send_budget = 0.2, .by_score = true}},
      {"by score, a fixed threshold", {.threshold = 20, .by_score = true}},
      {"a budget of 20 %", {.send_budget = 0.2}},
      {"a budget of 1 %", {.send_budget = 0.01}},
      {"a budget of everything", {.send_budget = 1}},
      {"a budget of 90 %, at least every 3 steps", {.send_budget = 0.9, .at_least_every = 3}},
      {"at least every 2 steps", {.drop_ratio = 0.95, .at_least_every = 2}},
      {"a budget, at least every 2 steps, which overdraws it", {.send_budget = 0.01, .at_least_every = 2}},
      {"fragments of 4,096", {.drop_ratio = 0.6, .fragment_elements = 4096}},
      {"always sent layers", {.drop_ratio = 0.95, .at_least_every = 3, .always_sent = {3, 9}}},
      {"always sent layers, a budget, fragments",
       {.send_budget = 0.3, .fragment_elements = 4096, .always_sent = {4, 7}}},
      {"momentum", {.drop_ratio = 0.7, .momentum = 0.9}},
      {"momentum, by score, a budget, fragments",
       {.send_budget = 0.3, .by_score = true, .fragment_elements = 4096, .momentum = 0.5}},
      {"payload float16", {.drop_ratio = 0.7, .payload = payload_type::float16}},
      {"payload bfloat16, momentum", {.drop_ratio = 0.7, .momentum = 0.9, .payload = payload_type::bfloat16}},
      {"payload int8, momentum", {.drop_ratio = 0.7, .momentum = 0.5, .payload = payload_type::int8}},
      {"payload int4", {.drop_ratio = 0.7, .payload = payload_type::int4}},
  };
}

template <class Execution>
void for_each_follow_case(const Execution& execution, const visitor& visit) {
  using lamina::bfloat16;
  using lamina::float16;
  const lamina::worker_options plain{.drop_ratio = 0.7};
  const lamina::worker_options momentum{.drop_ratio = 0.7, .momentum = 0.9};
  for (const auto& each : all_options()) {
    const std::string& name = each.first;
    const lamina::worker_options& options = each.second;
    visit("float, " + name, [&, options] {
      follows_the_cpu<float, float>(execution, {.options = options});
      follows_the_cpu<float, float>(execution, {.options = options, .moves = true});
    });
    if (!contains(name, "momentum") && !contains(name, "payload")) continue;
    visit("double, " + name, [&, options] {
      follows_the_cpu<double, double>(execution, {.options = options});
      follows_the_cpu<double, double>(execution, {.options = options, .moves = true});
    });
  }
  visit("gradients of float16", [&] { follows_the_cpu<float, float16>(execution, {momentum}); });
  visit("gradients of bfloat16", [&] { follows_the_cpu<float, bfloat16>(execution, {.skipped = 1}); });
  visit("gradients of float16, residual of double", [&] { follows_the_cpu<double, float16>(execution, {}); });
  visit("gradients of bfloat16, residual of double",
        [&] { follows_the_cpu<double, bfloat16>(execution, {momentum}); });
  for (const std::size_t skipped : {1U, 2U, 3U}) {
    visit("gradients " + std::to_string(skipped) + " elements off", [&, skipped] {
      follows_the_cpu<float, float>(execution, {.steps = 6, .sizes = telling_sizes(), .skipped = skipped});
      follows_the_cpu<double, double>(execution, {.steps = 4, .sizes = telling_sizes(), .skipped = skipped});
      follows_the_cpu<float, float16>(execution, {.steps = 4, .skipped = skipped});
      follows_the_cpu<float, float>(
          execution,
          {.options = {.drop_ratio = 0.7, .fragment_elements = 4096}, .steps = 4, .skipped = skipped});
    });
  }
  visit("layers of every size",
        [&] { follows_the_cpu<float, float>(execution, {.sizes = telling_sizes(), .moves = true}); });
  visit("at scale: a layer of more than 1,024 blocks", [&] {
    follows_the_cpu<float, float>(execution, {.options = plain, .steps = 2, .sizes = {4'500'000, 1, 70'000}});
  });
  for (const std::size_t layers : {1024U, 1025U}) {
    visit(std::to_string(layers) + " layers", [&, layers] {
      follows_the_cpu<float, float>(
          execution, {.options = plain, .steps = 5, .sizes = std::vector<std::size_t>(layers, 3)});
    });
  }
  visit("l2_norm", [&] { follows_the_cpu<float, float, lamina::l2_norm>(execution, {momentum}); });
  visit("max_abs", [&] { follows_the_cpu<double, double, lamina::max_abs>(execution, {momentum}); });
  visit("a functor of a user's", [&] {
    follows_the_cpu<float, float, unknown_of_zeros>(execution, {.steps = 12});
    follows_the_cpu<float, float, unknown_of_zeros>(execution,
                                                    {.options = {.send_budget = 0.2}, .moves = true});
  });
}

}  // namespace lamina_test
