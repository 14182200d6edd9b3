// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <cstddef>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/compressor.hpp"
#include "lamina/cuda/frame.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

/// Launches that graphs repeat, where the host does not see their order.
namespace lamina_test {

/// Launches of all calls of a step, in any order, beside a CPU that does the ones in order alone: frames, residuals and
/// gradients are the same after each, and last_step() tells whether there was one out of order.
template <class Execution>
void replays_lose_nothing(const Execution& execution, lamina::compressor_options options) {
  const lamina::layout model = model_of({1, 0, 65, 4097, 300, 20000});
  options.non_finite = lamina::non_finite::skip;
  lamina::gradient_compressor<float> cpu(model, options);
  lamina::cuda::gradient_compressor<float> device(model, options);
  const bool restores = options.payload == lamina::payload_type::as_is;
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const recording select(execution);
  const recording encode(execution);
  const recording commit(execution);
  const recording restore(execution);
  // By whether it commits, and whether it selects.
  const std::array<std::array<recording<Execution>, 2>, 2> together = {
      {{recording(execution), recording(execution)}, {recording(execution), recording(execution)}}};
  device.accumulate(together[0][0]);
  device.select(select);
  device.encode(encode, buffer.bytes());
  device.accumulate(together[1][0], {.commit = true});
  device.accumulate(together[0][1], {.select = true});
  device.encode(recording(execution), buffer.bytes());
  device.accumulate(together[1][1], {.commit = true, .select = true});
  device.encode(recording(execution), buffer.bytes());
  device.commit(commit);
  if (restores) device.restore(restore, buffer.bytes().data() + device.prefix_bytes());

  enum class phase { committed, accumulating, selected, encoded } now = phase::committed;
  bool has_frame = false;
  bool was_in_order = true;
  std::vector<std::byte> frame;  // the CPU's last
  std::string calls;
  std::mt19937 random(11);
  for (int launch = 0; launch < 250; ++launch) {
    // Mostly the next in order, so that all phases are reached.
    const std::size_t next = now == phase::committed ? 0 : static_cast<std::size_t>(now);
    std::size_t call = below(random, 3) > 0 ? next : below(random, 5);
    bool commits = below(random, 8) == 0;
    const bool selects = below(random, 2) == 0;
    if (call == 3 && below(random, 2) == 0) {  // with the next gradients
      call = 0;
      commits = true;
    }
    bool is_in_order = true;
    switch (call) {
      case 0:
        calls += commits ? (selects ? 'B' : 'A') : (selects ? 'S' : 'a');
        is_in_order = !commits || now == phase::encoded;
        if (commits && is_in_order) cpu.commit();
        for (std::size_t l = 0; l < model.layers(); ++l) {
          const auto gradient = random_fractions<float>(random, model.sizes()[l]);
          gradients.set(l, gradient);
          cpu.accumulate(l, gradient);
        }
        together[commits ? 1 : 0][selects ? 1 : 0].replay();
        if (selects) cpu.select();
        now = selects ? phase::selected : phase::accumulating;
        has_frame = false;
        break;
      case 1:
        calls += 's';
        select.replay();
        is_in_order = now != phase::committed;
        if (now == phase::accumulating) {
          cpu.select();
          now = phase::selected;
        }
        break;
      case 2: {
        calls += 'e';
        encode.replay();
        is_in_order = now == phase::selected || now == phase::encoded;
        execution.wait();
        auto bytes = buffer.to_host();
        if (is_in_order) {
          frame = cpu.encode().to_bytes();
          require(same_bits(lamina::cuda::finish_frame(bytes), frame), "the frames differ after " + calls);
          now = phase::encoded;
          has_frame = true;
        } else {
          require(throws<lamina::decode_error>([&] { lamina::cuda::finish_frame(bytes); }),
                  "an old frame was left after " + calls);
        }
        break;
      }
      case 3:
        calls += 'c';
        commit.replay();
        is_in_order = now == phase::encoded;
        if (is_in_order) {
          cpu.commit();
          now = phase::committed;
        }
        if (below(random, 4) == 0) {  // by two graphs
          calls += 'c';
          commit.replay();
          is_in_order = false;
        }
        break;
      default: {
        if (!restores) break;
        calls += 'r';
        std::vector<std::vector<float>> expected;
        for (std::size_t l = 0; l < model.layers(); ++l) expected.push_back(gradients.get(l));
        is_in_order = has_frame;
        if (is_in_order) {
          const auto view = lamina::decode<float>(frame, model);
          for (std::size_t l = 0; l < model.layers(); ++l) view.restore(l, expected[l]);
        }
        restore.replay();
        execution.wait();
        for (std::size_t l = 0; l < model.layers(); ++l) {
          require(same_bits(gradients.get(l), expected[l]), "other gradients are restored after " + calls);
        }
      }
    }
    was_in_order = was_in_order && is_in_order;
    for (std::size_t l = 0; l < model.layers(); ++l) {
      require(same_bits(device.residual(execution, l), cpu.residual()[l]),
              "the residuals of layer " + std::to_string(l) + " differ after " + calls);
    }
    if (below(random, 4) > 0) continue;
    const auto message = message_of<std::logic_error>([&] { (void)device.last_step(execution); });
    require(contains(message, "out of order") != was_in_order,
            "last_step says " + message + " after " + calls);
    was_in_order = true;
    (void)device.last_step(execution);  // told once
  }
}

/// What is told of each launch out of order.
template <class Execution>
void tells_what_was_out_of_order(const Execution& execution) {
  const lamina::layout model = model_of({100, 5000});
  lamina::cuda::gradient_compressor<float> device(model);
  device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const recording accumulate(execution);
  const recording select(execution);
  const recording select_agreed(execution);
  const recording encode(execution);
  const recording commit(execution);
  const recording restore(execution);
  const recording commit_and_accumulate(execution);
  const thrust::device_vector<double> agreed = on_device<double>({1, 0});
  device.accumulate(recording(execution));
  device.select(select_agreed, address_of(agreed));
  device.accumulate(accumulate);
  device.select(select);
  device.encode(encode, buffer.bytes());
  device.accumulate(commit_and_accumulate, {.commit = true});
  device.select(recording(execution));
  device.encode(recording(execution), buffer.bytes());
  device.commit(commit);
  device.restore(restore, buffer.bytes().data() + device.prefix_bytes());
  const auto tells = [&](const std::string& part) {
    const auto message = message_of<std::logic_error>([&] { (void)device.last_step(execution); });
    require(contains(message, part), "the message should hold '" + part + "', but is: " + message);
  };
  select.replay();
  tells("select: was launched without gradients");
  commit.replay();
  tells("commit: was launched without a frame");
  restore.replay();
  tells("restore: was launched without a frame");
  accumulate.replay();
  encode.replay();
  tells("encode: was launched without a selection");
  select_agreed.replay();
  const auto sent = device.last_step(execution).sent_elements;
  select.replay();
  tells("do not mix");
  require(device.last_step(execution).sent_elements == sent, "the selection changed");
  encode.replay();
  commit.replay();
  commit.replay();
  tells("commit: was launched twice");
  select.replay();
  encode.replay();
  tells("; encode");

  const auto has = [&](float residual) {
    require(device.residual(execution, 0)[99] == residual,
            "the residual is " + std::to_string(device.residual(execution, 0)[99]));
  };
  // The only frame was committed, so the gradients come on top of nothing.
  commit_and_accumulate.replay();
  tells("commit: was launched twice");
  has(1);
  commit_and_accumulate.replay();
  tells("commit: was launched without a frame");
  has(2);
  select.replay();
  encode.replay();
  commit_and_accumulate.replay();
  has(1);
  commit.replay();
  tells("commit: was launched without a frame");
  has(1);
}

/// A commit with the next gradients that the host can see is out of order throws, and launches nothing.
template <class Execution>
void refuses_to_commit_with_gradients(const Execution& execution) {
  const lamina::layout model = model_of({100});
  lamina::cuda::gradient_compressor<float> device(model);
  device_gradients<float> gradients(model, 0);
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto refuses = [&](float residual) {
    const auto message =
        message_of<std::logic_error>([&] { device.accumulate(execution, {.commit = true}); });
    require(contains(message, "commit") && contains(message, "encode()"), "the message is: " + message);
    require(device.residual(execution, 0)[99] == residual, "gradients were added");
  };
  refuses(0);
  device.accumulate(execution);
  refuses(1);
  device.select(execution);
  refuses(1);
  device.encode(execution, buffer.bytes());
  device.commit(execution);
  refuses(0);
  device.accumulate(execution, {.select = true});
  refuses(1);
  device.encode(execution, buffer.bytes());
  device.accumulate(execution, {.commit = true});
  refuses(1);  // a second piece
  (void)device.last_step(execution);
}

template <class Execution>
void for_each_replay_case(const Execution& execution, const visitor& visit) {
  using options = lamina::compressor_options;
  using lamina::payload_type;
  const auto replays = [&](const std::string& name, const options& each) {
    visit("replays" + name, [&execution, each] { replays_lose_nothing(execution, each); });
  };
  replays("", {.drop_ratio = 0.7});
  replays(", momentum", {.drop_ratio = 0.7, .momentum = 0.5});
  replays(", payload int8", {.drop_ratio = 0.7, .payload = payload_type::int8});
  replays(", payload int4, momentum", {.drop_ratio = 0.7, .momentum = 0.5, .payload = payload_type::int4});
  replays(", payload float16, a budget",
          {.byte_budget = 0.3, .max_age = 3, .payload = payload_type::float16});
  visit("replays, what is told", [&] { tells_what_was_out_of_order(execution); });
  visit("a commit with gradients, refused", [&] { refuses_to_commit_with_gradients(execution); });
}

}  // namespace lamina_test
