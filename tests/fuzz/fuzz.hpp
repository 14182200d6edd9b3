// SPDX-License-Identifier: MIT
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <system_error>

#include "lamina/codec.hpp"
#include "support.hpp"

/// What the fuzz targets share. A target is one header with fuzz_one(); libFuzzer calls it with bytes of its own, and the program that
/// replays with seeds and those of files. A violated property aborts, which both take for a crash.
namespace lamina_fuzz {

using lamina_test::throws;
using bytes = std::vector<std::byte>;

inline void check(bool holds, const char* property) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", property);
  std::abort();
}

/// The bytes as a source of choices; zeros once they are used up, so that every prefix is an input as well.
class input {
 public:
  explicit input(std::span<const std::byte> all) : rest_(all) {}

  bool is_empty() const { return rest_.empty(); }
  template <class Value>
  Value value() {
    Value read{};
    const std::size_t count = std::min(sizeof read, rest_.size());
    if (count > 0) std::memcpy(&read, rest_.data(), count);
    rest_ = rest_.subspan(count);
    return read;
  }
  /// In [0, limit), limit <= 256.
  std::size_t below(std::size_t limit) { return value<std::uint8_t>() % limit; }
  bool flag() { return below(2) == 1; }
  template <class Value, std::size_t Count>
  Value one_of(const std::array<Value, Count>& values) {
    return values[below(Count)];
  }
  std::mt19937 random() { return std::mt19937(value<std::uint16_t>()); }
  bytes take(std::size_t count) {
    const auto taken = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(taken.size());
    return {taken.begin(), taken.end()};
  }
  bytes take_rest() { return take(rest_.size()); }

 private:
  std::span<const std::byte> rest_;
};

/// 1 to 6 layers: empty, of one element, around rows of 64 and, now and then, around blocks of 4,096.
inline lamina::layout model_of(input& in) {
  constexpr std::array<std::size_t, 10> some_sizes = {0, 1, 2, 3, 5, 31, 63, 64, 65, 130};
  constexpr std::array<std::size_t, 4> large_sizes = {4095, 4096, 4097, 8200};
  std::vector<std::size_t> sizes(1 + in.below(6));
  for (std::size_t& size : sizes) size = in.below(16) == 15 ? in.one_of(large_sizes) : in.one_of(some_sizes);
  return lamina_test::model_of(sizes);
}

/// Three models for inputs that are frames or states of one: their seeds then stay valid.
inline const lamina::layout& some_model(input& in) {
  static const std::array models = {lamina_test::model_of({3, 0, 65, 1, 40}), lamina_test::model_of({1}),
                                    lamina_test::model_of({4097, 2, 2, 2, 2, 2, 2, 2, 2, 0})};
  return models[in.below(models.size())];
}

/// Numbers with any bits, or finite ones with any exponent; now and then the special ones alone.
template <class T>
std::vector<T> any_values(input& in, std::size_t count, bool finite = false) {
  using bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;
  using limits = std::numeric_limits<T>;
  const std::array specials = {
      -T(0), T(0), T(1), -limits::denorm_min(), limits::max(), limits::infinity(), limits::quiet_NaN()};
  const std::size_t special_kinds = in.below(16) == 15 ? 1 + in.below(specials.size()) : 0;
  auto state = in.value<std::uint64_t>();
  std::vector<T> values(count);
  for (T& value : values) {
    state = state * 6364136223846793005U + 1442695040888963407U;  // quicker than an engine of <random>
    value = special_kinds > 0 ? specials[(state >> 32U) % special_kinds]
                              : std::bit_cast<T>(static_cast<bits>(state >> (64 - 8 * sizeof(bits))));
  }
  // Some of the bytes as they are, for the fuzzer to work on.
  for (std::size_t i = 0; i < std::min<std::size_t>(count, 4); ++i) values[i] = in.value<T>();
  if (finite) {
    for (T& value : values) value = std::isfinite(value) ? value : T(1);
  }
  return values;
}

/// Numbers that are equal, or both NaN, whose sign and payload mean nothing.
template <class T>
bool same_number(T a, T b) {
  return lamina_test::same_bits(std::span(&a, 1), std::span(&b, 1)) || (std::isnan(a) && std::isnan(b));
}

/// Whether a call goes well; else it throws one of the errors that bytes from outside may lead to.
template <class Call>
bool succeeds(const Call& call, std::error_code* code = nullptr) {
  try {
    call();
    return true;
  } catch (const lamina::decode_error& error) {
    check(error.code().category() == lamina::category(), "a refusal has a name");
    if (code != nullptr) *code = error.code();
  } catch (const std::invalid_argument&) {
  }
  return false;
}

/// Bytes of which a mutation has broken the checksum, and perhaps the rest of the header, mended so that what comes after
/// these checks is reached. `sum_of` gives the checksum that belongs to a header.
template <class Header, class SumOf>
void mend(bytes& broken, const Header& good, std::size_t how, const SumOf& sum_of) {
  if (how == 0 || broken.size() < sizeof(Header)) return;
  Header header;
  std::memcpy(&header, broken.data(), sizeof header);
  if (how > 1) {
    header.magic = good.magic;
    header.version = good.version;
    header.element_type = good.element_type;
    header.fingerprint = good.fingerprint;
    header.layers = good.layers;
  }
  header.checksum = 0;
  header.checksum = sum_of(header, std::span<const std::byte>(broken).subspan(sizeof header));
  std::memcpy(broken.data(), &header, sizeof header);
}

}  // namespace lamina_fuzz
