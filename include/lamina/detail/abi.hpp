// SPDX-License-Identifier: MIT
#pragma once

// g++ 12 and clang 14 default to C++17, in which thousands of errors would follow: the include that is not there ends it at once.
#if defined(__cplusplus) && __cplusplus <= 201703L && (!defined(_MSVC_LANG) || _MSVC_LANG <= 201703L)
#error "lamina needs C++20: compile with -std=c++20, or target_link_libraries(... lamina::lamina)"
#include "lamina needs C++20"
#endif

#include <version>  // names the standard library

#include "lamina/version.hpp"

/// All of lamina lies in an inline namespace, LAMINA_ABI, whose name carries what changes a class or the code of a function:
/// the version, LAMINA_NO_SIMD, xxHash where it is used, exceptions, -ffast-math, the standard library and the instruction set.
/// One program may then hold several configurations, and two versions: their functions have different names, so that the
/// linker cannot put one in the place of the other. An object of one configuration that is passed to another is an error of
/// the linker, and no crash. docs/guide/many-machines.md has the names, and
/// docs/decisions/0011-one-namespace-a-configuration.md the reasons.
///
/// LAMINA_ABI_TAG, defined before the first header of lamina, is one more piece of the name: for what is not in it, such as
/// two versions of xxHash, or flags of a single machine.

#if defined(__cpp_exceptions) || defined(_CPPUNWIND)
#define LAMINA_HAS_EXCEPTIONS 1
#else
#define LAMINA_HAS_EXCEPTIONS 0
#endif

// Each of these is a piece of the name, or nothing.
#if defined(LAMINA_NO_SIMD)
#define LAMINA_ABI_REGISTERS _nosimd
#else
#define LAMINA_ABI_REGISTERS
#endif
#if !defined(LAMINA_NO_XXHASH) && __has_include(<xxhash.h>)
#define LAMINA_ABI_XXHASH _xxhash
#else
#define LAMINA_ABI_XXHASH
#endif
#if LAMINA_HAS_EXCEPTIONS
#define LAMINA_ABI_ERRORS
#else
#define LAMINA_ABI_ERRORS _noexceptions
#endif
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#define LAMINA_ABI_MATH _fastmath
#else
#define LAMINA_ABI_MATH
#endif
// Its vectors and strings are members of lamina's classes.
#if defined(_LIBCPP_VERSION)
#define LAMINA_ABI_STANDARD _libcxx
#elif defined(_GLIBCXX_USE_CXX11_ABI) && !_GLIBCXX_USE_CXX11_ABI
#define LAMINA_ABI_STANDARD _oldstrings
#else
#define LAMINA_ABI_STANDARD
#endif
#if defined(_GLIBCXX_DEBUG)
#define LAMINA_ABI_DEBUG _debug
#else
#define LAMINA_ABI_DEBUG
#endif
#if !defined(LAMINA_ABI_TAG)
#define LAMINA_ABI_TAG
#endif

// The levels of the x86-64 psABI, and what lies between them.
#if defined(__AVX2__) && defined(__BMI__) && defined(__BMI2__) && defined(__F16C__) && defined(__FMA__) && \
    defined(__LZCNT__) && defined(__MOVBE__)
#define LAMINA_ABI_REACHES_V3 1
#else
#define LAMINA_ABI_REACHES_V3 0
#endif
#if LAMINA_ABI_REACHES_V3 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512CD__) && \
    defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LAMINA_ABI_REACHES_V4 1
#else
#define LAMINA_ABI_REACHES_V4 0
#endif
// Each of these has all that stand below it.
#if LAMINA_ABI_REACHES_V4
#define LAMINA_ABI_LEVEL _v4
#elif LAMINA_ABI_REACHES_V3 && defined(__AVX512F__)
#define LAMINA_ABI_LEVEL _v3_avx512f
#elif defined(__AVX512F__)
#define LAMINA_ABI_LEVEL _avx512f
#elif LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_LEVEL _v3
#elif defined(__AVX2__)
#define LAMINA_ABI_LEVEL _avx2
#elif defined(__AVX__)
#define LAMINA_ABI_LEVEL _avx
#elif defined(__SSE4_2__)
#define LAMINA_ABI_LEVEL _v2
#elif defined(__SSE4_1__)
#define LAMINA_ABI_LEVEL _sse41
#elif defined(__SSSE3__)
#define LAMINA_ABI_LEVEL _ssse3
#elif defined(__SSE3__)
#define LAMINA_ABI_LEVEL _sse3
#elif defined(__ARM_FEATURE_SVE2)
#define LAMINA_ABI_LEVEL _sve2
#elif defined(__ARM_FEATURE_SVE)
#define LAMINA_ABI_LEVEL _sve
#else
#define LAMINA_ABI_LEVEL
#endif

