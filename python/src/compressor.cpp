// SPDX-License-Identifier: MIT
#include <lamina/options.hpp>
#include <lamina/scatter.hpp>

#include "arrays.hpp"
#include "options.hpp"
#include "worker.hpp"

namespace lamina_python {

namespace {

// Layers that lie in few flat arrays, as DDP's buckets are.
struct gradients : tensors<writable> {
  gradients(const lamina::layout& model, std::vector<writable> flat,
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

value_functor functor(const std::string& value) {
  using enum value_functor;
  return named<value_functor>("value", value,
                              {{"mean_abs", mean_abs},
                               {"l1_norm", l1_norm},
                               {"l2_norm", l2_norm},
                               {"root_mean_square", root_mean_square},
                               {"max_abs", max_abs}});
}
// The elements of a half-width array; what is written there is not divided.
template <class Half>
std::span<Half> halves_in(const char* call, any_tensor tensor, double divisor) {
  if (divisor != 1) throw std::invalid_argument(std::string(call) + ": half-width elements are not divided");
  return std::get<std::span<Half>>(lamina::tensor_traits<any_tensor>::elements(tensor));
}

void pack(compressor& from, any_tensor to, double divisor) {
  if (to.type() == element_type::float16) return from.pack(halves_in<lamina::float16>("pack", to, divisor));
  if (to.type() == element_type::bfloat16) return from.pack(halves_in<lamina::bfloat16>("pack", to, divisor));
  from.pack(lamina::writable_elements_of<float>(to), static_cast<float>(divisor));
}
std::size_t pack_ahead(compressor& from, std::size_t layer, const any_tensor& gradient, any_tensor to,
                       double divisor, double scale) {
  constexpr const char* call = "pack_ahead";
  if (to.type() == element_type::float16)
    return from.pack_ahead(layer, gradient, halves_in<lamina::float16>(call, to, divisor), scale);
  if (to.type() == element_type::bfloat16)
    return from.pack_ahead(layer, gradient, halves_in<lamina::bfloat16>(call, to, divisor), scale);
  return from.pack_ahead(layer, gradient, lamina::writable_elements_of<float>(to),
                         static_cast<float>(divisor), scale);
}

// The residual of a whole layer, whose parts may lie apart.
numbers_view residual_of(const compressor& from, std::size_t layer) {
  from.model().check_layer(layer);
  std::vector<float> all;
  for (std::size_t part = from.cut().first(layer); part < from.cut().first(layer + 1); ++part) {
    const std::span<const float> elements = from.residual()[part];
    all.insert(all.end(), elements.begin(), elements.end());
  }
  return copy_of<float>(all);
}
}  // namespace

void bind_compressor(nb::module_& m) {
  nb::class_<gradients>(
      m, "Gradients",
      "Gradients that lie in few flat arrays: layer l is the elements from `begin` on of array `i`, where "
      "(i, begin) is row l of the table. Keeps the arrays, copies nothing. ValueError for a row that lies "
      "outside; TypeError for an array that is strided, on a device, or of another type.")
      .def(nb::init<const lamina::layout&, std::vector<writable>,
                    const std::vector<std::pair<std::size_t, std::size_t>>&>(),
           "layout"_a, "arrays"_a.noconvert(), "table"_a);

  using list_of = std::vector<std::optional<readable>>;
  using list_to_write = std::vector<std::optional<writable>>;
  const lamina::compressor_options defaults;
  alone<compressor>(
      m, "Compressor",
      "A worker's side: residual, threshold and codec. In each step: accumulate every layer's gradient, "
      "select, then encode a "
      "frame for a server, or pack for an allreduce; and commit when that has arrived.\n\n"
      "Gradients are of float32, float16 or bfloat16. Deterministic: the same numbers give the same bits. "
      "One thread at a time, or RuntimeError; "
      "the GIL is released while elements are read. Calls out of order raise RuntimeError, an index beyond "
      "the last "
      "layer IndexError; on every error the residual is as it was.")
      .init(
          [](compressor* self, const lamina::layout& layout, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t refresh_every, std::optional<double> byte_budget, std::uint64_t max_age,
             std::size_t part_elements, double momentum, const std::string& value, const std::string& check,
             const std::string& payload, const std::string& decide, std::uint32_t sender, std::uint32_t run,
             std::vector<std::size_t> always_sent) {
            lamina::compressor_options options = options_of(drop_ratio, warm_up_steps, refresh_every,
                                                            byte_budget, max_age, part_elements, momentum);
            options.check = named<lamina::finite_check>("check", check,
                                                        {{"whole_layer", lamina::finite_check::whole_layer},
                                                         {"each_element", lamina::finite_check::each_element},
                                                         {"caller", lamina::finite_check::caller}});
            options.payload = payload_of(payload);
            options.decide = timing(decide);
            options.sender = sender;
            options.run = run;
            options.always_sent = std::move(always_sent);
            new (self) compressor(layout, options, functor(value));
          },
          "layout"_a, nb::kw_only(), "drop_ratio"_a = defaults.drop_ratio,
          "warm_up_steps"_a = defaults.warm_up_steps, "refresh_every"_a = 1, "byte_budget"_a = nb::none(),
          "max_age"_a = defaults.max_age, "part_elements"_a = defaults.part_elements,
          "momentum"_a = defaults.momentum, "value"_a = "mean_abs", "check"_a = "whole_layer",
          "payload"_a = "as_is", "decide"_a = "at_end", "sender"_a = defaults.sender, "run"_a = defaults.run,
          "always_sent"_a = std::vector<std::size_t>(),
          "drop_ratio: R in [0, 1], the share of the elements to hold back in a step; 0 sends everything.\n"
          "warm_up_steps: steps in which R grows to drop_ratio.\n"
          "refresh_every: steps between searches of the threshold, at least 1.\n"
          "byte_budget: in place of R the share of the elements to send, in (0, 1], as a mean over the "
          "steps.\n"
          "max_age: a layer goes out at least every so many steps; 0: it may wait for ever.\n"
          "part_elements: larger layers are decided in parts of so many elements, a multiple of 4,096; 0: "
          "whole.\n"
          "momentum: momentum correction in the residual, in [0, 1); the optimizer is then plain SGD.\n"
          "value: what stands for a layer: mean_abs, l1_norm, l2_norm, root_mean_square, max_abs.\n"
          "check: of NaN and infinity: whole_layer refuses, each_element leaves out, caller does not look.\n"
          "payload: how frames write elements: as_is, float16, bfloat16, int8, int4; what rounding takes "
          "away "
          "stays.\n"
          "decide: when it is known what goes out: at_end, in select(); as_ready, with each layer's "
          "gradient; ahead, "
          "a step before, "
          "from predicted_values() that all workers average and give to plan_next().\n"
          "sender: this worker, from 0. run: 0 or "
          "a number that "
          "frames carry. always_sent: indices of layers that go out in every step.\n"
          "ValueError, naming the option, for one outside its range.")
      .def(
          "accumulate",
          [](compressor& self, std::size_t layer, const readable& gradient, double scale) {
            self.model().check_layer(layer);
            const any_tensor tensor = tensor_of(gradient, name_of(self.model(), layer));
            const nb::gil_scoped_release released;
            return self.accumulate(layer, tensor, scale);
          },
          "layer"_a, "gradient"_a.noconvert(), "scale"_a = 1.0,
          "Adds a gradient, times scale, to the layer's residual; returns the layer's value. The first call "
          "begins a step.")
      .def(
          "accumulate_all",
          [](compressor& self, const gradients& from, double scale) {
            const nb::gil_scoped_release released;
            self.accumulate_all(from.each, scale);
          },
          "gradients"_a, "scale"_a = 1.0,
          "Adds the gradients of all layers, or on an error none: an array for each layer, or None for one "
          "without a gradient.")
      .def(
          "accumulate_all",
          [](compressor& self, const list_of& from, double scale) {
            const auto tensors = tensors_of(from, self.model());
            const nb::gil_scoped_release released;
            self.accumulate_all(tensors.each, scale);
          },
          "gradients"_a.noconvert(), "scale"_a = 1.0)
      .def(
          "skip", [](compressor& self, std::size_t layer) { self.skip(layer); }, "layer"_a,
          "The layer has no gradient in this step.")
      .def(
          "begin_step", [](compressor& self) { self.begin_step(); },
          "Begins the next step, as its first accumulate does otherwise. Ahead, it is known from here on "
          "what "
          "goes out.")
      .def(
          "expect_more_pieces", [](compressor& self, bool expected) { self.expect_more_pieces(expected); },
          "expected"_a, "as_ready: whether more pieces follow of the gradients that come from here on.")
      .def(
          "is_decided", [](const compressor& self, std::size_t part) { return self.is_decided(part); },
          "part"_a, "Whether it is known if a part goes out.")
      .def(
          "is_sent", [](const compressor& self, std::size_t part) { return self.is_sent(part); }, "part"_a,
          "Whether a part goes out in this step; RuntimeError unless it is decided.")
      .def(
          "predicted_values", [](const compressor& self) { return copy_of(self.predicted_values()); },
          "ahead: what the values of the next step would be with gradients like those of this one, float64, "
          "one "
          "a part. A copy.")
      .def(
          "plan_next",
          [](compressor& self, const readable& agreed) {
            self.plan_next(numbers_of<const double>("agreed", tensor_of(agreed, "agreed")));
          },
          "agreed"_a.noconvert(),
          "ahead: the next step is decided by these values, mostly the workers' mean of predicted_values().")
      .def(
          "pack_ahead",
          [](compressor& self, std::size_t layer, const readable& gradient, const writable& to,
             double divisor, double scale) {
            self.model().check_layer(layer);
            const any_tensor from = tensor_of(gradient, name_of(self.model(), layer));
            const any_tensor tensor = tensor_of(to, "to");
            const nb::gil_scoped_release released;
            return pack_ahead(self, layer, from, tensor, divisor, scale);
          },
          "layer"_a, "gradient"_a.noconvert(), "to"_a.noconvert(), "divisor"_a = 1.0, "scale"_a = 1.0,
          "ahead: writes what pack() would write of a layer once this gradient is accumulated, and changes "
          "nothing; between "
          "begin_step and accumulate. Returns the elements written.")
      .def(
          "values", [](const compressor& self) { return copy_of(self.values()); },
          "The value of each part, float64: what the threshold is compared with. A copy.")
      .def(
          "select", [](compressor& self) { return indices_of(self.select()); },
          "Decides by this worker's own values which parts go out; returns their indices.")
      .def(
          "select",
          [](compressor& self, const readable& agreed, const std::optional<bytes_like>& held) {
            const auto values = numbers_of<const double>("agreed", tensor_of(agreed, "agreed"));
            const std::span<const std::byte> flags = held ? bytes_in(*held) : std::span<const std::byte>();
            return indices_of(
                self.select(values, {reinterpret_cast<const char*>(flags.data()), flags.size()}));
          },
          "agreed"_a.noconvert(), "held"_a.noconvert() = nb::none(),
          "The same by values that all workers agreed on, float64, one a part. `held`: bytes, one a part; "
          "parts whose byte is "
          "not 0 are not sent whatever the options say.")
      .def_prop_ro(
          "sent_parts", [](const compressor& self) { return indices_of(self.chosen()); },
          "Indices of the parts that the last select() chose.")
      .def_prop_ro(
          "sent_elements", [](const compressor& self) { return self.chosen().sent_elements(); },
          "Elements of those parts together.")
      .def_prop_ro(
          "sent_bitmap", [](const compressor& self) { return bitmap_of(self.chosen()); },
          "The same as bits: part p is bit p % 8 of byte p // 8.")
      .def(
          "encode", [](compressor& self) { return bytes_of(self.encode().to_bytes()); },
          "The frame of this step, a copy. Selects by this worker's values if nothing was selected.")
      .def(
          "pack",
          [](compressor& self, const writable& to, double divisor) {
            const any_tensor tensor = tensor_of(to, "to");
            const nb::gil_scoped_release released;
            pack(self, tensor, divisor);
          },
          "to"_a.noconvert(), "divisor"_a = 1.0,
          "In place of encode(): writes the sent_elements elements that are sent to `to`, each divided by "
          "divisor.")
      .def(
          "use_ahead",
          [](compressor& self) {
            if (self.decide != lamina::decision_timing::ahead)
              throw std::logic_error(
                  "use_ahead: decide is not ahead, so nothing was packed ahead; call pack()");
            const nb::gil_scoped_release released;
            self.encode();
          },
          "In place of pack(), where pack_ahead() has written all layers that are sent, which is not looked "
          "at: commit() takes them out of the residual. RuntimeError unless decide is ahead.")
      .def(
          "commit",
          [](compressor& self) {
            const nb::gil_scoped_release released;
            self.commit();
          },
          "What was encoded or packed has arrived: takes it out of the residual.")
      .def(
          "abandon", [](compressor& self) { self.abandon(); },
          "Ends a step that cannot be carried out: nothing counts as sent, and what was accumulated waits "
          "in the residual. A step that nothing was accumulated in has not begun.")
      .def(
          "scatter",
          [](const compressor& self, const readable& packed, gradients& to) {
            const any_tensor tensor = tensor_of(packed, "packed");
            const nb::gil_scoped_release released;
            lamina::scatter<float>(self.chosen(), self.cut(), lamina::elements_of<float>(tensor), to.each);
          },
          "packed"_a.noconvert(), "gradients"_a,
          "Writes what an allreduce made of the packed elements over the gradients, and zeros over what was "
          "not sent.")
      .def(
          "scatter",
          [](const compressor& self, const readable& packed, const list_to_write& to) {
            const any_tensor tensor = tensor_of(packed, "packed");
            auto tensors = tensors_of(to, self.model());
            const nb::gil_scoped_release released;
            lamina::scatter<float>(self.chosen(), self.cut(), lamina::elements_of<float>(tensor),
                                   tensors.each);
          },
          "packed"_a.noconvert(), "gradients"_a.noconvert())
      .def(
          "first_non_finite",
          [](const compressor& self, const gradients& of) {
            const nb::gil_scoped_release released;
            return self.first_non_finite(of.each);
          },
          "gradients"_a, "The first layer whose gradient holds NaN or infinity, or None. Changes nothing.")
      .def(
          "first_non_finite",
          [](const compressor& self, const list_of& of) {
            const auto tensors = tensors_of(of, self.model());
            const nb::gil_scoped_release released;
            return self.first_non_finite(tensors.each);
          },
          "gradients"_a.noconvert())
      .def(
          "find_zero",
          [](const compressor& self, const gradients& of) {
            std::vector<char> is_zero(self.model().layers());
            self.find_zero(of.each, is_zero);
            return nb::bytes(is_zero.data(), is_zero.size());
          },
          "gradients"_a, "A byte for each layer: 1 if its gradient is zero throughout, else 0.")
      .def(
          "save", [](const compressor& self) { return bytes_of(self.save()); },
          "Everything that a later step depends on, with a checksum. Between steps alone.")
      .def(
          "load", [](compressor& self, const bytes_like& bytes) { self.load(bytes_in(bytes)); }, "bytes"_a,
          "Goes on where a compressor of the same model and options was saved, bit for bit. DecodeError for "
          "damaged bytes or "
          "those of another model.")
      .def(
          "residual", [](const compressor& self, std::size_t layer) { return residual_of(self, layer); },
          "layer"_a, "What a layer has not sent yet, float32, flat. A copy.")
      .def_prop_ro(
          "step", [](const compressor& self) { return self.step(); },
          "Counted from 1; 0 before the first accumulate.")
      .def_prop_ro(
          "threshold", [](const compressor& self) { return self.threshold(); },
          "As of the last select(); -1 where everything goes out.")
      .def_prop_ro(
          "left_out_elements", [](const compressor& self) { return self.residual().left_out_elements(); },
          "Elements that the check each_element has left out so far.")
      .def_prop_ro(
          "layout", [](const compressor& self) { return self.model(); }, "The model.")
      .def_prop_ro(
          "parts", [](const compressor& self) { return self.parts(); },
          "What is decided on, and what frames are of: the layers, or the parts they are cut into.")
      .def(
          "parts_of",
          [](const compressor& self, std::size_t layer) {
            self.model().check_layer(layer);
            return std::pair(self.cut().first(layer), self.cut().first(layer + 1));
          },
          "layer"_a, "(first, last): the parts of a layer are range(first, last).");
}
}  // namespace lamina_python
