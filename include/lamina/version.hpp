// SPDX-License-Identifier: MIT
#pragma once

/// The version of the library, and the only place where it stands: CMake and the package files read it here.
#define LAMINA_VERSION_MAJOR 0
#define LAMINA_VERSION_MINOR 1
#define LAMINA_VERSION_PATCH 0
