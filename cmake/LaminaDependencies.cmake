# SPDX-License-Identifier: MIT
# The headers that lamina uses where they are installed: one include directory is all that each of them is. Used by the
# build and, installed beside the package configuration, by consumers.
#
# Their own CMake packages are not used: Debian's xsimd 8.1 exports a target that links a library which does not exist,
# the target's name differs between versions, and xxHash mostly comes without one.
find_path(LAMINA_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp)
find_path(LAMINA_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(LAMINA_XSIMD_INCLUDE_DIR LAMINA_XXHASH_INCLUDE_DIR)

set(LAMINA_DEPENDENCY_INCLUDE_DIRS)
if(LAMINA_XSIMD_INCLUDE_DIR)
  list(APPEND LAMINA_DEPENDENCY_INCLUDE_DIRS "${LAMINA_XSIMD_INCLUDE_DIR}")
else()
  message(STATUS "lamina: xsimd not found, the kernels are plain loops")
endif()
if(LAMINA_XXHASH_INCLUDE_DIR)
  list(APPEND LAMINA_DEPENDENCY_INCLUDE_DIRS "${LAMINA_XXHASH_INCLUDE_DIR}")
else()
  message(STATUS "lamina: xxhash.h not found, frames are written without a checksum")
endif()
