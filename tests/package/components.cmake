# SPDX-License-Identifier: MIT
# Builds and runs components/COMPONENT.cpp with lamina::COMPONENT, of the installed package or, as WAY says, of a
# subdirectory.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
if(WAY STREQUAL "add_subdirectory")
  set(options "-DLAMINA_SOURCE_DIR=${SOURCE_DIR}")
else()
  set(options "-DCMAKE_PREFIX_PATH=${PREFIX}")
endif()
configure("${CMAKE_CURRENT_LIST_DIR}/components" "${WORK_DIR}/build" "-DCOMPONENTS=${COMPONENT}" ${options}
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
# What xtensor's package would add with one more target.
file(READ "${WORK_DIR}/build/compile_commands.json" commands)
if(commands MATCHES "-march=[^ ]*|XTENSOR_USE_[A-Z]*")
  message(FATAL_ERROR "lamina::${COMPONENT} brings ${CMAKE_MATCH_0}")
endif()
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build")
run("${WORK_DIR}/build/use_${COMPONENT}")
expect_equal("what use_${COMPONENT} prints" "${output}" "1280\n")
