// SPDX-License-Identifier: MIT
#pragma once

// g++ 12 and clang 14 default to C++17, in which thousands of errors would follow: the include that is not there ends it at once.
#if defined(__cplusplus) && __cplusplus <= 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG <= 201703L)
#error "lamina needs C++20: compile with -std=c++20, or target_link_libraries(... lamina::lamina)"
#include "lamina needs C++20"
#endif

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "lamina/version.hpp"

/// All of lamina lies in an inline namespace, LAMINA_ABI, whose name carries what changes the code of a function: the version,
/// LAMINA_NO_SIMD, exceptions, -ffast-math and the level of the instruction set. One program may then hold several configurations, and two
/// versions: their functions have different names, and an object of one that is passed to another is an error of the linker, and no crash.
/// LAMINA_ABI_TAG, defined before the first header of lamina, is one more piece of the name: for what is not in it, such as two versions of
/// xxHash, two standard libraries, or two sets of flags within one level.

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define LAMINA_HAS_EXCEPTIONS 1
#define LAMINA_ABI_ERRORS
#else
#define LAMINA_HAS_EXCEPTIONS 0
#define LAMINA_ABI_ERRORS _noexceptions
#endif
#if defined(LAMINA_NO_SIMD)
#define LAMINA_ABI_REGISTERS _nosimd
#else
#define LAMINA_ABI_REGISTERS
#endif
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#define LAMINA_ABI_MATH _fastmath
#else
#define LAMINA_ABI_MATH
#endif
// The levels of the x86-64 psABI, of which the first has no name. What lies between two levels has the name of the higher one, so that a
// unit of the lower level never gets its code.
#if defined(__AVX512F__)
#define LAMINA_ABI_LEVEL _v4
#elif defined(__AVX__) || defined(__FMA__) || defined(__F16C__) || defined(__BMI__) || defined(__BMI2__) || \
    defined(__LZCNT__) || defined(__MOVBE__)
#define LAMINA_ABI_LEVEL _v3
#elif defined(__SSE3__) || defined(__POPCNT__)
#define LAMINA_ABI_LEVEL _v2
#elif defined(__ARM_FEATURE_SVE)
#define LAMINA_ABI_LEVEL _sve
#else
#define LAMINA_ABI_LEVEL
#endif
#if !defined(LAMINA_ABI_TAG)
#define LAMINA_ABI_TAG
#endif

#define LAMINA_ABI_PASTE(major, minor, patch, registers, errors, math, level, tag) \
  v##major##_##minor##_##patch##registers##errors##math##level##tag
#define LAMINA_ABI_JOIN(...) LAMINA_ABI_PASTE(__VA_ARGS__)
#define LAMINA_ABI                                                                                        \
  LAMINA_ABI_JOIN(LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR, LAMINA_VERSION_PATCH, LAMINA_ABI_REGISTERS, \
                  LAMINA_ABI_ERRORS, LAMINA_ABI_MATH, LAMINA_ABI_LEVEL, LAMINA_ABI_TAG)

/// LAMINA_HOST_DEVICE stands before what a GPU runs as well; it is nothing to compilers other than nvcc.
/// LAMINA_ANY_CALLER stands before `template` where that is also made with types that only the host or only the device knows, or calls
/// constexpr functions, which need nvcc's --expt-relaxed-constexpr: it would warn of each.
#if defined(__CUDACC__)
#define LAMINA_HOST_DEVICE __host__ __device__
#define LAMINA_ANY_CALLER _Pragma("nv_exec_check_disable")
#else
#define LAMINA_HOST_DEVICE
#define LAMINA_ANY_CALLER
#endif

/// What all shared objects of a process must agree on, also those that are compiled with -fvisibility=hidden: exceptions, so that one
/// thrown in a shared object is caught in another, and the categories of error codes, which are compared by address.
#if defined(__GNUC__) && !defined(_WIN32)
#define LAMINA_VISIBLE __attribute__((visibility("default")))
#else
#define LAMINA_VISIBLE
#endif

// x87 registers round otherwise, and when they are spilled. 16 is of _Float16 alone; below 0, as clang says with -ffast-math, is not known.
static_assert(FLT_EVAL_METHOD <= 0 || FLT_EVAL_METHOD == 16,
              "lamina needs float and double to be rounded to their type: compile with -msse2 -mfpmath=sse");

// A function's name has the types of its parameters and not the one it returns, and a variable's has none: with this
// attribute the name of what returns or is something of lamina's carries the configuration, too.
#if defined(__GNUC__)
namespace lamina {
inline namespace LAMINA_ABI __attribute__((__abi_tag__)) {}
}  // namespace lamina
#endif

namespace lamina::inline LAMINA_ABI::detail {

/// What representative.hpp cuts a tensor into, how many sums a block has, and how many totals are combined one after the other.
inline constexpr std::size_t block_elements = 4096;
inline constexpr std::size_t lanes = 64;
inline constexpr std::size_t totals_per_run = 64;

}  // namespace lamina::inline LAMINA_ABI::detail
