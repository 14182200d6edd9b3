// SPDX-License-Identifier: MIT
#pragma once

// What must not compile, and what its sentence asks for, which must, so that nothing fails for another reason.
#ifdef LAMINA_SHOULD_FAIL
#define LAMINA_REFUSED(...) __VA_ARGS__
#define LAMINA_WANTED(...)
#else
#define LAMINA_REFUSED(...)
#define LAMINA_WANTED(...) __VA_ARGS__
#endif
