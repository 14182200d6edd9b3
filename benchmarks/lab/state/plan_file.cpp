// SPDX-License-Identifier: MIT
#include "state/plan_file.hpp"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <system_error>

namespace lab {

std::string read_plan(const std::string& file) {
  std::ifstream from(file, std::ios::binary);
  if (!from) throw std::runtime_error("cannot read the plan " + file);
  std::string text{std::istreambuf_iterator<char>(from), std::istreambuf_iterator<char>()};
  if (text.empty()) throw std::runtime_error("the plan " + file + " is empty");
  return text;
}

void write_plan(const std::string& directory, const lamina::collectives::plan& made) {
  std::error_code problem;  // of which the file tells
  std::filesystem::create_directories(directory, problem);
  const std::string file = directory + "/plan.txt";
  std::ofstream to(file, std::ios::binary);
  if (!(to << made.save()).flush()) throw std::runtime_error("cannot write the plan " + file);
}

}  // namespace lab
