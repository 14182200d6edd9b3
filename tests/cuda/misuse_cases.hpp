// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_support.hpp"
#include "lamina/cuda/worker.hpp"
#include "lamina/lamina.hpp"
#include "support.hpp"

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
    require(contains(message_of<std::logic_error>(call), "another device"), "nothing was thrown");
    execution.is_current = true;
    call();
  };
  execution.is_current = false;
  require(
      contains(message_of<std::logic_error>([&] { device.bind(execution, others.tensors()); }), "another"),
      "nothing was thrown");
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
  const auto refuses = [](const std::string& part, const std::string& message) {
    require(contains(message, part), "the message should name '" + part + "', but is: " + message);
  };
  using bad = std::invalid_argument;
  using order = std::logic_error;
  refuses("without layers", message_of<bad>([] { worker(lamina::layout({})); }));
  refuses("momentum", message_of<bad>([&] { worker(model, {.momentum = 1}); }));
  refuses("drop ratio", message_of<bad>([&] { worker(model, {.drop_ratio = 2}); }));
  refuses("search_every", message_of<bad>([&] { worker(model, {.search_every = 0}); }));
  refuses("always_sent", message_of<bad>([&] { worker(model, {.always_sent = {0, 2}}); }));
  lamina::worker_options of_the_host;
  of_the_host.memory = reinterpret_cast<decltype(of_the_host.memory)>(&of_the_host);  // not called
  refuses("options.memory", message_of<bad>([&] { worker(model, of_the_host); }));
  refuses("options.frame_checksum",
          message_of<bad>([&] { worker(model, {.frame_checksum = lamina::frame_checksum::none}); }));

  worker device(model);
  device_gradients<float> gradients(model, 0);
  refuses("bind()", message_of<order>([&] { device.add(execution); }));
  device.bind(execution, gradients.tensors());
  refuses("encode()", message_of<order>([&] { device.add(execution, {.commit = true}); }));
  auto tensors = gradients.tensors();
  tensors[1] = {static_cast<float*>(tensors[1].data()), std::size_t{4999}};
  refuses("layer1", message_of<bad>([&] { device.bind(execution, tensors); }));
  tensors.pop_back();
  refuses("got 1 tensors", message_of<bad>([&] { device.bind(execution, tensors); }));
  // What was bound before still is.
  gradients.set(0, std::vector<float>(100, 1.0F));
  device.add(execution);
  refuses("encode()", message_of<order>([&] { device.add(execution, {.commit = true}); }));
  require(device.residual(execution, 0)[99] == 1.0F,
          "a refused call took the place of the one before, or has added");
  device_gradients<double> wide(model, 0);
  refuses("'layer0'", message_of<bad>([&] { device.bind(execution, wide.tensors()); }));

  const frame_buffer buffer(device.largest_frame_bytes() + 64);
  const auto enough = buffer.bytes().first(device.largest_frame_bytes());
  device.select(execution);
  refuses("commit", message_of<order>([&] { device.add(execution, {.commit = true}); }));
  device.encode(execution, enough);
  device.commit(execution);
  refuses("add()", message_of<order>([&] { device.select(execution); }));
  device.add(execution);
  refuses("select()", message_of<order>([&] { device.encode(execution, enough); }));
  device.select(execution);
  refuses("encode()", message_of<order>([&] { device.commit(execution); }));
  refuses("encode()", message_of<order>([&] { device.restore(execution, enough.data()); }));
  refuses("64", message_of<bad>([&] { device.encode(execution, buffer.bytes().subspan(4)); }));
  refuses("may have", message_of<bad>([&] { device.encode(execution, enough.first(enough.size() - 1)); }));
  device.encode(execution, enough);
  device.commit(execution);
  refuses("encode()", message_of<order>([&] { device.commit(execution); }));

  device_gradients<lamina::float16> halves(model, 0);
  device.bind(execution, halves.tensors());
  device.add(execution);
  device.select(execution);
  device.encode(execution, enough);
  refuses("restore", message_of<order>([&] { device.restore(execution, enough.data()); }));
  std::vector<std::span<const float>> constant;
  for (const auto& each : gradients.tensors())
    constant.emplace_back(static_cast<float*>(each.data()), each.elements());
  device.bind(execution, constant);
  refuses("restore", message_of<order>([&] { device.restore(execution, enough.data()); }));
  device.bind(execution, gradients.tensors());
  refuses("aligned", message_of<bad>([&] { device.restore(execution, enough.data() + 2); }));

  execution.wait();
  auto bytes = buffer.to_host();
  refuses("bytes are missing",
          message_of<lamina::decode_error>([&] { lamina::cuda::finish_frame(std::span(bytes).first(63)); }));
  refuses("bytes are missing",
          message_of<lamina::decode_error>([&] { lamina::cuda::finish_frame(std::span(bytes).first(64)); }));
  bytes[0] = std::byte{0};
  refuses("magic", message_of<lamina::decode_error>([&] { lamina::cuda::finish_frame(bytes); }));
}

}  // namespace lamina_test
