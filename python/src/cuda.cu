// SPDX-License-Identifier: MIT
// lamina._cuda: lamina::cuda::worker for Python. Pointers and streams are integers, as frameworks give them; what lies
// behind them is the caller's. Built where LAMINA_PYTHON_CUDA is ON.
#include <lamina/cuda/lamina.cuh>
#include <lamina/error.hpp>

#include "arrays.hpp"
#include "options.hpp"

namespace {

using namespace lamina_python;
using worker = lamina::cuda::worker<float>;

// Of the current device. RuntimeError, with CUDA's name for it, where there is none.
lamina::cuda::on_stream on(std::uintptr_t stream) {
  return lamina::cuda::on_stream(reinterpret_cast<cudaStream_t>(stream));
}

template <class X>
X* at(std::uintptr_t address) {
  return reinterpret_cast<X*>(address);
}

lamina::layout layout_of(const nb::dict& shapes) {
  std::vector<lamina::layer> layers;
  for (const auto [name, shape] : shapes) {
    lamina::layer each;
    if (!nb::try_cast(name, each.name) || !nb::try_cast(shape, each.shape))
      throw nb::type_error("a model is of names and shapes: {'weight': (512, 256)}");
    layers.push_back(std::move(each));
  }
  return lamina::layout(std::move(layers));
}

// Pointer, elements and element type of each layer.
using row = std::tuple<std::uintptr_t, std::size_t, std::string>;

std::vector<lamina::cuda::device_tensor> tensors_of(const std::vector<row>& gradients) {
  using lamina::cuda::device_tensor;
  std::vector<device_tensor> tensors;
  for (const auto& [address, elements, type] : gradients) {
    if (type == "float32") {
      tensors.emplace_back(at<float>(address), elements);
    } else if (type == "float16") {
      tensors.emplace_back(at<lamina::float16>(address), elements);
    } else if (type == "bfloat16") {
      tensors.emplace_back(at<lamina::bfloat16>(address), elements);
    } else {
      throw std::invalid_argument("layer " + std::to_string(tensors.size()) + ": gradients of '" + type +
                                  "' are not float32, float16 or bfloat16");
    }
  }
  return tensors;
}

nb::dict report_of(worker& self, std::uintptr_t stream) {
  const lamina::cuda::step_report last = self.last_step(on(stream));
  nb::dict report;
  report["step"] = last.step;
  report["threshold"] = last.threshold;
  report["sent_elements"] = last.sent_elements;
  report["payload_bytes"] = last.payload_bytes;
  report["left_out_elements"] = last.left_out_elements;
  report["refused_batches"] = last.refused_batches;
  report["is_refused"] = last.is_refused;
  return report;
}

void load(worker& self, std::uintptr_t stream, const nb::bytes& state) {
  try {
    self.load(on(stream), std::span(static_cast<const std::byte*>(state.data()), state.size()));
  } catch (const lamina::decode_error& error) {  // a ValueError, as lamina.DecodeError is one
    throw nb::value_error(error.what());
  }
}

}  // namespace

