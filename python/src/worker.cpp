// SPDX-License-Identifier: MIT
#include <concepts>
#include <lamina/options.hpp>
#include <lamina/worker.hpp>

#include "alone.hpp"
#include "arrays.hpp"
#include "functor.hpp"
#include "inspect.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

value_functor functor(const std::string& value) {
  using enum value_functor;
  return named<value_functor>("value", value,
                              {{"mean_abs", mean_abs},
                               {"l1_norm", l1_norm},
                               {"l2_norm", l2_norm},
                               {"root_mean_square", root_mean_square},
                               {"max_abs", max_abs}});
}

using worker_of_floats = lamina::worker<float, any_functor>;

struct worker {
  worker_of_floats of;
  one_at_a_time lock;

  worker(const lamina::layout& model, const lamina::worker_options& options, value_functor value)
      : of(model, options, any_functor(value)) {}
  one_at_a_time::use begin_use() const { return lock.begin(); }
};

// Keeps its worker, by nanobind, and is told apart from it: a step that Python has let go is over.
struct step {
  worker* owner;
  worker_of_floats::step of;

  step(worker& from, worker_of_floats::step begun) : owner(&from), of(std::move(begun)) {}
  one_at_a_time::use begin_use() const { return owner->begin_use(); }
};

lamina::selection selection_of(const lamina::layout& fragments, const std::vector<std::size_t>& indices) {
  lamina::selection chosen(fragments);
  for (const std::size_t f : indices) chosen.send(f);
  return chosen;
}

// The agreed values in the place of a worker's own.
void put(const readable& agreed, std::span<double> values) {
  const auto given = numbers_of<const double>("agreed", tensor_of(agreed, "agreed"));
  if (given.size() != values.size()) {
    throw std::invalid_argument("there are " + std::to_string(values.size()) + " fragments, got " +
                                std::to_string(given.size()) + " values");
  }
  std::copy(given.begin(), given.end(), values.begin());
}

std::span<const char> flags_of(const std::optional<bytes_like>& held) {
  if (!held) return {};
  const std::span<const std::byte> flags = bytes_in(*held);
  return {reinterpret_cast<const char*>(flags.data()), flags.size()};
}

template <class Write>
void write_as_its_type(const any_tensor& to, const Write& write) {
  if (!to.is_writable()) throw std::invalid_argument("the array is read-only and would be written to");
  switch (to.type()) {
    case element_type::float32:
      return write(std::span(static_cast<float*>(to.data()), to.elements()));
    case element_type::float16:
      return write(std::span(static_cast<lamina::float16*>(to.data()), to.elements()));
    case element_type::bfloat16:
      return write(std::span(static_cast<lamina::bfloat16*>(to.data()), to.elements()));
    default:
      throw refused("to", "must be of float32, float16 or bfloat16");
  }
}

void pack(step& self, const any_tensor& to, float scale) {
  write_as_its_type(to, [&]<class Number>(std::span<Number> out) {
    if constexpr (std::same_as<Number, float>) {
      self.of.pack(out, scale);
    } else {
      if (scale != 1) throw std::invalid_argument("pack: half-width elements are not scaled");
      self.of.pack(out);
    }
  });
}

// What is sent of one layer, as pack() writes it.
std::size_t pack_layer(step& self, std::size_t layer, const any_tensor& to, float scale) {
  const lamina::tiling& cut = self.owner->of.tiles();
  std::size_t written = 0;
  write_as_its_type(to, [&]<class Number>(std::span<Number> out) {
    for (std::size_t f = cut.first(layer); f < cut.first(layer + 1); ++f) {
      if (!self.of.is_sent(f)) continue;
      const std::span<const float> from = self.of.fragment(f);
      if (out.size() - written < from.size())
        throw std::invalid_argument("pack_layer: the array is too short");
      if constexpr (std::same_as<Number, float>) {
        for (std::size_t i = 0; i < from.size(); ++i)
          out[written + i] = scale == 1 ? from[i] : from[i] * scale;
      } else {
        constexpr auto type = std::same_as<Number, lamina::bfloat16> ? lamina::payload_type::bfloat16
                                                                     : lamina::payload_type::float16;
        if (self.owner->of.options().payload != type)
          throw std::invalid_argument("pack_layer: the payload is another type than the array");
        lamina::detail::encode_payload<float>(type, from, reinterpret_cast<std::byte*>(out.data() + written));
      }
      written += from.size();
    }
  });
  return written;
}

// The residual of a whole layer, whose fragments may lie apart.
numbers_view residual_of(const worker& self, std::size_t layer) {
  self.of.model().check_layer(layer);
  std::vector<float> all;
  for (std::size_t f = self.of.tiles().first(layer); f < self.of.tiles().first(layer + 1); ++f) {
    const std::span<const float> fragment = self.of.residual()[f];
    all.insert(all.end(), fragment.begin(), fragment.end());
  }
  return copy_of<float>(all);
}

