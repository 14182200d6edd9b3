# SPDX-License-Identifier: MIT
# The header that lamina uses where it is installed: an include directory is all that it is. Used by the build and,
# installed beside the package configuration, by consumers. xxHash mostly comes without a CMake package of its own.
find_path(LAMINA_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(LAMINA_XXHASH_INCLUDE_DIR)

set(LAMINA_DEPENDENCY_INCLUDE_DIRS)
if(LAMINA_XXHASH_INCLUDE_DIR)
  list(APPEND LAMINA_DEPENDENCY_INCLUDE_DIRS "${LAMINA_XXHASH_INCLUDE_DIR}")
else()
  message(STATUS "lamina: xxhash.h not found, frames are written without a checksum")
endif()
