# SPDX-License-Identifier: MIT
# The flags of both scripts, from INCLUDE_DIRS; and where COMPILER has what PRECOMPILED includes, in OUTPUT_DIR.
set(flags -std=c++20)
foreach(directory IN LISTS INCLUDE_DIRS)
  # -I /usr/include would hide the C headers of the compiler.
  if(NOT directory STREQUAL "/usr/include")
    list(APPEND flags "-I${directory}")
  endif()
endforeach()

function(precompiled_header compiler result)
  get_filename_component(compiler_name "${compiler}" NAME)
  get_filename_component(header_name "${PRECOMPILED}" NAME)
  set(${result} "${OUTPUT_DIR}/${compiler_name}/${header_name}" PARENT_SCOPE)
endfunction()
