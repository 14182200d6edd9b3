// SPDX-License-Identifier: MIT
// Arrays of Python as tensors of lamina, without a copy, and numbers back.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <lamina/layout.hpp>
#include <lamina/selection.hpp>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "any_tensor.hpp"

namespace lamina_python {

namespace nb = nanobind;
using namespace nb::literals;

// Any array, as it is. Type stubs call it Array (stubs.txt), where nanobind would say numpy's.
template <class... Options>
struct array : nb::ndarray<Options...> {};
using readable = array<nb::ro>;
using writable = array<>;
using bytes_like = array<nb::ro, nb::device::cpu, nb::c_contig>;

inline nb::builtin_exception refused(const std::string& what, const std::string& why) {
  return nb::type_error((what + " " + why).c_str());
}

// Elements as they lie, of a type that lamina can read; `what` names the array in errors. Arrays are taken as they are, without
// constraints, so that nanobind never hands over a copy, into which results would be written.
template <class Array>
any_tensor tensor_of(const Array& array, const std::string& what) {
  const int device = array.device_type();
  if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
    throw refused(what, "is not in the memory of the CPU");
  }
  std::int64_t expected = 1;
  for (std::size_t d = array.ndim(); d > 0; --d) {
    if (array.size() > 0 && array.shape(d - 1) != 1 && array.stride(d - 1) != expected) {
      throw refused(what, "is not contiguous in row-major order");
    }
    expected *= static_cast<std::int64_t>(array.shape(d - 1));
  }
  const nb::dlpack::dtype type = array.dtype();
  const auto is = [&](nb::dlpack::dtype_code code, int bits) {
    return type.lanes == 1 && type.code == static_cast<std::uint8_t>(code) && type.bits == bits;
  };
  using enum nb::dlpack::dtype_code;
  const auto of_type = [&](element_type element) {
    return array.size() == 0 ? any_tensor::empty(element) : any_tensor(array.data(), array.size(), element);
  };
  if (is(Float, 32)) return of_type(element_type::float32);
  if (is(Float, 64)) return of_type(element_type::float64);
  if (is(Float, 16)) return of_type(element_type::float16);
  if (is(Bfloat, 16)) return of_type(element_type::bfloat16);
  throw refused(what, "is not of float32, float64, float16 or bfloat16");
}

inline std::string name_of(const lamina::layout& model, std::size_t layer) {
  return "the array of layer " + std::to_string(layer) + " '" + model[layer].name + "'";
}

// A tensor for each layer, and what keeps their memory alive.
template <class Array>
struct tensors {
  std::vector<Array> arrays;
  std::vector<any_tensor> each;
};

// From a list with an array, or None, for each layer.
template <class Array>
tensors<Array> tensors_of(const std::vector<std::optional<Array>>& list, const lamina::layout& model) {
  tensors<Array> found;
  for (std::size_t layer = 0; layer < list.size(); ++layer) {
    if (!list[layer] || layer >= model.layers()) {
      found.each.emplace_back();
      continue;
    }
    found.each.push_back(tensor_of(*list[layer], name_of(model, layer)));
    found.arrays.push_back(*list[layer]);
  }
  return found;
}

// Layers that lie in few flat arrays, as DDP's buckets are.
struct flat_arrays : tensors<writable> {
  flat_arrays(const lamina::layout& model, std::vector<writable> flat,
              const std::vector<std::pair<std::size_t, std::size_t>>& table) {
    if (table.size() != model.layers()) {
      throw std::invalid_argument("the table has " + std::to_string(table.size()) + " rows for " +
                                  std::to_string(model.layers()) + " layers");
    }
    std::vector<any_tensor> whole;
    for (std::size_t i = 0; i < flat.size(); ++i)
      whole.push_back(tensor_of(flat[i], "array " + std::to_string(i)));
    for (std::size_t layer = 0; layer < table.size(); ++layer) {
      const auto [array, begin] = table[layer];
      const std::size_t elements = model.sizes()[layer];
      if (array >= whole.size() || begin > whole[array].elements() ||
          elements > whole[array].elements() - begin) {
        throw std::invalid_argument("the table's row of layer " + std::to_string(layer) + " '" +
                                    model[layer].name + "' lies outside the arrays");
      }
      const element_type type = whole[array].type();
      std::byte* const from = static_cast<std::byte*>(whole[array].data());
      each.push_back(elements == 0 ? any_tensor::empty(type)
                                   : any_tensor(from + begin * element_bytes(type), elements, type));
    }
    arrays = std::move(flat);
  }
};

// A memoryview that owns what it shows, floats or doubles; type stubs call it Numbers.
class numbers_view : public nb::memoryview {
  NB_OBJECT(numbers_view, nb::memoryview, "Numbers", PyMemoryView_Check)
};

template <class Number>
numbers_view copy_of(std::span<const Number> from) {
  auto* const copy = new std::vector<Number>(from.begin(), from.end());
  const nb::capsule owner(copy, [](void* gone) noexcept { delete static_cast<std::vector<Number>*>(gone); });
  nb::object view =
      nb::cast(nb::ndarray<nb::memview, Number, nb::ndim<1>>(copy->data(), {copy->size()}, owner));
  return nb::steal<numbers_view>(view.release());
}

inline nb::bytes bytes_of(std::span<const std::byte> bytes) {
  return nb::bytes(bytes.data(), bytes.size());
}

inline std::span<const std::byte> bytes_in(const bytes_like& array) {
  return {static_cast<const std::byte*>(array.data()), array.nbytes()};
}

template <class Number>
std::span<Number> numbers_of(const std::string& what, const any_tensor& tensor) {
  if (tensor.type() != element_type_of<std::remove_const_t<Number>>)
    throw refused(what, sizeof(Number) == 8 ? "must be of float64" : "must be of float32");
  return {static_cast<Number*>(tensor.data()), tensor.elements()};
}

template <class Value>
Value named(const char* option, const std::string& name,
            std::initializer_list<std::pair<const char*, Value>> values) {
  std::string known;
  for (const auto& [each, value] : values) {
    if (name == each) return value;
    known += (known.empty() ? "" : ", ") + std::string(each);
  }
  throw std::invalid_argument(std::string(option) + " must be one of " + known + ", got '" + name + "'");
}

// The layers, or fragments, that are sent.
inline std::vector<std::size_t> indices_of(const lamina::selection& chosen) {
  const auto sent = chosen.sent();
  return {sent.begin(), sent.end()};
}

inline nb::bytes bitmap_of(const lamina::selection& chosen) {
  return bytes_of(std::as_bytes(chosen.bitmap()));
}
// A class each file binds.
void bind_worker(nb::module_& m);
void bind_local(nb::module_& m);
void bind_selector(nb::module_& m);
void bind_server(nb::module_& m);
void bind_payloads(nb::module_& m);

}  // namespace lamina_python

namespace nanobind::detail {

template <class... Options>
struct type_caster<lamina_python::array<Options...>> {
  using array = lamina_python::array<Options...>;
  NB_TYPE_CASTER(array, const_name("Array"))

  bool from_python(handle source, std::uint32_t flags, cleanup_list* cleanup) noexcept {
    type_caster<ndarray<Options...>> any;
    if (!any.from_python(source, flags, cleanup)) return false;
    static_cast<ndarray<Options...>&>(value) = std::move(any.value);
    return true;
  }
};

}  // namespace nanobind::detail
