# SPDX-License-Identifier: MIT
# cmake -D PROGRAM=COMMAND -D EXPECTED=FILE -P: whether the program prints the lines of the file. Shows those that differ.
cmake_minimum_required(VERSION 3.22)
execute_process(COMMAND ${PROGRAM} OUTPUT_VARIABLE printed COMMAND_ERROR_IS_FATAL ANY)
file(READ "${EXPECTED}" expected)
if(NOT printed STREQUAL expected)
  string(REPLACE "\n" ";" different "${printed}")
  string(REPLACE "\n" ";" lines "${expected}")
  list(REMOVE_ITEM different ${lines})
  list(JOIN different "\n" different)
  message(FATAL_ERROR "${PROGRAM} prints other lines than ${EXPECTED}, or not all of them:\n${different}")
endif()
