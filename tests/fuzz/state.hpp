// SPDX-License-Identifier: MIT
#pragma once

// Any bytes load into a worker, or into a local delta, or are refused by name, and then nothing has changed; what was loaded is saved as it was.
#include "fuzz.hpp"
#include "lamina/local/local.hpp"
#include "steps.hpp"

namespace lamina_fuzz::of_state {
namespace {

using lamina::worker;

template <class T>
void mend_state(bytes& state, const lamina::layout& model, std::size_t how,
                std::uint32_t magic = lamina::detail::state_magic) {
  lamina::detail::state_header good;
  good.magic = magic;
  good.element_type = lamina::detail::element_code<T>;
  good.fingerprint = model.fingerprint();
  good.layers = model.layers();
  mend(state, good, how, [&](auto& header, std::span<const std::byte> body) {
    if (how > 1 && magic == lamina::detail::state_magic) header.elements = model.elements();
    if ((header.flags & lamina::detail::state_flag_checksum) == 0) return std::uint64_t{0};
    return lamina::detail::state_checksum(header, body);
  });
}

// Whether the gradients were taken.
template <class T>
bool one_step(worker<T>& each, std::mt19937& random) {
  auto step = each.add(lamina_test::rounding_gradients<T>(random, each.model()));
  if (!step) return false;
  step.frame();
  step.commit();
  return true;
}

// The same but for the checksum, which a state may go without, and the version, which may be an old one.
bool same_state(bytes a, bytes b) {
  using header = lamina::detail::state_header;
  for (bytes* each : {&a, &b}) {
    if (each->size() < sizeof(header)) return false;
    (*each)[offsetof(header, flags)] &= ~std::byte{lamina::detail::state_flag_checksum};
    std::fill_n(each->begin() + offsetof(header, checksum), 8, std::byte{0});
    std::fill_n(each->begin() + offsetof(header, version), 2, std::byte{0});
  }
  return a == b;
}

constexpr std::size_t flags_offset = offsetof(lamina::detail::state_header, flags);
constexpr std::byte flag_expected{lamina::detail::state_flag_expected};

// A state may lack the values to expect, which a worker then takes for infinite and saves as such. They come after the ages.
bytes without_expected(bytes saved, std::size_t fragments) {
  const auto begin =
      saved.begin() + static_cast<std::ptrdiff_t>(sizeof(lamina::detail::state_header) + 8 * fragments);
  saved.erase(begin, begin + static_cast<std::ptrdiff_t>(8 * fragments));
  saved[flags_offset] &= ~flag_expected;
  return saved;
}

// Whether it loads.
template <class T>
bool load(worker<T>& into, const bytes& state) {
  const bytes before = into.save();
  const double threshold = into.threshold();
  if (!succeeds([&] { into.load(state); })) {
    check(into.save() == before && lamina_test::same_bits(into.threshold(), threshold),
          "a refused state changes nothing");
    return false;
  }
  const bytes saved = into.save();
  const bool has_expected = (state[flags_offset] & flag_expected) != std::byte{0};
  check(same_state(has_expected ? saved : without_expected(saved, into.fragments().layers()), state),
        "saving gives what was loaded");
  into.load(saved);
  check(into.save() == saved, "loading what was saved changes nothing");
  return true;
}

void overwrite_some(input& in, bytes& state) {
  for (std::size_t changes = in.below(4); changes > 0; --changes) {
    const auto number = in.value<std::uint32_t>();
    std::memcpy(state.data() + in.value<std::uint16_t>() % (state.size() - sizeof number), &number,
                sizeof number);
  }
}

// One of the worker's own states, some bytes of it overwritten, so that many can agree.
template <class T>
bytes damaged(input& in, bytes state, const lamina::layout& model) {
  overwrite_some(in, state);
  mend_state<T>(state, model, in.below(3));
  return state;
}

template <class T>
void merge(input& in, const worker<T>& own, const worker<T>& stranger, const bytes& given) {
  const lamina::layout& model = own.model();
  const std::array some = {own.save(), given, stranger.save()};
  std::vector<bytes> states(in.below(4));
  for (bytes& state : states) {
    const std::size_t which = in.below(4);
    state = which < 3 ? some[which] : damaged<T>(in, some[0], model);
  }
  bytes merged;
  if (!succeeds([&] { merged = lamina::merge_states<T>(states, model); })) return;
  check(!states.empty(), "nothing is no state");
  worker<T> other(model, own.options());
  other.load(own.save());
  if (!load(other, merged)) {
    lamina::detail::state_header header;
    std::memcpy(&header, merged.data(), sizeof header);
    const bool has_velocity = (header.flags & lamina::detail::state_flag_velocity) != 0;
    check(has_velocity == own.residual().velocity().empty(), "what merges loads");
    return;
  }
  const bool all_equal = std::ranges::all_of(states, [&](const bytes& each) { return each == states[0]; });
  if (all_equal) check(same_state(merged, states[0]), "what all agree on stays as it is");
}

template <class T>
void load_and_merge(input& in) {
  const lamina::layout& model = some_model(in);
  std::mt19937 random(1);
  lamina::worker_options options;
  options.drop_ratio = 0.5;
  if (in.flag()) options.momentum = 0.5;
  if (in.flag()) options.at_least_every = 3;
  const std::size_t steps = in.below(3);
  const std::size_t how = in.below(3);
  const bytes chosen = in.take(32);
  input choices(chosen);
  worker<T> own(model, options);
  for (std::size_t step = 0; step < steps; ++step) one_step(own, random);
  bytes state = in.take_rest();
  mend_state<T>(state, model, how);
  if (choices.flag()) state = damaged<T>(choices, own.save(), model);
  const bool is_loaded = load(own, state);
  options.momentum = 0.5 - options.momentum;
  worker<T> stranger(model, options);  // with velocity, if the other is without
  for (std::uint64_t step = 0; step < std::min<std::uint64_t>(own.steps(), 3); ++step)
    one_step(stranger, random);
  merge(choices, own, stranger, state);
  // A worker goes on from any state that loads; only a residual near the largest number has no room for more.
  if (is_loaded) one_step(own, random);
}

template <class T>
void load_delta(input& in) {
  const lamina::layout& model = some_model(in);
  std::mt19937 random(2);
  lamina::worker_options options;
  options.drop_ratio = 0.5;
  options.error_feedback = in.flag();
  if (in.flag()) options.payload = lamina::payload_type::ternary;
  lamina::local_delta<T> own(model, options);
  const auto shared = lamina_test::zeros_like<T>(model);
  const auto local = lamina_test::rounding_gradients<T>(random, model);
  for (std::size_t steps = in.below(4); steps > 0; --steps) {  // which stay under way
    own.observe_all(shared, local);
    own.encode(shared, local);
    own.commit();
  }
  const bytes before = own.save();
  bytes state = before;
  const std::size_t how = in.below(3);
  overwrite_some(in, state);
  const bytes rest = in.take_rest();
  if (!rest.empty()) state = rest;
  mend_state<T>(state, model, how, lamina::detail::flights_magic);
  if (succeeds([&] { own.load(state); })) {
    check(same_state(own.save(), state), "saving gives what was loaded");
  } else {
    check(own.save() == before, "a refused state changes nothing");
  }
  own.observe_all(shared, lamina_test::rounding_gradients<T>(random, model));
  own.select();
  own.commit_lost();
}

}  // namespace

void fuzz_one(input in) {
  switch (in.below(4)) {
    case 0:
      return load_and_merge<float>(in);
    case 1:
      return load_and_merge<double>(in);
    case 2:
      return load_delta<float>(in);
    default:
      return load_delta<double>(in);
  }
}

}  // namespace lamina_fuzz::of_state
