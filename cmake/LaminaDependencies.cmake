# SPDX-License-Identifier: MIT
# The header that lamina needs: an include directory is all that it is. Used by the build and, installed with the package
# configuration, by consumers, which both look at LAMINA_MISSING. xxHash mostly comes without a CMake package of its own.
find_path(LAMINA_XXHASH_INCLUDE_DIR xxhash.h)
mark_as_advanced(LAMINA_XXHASH_INCLUDE_DIR)

set(LAMINA_DEPENDENCY_INCLUDE_DIRS)
set(LAMINA_MISSING)
if(LAMINA_XXHASH_INCLUDE_DIR)
  list(APPEND LAMINA_DEPENDENCY_INCLUDE_DIRS "${LAMINA_XXHASH_INCLUDE_DIR}")
else()
  set(LAMINA_MISSING "lamina needs xxhash.h, of the package libxxhash-dev, xxhash or xxHash; LAMINA_XXHASH_INCLUDE_DIR says where it is")
endif()
