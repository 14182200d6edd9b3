// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// The order of calls within a step: in pieces, again, and out of order, also where graphs launch what the host cannot see.
namespace lamina_test {

/// Four pieces of g/4 give what one piece of g gives: in numbers of few bits, whose sums are exact.
template <class T, class G, class Execution>
void pieces_give_what_one_gives(const Execution& execution, const lamina::worker_options& options) {
  constexpr int pieces = 4;
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  lamina::cuda::worker<T> at_once(model, options);
  lamina::cuda::worker<T> in_pieces(model, options);
  device_gradients<G> whole(model, 0);
  device_gradients<G> quarter(model, 0);
  at_once.bind(execution, whole.tensors());
  in_pieces.bind(execution, quarter.tensors());
  const frame_buffer buffer(at_once.largest_frame_bytes());
  const auto finish = [&](auto& device, int piece) {
    for (; piece > 0; --piece) device.add(execution);
    device.select(execution);
    return frame_of(device, execution, buffer);
  };
  std::mt19937 random(3);
  for (int step = 1; step <= 6; ++step) {
    for (std::size_t l = 0; l < model.layers(); ++l) {
      const auto integers = random_integers<float>(random, model.sizes()[l]);
      std::vector<G> gradient(integers.size());
      for (const bool is_whole : {true, false}) {
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          const float element = is_whole ? pieces * integers[i] : integers[i];
          if constexpr (lamina::half_element<G>) {
            gradient[i] = lamina::saturating_round<G>(element);
          } else {
            gradient[i] = element;
          }
        }
        (is_whole ? whole : quarter).set(l, gradient);
      }
    }
    const std::string where = " differ in step " + std::to_string(step);
    require(same_bits(finish(at_once, 1), finish(in_pieces, pieces)), "the frames" + where);
    if (step == 3) continue;  // this frame was lost
    at_once.commit(execution);
    in_pieces.commit(execution);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      require(same_bits(at_once.residual(execution, l), in_pieces.residual(execution, l)),
              "the residuals of layer " + std::to_string(l) + where);
    }
  }
}

/// One to three pieces a step, in numbers that round, some of which are not finite, beside the CPU.
template <class T, class G, class Execution>
void pieces_follow_the_cpu(const Execution& execution, lamina::worker_options options) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  host_worker<T> cpu(model, options);
  lamina::cuda::worker<T> device(model, options);
  device_gradients<G> gradients(model, 1);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  std::mt19937 random(9);
  for (int step = 1; step <= 8; ++step) {
    const std::string where = "in step " + std::to_string(step);
    for (std::size_t pieces = 1 + below(random, 3); pieces > 0; --pieces) {
      for (std::size_t l = 0; l < model.layers(); ++l) {
        auto gradient = random_gradient<G>(random, model.sizes()[l], 1);
        if constexpr (!lamina::half_element<G>) {
          using limits = std::numeric_limits<G>;
          for (const G bad : {limits::quiet_NaN(), limits::infinity(), limits::max(), -limits::max()}) {
            if (gradient.size() > 60) gradient[below(random, gradient.size())] = bad;
          }
        }
        gradients.set(l, gradient);
        cpu.add(l, gradient);
      }
      device.add(execution);
      execution.wait();
    }
    device.select(execution);
    require_same_frame(cpu, device, execution, buffer, where);
    if (step % 4 == 3) continue;  // this frame was lost
    cpu.commit();
    device.commit(execution);
    require_same_residuals(cpu, device, execution, where);
  }
}

/// An element of a later piece whose velocity would overflow while its residual would not is left out of both.
template <class Execution>
void leaves_out_of_velocity_and_residual(const Execution& execution) {
  constexpr float largest = std::numeric_limits<float>::max();
  const lamina::layout model = model_of({1, 4});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0.5, .momentum = 0.5});
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const thrust::device_vector<double> agreed = on_device<double>({0, 1});  // holds layer 0 back
  const auto add = [&](float element) {
    execution.wait();  // or a launch before may not have read what is written now
    gradients.set(0, {element});
    device.add(execution);
  };
  const auto expect = [&](float residual, std::size_t left_out) {
    require(device.residual(execution, 0)[0] == residual,
            "the residual is " + std::to_string(device.residual(execution, 0)[0]));
    require(device.last_step(execution).left_out_elements == left_out, "another number of elements left out");
  };
  add(-largest);  // u = a = -max
  device.select(execution, address_of(agreed));
  add(largest);  // u = max / 2, a = -max / 2
  expect(-largest / 2, 0);
  add(largest);  // u would be 1.5 max
  expect(-largest / 2, 1);
  device.select(execution, address_of(agreed));
  add(0);  // u = max / 4
  expect(-largest / 4, 1);
}

