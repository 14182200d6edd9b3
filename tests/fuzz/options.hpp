// SPDX-License-Identifier: MIT
#pragma once

// A worker with any options and any gradients, NaN and infinity among them, with a literal residual: what docs/algorithm.md
// numbers holds at every step, whatever was sent, lost or refused.
#include <optional>

#include "fuzz.hpp"
#include "lamina/worker.hpp"
#include "literal_residual.hpp"
#include "steps.hpp"

namespace lamina_fuzz::of_options {
namespace {

using lamina::worker_options;

constexpr double raw = -7;  // stands for any bits

double number(input& in, double choice) {
  return choice == raw ? in.value<double>() : choice;
}

// `is_valid` says whether a worker may be made with them.
worker_options options_of(input& in, bool& is_valid) {
  worker_options options;
  options.drop_ratio = number(in, in.one_of<double, 8>({0.9, 0, 0.3, 0.5, 0.95, 0.99, 1, raw}));
  options.warm_up_steps = in.below(8);
  if (in.flag()) options.send_budget = number(in, in.one_of<double, 5>({0.05, 0.3, 0.7, 1, raw}));
  options.at_least_every = in.below(5);
  options.by_score = in.flag();
  options.fragment_elements = in.one_of<std::size_t, 5>({0, 0, 4096, 8192, 100});
  options.momentum = number(in, in.one_of<double, 5>({0, 0, 0.5, 0.9, raw}));
  if (in.flag()) options.non_finite = lamina::non_finite::skip;
  options.payload = static_cast<lamina::payload_type>(in.below(6));
  options.sender = in.value<std::uint32_t>();
  options.search_every = in.below(5);
  const std::size_t fixed = in.below(6);
  if (fixed == 3) options.threshold = 1 + static_cast<double>(in.below(16));
  if (fixed == 4) options.threshold = in.value<double>();
  is_valid = options.drop_ratio >= 0 && options.drop_ratio <= 1 && options.fragment_elements % 4096 == 0 &&
             options.momentum >= 0 && options.momentum < 1 && options.search_every > 0 &&
             !(options.threshold && std::isnan(*options.threshold)) &&
             (!options.send_budget || (*options.send_budget > 0 && *options.send_budget <= 1));
  return options;
}

// Which kinds of gradients a run has. Integers keep sums exact, so that conservation can be judged by what was sent.
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
  run(input& in, const lamina::layout& model, const worker_options& options)
      : in_(in),
        options_(options),
        random_(in.random()),
        kind_(static_cast<gradients>(in.below(3))),
        worker_(model, options),
        fragments_(worker_.fragments()),
        literal_(fragments_.sizes(), static_cast<T>(options.momentum), options.non_finite),
        sent_in_(fragments_.layers()),
        computed_(lamina_test::zeros_like<T>(fragments_)),
        received_(computed_) {}

  // False if the residual has no room for any gradient of this step.
  bool step() {
    const double threshold_before = worker_.threshold();
    const bool is_planned = in_.below(4) == 2;
    if (is_planned && in_.flag()) (void)worker_.plan();  // which the plan below forgets
    std::vector<double> values;
    if (is_planned) {
      values = lamina_test::copy_of(worker_.values());
      scale_some(worker_.values(), values);
    }
    auto step = is_planned ? worker_.begin(worker_.plan()) : worker_.begin();
    literal_.begin_step();
    for (std::size_t l = 0; l < worker_.model().layers(); ++l) {
      if (!add(step, l)) return false;
      if (in_.below(8) == 7 && !add(step, l)) return false;
    }
    for (std::size_t f = 0; f < fragments_.layers(); ++f) {
      check(lamina_test::same_bits(step.values()[f], lamina_test::literal_mean_abs<T>(literal_[f])),
            "the value is that of the residual");
    }
    if (!is_planned) {
      values = lamina_test::copy_of(step.values());
      if (in_.below(4) == 3) scale_some(step.values(), values);
    }
    if (std::ranges::any_of(values, [](double value) { return std::isnan(value); })) return false;
    const lamina::selection sent = step.select();
    for (std::size_t f = 0; options_.by_score && f < values.size(); ++f) {
      const volatile double score = values[f] * static_cast<double>(step.number() - sent_in_[f]);
      values[f] = score;
    }
    check_threshold(step.number(), values, threshold_before, sent);
    check_choice(step.number(), values, sent);
    send(step, sent);
    if (in_.below(16) == 15) resume();
    return true;
  }

