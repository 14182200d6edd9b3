// SPDX-License-Identifier: MIT
#pragma once

#include <iterator>

#include "lamina/decision.hpp"
#include "lamina/error.hpp"
#include "lamina/frame.hpp"
#include "lamina/representative.hpp"

/// A worker's memory as bytes, for a checkpoint: little-endian, with the layout's fingerprint and a checksum. And the states of many
/// workers as one: elastic restarts. Read worker.hpp before.
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
  std::vector<Value> numbers(std::uint64_t count) {
    refuse_if(rest_.size() / sizeof(Value) < count, errc::truncated);
    std::vector<Value> values(static_cast<std::size_t>(count));
    const std::size_t bytes = values.size() * sizeof(Value);
    if (bytes > 0) std::memcpy(values.data(), rest_.data(), bytes);
    rest_ = rest_.subspan(bytes);
    return values;
  }
  void check_sum() const {
    const bool has_checksum = (header.flags & state_flag_checksum) != 0;
    refuse_if(header.checksum != (has_checksum ? state_checksum(header, body_) : 0), errc::checksum_mismatch);
    if (is_nan(header.threshold) || !is_finite(header.allowance))
      refuse(name_, ": the threshold or the allowance is not a number");
  }
  void check_end() const { refuse_if(!rest_.empty(), errc::trailing_bytes); }

  state_header header;

 private:
  std::string name_;
  std::span<const std::byte> body_;
  std::span<const std::byte> rest_;
};

// Means over states that come one after the other. What all agree on stays as it is, which the sum over W, rounded, need not give back.
template <class Number>
class means_of_states {
 public:
  void add(std::span<const Number> next) {
    if (++states_ == 1) {
      first_.assign(next.begin(), next.end());
      sums_ = first_;
      agree_.assign(next.size(), 1);
      return;
    }
    for (std::size_t i = 0; i < next.size(); ++i) {
      // Bits, since NaN equals everything under -ffast-math.
      agree_[i] &= std::bit_cast<bits_of<Number>>(next[i]) == std::bit_cast<bits_of<Number>>(first_[i]);
      sums_[i] += next[i];
    }
  }
  std::vector<Number> all() const {
    std::vector<Number> means = first_;
    for (std::size_t i = 0; i < means.size(); ++i) {
      if (!agree_[i]) means[i] = sums_[i] / static_cast<Number>(states_);
    }
    return means;
  }

 private:
  std::vector<Number> first_;
  std::vector<Number> sums_;
  std::vector<char> agree_;
  std::size_t states_ = 0;
};

// Ranges of bytes that outlive the loop over them.
template <class States>
concept saved_states = std::ranges::input_range<const States> &&
    std::ranges::borrowed_range<std::ranges::range_reference_t<const States>> &&
    std::convertible_to<std::ranges::range_reference_t<const States>, std::span<const std::byte>>;

}  // namespace lamina::inline LAMINA_ABI::detail

