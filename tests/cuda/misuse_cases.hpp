// SPDX-License-Identifier: MIT
#pragma once

#include "device_support.hpp"

/// Calls out of order, and arguments that cannot be.
namespace lamina_test {

/// An execution whose device is current or not.
template <class Execution>
struct elsewhere : Execution {
  explicit elsewhere(const Execution& execution) : Execution(execution) {}
  void require_current_device() const {
    if (!is_current) throw std::logic_error("another device is current");
  }
  bool is_current = true;
};

/// A call that throws before its launch has done nothing, so it can be made again.
template <class Execution>
void can_be_called_again(const Execution& here) {
  elsewhere<Execution> execution(here);
  const lamina::layout model = model_of({100, 5000});
  lamina::cuda::worker<float> device(model, {.drop_ratio = 0});
  device_gradients<float> gradients(model, 0);
  gradients.set(1, std::vector<float>(5000, 1.0F));
  device_gradients<float> others(model, 0);
  device.bind(execution, gradients.tensors());
  const frame_buffer buffer(device.largest_frame_bytes());
  const auto twice = [&](const auto& call) {
    execution.is_current = false;
    refuses<std::logic_error>({"another device"}, call);
    execution.is_current = true;
    call();
  };
  execution.is_current = false;
  refuses<std::logic_error>({"another device"}, [&] { device.bind(execution, others.tensors()); });
  for (int step = 1; step <= 2; ++step) {  // by what was bound before
    twice([&] { device.add(execution, {.commit = step == 2}); });
    twice([&] { device.select(execution); });
    twice([&] { device.encode(execution, buffer.bytes()); });
    require(device.last_step(execution).step == static_cast<std::uint64_t>(step), "another step");
    require(device.residual(execution, 1)[0] == 1.0F, "a frame that has arrived was not committed");
  }
  twice([&] { device.commit(execution); });
}

/// Each misuse throws the right exception, names the culprit, and leaves what was bound before.
template <class Execution>
void refuses_misuse(const Execution& execution) {
  using worker = lamina::cuda::worker<float>;
  const lamina::layout model = model_of({100, 5000});
  using bad = std::invalid_argument;
  using order = std::logic_error;
  refuses<bad>({"without layers"}, [] { worker(lamina::layout({})); });
  refuses<bad>({"momentum"}, [&] { worker(model, {.momentum = 1}); });
  refuses<bad>({"drop ratio"}, [&] { worker(model, {.drop_ratio = 2}); });
  refuses<bad>({"search_every"}, [&] { worker(model, {.search_every = 0}); });
  refuses<bad>({"always_sent"}, [&] { worker(model, {.always_sent = {0, 2}}); });
  lamina::worker_options of_the_host;
  of_the_host.memory = reinterpret_cast<decltype(of_the_host.memory)>(&of_the_host);  // not called
  refuses<bad>({"options.memory"}, [&] { worker(model, of_the_host); });
  refuses<bad>({"options.frame_checksum"},
               [&] { worker(model, {.frame_checksum = lamina::frame_checksum::none}); });

  worker device(model);
  device_gradients<float> gradients(model, 0);
  refuses<order>({"bind()"}, [&] { device.add(execution); });
  device.bind(execution, gradients.tensors());
  refuses<order>({"encode()"}, [&] { device.add(execution, {.commit = true}); });
  auto tensors = gradients.tensors();
  tensors[1] = {static_cast<float*>(tensors[1].data()), std::size_t{4999}};
  refuses<bad>({"layer1"}, [&] { device.bind(execution, tensors); });
  tensors.pop_back();
  refuses<bad>({"got 1 tensors"}, [&] { device.bind(execution, tensors); });
  // What was bound before still is.
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.add(execution);
  refuses<order>({"encode()"}, [&] { device.add(execution, {.commit = true}); });
  require(device.residual(execution, 0)[99] == 1.0F,
          "a refused call took the place of the one before, or has added");
  device_gradients<double> wide(model, 0);
  refuses<bad>({"'layer0'"}, [&] { device.bind(execution, wide.tensors()); });

  const frame_buffer buffer(device.largest_frame_bytes() + 64);
  const auto enough = buffer.bytes().first(device.largest_frame_bytes());
  device.select(execution);
  refuses<order>({"commit"}, [&] { device.add(execution, {.commit = true}); });
  device.encode(execution, enough);
  device.commit(execution);
  refuses<order>({"add()"}, [&] { device.select(execution); });
  device.add(execution);
  refuses<order>({"select()"}, [&] { device.encode(execution, enough); });
  device.select(execution);
  refuses<order>({"encode()"}, [&] { device.commit(execution); });
  refuses<order>({"encode()"}, [&] { device.restore(execution, enough.data()); });
  refuses<bad>({"64"}, [&] { device.encode(execution, buffer.bytes().subspan(4)); });
  refuses<bad>({"may have"}, [&] { device.encode(execution, enough.first(enough.size() - 1)); });
  device.encode(execution, enough);
  device.commit(execution);
  refuses<order>({"encode()"}, [&] { device.commit(execution); });

  device_gradients<lamina::float16> halves(model, 0);
  device.bind(execution, halves.tensors());
  device.add(execution);
  device.select(execution);
  device.encode(execution, enough);
  refuses<order>({"restore"}, [&] { device.restore(execution, enough.data()); });
  std::vector<std::span<const float>> constant;
  for (const auto& each : gradients.tensors())
    constant.emplace_back(static_cast<float*>(each.data()), each.elements());
  device.bind(execution, constant);
  refuses<order>({"restore"}, [&] { device.restore(execution, enough.data()); });
  device.bind(execution, gradients.tensors());
  refuses<bad>({"aligned"}, [&] { device.restore(execution, enough.data() + 2); });

  execution.wait();
  auto bytes = buffer.to_host();
  refuses<lamina::decode_error>({"bytes are missing"},
                                [&] { lamina::cuda::finish_frame(std::span(bytes).first(63)); });
  refuses<lamina::decode_error>({"bytes are missing"},
                                [&] { lamina::cuda::finish_frame(std::span(bytes).first(64)); });
  bytes[0] = std::byte{0};
  refuses<lamina::decode_error>({"magic"}, [&] { lamina::cuda::finish_frame(bytes); });
}

}  // namespace lamina_test
