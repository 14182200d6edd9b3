// SPDX-License-Identifier: MIT
#pragma once

#include "device_support.hpp"

/// Gradients that are scaled, and refused, by words in device memory.
namespace lamina_test {

/// Some batches are refused, also pieces of a step, and all are scaled: what is left is what the CPU does that never got the
/// refused ones. The launches of a step are recorded once: what the host does not know yet lies in device memory alone.
template <class T, class G, class Execution>
void refused_batches_were_never_given(const Execution& execution, lamina::worker_options options,
                                      bool by_one_launch, std::size_t pieces) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  host_worker<T> cpu(model, options);
  lamina::cuda::worker<T> device(model, options);
  device_gradients<G> gradients(model, 1);
  device.bind(execution, gradients.tensors());
  on_device<float> found_inf(1);
  on_device<float> inverse_scale(1);
  const frame_buffer buffer(device.largest_frame_bytes());
  const lamina::cuda::add_options plain = {.found_inf = found_inf.data(),
                                           .inverse_scale = inverse_scale.data()};
  auto also = plain;
  also.commit = also.select = by_one_launch;
  const auto send = [&](const auto& by) {
    if (!by_one_launch) device.select(by);
    device.encode(by, buffer.bytes());
  };
  std::mt19937 random(31);
  const postponed first(execution);
  device.add(first, plain);
  device.select(first);
  device.encode(first, buffer.bytes());
  const postponed piece(execution);
  device.add(piece, also);
  const postponed end(execution);
  send(end);
  const postponed commit(execution);
  device.commit(commit);

  std::uint64_t refused = 0;
  bool has_begun = false;  // a step of the CPU's since its last commit
  bool has_sent = false;   // and it was encoded
  std::size_t left_out = 0;
  for (int round = 1; round <= 14; ++round) {
    const std::string where = "in round " + std::to_string(round);
    for (std::size_t k = 0; k < pieces; ++k) {
      const bool is_refused = below(random, 3) == 0;
      const float scale = round % 3 == 0 ? 1.0F : 1 / static_cast<float>(1 + below(random, 70'000));
      found_inf.set(std::vector{is_refused ? static_cast<float>(1 + below(random, 2)) : 0.0F});
      inverse_scale.set(std::vector{scale});
      // One launch commits what the round before has sent.
      if (by_one_launch && has_sent) cpu.commit();
      if (by_one_launch && has_sent) has_begun = false;
      has_sent = false;
      for (std::size_t l = 0; l < model.layers(); ++l) {
        auto gradient = random_gradient<G>(random, model.sizes()[l], 3);
        if constexpr (!lamina::half_element<G>) {
          if (gradient.size() > 60) {
            gradient[below(random, 30)] = std::numeric_limits<G>::infinity();
            gradient[30 + below(random, 30)] = std::numeric_limits<G>::quiet_NaN();
            if (!is_refused) left_out += 2;
          }
        }
        gradients.set(l, gradient);
        if (!is_refused) cpu.add(l, gradient, scale);
      }
      refused += is_refused ? 1 : 0;
      has_begun |= !is_refused;
      (round == 1 && by_one_launch ? first : piece).replay();
      execution.wait();  // for what is written next
    }
    if (!(round == 1 && by_one_launch)) end.replay();
    const auto report = device.last_step(execution);
    require(report.refused_batches == refused, "another number of batches was refused " + where);
    require(report.is_refused == !has_begun, "a step has begun or not, " + where);
    require(report.step == cpu->steps(), "the steps differ " + where);
    require(report.left_out_elements == left_out, "other elements were left out " + where);
    auto bytes = buffer.to_host();
    if (has_begun) {
      require(same_bits(lamina::cuda::finish_frame(bytes), cpu.encode()), "the frames differ " + where);
      has_sent = true;
    } else {
      require(report.payload_bytes == 0 && report.sent_elements == 0, "something was sent " + where);
      refuses<lamina::decode_error>({"magic"}, [&] { lamina::cuda::finish_frame(bytes); });
    }
    const auto values = to_host(device.values(), model.layers());
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const double value = lamina::mean_abs{}(cpu->residual()[l]);
      require(same_bits(values[l], value), "a value is not that of its residual " + where);
    }
    if (!by_one_launch && round % 4 != 3) {
      commit.replay();  // where nothing was sent, of nothing
      if (has_sent) cpu.commit();
      has_begun = has_sent = false;
    }
    // On the host a step that is saved is over, and could not be committed any more.
    if (!has_sent) require(same_bits(device.save(execution), cpu.save()), "the states differ " + where);
  }
  require(refused > 2, "nothing was refused");
}

/// Where nothing was given to the device, nothing leaves it: not over the gradients, not out of the residual.
template <class Execution>
void refused_steps_do_nothing(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0.5});
  device_gradients<float> gradients(model, 0);
  gradients.set(1, std::vector<float>(5000, 2.0F));
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto* const payload = buffer.bytes().data() + device.prefix_bytes();
  const on_device<float> found_inf(std::vector{1.0F});
  const lamina::cuda::add_options refused = {.found_inf = found_inf.data()};
  const auto saved = device.save(execution);
  device.add(execution, refused);
  device.add(execution, refused);
  device.select(execution);
  device.encode(execution, buffer.bytes());
  device.restore(execution, payload);
  device.commit(execution);
  require(device.last_step(execution).is_refused, "a refused step has begun");
  require(gradients.get(1) == std::vector<float>(5000, 2.0F), "restore() wrote over refused gradients");
  require(same_bits(device.save(execution), saved), "a refused step has changed something");
  // The next is the first.
  device.add(execution);
  device.select(execution);
  device.encode(execution, buffer.bytes());
  device.commit(execution);
  const auto report = device.last_step(execution);
  require(report.step == 1 && !report.is_refused && report.sent_elements == 5000, "no step came after it");
}

