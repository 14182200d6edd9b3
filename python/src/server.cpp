// SPDX-License-Identifier: MIT
#include <algorithm>
#include <lamina/codec.hpp>
#include <lamina/server.hpp>
#include <lamina/state.hpp>

#include "arrays.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

struct frame {
  lamina::frame_view<float> view;
  lamina::layout model;
  bytes_like bytes;  // what the view points into
};

struct reply {
  nb::bytes bytes;
  std::uint64_t clock;
};

void refuse_if(const std::error_code& error) {
  if (error) throw lamina::decode_error(error);
}

const char* kind_of(lamina::frame_kind kind) {
  return kind == lamina::frame_kind::gradients    ? "gradients"
         : kind == lamina::frame_kind::parameters ? "parameters"
                                                  : "updates";
}

template <class Number, class Array>
std::vector<std::span<Number>> layers_of(const std::vector<std::optional<Array>>& arrays,
                                         const lamina::layout& model) {
  const tensors<Array> found = tensors_of(arrays, model);
  if (arrays.size() != model.layers() || found.arrays.size() != arrays.size())
    throw std::invalid_argument("there must be an array for each of the " + std::to_string(model.layers()) +
                                " layers");
  std::vector<std::span<Number>> spans;
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    if (!std::is_const_v<Number> && !found.each[layer].is_writable())
      throw std::invalid_argument(name_of(model, layer) + " is read-only and would be written to");
    spans.push_back(numbers_of<Number>(name_of(model, layer), found.each[layer]));
    model.check_size(layer, spans.back().size());
  }
  return spans;
}
}  // namespace

