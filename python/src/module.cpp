// SPDX-License-Identifier: MIT
// lamina._core: the library's public classes for Python, over arrays of whatever speaks DLPack or the buffer protocol. No logic:
// what is checked here is what C++ knows by type.
#include <lamina/error.hpp>
#include <lamina/layout.hpp>
#include <lamina/version.hpp>

#include "arrays.hpp"

namespace {

using namespace lamina_python;

void bind_layout(nb::module_& m) {
  nb::class_<lamina::layout>(m, "Layout", "Names and shapes of a model's layers, in order. Immutable.")
      .def(
          "__init__",
          [](lamina::layout* self, const nb::dict& shapes) {
            std::vector<lamina::layer> layers;
            for (const auto [name, shape] : shapes) {
              if (!nb::isinstance<nb::str>(name) || nb::isinstance<nb::str>(shape))
                throw nb::type_error("a layout is of names and shapes: {'weight': (512, 256)}");
              lamina::layer each{nb::cast<std::string>(name), {}};
              for (const nb::handle size : shape) {
                std::size_t elements = 0;
                if (!nb::try_cast(size, elements))
                  throw nb::type_error(
                      ("layer '" + each.name + "': a size is no whole number from 0 on").c_str());
                each.shape.push_back(elements);
              }
              layers.push_back(std::move(each));
            }
            new (self) lamina::layout(std::move(layers));
          },
          "shapes"_a, nb::sig("def __init__(self, shapes: dict[str, collections.abc.Sequence[int]]) -> None"),
          "A layer for each name and shape, in the order of the dict. ValueError for a model too large to "
          "count.")
      .def("__len__", &lamina::layout::layers)
      .def_prop_ro(
          "names",
          [](const lamina::layout& self) {
            std::vector<std::string> names;
            for (std::size_t l = 0; l < self.layers(); ++l) names.push_back(self[l].name);
            return names;
          },
          "Of the layers, in order.")
      .def_prop_ro(
          "sizes",
          [](const lamina::layout& self) {
            return std::vector<std::size_t>(self.sizes().begin(), self.sizes().end());
          },
          "Elements of each layer.")
      .def_prop_ro(
          "shapes",
          [](const lamina::layout& self) {
            std::vector<std::vector<std::size_t>> shapes;
            for (std::size_t l = 0; l < self.layers(); ++l) shapes.push_back(self[l].shape);
            return shapes;
          },
          "Of the layers, in order.")
      .def_prop_ro("elements", &lamina::layout::elements, "Elements of all layers.")
      .def_prop_ro("fingerprint", &lamina::layout::fingerprint,
                   "64 bits; a frame of another model is refused by them.")
      .def(
          "index_of", [](const lamina::layout& self, const std::string& name) { return self.index_of(name); },
          "name"_a, "The index of the layer of this name, or None.");
}
}  // namespace

NB_MODULE(_core, m) {
#ifdef NDEBUG
  nb::set_leak_warnings(false);  // PyTorch ends without releasing hooks, and what they hold
#endif
  m.doc() =
      "Layer dropping over arrays, by the C++ library lamina. Arrays are of whatever speaks DLPack or the "
      "buffer "
      "protocol, lie in the memory of the CPU and are contiguous: others raise TypeError. None is copied.";
  nb::exception<lamina::decode_error>(m, "DecodeError", PyExc_ValueError).doc() =
      "Bytes that are not a frame or a state of this model: damaged, cut short, of another model, step or "
      "run.";
  m.attr("version") = std::to_string(LAMINA_VERSION_MAJOR) + "." + std::to_string(LAMINA_VERSION_MINOR) +
                      "." + std::to_string(LAMINA_VERSION_PATCH);
  bind_layout(m);
  bind_worker(m);
  bind_local(m);
  bind_selector(m);
  bind_server(m);
  bind_payloads(m);
}