using list_of = std::vector<std::optional<readable>>;
using list_to_write = std::vector<std::optional<writable>>;

void bind_step(nb::module_& m) {
  alone<step>(m, "Step",
              "One step of a Worker, from Worker.add or begin until commit(), or until it is let go: "
              "what was added then stays in the "
              "residual. A worker has one step at a time; RuntimeError for a call after its end. True "
              "unless the last gradients were refused.")
      .def("__bool__", [](const step& self) { return static_cast<bool>(self.of); })
      .def_prop_ro(
          "refused_layer",
          [](const step& self) { return self.of ? std::optional<std::size_t>() : self.of.refused_layer(); },
          "The layer whose gradient was refused for NaN, infinity or an overflow, or None.")
      .def_prop_ro(
          "number", [](const step& self) { return self.of.number(); }, "Counted from 1.")
      .def(
          "add",
          [](step& self, std::size_t layer, const readable& gradient, double scale) {
            self.owner->of.model().check_layer(layer);
            const any_tensor tensor = tensor_of(gradient, name_of(self.owner->of.model(), layer));
            const nb::gil_scoped_release released;
            return self.of.add(layer, tensor, scale);
          },
          "layer"_a, "gradient"_a.noconvert(), "scale"_a = 1.0,
          "Adds a gradient, or one micro-batch more, times scale, to the layer's residual. Returns whether "
          "it was taken.")
      .def(
          "add_all",
          [](step& self, const list_of& from, double scale) {
            const auto tensors = tensors_of(from, self.owner->of.model());
            const nb::gil_scoped_release released;
            return self.of.add(tensors.each, scale);
          },
          "gradients"_a.noconvert(), "scale"_a = 1.0, "The same of all layers, or of none.")
      .def(
          "skip", [](step& self, std::size_t layer) { self.of.skip(layer); }, "layer"_a,
          "The layer has no gradient in this step.")
      .def(
          "values", [](step& self) { return copy_of(std::span<const double>(self.of.values())); },
          "The representative value of each fragment, float64. A copy.")
      .def(
          "select",
          [](step& self, const std::optional<readable>& agreed, const std::optional<bytes_like>& held) {
            if (agreed) put(*agreed, self.of.values());
            return indices_of(self.of.select(flags_of(held)));
          },
          "agreed"_a.noconvert() = nb::none(), "held"_a.noconvert() = nb::none(),
          "Decides which fragments are sent, by this worker's own values, or by `agreed` ones: float64, one "
          "a fragment, mostly the "
          "mean over the workers. `held`: bytes, one a fragment; those of which it is not 0 are not sent. "
          "Returns their indices.")
      .def_prop_ro(
          "sent", [](const step& self) { return indices_of(self.of.sent()); },
          "The indices of the fragments that are sent.")
      .def_prop_ro(
          "sent_elements", [](const step& self) { return self.of.sent().sent_elements(); },
          "Elements of those fragments together.")
      .def_prop_ro(
          "sent_bitmap", [](const step& self) { return bitmap_of(self.of.sent()); },
          "The same as bits: fragment f is bit f % 8 of byte f // 8.")
      .def(
          "frame",
          [](step& self, const std::optional<bytes_like>& user) {
            return bytes_of(self.of.frame(user ? bytes_in(*user) : std::span<const std::byte>()).to_bytes());
          },
          "user"_a.noconvert() = nb::none(),
          "The frame of this step, a copy, with up to 64 bytes of the caller's. Selects if nothing was "
          "selected.")
      .def(
          "pack",
          [](step& self, const writable& to, float scale) {
            const any_tensor tensor = tensor_of(to, "to");
            const nb::gil_scoped_release released;
            pack(self, tensor, scale);
          },
          "to"_a.noconvert(), "scale"_a = 1.0F,
          "In place of frame(): writes the sent_elements elements that are sent to `to`, each times scale.")
      .def(
          "pack_layer",
          [](step& self, std::size_t layer, const writable& to, float scale) {
            self.owner->of.model().check_layer(layer);
            const any_tensor tensor = tensor_of(to, "to");
            const nb::gil_scoped_release released;
            return pack_layer(self, layer, tensor, scale);
          },
          "layer"_a, "to"_a.noconvert(), "scale"_a = 1.0F,
          "The same of one layer that has its gradient, for a step that began with its selection. Returns "
          "the elements written.")
      .def(
          "commit",
          [](step& self) {
            const nb::gil_scoped_release released;
            self.of.commit();
          },
          "What is sent has arrived: takes it out of the residual, and ends the step.")
      .def(
          "unpack",
          [](const step& self, const readable& packed, flat_arrays& to) {
            const auto numbers = numbers_of<const float>("packed", tensor_of(packed, "packed"));
            const nb::gil_scoped_release released;
            self.of.unpack(numbers, to.each);
          },
          "packed"_a.noconvert(), "gradients"_a,
          "Writes what a sum made of the packed elements over the gradients, and zeros over what was not "
          "sent. Also after commit().")
      .def(
          "unpack",
          [](const step& self, const readable& packed, const list_to_write& to) {
            const auto numbers = numbers_of<const float>("packed", tensor_of(packed, "packed"));
            auto tensors = tensors_of(to, self.owner->of.model());
            const nb::gil_scoped_release released;
            self.of.unpack(numbers, tensors.each);
          },
          "packed"_a.noconvert(), "gradients"_a.noconvert());
}

}  // namespace