/// A scale that is not finite leaves out every element, and counts none that the gradient does not have.
template <class T, class Execution>
void counts_what_a_scale_leaves_out(const Execution& execution) {
  const lamina::layout model = model_of({1, 0, 2, 63, 65, 4097, 9003});
  for (const float scale :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const double momentum : {0.0, 0.5}) {
      lamina::cuda::worker<T> device(model, {.momentum = momentum});
      device_gradients<T> gradients(model, 0);
      device.bind(execution, gradients.tensors());
      const on_device<float> inverse_scale(std::vector{scale});
      device.add(execution, {.inverse_scale = inverse_scale.data()});
      require(device.last_step(execution).left_out_elements == model.elements(),
              "another number of elements was left out");
    }
  }
}

template <class Execution>
void for_each_refusal_case(const Execution& execution, const visitor& visit) {
  const auto refuse = [&](const std::string& name, const lamina::worker_options& options) {
    for (const bool by_one_launch : {false, true}) {
      visit("refused batches, " + name + (by_one_launch ? ", by one launch" : ""),
            [&, options, by_one_launch] {
              refused_batches_were_never_given<float, float>(execution, options, by_one_launch, 1);
            });
    }
    visit("refused pieces, " + name, [&, options] {
      refused_batches_were_never_given<double, lamina::float16>(execution, options, false, 3);
    });
  };
  refuse("drop ratio 0.7", {.drop_ratio = 0.7});
  refuse("momentum", {.drop_ratio = 0.7, .momentum = 0.9});
  refuse("a budget, payload int8", {.send_budget = 0.2, .payload = lamina::payload_type::int8});
  visit("a scale that is not finite", [&] {
    counts_what_a_scale_leaves_out<float>(execution);
    counts_what_a_scale_leaves_out<double>(execution);
  });
  visit("refused steps do nothing", [&] { refused_steps_do_nothing(execution); });
}

}  // namespace lamina_test