 private:
  using step_type = typename lamina::worker<T>::step;

  // Values that workers have agreed on.
  void scale_some(std::span<double> written, std::vector<double>& values) {
    for (std::size_t f = 0; f < values.size(); ++f) {
      const std::size_t factor = in_.below(4);
      written[f] = values[f] = factor == 0 ? 0 : values[f] * static_cast<double>(factor);
    }
  }

  bool add(step_type& step, std::size_t layer) {
    const std::size_t elements = worker_.model().sizes()[layer];
    if (try_add(step, layer, gradient_of<T>(in_, random_, kind_, elements))) return true;
    return try_add(step, layer, std::vector<T>(elements));
  }

  bool try_add(step_type& step, std::size_t layer, const std::vector<T>& gradient) {
    const std::size_t first = worker_.tiles().first(layer);
    const std::size_t last = worker_.tiles().first(layer + 1);
    const auto of_fragment = [&](std::size_t f) {
      return std::span(gradient).subspan(worker_.tiles().begin(f), fragments_.sizes()[f]);
    };
    bool is_taken = true;
    for (std::size_t f = first; f < last; ++f) is_taken &= literal_.takes(f, of_fragment(f));
    const bool looks = in_.flag();  // looking at a fragment that is clear writes its zeros
    check(step.add(layer, gradient) == is_taken,
          "a gradient is refused if it would poison the residual, and only then");
    check(is_taken == static_cast<bool>(step) && (is_taken || step.refused_layer() == layer),
          "the layer that was refused is named");
    for (std::size_t f = first; f < last; ++f) {
      if (is_taken) {
        literal_.add(f, of_fragment(f));
        note(f, of_fragment(f));
      } else {
        settle(f);
      }
      if (looks) check_fragment(f);
    }
    check(worker_.residual().left_out_elements() == literal_.left_out(), "elements left out are counted");
    return is_taken;
  }

  void note(std::size_t f, std::span<const T> gradient) {
    for (std::size_t i = 0; i < gradient.size(); ++i)
      computed_[f][i] += std::isfinite(gradient[i]) ? gradient[i] : T(0);
  }

  void settle(std::size_t f) {
    const auto& residual = worker_.residual();
    const auto velocity = residual.velocity();
    const std::size_t elements = fragments_.sizes()[f];
    check(literal_.settle(f, residual[f],
                          velocity.empty() ? velocity : velocity.subspan(fragments_.offset(f), elements)),
          "a refused gradient leaves no more than rounding");
  }

  void check_fragment(std::size_t f) const {
    check(lamina_test::same_bits(worker_.residual()[f], literal_[f]), "the residual is the literal one");
  }

  double ratio(std::uint64_t step) const {
    if (step >= options_.warm_up_steps || options_.drop_ratio == 1) return options_.drop_ratio;
    return 1 - lamina::detail::root_power(
                   1 - options_.drop_ratio,
                   static_cast<double>(step) / static_cast<double>(options_.warm_up_steps));
  }

  void check_threshold(std::uint64_t step, const std::vector<double>& values, double before,
                       const lamina::selection& sent) {
    if (options_.send_budget) return check_budget(step, sent);
    const bool is_for_its_step = std::isinf(before) || before == 0 || before == lamina::invalid_threshold;
    const bool is_due =
        ratio(step) > 0 && !options_.threshold &&
        (step <= options_.warm_up_steps || (step - 1) % options_.search_every == 0 || is_for_its_step);
    if (!is_due)
      return check(lamina_test::same_bits(worker_.threshold(), before), "no search, no new threshold");
    const std::vector<std::size_t> sizes(fragments_.sizes().begin(), fragments_.sizes().end());
    check(worker_.threshold() == lamina_test::literal_algorithm_1(values, sizes, ratio(step)),
          "the threshold is that of Algorithm 1");
    std::size_t dropped = fragments_.elements() - sent.sent_elements();
    std::size_t zeros = 0;
    for (std::size_t f = 0; f < fragments_.layers(); ++f) {
      if (values[f] != 0) continue;
      zeros += sizes[f];
      if (worker_.threshold() <= 0 && sent.is_dropped(f)) dropped -= sizes[f];
    }
    check(static_cast<double>(dropped) <= ratio(step) * static_cast<double>(fragments_.elements()),
          "no more than R·N elements are dropped");
    check(sent.sent_layers() > 0 || zeros == fragments_.elements(), "at least one layer is sent");
  }

