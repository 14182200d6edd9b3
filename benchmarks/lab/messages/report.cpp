// SPDX-License-Identifier: MIT
#include "messages/report.hpp"

#include <algorithm>
#include <cstring>

#include "messages/transport.hpp"

namespace lab {

// The fields have no room between them that would go out as whatever stands in memory.
static_assert(sizeof(step_report) == report_bytes);

std::vector<std::byte> encode_report(const step_report& report) {
  const auto bytes = std::as_bytes(std::span(&report, 1));
  return {bytes.begin(), bytes.end()};
}

step_report decode_report(std::span<const std::byte> bytes) {
  step_report report;
  if (bytes.size() != sizeof report) {
    throw link_error("a report has " + std::to_string(bytes.size()) + " bytes, not " +
                     std::to_string(sizeof report));
  }
  std::memcpy(&report, bytes.data(), sizeof report);
  return report;
}

step_report merged(const step_report& a, const step_report& b) {
  step_report both = a;
  both.images += b.images;
  both.correct += b.correct;
  if (both.images > 0) {
    both.loss = (a.loss * static_cast<double>(a.images) + b.loss * static_cast<double>(b.images)) /
                static_cast<double>(both.images);
  }
  // What the slower one did before is what the others waited for.
  if (b.evaluation_seconds + b.compute_seconds > a.evaluation_seconds + a.compute_seconds) {
    both.evaluation_seconds = b.evaluation_seconds;
  }
  both.compute_seconds = std::max(a.compute_seconds, b.compute_seconds);
  both.node_seconds = std::max(a.node_seconds, b.node_seconds);
  both.test_images += b.test_images;
  both.test_top1 += b.test_top1;
  both.test_top5 += b.test_top5;
  return both;
}

}  // namespace lab
