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
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/frame.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// The order of calls within a step: in pieces, again, and out of order, also where graphs launch what the host cannot see.
namespace lamina_test {

/// Four pieces of g/4 give what one piece of g gives: in numbers of few bits, whose sums are exact.
template <class T, class G, class Execution>
void pieces_give_what_one_gives(const Execution& execution, const lamina::compressor_options& options) {
  constexpr int pieces = 4;
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  lamina::cuda::gradient_compressor<T> at_once(model, options);
  lamina::cuda::gradient_compressor<T> in_pieces(model, options);
  device_gradients<G> whole(model, 0);
  device_gradients<G> quarter(model, 0);
  at_once.bind(execution, whole.tensors());
  in_pieces.bind(execution, quarter.tensors());
  const frame_buffer buffer(at_once.largest_frame_bytes());
  const auto finish = [&](auto& device, int piece) {
    for (; piece > 0; --piece) device.accumulate(execution);
    device.select(execution);
    device.encode(execution, buffer.bytes());
    (void)device.last_step(execution);
    auto bytes = buffer.to_host();
    const auto frame = lamina::cuda::finish_frame(bytes);
    return std::vector<std::byte>(frame.begin(), frame.end());
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
void pieces_follow_the_cpu(const Execution& execution, lamina::compressor_options options) {
  const lamina::layout model = model_of({1, 0, 63, 65, 4097, 300, 9000});
  options.non_finite = lamina::non_finite::skip;
  lamina::gradient_compressor<T> cpu(model, options);
  lamina::cuda::gradient_compressor<T> device(model, options);
  device_gradients<G> gradients(model, 1);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  std::mt19937 random(9);
  for (int step = 1; step <= 8; ++step) {
    const std::string where = " differ in step " + std::to_string(step);
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
        cpu.accumulate(l, gradient);
      }
      device.accumulate(execution);
      execution.wait();
    }
    device.select(execution);
    device.encode(execution, buffer.bytes());
    const auto report = device.last_step(execution);
    require(report.left_out_elements == cpu.residual().left_out_elements(), "the elements left out" + where);
    auto bytes = buffer.to_host();
    require(same_bits(lamina::cuda::finish_frame(bytes), cpu.encode().to_bytes()), "the frames" + where);
    if (step % 4 == 3) continue;  // this frame was lost
    cpu.commit();
    device.commit(execution);
    for (std::size_t l = 0; l < model.layers(); ++l) {
      require(same_bits(device.residual(execution, l), cpu.residual()[l]),
              "the residuals of layer " + std::to_string(l) + where);
    }
  }
}

/// An element of a later piece whose velocity would overflow while its residual would not is left out of both.
template <class Execution>
void leaves_out_of_velocity_and_residual(const Execution& execution) {
  constexpr float largest = std::numeric_limits<float>::max();
  const lamina::layout model = model_of({1, 4});
  lamina::cuda::gradient_compressor<float> device(model, {.drop_ratio = 0.5, .momentum = 0.5});
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const thrust::device_vector<double> agreed = on_device<double>({0, 1});  // holds layer 0 back
  const auto add = [&](float element) {
    execution.wait();  // or a launch before may not have read what is written now
    gradients.set(0, {element});
    device.accumulate(execution);
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

/// Selecting again by the same flags of what is held is the same selection; by others, or by none, it is not.
template <class Execution>
void refuses_other_layers_held(const Execution& execution) {
  const lamina::layout model = model_of({100, 50});
  lamina::cuda::gradient_compressor<float> device(model, {.drop_ratio = 0});
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const auto agreed = on_device(std::vector<double>{1, 2});
  const auto held = on_device(std::vector<std::uint8_t>{1, 0});
  const auto held_by_another_byte = on_device(std::vector<std::uint8_t>{7, 0});
  const auto other = on_device(std::vector<std::uint8_t>{0, 1});
  device.accumulate(execution);
  device.select(execution, address_of(agreed), address_of(held));
  device.select(execution, address_of(agreed), address_of(held_by_another_byte));
  require(device.last_step(execution).sent_elements == 50, "another selection");
  require(
      contains(message_of<std::logic_error>([&] { device.select(execution, address_of(agreed)); }), "held"),
      "a selection with nothing held was taken for the same");
  device.select(execution, address_of(agreed), address_of(other));
  require(contains(message_of<std::logic_error>([&] { (void)device.last_step(execution); }), "held"),
          "a selection with other layers held was taken for the same");
  require(device.last_step(execution).sent_elements == 50, "another selection took its place");
}

/// The same of many parts, whose flags a team compares in turns; one differs.
template <class Execution>
void refuses_one_other_part_held(const Execution& execution) {
  const std::size_t layers = 1500;
  const lamina::layout model = model_of(std::vector<std::size_t>(layers, 3));
  lamina::cuda::gradient_compressor<float> device(model, {.drop_ratio = 0});
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const auto agreed = on_device(std::vector<double>(layers, 1.0));
  const std::vector<std::uint8_t> none(layers, 0);
  const auto held = on_device(none);
  device.accumulate(execution);
  device.select(execution, address_of(agreed), address_of(held));
  device.select(execution, address_of(agreed), address_of(held));
  require(device.last_step(execution).sent_elements == 3 * layers, "the same flags were taken for others");
  for (const std::size_t other : {std::size_t{0}, std::size_t{511}, std::size_t{512}, std::size_t{1499}}) {
    std::vector<std::uint8_t> flags = none;
    flags[other] = 1;
    const auto with_one = on_device(flags);
    device.select(execution, address_of(agreed), address_of(with_one));
    require(contains(message_of<std::logic_error>([&] { (void)device.last_step(execution); }), "held"),
            "a selection with part " + std::to_string(other) + " held was taken for one with none");
  }
  require(device.last_step(execution).sent_elements == 3 * layers, "another selection took its place");
}

/// A step is decided in one way, and asked again gives the same.
template <class Execution>
void decides_a_step_in_one_way(const Execution& execution) {
  const lamina::layout model = model_of({100, 100});
  lamina::cuda::gradient_compressor<float> device(model, {.drop_ratio = 0.5});
  device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.bind(execution, gradients.tensors());
  const thrust::device_vector<double> agreed = on_device<double>({0, 1});
  const thrust::device_vector<double> alike = on_device<double>({1, 1});
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto sent = [&] {
    device.encode(execution, buffer.bytes());
    const auto report = device.last_step(execution);
    const auto bytes = buffer.to_host();
    const auto frame =
        lamina::decode<float>(std::span(bytes).first(device.prefix_bytes() + report.payload_bytes), model);
    return std::string(frame.is_dropped(0) ? "-" : "0") + (frame.is_dropped(1) ? "-" : "1");
  };
  const auto refuses = [&](const auto& call) {
    require(contains(message_of<std::logic_error>(call), "do not mix"), "the step was decided in two ways");
  };
  device.accumulate(execution);
  device.select(execution);
  refuses([&] { device.select(execution, address_of(agreed)); });
  require(sent() == "0-", "its own values send " + sent());
  refuses([&] { device.select(execution, address_of(agreed)); });
  device.select(execution);
  require(sent() == "0-", "asked again it sends " + sent());

  device.accumulate(execution);
  device.select(execution, address_of(agreed));
  refuses([&] { device.select(execution); });
  require(sent() == "-1", "agreed values send " + sent());
  device.select(execution, address_of(alike));
  require(sent() == "-1", "asked again it sends " + sent());
}

/// Before the first frame there is nothing to restore.
template <class Execution>
void restores_no_frame_before_there_is_one(const Execution& execution) {
  const lamina::layout model = model_of({100});
  lamina::cuda::gradient_compressor<float> device(model);
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
  using options = lamina::compressor_options;
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
  visit("other layers held", [&] { refuses_other_layers_held(execution); });
  visit("one other part held", [&] { refuses_one_other_part_held(execution); });
  visit("a step is decided in one way", [&] { decides_a_step_in_one_way(execution); });
  visit("restore before a step", [&] { restores_no_frame_before_there_is_one(execution); });
}

}  // namespace lamina_test
