// SPDX-License-Identifier: MIT
// A worker with any options and any gradients, NaN and infinity among them, beside a literal residual: what docs/scheme/index.md
// numbers holds at every step, whatever was sent, lost or refused.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "fuzz.hpp"
#include "lamina/worker.hpp"
#include "literal_residual.hpp"

namespace lamina_fuzz {
namespace {

using lamina::compressor_options;
using lamina::finite_check;
using lamina::refresh_schedule;

constexpr double raw = -7;  // stands for any bits

double number(input& in, double choice) {
  return choice == raw ? in.value<double>() : choice;
}

// `is_valid` says whether a compressor may be made with them.
compressor_options options_of(input& in, bool& is_valid) {
  compressor_options options;
  options.drop_ratio = number(in, in.one_of<double, 8>({0.9, 0, 0.3, 0.5, 0.95, 0.99, 1, raw}));
  options.warm_up_steps = in.below(8);
  if (in.flag()) options.byte_budget = number(in, in.one_of<double, 5>({0.05, 0.3, 0.7, 1, raw}));
  options.max_age = in.below(5);
  options.part_elements = in.one_of<std::size_t, 5>({0, 0, 4096, 8192, 100});
  options.momentum = number(in, in.one_of<double, 5>({0, 0, 0.5, 0.9, raw}));
  if (in.flag()) options.check = finite_check::each_element;
  options.payload = static_cast<lamina::payload_type>(in.below(5));
  options.sender = in.value<std::uint32_t>();
  is_valid = options.drop_ratio >= 0 && options.drop_ratio <= 1 && options.part_elements % 4096 == 0 &&
             options.momentum >= 0 && options.momentum < 1 &&
             (!options.byte_budget || (*options.byte_budget > 0 && *options.byte_budget <= 1));
  const std::size_t schedule = in.below(6);
  if (schedule == 1) options.refresh = refresh_schedule::every(~std::uint64_t{0});
  if (schedule == 2) options.refresh = refresh_schedule::every(1 + in.below(4));
  if (schedule == 3) options.refresh = refresh_schedule::fixed(1 + static_cast<double>(in.below(16)));
  if (schedule == 4) {
    const auto threshold = in.value<double>();
    const bool refused =
        throws<std::invalid_argument>([&] { options.refresh = refresh_schedule::fixed(threshold); });
    check(refused == std::isnan(threshold), "NaN is no threshold");
  }
  return options;
}

// Which kinds of gradients a run has. Integers keep sums exact, so that conservation can be told from what was sent.
enum class gradients { integers, fractions, any };

template <class T>
std::vector<T> gradient_of(input& in, std::mt19937& random, gradients kind, std::size_t elements) {
  if (kind == gradients::any) return any_values<T>(in, elements, in.flag());
  if (kind == gradients::fractions) return lamina_test::random_fractions<T>(random, elements);
  return lamina_test::random_integers<T>(random, elements, 1 + in.below(8));
}

template <class T>
class run {
 public:
  run(input& in, const lamina::layout& model, const compressor_options& options)
      : in_(in),
        options_(options),
        random_(in.random()),
        kind_(static_cast<gradients>(in.below(3))),
        worker_(model, options),
        partition_(model, options.part_elements),
        parts_(partition_.parts()),
        literal_(parts_.sizes(), static_cast<T>(options.momentum), options.check),
        sent_in_(parts_.layers()) {
    for (const std::size_t size : parts_.sizes()) {
      computed_.emplace_back(size);
      received_.emplace_back(size);
    }
  }

  // False if the residual has no room for any gradient of this step.
  bool step() {
    literal_.begin_step();
    for (std::size_t l = 0; l < worker_.model().layers(); ++l) {
      if (!accumulate(l)) return false;
      if (in_.below(8) == 7 && !accumulate(l)) return false;
    }
    const double threshold_before = worker_.threshold();
    std::vector<double> values(worker_.values().begin(), worker_.values().end());
    for (std::size_t p = 0; p < values.size(); ++p) {
      check(lamina_test::same_bits(values[p], lamina_test::literal_mean_abs<T>(literal_[p])),
            "the value is that of the residual");
    }
    if (in_.below(4) == 3) {  // values that workers have agreed on
      for (double& value : values) value *= static_cast<double>(in_.below(4));
      if (std::ranges::any_of(values, [](double value) { return std::isnan(value); })) return false;
      worker_.select(values);
    } else {
      worker_.select();
    }
    const lamina::selection chosen = worker_.chosen();
    check_threshold(values, threshold_before, chosen);
    check_choice(values, chosen);
    send(chosen);
    return true;
  }

