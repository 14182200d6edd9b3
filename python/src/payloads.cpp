// SPDX-License-Identifier: MIT
#include <lamina/error.hpp>
#include <lamina/layout.hpp>
#include <lamina/payload.hpp>

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
  for (std::span<const std::byte> left = given; const std::size_t layer : sent) {
    const std::size_t bytes_of_layer = lamina::payload_bytes<float>(type, model.sizes()[layer]);
    if (!lamina::detail::are_trits(type, left.first(bytes_of_layer), model.sizes()[layer]))
      throw lamina::decode_error(make_error_code(lamina::errc::bad_trits), name_of(model, layer));
    left = left.subspan(bytes_of_layer);
  }
  const std::byte* from = given.data();
  for (const std::size_t layer : sent) {
    const std::size_t count = model.sizes()[layer];
    lamina::detail::decode_payload(type, from, count, 0, rest.first(count));
    from += lamina::payload_bytes<float>(type, count);
    rest = rest.subspan(count);
  }
}

}  // namespace

void bind_payloads(nb::module_& m) {
  m.def(
      "payload_bytes",
      [](const lamina::layout& layout, const std::vector<std::size_t>& sent, const std::string& payload) {
        return bytes_of_sent(layout, sent, payload_of(payload));
      },
      "layout"_a, "sent"_a, "payload"_a, "The bytes that encode_payload() makes of these layers.");
  m.def("encode_payload", &encode, "layout"_a, "sent"_a, "elements"_a.noconvert(), "payload"_a,
        "The layers sent, float32 and one behind the other, as as_is, float16, bfloat16, int8, int4 or "
        "ternary writes "
        "each: "
        "what stands in a frame, without its head, for who knows what is sent. ValueError for another number "
        "of "
        "elements, or layers out of order.");
  m.def("decode_payload", &decode, "layout"_a, "sent"_a, "bytes"_a.noconvert(), "payload"_a,
        "elements"_a.noconvert(),
        "The way back, into `elements`. ValueError for another number of bytes, DecodeError for bytes that "
        "ternary never has.");
}
}  // namespace lamina_python
