// SPDX-License-Identifier: MIT
#include <algorithm>
#include <lamina/payload.hpp>
#include <lamina/slices.hpp>

#include "arrays.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

// The elements of these layers together, each of the layout and in its order.
std::size_t elements_of(const lamina::layout& model, const std::vector<std::size_t>& sent) {
  std::size_t elements = 0;
  for (std::size_t i = 0; i < sent.size(); ++i) {
    model.check_layer(sent[i]);
    if (i > 0 && sent[i] <= sent[i - 1]) {
      throw std::invalid_argument("sent: layer " + std::to_string(sent[i]) + " comes behind layer " +
                                  std::to_string(sent[i - 1]));
    }
    elements += model.sizes()[sent[i]];
  }
  return elements;
}

template <class Number, class Array>
std::span<Number> numbers_of_sent(const char* what, const Array& array, std::size_t elements) {
  const std::span<Number> numbers = numbers_of<Number>(what, tensor_of(array, what));
  if (numbers.size() != elements) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(numbers.size()) +
                                " elements, what is sent " + std::to_string(elements));
  }
  return numbers;
}

std::size_t bytes_of_sent(const lamina::layout& model, const std::vector<std::size_t>& sent,
                          lamina::payload_type type) {
  elements_of(model, sent);
  std::size_t bytes = 0;
  for (const std::size_t layer : sent) bytes += lamina::payload_bytes<float>(type, model.sizes()[layer]);
  return bytes;
}

nb::bytes encode(const lamina::layout& model, const std::vector<std::size_t>& sent, const readable& elements,
                 const std::string& payload) {
  const lamina::payload_type type = payload_of(payload);
  std::span<const float> rest = numbers_of_sent<const float>("elements", elements, elements_of(model, sent));
  if (type == lamina::payload_type::as_is) return bytes_of(std::as_bytes(rest));
  std::vector<std::byte> bytes(bytes_of_sent(model, sent, type));
  std::byte* to = bytes.data();
  for (const std::size_t layer : sent) {
    const std::size_t count = model.sizes()[layer];
    lamina::detail::encode_payload(type, rest.first(count), to);
    to += lamina::payload_bytes<float>(type, count);
    rest = rest.subspan(count);
  }
  return bytes_of(bytes);
}

void decode(const lamina::layout& model, const std::vector<std::size_t>& sent, const bytes_like& bytes,
            const std::string& payload, const writable& elements) {
  const lamina::payload_type type = payload_of(payload);
  std::span<float> rest = numbers_of_sent<float>("elements", elements, elements_of(model, sent));
  const std::span<const std::byte> given = bytes_in(bytes);
  if (given.size() != bytes_of_sent(model, sent, type)) {
    throw std::invalid_argument("there are " + std::to_string(given.size()) + " bytes, what is sent has " +
                                std::to_string(bytes_of_sent(model, sent, type)));
  }
  const std::byte* from = given.data();
  for (const std::size_t layer : sent) {
    const std::size_t count = model.sizes()[layer];
    lamina::detail::decode_payload(type, from, count, 0, rest.first(count));
    from += lamina::payload_bytes<float>(type, count);
    rest = rest.subspan(count);
  }
}

// Calls copy(place, count) with where the owner's slice of each part sent lies in all that is sent.
template <class Copy>
void for_each_slice(const lamina::part_slices& slices, std::size_t owner,
                    const std::vector<std::size_t>& sent, const Copy& copy) {
  std::size_t before = 0;
  for (const std::size_t part : sent) {
    copy(before + slices.begin(owner, part), slices.of(owner).sizes()[part]);
    before += slices.fragments().sizes()[part];
  }
}
}  // namespace

void bind_slices(nb::module_& m) {
  nb::class_<lamina::part_slices>(m, "Slices",
                                  "Parts shared out among owners, each of whom adds up a slice of every "
                                  "part, in blocks of 64 elements. See "
                                  "lamina/slices.hpp. `sent` are indices of parts in their order.")
      .def(
          "__init__",
          [](lamina::part_slices* self, const lamina::layout& parts, std::size_t owners) {
            new (self) lamina::part_slices(parts, owners, lamina::payload_block_elements);
          },
          "parts"_a, "owners"_a,
          "parts: the fragments of a Worker or a DriftCompressor. ValueError without owners.")
      .def_prop_ro("owners", &lamina::part_slices::owners)
      .def(
          "of", [](const lamina::part_slices& self, std::size_t owner) { return self.of(owner); }, "owner"_a,
          "The slices of one owner: layer p is its slice of part p, which may have no elements.")
      .def("begin", &lamina::part_slices::begin, "owner"_a, "part"_a,
           "Where an owner's slice begins in its part, in elements.")
      .def(
          "take",
          [](const lamina::part_slices& self, std::size_t owner, const std::vector<std::size_t>& sent,
             const readable& elements, const writable& to) {
            const auto from =
                numbers_of_sent<const float>("elements", elements, elements_of(self.fragments(), sent));
            auto* out = numbers_of_sent<float>("to", to, elements_of(self.of(owner), sent)).data();
            for_each_slice(self, owner, sent, [&](std::size_t place, std::size_t count) {
              out = std::copy_n(from.data() + place, count, out);
            });
          },
          "owner"_a, "sent"_a, "elements"_a.noconvert(), "to"_a.noconvert(),
          "Of the parts sent, one behind the other, the slices of one owner, one behind the other. float32.")
      .def(
          "put",
          [](const lamina::part_slices& self, std::size_t owner, const std::vector<std::size_t>& sent,
             const readable& slices, const writable& to) {
            const auto* in =
                numbers_of_sent<const float>("slices", slices, elements_of(self.of(owner), sent)).data();
            const auto out = numbers_of_sent<float>("to", to, elements_of(self.fragments(), sent));
            for_each_slice(self, owner, sent, [&](std::size_t place, std::size_t count) {
              std::copy_n(in, count, out.data() + place);
              in += count;
            });
          },
          "owner"_a, "sent"_a, "slices"_a.noconvert(), "to"_a.noconvert(), "The way back of take().");
  m.def(
      "payload_bytes",
      [](const lamina::layout& layout, const std::vector<std::size_t>& sent, const std::string& payload) {
        return bytes_of_sent(layout, sent, payload_of(payload));
      },
      "layout"_a, "sent"_a, "payload"_a, "The bytes that encode_payload() makes of these layers.");
  m.def("encode_payload", &encode, "layout"_a, "sent"_a, "elements"_a.noconvert(), "payload"_a,
        "The layers sent, float32 and one behind the other, as as_is, float16, bfloat16, int8 or int4 writes "
        "each: "
        "what stands in a frame, without its head, for who knows what is sent. ValueError for another number "
        "of "
        "elements, or layers out of order.");
  m.def("decode_payload", &decode, "layout"_a, "sent"_a, "bytes"_a.noconvert(), "payload"_a,
        "elements"_a.noconvert(), "The way back, into `elements`. ValueError for another number of bytes.");
}
}  // namespace lamina_python
