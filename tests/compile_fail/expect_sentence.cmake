# SPDX-License-Identifier: MIT
# Checks that SOURCE compiles, and with LAMINA_SHOULD_FAIL does not and says the sentence of its line "// EXPECT: ".
file(READ "${SOURCE}" text)
if(NOT text MATCHES "// EXPECT: ([^\n]+)")
  message(FATAL_ERROR "${SOURCE} has no line \"// EXPECT: \"")
endif()
set(sentence "${CMAKE_MATCH_1}")
if(NOT text MATCHES "#ifdef LAMINA_SHOULD_FAIL\n")
  message(FATAL_ERROR "${SOURCE} has no line under LAMINA_SHOULD_FAIL")
endif()

set(flags -std=c++20 -fsyntax-only)
foreach(directory IN LISTS INCLUDE_DIRS)
  # -I /usr/include would hide the C headers of the compiler.
  if(NOT directory STREQUAL "/usr/include")
    list(APPEND flags "-I${directory}")
  endif()
endforeach()

foreach(compiler IN LISTS COMPILERS)
  execute_process(COMMAND "${compiler}" ${flags} "${SOURCE}"
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${compiler}: what the sentence asks for does not compile:\n${error}")
  endif()
  execute_process(COMMAND "${compiler}" ${flags} -DLAMINA_SHOULD_FAIL "${SOURCE}"
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  if(status EQUAL 0)
    message(FATAL_ERROR "${compiler}: compiles, where it should say: ${sentence}")
  endif()
  string(FIND "${error}" "${sentence}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "${compiler} does not say: ${sentence}\nbut:\n${error}")
  endif()
endforeach()
