// SPDX-License-Identifier: MIT
#pragma once

#include <cstddef>
#include <lamina/collectives/timeline.hpp>
#include <lamina/layout.hpp>
#include <memory>
#include <string>

namespace lab {

/// The last steps of one worker as Chrome trace JSON, for chrome://tracing or Perfetto.
class trace_file {
 public:
  /// "trace.json" becomes "trace-2.json" of worker 2, which is made at once; an empty name is no file. Throws std::runtime_error that
  /// names it.
  trace_file(const std::string& name, std::size_t worker, const lamina::layout& model);

  /// To be recorded into; null where there is no file.
  lamina::collectives::timeline* events() const { return events_.get(); }
  /// Throws std::runtime_error that names the file.
  void write() const;

 private:
  std::string path_;
  std::size_t worker_;
  std::unique_ptr<lamina::collectives::timeline> events_;
};

}  // namespace lab
