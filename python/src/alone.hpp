// SPDX-License-Identifier: MIT
// One thread at a time uses an object: elements are read without the GIL, and lamina's classes have no lock.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <stdexcept>
#include <utility>

namespace lamina_python {

namespace nb = nanobind;

/// Refuses a call while another thread is in one, also while the GIL is released.
class one_at_a_time {
 public:
  class [[nodiscard]] use {
   public:
    explicit use(std::atomic_flag& flag) : flag_(flag) {
      if (flag.test_and_set(std::memory_order_acquire))
        throw std::runtime_error("another thread uses this object; use it from one thread at a time");
    }
    ~use() { flag_.clear(std::memory_order_release); }
    use(const use&) = delete;
    use& operator=(const use&) = delete;

   private:
    std::atomic_flag& flag_;
  };
  use begin() const { return use(flag_); }

 private:
  mutable std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

// Binds a class of which one thread uses an object at a time: begin_use() of an object gives a one_at_a_time::use.
template <class Class>
class alone : public nb::class_<Class> {
  using base = nb::class_<Class>;

 public:
  using base::base;
  template <class Call, class... Extra>
  alone& init(const Call& call, const Extra&... extra) {
    base::def("__init__", call, extra...);
    return *this;
  }
  template <class Call, class... Extra>
  alone& def(const char* name, const Call& call, const Extra&... extra) {
    base::def(name, guarded(call, &Call::operator()), extra...);
    return *this;
  }
  template <class Call, class... Extra>
  alone& def_prop_ro(const char* name, const Call& call, const Extra&... extra) {
    base::def_prop_ro(name, guarded(call, &Call::operator()), extra...);
    return *this;
  }

 private:
  template <class Call, class Result, class Self, class... Arguments>
  static auto guarded(const Call& call, Result (Call::*)(Self&, Arguments...) const) {
    return [call](Self& self, Arguments... arguments) -> Result {
      const auto in_use = self.begin_use();
      return call(self, std::forward<Arguments>(arguments)...);
    };
  }
};

}  // namespace lamina_python
