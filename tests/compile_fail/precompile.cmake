# SPDX-License-Identifier: MIT
# Precompiles PRECOMPILED by each of COMPILERS, since most of what a case takes is to read headers.
include("${CMAKE_CURRENT_LIST_DIR}/flags.cmake")
foreach(compiler IN LISTS COMPILERS)
  precompiled_header("${compiler}" header)
  get_filename_component(directory "${header}" DIRECTORY)
  file(MAKE_DIRECTORY "${directory}")
  execute_process(COMMAND "${compiler}" ${flags} -x c++-header "${PRECOMPILED}" -o "${header}.gch"
    RESULT_VARIABLE status ERROR_VARIABLE error)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${compiler}: ${PRECOMPILED} does not compile:\n${error}")
  endif()
endforeach()