 private:
  bool accumulate(std::size_t layer) {
    if (try_accumulate(layer, gradient_of<T>(in_, random_, kind_, worker_.model().sizes()[layer])))
      return true;
    return try_accumulate(layer, std::vector<T>(worker_.model().sizes()[layer]));
  }

  bool try_accumulate(std::size_t layer, const std::vector<T>& gradient) {
    const std::size_t first = partition_.first(layer);
    const std::size_t last = partition_.first(layer + 1);
    bool is_taken = true;
    for (std::size_t p = first; p < last; ++p) is_taken &= literal_.takes(p, part_of(p, gradient));
    const bool looks = in_.flag();  // looking at a layer that is clear writes its zeros
    const bool is_added = !throws<lamina::non_finite_gradient>([&] { worker_.accumulate(layer, gradient); });
    check(is_added == is_taken, "a gradient is refused if it would poison the residual, and only then");
    for (std::size_t p = first; p < last; ++p) {
      if (is_taken) {
        literal_.add(p, part_of(p, gradient));
        note(p, part_of(p, gradient));
      }
      if (looks) check_part(p);
    }
    check(worker_.residual().left_out_elements() == literal_.left_out(), "elements left out are counted");
    return is_taken;
  }

  std::span<const T> part_of(std::size_t part, std::span<const T> gradient) const {
    return gradient.subspan(partition_.begin(part), parts_.sizes()[part]);
  }

  void note(std::size_t part, std::span<const T> gradient) {
    std::vector<T> finite(gradient.begin(), gradient.end());
    for (T& each : finite) each = std::isfinite(each) ? each : T(0);
    for (std::size_t i = 0; i < gradient.size(); ++i) computed_[part][i] += finite[i];
  }

  void check_part(std::size_t part) const {
    check(lamina_test::same_bits(worker_.residual()[part], literal_[part]),
          "the residual is the literal one");
  }

  double ratio() const {
    const std::uint64_t step = worker_.step();
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    return 1 - std::pow(1 - options_.drop_ratio,
                        static_cast<double>(step) / static_cast<double>(options_.warm_up_steps));
  }

  void check_threshold(const std::vector<double>& values, double before, const lamina::selection& chosen) {
    if (options_.byte_budget) return check_budget(chosen);
    const bool is_for_its_step = std::isinf(before) && !options_.refresh.fixed_threshold();
    const bool is_due = ratio() > 0 && (options_.refresh.due(worker_.step()) ||
                                        worker_.step() <= options_.warm_up_steps || is_for_its_step);
    if (!is_due)
      return check(lamina_test::same_bits(worker_.threshold(), before), "no search, no new threshold");
    const std::vector<std::size_t> sizes(parts_.sizes().begin(), parts_.sizes().end());
    check(worker_.threshold() == lamina_test::literal_algorithm_1(values, sizes, ratio()),
          "the threshold is that of Algorithm 1");
    std::size_t dropped = parts_.elements() - chosen.sent_elements();
    std::size_t zeros = 0;
    for (std::size_t p = 0; p < parts_.layers(); ++p) {
      if (values[p] != 0) continue;
      zeros += sizes[p];
      if (worker_.threshold() <= 0 && chosen.is_dropped(p)) dropped -= sizes[p];
    }
    check(static_cast<double>(dropped) <= ratio() * static_cast<double>(parts_.elements()),
          "no more than R·N elements are dropped");
    check(chosen.sent_layers() > 0 || zeros == parts_.elements(), "at least one layer is sent");
  }

  void check_budget(const lamina::selection& chosen) const {
    if (options_.max_age > 0) return;
    const double share = *options_.byte_budget * static_cast<double>(parts_.elements());
    const double limit = share * static_cast<double>(worker_.step());
    const auto sent = static_cast<double>(sent_elements_ + chosen.sent_elements());
    check(sent <= limit * (1 + 1e-12), "a budget is kept");
    const auto largest = static_cast<double>(std::ranges::max(parts_.sizes()));
    check(static_cast<double>(chosen.sent_elements()) <= (share + largest) * (1 + 1e-12),
          "a budget does not save for ever");
  }

