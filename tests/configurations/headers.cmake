# SPDX-License-Identifier: MIT
# Every header has the name of the namespace, under conditions too: one that missed abi.hpp would lie in a namespace that
# is called LAMINA_ABI. And every header of the core compiles without exceptions and run-time types, by each compiler that is here.
include("${CMAKE_CURRENT_LIST_DIR}/flags.cmake")
list(GET COMPILERS 0 first_compiler)

# The adapters need their third party, which may want exceptions, as the channel over MPI and the hooks of torch do.
file(GLOB_RECURSE headers RELATIVE "${INCLUDE_DIR}" "${INCLUDE_DIR}/lamina/*.hpp")
list(FILTER headers EXCLUDE REGEX "/adapt/|/collectives/(mpi_channel|torch_hooks)\\.hpp$")
if(NOT CMAKE_HOST_SYSTEM_NAME STREQUAL "Linux")
  list(FILTER headers EXCLUDE REGEX "/udp/")
endif()
set(all)
foreach(header IN LISTS headers)
  if(NOT header MATCHES "/(collectives|udp)/")  # which carry exceptions from thread to thread
    string(APPEND all "#include <${header}>\n")
  endif()
  execute_process(COMMAND "${first_compiler}" ${flags} -DLAMINA_NO_SIMD -E -P -x c++ "${INCLUDE_DIR}/${header}"
    OUTPUT_VARIABLE text ERROR_VARIABLE error RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${header}:\n${error}")
  endif()
  if(text MATCHES "inline +LAMINA_ABI")
    message(FATAL_ERROR "${header} does not include lamina/detail/abi.hpp, or only under a condition")
  endif()
endforeach()

file(WRITE "${OUTPUT_DIR}/all_headers.cpp" "${all}")
foreach(compiler IN LISTS COMPILERS)
  execute_process(COMMAND "${compiler}" ${flags} -fno-exceptions -fno-rtti -Wall -Wextra -Wpedantic -Wshadow -Wconversion
      -Werror -fsyntax-only "${OUTPUT_DIR}/all_headers.cpp"
    ERROR_VARIABLE error RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${compiler} -fno-exceptions -fno-rtti:\n${error}")
  endif()
endforeach()
