// SPDX-License-Identifier: MIT
#include <lamina/partition.hpp>
#include <lamina/selector.hpp>
#include <lamina/state.hpp>
#include <tuple>

#include "arrays.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

// The decision without a residual, for one that lies in a framework's own tensors.
struct selector {
  lamina::partition cut;
  lamina::layer_selector of;
  bool has_momentum;

  selector(const lamina::layout& model, const lamina::compressor_options& options)
      : cut(model, options.part_elements), of(cut.parts(), options), has_momentum(options.momentum > 0) {}

  std::span<const float> memory(const char* what, const readable& array) const {
    const auto numbers = numbers_of<const float>(what, tensor_of(array, what));
    if (numbers.size() != cut.parts().elements())
      throw std::invalid_argument(std::string(what) + " has another size");
    return numbers;
  }
};
}  // namespace

void bind_selector(nb::module_& m) {
  const lamina::compressor_options defaults;
  nb::class_<selector>(m, "Selector",
                       "The decision of a Compressor alone, for a residual that lies elsewhere, on a device "
                       "for example: values "
                       "in, parts out. Options as of Compressor.")
      .def(
          "__init__",
          [](selector* self, const lamina::layout& layout, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t refresh_every, std::optional<double> byte_budget, std::uint64_t max_age,
             std::size_t part_elements, double momentum, const std::string& decide) {
            lamina::compressor_options options = options_of(drop_ratio, warm_up_steps, refresh_every,
                                                            byte_budget, max_age, part_elements, momentum);
            options.decide = timing(decide);
            if (options.decide == lamina::decision_timing::as_ready)
              throw std::invalid_argument(
                  "decide must be at_end or ahead: a Selector gets all values at a time");
            new (self) selector(layout, options);
          },
          "layout"_a, nb::kw_only(), "drop_ratio"_a = defaults.drop_ratio,
          "warm_up_steps"_a = defaults.warm_up_steps, "refresh_every"_a = 1, "byte_budget"_a = nb::none(),
          "max_age"_a = defaults.max_age, "part_elements"_a = defaults.part_elements,
          "momentum"_a = defaults.momentum, "decide"_a = "at_end")
      .def(
          "begin",
          [](selector& self, std::uint64_t step) {
            if (!self.of.has_plan())
              throw std::logic_error("begin: nothing was agreed for this step; call plan()");
            self.of.begin(step);
            return indices_of(self.of.chosen());
          },
          "step"_a, "ahead: the parts that go out in `step`, counted from 1, by the last plan().")
      .def(
          "take_back", [](selector& self, std::uint64_t step) { self.of.take_back(step); }, "step"_a,
          "The begin() of `step` was in vain: as if it had not been called.")
      .def(
          "plan",
          [](selector& self, std::uint64_t step, const readable& agreed) {
            self.of.plan(step, numbers_of<const double>("agreed", tensor_of(agreed, "agreed")));
          },
          "step"_a, "agreed"_a.noconvert(), "ahead: the values by which the step after `step` is decided.")
      .def(
          "decide",
          [](selector& self, std::uint64_t step, const readable& values,
             const std::optional<bytes_like>& held) {
            const auto numbers = numbers_of<const double>("values", tensor_of(values, "values"));
            const std::span<const std::byte> flags = held ? bytes_in(*held) : std::span<const std::byte>();
            return indices_of(self.of.decide(step, numbers, numbers,
                                             {reinterpret_cast<const char*>(flags.data()), flags.size()}));
          },
          "step"_a, "values"_a.noconvert(), "held"_a.noconvert() = nb::none(),
          "The parts that go out in `step`, counted from 1. Arguments as Compressor.select.")
      .def(
          "commit", [](selector& self, std::uint64_t step) { self.of.commit(step); }, "step"_a,
          "What was decided in `step` has been sent.")
      .def(
          "save",
          [](const selector& self, std::uint64_t step, const readable& residual,
             const std::optional<readable>& velocity) {
            return bytes_of(lamina::save_state<float>(
                self.cut.parts(), self.of.remember(), self.memory("residual", residual),
                velocity ? self.memory("velocity", *velocity) : std::span<const float>(), step));
          },
          "step"_a, "residual"_a.noconvert(), "velocity"_a.noconvert() = nb::none(),
          "The bytes that Compressor.save gives, with this residual and velocity, float32 and flat.")
      .def(
          "load",
          [](selector& self, const bytes_like& bytes) {
            lamina::saved_state<float> saved =
                lamina::read_state<float>(bytes_in(bytes), self.cut.parts(), self.has_momentum);
            self.of.restore(std::move(saved.memory));
            return std::tuple(saved.step, copy_of<float>(saved.residual), copy_of<float>(saved.velocity));
          },
          "bytes"_a,
          "Takes up what save() gave; returns (step, residual, velocity). Errors as Compressor.load.")
      .def_prop_ro("sent_elements", [](const selector& self) { return self.of.chosen().sent_elements(); })
      .def_prop_ro("sent_bitmap", [](const selector& self) { return bitmap_of(self.of.chosen()); })
      .def_prop_ro("threshold", [](const selector& self) { return self.of.threshold(); })
      .def_prop_ro("parts", [](const selector& self) { return self.cut.parts(); })
      .def(
          "parts_of",
          [](const selector& self, std::size_t layer) {
            self.cut.model().check_layer(layer);
            return std::pair(self.cut.first(layer), self.cut.first(layer + 1));
          },
          "layer"_a, "(first, last): the parts of a layer are range(first, last).");
}
}  // namespace lamina_python