namespace lamina::inline LAMINA_ABI {

/// The memory of a worker after step `step`, as bytes: 64, 8 or 16 a fragment, and the residual and velocity in T.
///
/// \param fragments  worker::fragments()
/// \param memory     of the worker's selector
/// \param residual   flat, fragments.elements() elements
/// \param velocity   as many, or none
/// \param step       the last that was committed, counted from 1; 0: none
/// \param expected   the values to plan the next step by, one a fragment, or none
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
    detail::refuse("save_state: the residual, the velocity or the numbers are of another model than one of ",
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

/// Reads them; `with_momentum` says whether they must hold velocity, or must not; none: as they like. Throws decode_error, and
/// std::invalid_argument for numbers that are not finite; `name` stands in both.
template <element T>
[[nodiscard]] saved_state<T> read_state(std::span<const std::byte> bytes, const layout& fragments,
                                        std::optional<bool> with_momentum,
                                        const std::string& name = "saved state") {
  constexpr unsigned flags =
      detail::state_flag_checksum | detail::state_flag_velocity | detail::state_flag_expected;
  detail::state_reader from(bytes, detail::state_magic, detail::element_code<T>, flags, fragments, name);
  const detail::state_header& header = from.header;
  const bool has_velocity = (header.flags & detail::state_flag_velocity) != 0;
  const bool has_expected = (header.flags & detail::state_flag_expected) != 0;
  from.refuse_if(header.elements != fragments.elements(), errc::wrong_layout);
  from.refuse_if(has_velocity != with_momentum.value_or(has_velocity), errc::other_momentum);
  saved_state<T> saved;
  saved.step = header.step;
  saved.memory = {header.threshold, header.allowance, from.numbers<std::uint64_t>(header.layers)};
  saved.expected = from.numbers<double>(has_expected ? header.layers : 0);
  saved.residual = from.numbers<T>(header.elements);
  saved.velocity = from.numbers<T>(has_velocity ? header.elements : 0);
  from.check_end();
  from.check_sum();
  for (const std::uint64_t sent_in : saved.memory.sent_in)
    from.refuse_if(sent_in > header.step, errc::impossible_age);
  if (!detail::are_finite<T>(saved.residual) || !detail::are_finite<T>(saved.velocity))
    detail::refuse(name, " holds NaN or infinity");
  return saved;
}

/// One state for a run that goes on with another number of workers. When each of W' workers loads it in place of the W that were saved,
/// what all of them together still have to contribute to the update, (1/W) Σ_w a_w, is the same.
///
/// Residual, velocity, allowance, threshold and expected values are the means, summed in the order of the workers, the first two in T; what
/// all states agree on stays as it is. If one threshold is the invalid one, so is this one. For each layer the earliest of the steps in
/// which it was last sent counts, so that none is dropped for longer than at_least_every.
///
/// \param states     what each of the W workers saved, all after the same step: a range of ranges of bytes
/// \param fragments  worker::fragments() of each of them
/// \throws decode_error           for the first state that is refused, named by its index
/// \throws std::invalid_argument  no states; states of two steps; numbers that are not finite, or whose sum is not
///
/// Exact where neither the sums nor the division by W round. Cost: two reads of the states, and four times the memory of one.
template <element T, detail::saved_states States>
std::vector<std::byte> merge_states(const States& states, const layout& fragments) {
  detail::means_of_states<T> residual;
  detail::means_of_states<T> velocity;
  detail::means_of_states<double> expected;
  detail::means_of_states<double> numbers;
  saved_state<T> merged;
  std::size_t count = 0;
  bool all_expect = true;
  bool any_invalid = false;
  for (const std::span<const std::byte> bytes : states) {
    std::optional<bool> as_first;
    if (count > 0) as_first = !merged.velocity.empty();
    saved_state<T> next = read_state<T>(bytes, fragments, as_first, detail::sentence("saved state ", count));
    if (count > 0 && next.step != merged.step) {
      detail::refuse("saved state 0 is of step ", merged.step, ", saved state ", count, " of step ",
                     next.step);
    }
    residual.add(next.residual);
    velocity.add(next.velocity);
    all_expect &= !next.expected.empty();
    if (all_expect) expected.add(next.expected);
    numbers.add(std::array{next.memory.threshold, next.memory.allowance});
    any_invalid |= next.memory.threshold == invalid_threshold;
    if (count++ == 0) {
      merged = std::move(next);
      continue;
    }
    for (std::size_t f = 0; f < fragments.layers(); ++f)
      merged.memory.sent_in[f] = (std::min)(merged.memory.sent_in[f], next.memory.sent_in[f]);
  }
  if (count == 0) detail::refuse("there is no saved state to merge");
  merged.residual = residual.all();
  merged.velocity = velocity.all();
  // How the next decide() of a resumed run finds its threshold and allowance. Infinities of both signs, as a budget leaves them, have no
  // mean; a threshold that is infinite is not used: the next step searches.
  merged.memory.threshold = any_invalid ? invalid_threshold : detail::ordered_value(numbers.all()[0]);
  merged.memory.allowance = numbers.all()[1];
  if (!detail::are_finite<T>(merged.residual) || !detail::are_finite<T>(merged.velocity) ||
      !detail::is_finite(merged.memory.allowance))
    detail::refuse("saved states: their sum overflows");
  // Infinite ones, of workers before their first step, stay so.
  merged.expected = all_expect ? expected.all() : std::vector<double>();
  return save_state<T>(fragments, merged.memory, merged.residual, merged.velocity, merged.step,
                       merged.expected);
}

}  // namespace lamina::inline LAMINA_ABI
