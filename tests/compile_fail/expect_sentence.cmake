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

include("${CMAKE_CURRENT_LIST_DIR}/flags.cmake")
list(APPEND flags -fsyntax-only)
foreach(compiler IN LISTS COMPILERS)
  set(included)
  if(PRECOMPILED)
    precompiled_header("${compiler}" header)
    set(included -include "${header}")  # each compiler takes the header's .gch for it
  endif()
  execute_process(COMMAND "${compiler}" ${flags} ${included} "${SOURCE}"
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${compiler}: what the sentence asks for does not compile:\n${error}")
  endif()
  execute_process(COMMAND "${compiler}" ${flags} -DLAMINA_SHOULD_FAIL ${included} "${SOURCE}"
    RESULT_VARIABLE status OUTPUT_QUIET ERROR_VARIABLE error)
  if(status EQUAL 0)
    message(FATAL_ERROR "${compiler}: compiles, where it should say: ${sentence}")
  endif()
  string(FIND "${error}" "${sentence}" position)
  if(position EQUAL -1)
    message(FATAL_ERROR "${compiler} does not say: ${sentence}\nbut:\n${error}")
  endif()
endforeach()