void bind_worker(nb::module_& m) {
  nb::class_<flat_arrays>(
      m, "Arrays",
      "A model's layers in few flat arrays, looked at once for many calls: layer l is the elements from "
      "`begin` on of array `i`, where "
      "(i, begin) is row l of the table. Keeps the arrays, copies nothing. ValueError for a row that lies "
      "outside; TypeError for an array that is strided, on a device, or of another type.")
      .def(nb::init<const lamina::layout&, std::vector<writable>,
                    const std::vector<std::pair<std::size_t, std::size_t>>&>(),
           "layout"_a, "arrays"_a.noconvert(), "table"_a);

  bind_step(m);

  const lamina::worker_options defaults;
  alone<worker>(
      m, "Worker",
      "A worker's side: residual, threshold and codec, over float32. Each step: add() every layer's "
      "gradient, which gives a Step; "
      "make its frame() for a server, or select() and pack() for an all-reduce; and commit() it when that "
      "has arrived.\n\n"
      "Gradients are of float32, float16 or bfloat16. Deterministic: bitwise identical everywhere. "
      "One thread at a time, or "
      "RuntimeError; the GIL is released while elements are read. On every error the residual is as it was; "
      "after a refused gradient to within rounding.")
      .init(
          [](worker* self, const lamina::layout& layout, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t search_every, std::optional<double> threshold, std::optional<double> send_budget,
             std::uint64_t at_least_every, bool by_score, std::size_t fragment_elements, double momentum,
             const std::string& value, const std::string& non_finite, const std::string& payload,
             std::uint32_t sender, std::uint32_t run, std::vector<std::size_t> always_sent) {
            lamina::worker_options options = options_of(drop_ratio, warm_up_steps, search_every, send_budget,
                                                        at_least_every, by_score, fragment_elements);
            options.threshold = threshold;
            options.momentum = momentum;
            options.non_finite = named<lamina::non_finite>(
                "non_finite", non_finite,
                {{"refuse", lamina::non_finite::refuse}, {"skip", lamina::non_finite::skip}});
            options.payload = payload_of(payload);
            options.sender = sender;
            options.run = run;
            options.always_sent = std::move(always_sent);
            new (self) worker(layout, options, functor(value));
          },
          "layout"_a, nb::kw_only(), "drop_ratio"_a = defaults.drop_ratio,
          "warm_up_steps"_a = defaults.warm_up_steps, "search_every"_a = defaults.search_every,
          "threshold"_a = nb::none(), "send_budget"_a = nb::none(),
          "at_least_every"_a = defaults.at_least_every, "by_score"_a = defaults.by_score,
          "fragment_elements"_a = defaults.fragment_elements, "momentum"_a = defaults.momentum,
          "value"_a = "mean_abs", "non_finite"_a = "refuse", "payload"_a = "as_is",
          "sender"_a = defaults.sender, "run"_a = defaults.run, "always_sent"_a = std::vector<std::size_t>(),
          "drop_ratio: R in [0, 1], the share of the elements to drop in a step; 0 sends everything.\n"
          "warm_up_steps: steps in which R grows to drop_ratio.\n"
          "search_every: steps between searches of the threshold, at least 1. threshold: a fixed one in "
          "place of a search.\n"
          "send_budget: in place of R the share of the elements to send, in (0, 1], as a mean over the "
          "steps.\n"
          "at_least_every: a fragment is sent at least every so many steps; 0: no limit.\n"
          "by_score: selects by the value times the steps since a fragment was last sent.\n"
          "fragment_elements: larger layers are cut into fragments of this size, a multiple of 4,096; 0: "
          "whole layers.\n"
          "momentum: momentum correction in the residual, in [0, 1); the optimizer is then plain SGD.\n"
          "value: the representative value: mean_abs, l1_norm, l2_norm, root_mean_square, max_abs.\n"
          "non_finite: what becomes of gradients with NaN or infinity: refuse refuses all that came in the "
          "call, skip leaves out these elements.\n"
          "payload: how frames write elements: as_is, float16, bfloat16, int8, int4, ternary; what rounding "
          "takes "
          "away stays.\n"
          "sender: this worker, from 0. run: 0 or a number that frames carry. always_sent: indices of layers "
          "that are sent in every "
          "step.\nValueError, naming the option, for one outside its range.")
      .def(
          "add",
          [](worker& self, const flat_arrays& from, double scale) {
            const nb::gil_scoped_release released;
            return new step(self, self.of.add(from.each, scale));
          },
          "gradients"_a, "scale"_a = 1.0, nb::keep_alive<0, 1>(),
          "Begins a step with the gradients of all layers, times scale: an array for each layer, or None for "
          "one without a gradient. "
          "All are added or, where one is refused, none: the Step is then False and names the layer.")
      .def(
          "add",
          [](worker& self, const list_of& from, double scale) {
            const auto tensors = tensors_of(from, self.of.model());
            const nb::gil_scoped_release released;
            return new step(self, self.of.add(tensors.each, scale));
          },
          "gradients"_a.noconvert(), "scale"_a = 1.0, nb::keep_alive<0, 1>())
      .def(
          "begin",
          [](worker& self, const std::optional<std::vector<std::size_t>>& sent) {
            if (!sent) return new step(self, self.of.begin());
            return new step(self, self.of.begin(selection_of(self.of.fragments(), *sent)));
          },
          "sent"_a = nb::none(), nb::keep_alive<0, 1>(),
          "Begins a step whose gradients come one by one; with `sent`, the fragments that it sends are "
          "known: plan().")
      .def(
          "values", [](worker& self) { return copy_of(std::span<const double>(self.of.values())); },
          "Between steps: the value to expect of each fragment in the next step, float64: of what the last "
          "has left, and of a gradient like "
          "the mean of those since it was last sent. A copy.")
      .def(
          "plan",
          [](worker& self, const std::optional<readable>& agreed) {
            if (agreed) put(*agreed, self.of.values());
            return indices_of(self.of.plan());
          },
          "agreed"_a.noconvert() = nb::none(),
          "Between steps: selects what the next step sends, by values(), or by agreed ones. Everything "
          "before the first gradient.")
      .def(
          "first_non_finite",
          [](const worker& self, const flat_arrays& of) {
            const nb::gil_scoped_release released;
            return first_non_finite(self.of.model(), of.each);
          },
          "gradients"_a, "The first layer whose gradient holds NaN or infinity, or None. Changes nothing.")
      .def(
          "find_zero",
          [](const worker& self, const flat_arrays& of) {
            const std::vector<char> is_zero = zero_layers(self.of.model(), of.each);
            return nb::bytes(is_zero.data(), is_zero.size());
          },
          "gradients"_a, "A byte for each layer: 1 if its gradient is zero throughout, else 0.")
      .def(
          "save", [](const worker& self) { return bytes_of(self.of.save()); },
          "Everything that a later step depends on, with a checksum. Between steps.")
      .def(
          "load", [](worker& self, const bytes_like& bytes) { self.of.load(bytes_in(bytes)); }, "bytes"_a,
          "Goes on where a worker of the same model and options was saved, bitwise. DecodeError for damaged "
          "bytes or those of "
          "another model.")
      .def(
          "residual", [](const worker& self, std::size_t layer) { return residual_of(self, layer); },
          "layer"_a, "What a layer has not sent yet, float32, flat. A copy.")
      .def_prop_ro(
          "steps", [](const worker& self) { return self.of.steps(); }, "The steps that have begun.")
      .def_prop_ro(
          "threshold", [](const worker& self) { return self.of.threshold(); },
          "Of the last decision; -1 where everything is sent.")
      .def_prop_ro(
          "left_out_elements", [](const worker& self) { return self.of.residual().left_out_elements(); },
          "Elements that non_finite='skip' has left out so far.")
      .def_prop_ro(
          "layout", [](const worker& self) { return self.of.model(); }, "The model.")
      .def_prop_ro(
          "fragments", [](const worker& self) { return self.of.fragments(); },
          "What is decided on, and what frames are of: the layers, or the fragments they are cut into.")
      .def(
          "fragments_of",
          [](const worker& self, std::size_t layer) {
            self.of.model().check_layer(layer);
            return std::pair(self.of.tiles().first(layer), self.of.tiles().first(layer + 1));
          },
          "layer"_a, "(first, last): the fragments of a layer are range(first, last).");
}
}  // namespace lamina_python
