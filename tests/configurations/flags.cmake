# SPDX-License-Identifier: MIT
# What the scripts share. They get COMPILERS, INCLUDE_DIR, SOURCE_DIR, OUTPUT_DIR and DEPENDENCIES, the directory of
# xxHash.
cmake_minimum_required(VERSION 3.22)
set(flags -std=c++20 "-I${INCLUDE_DIR}")
foreach(directory IN LISTS DEPENDENCIES)
  list(APPEND flags "-idirafter${directory}")
endforeach()
