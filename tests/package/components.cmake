# SPDX-License-Identifier: MIT
# Builds and runs components/*.cpp, each with its lamina::COMPONENT of COMPONENTS, separated by commas: of the installed
# package or, as WAY says, of a subdirectory.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
if(WAY STREQUAL "add_subdirectory")
  set(options "-DLAMINA_SOURCE_DIR=${SOURCE_DIR}")
else()
  set(options "-DCMAKE_PREFIX_PATH=${PREFIX}")
endif()
configure("${CMAKE_CURRENT_LIST_DIR}/components" "${WORK_DIR}/build" "-DCOMPONENTS=${COMPONENTS}" ${options}
  -DCMAKE_EXPORT_COMPILE_COMMANDS=ON)
# What xtensor's package would add with one more target.
file(READ "${WORK_DIR}/build/compile_commands.json" commands)
if(commands MATCHES "-march=[^ ]*|XTENSOR_USE_[A-Z]*")
  message(FATAL_ERROR "a component of lamina brings ${CMAKE_MATCH_0}:\n${commands}")
endif()
# Of a subdirectory one is enough, whose sources are those of the package: what differs is the configuration.
string(REPLACE "," ";" COMPONENTS "${COMPONENTS}")
if(WAY STREQUAL "add_subdirectory")
  list(GET COMPONENTS -1 COMPONENTS)
endif()
list(TRANSFORM COMPONENTS PREPEND use_ OUTPUT_VARIABLE programs)
run("${CMAKE_COMMAND}" --build "${WORK_DIR}/build" --target ${programs})
foreach(component IN LISTS COMPONENTS)
  run("${WORK_DIR}/build/use_${component}")
  expect_equal("what use_${component} prints" "${output}" "1280\n")
endforeach()
