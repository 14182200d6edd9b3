// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace lab {

/// How far a run is.
struct progress {
  std::uint64_t step = 0;
  std::uint64_t steps = 0;
  double loss = 0;
  double seconds_a_step = 0;
};

/// `width` characters in brackets, filled as far as `done` is of `all`.
std::string progress_bar(std::uint64_t done, std::uint64_t all, std::size_t width);

/// At most so many characters. Where they are few, what matters least is left out.
std::string progress_text(const progress& now, std::size_t columns);

/// The last line of a terminal, redrawn in place and gone with this object.
class progress_line {
 public:
  /// With 0 columns nothing of it is written. Only who starts the program knows how many there are: to a rank of mpirun
  /// every output looks like a terminal, of no size.
  explicit progress_line(std::size_t columns) : columns_(columns) {}
  ~progress_line() { clear(); }
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;

  void draw(const progress& now);
  /// Prints what ends with a newline, on a terminal or not.
  void print_above(const std::string& rows);

 private:
  void clear();

  std::size_t columns_;
  std::optional<progress> drawn_;
};

}  // namespace lab
