// SPDX-License-Identifier: MIT
#pragma once

/// What all shared objects of a process must agree on, also those that are compiled with -fvisibility=hidden: exceptions,
/// so that one thrown in a shared object is caught in another, and the categories of error codes, which are compared by
/// address.
#if defined(__GNUC__) && !defined(_WIN32)
#define LAMINA_VISIBLE __attribute__((visibility("default")))
#else
#define LAMINA_VISIBLE
#endif
