// SPDX-License-Identifier: MIT
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "lamina/decision.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/checksum.hpp"
#include "lamina/detail/decision.hpp"
#include "lamina/detail/finite.hpp"
#include "lamina/detail/raise.hpp"
#include "lamina/detail/screen.hpp"
#include "lamina/detail/sources.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/layout.hpp"
#include "lamina/tensor.hpp"
#include "lamina/threshold.hpp"

/// A worker's memory as bytes, for a checkpoint: little-endian, with the layout's fingerprint and a checksum. worker::save() and
/// load() call this. And the states of many workers as one: elastic restarts.
namespace lamina::inline LAMINA_ABI::detail {

inline constexpr std::uint32_t state_magic = 0x534d4cf5;  // the bytes F5 'L' 'M' 'S'

inline constexpr std::uint8_t state_flag_checksum = 1;
inline constexpr std::uint8_t state_flag_velocity = 2;
inline constexpr std::uint8_t state_flag_expected = 4;

struct state_header {
  std::uint32_t magic = state_magic;
  std::uint16_t version = 1;
  std::uint8_t element_type = 0;
  std::uint8_t flags = 0;
  std::uint64_t fingerprint = 0;
  std::uint64_t layers = 0;
  std::uint64_t elements = 0;
  std::uint64_t step = 0;
  double threshold = 0;
  double allowance = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(state_header) == 64 && std::is_trivially_copyable_v<state_header>);

template <class Numbers>
void append(std::vector<std::byte>& bytes, const Numbers& numbers) {
  const auto values = std::as_bytes(std::span(numbers));
  bytes.insert(bytes.end(), values.begin(), values.end());
}

template <class Value>
Value value_at(std::span<const std::byte> bytes, std::size_t index) {
  Value value;
  std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
  return value;
}

template <class Value>
std::vector<Value> values_of(std::span<const std::byte> bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The header's own checksum field counts as zero.
inline std::uint64_t state_checksum(state_header header, std::span<const std::byte> body) {
  header.checksum = 0;
  return checksum().add(std::as_bytes(std::span(&header, 1))).add(body).value();
}

// Writes the header into the first bytes: what it does not say yet, and a checksum over all that follows.
template <element T>
void seal_state(std::vector<std::byte>& bytes, state_header header, const layout& model,
                const selector::memory& memory, std::uint64_t step) {
  header.element_type = element_code<T>;
  header.flags = static_cast<std::uint8_t>(header.flags | state_flag_checksum);
  header.fingerprint = model.fingerprint();
  header.layers = model.layers();
  header.step = step;
  header.threshold = memory.threshold;
  header.allowance = memory.allowance;
  header.checksum = state_checksum(header, std::span(bytes).subspan(sizeof header));
  std::memcpy(bytes.data(), &header, sizeof header);
}

// Of any bytes. `name` stands in the errors.
class state_reader {
 public:
  // Refuses a header whose fields are not those of `model`, and flags that are not allowed.
  state_reader(std::span<const std::byte> bytes, std::uint32_t magic, std::uint8_t element_type,
               unsigned allowed_flags, const layout& model, std::string name)
      : name_(std::move(name)) {
    refuse_if(bytes.size() < sizeof header, errc::truncated);
    std::memcpy(&header, bytes.data(), sizeof header);
    rest_ = body_ = bytes.subspan(sizeof header);
    refuse_if(header.magic != magic, errc::bad_magic);
    refuse_if(header.version == 0 || header.version > state_header{}.version, errc::unsupported_version);
    refuse_if(header.element_type != element_type, errc::wrong_element_type);
    refuse_if(header.fingerprint != model.fingerprint() || header.layers != model.layers(),
              errc::wrong_layout);
    refuse_if((header.flags & ~allowed_flags) != 0, errc::nonzero_reserved);
  }

  void refuse_if(bool is_bad, errc code) const {
    if (is_bad) raise(decode_error(make_error_code(code), name_));
  }
  // The next numbers. By their count, as their bytes may not fit in std::size_t.
  template <class Value>
  std::span<const std::byte> take(std::uint64_t count) {
    refuse_if(rest_.size() / sizeof(Value) < count, errc::truncated);
    const auto taken = rest_.first(static_cast<std::size_t>(count) * sizeof(Value));
    rest_ = rest_.subspan(taken.size());
    return taken;
  }
  template <class Value>
  std::vector<Value> numbers(std::uint64_t count) {
    return values_of<Value>(take<Value>(count));
  }
  void check_sum() const {
    const bool has_checksum = (header.flags & state_flag_checksum) != 0;
    refuse_if(header.checksum != (has_checksum ? state_checksum(header, body_) : 0), errc::checksum_mismatch);
    if (is_nan(header.threshold) || !is_finite(header.allowance))
      refuse<std::invalid_argument>(name_, ": the threshold or the allowance is not a number");
  }
  void check_end() const { refuse_if(!rest_.empty(), errc::trailing_bytes); }

  state_header header;

 private:
  std::string name_;
  std::span<const std::byte> body_;
  std::span<const std::byte> rest_;
};

// The parts of a state that was checked, in its bytes, where they need not be aligned.
struct state_view {
  state_header header;
  std::span<const std::byte> sent_in;
  std::span<const std::byte> expected;
  std::span<const std::byte> elements;
  std::span<const std::byte> velocity;

  bool has_velocity() const noexcept { return (header.flags & state_flag_velocity) != 0; }
  selector::memory memory() const {
    return {header.threshold, header.allowance, values_of<std::uint64_t>(sent_in)};
  }
};

// `has_velocity` says whether the state must hold velocity, or must not.
template <element T>
state_view read_state(std::span<const std::byte> bytes, const layout& model, std::optional<bool> has_velocity,
                      const std::string& name) {
  state_reader from(bytes, state_magic, element_code<T>,
                    state_flag_checksum | state_flag_velocity | state_flag_expected, model, name);
  state_view view;
  view.header = from.header;
  from.refuse_if(view.header.elements != model.elements(), errc::wrong_layout);
  from.refuse_if(view.has_velocity() != has_velocity.value_or(view.has_velocity()), errc::other_momentum);
  const bool has_expected = (view.header.flags & state_flag_expected) != 0;
  view.sent_in = from.take<std::uint64_t>(model.layers());
  view.expected = from.take<double>(has_expected ? model.layers() : 0);
  view.elements = from.take<T>(model.elements());
  view.velocity = from.take<T>(view.has_velocity() ? model.elements() : 0);
  from.check_end();
  from.check_sum();
  for (std::size_t l = 0; l < model.layers(); ++l)
    from.refuse_if(value_at<std::uint64_t>(view.sent_in, l) > view.header.step, errc::impossible_age);
  return view;
}

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI {

/// The memory of a worker after step `step`, as bytes: 64, 8 or 16 a fragment, and the residual and velocity in T.
///
/// \param memory    of the worker's selector
/// \param residual  flat, fragments.elements() elements; velocity as many, or none
/// \param step      the last that was committed, counted from 1; 0: none
/// \param expected  the values to plan the next step by, one a fragment, or none
/// \throws std::invalid_argument  other sizes
/// \throws std::domain_error      NaN or infinity, naming the fragment: nothing would load it
template <element T>
std::vector<std::byte> save_state(const layout& fragments, const selector::memory& memory,
                                  std::span<const T> residual, std::span<const T> velocity,
                                  std::uint64_t step, std::span<const double> expected = {}) {
  if (residual.size() != fragments.elements() ||
      (!velocity.empty() && velocity.size() != fragments.elements()) ||
      memory.sent_in.size() != fragments.layers() ||
      (!expected.empty() && expected.size() != fragments.layers())) {
    detail::refuse<std::invalid_argument>(
        "save_state: the residual, the velocity or the numbers are of another model than one of ",
        fragments.elements(), " elements in ", fragments.layers(), " fragments");
  }
  for (const std::span<const T> numbers : {residual, velocity}) {
    for (std::size_t f = 0; f < fragments.layers() && !numbers.empty(); ++f) {
      if (detail::are_finite<T>(numbers.subspan(fragments.offset(f), fragments.sizes()[f]))) continue;
      detail::refuse<std::domain_error>("save: the ",
                                        numbers.data() == residual.data() ? "residual" : "velocity",
                                        " of layer '", fragments[f].name, "' holds NaN or infinity");
    }
  }
  std::vector<std::byte> bytes(sizeof(detail::state_header));
  detail::append(bytes, memory.sent_in);
  detail::append(bytes, expected);
  detail::append(bytes, residual);
  detail::append(bytes, velocity);
  detail::state_header header;
  header.flags = static_cast<std::uint8_t>((velocity.empty() ? 0 : detail::state_flag_velocity) |
                                           (expected.empty() ? 0 : detail::state_flag_expected));
  header.elements = fragments.elements();
  detail::seal_state<T>(bytes, header, fragments, memory, step);
  return bytes;
}

/// What such bytes hold.
template <element T>
struct saved_state {
  selector::memory memory;
  std::vector<T> residual;
  std::vector<T> velocity;  ///< empty without momentum
  std::uint64_t step = 0;
  std::vector<double> expected;  ///< may be empty
};

/// Reads them; `with_momentum` says whether they must hold velocity, or must not. Throws decode_error with the errc that says why they
/// are refused, and std::invalid_argument for numbers that are not finite.
template <element T>
[[nodiscard]] saved_state<T> read_state(std::span<const std::byte> bytes, const layout& fragments,
                                        bool with_momentum) {
  const detail::state_view state = detail::read_state<T>(bytes, fragments, with_momentum, "saved state");
  saved_state<T> saved{state.memory(), detail::values_of<T>(state.elements),
                       detail::values_of<T>(state.velocity), state.header.step,
                       detail::values_of<double>(state.expected)};
  if (!detail::are_finite<T>(saved.residual) || !detail::are_finite<T>(saved.velocity))
    detail::refuse<std::invalid_argument>("the saved residual holds NaN or infinity");
  return saved;
}

namespace detail {

// The mean of value_of(state) over the states. Where all agree it is that value, which the sum over W, rounded, need not give back.
template <class Value>
auto mean_over(std::span<const state_view> states, const Value& value_of) {
  const auto first = value_of(states[0]);
  auto sum = first;
  using bits = bits_of<decltype(sum)>;
  bool all_agree = true;
  for (const state_view& state : states.subspan(1)) {
    const auto value = value_of(state);
    sum += value;
    // Bits, since NaN equals everything under -ffast-math.
    all_agree &= std::bit_cast<bits>(value) == std::bit_cast<bits>(first);
  }
  return all_agree ? first : sum / static_cast<decltype(sum)>(states.size());
}

// The same for each number of one part of the states.
template <class T>
std::vector<T> means_of(std::span<const state_view> states, std::span<const std::byte> state_view::*part) {
  std::vector<T> means((states[0].*part).size() / sizeof(T));
  for (std::size_t i = 0; i < means.size(); ++i)
    means[i] = mean_over(states, [&](const state_view& each) { return value_at<T>(each.*part, i); });
  return means;
}

// Ranges of bytes that outlive the loop over them.
template <class States>
concept saved_states = std::ranges::input_range<const States> &&
    std::ranges::borrowed_range<std::ranges::range_reference_t<const States>> &&
    std::convertible_to<std::ranges::range_reference_t<const States>, std::span<const std::byte>>;

}  // namespace detail

/// One state for a run that goes on with another number of workers. When each of W' workers loads it in place of the W
/// that were saved, what all of them together still have to contribute to the update, (1/W) Σ_w a_w, is the same.
///
/// Residual, velocity, allowance, threshold and expected values are the means, summed in the order of the workers, the first two in T. What
/// all states agree on stays as it is. If one state's threshold is the invalid one, so is this one's. For each layer the
/// earliest of the steps in which it was last sent counts, so that none is dropped for longer than at_least_every.
///
/// \param states  what each of the W workers saved, all after the same step: a range of ranges of bytes, such as
///                std::vector<std::vector<std::byte>>
/// \throws decode_error           as worker::load, for the first state that is refused, named by its index; other_momentum
///                                for one with velocity where state 0 has none, or the other way round
/// \throws std::invalid_argument  no states; states of two steps; numbers that are not finite, or whose sum is not
///
/// Exact where neither the sums nor the division by W round, as with W a power of two and integers. Cost: one read of
/// the states, two with checksums, and twice the memory of one.
template <element T, detail::saved_states States>
std::vector<std::byte> merge_states(const States& states, const layout& fragments) {
  std::vector<detail::state_view> views;
  const auto name_of = [](std::size_t index) { return "saved state " + std::to_string(index); };
  for (const std::span<const std::byte> bytes : states) {
    std::optional<bool> as_first;
    if (!views.empty()) as_first = views[0].has_velocity();
    views.push_back(detail::read_state<T>(bytes, fragments, as_first, name_of(views.size())));
    if (views.back().header.step != views[0].header.step) {
      detail::refuse<std::invalid_argument>(name_of(0), " is of step ", views[0].header.step, ", ",
                                            name_of(views.size() - 1), " of step ", views.back().header.step);
    }
  }
  if (views.empty()) detail::refuse<std::invalid_argument>("there is no saved state to merge");
  const auto mean_of = [&](std::span<const std::byte> detail::state_view::*part) {
    std::vector<T> means = detail::means_of<T>(views, part);
    if (detail::are_finite<T>(means)) return means;
    for (std::size_t w = 0; w < views.size(); ++w) {
      if (!detail::are_finite<T>(detail::values_of<T>(views[w].*part)))
        detail::refuse<std::invalid_argument>(name_of(w), " holds NaN or infinity");
    }
    detail::refuse<std::invalid_argument>("saved states: their sum overflows");
  };
  // How the next decide() of a resumed run finds its threshold, ages and allowance.
  selector::memory memory = views[0].memory();
  memory.threshold = detail::mean_over(views, [](const auto& each) { return each.header.threshold; });
  memory.allowance = detail::mean_over(views, [](const auto& each) { return each.header.allowance; });
  for (const detail::state_view& view : views) {
    if (view.header.threshold == invalid_threshold) memory.threshold = invalid_threshold;
    for (std::size_t f = 0; f < memory.sent_in.size(); ++f)
      memory.sent_in[f] = (std::min)(memory.sent_in[f], detail::value_at<std::uint64_t>(view.sent_in, f));
  }
  // Infinities of both signs, as a budget leaves them. One that is infinite is not used: the next step searches.
  if (detail::is_nan(memory.threshold)) memory.threshold = detail::infinite_value;
  if (!detail::is_finite(memory.allowance))
    detail::refuse<std::invalid_argument>("saved states: their sum overflows");
  // Infinite ones, of workers before their first step, stay so.
  std::vector<double> expected;
  const bool all_have = std::ranges::none_of(views, [](const auto& each) { return each.expected.empty(); });
  if (all_have) expected = detail::means_of<double>(views, &detail::state_view::expected);
  return save_state<T>(fragments, memory, mean_of(&detail::state_view::elements),
                       mean_of(&detail::state_view::velocity), views[0].header.step, expected);
}

}  // namespace lamina::inline LAMINA_ABI