  void check_choice(const std::vector<double>& values, const lamina::selection& chosen) const {
    const bool sends_all =
        !options_.byte_budget && (ratio() == 0 || (ratio() == 1 && !options_.refresh.fixed_threshold()));
    const auto is_old = [&](std::size_t p) {
      return options_.max_age > 0 && worker_.step() - sent_in_[p] >= options_.max_age;
    };
    // Infinity is the threshold at which nothing fits into a budget: of infinite values then none goes out.
    bool nothing_fits = false;
    for (std::size_t p = 0; options_.byte_budget && p < parts_.layers(); ++p) {
      nothing_fits |= parts_.sizes()[p] > 0 && std::isinf(values[p]) && chosen.is_dropped(p);
    }
    for (std::size_t p = 0; p < parts_.layers(); ++p) {
      const bool is_large = values[p] != 0 && values[p] >= worker_.threshold() && !nothing_fits;
      const bool expected = sends_all || is_old(p) || is_large;
      check(chosen.is_sent(p) == (expected && parts_.sizes()[p] > 0),
            "a layer is sent at or above the threshold unless it is 0, or for its age");
    }
  }

  void send(const lamina::selection& chosen) {
    const bytes frame = worker_.encode().to_bytes();
    check(frame == worker_.encode().to_bytes(), "encoding again gives the same frame");
    const auto view = lamina::decode<T>(frame, parts_);
    check(view.step() == worker_.step() && view.sender() == options_.sender, "the frame says whose it is");
    const bool arrives = in_.below(4) != 3;
    if (arrives) worker_.commit();
    check(!arrives || throws<std::logic_error>([&] { worker_.commit(); }), "a frame is committed once");
    for (std::size_t p = 0; p < parts_.layers(); ++p) {
      check(view.is_dropped(p) == chosen.is_dropped(p), "the frame has what was chosen");
      if (arrives && chosen.is_sent(p)) {
        std::vector<T> sent(parts_.sizes()[p]);
        view.restore(p, sent);
        literal_.take_out(p, sent, options_.payload == lamina::payload_type::as_is);
        for (std::size_t i = 0; i < sent.size(); ++i) received_[p][i] += sent[i];
        sent_in_[p] = worker_.step();
      }
      if (in_.below(4) > 0) check_part(p);
    }
    if (arrives) sent_elements_ += chosen.sent_elements();
    if (in_.below(16) == 15) resume();
    if (kind_ != gradients::integers || options_.momentum > 0) return;
    for (std::size_t p = 0; p < parts_.layers(); ++p) {
      const auto residual = worker_.residual()[p];
      for (std::size_t i = 0; i < residual.size(); ++i) {
        check(received_[p][i] + residual[i] == computed_[p][i],
              "everything sent plus the residual is all there was");
      }
    }
  }

  // A worker that goes on from what another has saved does the same.
  void resume() {
    const bytes saved = worker_.save();
    const std::size_t left_out = worker_.residual().left_out_elements();
    if (left_out > 0) return;  // a count that is not saved
    worker_ = lamina::gradient_compressor<T>(worker_.model(), options_);
    worker_.load(saved);
    check(worker_.save() == saved, "saving what was loaded gives the same");
  }

  input& in_;
  compressor_options options_;
  std::mt19937 random_;
  gradients kind_;
  lamina::gradient_compressor<T> worker_;
  lamina::partition partition_;
  lamina::layout parts_;
  literal_residual<T> literal_;
  std::vector<std::uint64_t> sent_in_;
  std::vector<std::vector<T>> computed_;
  std::vector<std::vector<T>> received_;
  std::size_t sent_elements_ = 0;
};

template <class T>
void fuzz_options(input& in) {
  const lamina::layout model = model_of(in);
  bool is_valid = false;
  const compressor_options options = options_of(in, is_valid);
  std::optional<run<T>> made;
  check(throws<std::invalid_argument>([&] { made.emplace(in, model, options); }) != is_valid,
        "an option outside its range is refused, and no other");
  for (int step = 0; is_valid && step < 10 && !in.is_empty(); ++step) {
    if (!made->step()) return;
  }
}

}  // namespace

void fuzz_one(input in) {
  in.flag() ? fuzz_options<double>(in) : fuzz_options<float>(in);
}

}  // namespace lamina_fuzz
