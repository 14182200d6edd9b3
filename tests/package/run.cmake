# SPDX-License-Identifier: MIT
# Shared by the scripts of these tests. All get:
#   SOURCE_DIR, BUILD_DIR  of lamina
#   PREFIX                 where package.install installed it
#   WORK_DIR               this test's own, emptied here
#   CXX_COMPILER, GENERATOR, VERSION
cmake_minimum_required(VERSION 3.22)
file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${WORK_DIR}")
# Flags of the caller's environment would be taken for lamina's.
unset(ENV{CXXFLAGS})
unset(ENV{LDFLAGS})

# Ends the test unless the command succeeds; sets output.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    list(JOIN ARGV " " command)
    message(FATAL_ERROR "${command}\nended with ${status}:\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# Ends the test unless the command fails with an output that matches.
function(run_refused expected)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " text "${output}")  # CMake breaks the lines of its messages
  if(status EQUAL 0 OR NOT text MATCHES "${expected}")
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}\nended with ${status}, expected an error with '${expected}':\n${output}")
  endif()
endfunction()

function(expect_equal what actual expected)
  if(NOT "${actual}" STREQUAL "${expected}")
    message(FATAL_ERROR "${what} is '${actual}', expected '${expected}'")
  endif()
endfunction()

function(expect_match what actual expected)
  if(NOT "${actual}" MATCHES "${expected}")
    message(FATAL_ERROR "${what} is '${actual}', expected '${expected}'")
  endif()
endfunction()

# configure(source build options...): of a consumer, with the compiler of these tests and no build type.
set(configure "${CMAKE_COMMAND}" -G "${GENERATOR}" "-DCMAKE_CXX_COMPILER=${CXX_COMPILER}")
macro(configure source build)
  run(${configure} -S "${source}" -B "${build}" ${ARGN})
endmacro()
