// SPDX-License-Identifier: MIT
#pragma once

#include <array>
#include <charconv>
#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <istream>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lamina/collectives/cost.hpp"
#include "lamina/collectives/schedule.hpp"
#include "lamina/collectives/sum.hpp"
#include "lamina/detail/abi.hpp"
#include "lamina/detail/fnv.hpp"

/// \file
/// The text in which a plan is saved. Read it after plan.hpp.
namespace lamina::inline LAMINA_ABI::collectives {

/// Thrown where the text of a plan is damaged, or is of another model or another number of ranks.
class plan_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

namespace detail {

/// What the text of a plan says, as it stands there: whether it fits a model is the plan's to know. Lines of words, the same on every
/// machine, and a checksum of what stands before it.
class plan_text {
 public:
  struct bucket_line {
    algorithm how = algorithm::pairwise;
    std::vector<std::size_t> layers;
  };

  std::string model;  // its fingerprint
  std::size_t ranks = 0;
  std::size_t chunk_bytes = 0;
  payload_type payload = payload_type::as_is;
  cost_table costs;
  std::vector<bucket_line> buckets;

  /// Throws plan_error, with what is there and what was expected.
  static plan_text read(std::string_view text) {
    const std::size_t end = text.rfind(checksum_word);
    if (end == std::string_view::npos ||
        text.substr(end) != checksum_line(fingerprint_of(text.substr(0, end))))
      throw plan_error("the plan is damaged: its checksum is another");
    std::istringstream in{std::string(text.substr(0, end))};
    in.imbue(std::locale::classic());
    plan_text found;
    found.read_head(in);
    for (std::string line; std::getline(in >> std::ws, line);) found.read_line(line);
    return found;
  }

  /// The text, and 64 bits that are equal where texts are.
  struct written {
    std::string text;
    std::uint64_t fingerprint = 0;
  };
  [[nodiscard]] written write() const {
    std::string text = body();
    const std::uint64_t fingerprint = fingerprint_of(text);
    return {std::move(text) + checksum_line(fingerprint), fingerprint};
  }

  static std::string hexadecimal(std::uint64_t number) {
    std::array<char, 17> digits{};
    std::snprintf(digits.data(), digits.size(), "%016" PRIx64, number);
    return digits.data();
  }

 private:
  static constexpr const char* checksum_word = "checksum ";

  [[nodiscard]] std::string body() const {
    std::string text = "lamina plan 1\nmodel " + model + "\nranks " + std::to_string(ranks) +
                       "\nchunk_bytes " + std::to_string(chunk_bytes) + "\npayload " + name_of(payload) +
                       "\nalpha " + exact(costs.alpha) + "\nbeta_one_way " + exact(costs.beta_one_way) +
                       "\nbeta_both_ways " + exact(costs.beta_both_ways) + "\ngamma " + exact(costs.gamma) +
                       "\n";
    for (const bucket_line& each : buckets) {
      text.append("bucket ").append(name_of(each.how));
      for (const std::size_t layer : each.layers) text.append(" ").append(std::to_string(layer));
      text += "\n";
    }
    return text;
  }

  // The fewest digits that give the number back, in every locale.
  static std::string exact(double number) {
    std::array<char, 32> digits{};
    return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), number).ptr};
  }

  // Takes the next word of `in` if it is that one.
  static void expect(std::istream& in, const char* word) {
    std::string read;
    if (!(in >> read) || read != word)
      throw plan_error("the plan has '" + read + "' where '" + word + "' is expected");
  }
  template <class Value>
  static Value number(std::istream& in, const char* name) {
    Value read{};
    expect(in, name);
    if (!(in >> read)) throw plan_error(std::string("the plan has no number behind '") + name + "'");
    return read;
  }
  // What the next word means.
  template <class Parse>
  static auto named(std::istream& in, const Parse& parse) {
    std::string name;
    in >> name;
    try {
      return parse(name);
    } catch (const std::invalid_argument& error) {
      throw plan_error(std::string("the plan: ") + error.what());
    }
  }

  void read_head(std::istream& in) {
    for (const char* word : {"lamina", "plan", "1"}) expect(in, word);
    expect(in, "model");
    in >> model;
    ranks = number<std::size_t>(in, "ranks");
    chunk_bytes = number<std::size_t>(in, "chunk_bytes");
    expect(in, "payload");
    payload = named(in, [](const std::string& name) { return parse_sum_payload(name); });
    costs.alpha = number<double>(in, "alpha");
    costs.beta_one_way = number<double>(in, "beta_one_way");
    costs.beta_both_ways = number<double>(in, "beta_both_ways");
    costs.gamma = number<double>(in, "gamma");
  }
  void read_line(const std::string& line) {
    std::istringstream words(line);
    words.imbue(std::locale::classic());
    expect(words, "bucket");
    bucket_line& added = buckets.emplace_back();
    added.how = named(words, [](const std::string& name) { return parse_algorithm(name); });
    for (std::size_t layer = 0; words >> layer;) added.layers.push_back(layer);
    if (added.layers.empty()) throw plan_error("the plan has a bucket without layers");
  }

  static std::uint64_t fingerprint_of(std::string_view text) noexcept {
    std::uint64_t hash = lamina::detail::fnv_basis;
    for (const char each : text) hash = lamina::detail::fnv(hash, static_cast<std::uint8_t>(each));
    return hash;
  }
  static std::string checksum_line(std::uint64_t fingerprint) {
    return checksum_word + hexadecimal(fingerprint) + "\n";
  }
};

}  // namespace detail
}  // namespace lamina::inline LAMINA_ABI::collectives
