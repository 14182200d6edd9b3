// SPDX-License-Identifier: MIT
#include <algorithm>
#include <lamina/codec.hpp>
#include <lamina/merge.hpp>
#include <lamina/server.hpp>
#include <variant>

#include "arrays.hpp"

namespace lamina_python {

namespace {

// The element type of a frame's or a server's class is known at run time.
template <template <class> class Class>
using of_either = std::variant<Class<float>, Class<double>>;
template <class Of>
struct element_of;
template <template <class> class Class, class T>
struct element_of<Class<T>> : std::type_identity<T> {};
template <class Of>
using element_of_t = typename element_of<std::remove_cvref_t<Of>>::type;

struct frame {
  of_either<lamina::frame_view> view;
  lamina::layout model;
  bytes_like bytes;  // what the view points into
};

struct aggregator {
  of_either<lamina::gradient_aggregator> of;
  lamina::layout model;
  std::vector<bytes_like> bytes;  // of the frames of this step
};

struct publisher {
  of_either<lamina::parameter_publisher> of;
  lamina::layout model;
};

template <template <class> class Class, class... Arguments>
of_either<Class> made(const std::string& dtype, const auto& make) {
  if (residual_type(dtype) == element_type::float64) return make.template operator()<double>();
  return make.template operator()<float>();
}

template <class T>
std::vector<std::span<const T>> parameters_of(const std::vector<std::optional<readable>>& arrays,
                                              const lamina::layout& model) {
  const tensors<readable> found = tensors_of(arrays, model);
  if (arrays.size() != model.layers() || found.arrays.size() != arrays.size())
    throw std::invalid_argument("there must be an array for each of the " + std::to_string(model.layers()) +
                                " layers");
  std::vector<std::span<const T>> spans;
  for (std::size_t layer = 0; layer < model.layers(); ++layer) {
    spans.push_back(numbers_of<const T>(name_of(model, layer), found.each[layer]));
  }
  return spans;
}
}  // namespace

void bind_server(nb::module_& m) {
  nb::class_<frame>(m, "Frame", "What decode() read: a view into the bytes, which it keeps.")
      .def_prop_ro(
          "kind",
          [](const frame& self) {
            return std::visit(
                [](const auto& view) {
                  return view.kind() == lamina::frame_kind::gradients    ? "gradients"
                         : view.kind() == lamina::frame_kind::parameters ? "parameters"
                                                                         : "updates";
                },
                self.view);
          },
          "'gradients', 'parameters' or 'updates'.")
      .def_prop_ro(
          "step",
          [](const frame& self) { return std::visit([](const auto& v) { return v.step(); }, self.view); },
          "Of the sender, counted from 1.")
      .def_prop_ro(
          "sender",
          [](const frame& self) { return std::visit([](const auto& v) { return v.sender(); }, self.view); })
      .def_prop_ro(
          "run",
          [](const frame& self) { return std::visit([](const auto& v) { return v.run(); }, self.view); },
          "0: none.")
      .def_prop_ro(
          "sent",
          [](const frame& self) {
            std::vector<std::size_t> sent;
            for (std::size_t l = 0; l < self.model.layers(); ++l) {
              if (!std::visit([l](const auto& view) { return view.is_dropped(l); }, self.view))
                sent.push_back(l);
            }
            return sent;
          },
          "Indices of the layers that were sent.")
      .def(
          "restore",
          [](const frame& self, std::size_t layer, const writable& out) {
            self.model.check_layer(layer);
            std::visit(
                [&](const auto& view) { view.restore(layer, tensor_of(out, name_of(self.model, layer))); },
                self.view);
          },
          "layer"_a, "out"_a.noconvert(), "A layer of gradients into `out`; one held back becomes zeros.")
      .def(
          "apply_to",
          [](const frame& self, std::size_t layer, const writable& out) {
            self.model.check_layer(layer);
            return std::visit(
                [&](const auto& view) {
                  return view.apply_to(layer, tensor_of(out, name_of(self.model, layer)));
                },
                self.view);
          },
          "layer"_a, "out"_a.noconvert(),
          "Overwrites `out` with the layer if it was sent, and leaves it as it is otherwise: how a worker "
          "takes the server's "
          "parameters. Returns whether it was sent.");
  m.def(
      "decode",
      [](bytes_like bytes, const lamina::layout& layout) {
        const auto data = bytes_in(bytes);
        if (lamina::peek(data).element_bytes == sizeof(double))
          return frame{lamina::decode<double>(data, layout), layout, std::move(bytes)};
        return frame{lamina::decode<float>(data, layout), layout, std::move(bytes)};
      },
      "bytes"_a.noconvert(), "layout"_a,
      "Bytes to a frame of this layout: a Compressor's `parts`, or a Publisher's layout. Any bytes whatever "
      "are safe: "
      "DecodeError says why they are refused.");
  m.def(
      "largest_frame_bytes",
      [](const lamina::layout& layout, const std::string& dtype) {
        return residual_type(dtype) == element_type::float64 ? lamina::largest_frame_bytes<double>(layout)
                                                             : lamina::largest_frame_bytes<float>(layout);
      },
      "layout"_a, "dtype"_a = "float32",
      "What a receiver need not exceed: the frame in which every layer is sent.");
  m.def(
      "merge_states",
      [](const std::vector<bytes_like>& states, const lamina::layout& parts, const std::string& dtype) {
        std::vector<std::span<const std::byte>> all;
        for (const bytes_like& each : states) all.push_back(bytes_in(each));
        return bytes_of(residual_type(dtype) == element_type::float64
                            ? lamina::merge_states<double>(all, parts)
                            : lamina::merge_states<float>(all, parts));
      },
      "states"_a.noconvert(), "parts"_a, "dtype"_a = "float32",
      "What Compressor.save gave on each of the workers, as one state for a run with another number of "
      "workers: each loads it.");

  nb::class_<aggregator>(
      m, "Aggregator",
      "A parameter server's receiving side: the mean of the workers' gradients in one step, from one frame "
      "of each. Summed in the order of the workers: deterministic.")
      .def(
          "__init__",
          [](aggregator* self, const lamina::layout& layout, std::size_t workers, const std::string& dtype,
             std::uint64_t first_step, std::uint32_t run, const std::string& kind) {
            const lamina::aggregator_options options{
                .first_step = first_step,
                .run = run,
                .kind = named<lamina::frame_kind>("kind", kind,
                                                  {{"gradients", lamina::frame_kind::gradients},
                                                   {"updates", lamina::frame_kind::updates}})};
            new (self) aggregator{
                made<lamina::gradient_aggregator>(dtype,
                                                  [&]<class T>() {
                                                    return lamina::gradient_aggregator<T>::of_workers(
                                                        layout, workers, options);
                                                  }),
                layout,
                {}};
          },
          "layout"_a, "workers"_a, nb::kw_only(), "dtype"_a = "float32", "first_step"_a = 1, "run"_a = 0,
          "kind"_a = "gradients",
          "layout: the Compressors' `parts`. first_step: whose frames are taken first. kind: of what they "
          "are, "
          "gradients, or the updates of DriftCompressors.")
      .def(
          "add",
          [](aggregator& self, const frame& of) {
            std::visit(
                [&](auto& each) {
                  using view = lamina::frame_view<element_of_t<decltype(each)>>;
                  if (!std::holds_alternative<view>(of.view))
                    throw nb::value_error("the frame is of another dtype");
                  each.add(std::get<view>(of.view));
                },
                self.of);
            self.bytes.push_back(of.bytes);
          },
          "frame"_a,
          "Takes one worker's frame. DecodeError for a frame of another step, run, or kind, or a second one "
          "of a worker; nothing "
          "is changed then.")
      .def(
          "close", [](aggregator& self) { std::visit([](auto& each) { each.close(); }, self.of); },
          "Goes on without the workers that have not come; those must not commit.")
      .def_prop_ro(
          "is_complete",
          [](const aggregator& self) {
            return std::visit([](auto& each) { return each.is_complete(); }, self.of);
          },
          "Whether the frames of all workers are there.")
      .def_prop_ro(
          "arrived",
          [](const aggregator& self) {
            return std::visit([](auto& each) { return indices_of(each.arrived()); }, self.of);
          },
          "The layers that at least one worker sent: to be updated and published.")
      .def(
          "mean",
          [](const aggregator& self, std::size_t layer, const writable& out) {
            self.model.check_layer(layer);
            const any_tensor tensor = tensor_of(out, name_of(self.model, layer));
            self.model.check_size(layer, tensor.elements());
            return std::visit(
                [&](const auto& each) {
                  using T = element_of_t<decltype(each)>;
                  const std::span<T> to = numbers_of<T>(name_of(self.model, layer), tensor);
                  each.mean(layer, [&](std::size_t begin, std::span<const T> block) {
                    std::copy(block.begin(), block.end(), to.begin() + static_cast<std::ptrdiff_t>(begin));
                  });
                  return each.arrived().is_sent(layer);
                },
                self.of);
          },
          "layer"_a, "out"_a.noconvert(),
          "The mean over the workers into `out`, those that held the layer back counting as zeros. Returns "
          "whether the layer "
          "arrived; if not, `out` is as it was.")
      .def(
          "next_step",
          [](aggregator& self) {
            std::visit([](auto& each) { each.next_step(); }, self.of);
            self.bytes.clear();
          },
          "Forgets the frames and waits for those of the next step.")
      .def_prop_ro("step", [](const aggregator& self) {
        return std::visit([](auto& each) { return each.step(); }, self.of);
      });

  nb::class_<publisher>(
      m, "Publisher",
      "A parameter server's sending side: to each worker the layers that were updated since its last frame. "
      "A worker's first frame holds every layer.")
      .def(
          "__init__",
          [](publisher* self, const lamina::layout& layout, std::size_t workers, const std::string& dtype,
             std::uint32_t run) {
            new (self) publisher{
                made<lamina::parameter_publisher>(
                    dtype,
                    [&]<class T>() { return lamina::parameter_publisher<T>(layout, workers, {.run = run}); }),
                layout};
          },
          "layout"_a, "workers"_a, nb::kw_only(), "dtype"_a = "float32", "run"_a = 0)
      .def(
          "update",
          [](publisher& self, const std::vector<std::size_t>& layers) {
            lamina::selection changed(self.model);
            for (const std::size_t layer : layers) changed.send(layer);
            std::visit([&](auto& each) { each.update(changed); }, self.of);
          },
          "layers"_a, "These layers have changed: Aggregator.arrived, mostly.")
      .def(
          "encode",
          [](publisher& self, std::size_t worker, std::uint64_t step,
             const std::vector<std::optional<readable>>& parameters) {
            return std::visit(
                [&](auto& each) {
                  const auto spans = parameters_of<element_of_t<decltype(each)>>(parameters, self.model);
                  return bytes_of(
                      each.encode(worker, step, [&](std::size_t l) { return spans[l]; }).to_bytes());
                },
                self.of);
          },
          "worker"_a, "step"_a, "parameters"_a.noconvert(),
          "The frame for one worker, a copy; an array for each layer.")
      .def(
          "encode_for_all",
          [](publisher& self, std::uint64_t step, const std::vector<std::optional<readable>>& parameters) {
            return std::visit(
                [&](auto& each) {
                  const auto spans = parameters_of<element_of_t<decltype(each)>>(parameters, self.model);
                  return bytes_of(
                      each.encode_for_all(step, [&](std::size_t l) { return spans[l]; }).to_bytes());
                },
                self.of);
          },
          "step"_a, "parameters"_a.noconvert(),
          "One frame for all: every layer that at least one worker has not seen.")
      .def(
          "commit",
          [](publisher& self, std::size_t w) { std::visit([w](auto& each) { each.commit(w); }, self.of); },
          "worker"_a, "The last frame for this worker has reached it.")
      .def("commit_all", [](publisher& self) { std::visit([](auto& each) { each.commit_all(); }, self.of); })
      .def(
          "forget",
          [](publisher& self, std::size_t w) { std::visit([w](auto& each) { each.forget(w); }, self.of); },
          "worker"_a, "The worker was restarted: its next frame holds every layer.");
}
}  // namespace lamina_python
