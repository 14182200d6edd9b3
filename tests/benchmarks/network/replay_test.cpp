// SPDX-License-Identifier: MIT
#include "replay.hpp"  // Torch defines CHECK, so its headers come before Catch2's.

#include "catch.hpp"

#include <fstream>
#include <string>

#include "temporary_directory.hpp"

using namespace resnet50_ps;

TEST_CASE("replay: recorded gradients that are missing or of another model are named") {
  const temporary_directory directory;
  const lamina::layout model({{"layer", {4}}});
  const std::string nowhere = (directory.path() / "nowhere").string();
  CHECK_THROWS_WITH(gradient_player(nowhere, 0, 0, model),
                    Catch::Matchers::Contains("no recorded gradients in " + nowhere));
  std::ofstream(directory.path() / "worker-0-0.f32") << "0123456789";
  CHECK_THROWS_WITH(gradient_player(directory.path().string(), 0, 0, model),
                    Catch::Matchers::Contains("worker-0-0.f32 holds gradients of another model"));
}