  void check_budget(std::uint64_t step, const lamina::selection& sent) const {
    if (options_.at_least_every > 0) return;
    const double share = *options_.send_budget * static_cast<double>(fragments_.elements());
    const auto all = static_cast<double>(sent_elements_ + sent.sent_elements());
    check(all <= share * static_cast<double>(step) * (1 + 1e-12), "a budget is kept");
    const auto largest = static_cast<double>(std::ranges::max(fragments_.sizes()));
    check(static_cast<double>(sent.sent_elements()) <= (share + largest) * (1 + 1e-12),
          "a budget does not save for ever");
  }

  void check_choice(std::uint64_t step, const std::vector<double>& values,
                    const lamina::selection& sent) const {
    const bool sends_all =
        !options_.send_budget && (ratio(step) == 0 || (ratio(step) == 1 && !options_.threshold));
    const auto is_old = [&](std::size_t f) {
      return options_.at_least_every > 0 && step - sent_in_[f] >= options_.at_least_every;
    };
    for (std::size_t f = 0; f < fragments_.layers(); ++f) {
      const bool is_large = values[f] != 0 && values[f] >= worker_.threshold();
      const bool expected = sends_all || is_old(f) || is_large;
      // A budget may part fragments that are at its threshold.
      if (options_.send_budget && !is_old(f) && values[f] == worker_.threshold()) continue;
      check(sent.is_sent(f) == (expected && fragments_.sizes()[f] > 0),
            "a layer is sent at or above the threshold unless it is 0, or for its age");
    }
  }

  void send(step_type& step, const lamina::selection& sent) {
    const bytes frame = step.frame().to_bytes();
    check(frame == step.frame().to_bytes(), "a frame that is made again is the same");
    const auto view = lamina::decode<T>(frame, fragments_);
    check(view.step() == step.number() && view.sender() == options_.sender, "the frame says whose it is");
    const bool arrives = in_.below(4) != 3;
    for (std::size_t f = 0; f < fragments_.layers(); ++f)
      check(lamina_test::same_bits(step.fragment(f), literal_[f]), "a fragment is its residual");
    if (arrives) step.commit();
    check(!arrives || throws<std::logic_error>([&] { step.commit(); }), "a step is committed once");
    for (std::size_t f = 0; f < fragments_.layers(); ++f) {
      check(view.is_dropped(f) == sent.is_dropped(f), "the frame has what was selected");
      if (arrives && sent.is_sent(f)) {
        std::vector<T> values(fragments_.sizes()[f]);
        view.restore(f, values);
        literal_.take_out(f, values, options_.payload == lamina::payload_type::as_is);
        for (std::size_t i = 0; i < values.size(); ++i) received_[f][i] += values[i];
        sent_in_[f] = step.number();
      }
      if (in_.below(4) > 0) check_fragment(f);
    }
    if (arrives) sent_elements_ += sent.sent_elements();
    step_type let_go = std::move(step);
    if (kind_ != gradients::integers || options_.momentum > 0) return;
    check(lamina_test::conserves(worker_, received_, computed_),
          "everything sent plus the residual is all there was");
  }

  // A worker that goes on from what another has saved does the same.
  void resume() {
    if (worker_.residual().left_out_elements() > 0) return;  // a count that is not saved
    const bytes saved = worker_.save();
    lamina::worker<T> resumed(worker_.model(), options_);
    resumed.load(saved);
    check(resumed.save() == saved, "saving what was loaded gives the same");
    worker_ = std::move(resumed);
  }

  input& in_;
  worker_options options_;
  std::mt19937 random_;
  gradients kind_;
  lamina::worker<T> worker_;
  lamina::layout fragments_;
  literal_residual<T> literal_;
  std::vector<std::uint64_t> sent_in_;
  lamina_test::tensors<T> computed_;
  lamina_test::tensors<T> received_;
  std::size_t sent_elements_ = 0;
};

template <class T>
void fuzz_options(input& in) {
  const lamina::layout model = model_of(in);
  bool is_valid = false;
  const worker_options options = options_of(in, is_valid);
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

}  // namespace lamina_fuzz::of_options