// Part of v2, and of what compilers switch on with SSE4.2.
#if defined(__SSE4_2__) && !defined(__POPCNT__)
#define LAMINA_ABI_POPCNT _nopopcnt
#elif !defined(__SSE4_2__) && defined(__POPCNT__)
#define LAMINA_ABI_POPCNT _popcnt
#else
#define LAMINA_ABI_POPCNT
#endif
// Part of v3, and named below it, one by one.
#if defined(__FMA__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_FMA _fma
#else
#define LAMINA_ABI_FMA
#endif
#if defined(__F16C__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_F16C _f16c
#else
#define LAMINA_ABI_F16C
#endif
#if defined(__BMI__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_BMI _bmi
#else
#define LAMINA_ABI_BMI
#endif
#if defined(__BMI2__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_BMI2 _bmi2
#else
#define LAMINA_ABI_BMI2
#endif
#if defined(__LZCNT__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_LZCNT _lzcnt
#else
#define LAMINA_ABI_LZCNT
#endif
#if defined(__MOVBE__) && !LAMINA_ABI_REACHES_V3
#define LAMINA_ABI_MOVBE _movbe
#else
#define LAMINA_ABI_MOVBE
#endif
// Part of v4, likewise.
#if defined(__AVX512CD__) && !LAMINA_ABI_REACHES_V4
#define LAMINA_ABI_AVX512CD _cd
#else
#define LAMINA_ABI_AVX512CD
#endif
#if defined(__AVX512BW__) && !LAMINA_ABI_REACHES_V4
#define LAMINA_ABI_AVX512BW _bw
#else
#define LAMINA_ABI_AVX512BW
#endif
#if defined(__AVX512DQ__) && !LAMINA_ABI_REACHES_V4
#define LAMINA_ABI_AVX512DQ _dq
#else
#define LAMINA_ABI_AVX512DQ
#endif
#if defined(__AVX512VL__) && !LAMINA_ABI_REACHES_V4
#define LAMINA_ABI_AVX512VL _vl
#else
#define LAMINA_ABI_AVX512VL
#endif

// Of no level.
#if defined(__FMA4__)
#define LAMINA_ABI_FMA4 _fma4
#else
#define LAMINA_ABI_FMA4
#endif
// Beyond v3 and v4: Ice Lake, Cannon Lake, Cascade Lake, Alder Lake; Sapphire Rapids, Cooper Lake.
#if defined(__AVX512VBMI2__) || defined(__AVX512BITALG__) || defined(__AVX512VPOPCNTDQ__)
#define LAMINA_ABI_INTEGERS _vbmi2
#elif defined(__AVX512VBMI__) || defined(__AVX512IFMA__)
#define LAMINA_ABI_INTEGERS _vbmi
#elif defined(__AVX512VNNI__)
#define LAMINA_ABI_INTEGERS _vnni
#elif defined(__AVXVNNI__)
#define LAMINA_ABI_INTEGERS _avxvnni
#else
#define LAMINA_ABI_INTEGERS
#endif
#if defined(__AVX512FP16__)
#define LAMINA_ABI_HALVES _fp16
#elif defined(__AVX512BF16__)
#define LAMINA_ABI_HALVES _bf16
#else
#define LAMINA_ABI_HALVES
#endif

#define LAMINA_ABI_PASTE(major, minor, patch, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, \
                         tag)                                                                                \
  v##major##_##minor##_##patch##a##b##c##d##e##f##g##h##i##j##k##l##m##n##o##p##q##r##s##t##u##tag
#define LAMINA_ABI_JOIN(...) LAMINA_ABI_PASTE(__VA_ARGS__)
#define LAMINA_ABI                                                                                          \
  LAMINA_ABI_JOIN(LAMINA_VERSION_MAJOR, LAMINA_VERSION_MINOR, LAMINA_VERSION_PATCH, LAMINA_ABI_REGISTERS,   \
                  LAMINA_ABI_XXHASH, LAMINA_ABI_ERRORS, LAMINA_ABI_MATH, LAMINA_ABI_STANDARD,               \
                  LAMINA_ABI_DEBUG, LAMINA_ABI_LEVEL, LAMINA_ABI_POPCNT, LAMINA_ABI_FMA, LAMINA_ABI_F16C,   \
                  LAMINA_ABI_BMI, LAMINA_ABI_BMI2, LAMINA_ABI_LZCNT, LAMINA_ABI_MOVBE, LAMINA_ABI_AVX512CD, \
                  LAMINA_ABI_AVX512BW, LAMINA_ABI_AVX512DQ, LAMINA_ABI_AVX512VL, LAMINA_ABI_FMA4,           \
                  LAMINA_ABI_INTEGERS, LAMINA_ABI_HALVES, LAMINA_ABI_TAG)

// A function's name has the types of its parameters and not the one it returns, and a variable's has none: with this
// attribute the name of what returns or is something of lamina's carries the configuration, too.
#if defined(__GNUC__)
namespace lamina {
inline namespace LAMINA_ABI __attribute__((__abi_tag__)) {}
}  // namespace lamina
#endif
