// SPDX-License-Identifier: MIT
#include <lamina/decision.hpp>
#include <lamina/layout.hpp>
#include <lamina/state.hpp>
#include <tuple>

#include "arrays.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

// The decision without a residual, for one that lies in a framework's own tensors.
struct selector {
  lamina::tiling cut;
  lamina::selector of;
  bool has_momentum;

  selector(const lamina::layout& model, const lamina::worker_options& options)
      : cut(model, options.fragment_elements), of(cut, options), has_momentum(options.momentum > 0) {}

  std::span<const float> memory(const char* what, const readable& array) const {
    const auto numbers = numbers_of<const float>(what, tensor_of(array, what));
    if (numbers.size() != cut.fragments().elements())
      throw std::invalid_argument(std::string(what) + " has another size");
    return numbers;
  }
};
}  // namespace

void bind_selector(nb::module_& m) {
  const lamina::worker_options defaults;
  nb::class_<selector>(m, "Selector",
                       "The decision of a Worker without its residual, for one that lies elsewhere, on a "
                       "device for example: values in, "
                       "fragments out. Options as of Worker.")
      .def(
          "__init__",
          [](selector* self, const lamina::layout& layout, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t search_every, std::optional<double> send_budget, std::uint64_t at_least_every,
             bool by_score, std::size_t fragment_elements, double momentum) {
            lamina::worker_options options = options_of(drop_ratio, warm_up_steps, search_every, send_budget,
                                                        at_least_every, by_score, fragment_elements);
            options.momentum = momentum;
            new (self) selector(layout, options);
          },
          "layout"_a, nb::kw_only(), "drop_ratio"_a = defaults.drop_ratio,
          "warm_up_steps"_a = defaults.warm_up_steps, "search_every"_a = defaults.search_every,
          "send_budget"_a = nb::none(), "at_least_every"_a = defaults.at_least_every,
          "by_score"_a = defaults.by_score, "fragment_elements"_a = defaults.fragment_elements,
          "momentum"_a = defaults.momentum)
      .def(
          "decide",
          [](selector& self, std::uint64_t step, const readable& values,
             const std::optional<bytes_like>& held) {
            const auto numbers = numbers_of<const double>("values", tensor_of(values, "values"));
            const std::span<const std::byte> flags = held ? bytes_in(*held) : std::span<const std::byte>();
            return indices_of(
                self.of.decide(step, numbers, {reinterpret_cast<const char*>(flags.data()), flags.size()}));
          },
          "step"_a, "values"_a.noconvert(), "held"_a.noconvert() = nb::none(),
          "The fragments that are sent in `step`, counted from 1; called again for a step, decides it anew. "
          "Arguments as Step.select.")
      .def(
          "take",
          [](selector& self, std::uint64_t step, const std::vector<std::size_t>& sent) {
            lamina::selection chosen(self.cut.fragments());
            for (const std::size_t f : sent) chosen.send(f);
            self.of.take(step, chosen);
          },
          "step"_a, "sent"_a, "Takes a decision that was made before: `step` sends these fragments.")
      .def(
          "forecast",
          [](const selector& self, std::uint64_t step, const readable& values) {
            const auto numbers = numbers_of<const double>("values", tensor_of(values, "values"));
            std::vector<double> expected(numbers.size());
            self.of.forecast(step, numbers, expected);
            return copy_of(std::span<const double>(expected));
          },
          "step"_a, "values"_a.noconvert(),
          "The values to expect in the next step, by those of `step` and of what it sends. Before commit(). "
          "A copy.")
      .def(
          "commit", [](selector& self, std::uint64_t step) { self.of.commit(step); }, "step"_a,
          "What was decided in `step` has been sent.")
      .def(
          "save",
          [](const selector& self, std::uint64_t step, const readable& residual,
             const std::optional<readable>& velocity, const std::optional<readable>& expected) {
            return bytes_of(lamina::save_state<float>(
                self.cut.fragments(), self.of.remember(step), self.memory("residual", residual),
                velocity ? self.memory("velocity", *velocity) : std::span<const float>(), step,
                expected ? numbers_of<const double>("expected", tensor_of(*expected, "expected"))
                         : std::span<const double>()));
          },
          "step"_a, "residual"_a.noconvert(), "velocity"_a.noconvert() = nb::none(),
          "expected"_a.noconvert() = nb::none(),
          "The bytes that Worker.save gives, with this residual and velocity, float32 and flat.")
      .def(
          "load",
          [](selector& self, const bytes_like& bytes) {
            lamina::saved_state<float> saved =
                lamina::read_state<float>(bytes_in(bytes), self.cut.fragments(), self.has_momentum);
            self.of.restore(std::move(saved.memory));
            return std::tuple(saved.step, copy_of<float>(saved.residual), copy_of<float>(saved.velocity),
                              copy_of<double>(saved.expected));
          },
          "bytes"_a,
          "Takes what save() gave; returns (step, residual, velocity, expected). Errors as Worker.load.")
      .def_prop_ro("sent_elements", [](const selector& self) { return self.of.sent().sent_elements(); })
      .def_prop_ro("sent_bitmap", [](const selector& self) { return bitmap_of(self.of.sent()); })
      .def_prop_ro("threshold", [](const selector& self) { return self.of.threshold(); })
      .def_prop_ro("fragments", [](const selector& self) { return self.cut.fragments(); })
      .def(
          "fragments_of",
          [](const selector& self, std::size_t layer) {
            self.cut.model().check_layer(layer);
            return std::pair(self.cut.first(layer), self.cut.first(layer + 1));
          },
          "layer"_a, "(first, last): the fragments of a layer are range(first, last).");
}
}  // namespace lamina_python