NB_MODULE(_cuda, m) {
  m.doc() =
      "Layer dropping over gradients in a GPU's memory, by the C++ library lamina. Pointers and streams are "
      "integers, such as tensor.data_ptr() and torch.cuda.current_stream().cuda_stream. "
      "RuntimeError, with CUDA's name of the error, where there is no device.";
  nb::class_<worker>(m, "Worker",
                     "A worker's step on the current device, with a residual of float32: accumulate, "
                     "select, encode, commit. "
                     "Calls enqueue on `stream`, and wait where that is said. What they mean is in "
                     "docs/cuda.md.")
      .def(
          "__init__",
          [](worker* self, const nb::dict& shapes, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t search_every, std::optional<double> send_budget, std::uint64_t at_least_every,
             std::size_t fragment_elements, double momentum, const std::string& payload) {
            lamina::worker_options options{.drop_ratio = drop_ratio,
                                           .warm_up_steps = warm_up_steps,
                                           .search_every = search_every,
                                           .send_budget = send_budget,
                                           .at_least_every = at_least_every,
                                           .fragment_elements = fragment_elements,
                                           .momentum = momentum,
                                           .payload = payload_of(payload)};
            if (search_every == 0) throw std::invalid_argument("search_every must be at least 1 step");
            const lamina::layout model = layout_of(shapes);
            (void)on(0);  // or memory that cannot be had would be what is wrong
            new (self) worker(model, options);
          },
          "shapes"_a, nb::kw_only(), "drop_ratio"_a = 0.95, "warm_up_steps"_a = 0, "search_every"_a = 1,
          "send_budget"_a = nb::none(), "at_least_every"_a = 0, "fragment_elements"_a = 0, "momentum"_a = 0.0,
          "payload"_a = "as_is",
          "Of a model as lamina.Layout takes it. ValueError, naming the option, for one outside its range; "
          "RuntimeError where there is no device.")
      .def(
          "bind",
          [](worker& self, std::uintptr_t stream, const std::vector<row>& gradients) {
            self.bind(on(stream), tensors_of(gradients));
          },
          "stream"_a, "gradients"_a,
          "Where the gradients are from now on: for each layer (pointer, elements, 'float32' or 'float16' or "
          "'bfloat16'). ValueError names the layer.")
      .def(
          "accumulate",
          [](worker& self, std::uintptr_t stream, bool commit, bool select, std::uintptr_t found_inf,
             std::uintptr_t inverse_scale) {
            self.add(on(stream),
                     {commit, select, at<const float>(found_inf), at<const float>(inverse_scale)});
          },
          "stream"_a, nb::kw_only(), "commit"_a = false, "select"_a = false, "found_inf"_a = 0,
          "inverse_scale"_a = 0,
          "Adds the gradients; `found_inf` and `inverse_scale` point to a float each on the device, 0: none.")
      .def(
          "copy_values",
          [](worker& self, std::uintptr_t stream, std::uintptr_t to) {
            (void)on(stream);  // or another device may be current
            lamina::cuda::check_error(
                cudaMemcpyAsync(at<double>(to), self.values(), self.fragments().layers() * sizeof(double),
                                cudaMemcpyDefault, reinterpret_cast<cudaStream_t>(stream)));
          },
          "stream"_a, "to"_a, "The values of the step, a float64 a fragment.")
      .def(
          "select",
          [](worker& self, std::uintptr_t stream, std::uintptr_t agreed, std::uintptr_t held) {
            if (agreed == 0 && held != 0) throw std::invalid_argument("held goes with agreed values alone");
            self.select(on(stream), at<const double>(agreed), at<const std::uint8_t>(held));
          },
          "stream"_a, "agreed"_a = 0, "held"_a = 0,
          "By this worker's values, or by those that `agreed` points to; `held` points to a byte a fragment.")
      .def(
          "encode",
          [](worker& self, std::uintptr_t stream, std::uintptr_t to, std::size_t bytes) {
            self.encode(on(stream), {at<std::byte>(to), bytes});
          },
          "stream"_a, "to"_a, "bytes"_a,
          "Writes the frame to memory that the device can write, at a multiple of 64.")
      .def(
          "commit", [](worker& self, std::uintptr_t stream) { self.commit(on(stream)); }, "stream"_a)
      .def(
          "restore",
          [](worker& self, std::uintptr_t stream, std::uintptr_t payload) {
            self.restore(on(stream), at<const std::byte>(payload));
          },
          "stream"_a, "payload"_a, "Over the gradients what `payload` points to, and zeros.")
      .def("last_step", report_of, "stream"_a, "Waits. RuntimeError if launches came out of order.")
      .def(
          "save",
          [](worker& self, std::uintptr_t stream) {
            const std::vector<std::byte> state = self.save(on(stream));
            return nb::bytes(state.data(), state.size());
          },
          "stream"_a, "As lamina.Compressor saves. Waits.")
      .def("load", load, "stream"_a, "state"_a, "Waits. ValueError for a state that is damaged or another's.")
      .def_prop_ro("prefix_bytes", &worker::prefix_bytes, "Before the payload of a frame.")
      .def_prop_ro("largest_frame_bytes", &worker::largest_frame_bytes)
      .def_prop_ro(
          "fragment_sizes",
          [](const worker& self) {
            return std::vector<std::size_t>(self.fragments().sizes().begin(), self.fragments().sizes().end());
          },
          "Elements of each fragment.");
}
