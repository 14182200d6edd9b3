// SPDX-License-Identifier: MIT
#pragma once

#include "device_support.hpp"

/// Launches that graphs repeat, where the host does not see their order.
namespace lamina_test {

/// Launches of all calls of a step, in any order, compared with a CPU that does the ones in order alone: frames, residuals and
/// gradients are the same after each, and last_step() tells whether there was one out of order.
template <class Execution>
void replays_lose_nothing(const Execution& execution, lamina::worker_options options) {
  const lamina::layout model = model_of({1, 0, 65, 4097, 300, 20000});
  host_worker<float> cpu(model, options);
  lamina::cuda::worker<float> device(model, options);
  const bool restores = options.payload == lamina::payload_type::as_is;
  device_gradients<float> gradients(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const postponed select(execution);
  const postponed encode(execution);
  const postponed commit(execution);
  const postponed restore(execution);
  // By whether it commits, and whether it selects.
  const std::array<std::array<postponed<Execution>, 2>, 2> together = {
      {{postponed(execution), postponed(execution)}, {postponed(execution), postponed(execution)}}};
  device.add(together[0][0]);
  device.select(select);
  device.encode(encode, buffer.bytes());
  device.add(together[1][0], {.commit = true});
  device.add(together[0][1], {.select = true});
  device.encode(postponed(execution), buffer.bytes());
  device.add(together[1][1], {.commit = true, .select = true});
  device.encode(postponed(execution), buffer.bytes());
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
          cpu.add(l, gradient);
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
          frame = cpu.encode();
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
    require_same_residuals(cpu, device, execution, "after " + calls);
    if (below(random, 4) > 0) continue;
    const auto message = message_of<std::logic_error>([&] { (void)device.last_step(execution); });
    require(contains(message, "out of order") != was_in_order,
            "last_step says " + message + " after " + calls);
    was_in_order = true;
    (void)device.last_step(execution);  // told once
  }
}

template <class Execution>
void for_each_replay_case(const Execution& execution, const visitor& visit) {
  using options = lamina::worker_options;
  using lamina::payload_type;
  const auto replays = [&](const std::string& name, const options& each) {
    visit("replays" + name, [&execution, each] { replays_lose_nothing(execution, each); });
  };
  replays("", {.drop_ratio = 0.7});
  replays(", momentum", {.drop_ratio = 0.7, .momentum = 0.5});
  replays(", payload int8", {.drop_ratio = 0.7, .payload = payload_type::int8});
  replays(", payload int4, momentum", {.drop_ratio = 0.7, .momentum = 0.5, .payload = payload_type::int4});
  replays(", payload float16, a budget",
          {.send_budget = 0.3, .at_least_every = 3, .payload = payload_type::float16});
}

}  // namespace lamina_test
