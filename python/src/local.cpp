// SPDX-License-Identifier: MIT
#include <lamina/local/delta.hpp>
#include <lamina/local/outer_optimizer.hpp>
#include <variant>

#include "alone.hpp"
#include "arrays.hpp"
#include "options.hpp"

namespace lamina_python {

namespace {

template <class Representative>
using of_value = lamina::local_delta<float, Representative>;

// The functor of the values is known at run time.
struct delta {
  std::variant<of_value<lamina::mean_abs>, of_value<lamina::root_mean_square>, of_value<lamina::l2_norm>> of;
  one_at_a_time lock{};

  one_at_a_time::use begin_use() const { return lock.begin(); }
  template <class Call>
  decltype(auto) visit(const Call& call) {
    return std::visit(call, of);
  }
  template <class Call>
  decltype(auto) visit(const Call& call) const {
    return std::visit(call, of);
  }

  const lamina::layout& model() const {
    return visit([](const auto& each) -> const lamina::layout& { return each.model(); });
  }
  const lamina::layout& fragments() const {
    return visit([](const auto& each) -> const lamina::layout& { return each.fragments(); });
  }
  const lamina::selection& chosen() const {
    return visit([](const auto& each) -> const lamina::selection& { return each.chosen(); });
  }
};

// `what` names the tensors in errors: the shared ones, or this worker's own.
template <class Number, class Array>
std::vector<std::span<Number>> all_of(const std::vector<Array>& arrays, const lamina::layout& model,
                                      const char* what) {
  std::vector<std::span<Number>> spans;
  for (std::size_t layer = 0; layer < arrays.size(); ++layer) {
    const std::string name =
        layer < model.layers() ? name_of(model, layer) : "array " + std::to_string(layer);
    spans.push_back(numbers_of<Number>(std::string(what) + ": " + name,
                                       tensor_of(arrays[layer], std::string(what) + ": " + name)));
  }
  return spans;
}

// The same of arrays that were looked at before.
template <class Number>
std::vector<std::span<Number>> all_of(const flat_arrays& arrays, const lamina::layout& model,
                                      const char* what) {
  std::vector<std::span<Number>> spans;
  for (std::size_t layer = 0; layer < arrays.each.size(); ++layer) {
    if (arrays.each[layer].type() != element_type::float32 && layer < model.layers())
      throw refused(std::string(what) + ": " + name_of(model, layer), "must be of float32");
    spans.push_back(numbers_of<Number>(what, arrays.each[layer]));
  }
  return spans;
}

using arrays_to_read = std::vector<readable>;
using arrays_to_write = std::vector<writable>;

template <class Arrays>
void observe_all(delta& self, const Arrays& shared, const Arrays& local) {
  const auto x = all_of<const float>(shared, self.model(), "shared");
  const auto y = all_of<const float>(local, self.model(), "local");
  const nb::gil_scoped_release released;
  self.visit([&](auto& each) { each.observe_all(x, y); });
}

template <class Arrays>
void pack(delta& self, const Arrays& shared, const Arrays& local, const writable& to) {
  const auto x = all_of<const float>(shared, self.model(), "shared");
  const auto y = all_of<const float>(local, self.model(), "local");
  const std::span<float> out = numbers_of<float>("to", tensor_of(to, "to"));
  const nb::gil_scoped_release released;
  self.visit([&](auto& each) { each.pack(x, y, out); });
}

template <class Arrays>
void apply(delta& self, std::uint64_t step, const readable& update, const Arrays& shared,
           const Arrays& local) {
  const auto x = all_of<float>(shared, self.model(), "shared");
  const auto y = all_of<float>(local, self.model(), "local");
  const auto d = numbers_of<const float>("update", tensor_of(update, "update"));
  const nb::gil_scoped_release released;
  self.visit([&](auto& each) { each.apply(step, d, x, y); });
}

struct outer {
  lamina::outer_optimizer<float> of;
  lamina::layout fragments;
};
}  // namespace

void bind_local(nb::module_& m) {
  const lamina::worker_options defaults;
  alone<delta>(
      m, "LocalDelta",
      "A worker's side of local updates, over float32: what its own optimizer did that the others have not "
      "seen, `shared` less `local`, takes the place of the residual. In each step: observe_all, select, pack "
      "or encode, commit; and "
      "apply, at once or steps later, what all subtract. See lamina/local/delta.hpp.\n\n"
      "`shared` and `local` are lists with an array for each layer, or Arrays. One thread at a time, or "
      "RuntimeError; "
      "the GIL is "
      "released "
      "while elements are read. Calls out of order raise RuntimeError; on every error nothing has changed.")
      .init(
          [](delta* self, const lamina::layout& layout, double drop_ratio, std::uint64_t warm_up_steps,
             std::uint64_t search_every, std::optional<double> send_budget, std::uint64_t at_least_every,
             bool by_score, std::size_t fragment_elements, const std::string& value,
             const std::string& payload, bool error_feedback, std::uint32_t sender, std::uint32_t run,
             std::vector<std::size_t> always_sent) {
            lamina::worker_options options = options_of(drop_ratio, warm_up_steps, search_every, send_budget,
                                                        at_least_every, by_score, fragment_elements);
            options.payload = payload_of(payload);
            options.error_feedback = error_feedback;
            options.sender = sender;
            options.run = run;
            options.always_sent = std::move(always_sent);
            const auto kind =
                named<int>("value", value, {{"mean_abs", 0}, {"root_mean_square", 1}, {"l2_norm", 2}});
            if (kind == 0) {
              new (self) delta{of_value<lamina::mean_abs>(layout, options)};
            } else if (kind == 1) {
              new (self) delta{of_value<lamina::root_mean_square>(layout, options)};
            } else {
              new (self) delta{of_value<lamina::l2_norm>(layout, options)};
            }
          },
          "layout"_a, nb::kw_only(), "drop_ratio"_a = defaults.drop_ratio,
          "warm_up_steps"_a = defaults.warm_up_steps, "search_every"_a = 1, "send_budget"_a = nb::none(),
          "at_least_every"_a = defaults.at_least_every, "by_score"_a = defaults.by_score,
          "fragment_elements"_a = defaults.fragment_elements, "value"_a = "mean_abs", "payload"_a = "as_is",
          "error_feedback"_a = defaults.error_feedback, "sender"_a = defaults.sender, "run"_a = defaults.run,
          "always_sent"_a = std::vector<std::size_t>(),
          "value: mean_abs, root_mean_square or l2_norm. error_feedback: what a message leaves out waits "
          "outside "
          "of `local`, and joins the next message. The others as of Worker.")
      .def(
          "observe_all",
          [](delta& self, const flat_arrays& shared, const flat_arrays& local) {
            observe_all(self, shared, local);
          },
          "shared"_a, "local"_a)
      .def(
          "observe_all",
          [](delta& self, const arrays_to_read& shared, const arrays_to_read& local) {
            observe_all(self, shared, local);
          },
          "shared"_a.noconvert(), "local"_a.noconvert(),
          "Takes the values of shared - local, and begins a step. ValueError, naming the layer, for a "
          "difference that is NaN or infinite.")
      .def(
          "values",
          [](const delta& self) {
            return self.visit([](const auto& each) { return copy_of(each.values()); });
          },
          "The value of each fragment as last observed, float64, without its waiting. A copy.")
      .def(
          "select",
          [](delta& self) {
            return indices_of(self.visit([](auto& each) -> auto& { return each.select(); }));
          },
          "Decides by this worker's own values which fragments go out; returns their indices.")
      .def(
          "select",
          [](delta& self, const readable& agreed, const std::optional<bytes_like>& held) {
            const auto values = numbers_of<const double>("agreed", tensor_of(agreed, "agreed"));
            const std::span<const std::byte> flags = held ? bytes_in(*held) : std::span<const std::byte>();
            return indices_of(self.visit([&](auto& each) -> auto& {
              return each.select(values, {reinterpret_cast<const char*>(flags.data()), flags.size()});
            }));
          },
          "agreed"_a.noconvert(), "held"_a.noconvert() = nb::none(),
          "The same by values that all workers agreed on, float64, one a fragment: mostly the mean of "
          "values().")
      .def_prop_ro(
          "sent", [](const delta& self) { return indices_of(self.chosen()); },
          "Indices of the fragments that the last select() chose.")
      .def_prop_ro(
          "sent_elements", [](const delta& self) { return self.chosen().sent_elements(); },
          "Elements of those fragments together.")
      .def_prop_ro(
          "sent_bitmap", [](const delta& self) { return bitmap_of(self.chosen()); },
          "The same as bits: fragment p is bit p % 8 of byte p // 8.")
      .def(
          "encode",
          [](delta& self, const arrays_to_read& shared, const arrays_to_read& local) {
            const auto x = all_of<const float>(shared, self.model(), "shared");
            const auto y = all_of<const float>(local, self.model(), "local");
            return bytes_of(self.visit([&](auto& each) { return each.encode(x, y).to_bytes(); }));
          },
          "shared"_a.noconvert(), "local"_a.noconvert(),
          "The frame of this step, of kind 'updates', a copy. Selects by this worker's values if nothing was "
          "selected.")
      .def(
          "pack",
          [](delta& self, const flat_arrays& shared, const flat_arrays& local, const writable& to) {
            pack(self, shared, local, to);
          },
          "shared"_a, "local"_a, "to"_a.noconvert())
      .def(
          "pack",
          [](delta& self, const arrays_to_read& shared, const arrays_to_read& local, const writable& to) {
            pack(self, shared, local, to);
          },
          "shared"_a.noconvert(), "local"_a.noconvert(), "to"_a.noconvert(),
          "In place of encode(): writes the sent_elements elements that are sent, as the payload says them, "
          "to "
          "`to`, float32.")
      .def(
          "commit", [](delta& self) { self.visit([](auto& each) { each.commit(); }); },
          "What was encoded or packed has left: its fragments are under way until apply() of this step.")
      .def(
          "commit_lost", [](delta& self) { self.visit([](auto& each) { each.commit_lost(); }); },
          "Ends a step that this worker alone could not send: it stays in its local delta.")
      .def(
          "abandon", [](delta& self) { self.visit([](auto& each) { each.abandon(); }); },
          "Ends a step that cannot be carried out, on all workers together: nothing counts as sent.")
      .def(
          "abandon",
          [](delta& self, std::uint64_t step) { self.visit([&](auto& each) { each.abandon(step); }); },
          "step"_a, "The same of a step that was committed and has no update.")
      .def(
          "forget",
          [](delta& self, std::uint64_t step) { self.visit([&](auto& each) { each.forget(step); }); },
          "step"_a,
          "What this worker sent in `step` is lost, and in its local delta again; the update is still to be "
          "applied.")
      .def(
          "apply",
          [](delta& self, std::uint64_t step, const readable& update, const flat_arrays& shared,
             const flat_arrays& local) { apply(self, step, update, shared, local); },
          "step"_a, "update"_a.noconvert(), "shared"_a, "local"_a)
      .def(
          "apply",
          [](delta& self, std::uint64_t step, const readable& update, const arrays_to_write& shared,
             const arrays_to_write& local) { apply(self, step, update, shared, local); },
          "step"_a, "update"_a.noconvert(), "shared"_a.noconvert(), "local"_a.noconvert(),
          "What all subtract, of the fragments that were chosen in `step`, one behind the other: from "
          "shared, "
          "and "
          "from local, which gets back what it sent. In the order of the steps.")
      .def(
          "rest",
          [](const delta& self) { return self.visit([](const auto& each) { return copy_of(each.rest()); }); },
          "With error_feedback what waits outside, float32, of all fragments; else none. A copy.")
      .def(
          "clear_rest", [](delta& self) { self.visit([](auto& each) { each.clear_rest(); }); },
          "It was brought together in another way.")
      .def(
          "save",
          [](const delta& self) {
            return self.visit([](const auto& each) { return bytes_of(each.save()); });
          },
          "Everything that a later step depends on besides shared and local, with a checksum. Between steps "
          "alone.")
      .def(
          "load",
          [](delta& self, const bytes_like& bytes) {
            self.visit([&](auto& each) { each.load(bytes_in(bytes)); });
          },
          "bytes"_a,
          "Goes on where one of the same model and options was saved. DecodeError for other bytes.")
      .def(
          "join",
          [](delta& self, const bytes_like& bytes) {
            self.visit([&](auto& each) { each.join(bytes_in(bytes)); });
          },
          "bytes"_a,
          "Joins workers of which one has saved these bytes: begin with their shared parameters as local "
          "ones.")
      .def_prop_ro(
          "step", [](const delta& self) { return self.visit([](const auto& each) { return each.step(); }); },
          "Counted from 1; 0 before the first observe_all.")
      .def_prop_ro(
          "threshold",
          [](const delta& self) { return self.visit([](const auto& each) { return each.threshold(); }); },
          "As of the last select().")
      .def_prop_ro(
          "steps_under_way",
          [](const delta& self) {
            return self.visit([](const auto& each) { return each.steps_under_way(); });
          },
          "Steps that were committed and whose update is to come.")
      .def_prop_ro(
          "layout", [](const delta& self) { return self.model(); }, "The model.")
      .def_prop_ro(
          "fragments", [](const delta& self) { return self.fragments(); },
          "What is decided on, and what frames are of.");

  const lamina::outer_optimizer_options outer_defaults;
  nb::class_<outer>(
      m, "OuterOptimizer",
      "From the mean of what the workers sent to what all subtract: averaging, or Nesterov's momentum, over "
      "float32. Bitwise identical everywhere. See lamina/local/outer_optimizer.hpp.")
      .def(
          "__init__",
          [](outer* self, const lamina::layout& fragments, double rate, double momentum, bool nesterov,
             const std::string& payload) {
            const lamina::outer_optimizer_options options{
                .rate = rate, .momentum = momentum, .nesterov = nesterov, .payload = payload_of(payload)};
            new (self) outer{lamina::outer_optimizer<float>(fragments, options), fragments};
          },
          "fragments"_a, nb::kw_only(), "rate"_a = outer_defaults.rate,
          "momentum"_a = outer_defaults.momentum, "nesterov"_a = outer_defaults.nesterov,
          "payload"_a = "as_is",
          "fragments: a LocalDelta's. payload: how what all subtract is written; what rounding takes away "
          "comes "
          "later. ValueError, naming the option, for one outside its range.")
      .def(
          "__call__",
          [](outer& self, const std::vector<std::size_t>& sent, const writable& mean) {
            std::span<float> rest = numbers_of<float>("mean", tensor_of(mean, "mean"));
            std::size_t elements = 0;
            for (const std::size_t fragment : sent) {
              self.fragments.check_layer(fragment);
              elements += self.fragments.sizes()[fragment];
            }
            if (elements != rest.size()) {
              throw std::invalid_argument("mean has " + std::to_string(rest.size()) +
                                          " elements, the fragments " + std::to_string(elements));
            }
            for (const std::size_t fragment : sent) {
              const std::size_t count = self.fragments.sizes()[fragment];
              self.of(fragment, 0, rest.first(count));
              rest = rest.subspan(count);
            }
          },
          "sent"_a, "mean"_a.noconvert(),
          "The mean of the fragments sent in a step, one behind the other, to what all subtract, in place. "
          "ValueError for a fragment whose mean holds NaN or infinity, or whose update might: it and those "
          "behind it "
          "are as they were.")
      .def(
          "momentum", [](const outer& self) { return copy_of(self.of.momentum()); },
          "For checkpoints: float32, one an element, or none. A copy.")
      .def(
          "rounding", [](const outer& self) { return copy_of(self.of.rounding()); },
          "Likewise: what the payload took away.")
      .def(
          "restore",
          [](outer& self, const readable& momentum, const readable& rounding) {
            self.of.restore(numbers_of<const float>("momentum", tensor_of(momentum, "momentum")),
                            numbers_of<const float>("rounding", tensor_of(rounding, "rounding")));
          },
          "momentum"_a.noconvert(), "rounding"_a.noconvert(),
          "Puts them back. ValueError, and nothing changed, for other sizes or numbers that are not finite.");
}
}  // namespace lamina_python
