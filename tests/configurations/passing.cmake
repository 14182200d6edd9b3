# SPDX-License-Identifier: MIT
# Passing an object of lamina's to a unit of another configuration does not link, and the linker names the namespaces.
include("${CMAKE_CURRENT_LIST_DIR}/flags.cmake")
list(APPEND flags -O0 -g0)
set(source "${SOURCE_DIR}/passing.cpp")

foreach(compiler IN LISTS COMPILERS)
  set(own "${OUTPUT_DIR}/passing_own.o")
  set(other "${OUTPUT_DIR}/passing_other.o")
  set(user "${OUTPUT_DIR}/passing_user.o")
  set(program "${OUTPUT_DIR}/passing")
  execute_process(COMMAND "${compiler}" ${flags} -c "${source}" -o "${own}" COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${compiler}" ${flags} -ffast-math -c "${source}" -o "${other}" COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${compiler}" ${flags} -DLAMINA_TEST_USER -c "${source}" -o "${user}" COMMAND_ERROR_IS_FATAL ANY)

  # One configuration: nothing else keeps it from linking.
  execute_process(COMMAND "${compiler}" "${user}" "${own}" -o "${program}" COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND "${program}" COMMAND_ERROR_IS_FATAL ANY)

  execute_process(COMMAND "${CMAKE_COMMAND}" -E env LC_ALL=C "${compiler}" "${user}" "${other}" -o "${program}"
    RESULT_VARIABLE status ERROR_VARIABLE error OUTPUT_VARIABLE error)
  if(status EQUAL 0)
    message(FATAL_ERROR "${compiler}: objects of two configurations are passed, and the linker says nothing")
  endif()
  foreach(missing IN ITEMS "layers_of\\(lamina::v[0-9_]+::layout const&\\)" "made_layout\\[abi:v[0-9_]+\\]\\(\\)"
                           "a_layout\\[abi:v[0-9_]+\\]")
    if(NOT error MATCHES "undefined [a-z ]*[`':]+ *${missing}")
      message(FATAL_ERROR "${compiler}: the linker does not miss ${missing}:\n${error}")
    endif()
  endforeach()
endforeach()