/// Asked again, in whatever way, a step stays as it was decided.
template <class Execution>
void decides_a_step_once(const Execution& execution, bool with_add) {
  const lamina::layout model = model_of({100, 100});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0.5});
  device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.bind(execution, gradients.tensors());
  const auto agreed = on_device<double>({0, 1});
  const auto held = on_device<std::uint8_t>({1, 0});
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto sends = [&](const std::string& expected) {
    const auto bytes = frame_of(device, execution, buffer);
    const auto frame = lamina::decode<float>(bytes, model);
    const auto sent = std::string(frame.is_dropped(0) ? "-" : "0") + (frame.is_dropped(1) ? "-" : "1");
    require(sent == expected, "sent is " + sent + " and not " + expected);
    (void)device.last_step(execution);
  };
  device.add(execution, {.select = with_add});
  if (!with_add) device.select(execution);
  device.select(execution, address_of(agreed));
  sends("0-");
  device.select(execution, nullptr, address_of(held));
  sends("0-");

  device.add(execution);
  device.select(execution, address_of(agreed));
  device.select(execution);
  sends("-1");
}

/// Fragments are held by own values as by agreed ones: one of many, in whichever turn of a thread block's.
template <class Execution>
void holds_one_fragment(const Execution& execution) {
  const std::size_t layers = 1500;
  const lamina::layout model = model_of(std::vector<std::size_t>(layers, 3));
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0});
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  for (const std::size_t other : {std::size_t{0}, std::size_t{511}, std::size_t{512}, std::size_t{1499}}) {
    std::vector<std::uint8_t> flags(layers);
    flags[other] = 7;
    const auto held = on_device(flags);
    device.add(execution);
    device.select(execution, nullptr, address_of(held));
    const auto bytes = frame_of(device, execution, buffer);
    const auto frame = lamina::decode<float>(bytes, model);
    for (std::size_t l = 0; l < layers; ++l)
      require(frame.is_dropped(l) == (l == other), "layer " + std::to_string(l) + " is sent, or not");
  }
}

/// Before the first frame there is nothing to restore.
template <class Execution>
void restores_no_frame_before_there_is_one(const Execution& execution) {
  const lamina::layout model = model_of({100});
  lamina::cuda::worker<float> device(model);
  device_gradients<float> gradients(model, 0);
  const std::vector<float> sevens(100, 7.0F);
  gradients.set(0, sevens);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto message = message_of<std::logic_error>(
      [&] { device.restore(execution, buffer.bytes().data() + device.prefix_bytes()); });
  require(same_bits(gradients.get(0), sevens), "the gradients were written");
  require(contains(message, "encode()"), "the message is: " + message);
}

template <class Execution>
void for_each_order_case(const Execution& execution, const visitor& visit) {
  using options = lamina::worker_options;
  const options plain{.drop_ratio = 0.7};
  const options momentum{.drop_ratio = 0.7, .momentum = 0.5};
  visit("pieces", [&] { pieces_give_what_one_gives<float, float>(execution, plain); });
  visit("pieces, momentum", [&] {
    pieces_give_what_one_gives<float, float>(execution, momentum);
    pieces_give_what_one_gives<double, double>(execution, momentum);
    pieces_give_what_one_gives<float, lamina::bfloat16>(execution, momentum);
  });
  visit("pieces, momentum, payload int8", [&] {
    pieces_give_what_one_gives<float, float>(
        execution, {.drop_ratio = 0.7, .momentum = 0.5, .payload = lamina::payload_type::int8});
  });
  const options heavy{.drop_ratio = 0.7, .momentum = 0.9};
  visit("pieces beside the CPU", [&] {
    pieces_follow_the_cpu<float, float>(execution, plain);
    pieces_follow_the_cpu<float, float>(execution, heavy);
    pieces_follow_the_cpu<double, double>(execution, heavy);
    pieces_follow_the_cpu<float, lamina::float16>(execution, heavy);
  });
  visit("pieces, overflow with momentum", [&] { leaves_out_of_velocity_and_residual(execution); });
  visit("one step, selected twice", [&] { decides_a_step_once(execution, false); });
  visit("one step, selected twice, first with its gradients", [&] { decides_a_step_once(execution, true); });
  visit("other layers held", [&] { holds_one_fragment(execution); });
  visit("restore before a step", [&] { restores_no_frame_before_there_is_one(execution); });
}

}  // namespace lamina_test
