// SPDX-License-Identifier: MIT
#pragma once

/// LAMINA_HOST_DEVICE stands before what a GPU runs as well; it is nothing to compilers other than nvcc.
/// LAMINA_ANY_CALLER stands before `template` where that is also made with types that only the host or only the device
/// knows, or calls constexpr functions, which need nvcc's --expt-relaxed-constexpr: it would warn of each.
/// LAMINA_CALLED stands before what is too long for a copy at each of its calls.
/// LAMINA_UNROLLED stands before a loop over an array that is to stay in a GPU's registers: where nvcc leaves the loop, it puts the
/// array into memory.
#if defined(__CUDACC__)
#define LAMINA_HOST_DEVICE __host__ __device__
#define LAMINA_ANY_CALLER _Pragma("nv_exec_check_disable")
#define LAMINA_CALLED __noinline__
#define LAMINA_UNROLLED _Pragma("unroll")
#else
#define LAMINA_HOST_DEVICE
#define LAMINA_ANY_CALLER
#define LAMINA_CALLED
#define LAMINA_UNROLLED
#endif