void bind_server(nb::module_& m) {
  nb::class_<frame>(m, "Frame", "What decode() read: a view into the bytes, which it keeps.")
      .def_prop_ro(
          "kind", [](const frame& self) { return kind_of(self.view.kind()); },
          "'gradients', 'parameters' or 'updates'.")
      .def_prop_ro(
          "step", [](const frame& self) { return self.view.step(); }, "Of the sender, counted from 1.")
      .def_prop_ro("sender", [](const frame& self) { return self.view.sender(); })
      .def_prop_ro(
          "run", [](const frame& self) { return self.view.run(); }, "0: none.")
      .def_prop_ro(
          "sequence", [](const frame& self) { return self.view.sequence(); },
          "Its number among the frames of its sender and step.")
      .def_prop_ro(
          "is_last", [](const frame& self) { return self.view.is_last(); }, "Of them.")
      .def_prop_ro(
          "user", [](const frame& self) { return bytes_of(self.view.user()); }, "The sender's own bytes.")
      .def_prop_ro(
          "sent",
          [](const frame& self) {
            std::vector<std::size_t> sent;
            for (std::size_t l = 0; l < self.model.layers(); ++l) {
              if (!self.view.is_dropped(l)) sent.push_back(l);
            }
            return sent;
          },
          "Indices of the layers that were sent.")
      .def(
          "restore",
          [](const frame& self, std::size_t layer, const writable& out) {
            self.model.check_layer(layer);
            self.view.restore(layer, tensor_of(out, name_of(self.model, layer)));
          },
          "layer"_a, "out"_a.noconvert(),
          "A layer of gradients into `out`; one that was dropped becomes zeros.")
      .def(
          "apply_to",
          [](const frame& self, std::size_t layer, const writable& out) {
            self.model.check_layer(layer);
            return self.view.apply_to(layer, tensor_of(out, name_of(self.model, layer)));
          },
          "layer"_a, "out"_a.noconvert(),
          "Overwrites `out` with the layer if it was sent, and leaves it as it is otherwise: how a worker "
          "takes the server's "
          "parameters. Returns whether it was sent.");
  m.def(
      "decode",
      [](bytes_like bytes, const lamina::layout& layout) {
        return frame{lamina::decode<float>(bytes_in(bytes), layout), layout, std::move(bytes)};
      },
      "bytes"_a.noconvert(), "layout"_a,
      "Bytes to a frame of this layout: a Worker's `fragments`. Any bytes whatever are safe: DecodeError "
      "says why they are refused.");
  m.def(
      "largest_frame_bytes",
      [](const lamina::layout& layout) { return lamina::largest_frame_bytes<float>(layout); }, "layout"_a,
      "What a receiver need not exceed: the frame in which every layer is sent.");
  m.def(
      "merge_states",
      [](const std::vector<bytes_like>& states, const lamina::layout& fragments) {
        std::vector<std::span<const std::byte>> all;
        for (const bytes_like& each : states) all.push_back(bytes_in(each));
        return bytes_of(lamina::merge_states<float>(all, fragments));
      },
      "states"_a.noconvert(), "fragments"_a,
      "What Worker.save gave on each of the workers, as one state for a run with another number of workers: "
      "each loads it.");

  nb::class_<reply>(m, "Reply", "A frame for one worker, and what Server.commit needs to hear of.")
      .def_prop_ro(
          "bytes", [](const reply& self) { return self.bytes; }, "The frame, a copy.")
      .def_prop_ro("clock", [](const reply& self) { return self.clock; });

  using server = lamina::server<float>;
  nb::class_<server>(m, "Server",
                     "A parameter server, over float32, without the parameters: frames of gradients in, "
                     "their mean out, and to each worker the layers "
                     "that were updated since its last reply.\n\n"
                     "    server.add(frame)                          # of each worker\n"
                     "    for layer in server.update(mean):          # the layers that arrived\n"
                     "        parameters[layer] -= rate * mean[layer]\n"
                     "    for worker in server.workers:\n"
                     "        reply = server.reply(worker, parameters)\n"
                     "        send(worker, reply.bytes)\n"
                     "        server.commit(worker, reply.clock)")
      .def(
          "__init__",
          [](server* self, const lamina::layout& layout, std::size_t workers, std::vector<std::size_t> nodes,
             bool asynchronous, const std::string& kind, std::size_t fragment_elements,
             std::uint64_t first_step, std::uint32_t run, const std::string& payload) {
            new (self) server(
                layout, {.workers = workers,
                         .nodes = std::move(nodes),
                         .asynchronous = asynchronous,
                         .kind = named<lamina::frame_kind>("kind", kind,
                                                           {{"gradients", lamina::frame_kind::gradients},
                                                            {"updates", lamina::frame_kind::updates}}),
                         .fragment_elements = fragment_elements,
                         .first_step = first_step,
                         .run = run,
                         .payload = payload_of(payload)});
          },
          "layout"_a, "workers"_a = 1, nb::kw_only(), "nodes"_a = std::vector<std::size_t>(),
          "asynchronous"_a = false, "kind"_a = "gradients", "fragment_elements"_a = 0, "first_step"_a = 1,
          "run"_a = 0, "payload"_a = "as_is",
          "layout: the model. nodes: for each sender the workers whose sum it sends. asynchronous: each "
          "frame is a step of its own. kind: "
          "of what the frames are, gradients, or the updates of LocalDeltas. fragment_elements: as of "
          "the workers.")
      .def(
          "add",
          [](server& self, const bytes_like& bytes) {
            const auto data = bytes_in(bytes);
            refuse_if(self.add(std::vector<std::byte>(data.begin(), data.end())));
          },
          "bytes"_a.noconvert(),
          "Takes the bytes of a worker's frame. DecodeError says why they are refused; nothing has changed "
          "then.")
      .def_prop_ro(
          "complete", [](const server& self) { return self.complete(); },
          "Whether every worker's frame is there; asynchronous, whether one is.")
      .def_prop_ro(
          "arrived", [](const server& self) { return indices_of(self.arrived()); },
          "Indices of the fragments that the frames hold which are there.")
      .def(
          "update",
          [](server& self, const std::vector<std::optional<writable>>& mean) {
            const auto layers = layers_of<float>(mean, self.model());
            std::vector<char> arrived(layers.size());
            self.update([&](std::size_t layer, std::size_t begin, std::span<const float> block) {
              if (std::exchange(arrived[layer], char{1}) == 0) std::ranges::fill(layers[layer], 0.0F);
              for (std::size_t i = 0; i < block.size(); ++i) layers[layer][begin + i] += block[i];
            });
            std::vector<std::size_t> indices;
            for (std::size_t layer = 0; layer < arrived.size(); ++layer) {
              if (arrived[layer] != 0) indices.push_back(layer);
            }
            return indices;
          },
          "mean"_a.noconvert(),
          "Writes the mean gradient of each layer that arrived into its array of `mean`, zeros where "
          "fragments of it did not, leaves the "
          "others, begins the next step, and returns the layers that arrived. RuntimeError if no frame is "
          "there.")
      .def_prop_ro(
          "workers",
          [](const server& self) {
            return std::vector<std::size_t>(self.workers().begin(), self.workers().end());
          },
          "Who waits for a reply.")
      .def(
          "reply",
          [](server& self, std::size_t worker, const std::vector<std::optional<readable>>& parameters) {
            const auto of = self.reply(worker, layers_of<const float>(parameters, self.model()));
            return reply{bytes_of(of.to_bytes()), of.clock()};
          },
          "worker"_a, "parameters"_a.noconvert(),
          "The layers that were updated since the last reply to this worker that was committed; the first "
          "holds every layer.")
      .def(
          "commit", [](server& self, std::size_t worker, std::uint64_t clock) { self.commit(worker, clock); },
          "worker"_a, "clock"_a, "The reply of this clock has reached the worker.")
      .def("forget", &server::forget, "worker"_a,
           "The worker was restarted: its next reply holds every layer.")
      .def_prop_ro(
          "step", [](const server& self) { return self.step(); }, "Whose frames are accepted.")
      .def_prop_ro(
          "fragments", [](const server& self) { return self.fragments(); }, "What frames are of.");
}
}  // namespace lamina_python
